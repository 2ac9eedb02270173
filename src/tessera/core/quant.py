"""Quantised matrices: a pytree node that replaces a weight [E,D], and the forms in which weights can be stored.

E is the number of outputs of the matrix, D the number of its inputs, and G = D / g the number of groups of g inputs:

    W[e,d] ~ values[e,d] * scale[e]                        one scale per output channel
    W[e,d] ~ values[d // g, d % g, e] * scale[d // g, e]   one scale per group of g inputs
             + zero[d // g, e]                             GGUF's Q4_1 only

Values in groups are stored as [G,g,E], because XLA on TPU then fuses their conversion to float into one matrix product
that is batched over the groups. Four-bit values are `jnp.int4` (or `jnp.uint4`) except on CPU, where XLA unpacks these
types one value at a time; there, `pack` puts two values into a byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np
from jax import Array

GROUPS = (32, 64, 128)
"""Allowed group sizes: numbers of inputs that share a scale."""
SAMPLE = 64
"""Number of elements of the original weight that a `Quantised` keeps: the model's fingerprint is computed from them."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form in which a matrix is stored."""

    kind: str  # "int8", "int4", "uint4" (GGUF's Q4_1, with a zero point per group) or "fp8" (e4m3, 3 bits of mantissa)
    group: int = 0  # number of inputs that share a scale; 0 for one scale per output channel
    rounds_rows: bool = False  # whether products with many rows round the activations to int8, too (w8a8)

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "uint4") else 8


STORED = "gguf"
"""Name of the form that keeps the quantised blocks of a GGUF file unchanged."""
STORED_GROUP = 32
"""Number of inputs per block of a GGUF file's matrix that is kept."""

FORMS: Final[Mapping[str, Form]] = MappingProxyType(
    {
        "int8": Form(kind="int8"),
        "int4": Form(kind="int4"),
        **{f"int4-g{group}": Form(kind="int4", group=group) for group in GROUPS},
        "fp8": Form(kind="fp8"),
        "w8a8": Form(kind="int8", rounds_rows=True),
    }
)
"""Forms that float weights can be rounded to, by name."""

NAMES = (*FORMS, STORED)
"""Names of all forms: the values that `load(weights=...)` accepts."""

LARGEST: Final[Mapping[str, float]] = MappingProxyType({"int8": 127.0, "int4": 7.0, "fp8": 448.0})
"""Largest magnitude of a value, by kind. -128 and -8 are unused, so that the integers are symmetric around 0."""


DTYPES: Final[Mapping[str, np.dtype]] = MappingProxyType(
    {
        "int8": np.dtype(np.int8),
        "int4": np.dtype(ml_dtypes.int4),
        "uint4": np.dtype(ml_dtypes.uint4),
        "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    }
)
"""Dtype of values that are not packed, by kind."""

BLOCK_VALUES = 1 << 18
"""Number of values rounded at a time: so few that their temporary copies fit in the CPU's cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantised:
    """A quantised matrix [E,D], which replaces a float array in a model's weights.

    If the matrices of all layers are stacked, each array has a leading axis L. `kind`, `group` and `rounds_rows` are as
    in `Form`.

    Attributes:
        stretches: number of equal runs into which the inputs of a packed row are divided, one per device that shares
            the inputs. Each run packs its first half with its second half, so that a device unpacks only its own run.
        shared: number of devices among which the inputs are divided. Each device scales its partial product before the
            partial products are added.
        float_dtype: name of the model's float dtype. An embedding lookup returns rows of this dtype.
    """

    values: Array  # [E,D], or [G,g,E] with G groups of g inputs; packing two four-bit values per byte halves D or g
    scale: Array  # float32 [E], or float16 [G,E] with G groups
    zero: Array | None = None  # float16 [G,E], added to each value of the group; None for symmetric forms
    sample: Array  # bfloat16 [64], evenly spaced elements of the original weight, which identify it
    kind: str = field(metadata={"static": True})
    group: int = field(default=0, metadata={"static": True})
    rounds_rows: bool = field(default=False, metadata={"static": True})
    stretches: int = field(default=1, metadata={"static": True})
    shared: int = field(default=1, metadata={"static": True})
    float_dtype: str = field(metadata={"static": True})

    @property
    def packed(self) -> bool:
        """Whether each byte of `values` holds two four-bit values."""
        return self.kind in ("int4", "uint4") and self.values.dtype == np.int8

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that this object replaces, with the leading axis L of stacked layers."""
        twice = 2 if self.packed else 1
        if not self.group:
            return (*self.values.shape[:-1], twice * self.values.shape[-1])
        *lead, groups, width, outputs = self.values.shape
        return (*lead, outputs, groups * width * twice)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.float_dtype)

    @property
    def nbytes(self) -> int:
        return sum(num_bytes(leaf) for leaf in jax.tree.leaves(self))

    def devices(self) -> set[jax.Device]:
        return self.values.devices()


def is_quantised(leaf: Any) -> bool:
    """Return whether `leaf` is a `Quantised`; as `is_leaf`, this makes jax.tree.map treat each as one leaf."""
    return isinstance(leaf, Quantised)


def has_quantised(tree: Any) -> bool:
    return any(map(is_quantised, jax.tree.leaves(tree, is_leaf=is_quantised)))


def gathered(tree: Any) -> Any:
    """Return the pytree with `shared` = 1 in its quantised matrices, for use where each device holds all inputs."""
    return jax.tree.map(lambda x: replace(x, shared=1) if is_quantised(x) else x, tree, is_leaf=is_quantised)


def num_bytes(array: Any) -> int:
    """Return an array's bytes in memory. (Its `nbytes` counts each four-bit value as a whole byte.)"""
    bits = 4 if array.dtype in (ml_dtypes.int4, ml_dtypes.uint4) else 8 * array.dtype.itemsize
    return prod(array.shape) * bits // 8


def check_name(name: str | None) -> None:
    if name is not None and name not in NAMES:
        raise ValueError(f"weights={name!r} must be one of {', '.join(NAMES)}, or None for the float dtype")


def check_shape(name: str, shape: tuple[int, ...], form: Form, parts: int = 1) -> None:
    """Raise ValueError unless the form can store a matrix [E,D] whose inputs D are divided among `parts` devices."""
    width = shape[-1] // parts
    has = f"{name} has {width}" + (f" on each of {parts} devices" if parts > 1 else "")
    if form.group and width % form.group:
        fits = [f"int4-g{group}" for group in GROUPS if width % group == 0]
        raise ValueError(
            f"weights='int4-g{form.group}' needs a multiple of {form.group} inputs, but {has}: pass "
            f"weights={' or '.join(map(repr, [*fits, 'int8' if width % 2 else 'int4']))}"
        )
    if form.kind == "int4" and not form.group and width % 2:
        raise ValueError(f"weights='int4' needs an even number of inputs, but {has}: pass weights='int8'")


def arrays_of(outputs: int, inputs: int, form: Form, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the arrays of a quantised matrix, by their names in `Quantised`."""
    width, dtype = form.group or inputs, DTYPES[form.kind]
    if packed and form.bits == 4:
        width, dtype = width // 2, np.dtype(np.int8)
    values, scale = (outputs, width), ((outputs,), np.float32)
    if form.group:
        groups = inputs // form.group
        values, scale = (groups, width, outputs), ((groups, outputs), np.float16)
    found = {"values": (values, dtype), "scale": scale, "sample": ((SAMPLE,), ml_dtypes.bfloat16)}
    found |= {"zero": scale} if form.kind == "uint4" else {}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in found.items()}


@cache
def matrix_bytes(outputs: int, inputs: int, form: Form) -> int:
    return sum(map(num_bytes, arrays_of(outputs, inputs, form).values()))


def round_rows(rows: np.ndarray, form: Form) -> tuple[np.ndarray, np.ndarray]:
    """Round M float32 rows [M,D] to values [M,n,g] and scales [M,n], for n groups of g inputs (without, n = 1, g = D).

    scale = max |w| / LARGEST per row or group, values = round(w / scale). A group's scale is rounded to float16 before
    its values are divided by it. Scales that clip the largest values to reduce the squared error made int4 without
    groups worse on a real model (LOG.md).
    """
    count, inputs = rows.shape
    width, largest = form.group or inputs, np.float32(LARGEST[form.kind])
    values = np.empty((count, inputs // width, width), DTYPES["fp8" if form.kind == "fp8" else "int8"])
    scale = np.empty(values.shape[:2], np.float16 if form.group else np.float32)
    step = max(BLOCK_VALUES // inputs, 1)
    for start in range(0, count, step):
        some = slice(start, start + step)
        grouped = rows[some].astype(np.float32, copy=False).reshape(-1, inputs // width, width)
        scale[some] = np.maximum(grouped.max(-1), -grouped.min(-1)) / largest
        divisor = np.where(scale[some] == 0, np.float32(1), scale[some].astype(np.float32))  # 0: a group of zeros
        quotient = np.clip(grouped / divisor[..., None], -largest, largest)
        values[some] = quotient if form.kind == "fp8" else np.rint(quotient)
    return values, scale


def pack(values: np.ndarray, axis: int) -> np.ndarray:
    """Pack int8 values from -8 to 15 into half of `axis`: a byte's low four bits come from the axis's first half."""
    low, high = np.split(values, 2, axis)
    return (low & 15) | (high << 4)


def unpack(packed: Array, signed: bool) -> tuple[Array, Array]:
    """Return, as int8, the two halves that `pack` put into a byte, from -8 to 7 if `signed`, else from 0 to 15."""
    four = np.int8(4)
    high = jax.lax.shift_right_arithmetic(packed, four)
    if not signed:
        return packed & np.int8(15), high & np.int8(15)
    return jax.lax.shift_right_arithmetic(jax.lax.shift_left(packed, four), four), high
