"""List the keys of config.json that are read for every family, and those that change no model."""

from types import MappingProxyType

COMMON_KEYS = frozenset(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act dtype "
    "torch_dtype rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings "
    "layer_types bos_token_id eos_token_id pretraining_tp quantization_config compression_config".split()
)

HARMLESS_KEYS = frozenset(
    # training, bookkeeping and defaults of generate(): none of them changes the logits
    "initializer_range use_cache attention_dropout hidden_dropout resid_pdrop embd_pdrop transformers_version "
    "pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id name_or_path tokenizer_class "
    "task_specific_params finetuning_task problem_type id2label label2id num_labels return_dict pruned_heads "
    "return_dict_in_generate output_attentions output_hidden_states output_scores torchscript use_bfloat16 prefix "
    "gradient_checkpointing auto_map attn_implementation model_name is_decoder chunk_size_feed_forward max_length "
    "min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p "
    "typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty "
    # of another kind of norm, and of the loss of a mixture of experts
    "layer_norm_eps layer_norm_epsilon output_router_logits".split()
)

SAME_VALUES = MappingProxyType(
    {
        **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len"), "max_position_embeddings"),
        **dict.fromkeys(("n_embd", "d_model", "dim", "n_embed"), "hidden_size"),
        **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
        **dict.fromkeys(("n_head", "n_heads", "num_heads"), "num_attention_heads"),
        **dict.fromkeys(("n_kv_heads", "num_kv_heads", "n_head_kv"), "num_key_value_heads"),
        **dict.fromkeys(("n_inner", "ffn_hidden_size", "ffn_dim"), "intermediate_size"),
        **dict.fromkeys(("norm_eps", "rms_eps"), "rms_norm_eps"),
        **dict.fromkeys(("rotary_dim", "head_size"), "head_dim"),
        **dict.fromkeys(("rope_base", "rotary_base"), "rope_theta"),
    }
)
"""Other names of keys that are read. They change nothing where they repeat the key's value."""
