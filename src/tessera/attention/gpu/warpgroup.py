"""Building blocks of the Hopper kernels: constants, layouts, and products that also run in Pallas' interpreter.

A *warpgroup* is 128 threads that together issue one matrix product (wgmma) of 64 rows. Shared memory that a product
reads is swizzled in lines of 128 bytes, so that neither the copy engine (TMA) nor the product causes bank conflicts.
"""

import math
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.contract import AttentionSpec
from tessera.attention.kernel import Capability
from tessera.attention.online_softmax import FLOOR, LOG2_E, scale_of
from tessera.attention.simulation import simulated_by

HOPPER = Capability(name="9.0 (Hopper)", least=9.0, most=9.0)
"""Only Hopper: earlier and later chips lack its matrix instruction, wgmma."""
ROWS = 64
"""Rows of one warpgroup's product."""
WARPGROUPS = 2
"""Compute warpgroups per thread block; in the prefill kernels, warpgroup number 2 fetches."""
FETCH_REGISTERS, COMPUTE_REGISTERS = 24, 240
"""Registers per thread of the fetching warpgroup and of each of the two compute warpgroups: 504 in total."""
LIST_FETCH_REGISTERS, LIST_COMPUTE_REGISTERS = 40, 232
"""Registers per thread in the sparse kernels, whose fetching warpgroup reads lists and computes addresses."""
LEAST_TOKENS = 8
"""Minimum tokens per TMA copy: TMA fills swizzled shared memory eight rows at a time."""
SHARED_BYTES = 232_448
"""Bytes of shared memory that one thread block may have on Hopper."""
LINE_BYTES = 128
"""Bytes per swizzled line of shared memory."""
OPERAND = "operand_of_a_product"
"""Named scope of reads that the simulator must treat as wgmma operand reads."""

ROW = plgpu.Layout.WGMMA.reduce(1)
"""Register layout of one number per row of a product."""


def swizzled(dtype) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the layout transforms of a [..., rows, columns] array in shared memory that products read."""
    return plgpu.TilingTransform((8, LINE_BYTES // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(LINE_BYTES)


def simulated() -> bool:
    """Return whether the kernel being traced will run in Pallas' GPU interpreter, which lacks a few operations."""
    return simulated_by(plgpu.InterpretGPUParams)


def whole_lines(x: Array, axis: int) -> Array:
    """Pad x along the axis to a multiple of LEAST_TOKENS, as TMA requires; return x itself if no padding is needed."""
    missing = -x.shape[axis] % LEAST_TOKENS
    return jnp.pad(x, [(0, missing * (at == axis)) for at in range(x.ndim)]) if missing else x


def scores(q_smem, k_smem, while_busy: Callable[[], None] = lambda: None) -> Array:
    """Compute q k^T of [64,H] queries and [X,H] keys in shared memory, as float32 [64,X] in registers.

    `while_busy` is called after the product is issued, while the tensor core works.
    """

    def product(acc):
        plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
        while_busy()
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((q_smem.shape[0], k_smem.shape[0]), jnp.float32))


def accumulate(acc: Array, p: Array, v_smem) -> Array:
    """Compute acc + p v, with the weights p [64,X] in registers and the values v [X,H] in shared memory."""
    if simulated():  # the interpreter lacks run_state and products whose left operand is in registers
        with jax.named_scope(OPERAND):  # marks the read as the product's (asynchronous proxy) for the race check
            v = v_smem[...].astype(jnp.float32)
        return acc + jnp.dot(p.astype(jnp.float32), v, precision="highest")
    return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_smem))(plgpu.ACC.init(acc))


def both_products(q_smem, k_smem, acc, p, v_smem, weights: Callable, issued: Callable[[], None] = lambda: None):
    """Return acc + p v, and the result of weights(q k^T): four arrays, namely m, l, the factor on acc, and the next p.

    `issued` is called once both products are issued. `weights` runs while the tensor core still adds p v.
    """
    if simulated():
        s = scores(q_smem, k_smem, issued)
        return accumulate(acc, p, v_smem), weights(s)
    rows = filled((ROWS,), 0.0, ROW)

    def products(refs):
        acc_ref, *out_refs = refs

        def product(s_ref):
            # Both are issued before the first is awaited. wait_n=1 waits until one is left in flight: products finish
            # in order, so the scores are there, while p v may still run.
            plgpu.wgmma(s_ref, q_smem, k_smem.transpose((1, 0)))
            plgpu.wgmma(acc_ref, p, v_smem)
            issued()
            for ref, value in zip(out_refs, weights(plgpu.wgmma_accumulator_load(s_ref, wait_n=1)), strict=True):
                ref[...] = value

        pl.run_scoped(product, plgpu.ACC((q_smem.shape[0], k_smem.shape[0]), jnp.float32))

    acc, *out = pl.run_state(products)((plgpu.ACC.init(acc), rows, rows, rows, filled(p.shape, 0.0)))
    return acc, out


def weigh(s: Array, m: Array, spec: AttentionSpec, head_dim: int, hide: Callable | None = None) -> tuple:
    """Return the new maximum m (bits), the factor on earlier sums, and the weights p of the products s = q k^T.

    `hide` sets unseen ones to -inf. The factor is positive, so a row's maximum can be taken before it is applied.
    """
    scale, cap = scale_of(spec, head_dim), spec.softcap
    if cap is not None:
        s, factor = tanh(s, scale / cap), cap * LOG2_E
    else:
        s, factor = (s, scale * LOG2_E) if scale > 0 else (s * (scale * LOG2_E), 1.0)
    s = s if hide is None else hide(s)
    new_m = jnp.maximum(m, s.max(1) * factor)
    alpha = jnp.exp2(m - new_m)
    return new_m, alpha, jnp.exp2(s * factor - per_row(new_m, s))


def initial_state(head_dim: int) -> tuple[Array, Array, Array]:
    """Return the online-softmax state (m, l, acc) of 64 rows before any key."""
    return filled((ROWS,), FLOOR, ROW), filled((ROWS,), 0.0, ROW), filled((ROWS, head_dim), 0.0)


def blank_values(v_block, lo, hi) -> None:
    """Zero a block's values outside rows [lo, hi): their weight is 0, but they may be NaN, and 0 * NaN is NaN."""
    rows, columns = min(v_block.shape[0], ROWS), LINE_BYTES // v_block.dtype.itemsize
    key = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 0, layout=plgpu.Layout.WGMMA)
    for row in range(0, v_block.shape[0], rows):
        seen = (key >= lo - row) & (key < hi - row)
        for column in range(0, v_block.shape[1], columns):  # a few registers at a time
            part = v_block.at[pl.ds(row, rows), pl.ds(column, columns)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(seen, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def tanh(x: Array, factor: float) -> Array:
    """Compute tanh(factor * x) with exp2, because the chip's own instruction is accurate to only 11 bits."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2.0 * math.log2(math.e) * factor)))


def per_row(x: Array, like: Array) -> Array:
    """Broadcast one number per row to the columns of `like`."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def filled(shape: tuple[int, ...], value: float, layout=plgpu.Layout.WGMMA) -> Array:
    """Return a float32 array in registers, filled with `value`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
