"""The TPU that a program is traced for, products on its matrix unit, and helpers that prepare their operands."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from tessera.core.shapes import ceil_div

LANES = 128
"""Lanes of a vector register: the number of elements along its last dimension."""


class Chip(NamedTuple):
    """What a kernel's sizes depend on; the defaults are those of v6e."""

    cores: int = 1  # cores that share a launch
    columns: int = 256  # of the matrix unit
    vmem_bytes: int = 128 << 20  # of one core
    generation: int = 6

    @property
    def vmem_limit(self) -> int:
        """Bytes of VMEM that a kernel may use; the compiler needs the rest."""
        return self.vmem_bytes * 7 // 8


def chip() -> Chip:
    """Return the TPU that the program is traced for; without one, v6e."""
    if not pltpu.is_tpu_device():
        return Chip()
    info = pltpu.get_tpu_info()
    return Chip(info.num_cores, info.mxu_column_size, info.vmem_capacity_bytes, info.generation)


def estimate(needed: Mapping[str, float], head_dim: int) -> pl.CostEstimate:
    """Tell XLA what a kernel costs that needs these flops and bytes (see `work`): 4 H flops and one exp2 per score."""
    flops = int(needed["flops"])
    return pl.CostEstimate(flops=flops, bytes_accessed=int(needed["bytes"]), transcendentals=flops // (4 * head_dim))


def dot(a: Array, b: Array, contract_b: int, contract_a: int = 1) -> Array:
    """Multiply two matrices with float32 sums, contracting the given axes; a float32 `a` gets full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract_a,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def thirds(x: Array) -> list[Array]:
    """Split float32 x into three float32 arrays that sum to x, each exact in bfloat16 (8 bits of mantissa)."""
    parts = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        parts.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        x = x - parts[-1]
    return parts


def product(a: Array, b: Array, contract_b: int, exact: bool = False) -> Array:
    """Multiply float32 a by b, contracting a's last axis with b's axis contract_b, with float32 sums.

    If b is bfloat16, a is rounded to bfloat16. If b is int8, b becomes bfloat16, which holds it exactly, and a is
    rounded to bfloat16 or, with `exact`, split into `thirds`. If b is float32, both a and b are split into `thirds`;
    only six of the nine products of thirds matter. Precision.HIGHEST also computes six, but here each third of b enters
    the matrix unit once, not up to three times: 1,810 instruction bundles instead of 3,009 for a block of decode.
    """
    dims = (((1,), (contract_b,)), ((), ()))
    multiply = functools.partial(jax.lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
    if b.dtype == jnp.int8:
        b = b.astype(jnp.bfloat16)
        if exact:
            y, rows = multiply(jnp.concatenate(thirds(a)).astype(jnp.bfloat16), b), a.shape[0]
            return y[:rows] + (y[rows : 2 * rows] + y[2 * rows :])
    if b.dtype == jnp.bfloat16:
        return multiply(a.astype(jnp.bfloat16), b)
    rows, a_parts, total = a.shape[0], thirds(a), 0.0
    for i, part in reversed(list(enumerate(thirds(b)))):  # add small products first
        y = multiply(jnp.concatenate(a_parts[: 3 - i]).astype(jnp.bfloat16), part.astype(jnp.bfloat16))
        for j in reversed(range(3 - i)):
            total = total + y[j * rows : (j + 1) * rows]
    return total


def dequantised(x: Array, scale: Array, dtype: DTypeLike) -> Array:
    """Multiply int8 rows [X,H] by their scales [1,X], and round the products to `dtype`.

    In kernels whose query rows far outnumber H, this is less work than scaling scores and weights. Each scale lies in
    one lane and must reach all lanes of its row, so the scales are broadcast and transposed.
    """
    columns = jnp.broadcast_to(scale.astype(jnp.float32), (LANES, x.shape[0])).T
    return (x.astype(jnp.float32) * widen(columns, x.shape[1])).astype(dtype)


def widen(x: Array, width: int) -> Array:
    """Widen x [R,128], whose lanes are all equal, to [R,width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.tile(x, (1, ceil_div(width, LANES)))[:, :width]
