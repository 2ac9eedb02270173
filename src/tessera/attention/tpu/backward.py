"""Gradient of dense prefill attention for TPU: dq, dk and dv in one pass, with probabilities recomputed per block.

Scores y and lse are in bits, that is, times log2(e). With p = 2^(y - lse), d = rowsum(d_out * out) - d_lse and
ds = p (d_out v^T - d) softcap'(z), the gradients are dq = scale ds k, dk = scale ds^T q and dv = p^T d_out.

Work: 5 products, 10 H flops per visible (row, key) pair; two kernels, one for dq and one for dk and dv, would need 7
products.

Keys are cut into slabs of block_s. A slab's K and V are fetched once and stay in VMEM, with the float32 sums of its dk
and dv, so dk and dv are summed over rows and heads on chip. A grid step runs one row block (block_t tokens x G heads)
of a KV head against the chunks of the slab that its rows see. Chunks that none of its rows see are skipped, and only
chunks that are partly visible are masked. With one slab, dq is complete after the grid step; with more slabs, its
float32 sum is stored to HBM and fetched again, once per row block and slab.

The scores of a head are computed transposed, as [keys, tokens], for two reasons. First, lse and d are then vectors
along lanes, which broadcast over keys for free. Second, of the three products that take p or ds, only the one for dq
needs a transpose, and transposes run on a unit that is otherwise idle.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.contract import AttentionOut, AttentionSpec, Positions, Shapes
from tessera.attention.online_softmax import LOG2_E, query_factor, scale_of
from tessera.attention.tpu.matrix_unit import LANES, chip, dot
from tessera.attention.tpu.prefill_blocks import masked_runs
from tessera.core.shapes import ceil_div, round_up


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes, each a power of two of at least 128."""

    block_t: int  # query tokens per row block (block_t * G rows)
    block_s: int  # keys per slab. Longer slabs reduce the traffic of dq, but a slab must fit in VMEM.
    chunk: int  # keys per loop iteration, at most block_s

    def __post_init__(self):
        for name in ("block_t", "block_s", "chunk"):
            value = getattr(self, name)
            if value < LANES or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two of at least {LANES}")


class Cut(NamedTuple):
    """Static sizes of one call, which is divided into `blocks` blocks of rows and `slabs` slabs of keys."""

    spec: AttentionSpec
    groups: int
    head_dim: int
    num_keys: int
    block_t: int
    block_s: int
    chunk: int
    blocks: int
    slabs: int
    flat: bool

    @property
    def scale(self) -> float:
        return scale_of(self.spec, self.head_dim)

    @property
    def factor(self) -> float:
        return query_factor(self.spec, self.head_dim)


class Refs(NamedTuple):
    """References of the kernel body: inputs, outputs, then scratch; `bits` is the lse of the forward pass in bits."""

    q: Array  # [1, G, block_t, H]
    k: Array  # [1, 1, block_s, H]
    v: Array
    out: Array  # [1, block_t, G * H] if cut.flat, else like q
    d_out: Array
    bits: Array  # [1, 1, G, block_t]
    d_lse: Array
    dq: Array  # like q; with several slabs, float32 [B, N, T, H] in HBM
    dk: Array  # like k
    dv: Array
    q_scaled: Array  # [G, block_t, H]
    d_rows: Array
    offset: Array  # [G, block_t]: d
    dq_sum: Array  # [G, block_t, H] float32
    dk_sum: Array  # [block_s, H] float32
    dv_sum: Array
    copied: Array | None  # DMA semaphore; with several slabs


class Range(NamedTuple):
    """Chunks [begin, stop) of a slab that a row block needs; those in [full_begin, full_stop) need no mask."""

    begin: Array
    full_begin: Array
    full_stop: Array
    stop: Array


def cut_call(spec: AttentionSpec, shapes: Shapes, config: Config) -> Cut:
    groups = shapes.num_heads // shapes.num_kv_heads
    block_t = min(config.block_t, round_up(shapes.num_queries, LANES))
    block_s = min(config.block_s, max(1 << (shapes.num_keys - 1).bit_length(), LANES))
    chunk = min(config.chunk, block_s)
    if shapes.num_keys <= block_s:
        block_s = round_up(shapes.num_keys, chunk)
    blocks, slabs = ceil_div(shapes.num_queries, block_t), ceil_div(shapes.num_keys, block_s)
    flat = (groups * shapes.head_dim) % LANES == 0
    return Cut(spec, groups, shapes.head_dim, shapes.num_keys, block_t, block_s, chunk, blocks, slabs, flat)


def chunk_range(first, last, kv_len, base, cut: Cut, xp=jnp) -> Range:
    """Return the chunks that rows at positions `first` to `last` need, in the slab that begins at key `base`."""

    def chunk_of(position, up: bool):
        return (xp.clip(position - base, 0, cut.block_s) + (cut.chunk - 1 if up else 0)) // cut.chunk

    return Range(*masked_runs(first, last, kv_len, cut.spec, chunk_of, xp))


def range_of(b, slab, i, positions: Positions, cut: Cut) -> Range:
    """Return the chunks of slab `slab` that row block i of sequence b needs; none if all its rows are padding."""
    q_start, kv_len, q_len = (p[b] for p in positions)
    first = q_start + i * cut.block_t
    last = q_start + jnp.minimum((i + 1) * cut.block_t, q_len) - 1
    # A row block of padding needs no chunk.
    kv_len = jnp.where(i * cut.block_t < q_len, jnp.clip(kv_len, 0, cut.num_keys), 0)
    return chunk_range(first, last, kv_len, slab * cut.block_s, cut)


def body(q_start, kv_len, q_len, *refs, cut: Cut):
    """Run grid step (b, h, slab, i): row block i of KV head h against the keys of one slab."""
    refs = Refs(*refs, *[None] * (len(Refs._fields) - len(refs)))
    b, h, slab, i = (pl.program_id(axis) for axis in range(4))
    positions = Positions(q_start, kv_len, q_len)
    chunks = range_of(b, slab, i, positions, cut)
    live = chunks.begin < chunks.stop

    @pl.when(i == 0)
    @jax.named_scope("clear")
    def clear():
        refs.dk_sum[...] = jnp.zeros_like(refs.dk_sum)
        refs.dv_sum[...] = jnp.zeros_like(refs.dv_sum)

    @pl.when(live)
    @jax.named_scope("first")
    def first():
        take_rows(refs, q_start[b], kv_len[b], q_len[b], i, cut)

    stored = None
    if cut.slabs > 1:
        heads, tokens = pl.ds(h * cut.groups, cut.groups), pl.ds(i * cut.block_t, cut.block_t)
        stored = refs.dq.at[b, heads, tokens]

    # In the first slab, also for row blocks that see none of its keys: their dq must be written once, as zeros.
    @pl.when(live | (slab == 0))
    @jax.named_scope("clear_rows")
    def clear_rows():
        refs.dq_sum[...] = jnp.zeros_like(refs.dq_sum)

    if stored is not None:

        @pl.when(live & (slab > 0))
        @jax.named_scope("fetch_rows")
        def fetch_rows():
            copy = pltpu.make_async_copy(stored, refs.dq_sum, refs.copied)
            copy.start()
            copy.wait()

    def turn(c, _, masked: bool, name: str):
        with jax.named_scope(name):
            absorb(refs, c, (b, slab, i, positions) if masked else None, cut)

    if cut.spec.window is not None:
        jax.lax.fori_loop(
            chunks.begin, chunks.full_begin, functools.partial(turn, masked=True, name="window_chunk"), None
        )
    jax.lax.fori_loop(
        chunks.full_begin, chunks.full_stop, functools.partial(turn, masked=False, name="whole_chunk"), None
    )
    jax.lax.fori_loop(chunks.full_stop, chunks.stop, functools.partial(turn, masked=True, name="masked_chunk"), None)

    if stored is None:
        with jax.named_scope("last"):
            refs.dq[0] = (refs.dq_sum[...] * cut.scale).astype(refs.dq.dtype)
    else:

        @pl.when(live | (slab == 0))
        @jax.named_scope("store_rows")
        def store_rows():
            copy = pltpu.make_async_copy(refs.dq_sum, stored, refs.copied)
            copy.start()
            copy.wait()  # the next grid step overwrites dq_sum

    @pl.when(i == pl.num_programs(3) - 1)
    @jax.named_scope("flush")
    def flush():
        # q was scaled by `factor` before dk's product.
        refs.dk[0, 0] = (refs.dk_sum[...] * (cut.scale / cut.factor)).astype(refs.dk.dtype)
        refs.dv[0, 0] = refs.dv_sum[...].astype(refs.dv.dtype)


def take_rows(refs: Refs, q_start, kv_len, q_len, i, cut: Cut) -> None:
    """Put scaled q, d_out and d into VMEM, one matrix per head; rows that see no key, which may hold NaN, become 0."""
    token = jax.lax.broadcasted_iota(jnp.int32, (cut.block_t, cut.head_dim), 0) + i * cut.block_t
    seen = token < q_len
    stop = jnp.minimum(kv_len, cut.num_keys)
    if cut.spec.causal:
        stop = jnp.minimum(stop, q_start + token + 1)
    start = 0 if cut.spec.window is None else jnp.maximum(q_start + token - cut.spec.window + 1, 0)
    seen = seen & (stop > start)
    ones = jnp.ones((8, cut.head_dim), jnp.float32)
    for g in range(cut.groups):
        q = refs.q[0, g].astype(jnp.float32) * cut.factor
        refs.q_scaled[g] = jnp.where(seen, q, 0.0).astype(refs.q_scaled.dtype)
        flat = slice(g * cut.head_dim, (g + 1) * cut.head_dim)
        out, d_out = (x[0, :, flat] if cut.flat else x[0, g] for x in (refs.out, refs.d_out))
        out, d_out = (jnp.where(seen, x.astype(jnp.float32), 0.0) for x in (out, d_out))
        refs.d_rows[g] = d_out.astype(refs.d_rows.dtype)
        # A product with ones sums each row and leaves the sums along lanes, where `absorb` broadcasts them over keys.
        refs.offset[g : g + 1] = dot(ones, d_out * out, 1)[:1] - refs.d_lse[0, 0, g : g + 1]


def absorb(refs: Refs, c, where: tuple | None, cut: Cut) -> None:
    """Add the products of chunk c and the row block to dq, dk and dv; a mask for (b, slab, i, positions) if `where`."""
    at = pl.ds(pl.multiple_of(c * cut.chunk, cut.chunk), cut.chunk)
    k, v = refs.k[0, 0, at], refs.v[0, 0, at]
    mask = None
    if where is not None:
        mask, real = visible(c, *where, cut)
        k, v = (jnp.where(real, x, jnp.zeros_like(x)) for x in (k, v))  # both are factors: 0 * NaN is NaN
    # The sums of a chunk stay in values over all heads: one load and one store per chunk instead of G.
    dk, dv = refs.dk_sum[at], refs.dv_sum[at]
    for g in range(cut.groups):
        q, d_out = refs.q_scaled[g], refs.d_rows[g]
        y = dot(k, q, 1)  # [keys, tokens], like all that follows
        if cut.spec.softcap:
            t = jnp.tanh(y)
            y = t * (cut.spec.softcap * LOG2_E)
        if mask is not None:
            y = jnp.where(mask, y, -jnp.inf)
        p = jnp.exp2(y - refs.bits[0, 0, g : g + 1])
        ds = p * (dot(v, d_out, 1) - refs.offset[g : g + 1])
        if cut.spec.softcap:
            ds = ds * (1 - t * t)
        p, ds = p.astype(q.dtype), ds.astype(q.dtype)  # the matrix unit's operands; the sums stay float32
        dv = dv + dot(p, d_out, 0)
        dk = dk + dot(ds, q, 0)
        refs.dq_sum[g] += dot(ds, k, 0, 0)
    refs.dk_sum[at], refs.dv_sum[at] = dk, dv


def visible(c, b, slab, i, positions: Positions, cut: Cut) -> tuple[Array, Array]:
    """Return two masks of chunk c: the keys that each token sees [chunk, block_t], and the valid keys [chunk, H]."""
    start = slab * cut.block_s + c * cut.chunk
    kv_len = jnp.minimum(positions.kv_len[b], cut.num_keys)
    key = jax.lax.broadcasted_iota(jnp.int32, (cut.chunk, cut.block_t), 0) + start
    mask = key < kv_len
    if cut.spec.causal:
        first = positions.q_start[b] + i * cut.block_t
        row = jax.lax.broadcasted_iota(jnp.int32, (cut.chunk, cut.block_t), 1) + first
        mask = mask & (key <= row)
        if cut.spec.window is not None:
            mask = mask & (key > row - cut.spec.window)
    return mask, jax.lax.broadcasted_iota(jnp.int32, (cut.chunk, cut.head_dim), 0) + start < kv_len


def gradients(
    q, k, v, result: AttentionOut, cotangents: AttentionOut, spec: AttentionSpec, positions: Positions, config=None
) -> tuple[Array, Array, Array]:
    """Compute (dq, dk, dv) of a dense prefill from its `result`; a `config` of None means `default_config`."""
    (out, lse, _), (d_out, d_lse, _) = result, cotangents
    batch, num_queries, num_heads, dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    shapes = Shapes(batch, num_queries, num_keys, num_heads, kv_heads, dim, None, str(q.dtype))
    cut = cut_call(spec, shapes, default_config(spec, shapes) if config is None else config)

    # lse in bits and d_lse, head-major, padded to whole blocks; +inf makes p = 2^(y - inf) = 0 for rows without keys.
    seen = jnp.isfinite(lse)
    bits, d_lse = jnp.where(seen, lse * LOG2_E, jnp.inf), jnp.where(seen, d_lse, 0.0)
    missing = cut.blocks * cut.block_t - num_queries

    def by_head(x, fill):
        x = jnp.pad(jnp.swapaxes(x, 1, 2), [(0, 0), (0, 0), (0, missing)], constant_values=fill)
        return x.reshape(batch, kv_heads, cut.groups, -1)

    bits, d_lse = by_head(bits, jnp.inf), by_head(d_lse, 0.0)
    d_out = d_out.astype(q.dtype)
    if num_queries < cut.block_t:  # only an array shorter than one block needs padding
        q, out, d_out = (jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)]) for x in (q, out, d_out))
    if num_keys < cut.block_s:
        k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, cut.block_s - num_keys), (0, 0)]) for x in (k, v))
    q = jnp.swapaxes(q, 1, 2)
    out, d_out = (x.reshape(*x.shape[:2], -1) if cut.flat else jnp.swapaxes(x, 1, 2) for x in (out, d_out))

    dq, dk, dv = call(cut, positions, q, k, v, out, d_out, bits, d_lse)
    if cut.slabs > 1:
        dq = (dq * cut.scale).astype(q.dtype)
    dq = jnp.swapaxes(dq, 1, 2)[:, :num_queries]
    return dq, *(x[:, :, :num_keys] for x in (dk, dv))


def call(cut: Cut, positions: Positions, q, k, v, out, d_out, bits, d_lse) -> tuple[Array, Array, Array]:
    """Run the kernel on head-major arrays; return dq (float32 and unscaled if there are several slabs), dk and dv."""
    batch, num_heads, length, dim = q.shape
    kv_heads = k.shape[1]

    def row_block(b, slab, i, q_start):
        """Return the row block to fetch: i or, if i ends before the slab begins, the block at the slab's first key."""
        if not cut.spec.causal or cut.slabs == 1:
            return i
        return jnp.maximum(i, jnp.clip((slab * cut.block_s - q_start[b]) // cut.block_t, 0, cut.blocks - 1))

    rows = (1, cut.groups, cut.block_t, dim)
    q_spec = pl.BlockSpec(rows, lambda b, h, s, i, p, *_: (b, h, row_block(b, s, i, p), 0))
    out_spec = q_spec
    if cut.flat:
        wide = (1, cut.block_t, cut.groups * dim)
        out_spec = pl.BlockSpec(wide, lambda b, h, s, i, p, *_: (b, row_block(b, s, i, p), h))
    # One buffer without double buffering: copying a slab takes a thousandth of the time of its work.
    slab_spec = pl.BlockSpec(
        (1, 1, cut.block_s, dim), lambda b, h, s, i, *_: (b, h, s, 0), pipeline_mode=pl.Buffered(1)
    )
    per_row = pl.BlockSpec((1, 1, cut.groups, cut.block_t), lambda b, h, s, i, p, *_: (b, h, 0, row_block(b, s, i, p)))
    dq_spec, dq_shape = pl.BlockSpec(rows, lambda b, h, s, i, *_: (b, h, i, 0)), jax.ShapeDtypeStruct(q.shape, q.dtype)
    row_sum, key_sum = pltpu.VMEM(rows[1:], jnp.float32), pltpu.VMEM((cut.block_s, dim), jnp.float32)
    scratch = [pltpu.VMEM(rows[1:], q.dtype), pltpu.VMEM(rows[1:], q.dtype)]
    scratch += [pltpu.VMEM(rows[1:3], jnp.float32), row_sum, key_sum, key_sum]
    if cut.slabs > 1:
        dq_spec = pl.BlockSpec(memory_space=pl.ANY)
        dq_shape = jax.ShapeDtypeStruct((batch, num_heads, cut.blocks * cut.block_t, dim), jnp.float32)
        scratch.append(pltpu.SemaphoreType.DMA)
    return pl.pallas_call(
        functools.partial(body, cut=cut),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads, cut.slabs, cut.blocks),
            in_specs=[q_spec, slab_spec, slab_spec, out_spec, out_spec, per_row, per_row],
            out_specs=[dq_spec, slab_spec, slab_spec],
            scratch_shapes=scratch,
        ),
        out_shape=[dq_shape, jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=chip().vmem_limit,
        ),
        name="tessera_tpu_backward",
    )(*positions, q, k, v, out, d_out, bits, d_lse)


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Choose row blocks of up to 512 tokens and about 4,096 rows, chunks of 512 keys, and slabs that fill half of VMEM.

    In float32, row blocks are smaller and chunks have 256 keys. According to the compiled schedules (LOG.md), shorter
    blocks or chunks hide less latency, and longer ones waste more work above the diagonal.
    """
    groups = shapes.num_heads // shapes.num_kv_heads
    width, dim = jnp.dtype(shapes.dtype).itemsize, round_up(shapes.head_dim, LANES)
    block_s = 1 << ((chip().vmem_bytes // 2) // (dim * (4 * width + 8))).bit_length() - 1
    tokens = (4096 if width == 2 else 512) * LANES // dim // groups
    block_t = 1 << min(max(tokens, LANES), 512).bit_length() - 1
    return Config(block_t=block_t, block_s=block_s, chunk=512 if width == 2 else 256)


def executions(spec: AttentionSpec, shapes: Shapes, config: Config) -> Mapping[str, float]:
    """Count runs of each named scope, and HBM bytes, of a call with q_start = S - T and all keys and rows valid."""
    cut = cut_call(spec, shapes, config)
    first = shapes.num_keys - shapes.num_queries + cut.block_t * np.arange(cut.blocks)[:, None]
    last = np.minimum(first + cut.block_t, shapes.num_keys) - 1
    base = cut.block_s * np.arange(cut.slabs)
    chunks = chunk_range(first, last, np.int64(shapes.num_keys), base, cut, np)
    chunks = Range(*(np.broadcast_to(x, (cut.blocks, cut.slabs)) for x in chunks))
    live = chunks.begin < chunks.stop
    again = live[:, 1:].sum()
    counts = {
        "step": cut.blocks * cut.slabs,
        "clear": cut.slabs,
        "flush": cut.slabs,
        "first": live.sum(),
        "clear_rows": cut.blocks + again,
        "window_chunk": (chunks.full_begin - chunks.begin).sum(),
        "whole_chunk": (chunks.full_stop - chunks.full_begin).sum(),
        "masked_chunk": (chunks.stop - chunks.full_stop).sum(),
        "fetch_rows": again,
        "store_rows": cut.blocks + again,
        "last": cut.blocks,
    }
    width, dim = jnp.dtype(shapes.dtype).itemsize, round_up(shapes.head_dim, LANES)
    rows = cut.block_t * cut.groups
    dq_bytes = cut.blocks * width if cut.slabs == 1 else 4 * (cut.blocks + 2 * again)
    moved = 4 * cut.slabs * cut.block_s * dim * width + rows * (live.sum() * (3 * dim * width + 8) + dim * dq_bytes)
    heads = shapes.batch * shapes.num_kv_heads
    return {name: float(heads * count) for name, count in (counts | {"hbm_bytes": moved}).items()}
