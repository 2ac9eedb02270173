"""Gradient of dense prefill on Hopper: one kernel for dq, one for dk and dv.

With scores and lse in bits (base-2 logarithms), the kernels recompute p = 2^(score - lse) from q, k and lse. With
delta = sum(d_out * out) - d_lse for each row, the gradients are

    dp = d_out v^T,  ds = p (dp - delta) softcap'(z),  dq = scale ds k,  dk = scale ds^T q,  dv = p^T d_out.

A thread block keeps its result in the registers of two warpgroups and loops over its operands, which a third warpgroup
fetches. In the dq kernel, a thread block takes 128 rows of one query head and loops over the keys that they see. In the
dk and dv kernel, it takes 128 keys of one KV head and loops over the rows of all query heads of that KV head, so that
no partial dk or dv is written. (If 128 keys would not fit in the registers, the two warpgroups share 64 keys, and each
holds half of the columns.) Nothing accumulates in global memory, so results are equal from run to run.

Before the launch, padding keys and values are zeroed. Rows that see no key are zeroed too, with their cotangents, and
get an lse of +inf. The kernels then need masks only for the diagonal, the window's edge and kv_len. Work: 7 products,
14 H flops per (row, key) pair. Accumulating dq in global memory, in arbitrary order, would need only 5 products.

Calls with a head dim outside HEAD_DIMS, or on a chip other than Hopper, run in plain JAX: each block of rows against
all keys, visible or not.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.contract import AttentionOut, AttentionSpec, Positions
from tessera.attention.gpu import warpgroup
from tessera.attention.gpu.block_ranges import Blocks, key_blocks, row_blocks
from tessera.attention.gpu.warpgroup import ROW, ROWS, WARPGROUPS
from tessera.attention.online_softmax import LOG2_E, dot, raw_scores, scale_of, visible_mask
from tessera.core import hardware
from tessera.core.shapes import ceil_div, round_up

BLOCK = WARPGROUPS * ROWS
STEP = 64
"""Rows (or keys) per step of a thread block's loop."""
STAGES = 2
HEAD_DIMS = (64, 128)
"""Head dims that fit in the registers: 256 columns of dq would leave no registers for scores and addresses."""
SCORES = 1 << 25
"""Maximum number of scores that the plain JAX path holds at once in each of its arrays: 128 MiB in float32."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""Register layout of one number per column of a product."""


class Cut(NamedTuple):
    """Static sizes of a launch; groups is G, the query heads per KV head."""

    spec: AttentionSpec
    groups: int
    head_dim: int
    dtype: str

    @property
    def shared(self) -> bool:
        """Whether the warpgroups share 64 keys, each with half of the columns: a softcap takes 32 registers."""
        return self.head_dim == 128 and self.spec.softcap is not None

    @property
    def keys(self) -> int:
        return ROWS if self.shared else BLOCK


class Inputs(NamedTuple):
    """Inputs in global memory: q, d_out [B,T,N,H]; k, v [B,K,S,H]; lse (bits) and delta [B,N,rows]; positions [B]."""

    q_start: Any
    kv_len: Any
    q_len: Any
    q: Any
    k: Any
    v: Any
    d_out: Any
    lse: Any
    delta: Any


class RowRefs(NamedTuple):
    """Output, shared memory and barriers of the dq kernel."""

    dq: Any  # [B, T, N, H]
    q_smem: Any  # [2, 64, H]: each compute warpgroup's rows of q and, at the end, of dq
    d_out_smem: Any  # likewise
    k_smem: Any  # [STAGES, STEP, H]
    v_smem: Any
    rows_full: Any  # barrier [2]
    full: Any  # barrier [STAGES]: a step's keys and values have landed
    free: Any  # barrier [STAGES]: both compute warpgroups have read them


class KeyRefs(NamedTuple):
    """Outputs, shared memory and barriers of the dk and dv kernel."""

    dk: Any  # [B, K, S, H]
    dv: Any
    k_smem: Any  # [keys, H]: the thread block's keys and, at the end, dk
    v_smem: Any
    q_smem: Any  # [STAGES, STEP, H]
    d_out_smem: Any
    lse_smem: Any  # [STAGES, STEP]
    delta_smem: Any
    keys_full: Any  # barrier
    full: Any  # barrier [STAGES]: a step's rows have landed
    free: Any  # barrier [STAGES]: both compute warpgroups have read them
    read: Any  # barrier on which the compute warpgroups meet at the end


def weights(s: Array, lse: Array, cut: Cut, mask: Array | None) -> tuple[Array, Array]:
    """Return p = 2^(score - lse) and p * softcap'(z), given the products s = q.k without scale and softcap."""
    scale, cap = scale_of(cut.spec, cut.head_dim), cut.spec.softcap
    t = None if cap is None else warpgroup.tanh(s, scale / cap)
    p = jnp.exp2(s * (scale * LOG2_E) - lse if cap is None else t * (cap * LOG2_E) - lse)
    p = p if mask is None else jnp.where(mask, p, 0.0)
    return p, p if cap is None else p * (1.0 - t * t)


def scores_and_dp(q_smem, d_out_smem, k_smem, v_smem) -> tuple[Array, Array]:
    """Compute q k^T and d_out v^T; both products are issued before the first is awaited."""

    def products(s, dp):
        plgpu.wgmma(s, q_smem, k_smem.transpose((1, 0)))
        plgpu.wgmma(dp, d_out_smem, v_smem.transpose((1, 0)))
        return s[...], dp[...]

    shape = plgpu.ACC((q_smem.shape[0], k_smem.shape[0]), jnp.float32)
    return pl.run_scoped(products, shape, shape)


def row_mask(shape: tuple, first: Array, start: Array, kv_len: Array, spec: AttentionSpec) -> Array:
    """Return a mask [rows, keys] of the keys that each row sees; rows begin at position `first`, keys at `start`."""
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    if not spec.causal:
        return key < kv_len - start
    row = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=ROW) + first
    mask = key < warpgroup.per_row(jnp.minimum(kv_len, row + 1) - start, key)
    return mask if spec.window is None else mask & (key > warpgroup.per_row(row - start - spec.window, key))


def key_mask(shape: tuple, first: Array, start: Array, spec: AttentionSpec) -> Array:
    """Mask [keys, rows] by causality and window, not by kv_len or q_len; rows begin at `first`, keys at `start`."""
    key = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=ROW) + (start - first)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    mask = row >= warpgroup.per_row(key, row)
    return mask if spec.window is None else mask & (row < warpgroup.per_row(key + spec.window, row))


def sweep(blocks: Blocks, step, carry):
    """Run carry = step(block, carry, masked=...) over all blocks; only those in [whole, masked) run without a mask."""
    carry = jax.lax.fori_loop(blocks.start, blocks.whole, functools.partial(step, masked=True), carry)
    carry = jax.lax.fori_loop(blocks.whole, blocks.masked, functools.partial(step, masked=False), carry)
    return jax.lax.fori_loop(blocks.masked, blocks.stop, functools.partial(step, masked=True), carry)


def stages_of(free, count: Array, issue) -> None:
    """Call issue(c, slot) for c in [0, count), each once buffer slot = c % STAGES is free; await the last buffers."""

    def step(c, _):
        slot = jax.lax.rem(c, STAGES)
        pl.when(c >= STAGES)(functools.partial(plgpu.barrier_wait, free.at[slot]))
        issue(c, slot)

    def drain(c, _):  # Pallas' interpreter wants every phase of a barrier observed
        plgpu.barrier_wait(free.at[jax.lax.rem(c, STAGES)])

    jax.lax.fori_loop(0, count, step, None)
    jax.lax.fori_loop(jnp.maximum(count - STAGES, 0), count, drain, None)


def rows_body(*refs, cut: Cut):
    """Compute dq for 128 rows of one query head."""
    ins, mine = Inputs(*refs[: len(Inputs._fields)]), RowRefs(*refs[len(Inputs._fields) :])
    n, block, b = (jax.lax.axis_index(name) for name in ("head", "rows", "sequence"))
    # Later causal rows see more keys: run the longest thread blocks first, so that short ones fill the gaps at the end.
    at = (jax.lax.axis_size("rows") - 1 - block) * BLOCK
    first = ins.q_start[b] + at

    def blocks_of():  # recomputed where needed, to save registers
        return key_blocks(first, jnp.minimum(ins.q_len[b] - at, BLOCK), ins.kv_len[b], cut.spec, STEP)

    wg = jax.lax.axis_index("warpgroup")

    @pl.when(wg == WARPGROUPS)
    def fetch():
        plgpu.set_max_registers(warpgroup.FETCH_REGISTERS, action="decrease")
        blocks = blocks_of()

        def issue(c, slot):
            keys = pl.ds((blocks.start + c) * STEP, STEP)
            for source, target in ((ins.k, mine.k_smem), (ins.v, mine.v_smem)):
                head = jax.lax.div(n, cut.groups)
                plgpu.copy_gmem_to_smem(source.at[b, head, keys], target.at[slot], mine.full.at[slot])

        stages_of(mine.free, blocks.stop - blocks.start, issue)

    @pl.when(wg < WARPGROUPS)
    def compute():
        plgpu.set_max_registers(warpgroup.COMPUTE_REGISTERS, action="increase")
        blocks = blocks_of()
        rows = pl.ds(at + wg * ROWS, ROWS)
        q_smem, d_out_smem = mine.q_smem.at[wg], mine.d_out_smem.at[wg]
        plgpu.copy_gmem_to_smem(ins.q.at[b, rows, n], q_smem, mine.rows_full.at[wg])
        plgpu.copy_gmem_to_smem(ins.d_out.at[b, rows, n], d_out_smem, mine.rows_full.at[wg])
        lse, delta = (plgpu.load(x.at[b, n, rows], layout=ROW, optimized=False) for x in (ins.lse, ins.delta))
        plgpu.barrier_wait(mine.rows_full.at[wg])

        def step(c, dq, masked):
            slot = jax.lax.rem(c - blocks.start, STAGES)
            plgpu.barrier_wait(mine.full.at[slot])
            s, dp = scores_and_dp(q_smem, d_out_smem, mine.k_smem.at[slot], mine.v_smem.at[slot])
            mask = row_mask(s.shape, first + wg * ROWS, c * STEP, ins.kv_len[b], cut.spec) if masked else None
            _, p = weights(s, warpgroup.per_row(lse, s), cut, mask)
            ds = p * (dp - warpgroup.per_row(delta, s))
            dq = warpgroup.accumulate(dq, ds.astype(cut.dtype), mine.k_smem.at[slot])
            plgpu.barrier_arrive(mine.free.at[slot])  # keys serve two products, scores and dq: free after the second
            return dq

        dq = sweep(blocks, step, warpgroup.filled((ROWS, cut.head_dim), 0.0))
        # q's memory is free: only this warpgroup read it, and its last product is done.
        q_smem[...] = (dq * scale_of(cut.spec, cut.head_dim)).astype(cut.dtype)
        plgpu.commit_smem()  # the copy reads through the async proxy, which sees threads' writes only after a fence
        plgpu.copy_smem_to_gmem(q_smem, mine.dq.at[b, rows, n])
        plgpu.wait_smem_to_gmem(0)


def keys_body(*refs, cut: Cut):
    """Compute dk and dv for one block of keys of a KV head, summed over all query heads of that KV head."""
    ins, mine = Inputs(*refs[: len(Inputs._fields)]), KeyRefs(*refs[len(Inputs._fields) :])
    h, block, b = (jax.lax.axis_index(name) for name in ("head", "keys", "sequence"))
    at = block * cut.keys

    def blocks_of():  # recomputed where needed, to save registers
        limits = ins.kv_len[b], ins.q_len[b]
        return row_blocks(at, cut.keys, ins.q_start[b], limits, cut.spec, STEP)

    wg = jax.lax.axis_index("warpgroup")

    @pl.when(wg == WARPGROUPS)
    def fetch():
        plgpu.set_max_registers(warpgroup.FETCH_REGISTERS, action="decrease")
        blocks = blocks_of()
        count = blocks.stop - blocks.start
        for source, target in ((ins.k, mine.k_smem), (ins.v, mine.v_smem)):
            plgpu.copy_gmem_to_smem(source.at[b, h, pl.ds(at, cut.keys)], target, mine.keys_full)

        def issue(c, slot):
            n = h * cut.groups + jax.lax.div(c, count)
            rows = pl.ds((blocks.start + jax.lax.rem(c, count)) * STEP, STEP)
            for source, target in ((ins.q, mine.q_smem), (ins.d_out, mine.d_out_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, rows, n], target.at[slot], mine.full.at[slot])
            # lse and delta run along columns here, so threads read them from shared memory, one number per column.
            for source, target in ((ins.lse, mine.lse_smem), (ins.delta, mine.delta_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, n, rows], target.at[slot], mine.full.at[slot])

        stages_of(mine.free, count * cut.groups, issue)

    @pl.when(wg < WARPGROUPS)
    def compute():
        plgpu.set_max_registers(warpgroup.COMPUTE_REGISTERS, action="increase")
        blocks = blocks_of()
        count = blocks.stop - blocks.start
        # `shared`: both warpgroups compute the same scores of 64 keys, then each its own half of dk's and dv's columns.
        width = cut.head_dim // 2 if cut.shared else cut.head_dim
        own, columns = (0, pl.multiple_of(wg * width, width)) if cut.shared else (wg * ROWS, 0)
        keys, part = pl.ds(own, ROWS), pl.ds(columns, width)
        plgpu.barrier_wait(mine.keys_full)

        def step(c, carry, masked, g):
            dk, dv = carry
            slot = jax.lax.rem(g * count + c - blocks.start, STAGES)
            plgpu.barrier_wait(mine.full.at[slot])
            q_smem, d_out_smem = mine.q_smem.at[slot], mine.d_out_smem.at[slot]
            q_part, d_out_part = (x.at[:, part] if cut.shared else x for x in (q_smem, d_out_smem))
            s = warpgroup.scores(mine.k_smem.at[keys], q_smem)

            def per_column(x):
                return jax.lax.broadcast_in_dim(plgpu.load(x.at[slot], layout=COLUMN), s.shape, [1])

            first = ins.q_start[b] + c * STEP
            mask = key_mask(s.shape, first, at + own, cut.spec) if masked and cut.spec.causal else None
            p, sloped = weights(s, per_column(mine.lse_smem), cut, mask)
            dv = warpgroup.accumulate(dv, p.astype(cut.dtype), d_out_part)
            # Compute dp only now: dk, dv and the scores' 32 registers leave no room for 32 more.
            ds = sloped * (warpgroup.scores(mine.v_smem.at[keys], d_out_smem) - per_column(mine.delta_smem))
            plgpu.commit_smem()  # threads have read lse and delta; the next copy over them is asynchronous
            dk = warpgroup.accumulate(dk, ds.astype(cut.dtype), q_part)
            plgpu.barrier_arrive(mine.free.at[slot])
            return dk, dv

        def head_rows(g, carry):
            return sweep(blocks, functools.partial(step, g=g), carry)

        dk, dv = jax.lax.fori_loop(0, cut.groups, head_rows, (warpgroup.filled((ROWS, width), 0.0),) * 2)
        plgpu.barrier_arrive(mine.read)  # wait until both warpgroups have read K and V, which are overwritten below
        plgpu.barrier_wait(mine.read)
        key = plgpu.broadcasted_iota(jnp.int32, dk.shape, 0, layout=plgpu.Layout.WGMMA) + (at + own)
        there = key < ins.kv_len[b]  # checked only here: sums are over rows, and the loop has no register to spare
        mine.k_smem[keys, part] = jnp.where(there, dk * scale_of(cut.spec, cut.head_dim), 0.0).astype(cut.dtype)
        mine.v_smem[keys, part] = jnp.where(there, dv, 0.0).astype(cut.dtype)
        plgpu.commit_smem()
        if cut.shared:  # a copy takes whole rows, to which both warpgroups contribute
            plgpu.barrier_arrive(mine.read)
            plgpu.barrier_wait(mine.read)
        for writer, smem, target in ((0, mine.k_smem, mine.dk), (1, mine.v_smem, mine.dv)):

            @pl.when((wg == writer) | (not cut.shared))
            def write(smem=smem, target=target):
                plgpu.copy_smem_to_gmem(smem.at[keys], target.at[b, h, pl.ds(at + own, ROWS)])

        plgpu.wait_smem_to_gmem(0)


def gradients(
    q, k, v, result: AttentionOut, cotangents: AttentionOut, spec: AttentionSpec, positions: Positions, config=None
) -> tuple[Array, Array, Array]:
    """Compute (dq, dk, dv) of a dense call from its `result`, in the dtypes of q, k and v; `config` is unused."""
    num_queries, num_heads, head_dim = q.shape[1:]
    kv_heads, num_keys = k.shape[1:3]
    cut = Cut(spec, num_heads // kv_heads, head_dim, str(q.dtype))
    # Exclude rows that see no key: their cotangents may be NaN (a norm of 0 gives 0 / 0), and 0 * NaN is NaN.
    is_row = (jnp.arange(num_queries) < positions.q_len[:, None])[..., None] & jnp.isfinite(result.lse)
    is_key = (jnp.arange(num_keys) < positions.kv_len[:, None])[:, None, :, None]
    d_out = jnp.where(is_row[..., None], cotangents.out, 0).astype(q.dtype)
    k, v = (warpgroup.whole_lines(jnp.where(is_key, x, 0), 2) for x in (k, v))
    delta = jnp.sum(result.out.astype(jnp.float32) * d_out.astype(jnp.float32), -1) - cotangents.lse
    lse = jnp.where(is_row, result.lse * LOG2_E, jnp.inf)
    pad = [(0, 0), (0, 0), (0, round_up(num_queries, BLOCK) - num_queries)]
    lse = jnp.pad(jnp.swapaxes(lse, 1, 2), pad, constant_values=jnp.inf)
    delta = jnp.pad(jnp.swapaxes(jnp.where(is_row, delta, 0.0), 1, 2), pad)
    q, d_out = warpgroup.whole_lines(jnp.where(is_row[..., None], q, 0), 1), warpgroup.whole_lines(d_out, 1)
    inputs = Inputs(*positions, q, k, v, d_out, lse, delta)
    here = hardware.gpu_capability()
    fits = head_dim in HEAD_DIMS and (
        here is None or warpgroup.HOPPER.includes(here)
    )  # without a GPU here, compile for Hopper
    dq, dk, dv = (by_kernels if fits else by_rows)(inputs, cut)
    return dq[:, :num_queries], *(x[:, :, :num_keys] for x in (dk, dv))


def by_kernels(inputs: Inputs, cut: Cut) -> tuple[Array, Array, Array]:
    """Launch both kernels; return (dq, dk, dv) in the shapes of q, k and v."""
    (batch, num_queries, num_heads, head_dim), (_, kv_heads, num_keys, _) = inputs.q.shape, inputs.k.shape
    q, k = inputs.q, inputs.k
    line = warpgroup.swizzled(q.dtype)
    steps = plgpu.SMEM((STAGES, STEP, head_dim), q.dtype, transforms=line)
    free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES)
    options = {
        "num_threads": WARPGROUPS + 1,
        "thread_name": "warpgroup",
        "compiler_params": plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    }
    rows = plgpu.SMEM((WARPGROUPS, ROWS, head_dim), q.dtype, transforms=line)
    dq = plgpu.kernel(
        functools.partial(rows_body, cut=cut),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            rows,
            rows,
            steps,
            steps,
            plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            free,
        ],
        grid=(batch, ceil_div(num_queries, BLOCK), num_heads),
        grid_names=("sequence", "rows", "head"),
        kernel_name="gpu_backward_rows",
        **options,
    )(*inputs)
    if warpgroup.simulated():  # the simulator cannot run two kernels at once, so make the second depend on the first
        inputs = inputs._replace(lse=inputs.lse + 0 * dq[0, 0, 0, 0].astype(jnp.float32))
    keys = plgpu.SMEM((cut.keys, head_dim), q.dtype, transforms=line)
    numbers = plgpu.SMEM((STAGES, STEP), jnp.float32)
    dk, dv = plgpu.kernel(
        functools.partial(keys_body, cut=cut),
        out_type=[jax.ShapeDtypeStruct(k.shape, q.dtype)] * 2,
        scratch_types=[
            keys,
            keys,
            steps,
            steps,
            numbers,
            numbers,
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
            free,
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        grid=(batch, ceil_div(num_keys, cut.keys), kv_heads),
        grid_names=("sequence", "keys", "head"),
        kernel_name="gpu_backward_keys",
        **options,
    )(*inputs)
    return dq, dk, dv


def by_rows(inputs: Inputs, cut: Cut) -> tuple[Array, Array, Array]:
    """Compute the same as `by_kernels` in plain JAX: blocks of rows against all keys, dk and dv summed in float32."""
    k, v, spec = inputs.k, inputs.v, cut.spec
    batch, kv_heads, num_keys, head_dim = k.shape
    rows = inputs.lse.shape[2]
    fitting = SCORES // (batch * kv_heads * cut.groups * num_keys)
    size = next((n for n in (128, 64, 32, 16, 8, 4, 2) if n <= fitting), 1)  # a divisor of rows
    token, key = jnp.repeat(jnp.arange(size, dtype=jnp.int32), cut.groups), jnp.arange(num_keys, dtype=jnp.int32)

    def in_blocks(x: Array) -> Array:
        """Reshape [B,T,N,...] to blocks of `size` tokens, [blocks, B, K, size * G, ...]."""
        x = jnp.pad(x, [(0, 0), (0, rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, size, kv_heads, cut.groups, *x.shape[3:])
        x = jnp.moveaxis(x, (1, 3), (0, 2))
        return x.reshape(*x.shape[:3], -1, *x.shape[5:])

    def block(sums, xs):
        first, q, d_out, lse, delta = xs
        row, kv_len = (inputs.q_start + first)[:, None] + token, inputs.kv_len[:, None, None, None]
        z, factor = raw_scores(q, k, spec)
        mask = visible_mask(row[:, None, :, None], key, kv_len, spec)
        p = jnp.where(mask, jnp.exp2(z * factor - lse[..., None]), 0.0)
        ds = p * (dot(d_out, v, -1, -1) - delta[..., None]) * scale_of(spec, head_dim)
        ds = ds if spec.softcap is None else ds * (1 - jnp.square(z / spec.softcap))
        dk, dv = dot(ds, q, -2, -2), dot(p, d_out, -2, -2)
        return (sums[0] + dk, sums[1] + dv), dot(ds, k, -1, -2).astype(q.dtype)

    numbers = (jnp.swapaxes(x, 1, 2) for x in (inputs.lse, inputs.delta))
    parts = [in_blocks(x) for x in (inputs.q, inputs.d_out, *numbers)]
    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(block, (zeros, zeros), (jnp.arange(0, rows, size, dtype=jnp.int32), *parts))
    dq = dq.reshape(-1, batch, kv_heads, size, cut.groups, head_dim)
    dq = jnp.moveaxis(dq, (0, 2), (1, 3)).reshape(batch, rows, -1, head_dim)
    return dq[:, : inputs.q.shape[1]], dk.astype(k.dtype), dv.astype(v.dtype)
