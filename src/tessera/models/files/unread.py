"""Sort the keys of a model's files into those that are known, those that may change the mathematics, and the others.

Configs carry notes of training scripts and converters, a set that grows with each release. A key is taken to concern
the mathematics by the words of its name, at any depth.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.core.escapes import escaped

COMMON_KEYS = frozenset(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act dtype "
    "torch_dtype rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings "
    "layer_types bos_token_id eos_token_id pretraining_tp quantization_config compression_config".split()
)
"""Keys of config.json that are read for every family."""

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
"""Keys of config.json that change no model."""

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

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""One word of a key, in snake_case, camelCase or with dots."""
MATHS = re.compile(
    r"rope|rotary|rot|mrope|yarn|ntk|alibi|theta|attn|attention|attentions|qk|qkv|kv|query|\w*norm\w*|\w*scal\w*|"
    r"factor|soft\w*|cap|capping|clip|clamp|window|windows|sliding|swa|bias|biases|act|activation|activations|\w+glu|relu|"
    r"gelu|silu|expert|experts|moe|router|routing|gate|gated|gating|mlp|ffn|ff|feed|head|heads|hidden|intermediate|layer|"
    r"layers|embed\w*|emb|mult|multiplier|multipliers|residual\w*|logit|logits|position|positions|positional|pos|"
    r"quant\w*|compress\w*|spars\w*|sink|sinks|mask|bidirectional|conv|ssm|mamba|mup|depth|width|dim|dims|tie|tied|"
    r"temperature|interleaved?|section|sections"
)
"""Words of keys that may change the logits."""
HARMLESS = re.compile(
    r"dropout|pdrop|drop|layerdrop|initializer|init|loss|coef|grad|gradient|lr|flash|fused|implementation|checkpoint|"
    r"checkpointing|dtype|id|ids|index"
)
"""Words of keys that concern training or speed, whatever else the name says, unless it speaks of quantisation."""
FACTORS = re.compile(r"mult|multiplier|multipliers|\w*scal\w*|factor|pct|ratio")
"""Words of keys that have no effect at 1."""
NEEDED = re.compile(
    r"((use|enable|is|has|apply)_?)?(causal|rope|rotary(_pos)?(_emb\w*)?|rms_?norm|gated_(mlp|ffn)|glu|scale_attn(_weights)?)"
)
"""Keys that name what the supported models do, so that they must be true."""
ROTATED = re.compile(r"rotary_(dim|dims|ndims|pct|percent|percentage|fraction)")
"""Keys that say how much of a head rotates: 0 does not switch off an addition, but the rotation itself."""
UNROTATED = ("no_rope_layers", "no_rope_layer_interval")
"""Keys about layers without rotary embedding. In SmolLM3's list, 0 is such a layer, so that no value but [] is off."""
ACTIVATIONS, NORMS = ("silu", "swish", "swiglu"), ("rmsnorm", "rms")
USUAL = {
    **dict.fromkeys(("position_embedding_type", "position_encoding_type", "pos_emb"), ("rope", "rotary")),
    **dict.fromkeys(("normalization", "normalization_type", "norm_type", "norm"), NORMS),
    **dict.fromkeys(("activation", "activation_fn", "activation_function", "hidden_activation"), ACTIVATIONS),
}
"""Keys with text values that name what the supported models do, with these values in lower case."""


def changes_model(key: str, value: Any) -> str | None:
    """Return the name of the key, or of a key inside its value, that may change the model's mathematics; else None."""
    words = [word.lower() for word in WORDS.findall(key)]
    if NEEDED.fullmatch(key.lower()) and (value is True or (value is not None and _is_off(value, words))):
        return None if value is True or value == {} or value == [] else key
    if ROTATED.fullmatch(key.lower()) and value == 0:
        return key
    if key in UNROTATED and value is not None and value != []:
        return key
    if key in USUAL and isinstance(value, str) and value:
        return None if value.lower().replace("_", "") in USUAL[key] else key
    if not _is_off(value, words) and _concerns_maths(words):
        return key
    return next((f"{key}.{found}" for name, inner in _inside(value) if (found := changes_model(name, inner))), None)


def ignoring(keys: list[str]) -> str:
    names = escaped(", ".join(sorted(keys)), 300)
    return f"ignoring {names} (unknown, and not about the model's mathematics by name)" if keys else ""


def _concerns_maths(words: list[str]) -> bool:
    if any(word.startswith("quant") for word in words):
        return True
    return any(map(MATHS.fullmatch, words)) and not any(map(HARMLESS.fullmatch, words))


def _is_off(value: Any, words: list[str]) -> bool:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return all(_is_off(item, words) for item in value)
    if isinstance(value, str):
        return value.lower() in ("", "none", "null", "false", "off", "disabled", "default")
    if isinstance(value, Mapping):
        return not value
    return value is None or value == 0 or (value == 1 and any(map(FACTORS.fullmatch, words)) and value is not True)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _inside(item)
