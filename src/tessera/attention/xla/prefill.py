"""Portable prefill attention: the dense role with its gradient, and the score role, as blocked online softmax in XLA.

A row is one token in one of the G query heads of a KV head, so K and V are never repeated. The KV heads of all
sequences form one axis X = B * K. A step takes block_heads entries of X, a block of rows and a block of keys, sized so
that the scores stay in the second-level caches; on a CPU the two matrix products then take nearly all the time. A block
of rows visits only the key blocks that its rows can see, in a loop of run-time length (from q_start, kv_len and the
window), and masks only the blocks that are not fully visible. Work is 4 H flops per visible (row, key) pair; memory is
O(T + S) plus one block.

Scores y, their running maximum m and lse are in bits, that is, times log2(e). The score role stores the sum of
2^(y - m) per row and key tile, and m per row and key block. After the last block it multiplies the sums by
2^(m - lse), so that dense attention and all masses take one pass.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from tessera.attention import online_softmax, paging
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Shapes
from tessera.attention.gradient import differentiable
from tessera.attention.kernel import family
from tessera.core.shapes import ceil_div, round_up

DTYPES = ("float32", "bfloat16", "float16")
STEP_SCORES = 1 << 18
"""Scores per step. They take 1 MB in float32, half of the 2 MB that two cores' second-level caches hold together."""

ZERO = np.int32(0)
"""Zero as int32. A Python 0 becomes int64 if JAX allows 64-bit types, and all indices of a slice must have one type."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes of a step: block_t query tokens (block_t * G rows), block_s keys and block_heads KV heads.

    block_heads=None means as many heads as keep a step near STEP_SCORES scores.
    """

    block_t: int
    block_s: int
    block_heads: int | None = None

    def __post_init__(self):
        if self.block_t < 1 or self.block_s < 1 or (self.block_heads is not None and self.block_heads < 1):
            sizes = f"block_t={self.block_t}, block_s={self.block_s}, block_heads={self.block_heads}"
            raise ValueError(f"{sizes} must each be at least 1 (block_heads may also be None)")


class Blocking(NamedTuple):
    """Block sizes clipped to one call: tokens, keys and KV heads per block, and groups = G query heads per KV head."""

    spec: AttentionSpec
    block_t: int
    block_s: int
    heads: int
    groups: int

    @property
    def rows(self) -> int:
        return self.block_t * self.groups


def cut_call(spec: AttentionSpec, config: Config, q_BTNH: Array, kv: KeyValues) -> Blocking:
    """Clip the block sizes to the call and choose how many KV heads a step takes (a divisor of B * K)."""
    batch, num_queries, num_heads, _ = q_BTNH.shape
    kv_heads, num_keys = kv.k.shape[1], kv.num_keys
    block_t, block_s = min(config.block_t, num_queries), min(config.block_s, num_keys)
    if spec.mass:  # a query tile or a key tile never straddles two blocks
        block_t, block_s = round_up(block_t, spec.query_tile), round_up(block_s, spec.tile)
    block_s = paging.whole_pages(kv, block_s)
    groups, total = num_heads // kv_heads, batch * kv_heads
    wanted = config.block_heads or max(STEP_SCORES // (block_t * groups * block_s), 1)
    heads = next(h for h in range(min(wanted, total), 0, -1) if total % h == 0)
    return Blocking(spec, block_t, block_s, heads, groups)


def block_queries(x: Float[Array, "B T N ..."], kv_heads: int, cut: Blocking) -> Float[Array, "M Y R ..."]:
    """Cut rows into M = (X / Y) * (T / block_t) blocks of Y heads by R rows, padding T; heads vary slowest along M."""
    batch, num_queries = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, -num_queries % cut.block_t)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(batch, -1, cut.block_t, kv_heads, cut.groups, *x.shape[3:])
    x = jnp.moveaxis(x, 3, 1)  # [B, K, T / block_t, block_t, G, ...]
    x = x.reshape(batch * kv_heads // cut.heads, cut.heads, x.shape[2], cut.rows, *x.shape[5:])
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(-1, *x.shape[2:])


def unblock_queries(x: Float[Array, "M Y R ..."], like: Float[Array, "B T N H"], cut: Blocking) -> Array:
    """Invert `block_queries`: return [B,T,N,...] without the padding."""
    batch, num_queries, num_heads = like.shape[:3]
    kv_heads = num_heads // cut.groups
    x = x.reshape(batch * kv_heads // cut.heads, -1, *x.shape[1:])
    x = jnp.swapaxes(x, 1, 2).reshape(batch, kv_heads, -1, cut.groups, *x.shape[4:])
    x = jnp.moveaxis(x, 1, 2)
    return x.reshape(batch, -1, num_heads, *x.shape[4:])[:, :num_queries]


class Block(NamedTuple):
    """One block of rows of Y heads, located in the call."""

    x: Int32[Array, ""]  # index of the block's first head along X = B * K
    row: Int32[Array, "Y R"]  # absolute position of each row
    valid: Array  # false for padding rows and for rows that see no key
    kv_len: Int32[Array, "Y"]  # number of valid keys of each head's sequence
    ranges: tuple[Array, Array, Array, Array]  # key blocks to visit, as `key_ranges` returns them


def locate(index: Array, positions: Positions, kv_heads: int, num_keys: int, num_blocks: int, cut: Blocking) -> Block:
    """Return the `Block` of row block number `index`; each group of heads has `num_blocks` row blocks."""
    x = index // num_blocks * cut.heads
    first = index % num_blocks * cut.block_t
    sequence = (x + jnp.arange(cut.heads, dtype=jnp.int32)) // kv_heads
    mine = Positions(*(p[sequence] for p in positions))
    mine = mine._replace(kv_len=jnp.clip(mine.kv_len, 0, num_keys))
    token = first + jnp.repeat(jnp.arange(cut.block_t, dtype=jnp.int32), cut.groups)
    row = mine.q_start[:, None] + token
    valid = (token < mine.q_len[:, None]) & online_softmax.sees_any(row, mine.kv_len[:, None], cut.spec)
    return Block(x, row, valid, mine.kv_len, key_ranges(first, mine, num_keys, cut))


def key_ranges(first: Array, mine: Positions, num_keys: int, cut: Blocking) -> tuple[Array, Array, Array, Array]:
    """Return the key blocks (start, full_start, full_stop, stop) of a row block whose first token is `first`.

    Blocks [start, stop) hold all keys that the rows see, and only those outside of [full_start, full_stop) need a mask.
    Heads whose rows in this block see no key do not count, because those rows are invalid.
    """
    row, last = mine.q_start + first, mine.q_start + jnp.minimum(first + cut.block_t, mine.q_len) - 1
    stop = full_stop = mine.kv_len
    if cut.spec.causal:
        stop, full_stop = jnp.minimum(stop, last + 1), jnp.minimum(stop, row + 1)
    start = full_start = jnp.zeros_like(row)
    if cut.spec.window is not None:
        start, full_start = (jnp.maximum(p - cut.spec.window + 1, 0) for p in (row, last))
    live = (first < mine.q_len) & (stop > start)
    start = jnp.where(live, start, num_keys).min() // cut.block_s
    stop = (jnp.where(live, stop, 0).max() + cut.block_s - 1) // cut.block_s
    full_start = (jnp.where(live, full_start, 0).max() + cut.block_s - 1) // cut.block_s
    full_stop = jnp.where(live, full_stop, num_keys).min() // cut.block_s
    start = jnp.minimum(start, stop)
    full_start = jnp.clip(full_start, start, stop)
    return start, full_start, jnp.clip(full_stop, full_start, stop), stop


def sweep(step, carry, ranges: tuple[Array, Array, Array, Array], num_keys: int, cut: Blocking):
    """Run step(key_block, carry, masked) over the key blocks of `ranges`, unmasked on fully visible blocks."""
    start, full_start, full_stop, stop = ranges
    masked, full = functools.partial(step, masked=True), functools.partial(step, masked=False)
    if num_keys <= cut.block_s:  # a single block: no loop, no second body to compile
        return masked(ZERO, carry)
    if cut.spec.window is not None:
        carry = jax.lax.fori_loop(start, full_start, masked, carry)
    carry = jax.lax.fori_loop(full_start, full_stop, full, carry)
    return jax.lax.fori_loop(full_stop, stop, masked, carry)


def take_keys(kv: KeyValues, block: Block, key_block: Array, cut: Blocking) -> tuple[KeyValues, Array]:
    """Return one block of a `paging.flat` record, and its start: a short last block starts early and repeats keys."""
    start = jnp.minimum(key_block * cut.block_s, kv.num_keys - cut.block_s)
    return paging.take_block(kv, block.x, cut.heads, start, cut.block_s), start


def halves(scales: Float[Array, "Y 2 P"] | None) -> tuple:
    """Return the float32 scales [Y, 1, P] of keys and of values; (None, None) without scales."""
    return (None, None) if scales is None else tuple(scales[:, i : i + 1].astype(jnp.float32) for i in (0, 1))


def block_masks(block: Block, start: Array, key_block: Array, cut: Blocking) -> tuple[Array, Array]:
    """Return a mask of the keys that each row sees [Y, R, block_s], and a mask of the valid keys [Y, block_s, 1]."""
    key = start + jnp.arange(cut.block_s, dtype=jnp.int32)
    kv_len = block.kv_len[:, None, None]
    mask = online_softmax.visible_mask(block.row[:, :, None], key, kv_len, cut.spec) & (key >= key_block * cut.block_s)
    return mask, key[:, None] < kv_len


def attend(
    q,
    k,
    v,
    positions: Positions,
    spec: AttentionSpec,
    config: Config,
    scales: Array | None = None,
    pages: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """Compute out, lse and any mass; k, v, scales and pages are the fields of `KeyValues`."""
    kv = KeyValues(k, v, pages, scales)
    kv_heads, num_keys = k.shape[1], kv.num_keys
    cut, kv = cut_call(spec, config, q, kv), paging.flat(kv)
    if spec.mass:  # tiles must not shift, so a short last block is padded instead of starting earlier
        kv = paging.padded(kv, cut.block_s)
    num_blocks = ceil_div(q.shape[1], cut.block_t)
    q_blocks = block_queries(q, kv_heads, cut)

    def query_block(index: Array, q_block: Array):
        block = locate(index, positions, kv_heads, num_keys, num_blocks, cut)

        def step(key_block, carry, masked: bool):
            state, tiles = carry
            read, start = take_keys(kv, block, key_block, cut)
            k_block, v_block = online_softmax.widened(read.k, q.dtype), online_softmax.widened(read.v, q.dtype)
            k_scale, v_scale = halves(read.scales)
            z, factor = online_softmax.raw_scores(q_block, k_block, spec, k_scale)
            if masked:
                mask, real = block_masks(block, start, key_block, cut)
                z, (v_block, v_scale) = jnp.where(mask, z, -jnp.inf), online_softmax.blank(v_block, v_scale, real)
            state, parts = online_softmax.absorb(state, z, v_block, factor, spec.tile if spec.mass else 1, v_scale)
            return state, tiles and tiles.put(key_block, parts, state.m)

        tiles = TileSums.zeros(kv.num_keys, cut) if spec.mass else ()
        carry = (online_softmax.init_state(q_block.shape[:2], q.shape[3]), tiles)
        state, tiles = sweep(step, carry, block.ranges, kv.num_keys, cut)
        out, lse = online_softmax.finish_state(state, block.valid)
        return out.astype(q.dtype), lse, tiles and tiles.mass(lse, cut)

    indices = jnp.arange(q_blocks.shape[0], dtype=jnp.int32)
    out, lse, mass = jax.lax.map(lambda x: query_block(*x), (indices, q_blocks))
    out, lse = unblock_queries(out, q, cut), unblock_queries(lse, q, cut)
    return out, lse, unblock_mass(mass, q, num_keys, cut) if spec.mass else None


class TileSums(NamedTuple):
    """For Q key blocks of P tiles each: per row, each tile's sum of 2^(y - m), and the m (bits) of each block."""

    sums: Float[Array, "Q Y R P"]
    maxima: Float[Array, "Q Y R"]

    @classmethod
    def zeros(cls, num_keys: int, cut: Blocking) -> "TileSums":
        """Return the state before any key; key blocks that are never visited keep these values, so their mass is 0."""
        shape = (num_keys // cut.block_s, cut.heads, cut.rows)
        tiles = cut.block_s // cut.spec.tile
        return cls(jnp.zeros((*shape, tiles), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32))

    def put(self, key_block: Array, parts: Array, m: Array) -> "TileSums":
        update = functools.partial(jax.lax.dynamic_update_index_in_dim, index=key_block, axis=0)
        return TileSums(update(self.sums, parts), update(self.maxima, m))

    def mass(self, lse: Float[Array, "Y R"], cut: Blocking) -> Float[Array, "Y I J"]:
        """Sum each key tile's probability, sum * 2^(m - lse) with lse in bits, over the rows of each query tile."""
        bits = jnp.where(jnp.isfinite(lse), lse / online_softmax.LN_2, jnp.inf)
        weight = jnp.exp2(self.maxima - bits)[..., None]  # 0 for rows that see no key, whose sums may be anything
        part = jnp.where(weight > 0, self.sums * weight, 0.0)
        part = part.reshape(*part.shape[:2], -1, cut.spec.query_tile * cut.groups, part.shape[-1]).sum(3)
        part = jnp.moveaxis(part, 0, 2)  # [Y, I, Q, P]
        return part.reshape(*part.shape[:2], -1)


def unblock_mass(mass: Float[Array, "M Y I J"], like: Float[Array, "B T N H"], num_keys: int, cut: Blocking) -> Array:
    """Reassemble the row blocks' masses into [B,K,I,J], without padding tiles."""
    batch, num_queries, num_heads = like.shape[:3]
    kv_heads = num_heads // cut.groups
    mass = mass.reshape(batch * kv_heads // cut.heads, -1, *mass.shape[1:])
    mass = jnp.swapaxes(mass, 1, 2).reshape(batch, kv_heads, -1, mass.shape[-1])
    return mass[:, :, : ceil_div(num_queries, cut.spec.query_tile), : ceil_div(num_keys, cut.spec.tile)]


def gradients(q, k, v, result, cotangents, spec: AttentionSpec, positions: Positions, config: Config):
    """Compute dq = ds k, dk = ds^T q and dv = p^T do, recomputing the scores y (bits) block by block.

    p = 2^(y - lse) with lse in bits; ds = scale * p (do v^T - rowsum(do * out) + dlse), times the softcap's derivative;
    do and dlse are the cotangents of out and lse.

    Scores are computed transposed, [keys, rows], so that only the product for dq contracts over the leading axis of its
    left operand: on CPU, such a product takes XLA up to twice as long as a plain one.
    """
    out, lse, _ = result
    kv_heads, num_keys = k.shape[1:3]
    cut = cut_call(spec, config, q, KeyValues(k, v))
    num_blocks = ceil_div(q.shape[1], cut.block_t)
    seen = jnp.isfinite(lse)
    d_out = jnp.where(seen[..., None], cotangents[0].astype(jnp.float32), 0.0)
    offset = jnp.where(seen, cotangents[1] - (d_out * out.astype(jnp.float32)).sum(-1), 0.0)
    bits = jnp.where(seen, lse * online_softmax.LOG2_E, jnp.inf)
    blocks = [block_queries(x, kv_heads, cut) for x in (q, d_out.astype(v.dtype), offset, bits)]
    kv = paging.flat(KeyValues(k, v))

    def query_block(grads, xs):
        index, q_block, do_block, offset_block, bits_block = xs
        block = locate(index, positions, kv_heads, num_keys, num_blocks, cut)

        def step(key_block, carry, masked: bool):
            dq, dk, dv = carry
            (k_block, v_block, *_), start = take_keys(kv, block, key_block, cut)
            mask = block.valid[:, None, :]
            if masked:
                sees, real = block_masks(block, start, key_block, cut)
                k_block, v_block = jnp.where(real, k_block, 0), jnp.where(real, v_block, 0)
                mask = mask & jnp.swapaxes(sees, 1, 2)
            z, factor = online_softmax.raw_scores(k_block, q_block, spec)
            p = jnp.where(mask, jnp.exp2(z * factor - bits_block[:, None, :]), 0.0)
            ds = (
                p
                * (online_softmax.dot(v_block, do_block, -1, -1) + offset_block[:, None, :])
                * online_softmax.scale_of(spec, q.shape[3])
            )
            if spec.softcap:
                ds = ds * (1 - jnp.square(z / spec.softcap))
            ds = jnp.where(mask, ds, 0.0).astype(q.dtype)  # v may be NaN in the blocks of rows that see no key
            dq = dq + online_softmax.dot(ds, k_block, -2, -2)
            dk = add_keys(dk, online_softmax.dot(ds, q_block, -1, -2), block, start)
            return dq, dk, add_keys(dv, online_softmax.dot(p, do_block, -1, -2), block, start)

        carry = (jnp.zeros(q_block.shape, jnp.float32), *grads)
        dq, dk, dv = sweep(step, carry, block.ranges, num_keys, cut)
        return (dk, dv), jnp.where(block.valid[..., None], dq, 0.0).astype(q.dtype)

    zeros = jnp.zeros(kv.k.shape, jnp.float32)
    indices = jnp.arange(blocks[0].shape[0], dtype=jnp.int32)
    (dk, dv), dq = jax.lax.scan(query_block, (zeros, zeros), (indices, *blocks))
    dk, dv = (x.reshape(k.shape).astype(k.dtype) for x in (dk, dv))
    return unblock_queries(dq, q, cut), dk, dv


dense = differentiable(attend, gradients)
"""Dense attention, differentiable in q, k and v."""


def add_keys(total: Float[Array, "X S H"], part: Float[Array, "Y P H"], block: Block, start: Array) -> Array:
    """Add `part` to `total` at the block's heads, for the keys from position `start` on."""
    at = (block.x, start, ZERO)
    return jax.lax.dynamic_update_slice(total, jax.lax.dynamic_slice(total, at, part.shape) + part, at)


def zero_padding(q: Float[Array, "B T N H"], positions: Positions) -> Float[Array, "B T N H"]:
    """Set padding rows of q, which may hold anything, to zero, so that they cannot affect sums over rows."""
    token = jnp.arange(q.shape[1], dtype=jnp.int32)
    return jnp.where((token < positions.q_len[:, None])[..., None, None], q, 0)


def launch(q, kv: KeyValues, spec: AttentionSpec, positions: Positions, selection, config: Config) -> AttentionOut:
    """Run dense prefill, or the score role if spec.mass; `dense` runs the calls that it can: it is differentiable."""
    q = zero_padding(q, positions)
    if spec.mass or kv.scales is not None or kv.pages is not None:
        return AttentionOut(*attend(q, kv.k, kv.v, positions, spec, config, kv.scales, kv.pages))
    return AttentionOut(*dense(q, kv.k, kv.v, positions, spec, config))


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Return blocks of 256 rows by 256 keys: little work is masked at the diagonal, and larger blocks are no faster
    (LOG.md).
    """
    return Config(block_t=max(256 * shapes.num_kv_heads // shapes.num_heads, 1), block_s=256)


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    groups = shapes.num_heads // shapes.num_kv_heads
    for rows in (128, 256, 512, 1024):
        for block_s in (128, 256, 512, 1024):
            yield Config(block_t=max(rows // groups, 1), block_s=block_s)


KERNELS = family(
    "xla_prefill",
    ("dense", "score"),
    dtypes=DTYPES,
    launch=launch,
    Config=Config,
    default_config=default_config,
    search_space=search_space,
    scaled=True,
    paged=True,
)
