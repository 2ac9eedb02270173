"""Multiply many rows by a matrix quantised in groups, on a TPU: the one product that XLA does not fuse well.

    out[m,e] = sum_d x[m,d] W[e,d],   W[e,d] = values[d,e] * scale[d // g, e] + zero[d // g, e]

Here x is [M,D], W is [E,D], and `values` are stored as [G,g,E], in G groups of g inputs.

XLA multiplies group by group and adds a float32 [M,E] per group, which for many rows takes longer than the product.
This kernel turns a few groups of W at a time into bfloat16 in VMEM, while the matrix unit multiplies the rows by the
previous groups. W is rounded to bfloat16 once, as the weights of a bfloat16 checkpoint are.

Work: 2 M D E flops. Traffic: x once, and per block of rows the values (D E / 2 bytes if they have 4 bits) and the
float32 scales.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from tessera.attention.tpu.matrix_unit import LANES
from tessera.core.quant import Quantised
from tessera.core.shapes import ceil_div, round_up

LEAST_ROWS = 2
"""Minimum rows for the kernel, as a multiple of the inputs per group. With fewer rows, XLA's product per group is as
fast (evidence/tpu-fusions.jsonl)."""
MOST_ROWS, MOST_OUTPUTS, MOST_INPUTS = 1024, 512, 512
"""Maximum sizes of a block. The kernel converts W to bfloat16 once per block of rows, so blocks have many rows."""
X_BYTES = 16 << 20
"""Maximum bytes of a block of x in bfloat16; VMEM holds two such blocks."""
VMEM_BYTES = 56 << 20
"""VMEM that the kernel may use; v5e and later chips have 64 MiB or more."""
PACKED = 16
"""Number of rows in one packed bfloat16 register."""


class Blocks(NamedTuple):
    """Sizes of one grid step: its rows, its outputs, and how many inputs of W it turns into bfloat16 at a time."""

    rows: int
    outputs: int
    inputs: int


def wins(num_rows: int, weight: Quantised) -> bool:
    """Return whether the kernel can compute a product with this weight faster than XLA.

    It can if the values are in groups, there are many rows, the inputs and the outputs fill whole registers, and no
    mesh splits the product, since JAX cannot split the kernel.
    """
    if weight.values.ndim != 3 or jax.sharding.get_abstract_mesh().size > 1:
        return False
    groups, width, outputs = weight.values.shape
    return num_rows >= LEAST_ROWS * width and outputs % LANES == 0 and groups * width % LANES == 0


def cut(num_rows: int, inputs: int, outputs: int, group: int) -> Blocks:
    """Choose the sizes of a grid step: equal blocks of rows, the largest divisors of outputs and inputs."""
    most = min(MOST_ROWS, max(X_BYTES // (2 * inputs) // PACKED, 1) * PACKED)
    rows = round_up(ceil_div(num_rows, ceil_div(num_rows, most)), PACKED)
    wide = next(size for size in range(MOST_OUTPUTS, 0, -LANES) if outputs % size == 0)
    deep = next(size for size in range(MOST_INPUTS, 0, -max(group, LANES)) if inputs % size == 0)
    return Blocks(rows, wide, deep)


def executions(num_rows: int, inputs: int, outputs: int, group: int) -> Mapping[str, float]:
    """Return how often each named scope of the kernel runs, and as "hbm_bytes" how many bytes the kernel moves."""
    block = cut(num_rows, inputs, outputs, group)
    across, down = outputs // block.outputs, ceil_div(num_rows, block.rows)
    weight_bytes = inputs * outputs / 2 + 4 * inputs // group * outputs
    moved = down * (weight_bytes + block.rows * (2 * inputs + 4 * outputs))
    return {"step": down * across, "turn": down * across * (inputs // block.inputs), "hbm_bytes": moved}


def body(x_ref: Any, values_ref: Any, scale_ref: Any, *refs: Any, block: Blocks) -> None:
    """Kernel: multiply a block of rows of x by a block of outputs of W, `block.inputs` inputs at a time."""
    *zero_ref, out_ref = refs
    width = values_ref.shape[1]
    held = block.inputs // width
    out_ref[...] = jnp.zeros_like(out_ref)

    def turn(i, _):
        with jax.named_scope("turn"):
            groups = pl.ds(i * held, held)
            weight = values_ref[groups].astype(jnp.float32) * scale_ref[groups]
            if zero_ref:
                weight = weight + zero_ref[0][groups]
            weight = weight.astype(jnp.bfloat16).reshape(block.inputs, block.outputs)
            x = x_ref[:, pl.ds(pl.multiple_of(i * block.inputs, LANES), block.inputs)]
            out_ref[...] += jnp.dot(x, weight, preferred_element_type=jnp.float32)

    jax.lax.fori_loop(0, values_ref.shape[0] // held, turn, None)


def product(x: Float[Array, "M D"], weight: Quantised, interpret: Any = False) -> Float[Array, "M E"]:
    """Return x W^T in float32, for W [E,D] in groups, D and E multiples of 128; x and W are rounded to bfloat16."""
    num_rows, inputs = x.shape
    groups, width, outputs = weight.values.shape
    block = cut(num_rows, inputs, outputs, width)
    padded = round_up(num_rows, block.rows)
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, padded - num_rows), (0, 0)))
    vectors = [part.astype(jnp.float32)[:, None] for part in (weight.scale, weight.zero) if part is not None]
    of_weight = [pl.BlockSpec((groups, 1, block.outputs), lambda m, e: (0, 0, e))] * len(vectors)
    out = pl.pallas_call(
        functools.partial(body, block=block),
        grid=(padded // block.rows, outputs // block.outputs),
        in_specs=[
            pl.BlockSpec((block.rows, inputs), lambda m, e: (m, 0)),
            pl.BlockSpec((groups, width, block.outputs), lambda m, e: (0, 0, e)),
            *of_weight,
        ],
        out_specs=pl.BlockSpec((block.rows, block.outputs), lambda m, e: (m, e)),
        out_shape=jax.ShapeDtypeStruct((padded, outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        name="grouped_product",
        interpret=interpret,
    )(x, weight.values, *vectors)
    return out[:num_rows]
