"""Read Hugging Face configs of the supported families into a ModelConfig, and write them back.

No config key that may change the model is silently ignored: each is read, is known to be harmless, holds a value that
switches its feature off, or is refused by name (`unread`).

If the decoder of a new family differs only in existing switches of ModelConfig, an entry in FAMILIES and a case in
`tests/golden/make.py` suffice; to read the family's GGUF files, also add an entry to `gguf_model.ARCHITECTURES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tessera.core.escapes import escaped, quoted
from tessera.core.fields import OBJECT, TEXT, TRUTH, check_fields, either, integer, items, maybe, number, positive
from tessera.models.config import MAX_SIZE, ModelConfig, Rope, extended_context
from tessera.models.files.unread import COMMON_KEYS, HARMLESS_KEYS, SAME_VALUES, changes_model

Raw = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face."""

    architecture: str  # the class name in the config's `architectures`
    max_positions: int  # default of `max_position_embeddings`
    keys: tuple[str, ...]  # keys that only some families' configs have, and that `switches` reads
    switches: Callable[[Raw], dict[str, Any]]  # from config.json, the ModelConfig fields that distinguish this family
    head_dim: int | None = None  # default of `head_dim`, instead of hidden_size / num_attention_heads


MAX_LAYERS = 1 << 16
"""Maximum number of layers, far more than the largest models have. A list of 2 ** 31 layers would fill the memory."""

LAYER_KINDS = ("full_attention", "sliding_attention")

SIZE = integer(1, MAX_SIZE)
TOKEN_IDS = maybe(either(integer(0, MAX_SIZE), items(integer(0, MAX_SIZE), "token ids")))
FIELDS = MappingProxyType(
    {
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), SIZE),
        "num_hidden_layers": integer(1, MAX_LAYERS),
        **dict.fromkeys(
            "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings "
            "sliding_window".split(),
            maybe(SIZE),
        ),
        "max_window_layers": maybe(integer(0, MAX_SIZE)),
        "rms_norm_eps": maybe(positive(1)),
        "rope_theta": maybe(number(1, 1e15)),
        "partial_rotary_factor": maybe(number(0, 1)),
        "pretraining_tp": maybe(integer(1, 1024)),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), maybe(OBJECT)),
        **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), maybe(TRUTH)),
        **dict.fromkeys(("hidden_act", "dtype", "torch_dtype"), maybe(TEXT)),
        **dict.fromkeys(("architectures", "layer_types"), maybe(items(TEXT, "strings"))),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), TOKEN_IDS),
    }
)
"""Rule for the value of each key of config.json that is read."""
GENERATION_FIELDS = MappingProxyType({"eos_token_id": TOKEN_IDS})
"""Rule for the value of each key of generation_config.json that is read."""
ROPE_FIELDS = MappingProxyType(
    {
        "rope_theta": FIELDS["rope_theta"],
        "partial_rotary_factor": FIELDS["partial_rotary_factor"],
        "factor": maybe(number(1, 1e6)),
        **dict.fromkeys(
            ("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"), maybe(positive(1e6))
        ),
        # transformers treats a zero mscale as unset
        **dict.fromkeys(("mscale", "mscale_all_dim"), maybe(number(0, 1e6))),
        "original_max_position_embeddings": maybe(SIZE),
        "truncate": maybe(TRUTH),
    }
)
"""Rule for the value of each key of rope_scaling or rope_parameters that is read."""

ROPE_KINDS = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
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
    """Return the sliding window in tokens, which the layers from max_window_layers on use, so that all or none must."""
    if not raw.get("use_sliding_window") or (window := _window(raw)) is None:
        return None
    first, layers = _given(raw, "max_window_layers", 28), raw["num_hidden_layers"]
    kinds = set(raw.get("layer_types") or ()) or {
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    }
    if len(kinds) > 1:
        raise ValueError(
            f"use_sliding_window=true with max_window_layers={first} of {layers} layers mixes full and sliding layers, "
            f"which is not supported: set max_window_layers=0 (all slide) or use_sliding_window=false (none)"
        )
    return window if kinds == {"sliding_attention"} else None


def _window(raw: Raw) -> int | None:
    return raw.get("sliding_window", 4096)


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
    """Read the contents of config.json, with older or newer names of keys, and the ends of generation_config.json."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type={quoted(kind)} is not supported: it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    check_fields(raw, FIELDS, "config.json")
    check_fields(generation, GENERATION_FIELDS, "generation_config.json")
    _refuse_unsupported(raw, family)
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    max_positions = _given(raw, "max_position_embeddings", family.max_positions)
    switches = family.switches(raw)
    _check_layer_types(raw, switches.get("window"))
    eos = dict.fromkeys(token_ids(generation, "eos_token_id") + token_ids(raw, "eos_token_id"))
    for key in ("bos_token_id", "eos_token_id"):
        _check_vocabulary(raw, key, raw["vocab_size"], "config.json")
    _check_vocabulary(generation, "eos_token_id", raw["vocab_size"], "generation_config.json")
    return ModelConfig(
        family=kind,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=_given(raw, "num_key_value_heads", heads),
        head_dim=_given(raw, "head_dim", family.head_dim or hidden // heads),
        max_positions=_context(raw, rope := parse_rope(raw, max_positions), max_positions),
        rope=rope,
        norm_eps=float(_given(raw, "rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings")),
        bos_id=next(iter(token_ids(raw, "bos_token_id")), None),
        eos_ids=tuple(eos),
        dtype=_dtype(raw),
        **switches,
    )


def parse_rope(raw: Raw, max_positions: int) -> Rope:
    """Read the rotary embedding from the key `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    values = _rope_values(raw)
    check_fields(values, ROPE_FIELDS, "the rope parameters of config.json")
    values = dict(values)
    legacy = values.pop("type", None)
    kind = values.pop("rope_type", legacy) or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        way = f", or left out, for a context of {max_positions}" if kind == "dynamic" else ""
        raise ValueError(f"rope_type={quoted(kind)} is not supported: it must be one of {', '.join(ROPE_KINDS)}{way}")
    partial = values.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={escaped(partial)} is not supported: the whole head must rotate (1.0)")
    theta = float(_given({"rope_theta": values.pop("rope_theta", raw.get("rope_theta"))}, "rope_theta", 10000.0))
    inner = values.pop("original_max_position_embeddings", None)
    if unknown := {k: v for k, v in values.items() if k not in ROPE_KINDS[kind] and changes_model(k, v)}:
        allowed = ", ".join(sorted(ROPE_KINDS[kind])) or "no parameters"
        raise ValueError(
            f"rope parameters {escaped(unknown, 200)} are not supported: rope_type={kind!r} takes {allowed}"
        )
    if kind == "default":
        return Rope(theta=theta)
    values = {key: value for key, value in values.items() if value is not None and key in ROPE_KINDS[kind]}
    if kind in ("llama3", "yarn"):
        original = raw.get("original_max_position_embeddings") or inner or max_positions
        values["original_max_positions"] = original
        if kind == "yarn" and "factor" not in values:
            check_fields(
                factor := {"factor": max_positions / original},
                ROPE_FIELDS,
                "config.json (max_position_embeddings / original_max_position_embeddings)",
            )
            values |= factor
    required = {"factor"} | ({"low_freq_factor", "high_freq_factor"} if kind == "llama3" else set())
    if missing := sorted(required - values.keys()):
        raise ValueError(f"rope_type={kind!r} needs {' and '.join(missing)}, got {values}")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in values and high in values and not values[low] < values[high]:
            raise ValueError(f"{low}={values[low]} must be below {high}={values[high]} in config.json")
    return Rope(kind=kind, theta=theta, **values)


def _rope_values(raw: Raw) -> Raw:
    """Return the rope parameters, which newer configs hold per kind of layer, as in {"full_attention": {...}}."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    by_kind = {kind: inner for kind, inner in values.items() if kind in LAYER_KINDS and isinstance(inner, Mapping)}
    if not by_kind or len(by_kind) < len(values):
        return values
    used = [inner for kind, inner in by_kind.items() if kind in (raw.get("layer_types") or by_kind)]
    if not used or any(inner != used[0] for inner in used):
        raise ValueError(
            f"rope parameters {escaped(values, 200)} are not supported: all layers must have the same ones"
        )
    return used[0]


def _context(raw: Raw, rope: Rope, max_positions: int) -> int:
    """Return the context in tokens, to which YaRN's and the linear scaling's `factor` count, as in vLLM.

    For the linear scaling, the original context, or Vicuna's and LongChat's max_sequence_length, must say whether
    max_position_embeddings is already extended.
    """
    keys = "factor x original_max_position_embeddings in the rope parameters of config.json"
    if rope.kind == "yarn":
        return extended_context(max_positions, rope.factor, rope.original_max_positions, keys)
    if rope.kind != "linear":
        return max_positions
    values = _rope_values(raw)
    if original := raw.get("original_max_position_embeddings") or values.get("original_max_position_embeddings"):
        return extended_context(max_positions, rope.factor, original, keys)
    longest = raw.get("max_sequence_length")
    return longest if longest == round(rope.factor * max_positions) else max_positions


def token_ids(raw: Raw, key: str) -> tuple[int, ...]:
    value = raw.get(key)
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def render_config(config: ModelConfig, dtype: str, pad_id: int | None = None) -> dict[str, Any]:
    """Render config.json with the older keys, which every version of transformers reads."""
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
                f"{key} is set ({escaped(raw[key])}), but quantised weights are not supported: load the original model"
            )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act={quoted(raw['hidden_act'])} is not supported: it must be 'silu'")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise ValueError(f"pretraining_tp={escaped(raw['pretraining_tp'])} is not supported: it must be 1")
    for key, value in _unknown(raw, family).items():
        if found := changes_model(key, value):
            where = "" if found == key else f", because of {escaped(found)}"
            raise ValueError(
                f"{escaped(key)}={quoted(value)} is not supported for model_type={raw['model_type']!r}{where}: "
                f"remove it from config.json only if you know that it does not change the model{_hint(key, value)}"
            )


def _hint(key: str, value: Any) -> str:
    """Return what a refusal of the key adds: a way to use the model without the key."""
    if key != "dual_chunk_attention_config" or not isinstance(value, Mapping):
        return ""
    length = value.get("original_max_position_embeddings") or value.get("chunk_size") or 262144
    return (
        f". It matters only for more than {escaped(length)} tokens: for shorter contexts, remove it and set "
        f"max_position_embeddings={escaped(length)}"
    )


def unread_keys(raw: Raw) -> list[str]:
    """List the keys of a config that `parse_config` accepts without knowing them."""
    return [key for key, value in _unknown(raw, FAMILIES[raw["model_type"]]).items() if value not in (None, False)]


def _unknown(raw: Raw, family: Family) -> dict[str, Any]:
    known = COMMON_KEYS | HARMLESS_KEYS | {*family.keys}
    if raw.get("use_sliding_window") is False:  # which Qwen's configs, and models converted from Qwen's, say
        known |= {"sliding_window", "max_window_layers"}
    known |= {key for key, same in SAME_VALUES.items() if key in raw and raw[key] == raw.get(same)}
    return {key: value for key, value in raw.items() if key not in known and not key.startswith(("_", "unsloth"))}


def _check_layer_types(raw: Raw, window: int | None) -> None:
    wanted = "full_attention" if window is None else "sliding_attention"
    kinds = set(raw.get("layer_types") or ()) or {wanted}
    if kinds != {wanted}:
        raise ValueError(
            f"layer_types={escaped(sorted(kinds))} is not supported: all layers must be {wanted!r} ({window=})"
        )


def _given(raw: Raw, key: str, default: Any) -> Any:
    return default if raw.get(key) is None else raw[key]


def _check_vocabulary(raw: Raw, key: str, vocab_size: int, place: str) -> None:
    if any(token >= vocab_size for token in token_ids(raw, key)):
        raise ValueError(f"{key}={quoted(raw[key])} in {place} must be below {vocab_size=}: no token has this id")


def _dtype(raw: Raw) -> str:
    name = (raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={quoted(name)} is not supported: it must be float32, bfloat16 or float16")
    return "float32" if name == "float16" else name  # float32 holds every float16; bfloat16 would drop 3 bits
