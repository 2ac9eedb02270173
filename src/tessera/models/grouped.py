"""The product with a matrix of 4-bit groups on a TPU, for many rows: the one product of `products` that XLA cannot fuse.

    out[m,e] = sum_d x[m,d] W[d,e],   W[d,e] = values[d,e] * scale[d // g, e] + zero[d // g, e]

XLA multiplies group by group. For a few rows that reads only the quantised bytes, but each group adds a float32 [M,E] to
the sum: G times the result's bytes. This kernel walks over blocks of W, turns one block into bfloat16 in VMEM, and
multiplies it by all rows of a block of x; the float32 sum stays in VMEM. W is rounded to bfloat16 once, as a bfloat16
checkpoint's weights are.

Work: 2 M D E flops. Traffic: D E / 2 bytes of values and the scales per block of rows, x once per block of columns.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from tessera.core.quant import Quantised
from tessera.core.shapes import round_up

LEAST_ROWS = 32
"""Rows from which the kernel beats one XLA product per group (evidence/tpu-fusions.jsonl)."""
MOST_ROWS = 1024
"""Rows per block: W is turned into bfloat16 again for each block of rows."""
BLOCK_D, BLOCK_E = 512, 1024
"""Inputs and outputs per block of W, which holds 1 MiB in bfloat16."""
ALIGNED = 128
"""Outputs are read in multiples of a register's lanes."""


class Blocks(NamedTuple):
    """Sizes of one grid step: rows, inputs and outputs."""

    rows: int
    inputs: int
    outputs: int


def fits(weight: Quantised) -> bool:
    """Return whether the kernel takes this weight: whole registers of outputs, and whole groups per block."""
    *_, groups, width, outputs = weight.values.shape
    return weight.values.ndim == 3 and outputs % ALIGNED == 0 and (groups * width) % 128 == 0


def cut(num_rows: int, inputs: int, outputs: int, group: int) -> Blocks:
    """Choose the blocks: the largest divisors of the matrix up to BLOCK_D and BLOCK_E, whole groups of inputs."""
    rows = min(round_up(num_rows, 16), MOST_ROWS)
    unit = max(group, 128)  # inputs are lanes of x
    deep = next(size for size in range(BLOCK_D - BLOCK_D % unit, 0, -unit) if inputs % size == 0)
    wide = next(size for size in range(BLOCK_E, 0, -ALIGNED) if outputs % size == 0)
    return Blocks(rows, deep, wide)


def body(x_ref: Any, values_ref: Any, scale_ref: Any, *refs: Any, signed: bool) -> None:
    """Add one block of inputs to the sum of a block of rows and outputs."""
    *zero_ref, out_ref, sum_ref = refs
    step = pl.program_id(2)
    groups, width, outputs = values_ref.shape
    with jax.named_scope("convert"):
        values = values_ref[...].astype(jnp.float32)
        weight = values * scale_ref[...].astype(jnp.float32)[:, None]
        if zero_ref:
            weight = weight + zero_ref[0][...].astype(jnp.float32)[:, None]
        weight = weight.astype(jnp.bfloat16).reshape(groups * width, outputs)
    with jax.named_scope("product"):
        part = jnp.dot(x_ref[...], weight, preferred_element_type=jnp.float32)

    @pl.when(step == 0)
    def _():
        with jax.named_scope("first"):
            sum_ref[...] = part

    @pl.when(step > 0)
    def _():
        with jax.named_scope("more"):
            sum_ref[...] += part

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        with jax.named_scope("last"):
            out_ref[...] = sum_ref[...]


def product(x: Float[Array, "M D"], weight: Quantised, interpret: Any = False) -> Float[Array, "M E"]:
    """Return x W^T in float32 for bfloat16 rows and a weight W [E,D] in groups that `fits`."""
    num_rows, inputs = x.shape
    groups, width, outputs = weight.values.shape
    block = cut(num_rows, inputs, outputs, width)
    padded = round_up(num_rows, block.rows)
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, padded - num_rows), (0, 0)))
    held = block.inputs // width
    vectors = [part.astype(jnp.float32) for part in (weight.scale, weight.zero) if part is not None]
    of_weight = [pl.BlockSpec((held, block.outputs), lambda m, e, d: (d, e))] * len(vectors)
    out = pl.pallas_call(
        functools.partial(body, signed=weight.kind == "int4"),
        grid=(padded // block.rows, outputs // block.outputs, inputs // block.inputs),
        in_specs=[
            pl.BlockSpec((block.rows, block.inputs), lambda m, e, d: (m, d)),
            pl.BlockSpec((held, width, block.outputs), lambda m, e, d: (d, 0, e)),
            *of_weight,
        ],
        out_specs=pl.BlockSpec((block.rows, block.outputs), lambda m, e, d: (m, e)),
        scratch_shapes=[pltpu.VMEM((block.rows, block.outputs), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((padded, outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="grouped_product",
        interpret=interpret,
    )(x, weight.values, *vectors)
    return out[:num_rows]
