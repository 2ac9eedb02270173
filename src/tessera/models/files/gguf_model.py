"""Map a GGUF file's metadata to a ModelConfig, and its tensors to Hugging Face's names.

Keys are interpreted as in llama.cpp, and none that may change the model is silently ignored, as in `families`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.escapes import escaped, quoted
from tessera.core.fields import number, positive
from tessera.models.config import MAX_SIZE, ModelConfig, Rope, extended_context
from tessera.models.files.ends import file_token, ignored_ids
from tessera.models.files.gguf_file import GgufFile, GgufTensor, read_gguf_rows
from tessera.models.files.unread import changes_model
from tessera.models.weights import LAYER, OUTER, layer_name

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor that holds Llama 3's rope scaling in a GGUF file: one divisor of the rotary frequency per pair of
dimensions."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Properties shared by the models with the same `general.architecture`."""

    family: str  # key of `families.FAMILIES`
    interleaved: bool  # whether the two rows of q or k that rotate together are neighbours (`gguf_file.order_of_rows`)
    qk_norm: bool = False  # whether q and k are normalised


ARCHITECTURES = {
    "llama": Architecture(family="llama", interleaved=True),
    "mistral": Architecture(family="mistral", interleaved=True),
    "qwen2": Architecture(family="qwen2", interleaved=False),
    "qwen3": Architecture(family="qwen3", interleaved=False, qk_norm=True),
}

READ_KEYS = frozenset(
    "block_count context_length embedding_length feed_forward_length vocab_size attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon "
    "attention.sliding_window rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
    "rope.scale_linear".split()
)
HARMLESS_KEYS = {
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": None,  # for another kind of norm
    "rope.scaling.finetuned": None,
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),  # the layout of q and k that every llama GGUF has
    "use_parallel_residual": (True,),  # a key of other architectures that old converters wrote
}
"""Keys that do not change the model at these values (None: at any value)."""

REALS = {
    "attention.layer_norm_rms_epsilon": positive(1),
    "rope.freq_base": number(1, 1e15),
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), number(1, 1e6)),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), positive(1e6)),
}
"""Rule for the value of each key that holds a real number."""

ORIGINAL = "rope.scaling.original_context_length"
FACTOR_TOLERANCE = 1e-5
"""Maximum relative error of rope_freqs.weight against Llama 3's factors; converters' float32 errors are near 1e-6."""


class Metadata:
    """A file's metadata by key without its architecture's prefix; each value is checked when it is read."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.architecture = file.metadata.get("general.architecture")
        if not isinstance(self.architecture, str) or self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{file.path} has general.architecture={quoted(self.architecture)}, which is not supported: it must be "
                f"one of {', '.join(ARCHITECTURES)}"
            )
        prefix = self.architecture + "."
        self.values = {key.removeprefix(prefix): v for key, v in file.metadata.items() if key.startswith(prefix)}

    def error(self, key: str, value: Any, problem: str) -> ValueError:
        value = quoted(value)
        return ValueError(f"{self.file.path} has {self.architecture}.{escaped(key)}={value}: {problem}")

    def positive(self, key: str, *default: int | None) -> int | None:
        """Return a positive int32, or the common value of a per-layer list; the default if the key is missing."""
        value = self.values.get(key)
        if value is None and default:
            return default[0]
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise self.error(key, value, "layers with different values are not supported")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_SIZE:
            raise self.error(key, value, f"it must be a positive integer of at most {MAX_SIZE}")
        return value

    def real(self, key: str, *default: float | None) -> float | None:
        """Return a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
        value = self.values.get(key)
        if value is None and default:
            return default[0]
        if not REALS[key].fits(value) or not REALS[key].fits(rounded := float(str(np.float32(value)))):
            raise self.error(key, value, f"it must be {REALS[key].allowed}")
        return rounded

    def refuse_unknown(self) -> None:
        for key, value in self.values.items():
            if key in HARMLESS_KEYS:
                listed = isinstance(value, np.ndarray | list)
                known = HARMLESS_KEYS[key] is None or (not listed and value in HARMLESS_KEYS[key])
            else:
                known = key in READ_KEYS or not changes_model(key, value)
            if not known:
                raise self.error(key, value, f"this is not supported for {self.architecture}")


def gguf_config(meta: Metadata) -> ModelConfig:
    """Read the decoder's config from a GGUF file's metadata, without `eos_ids`, which `ends.gguf_ends` finds."""
    file, architecture = meta.file, ARCHITECTURES[meta.architecture]
    meta.refuse_unknown()
    tensors = file.tensors
    heads, hidden = meta.positive("attention.head_count"), meta.positive("embedding_length")
    head_dim = meta.positive("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := meta.positive(key, head_dim)) != head_dim:
            raise meta.error(key, size, f"it must be {head_dim}, the size of a head")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{file.path} holds no weights (token_embd.weight is missing): download a whole model")
    vocab_size = tensors["token_embd.weight"].shape[0]
    if (num_layers := meta.positive("block_count")) > len(tensors):
        raise meta.error("block_count", num_layers, f"the file holds {len(tensors)} tensors")
    window = meta.positive("attention.sliding_window", None)
    # a llama with a window is a Mistral: Hugging Face's llama has none
    family = "mistral" if architecture.family == "llama" and window else architecture.family
    max_positions = meta.positive("context_length")
    biases = {w.needs: f"blk.0.{w.gguf}" in tensors for w in LAYER if w.name in ("q_bias", "o_bias", "gate_bias")}
    fields = dict(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=meta.positive("feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=meta.positive("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=_context(meta, rope := _rope(meta, head_dim, max_positions), max_positions),
        rope=rope,
        norm_eps=meta.real("attention.layer_norm_rms_epsilon"),
        window=window,
        tie_embeddings="output.weight" not in tensors,
        **biases,
        qk_norm=architecture.qk_norm,
        bos_id=file_token(file, "bos"),
        dtype=_dtype(tensors),
    )
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{file.path} has sizes that contradict each other: {error}") from error


def gguf_tensors(meta: Metadata, config: ModelConfig) -> dict[str, GgufTensor]:
    """Return the file's tensors under Hugging Face's names; names unknown to the architecture stay unchanged."""
    interleaved = ARCHITECTURES[meta.architecture].interleaved
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    heads |= {"q_bias": config.num_heads, "k_bias": config.num_kv_heads}
    places: dict[str, tuple[str, int | None]] = {weight.gguf: (weight.stored, None) for weight in OUTER}
    for index in range(config.num_layers):
        for weight in LAYER:
            order = heads.get(weight.name) if interleaved else None
            places[f"blk.{index}.{weight.gguf}"] = layer_name(index, weight), order
    found = {}
    for name, tensor in meta.file.tensors.items():
        if name == ROPE_FACTORS:
            continue  # gguf_config read it
        place, order = places.get(name, (name, None))
        found[place] = tensor._replace(heads=order)
    return found


def ignored_values(meta: Metadata) -> list[str]:
    """List values, as key=value, that contradict the number of embeddings and are ignored, as in llama.cpp."""
    rows = meta.file.tensors["token_embd.weight"].shape[0]
    size = meta.positive("vocab_size", rows)
    return [*([f"{meta.architecture}.vocab_size={size}"] if size != rows else []), *ignored_ids(meta.file)]


def unread_keys(meta: Metadata) -> list[str]:
    """List the keys of the file's architecture that `gguf_config` accepts without knowing them."""
    return [f"{meta.architecture}.{key}" for key in meta.values if key not in READ_KEYS and key not in HARMLESS_KEYS]


def _dtype(tensors: Mapping[str, GgufTensor]) -> str:
    matrices = {tensor.layout.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return "bfloat16" if matrices == {"BF16"} else "float32"  # float32 holds what every other type does


def _rope(meta: Metadata, head_dim: int, max_positions: int) -> Rope:
    theta = meta.real("rope.freq_base", 10000.0)
    factor = meta.real("rope.scaling.factor", meta.real("rope.scale_linear", None))
    # llama.cpp's own default: a factor without a type is linear
    kind = meta.values.get("rope.scaling.type", "none" if factor is None else "linear")
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn"):
        raise meta.error("rope.scaling.type", kind, "it is not supported: it must be one of none, linear, yarn")
    factors = meta.file.tensors.get(ROPE_FACTORS)
    if kind != "none" and factor is None:
        raise meta.error("rope.scaling.factor", factor, f"rope.scaling.type={kind!r} needs a factor")
    if kind == "none" or factor == 1.0:
        return Rope(theta=theta) if factors is None else _llama3(meta, factors, theta, head_dim, max_positions)
    if factors is not None:
        raise meta.error("rope.scaling.type", kind, f"it is not supported in a file that also has {ROPE_FACTORS}")
    if kind == "linear":
        return Rope(kind="linear", theta=theta, factor=factor)
    fast, slow = meta.real("rope.scaling.yarn_beta_fast", 32.0), meta.real("rope.scaling.yarn_beta_slow", 1.0)
    if slow >= fast:
        raise meta.error("rope.scaling.yarn_beta_slow", slow, f"it must be below rope.scaling.yarn_beta_fast={fast}")
    return Rope(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=meta.positive(ORIGINAL, max_positions),
        beta_fast=fast,
        beta_slow=slow,
    )


def _context(meta: Metadata, rope: Rope, max_positions: int) -> int:
    """Return the context in tokens, to which YaRN's and the linear scaling's factor count."""
    original = meta.positive(ORIGINAL, max_positions if rope.kind == "yarn" else None)
    if rope.kind not in ("yarn", "linear") or original is None:
        return max_positions
    keys = f"{meta.file.path}: {meta.architecture}.rope.scaling.factor x {ORIGINAL}"
    return extended_context(max_positions, rope.factor, original, keys)


def _llama3(meta: Metadata, stored: GgufTensor, theta: float, head_dim: int, max_positions: int) -> Rope:
    """Find the Rope of kind "llama3" whose frequency for pair i of the dimensions is theta ** (-2 i / H) / factors[i].

    `stored` holds the factors. With f_i = theta ** (-2 i / H) and the original context length C, Llama 3 defines

        b_i = (C f_i / (2 pi) - low) / (high - low), clipped to [0, 1]
        factors[i] = 1 / (b_i + (1 - b_i) / factor)

    A common factor of C, low and high cancels, so low is set to 1. Two pairs in the transition band, 0 < b_i < 1,
    determine b_i as a linear function of f_i, and thereby C and high. With fewer pairs in the band, high is set to 4,
    as in Llama 3.
    """
    if stored.shape != (head_dim // 2,):
        raise ValueError(f"{ROPE_FACTORS} in {stored.path} has shape {stored.shape}, not ({head_dim // 2},)")
    [(_, factors)] = read_gguf_rows(ROPE_FACTORS, stored, range(1), range(1))
    factors = factors[:, 0].astype(np.float64)
    if np.all(factors == 1):
        return Rope(theta=theta)
    factor = float(str(np.float32(factors.max())))
    freq = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if factor > 1 and factors.min() >= 1:
        for original, high in _llama3_candidates(freq, factors, factor, max_positions):
            blend = np.clip((original * freq / (2 * math.pi) - 1) / (high - 1), 0, 1)
            if np.allclose(1 / (blend + (1 - blend) / factor), factors, rtol=FACTOR_TOLERANCE, atol=0):
                return Rope(
                    kind="llama3",
                    theta=theta,
                    factor=factor,
                    low_freq_factor=1.0,
                    high_freq_factor=high,
                    original_max_positions=original,
                )
    raise ValueError(
        f"{ROPE_FACTORS} in {stored.path} divides the rotary frequencies by {factors.min():g} to {factors.max():g} in "
        f"an unsupported way: only Llama 3's scaling is supported"
    )


def _llama3_candidates(freq: np.ndarray, factors: np.ndarray, factor: float, max_positions: int):
    """Yield candidates for (C, high) of `_llama3`, the most certain ones first."""
    blend = (1 / factors - 1 / factor) / (1 - 1 / factor)
    band = (blend > 1e-4) & (blend < 1 - 1e-4)
    if band.sum() >= 2:
        first, last = np.flatnonzero(band)[[0, -1]]
        run = freq[first] - freq[last]
        slope = (blend[first] - blend[last]) / run if run else 0.0
        at_zero = blend[last] - slope * freq[last]
        if slope > 0 > at_zero:
            high = 1 - 1 / at_zero
            yield max(round(2 * math.pi * slope * (high - 1)), 1), round(high, 3)
    if band.any():
        yield from ((max(round(2 * math.pi * (3 * b + 1) / f), 1), 4.0) for f, b in zip(freq[band], blend[band]))
    # no pair in the band: any original context that puts the step between the same pairs will do
    yield from ((max(max_positions >> shift, 1), 4.0) for shift in range(20))
    yield from ((1 << power, 4.0) for power in range(5, 21))
