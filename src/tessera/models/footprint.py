"""Bytes of a model in memory on one device, by part, computed from the table of weights and the cache's shape.

    total = weights + cache + copies + activations + logits + program

No function here allocates memory, compiles a program or queries a device. `runtime/planner.py` compares these bytes
with a chip's memory. The engine and `load` compare them with the free memory and refuse what does not fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from tessera.core.mesh import ONE_DEVICE, MeshShape, check, parse
from tessera.core.quant import NAMES, STORED, STORED_GROUP, Form, matrix_bytes
from tessera.core.shapes import ceil_div
from tessera.models.config import ModelConfig
from tessera.models.weights import (
    OUTER,
    Weight,
    form_of,
    layer_name,
    layer_weights,
    outer_weights,
    shape_of,
    split_sizes,
)

SPLIT_AXES = frozenset({"vocab", "heads", "kv_heads", "mlp"})
"""Logical axes of weights that the mesh axis "heads" splits; the other axes are not split."""

PROGRAM_BYTES = 16 << 20
"""Bytes assumed for one step's compiled code. The compiler reports 2 to 4 MiB for decode, up to 14 MiB for prefill."""


class Number(NamedTuple):
    """Bytes of an element and, in a cache, of the scale of each key and of each value of a KV head."""

    element: int
    scale: int = 0


FLOATS: Mapping[str, Number] = MappingProxyType({"float32": Number(4), "bfloat16": Number(2)})
"""Number types of arrays that are not quantised."""

WEIGHT_TYPES = (*FLOATS, *NAMES)
"""Names of the types that matrices can have: floats, and the forms of `core/quant.py`."""

CACHE_TYPES: Mapping[str, Number] = MappingProxyType({**FLOATS, "int8": Number(1, 2)})
"""Number types of keys and values."""


def divide(config: ModelConfig, devices: int) -> MeshShape:
    """Choose the shape of a mesh of this many devices, and refuse one that `load` would refuse."""
    if devices < 1:
        raise ValueError(f"devices={devices} must be at least 1")
    shape = parse(devices, config.num_kv_heads)
    check(shape, split_sizes(config), devices, window=config.window)
    return shape


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one device, by part."""

    attention: int = 0  # matrices of all layers, as in `mlp`
    mlp: int = 0
    vocabulary: int = 0  # embedding, and the output head if it is not tied
    vectors: int = 0  # norms and biases
    cache: int = 0  # keys and values of all sequences and layers, with scales
    copies: int = 0  # temporary copies of the cache while a program runs
    activations: int = 0  # of one step: a prefill chunk, or one decoded token per sequence
    logits: int = 0  # float32, of each sequence's last token; on a mesh, the device's part and the gathered whole
    program: int = PROGRAM_BYTES  # compiled code

    @property
    def weights(self) -> int:
        return self.attention + self.mlp + self.vocabulary + self.vectors

    @property
    def beyond_weights(self) -> int:
        """Bytes that a request adds to a loaded model: all parts except weights and compiled code."""
        return self.total - self.weights - self.program

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, kw_only=True)
class Types:
    """Number types of matrices, of the cache, and of everything else.

    A float type of `weights` applies to the layers' matrices, a form of `core/quant.py` to the matrices to which
    `weights.form_of` assigns one. All other weights have the type `dtype`.
    """

    weights: str = "bfloat16"  # one of WEIGHT_TYPES
    cache: str = "bfloat16"
    dtype: str = "bfloat16"  # of everything else, activations included
    kinds: Mapping[str, str] = MappingProxyType({})  # for weights = "gguf", `Quantised.kind` of matrices, by name

    def __post_init__(self):
        for name, table in (("weights", WEIGHT_TYPES), ("cache", CACHE_TYPES), ("dtype", FLOATS)):
            if getattr(self, name) not in table:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(table)}")

    @property
    def itemsize(self) -> int:
        return FLOATS[self.dtype].element


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sizes of one call of a program: `batch` sequences, each with room for `num_keys` keys and with `rows` new tokens.

    XLA on CPU (`host`) keeps float32 copies of narrower activations, and copies about half of the cache in a prefill
    chunk of several sequences (LOG.md).
    """

    batch: int
    num_keys: int
    rows: int = 1
    stacked: bool = False  # layers run under a scan, which copies the keys and values of one layer at a time
    host: bool = False


def footprint(
    config: ModelConfig, load: Load, *, types: Types = Types(), division: MeshShape = ONE_DEVICE
) -> Footprint:
    """Compute the bytes on one device, by part.

    Equations, with the letters of `core/shapes.py` (S = num_keys), n = division.heads, c = division.context, and w, h
    and s the bytes of an activation, of a key's element and of a key's scale:

        weights      sum over all weights of `matrix_bytes` or float bytes; sizes of axes in SPLIT_AXES are divided by n
        cache        2 L B K S (H h + s) / (n c)
        copies       on a CPU with rows > 1 and B > 1, keys and values of (L + 2) // 2 layers; else, if stacked, of one
        activations  w B rows (3 D + 3 max(F, (N + 2 K) H) / n), with w + 4 instead of w for bfloat16 on a CPU: the
                     residual stream, its norm and the output of a branch (attention or MLP); and three arrays inside
                     the branch
        logits       4 B V (1 + 1 / n) if n > 1, else 4 B V
    """
    cache = cache_bytes(config, load.batch, load.num_keys, types=types, division=division)
    kinds = weight_bytes(config, types=types, division=division)
    whole = 4 * load.batch * config.vocab_size
    return Footprint(
        **kinds,
        cache=cache,
        copies=_copied_layers(config, load) * cache // (2 * config.num_layers),
        activations=activation_bytes(config, load, types=types, division=division),
        logits=whole + (whole // division.heads if division.heads > 1 else 0),
    )


def weight_bytes(config: ModelConfig, *, types: Types = Types(), division: MeshShape = ONE_DEVICE) -> dict[str, int]:
    """Return the bytes of a model's weights on one device, by the names of their parts in `Footprint`."""
    found = dict.fromkeys(("attention", "mlp", "vocabulary", "vectors"), 0)
    for weight in outer_weights(config):
        found[_kind(weight)] += one_weight(weight, config, types, division, weight.stored)
    for weight in layer_weights(config):
        if types.weights == STORED:
            names = (layer_name(index, weight) for index in range(config.num_layers))
            total = sum(one_weight(weight, config, types, division, name) for name in names)
        else:
            total = config.num_layers * one_weight(weight, config, types, division)
        found[_kind(weight)] += total
    return found


def cache_bytes(
    config: ModelConfig, batch: int, num_keys: int, *, types: Types = Types(), division: MeshShape = ONE_DEVICE
) -> int:
    scales = 2 * config.num_layers * batch * config.num_kv_heads * ceil_div(num_keys, division.context)
    stored = CACHE_TYPES[types.cache]
    return scales // division.heads * (config.head_dim * stored.element + stored.scale)


def activation_bytes(
    config: ModelConfig, load: Load, *, types: Types = Types(), division: MeshShape = ONE_DEVICE
) -> int:
    """Return the peak bytes of one step's activations, which are reached within a layer; see `footprint`."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 3 * config.hidden_size + 3 * max(config.intermediate_size, heads) // division.heads
    extra = 4 if load.host and types.itemsize < 4 else 0
    return load.batch * load.rows * width * (types.itemsize + extra)


def _copied_layers(config: ModelConfig, load: Load) -> int:
    """Count the arrays, each the keys or the values of one layer, that a running program copies."""
    if load.host and load.batch > 1 and load.rows > 1:
        return 2 * ((config.num_layers + 2) // 2)
    return 2 if load.stacked else 0


def _kind(weight: Weight) -> str:
    if not weight.is_matrix:
        return "vectors"
    return "vocabulary" if "vocab" in weight.axes else "mlp" if "mlp" in weight.axes else "attention"


def one_weight(weight: Weight, config: ModelConfig, types: Types, division: MeshShape, stored: str = "") -> int:
    """Return the bytes of one weight on one device; for weights = "gguf", `stored` is its name in `Types.kinds`."""
    shape = [
        size // division.heads if axis in SPLIT_AXES else size
        for axis, size in zip(weight.axes, shape_of(weight, config))
    ]
    if types.weights == STORED:
        kind = types.kinds.get(stored)
        form = None if kind is None else Form(kind=kind, group=STORED_GROUP)
    else:
        form = None if types.weights in FLOATS else form_of(weight, config, types.weights)
    if form is not None:
        return matrix_bytes(*shape, form)
    name = types.weights if types.weights in FLOATS and weight.is_matrix and weight not in OUTER else types.dtype
    return prod(shape) * FLOATS[name].element
