"""Quantised matrices: a pytree node that replaces a weight [E,D], and the forms in which weights can be loaded.

    W[e,d] ~ values[e,d] * scale[e]                        one scale per output channel
    W[e,d] ~ values[d // g, d % g, e] * scale[d // g, e]   one scale per group of g inputs
             + zero[d // g, e]                             GGUF's Q4_1 only

Groups come first, [G,g,E], because XLA then fuses the conversion into one batched product per group on TPU. Four-bit
values are `jnp.int4` except on CPU, where XLA unpacks that type one value at a time; there a byte holds two values, one
from the first half of a row (or group) in its low four bits and one from the second half in its high four bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax import Array

GROUPS = (32, 64, 128)
"""Allowed group sizes: numbers of inputs that share a scale."""
SAMPLE = 64
"""Elements of the original weight that a `Quantised` stores, so that the model's fingerprint stays the same."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form in which a matrix is stored.

    Attributes:
        kind: "int8", "int4" or "fp8" (e4m3, 3 bits of mantissa).
        group: inputs that share a scale; 0 for one scale per output channel.
        rounds_rows: round the activations of long calls to int8, too (w8a8).
    """

    kind: str
    group: int = 0
    rounds_rows: bool = False

    @property
    def bits(self) -> int:
        """Bits per value, without the scales."""
        return 4 if self.kind == "int4" else 8


STORED = "gguf"
"""Name of the form that keeps the quantised blocks of a GGUF file unchanged."""

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
"""Largest magnitude of a value. -128 and -8 are unused, so that the integers are symmetric around 0."""


BLOCK_VALUES = 1 << 18
"""Values rounded at a time. Their temporary copies fit the CPU's cache and add little to peak memory."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantised:
    """A quantised matrix [E,D], in the place of a float array in `Params`; arrays of stacked layers have a leading L.

    Attributes:
        values: [E,D], or [G,g,E] with groups; packing two four-bit values per byte halves D or g.
        scale: float32 [E], or float16 [G,E].
        zero: float16 [G,E], added to each value of the group; None for symmetric forms.
        sample: bfloat16 [64], evenly spaced elements of the original weight, which identify it.
        kind: "int8", "int4", "uint4" (GGUF's Q4_1) or "fp8".
        group: inputs that share a scale; 0 for one scale per output channel.
        rounds_rows: see `Form`.
        float_dtype: name of the model's float dtype, which a lookup returns.
    """

    values: Array
    scale: Array
    zero: Array | None = None
    sample: Array
    kind: str = field(metadata={"static": True})
    group: int = field(default=0, metadata={"static": True})
    rounds_rows: bool = field(default=False, metadata={"static": True})
    float_dtype: str = field(metadata={"static": True})

    @property
    def packed(self) -> bool:
        """Whether a byte holds two values."""
        return self.kind in ("int4", "uint4") and self.values.dtype == np.int8

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that this object replaces, with the leading L of stacked layers."""
        twice = 2 if self.packed else 1
        if not self.group:
            return (*self.values.shape[:-1], twice * self.values.shape[-1])
        *lead, groups, width, outputs = self.values.shape
        return (*lead, outputs, groups * width * twice)

    @property
    def dtype(self) -> np.dtype:
        """Float dtype of the matrix that this object replaces."""
        return np.dtype(self.float_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(num_bytes(leaf) for leaf in jax.tree.leaves(self))

    def devices(self) -> set[jax.Device]:
        """Return the devices that hold the values."""
        return self.values.devices()


def is_quantised(leaf: Any) -> bool:
    """Return whether `leaf` is a `Quantised`. As `is_leaf`, this keeps jax.tree.map from descending into its arrays."""
    return isinstance(leaf, Quantised)


def has_quantised(tree: Any) -> bool:
    """Return whether a pytree holds a quantised matrix."""
    return any(map(is_quantised, jax.tree.leaves(tree, is_leaf=is_quantised)))


def num_bytes(array: Any) -> int:
    """Return an array's bytes in memory. (Its `nbytes` counts each four-bit value as a whole byte.)"""
    bits = 4 if array.dtype in (ml_dtypes.int4, ml_dtypes.uint4) else 8 * array.dtype.itemsize
    return prod(array.shape) * bits // 8


def check_name(name: str | None) -> None:
    """Raise ValueError unless `name` is None or one of NAMES."""
    if name is not None and name not in NAMES:
        raise ValueError(f"weights={name!r} must be one of {', '.join(NAMES)}, or None for the float dtype")


def check_shape(name: str, shape: tuple[int, ...], form: Form) -> None:
    """Raise ValueError unless the form can store a matrix of this shape; `name` is for the message."""
    width = shape[-1]
    if form.group and width % form.group:
        fits = [f"int4-g{group}" for group in GROUPS if width % group == 0]
        raise ValueError(
            f"weights='int4-g{form.group}' needs inputs in multiples of {form.group}, and {name} has {width}: pass "
            f"weights={' or '.join(map(repr, [*fits, 'int4']))}"
        )
    if form.kind == "int4" and not form.group and width % 2:
        raise ValueError(f"weights='int4' packs two inputs per byte, and {name} has {width}: pass weights='int8'")


class Parts(NamedTuple):
    """A quantised matrix on the host, before four-bit values are packed."""

    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None


def quantise(matrix: np.ndarray, form: Form) -> Parts:
    """Round a float32 matrix [E,D]: scale = max |w| / LARGEST per channel or group, values = round(w / scale).

    A group's values are divided by its scale after the scale is rounded to float16. Smaller scales, which clip the
    largest values and minimise the squared error, made int4 per channel worse on a real model (LOG.md).
    """
    outputs, inputs = matrix.shape
    width, largest = form.group or inputs, np.float32(LARGEST[form.kind])
    values = np.empty((outputs, inputs // width, width), ml_dtypes.float8_e4m3fn if form.kind == "fp8" else np.int8)
    scale = np.empty(values.shape[:2], np.float16 if form.group else np.float32)
    step = max(BLOCK_VALUES // inputs, 1)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        grouped = matrix[rows].reshape(-1, inputs // width, width)
        scale[rows] = np.maximum(grouped.max(-1), -grouped.min(-1)) / largest
        divisor = np.where(scale[rows] == 0, np.float32(1), scale[rows].astype(np.float32))  # 0: a group of zeros
        quotient = np.clip(grouped / divisor[..., None], -largest, largest)
        values[rows] = quotient if form.kind == "fp8" else np.rint(quotient)
    if not form.group:
        return Parts(values.reshape(outputs, inputs), scale[:, 0])
    return Parts(np.ascontiguousarray(values.transpose(1, 2, 0)), np.ascontiguousarray(scale.T))


def pack(values: np.ndarray, axis: int) -> np.ndarray:
    """Pack int8 values of -8 to 15, two per byte: low four bits from the axis's first half, high from its second."""
    low, high = np.split(values, 2, axis)
    return (low & 15) | (high << 4)


def unpack(packed: Array, signed: bool) -> tuple[Array, Array]:
    """Return the two halves of packed values along the packed axis, as int8."""
    four = np.int8(4)
    high = jax.lax.shift_right_arithmetic(packed, four)
    if not signed:
        return packed & np.int8(15), high & np.int8(15)
    return jax.lax.shift_right_arithmetic(jax.lax.shift_left(packed, four), four), high


def place(parts: Parts, sample: np.ndarray, *, kind: str, form: Form, dtype: Any, packed: bool) -> Quantised:
    """Put a quantised matrix on the default device.

    Args:
        parts: values and scales on the host.
        sample: see `Quantised`.
        kind: see `Quantised`.
        form: gives `group` and `rounds_rows`.
        dtype: float dtype of the model.
        packed: pack four-bit values two per byte, for a CPU; else store them as int4 or uint4.
    """
    values = parts.values
    if kind in ("int4", "uint4"):
        axis = values.ndim - (2 if form.group else 1)
        values = pack(values, axis) if packed else values.astype(getattr(ml_dtypes, kind))
    leaves = (values, parts.scale, parts.zero, sample)
    values, scale, zero, sample = (None if leaf is None else jax.device_put(leaf) for leaf in leaves)
    return Quantised(
        values=values, scale=scale, zero=zero, sample=sample, kind=kind, group=form.group,
        rounds_rows=form.rounds_rows, float_dtype=np.dtype(dtype).name,
    )  # fmt: skip


def dequantised(weight: Quantised) -> np.ndarray:
    """Compute, on the host, the float32 matrix [E,D] that a quantised matrix represents."""
    values, scale = np.asarray(weight.values), np.asarray(weight.scale, np.float32)
    if weight.packed:
        halves = map(np.asarray, unpack(weight.values, weight.kind == "int4"))
        values = np.concatenate([*halves], -2 if weight.group else -1)
    if not weight.group:
        return values.astype(np.float32) * scale[:, None]
    whole = values.astype(np.float32) * scale[:, None]
    if weight.zero is not None:
        whole = whole + np.asarray(weight.zero, np.float32)[:, None]
    return whole.reshape(-1, whole.shape[-1]).T
