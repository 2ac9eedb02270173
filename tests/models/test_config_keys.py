"""Keys of config.json: unknown ones are refused if they may change the model; keys of YaRN extend the context."""

import json
import re
import shutil
from pathlib import Path

import pytest

import tessera
from tessera.models.files.families import parse_config, render_config, unread_keys
from tessera.runtime.requests import check_tokens

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "original_max_position_embeddings": 32768}
SMOLLM2 = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}
VICUNA = {"max_sequence_length": 16384, "rope_scaling": {"type": "linear", "factor": 4.0}, "neftune_noise_alpha": 5}


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        (SMOLLM2, ["is_llama_config", "transformers.js_config"]),
        (VICUNA, ["max_sequence_length", "neftune_noise_alpha"]),
        ({"model_max_length": 4096, "max_grad_norm": 1.0, "mask_token_id": 3}, None),
        ({"use_flash_attention": True, "attention_probs_dropout": 0.1, "router_aux_loss_coef": 0.01}, None),
        ({"alibi": False, "num_experts": 0, "attn_logit_softcapping": None, "residual_multiplier": 1.0}, None),
        ({"position_embedding_type": "rope", "norm_type": "RMSNorm", "is_causal": True, "layer_norm_eps": 1e-5}, None),
        ({"sliding_window": 4096, "max_window_layers": 21, "use_sliding_window": False}, None),
        ({"activation": "swiglu", "activation_fn": "silu", "pos_emb": "rotary", "norm": "rms_norm"}, None),  # Falcon3
        ({"n_layer": 2, "num_layers": 2, "n_head": 4, "n_heads": 4, "n_embd": 32, "d_model": 32}, []),
        ({"norm_eps": 1e-5, "rms_norm_eps": 1e-5, "n_positions": 64, "max_position_embeddings": 64}, []),
        ({"use_rotary_embeddings": True, "rope": None, "scale_attn_weights": True, "use_gated_mlp": True}, None),
        ({"rotary_pct": 1.0, "rotary_dim": 8, "head_dim": 8, "no_rope_layers": [], "use_glu": True}, None),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, []),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True, "attn_factor": 1.0}}, []),
        ({"rope_parameters": {"rope_type": "default", "factor": 1.0, "original_max_position_embeddings": 64}}, []),
    ],
)
def test_unknown_keys_that_change_nothing_are_noted(keys, noted):
    parse_config(LLAMA | keys)
    if noted is not None:
        assert unread_keys(LLAMA | keys) == noted


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 2.0) for key in ("residual_multiplier", "logits_scaling", "attention_multiplier", "scale_emb")),
        *((key, True) for key in ("use_qk_norm", "qk_layernorm", "parallel_attn", "multi_query", "alibi", "lm_bias")),
        *((key, False) for key in ("is_causal", "use_rope")),
        *((key, 8) for key in ("num_local_experts", "attention.sliding_window", "ropeBase", "clip_qkv", "kv_channels")),
        ("quantization", {"group_size": 64, "bits": 4}),
        ("quant_dtype", "int8"),
        ("position_embedding_type", "alibi"),
        *((key, [0, 0]) for key in ("no_rope_layers", "no_rope_layer_interval")),
        *((key, False) for key in ("use_rotary_embeddings", "rope", "scale_attn_weights", "use_gated_mlp", "glu")),
        *((key, 0) for key in ("rotary_dim", "rotary_pct", "use_rotary")),
        *((key, "none") for key in ("position_embedding_type", "normalization", "activation")),
        *((key, 5) for key in ("n_layer", "num_layers", "n_head", "rotary_dim", "n_positions")),
        ("norm_eps", 1e-3),
        ("no_rope_layers", [1, 1, 0]),
        ("mlp", {"activation": "relu2"}),
        ("text_config", {"sub": [{"query_pre_attn_scalar": 256}]}),
    ],
)
def test_unknown_keys_that_may_change_the_mathematics_are_refused(key, value):
    with pytest.raises(ValueError, match=re.escape(f"{key}=") + ".* is not supported.*: remove it from config.json"):
        parse_config(LLAMA | {key: value})


FULL, SLIDING = {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 1e4}


def test_rope_parameters_per_kind_of_layer():
    both = {"full_attention": FULL, "sliding_attention": SLIDING}
    assert parse_config(LLAMA | {"rope_parameters": {"full_attention": FULL}}).rope.theta == 5e5
    assert parse_config(LLAMA | {"rope_parameters": both, "layer_types": ["full_attention"] * 2}).rope.theta == 5e5
    with pytest.raises(ValueError, match="all layers must have the same ones"):
        parse_config(LLAMA | {"rope_parameters": both})


def test_dual_chunk_attention_names_the_context_without_it():
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    with pytest.raises(ValueError, match="more than 262144 tokens: .*remove it and set max_position_embeddings=262144"):
        parse_config(LLAMA | {"dual_chunk_attention_config": chunks})


def test_ignored_keys_are_logged_once(tmp_path, caplog):
    folder = shutil.copytree(GOLDEN / "llama3", tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SMOLLM2))
    caplog.set_level("INFO")
    tessera.load(folder)
    [line] = [record.getMessage() for record in caplog.records if "ignoring" in record.getMessage()]
    assert line.startswith(f"{folder}/config.json: ignoring is_llama_config, transformers.js_config (unknown")


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"max_position_embeddings": 32768, "rope_scaling": {**YARN, "factor": 4.0}}, 131072),  # Qwen's recipe
        ({"max_position_embeddings": 40960, "rope_parameters": {**YARN, "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {**YARN, "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 262144, "rope_scaling": {**YARN, "factor": 4.0}}, 262144),
        ({"max_position_embeddings": 65536, "rope_scaling": YARN}, 65536),  # the factor follows
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 2.5}}, 1280),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 131072),
        ({"max_position_embeddings": 4096, **VICUNA}, 16384),
        ({"max_position_embeddings": 16384, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {**YARN, "type": "linear", "factor": 2.0}}, 65536),
    ],
)
def test_contexts_that_rope_scaling_extends(fields, context):
    config = parse_config(LLAMA | fields)
    assert config.max_positions == context
    assert parse_config(render_config(config, "float32")) == config
    with pytest.raises(
        ValueError, match=rf"context is {context}: .*max_position_embeddings in config.json.*YaRN's factor"
    ):
        check_tokens(range(context + 1), config, "the prompt")


def test_a_context_past_all_sizes_is_refused():
    with pytest.raises(ValueError, match=r"factor x original_max_position_embeddings in the rope parameters"):
        parse_config(LLAMA | {"rope_scaling": {**YARN, "factor": 1e6}})
