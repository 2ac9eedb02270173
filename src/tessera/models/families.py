"""Hugging Face configs of the supported families: read into a ModelConfig or refused by name, and written back.

Every config key is read, known to be harmless, set to a value that switches its feature off, or refused; none is
ignored. A new family takes one entry in FAMILIES if its decoder differs only by switches that ModelConfig has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tessera.core.escapes import escaped, quoted
from tessera.models.config import MAX_SIZE, ModelConfig, Rope

Raw = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face.

    Attributes:
        architecture: the class name in the config's `architectures`.
        max_positions: default of `max_position_embeddings`.
        keys: family-specific keys, which `switches` reads.
        switches: config -> the ModelConfig fields that define this family.
        head_dim: default of `head_dim`; None is hidden_size / num_attention_heads.
    """

    architecture: str
    max_positions: int
    keys: tuple[str, ...]
    switches: Callable[[Raw], dict[str, Any]]
    head_dim: int | None = None


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
    "begin_suppress_tokens exponential_decay_length_penalty".split()
)

MAX_REAL = 2.0**127
"""Bound of every other number: float32 holds it."""
MAX_LAYERS = 1 << 16
"""Maximum layers: ten times what the largest models have. A list of 2 ** 31 would fill the memory."""

ROPE_KINDS = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "llama3": frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        ),
        "yarn": frozenset(
            "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
            "truncate".split()
        ),
    }
)
"""Implemented rotary embeddings, each with the parameters it takes."""


def _llama(raw: Raw) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias"))
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": bool(raw.get("mlp_bias"))}


def _mistral(raw: Raw) -> dict[str, Any]:
    # transformers' own default: a Mistral config without the key has a window of 4,096 tokens
    return {"window": _window(raw)}


def _qwen2(raw: Raw) -> dict[str, Any]:
    return {"attention_bias": True, "window": _qwen_window(raw)}


def _qwen3(raw: Raw) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias"))
    return {"attention_bias": bias, "output_bias": bias, "qk_norm": True, "window": _qwen_window(raw)}


def _qwen_window(raw: Raw) -> int | None:
    """Return the window. Qwen slides in layers from max_window_layers on; only all layers or none are supported."""
    if not raw.get("use_sliding_window") or (window := _window(raw)) is None:
        return None
    first, layers = raw.get("max_window_layers", 28), _positive(raw, "num_hidden_layers", limit=MAX_LAYERS)
    if not isinstance(first, int):
        raise ValueError(f"max_window_layers={quoted(first)} must be an integer in config.json")
    kinds = _layer_types(raw) or {"sliding_attention" if i >= first else "full_attention" for i in range(layers)}
    if len(kinds) > 1:
        raise ValueError(
            f"use_sliding_window=true with max_window_layers={first} of {layers} layers mixes full and sliding layers, "
            f"which is not supported: set max_window_layers=0 (all slide) or use_sliding_window=false (none)"
        )
    return window if kinds == {"sliding_attention"} else None


def _window(raw: Raw) -> int | None:
    return None if raw.get("sliding_window", 4096) is None else _positive(raw, "sliding_window", 4096)


_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            architecture="LlamaForCausalLM", max_positions=2048, keys=("attention_bias", "mlp_bias"), switches=_llama
        ),
        "mistral": Family(
            architecture="MistralForCausalLM", max_positions=131072, keys=("sliding_window",), switches=_mistral
        ),
        "qwen2": Family(architecture="Qwen2ForCausalLM", max_positions=32768, keys=_WINDOW_KEYS, switches=_qwen2),
        "qwen3": Family(
            architecture="Qwen3ForCausalLM",
            max_positions=32768,
            keys=(*_WINDOW_KEYS, "attention_bias"),
            switches=_qwen3,
            head_dim=128,
        ),
    }
)


def parse_config(raw: Raw, generation: Raw = MappingProxyType({})) -> ModelConfig:
    """Read a Hugging Face config with old or new keys.

    Args:
        raw: contents of config.json.
        generation: contents of generation_config.json; its eos_token_id wins, as in transformers.

    Raises:
        ValueError: a key is missing or not supported; the message names the first and its value.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type={quoted(kind)} is not supported: it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    _refuse_unsupported(raw, family)
    heads, hidden = _positive(raw, "num_attention_heads"), _positive(raw, "hidden_size")
    max_positions = _positive(raw, "max_position_embeddings", family.max_positions)
    switches = family.switches(raw)
    _check_layer_types(raw, switches.get("window"))
    eos = raw if generation.get("eos_token_id") is None else generation
    return ModelConfig(
        family=kind,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers", limit=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_positive(raw, "num_key_value_heads", heads),
        head_dim=_positive(raw, "head_dim", family.head_dim or hidden // heads),
        max_positions=max_positions,
        rope=parse_rope(raw, max_positions),
        norm_eps=_real("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_id=next(iter(_token_ids(raw, "bos_token_id")), None),
        eos_ids=_token_ids(eos, "eos_token_id"),
        dtype=_dtype(raw),
        **switches,
    )


def parse_rope(raw: Raw, max_positions: int) -> Rope:
    """Read the rotary embedding from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: the kind or a parameter is not supported; the message names it.
    """
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(values, Mapping):
        raise ValueError(f"rope_scaling={quoted(values)} must be a JSON object")
    values = dict(values)
    legacy = values.pop("type", None)
    kind = values.pop("rope_type", legacy) or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise ValueError(f"rope_type={quoted(kind)} is not supported: it must be one of {', '.join(ROPE_KINDS)}")
    partial = values.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={escaped(partial)} is not supported: the whole head must rotate (1.0)")
    theta = values.pop("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else _real("rope_theta", theta)
    if unknown := {key: value for key, value in values.items() if key not in ROPE_KINDS[kind] and value is not None}:
        allowed = ", ".join(sorted(ROPE_KINDS[kind])) or "no parameters"
        raise ValueError(
            f"rope parameters {escaped(unknown, 200)} are not supported: rope_type={kind!r} takes {allowed}"
        )
    if kind == "default":
        return Rope(theta=theta)
    inner = values.pop("original_max_position_embeddings", None)
    values = {key: value for key, value in values.items() if value is not None}
    if kind in ("llama3", "yarn"):
        outer = raw.get("original_max_position_embeddings")
        original = _positive(
            {"original_max_position_embeddings": outer or inner or max_positions}, "original_max_position_embeddings"
        )
        values["original_max_positions"] = original
        if kind == "yarn":
            values.setdefault("factor", max_positions / original)
    required = {"factor"} | ({"low_freq_factor", "high_freq_factor"} if kind == "llama3" else set())
    if missing := sorted(required - values.keys()):
        raise ValueError(f"rope_type={kind!r} needs {' and '.join(missing)}, got {values}")
    for key, value in values.items():
        if key == "truncate" and not isinstance(value, bool):
            raise ValueError(f"truncate={quoted(value)} must be true or false")
        # transformers takes a zero mscale as none
        if key != "truncate" and not (key.startswith("mscale") and value == 0):
            _real(key, value)
    return Rope(kind=kind, theta=theta, **values)


def render_config(config: ModelConfig, dtype: str, pad_id: int | None = None) -> dict[str, Any]:
    """Render the config as Hugging Face's config.json, in the older keys, which every version of transformers reads."""
    family = FAMILIES[config.family]
    raw = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "rope_theta": config.rope.theta,
        "rope_scaling": _render_rope(config.rope),
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
        "pad_token_id": pad_id if pad_id is not None and pad_id < config.vocab_size else None,
    }
    if "attention_bias" in family.keys:
        raw["attention_bias"] = config.attention_bias
    if "mlp_bias" in family.keys:
        raw["mlp_bias"] = config.mlp_bias
    if "sliding_window" in family.keys:
        raw["sliding_window"] = config.window
    if "use_sliding_window" in family.keys:
        raw |= {"use_sliding_window": config.window is not None, "max_window_layers": 0 if config.window else 28}
    if (again := parse_config(raw)) != (config := replace(config, dtype=dtype)):
        raise ValueError(f"a {config.family} config cannot express {config}: Hugging Face would read {again}")
    return raw


def _render_rope(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    values = {"rope_type": rope.kind}
    for key in sorted(ROPE_KINDS[rope.kind] - {"original_max_position_embeddings"}):
        if (value := getattr(rope, key)) is not None:
            values[key] = value
    if "original_max_position_embeddings" in ROPE_KINDS[rope.kind]:
        values["original_max_position_embeddings"] = rope.original_max_positions
    return values


def _refuse_unsupported(raw: Raw, family: Family) -> None:
    architectures = raw.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise ValueError(f"architectures={escaped(architectures)} is not supported: it must be {[family.architecture]}")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            raise ValueError(
                f"{key} is set ({escaped(raw[key])}), but quantised weights are not supported: load the original"
            )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act={quoted(raw['hidden_act'])} is not supported: it must be 'silu'")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise ValueError(f"pretraining_tp={escaped(raw['pretraining_tp'])} is not supported: it must be 1")
    known = COMMON_KEYS | HARMLESS_KEYS | {*family.keys}
    for key, value in raw.items():
        if key not in known and not key.startswith(("_", "unsloth")) and value not in (None, False, "", [], {}):
            raise ValueError(
                f"{escaped(key)}={quoted(value)} is not supported for model_type={raw['model_type']!r}: "
                f"remove it from config.json only if you know that it does not change the model"
            )


def _check_layer_types(raw: Raw, window: int | None) -> None:
    wanted = "full_attention" if window is None else "sliding_attention"
    kinds = _layer_types(raw) or {wanted}
    if kinds != {wanted}:
        raise ValueError(
            f"layer_types={escaped(sorted(kinds))} is not supported: all layers must be {wanted!r} ({window=})"
        )


def _layer_types(raw: Raw) -> set[str]:
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"layer_types={quoted(kinds)} must be a list of texts in config.json")
    return set(kinds)


def _positive(raw: Raw, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise ValueError(f"{key}={quoted(value)} must be a positive integer of at most {limit} in config.json")
    return value


def _real(key: str, value: Any) -> float:
    """Return a positive number that float32 holds."""
    if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < MAX_REAL:
        raise ValueError(f"{key}={quoted(value)} must be a positive number in config.json")
    return float(value)


def _token_ids(raw: Raw, key: str) -> tuple[int, ...]:
    """Return one token id, several or none."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token <= MAX_SIZE for token in ids):
        raise ValueError(f"{key}={quoted(value)} must be a token id of at most {MAX_SIZE}, or a list of them")
    return tuple(ids)


def _dtype(raw: Raw) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={name!r} is not supported: it must be float32, bfloat16 or float16")
    return "float32" if name == "float16" else name  # float32 holds every float16; bfloat16 would drop 3 bits
