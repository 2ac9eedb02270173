"""Portable prefill attention: dense, score and sparse as blocked online softmax in plain XLA.

Rows are tokens x G query heads of one KV head, so K and V are never repeated. A query block visits only the key
blocks its rows can see: the range depends on q_start, kv_len and the window and is a run-time trip count; masks are
computed only in the blocks that a mask can touch. Work is 4 H flops per visible (row, key) pair, memory O(T + S)
plus one block of scores.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from tessera.attention.contract import AttentionOut, AttentionSpec, Kernel, Positions, Selection, Shapes
from tessera.attention.online_softmax import (
    LN_2,
    LOG2_E,
    SoftmaxState,
    absorb,
    finish_state,
    init_state,
    score_bits,
    visible_mask,
)
from tessera.shapes import ceil_div, round_up

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes: block_t query tokens (times G rows) against block_s keys."""

    block_t: int
    block_s: int

    def __post_init__(self):
        if self.block_t < 1 or self.block_s < 1:
            raise ValueError(f"block_t={self.block_t} and block_s={self.block_s} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """block_keys: keys gathered per step (rounded down to whole tiles, at least one)."""

    block_keys: int

    def __post_init__(self):
        if self.block_keys < 1:
            raise ValueError(f"block_keys={self.block_keys} must be at least 1")


def block_queries(x: Array, num_kv_heads: int, block_t: int) -> Array:
    """[B,T,N,...] -> [T/block_t,B,K,block_t*G,...], zero padded."""
    b, t, n = x.shape[:3]
    x = jnp.pad(x, [(0, 0), (0, -t % block_t)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(b, -1, block_t, num_kv_heads, n // num_kv_heads, *x.shape[3:])
    x = jnp.moveaxis(x, (1, 3), (0, 2))
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])


def unblock_queries(x: Array, num_queries: int, num_heads: int) -> Array:
    """The inverse of block_queries, padding dropped."""
    blocks, b, kv_heads, rows = x.shape[:4]
    groups = num_heads // kv_heads
    x = x.reshape(blocks, b, kv_heads, rows // groups, groups, *x.shape[4:])
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(b, -1, num_heads, *x.shape[5:])[:, :num_queries]


def key_ranges(first: Array, size: int, spec: AttentionSpec, positions: Positions, block_s: int, num_keys: int):
    """Key blocks that rows first..first+size-1 of every sequence need: (start, full_start, full_stop, stop).

    Blocks in [full_start, full_stop) are seen whole by every row; the rest of [start, stop) needs a mask.
    """
    row = positions.q_start + first
    last = positions.q_start + jnp.minimum(first + size, positions.q_len) - 1
    kv_len = jnp.clip(positions.kv_len, 0, num_keys)
    stop = jnp.minimum(kv_len, last + 1) if spec.causal else kv_len
    full_stop = jnp.minimum(kv_len, row + 1) if spec.causal else kv_len
    start, full_start = jnp.zeros_like(row), jnp.zeros_like(row)
    if spec.window is not None:
        start, full_start = jnp.maximum(row - spec.window + 1, 0), jnp.maximum(last - spec.window + 1, 0)
    live = (first < positions.q_len) & (stop > start)
    start = jnp.where(live, start, num_keys).min() // block_s
    stop = (jnp.where(live, stop, 0).max() + block_s - 1) // block_s
    full_start = (jnp.where(live, full_start, 0).max() + block_s - 1) // block_s
    full_stop = jnp.where(live, full_stop, num_keys).min() // block_s
    start = jnp.minimum(start, stop)
    full_start = jnp.clip(full_start, start, stop)
    return start, full_start, jnp.clip(full_stop, full_start, stop), stop


def take_keys(x: Array, block: Array, block_s: int) -> tuple[Array, Array]:
    """Keys of one block [B,K,block_s,H] and their positions; the last block is moved back to fit, not padded."""
    start = jnp.minimum(block * block_s, x.shape[2] - block_s)
    return jax.lax.dynamic_slice_in_dim(x, start, block_s, axis=2), start


def block_mask(row: Array, start: Array, block: Array, block_s: int, spec: AttentionSpec, positions: Positions):
    """Visibility [B,1,R,block_s] of one block, and which of its keys are valid at all [B,1,block_s,1]."""
    key = start + jnp.arange(block_s, dtype=jnp.int32)
    kv_len = positions.kv_len[:, None, None, None]
    mask = visible_mask(row[:, None, :, None], key, kv_len, spec) & (key >= block * block_s)
    return mask, key[:, None] < kv_len


def row_positions(first: Array, size: int, groups: int, spec: AttentionSpec, positions: Positions):
    """Absolute position [B,R] of each row of a query block, and whether it is real and sees any key."""
    token = first + jnp.repeat(jnp.arange(size, dtype=jnp.int32), groups)
    row = positions.q_start[:, None] + token
    stop = jnp.minimum(positions.kv_len[:, None], row + 1) if spec.causal else positions.kv_len[:, None]
    start = 0 if spec.window is None else jnp.maximum(row - spec.window + 1, 0)
    return row, (token < positions.q_len[:, None]) & (stop > start)


def dense_blocks(q, k, v, positions: Positions, spec: AttentionSpec, config: Config) -> tuple[Array, Array]:
    """out [B,T,N,H] and lse [B,T,N] of dense attention; k and v are [B,K,S,H]."""
    b, t, n, h = q.shape
    kv_heads, num_keys = k.shape[1:3]
    block_s = config.block_s
    q_blocks = block_queries(q, kv_heads, config.block_t)

    def query_block(index, q_block):
        first = index * config.block_t
        row, valid = row_positions(first, config.block_t, n // kv_heads, spec, positions)

        def full(block, state: SoftmaxState) -> SoftmaxState:
            k_block, _ = take_keys(k, block, block_s)
            v_block, _ = take_keys(v, block, block_s)
            return absorb(state, score_bits(q_block, k_block, spec), v_block)[0]

        def masked(block, state: SoftmaxState) -> SoftmaxState:
            k_block, start = take_keys(k, block, block_s)
            v_block, _ = take_keys(v, block, block_s)
            mask, real = block_mask(row, start, block, block_s, spec, positions)
            y = jnp.where(mask, score_bits(q_block, k_block, spec), -jnp.inf)
            return absorb(state, y, jnp.where(real, v_block, 0))[0]

        start, full_start, full_stop, stop = key_ranges(first, config.block_t, spec, positions, block_s, num_keys)
        state = init_state(q_block.shape[:-1], h)
        if spec.window is not None:
            state = jax.lax.fori_loop(start, full_start, masked, state)
        state = jax.lax.fori_loop(full_start, full_stop, full, state)
        state = jax.lax.fori_loop(full_stop, stop, masked, state)
        out, lse = finish_state(state, valid[:, None])
        return out.astype(q.dtype), lse

    out, lse = jax.lax.map(lambda x: query_block(*x), (jnp.arange(q_blocks.shape[0], dtype=jnp.int32), q_blocks))
    return unblock_queries(out, t, n), unblock_queries(lse, t, n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def dense(q, k, v, positions: Positions, spec: AttentionSpec, config: Config) -> tuple[Array, Array]:
    """Dense attention, differentiable in q, k and v."""
    return dense_blocks(q, k, v, positions, spec, config)


def _forward(q, k, v, positions, spec, config):
    out, lse = dense_blocks(q, k, v, positions, spec, config)
    return (out, lse), (q, k, v, positions, out, lse)


def _backward(spec: AttentionSpec, config: Config, saved, cotangents):
    """Recompute scores block by block: ds = p (do v^T - rowsum(do out) + dlse), dq = ds k, dk = ds^T q, dv = p^T do."""
    q, k, v, positions, out, lse = saved
    d_out, d_lse = cotangents
    b, t, n, h = q.shape
    kv_heads, num_keys = k.shape[1:3]
    block_s = config.block_s
    seen = jnp.isfinite(lse)
    d_out = jnp.where(seen[..., None], d_out.astype(jnp.float32), 0.0)
    offset = jnp.where(seen, d_lse - (d_out * out.astype(jnp.float32)).sum(-1), 0.0)
    blocks = [
        block_queries(x, kv_heads, config.block_t)
        for x in (q, d_out.astype(v.dtype), offset, jnp.where(seen, lse * LOG2_E, jnp.inf))
    ]
    scale = h**-0.5 if spec.scale is None else spec.scale

    def query_block(grads, xs):
        index, q_block, do_block, offset_block, lse_block = xs
        first = index * config.block_t
        row, _ = row_positions(first, config.block_t, n // kv_heads, spec, positions)

        def step(block, carry):
            dq, dk, dv = carry
            k_block, start = take_keys(k, block, block_s)
            v_block, _ = take_keys(v, block, block_s)
            mask, real = block_mask(row, start, block, block_s, spec, positions)
            y = score_bits(q_block, k_block, spec)
            p = jnp.where(mask, jnp.exp2(y - lse_block[..., None]), 0.0)
            dp = _dot("bkrh,bksh->bkrs", do_block, jnp.where(real, v_block, 0))
            ds = p * (dp + offset_block[..., None]) * scale
            if spec.softcap:
                ds = ds * (1 - jnp.square(y / (spec.softcap * LOG2_E)))
            ds = jnp.where(mask, ds, 0.0).astype(q.dtype)
            dq = dq + _dot("bkrs,bksh->bkrh", ds, jnp.where(real, k_block, 0))
            dk = _add_keys(dk, _dot("bkrs,bkrh->bksh", ds, q_block), start)
            dv = _add_keys(dv, _dot("bkrs,bkrh->bksh", p.astype(v.dtype), do_block), start)
            return dq, dk, dv

        start, _, _, stop = key_ranges(first, config.block_t, spec, positions, block_s, num_keys)
        dq, dk, dv = jax.lax.fori_loop(start, stop, step, (jnp.zeros(q_block.shape, jnp.float32), *grads))
        return (dk, dv), dq.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    xs = (jnp.arange(blocks[0].shape[0], dtype=jnp.int32), *blocks)
    (dk, dv), dq = jax.lax.scan(query_block, (zeros, zeros), xs)
    return unblock_queries(dq, t, n), dk.astype(k.dtype), dv.astype(v.dtype), None


dense.defvjp(_forward, _backward)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _add_keys(total: Array, part: Array, start: Array) -> Array:
    old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[2], axis=2)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, axis=2)


def _zero_padding(q: Array, positions: Positions) -> Array:
    """Padding rows may hold anything; as zeros they cannot reach a row maximum or a sum that others share."""
    token = jnp.arange(q.shape[1], dtype=jnp.int32)
    return jnp.where((token < positions.q_len[:, None])[..., None, None], q, 0)


def launch_dense(q, k, v, spec, positions, selection, config) -> AttentionOut:
    """Dense prefill; differentiable in q, k and v."""
    q = _zero_padding(q, positions)
    config = _clip(config, q.shape[1], k.shape[1])
    out, lse = dense(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), positions, spec, config)
    return AttentionOut(out, lse)


def _clip(config: Config, num_queries: int, num_keys: int) -> Config:
    return Config(block_t=min(config.block_t, num_queries), block_s=min(config.block_s, num_keys))


def launch_score(q, k, v, spec: AttentionSpec, positions, selection, config: Config) -> AttentionOut:
    """Dense out and lse, and each key tile's probability mass, in one pass."""
    b, t, n, h = q.shape
    kv_heads = k.shape[2]
    groups = n // kv_heads
    block_t = round_up(min(config.block_t, t), spec.query_tile)
    block_s = round_up(min(config.block_s, k.shape[1]), spec.tile)
    num_tiles = ceil_div(k.shape[1], spec.tile)
    pad = [(0, 0), (0, 0), (0, -k.shape[1] % block_s), (0, 0)]  # tiles of the last block must stay aligned
    k, v = (jnp.pad(jnp.swapaxes(x, 1, 2), pad) for x in (k, v))
    key_blocks, tiles = k.shape[2] // block_s, block_s // spec.tile
    q_blocks = block_queries(_zero_padding(q, positions), kv_heads, block_t)
    shape = q_blocks.shape[1:4]
    positions = positions._replace(kv_len=jnp.minimum(positions.kv_len, num_tiles * spec.tile))

    def query_block(index, q_block):
        first = index * block_t
        row, valid = row_positions(first, block_t, groups, spec, positions)

        def step(block, carry, masked):
            state, sums, maxima = carry
            k_block, start = take_keys(k, block, block_s)
            v_block, _ = take_keys(v, block, block_s)
            y = score_bits(q_block, k_block, spec)
            if masked:
                mask, real = block_mask(row, start, block, block_s, spec, positions)
                y, v_block = jnp.where(mask, y, -jnp.inf), jnp.where(real, v_block, 0)
            state, p = absorb(state, y, v_block)
            part = p.reshape(*p.shape[:3], tiles, spec.tile).sum(-1)
            sums = jax.lax.dynamic_update_slice_in_dim(sums, part[None], block, axis=0)
            return state, sums, jax.lax.dynamic_update_slice_in_dim(maxima, state.m[None], block, axis=0)

        start, full_start, full_stop, stop = key_ranges(first, block_t, spec, positions, block_s, k.shape[2])
        state = init_state(shape, h)
        carry = (state, jnp.zeros((key_blocks, *shape, tiles)), jnp.full((key_blocks, *shape), -jnp.inf))
        if spec.window is not None:
            carry = jax.lax.fori_loop(start, full_start, functools.partial(step, masked=True), carry)
        carry = jax.lax.fori_loop(full_start, full_stop, functools.partial(step, masked=False), carry)
        state, sums, maxima = jax.lax.fori_loop(full_stop, stop, functools.partial(step, masked=True), carry)
        out, lse = finish_state(state, valid[:, None])
        weight = jnp.exp2(maxima - jnp.where(jnp.isfinite(lse), lse / LN_2, jnp.inf))
        weight = weight[..., None]  # 0 for rows that see nothing, whose sums may be of anything
        mass = (
            jnp.where(weight > 0, sums * weight, 0.0)
            .reshape(key_blocks, *shape[:2], -1, spec.query_tile * groups, tiles)
            .sum(-2)
        )
        mass = jnp.moveaxis(mass, 0, 3).reshape(*shape[:2], block_t // spec.query_tile, -1)[..., :num_tiles]
        return out.astype(q.dtype), lse, mass

    xs = (jnp.arange(q_blocks.shape[0], dtype=jnp.int32), q_blocks)
    out, lse, mass = jax.lax.map(lambda x: query_block(*x), xs)
    mass = jnp.moveaxis(mass, 0, 2).reshape(b, kv_heads, -1, num_tiles)[:, :, : ceil_div(t, spec.query_tile)]
    return AttentionOut(unblock_queries(out, t, n), unblock_queries(lse, t, n), mass)


def launch_sparse(q, k, v, spec: AttentionSpec, positions, selection: Selection, config: SparseConfig) -> AttentionOut:
    """Attention over the listed tiles only, a few tiles per step, read from where they lie."""
    b, t, n, h = q.shape
    kv_heads, num_keys = k.shape[2], k.shape[1]
    groups = n // kv_heads
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    if num_keys < spec.tile:
        k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, spec.tile - num_keys), (0, 0)]) for x in (k, v))
    per_step = min(max(config.block_keys // spec.tile, 1), selection.tiles.shape[-1])
    q_blocks = block_queries(_zero_padding(q, positions), kv_heads, spec.query_tile)
    kv_len = jnp.minimum(positions.kv_len, num_keys)[:, None, None, None]

    def gather(x: Array, start: Int32[Array, "B K P"]) -> Array:
        one = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=spec.tile, axis=0)
        some = jax.vmap(one, (None, 0))
        return jax.vmap(jax.vmap(some))(x, start).reshape(b, kv_heads, per_step * spec.tile, h)

    def query_block(index, q_block, tiles, count):
        row, valid = row_positions(index * spec.query_tile, spec.query_tile, groups, spec, positions)

        def step(i, state):
            entry = i * per_step + jnp.arange(per_step, dtype=jnp.int32)
            ids = jnp.take(tiles, jnp.minimum(entry, tiles.shape[-1] - 1), axis=-1)
            listed = entry < count[..., None]
            first = jnp.where(listed, ids, 0) * spec.tile
            start = jnp.minimum(first, k.shape[2] - spec.tile)  # the last tile may be short: read back, mask
            key = start[..., None] + jnp.arange(spec.tile, dtype=jnp.int32)
            real = (listed[..., None] & (key >= first[..., None])).reshape(b, kv_heads, 1, -1)
            key = key.reshape(b, kv_heads, 1, -1)
            real = real & (key < kv_len)
            mask = visible_mask(row[:, None, :, None], key, kv_len, spec) & real
            y = jnp.where(mask, score_bits(q_block, gather(k, start), spec), -jnp.inf)
            return absorb(state, y, jnp.where(jnp.swapaxes(real, 2, 3), gather(v, start), 0))[0]

        steps = (count.max() + per_step - 1) // per_step
        state = jax.lax.fori_loop(0, steps, step, init_state(q_block.shape[:-1], h))
        out, lse = finish_state(state, valid[:, None])
        return out.astype(q.dtype), lse

    tiles, count = jnp.moveaxis(selection.tiles, 2, 0), jnp.moveaxis(selection.count, 2, 0)
    xs = (jnp.arange(q_blocks.shape[0], dtype=jnp.int32), q_blocks, tiles, count)
    out, lse = jax.lax.map(lambda x: query_block(*x), xs)
    return AttentionOut(unblock_queries(out, t, n), unblock_queries(lse, t, n))


def supports(role: str, spec: AttentionSpec, shapes: Shapes) -> str | None:
    """None, or why this call cannot run here."""
    if shapes.dtype not in DTYPES:
        return f"dtype={shapes.dtype} must be one of {DTYPES}"
    if spec.mass != (role == "score"):
        return f"mass={spec.mass} is the score role's option, this kernel's role is {role}"
    if (shapes.capacity is not None) != (role == "sparse"):
        return f"capacity={shapes.capacity}: a selection belongs to the sparse role, this kernel's role is {role}"
    return None


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Block sizes measured on two cores of Zen 4."""
    return Config(block_t=max(1024 * shapes.num_kv_heads // shapes.num_heads, 64), block_s=512)


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    for block_t in (64, 128, 256, 512, 1024):
        for block_s in (128, 256, 512, 1024):
            yield Config(block_t=block_t, block_s=block_s)


def default_sparse_config(spec: AttentionSpec, shapes: Shapes) -> SparseConfig:
    """Keys per step measured on two cores of Zen 4."""
    return SparseConfig(block_keys=512)


def sparse_search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[SparseConfig]:
    for block_keys in (128, 256, 512, 1024):
        yield SparseConfig(block_keys=block_keys)


def cost(role: str, spec: AttentionSpec, shapes: Shapes) -> Mapping[str, float]:
    """Flops of the two products over visible (or listed) pairs, and bytes of q, k, v, out and lse moved once."""
    t, s = shapes.num_queries, shapes.num_keys
    if role == "sparse":
        pairs = t * min(shapes.capacity * spec.tile, s)
    else:
        pairs = t * s - (min(t, s) * (min(t, s) - 1) / 2 if spec.causal else 0)
        pairs = min(pairs, t * spec.window) if spec.window else pairs
    width = jnp.dtype(shapes.dtype).itemsize
    rows = shapes.batch * shapes.num_heads * t
    kv_bytes = 2 * shapes.batch * shapes.num_kv_heads * s * shapes.head_dim * width
    return {
        "flops": 4.0 * shapes.batch * shapes.num_heads * shapes.head_dim * pairs,
        "bytes": float(2 * rows * shapes.head_dim * width + 4 * rows + kv_bytes),
    }


def _kernel(role: str, launch, config, default, space) -> Kernel:
    return Kernel(
        name=f"xla_prefill_{role}",
        platform="any",
        role=role,
        phase="prefill",
        dtypes=DTYPES,
        supports=functools.partial(supports, role),
        launch=launch,
        Config=config,
        default_config=default,
        search_space=space,
        cost=functools.partial(cost, role),
    )


KERNELS = (
    _kernel("dense", launch_dense, Config, default_config, search_space),
    _kernel("score", launch_score, Config, default_config, search_space),
    _kernel("sparse", launch_sparse, SparseConfig, default_sparse_config, sparse_search_space),
)
