"""Portable decode attention: one query row per sequence against a long cache, in plain XLA.

The speed of decode is limited by reading the KV cache. The G query heads of a KV head therefore share each read, and
the whole cache is never copied. The number of blocks read is a run-time value that follows kv_len and the window. Only
blocks at the ends of the visible range are masked, or all blocks of paged keys. Int8 keys are widened, and paged keys
copied out of whole pages, one block at a time, as they are read.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from tessera.attention import online_softmax, paging
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.gradient import differentiable, row_gradients
from tessera.attention.kernel import Kernel
from tessera.attention.visibility import Range, decode_range
from tessera.core.shapes import ceil_div, round_up

DTYPES = ("float32", "bfloat16", "float16")

BLOCK_AT_ONCE, LEAST_BLOCK = 512, 128
"""Most and fewest keys per block of `at_once`. Larger blocks mask more keys at the ends of the visible range; smaller
blocks give more partial results to add."""
BLOCK_BYTES, LEAST_PAGED = 3 << 18, 64
"""Maximum bytes of a block of paged keys and values, over all sequences.

A block has at least LEAST_PAGED keys per sequence, even if they take more bytes. A larger block would be evicted from a
core's cache before it is multiplied, and more of its keys would be masked.
"""
MOST_SCORE_BYTES = 32 << 20
"""Maximum bytes of float32 scores for which `at_once` runs; calls with more scores run block by block."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block size: block_s keys per step; the sparse role rounds it down to whole tiles, at least one."""

    block_s: int

    def __post_init__(self):
        if self.block_s < 1:
            raise ValueError(f"block_s={self.block_s} must be at least 1")


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Return a block size at which a block's copy stays in a core's second-level cache until it is multiplied.

    With pages, a step reads a block of every sequence, and many sequences are short, so the block size falls as the
    batch grows.
    """
    if shapes.capacity is not None:
        return Config(block_s=512)
    if not shapes.paged:
        return Config(block_s=1024)
    position = 2 * shapes.batch * shapes.num_kv_heads * shapes.head_dim * jnp.dtype(shapes.dtype).itemsize
    return Config(block_s=max(LEAST_PAGED, min(1024, 1 << (BLOCK_BYTES // position).bit_length() - 1)))


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    for block_s in (128, 256, 512, 1024, 2048):
        yield Config(block_s=block_s)


def block_runs(keys: Range, block_s: int, num_keys: int) -> tuple[Array, Array, Array, Array]:
    """Return block indices (start, full_start, full_stop, stop), shared by all sequences of the batch.

    Blocks [start, stop) contain every visible key; blocks [full_start, full_stop) need no mask.
    """
    seen = keys.stop > keys.start
    start = jnp.min(jnp.where(seen, keys.start, num_keys)) // block_s
    stop = (jnp.max(keys.stop) + block_s - 1) // block_s
    start = jnp.minimum(start, stop)
    full_start = jnp.clip((jnp.max(keys.start) + block_s - 1) // block_s, start, stop)
    full_stop = jnp.clip(jnp.min(keys.stop) // block_s, full_start, stop)
    return start, full_start, full_stop, stop


def over_blocks[Carry](
    step: Callable[..., Carry], carry: Carry, keys: Range, block_s: int, kv: KeyValues, spec: AttentionSpec
) -> Carry:
    """Return `carry` after `step(block, carry, masked=...)` for each block that has visible keys.

    With pages, every block is masked, because `tessera serve --exact` promises that an answer does not depend on other
    requests. Whether a block needs a mask does depend on the other sequences of the batch, and XLA compiles masked and
    unmasked blocks to arithmetic that differs in the last bit.
    """
    start, full_start, full_stop, stop = block_runs(keys, block_s, kv.num_keys)
    masked = functools.partial(step, masked=True)
    if kv.pages is not None:
        return jax.lax.fori_loop(start, stop, masked, carry)
    if spec.window is not None:
        carry = jax.lax.fori_loop(start, full_start, masked, carry)
    carry = jax.lax.fori_loop(full_start, full_stop, functools.partial(step, masked=False), carry)
    return jax.lax.fori_loop(full_stop, stop, masked, carry)


class KeyBlock(NamedTuple):
    """One block of P keys: scores y in bits (times log2(e)), values, scales of int8 values, and the first position."""

    y: Float[Array, "B K G P"]
    v: Float[Array, "B K P H"]
    scale: Float[Array, "B K 1 P"] | None
    start: Array


def read_block(
    q_BKGH: Array, kv: KeyValues, first: Array, block_s: int, keys: Range | None, spec: AttentionSpec
) -> KeyBlock:
    """Read block_s keys from `first` on, or the cache's last ones; given `keys`, mask those outside of it or before."""
    start = jnp.minimum(first, kv.num_keys - block_s)
    kv = slice_keys(kv, start, block_s)
    k, v = (online_softmax.widened(x, q_BKGH.dtype) for x in kv[:2])
    k_scale, v_scale = (None, None) if kv.scales is None else halves(kv.scales)
    y = online_softmax.score_bits(q_BKGH, k, spec, k_scale)
    if keys is None:
        return KeyBlock(y, v, v_scale, start)
    mask = in_range(start + jnp.arange(block_s, dtype=jnp.int32), keys) & (start + jnp.arange(block_s) >= first)
    v, v_scale = online_softmax.blank(v, v_scale, mask[:, None, :, None])
    return KeyBlock(jnp.where(mask[:, None, None], y, -jnp.inf), v, v_scale, start)


def slice_keys(kv: KeyValues, start: Array, size: int) -> KeyValues:
    """Copy keys [start, start + size) of every sequence and KV head, in order of position."""
    if kv.pages is None:
        return paging.read_positions(kv, start, size)
    lead = kv.pages.shape[0], kv.k.shape[1]
    block = paging.take_block(paging.flat(kv), jnp.int32(0), lead[0] * lead[1], start, size)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), block)


def halves(scales: Float[Array, "B K 2 P"]) -> tuple[Float[Array, "B K 1 P"], Float[Array, "B K 1 P"]]:
    scales = scales.astype(jnp.float32)
    return scales[:, :, :1], scales[:, :, 1:]


def in_range(key_P: Int32[Array, "P"], keys: Range) -> Bool[Array, "B P"]:
    return (key_P >= keys.start[:, None]) & (key_P < keys.stop[:, None])


def group_rows(q_B1NH: Array, num_kv_heads: int) -> Float[Array, "B K G H"]:
    """Reshape decode queries so that the G query heads of each KV head are rows."""
    batch, _, num_heads, head_dim = q_B1NH.shape
    return q_B1NH.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)


def attend_dense(
    q: Array,
    k: Array,
    v: Array,
    positions: Positions,
    spec: AttentionSpec,
    config: Config,
    scales: Array | None = None,
    pages: Array | None = None,
) -> tuple[Float[Array, "B K G H"], Float[Array, "B K G"]]:
    """Compute out (float32) and lse of one query row per sequence; k to pages are the fields of `KeyValues`."""
    kv = KeyValues(k, v, pages, scales)
    num_keys = kv.num_keys
    block_s = paging.whole_pages(kv, min(config.block_s, num_keys))
    keys = decode_range(spec, positions, num_keys)

    def step(block: Array, state: online_softmax.SoftmaxState, masked: bool) -> online_softmax.SoftmaxState:
        read = read_block(q, kv, block * block_s, block_s, keys if masked else None, spec)
        return online_softmax.absorb(state, read.y, read.v, scale=read.scale)[0]

    def one_by_one() -> online_softmax.SoftmaxState:
        return over_blocks(step, online_softmax.init_state(q.shape[:3], q.shape[3]), keys, block_s, kv, spec)

    if size := at_once_size(q, kv):
        start, _, _, stop = block_runs(keys, block_s, num_keys)
        most = 2 * block_s * (stop - start) >= num_keys
        # Without the barrier, XLA moves the slice of a stacked cache into the branches, and copies the cache there.
        kv = KeyValues(*jax.lax.optimization_barrier((k, v)))
        state = jax.lax.cond(most, lambda: at_once(q, kv, keys, size, spec), one_by_one)
    else:
        state = one_by_one()
    return online_softmax.finish_state(state, (keys.stop > keys.start)[:, None, None])


def at_once_size(q_BKGH: Array, kv: KeyValues) -> int:
    """Return `at_once`'s block size, a divisor of S; 0 if it cannot run: with pages, it would copy the whole cache."""
    num_keys = kv.k.shape[2]
    size = math.gcd(num_keys, BLOCK_AT_ONCE)
    fits = 4 * num_keys * math.prod(q_BKGH.shape[:3]) <= MOST_SCORE_BYTES
    return size if kv.scales is None and kv.pages is None and size >= LEAST_BLOCK and fits else 0


def at_once(q: Array, kv: KeyValues, keys: Range, size: int, spec: AttentionSpec) -> online_softmax.SoftmaxState:
    """Return the softmax state after all visible keys, from two products over the whole cache instead of a loop.

    On CPU, XLA copies every block that a loop slices out of the cache, so a loop over half of the keys takes as long as
    the two products (scores, and weighted values) over all keys. Their results are kept for blocks that a sequence sees
    in full; the partly visible blocks at the ends of its range are added afterwards. Keys are the left operand, because
    XLA copies the right one. For 16-bit values, a probability is split into the sum of two 16-bit numbers, so that no
    value needs to be widened.
    """
    batch, heads, rows, dim = q.shape
    k, v = (x.reshape(batch, heads, -1, size, dim) for x in kv[:2])
    first, last = (keys.start + size - 1) // size, keys.stop // size  # whole blocks: [first, last)
    index = jnp.arange(k.shape[2], dtype=jnp.int32)
    whole = ((index >= first[:, None]) & (index < last[:, None]))[:, None, :, None, None]
    q_blocks = jnp.broadcast_to(q[:, :, None], (batch, heads, k.shape[2], rows, dim))
    z, factor = online_softmax.in_bits(block_product(k, q_blocks, 4, 4), spec, dim)
    y = jnp.where(whole, jnp.swapaxes(z * factor, 3, 4), -jnp.inf)  # [B,K,n,G,P]
    m = jnp.maximum(y.max((2, 4)), online_softmax.FLOOR)
    p = jnp.exp2(y - m[:, :, None, :, None])
    digits = [p.astype(v.dtype)]
    if v.dtype != jnp.float32:
        digits.append((p - digits[0].astype(jnp.float32)).astype(v.dtype))
    out = block_product(jnp.concatenate(digits, 3), v, 4, 3).reshape(*v.shape[:3], len(digits), rows, dim).sum(3)
    state = online_softmax.SoftmaxState(m, p.sum((2, 4)), jnp.where(whole, out, 0).sum(2))
    if spec.window is not None:
        state = absorb_end(
            state, q, kv, keys.start // size, keys._replace(stop=jnp.minimum(keys.stop, first * size)), size, spec
        )
    return absorb_end(state, q, kv, last, keys._replace(start=jnp.maximum(first, last) * size), size, spec)


def absorb_end(
    state: online_softmax.SoftmaxState,
    q: Array,
    kv: KeyValues,
    block_B: Array,
    keys: Range,
    size: int,
    spec: AttentionSpec,
) -> online_softmax.SoftmaxState:
    """Add one block per sequence to the state: those keys of block `block_B` that lie in the sequence's range."""
    start = block_B * size  # may be the end of the cache: no key is then seen
    starts = jnp.broadcast_to(start[:, None, None], (*kv.k.shape[:2], 1))
    k, v = (take_tiles(x, starts, size) for x in kv[:2])
    key = start[:, None] + jnp.arange(size, dtype=jnp.int32)
    seen = ((key >= keys.start[:, None]) & (key < keys.stop[:, None]))[:, None]
    y = jnp.where(seen[:, :, None], online_softmax.score_bits(q, k, spec), -jnp.inf)
    return online_softmax.absorb(state, y, jnp.where(seen[..., None], v, 0))[0]


def block_product(a: Array, b: Array, contract_a: int, contract_b: int) -> Float[Array, "B K n R S"]:
    """Multiply the matrices of every sequence, KV head and block with float32 sums, contracting the given axes."""
    dims = (((contract_a,), (contract_b,)), ((0, 1, 2), (0, 1, 2)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def gradients(q, k, v, result, cotangents, spec: AttentionSpec, positions: Positions, config: Config):
    """Compute dq, dk and dv of `attend_dense`, in one step over all keys."""
    mask = in_range(jnp.arange(k.shape[2]), decode_range(spec, positions, k.shape[2]))
    return row_gradients(q, k, v, mask, result, cotangents, spec)


dense = differentiable(attend_dense, gradients)
"""`attend_dense`, differentiable in q, k and v."""


def launch_dense(q, kv: KeyValues, spec, positions, selection, config) -> AttentionOut:
    """Run dense decode; differentiable in q, k and v unless they are int8 or paged."""
    rows = group_rows(q, kv.k.shape[1])
    if kv.scales is None and kv.pages is None:
        out, lse = dense(rows, kv.k, kv.v, positions, spec, config)
    else:
        out, lse = attend_dense(rows, kv.k, kv.v, positions, spec, config, kv.scales, kv.pages)
    return AttentionOut(out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3]))


def launch_score(q, kv: KeyValues, spec: AttentionSpec, positions, selection, config: Config) -> AttentionOut:
    """Compute dense out and lse, and each key tile's probability mass, in one pass over the keys.

    For each block and row, the pass stores the sum of 2^(y - m) of every tile, and the running maximum m that the sums
    use. After the last block, the sums are multiplied by 2^m / e^lse.
    """
    rows = group_rows(q, kv.k.shape[1])
    num_keys, num_tiles = kv.num_keys, ceil_div(kv.num_keys, spec.tile)
    whole = num_keys // spec.tile * spec.tile
    block_s = paging.whole_pages(kv, min(round_up(config.block_s, spec.tile), whole) if whole else num_keys)
    per_block = ceil_div(block_s, spec.tile)
    num_blocks = ceil_div(num_tiles, per_block)
    keys = decode_range(spec, positions, num_keys)

    def step(block: Array, carry: tuple[online_softmax.SoftmaxState, Array, Array], masked: bool):
        state, sums, maxima = carry
        first = block * block_s
        read = read_block(rows, kv, first, block_s, keys if masked else None, spec)
        state, p = online_softmax.absorb(state, read.y, read.v, scale=read.scale)
        # A last block that starts early repeats counted keys, with weight 0: shift p so that tiles line up again.
        tail = per_block * spec.tile
        p = jax.lax.dynamic_slice_in_dim(jnp.pad(p, ((0, 0),) * 3 + ((0, tail),)), first - read.start, tail, axis=3)
        part = p.reshape(*p.shape[:3], per_block, spec.tile).sum(-1)
        sums = jax.lax.dynamic_update_slice_in_dim(sums, part[None], block, axis=0)
        return state, sums, jax.lax.dynamic_update_slice_in_dim(maxima, state.m[None], block, axis=0)

    lead = rows.shape[:3]
    carry = (
        online_softmax.init_state(lead, q.shape[-1]),
        jnp.zeros((num_blocks, *lead, per_block), jnp.float32),
        jnp.full((num_blocks, *lead), -jnp.inf, jnp.float32),
    )
    state, sums, maxima = over_blocks(step, carry, keys, block_s, kv, spec)
    out, lse = online_softmax.finish_state(state, (keys.stop > keys.start)[:, None, None])
    weight = jnp.exp2(maxima - jnp.where(jnp.isfinite(lse), lse * online_softmax.LOG2_E, jnp.inf))
    mass = jnp.moveaxis(jnp.sum(sums * weight[..., None], axis=3), 0, 2)
    mass = mass.reshape(*lead[:2], 1, num_blocks * per_block)[..., :num_tiles]
    return AttentionOut(out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3]), mass)


def launch_sparse(
    q, kv: KeyValues, spec: AttentionSpec, positions, selection: Selection, config: Config
) -> AttentionOut:
    """Attend to the listed tiles only, several tiles per step; no other tile is copied."""
    rows = group_rows(q, kv.k.shape[1])
    num_keys = kv.num_keys
    size = min(spec.tile, num_keys)
    tiles, count = selection.tiles[:, :, 0], selection.count[:, :, 0]
    capacity = tiles.shape[-1]
    per_step = min(max(config.block_s // spec.tile, 1), capacity)
    keys = decode_range(spec, positions, num_keys)
    last = jnp.where((keys.stop > keys.start)[:, None], count, 0)

    def step(i: Array, state: online_softmax.SoftmaxState) -> online_softmax.SoftmaxState:
        entry = i * per_step + jnp.arange(per_step, dtype=jnp.int32)
        first = jnp.take(tiles, jnp.minimum(entry, capacity - 1), axis=-1) * spec.tile
        start = jnp.clip(first, 0, num_keys - size)  # a short last tile starts earlier, and is masked
        key = (start[..., None] + jnp.arange(size, dtype=jnp.int32)).reshape(*start.shape[:2], -1)
        mask = (key >= keys.start[:, None, None]) & (key < keys.stop[:, None, None])
        mask = mask & jnp.repeat(entry < last[..., None], size, axis=-1) & (key >= jnp.repeat(first, size, axis=-1))
        read = read_tiles(kv, start, size)
        k, v = (online_softmax.widened(x, rows.dtype) for x in read[:2])
        k_scale, v_scale = (None, None) if read.scales is None else halves(read.scales)
        y = jnp.where(mask[:, :, None], online_softmax.score_bits(rows, k, spec, k_scale), -jnp.inf)
        v, v_scale = online_softmax.blank(v, v_scale, mask[..., None])
        return online_softmax.absorb(state, y, v, scale=v_scale)[0]

    steps = (jnp.max(last) + per_step - 1) // per_step
    state = jax.lax.fori_loop(0, steps, step, online_softmax.init_state(rows.shape[:3], q.shape[-1]))
    out, lse = online_softmax.finish_state(state, (keys.stop > keys.start)[:, None, None])
    return AttentionOut(out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3]))


def read_tiles(kv: KeyValues, start_BKP: Int32[Array, "B K P"], size: int) -> KeyValues:
    """Copy keys [start, start + size) for each start, and concatenate them along the key axis."""
    if kv.pages is not None:
        head = jnp.arange(start_BKP.shape[0] * start_BKP.shape[1], dtype=jnp.int32)
        return paging.take_tiles(paging.flat(kv), head.reshape(*start_BKP.shape[:2], 1), start_BKP, size)
    k, v = (take_tiles(x, start_BKP, size) for x in kv[:2])
    return KeyValues(k, v, scales=None if kv.scales is None else take_scales(kv.scales, start_BKP, size))


def take_tiles(x_BKSH: Array, start_BKP: Int32[Array, "B K P"], size: int) -> Float[Array, "B K P*size H"]:
    """Gather keys [start, start + size) for each start, and concatenate them along the key axis."""
    one = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=0)
    taken = jax.vmap(jax.vmap(jax.vmap(one, (None, 0))))(x_BKSH, start_BKP)
    return taken.reshape(*x_BKSH.shape[:2], -1, x_BKSH.shape[3])


def take_scales(scales: Float[Array, "B K 2 S"], start_BKP: Int32[Array, "B K P"], size: int) -> Array:
    """Gather the scales of keys [start, start + size) for each start: [B, K, 2, P * size]."""
    one = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=1)
    taken = jax.vmap(jax.vmap(jax.vmap(one, (None, 0), 1)))(scales, start_BKP)  # [B, K, 2, P, size]
    return taken.reshape(*scales.shape[:3], -1)


KERNELS = tuple(
    Kernel(
        name=f"xla_decode_{role}",
        dtypes=DTYPES,
        launch=launch,
        Config=Config,
        default_config=default_config,
        search_space=search_space,
        scaled=True,
        paged=True,
    )
    for role, launch in (("dense", launch_dense), ("score", launch_score), ("sparse", launch_sparse))
)
