"""Read keys and values that may be stored in pages.

Position p of sequence b is at offset p % page of pool page `pages[b, p // page]`. A kernel reads one block of keys at a
time, so only that block is ever copied out of the pool. The keys of one page and one head are contiguous, so the pool
[P,K,page,H] is also a list of P * K single-head pages, and a head's page table is `pages * K + head`.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from tessera.attention.contract import KeyValues
from tessera.core.shapes import round_up


def flat(kv: KeyValues) -> KeyValues:
    """Merge sequences and KV heads into one axis X = B * K.

    Contiguous k and v become [X,S,H], and their scales [X,2,S]. A pool becomes [P*K,page,H], its scales [P*K,2,page],
    and the page table [X,J].
    """
    k, v, scales = (None if x is None else x.reshape(-1, *x.shape[2:]) for x in (kv.k, kv.v, kv.scales))
    return KeyValues(k, v, None if kv.pages is None else head_table(kv), scales)


def head_table(kv: KeyValues) -> Int32[Array, "X J"]:
    """Return a page table per sequence and KV head, X = B * K, whose entries are indices of single-head pages."""
    heads = kv.k.shape[1]
    table = kv.pages[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]
    return table.reshape(-1, kv.pages.shape[1])


def whole_pages(kv: KeyValues, block_s: int) -> int:
    """Round block_s up to whole pages, but to at most num_keys; return it unchanged if the keys are contiguous."""
    return block_s if kv.pages is None else min(round_up(block_s, kv.k.shape[-2]), kv.num_keys)


def padded(kv: KeyValues, block_s: int) -> KeyValues:
    """Pad the keys of a `flat` record to a multiple of block_s; page 0, the padding of pages, may hold anything."""
    extra = -kv.num_keys % block_s
    if kv.pages is not None:
        return kv._replace(pages=jnp.pad(kv.pages, [(0, 0), (0, extra // kv.k.shape[-2])]))
    k, v = (jnp.pad(x, [(0, 0), (0, extra), (0, 0)]) for x in kv[:2])
    return KeyValues(k, v, scales=None if kv.scales is None else jnp.pad(kv.scales, [(0, 0), (0, 0), (0, extra)]))


def take_block(kv: KeyValues, x: Array, heads: int, start: Array, size: int) -> KeyValues:
    """Copy keys [start, start + size), whole pages of them, of entries [x, x + heads) along X of a `flat` record.

    The copied k and v are [heads,size,H], and their scales [heads,2,size].
    """
    zero = jnp.int32(0)  # not a Python 0, which is an int64 if JAX allows 64-bit types
    if kv.pages is None:
        at, shape = (x, start, zero), (heads, size, kv.k.shape[2])
        k, v = (jax.lax.dynamic_slice(part, at, shape) for part in kv[:2])
        if kv.scales is None:
            return KeyValues(k, v)
        return KeyValues(k, v, scales=jax.lax.dynamic_slice(kv.scales, (x, zero, start), (heads, 2, size)))
    page = kv.k.shape[1]
    ids = jax.lax.dynamic_slice(kv.pages, (x, start // page), (heads, size // page))
    k, v = (pick(part, ids).reshape(heads, size, -1) for part in kv[:2])
    if kv.scales is None:
        return KeyValues(k, v)
    return KeyValues(k, v, scales=jnp.swapaxes(pick(kv.scales, ids), 1, 2).reshape(heads, 2, size))


def read_positions(kv: KeyValues, start: Array, size: int) -> KeyValues:
    """Copy positions [start, start + size), whole pages of them, of every sequence: k and v [B,K,size,H], scales alike.

    Unlike `take_block`, this function keeps the axis of KV heads, which a mesh may split.
    """
    if kv.pages is None:
        k, v, scales = (
            None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)
            for x, axis in ((kv.k, 2), (kv.v, 2), (kv.scales, 3))
        )
        return KeyValues(k, v, scales=scales)
    page = kv.k.shape[2]
    ids = jax.lax.dynamic_slice_in_dim(kv.pages, start // page, size // page, axis=1)

    def read(pool: Array, axis: int) -> Array:  # [P,K,...] -> [B,K,...], whose `axis` counts positions
        taken = jnp.moveaxis(pick(pool, ids), 1, axis)
        return taken.reshape(*taken.shape[:axis], size, *taken.shape[axis + 2 :])

    return KeyValues(read(kv.k, 2), read(kv.v, 2), scales=None if kv.scales is None else read(kv.scales, 3))


def take_tiles(kv: KeyValues, x: Int32[Array, "... 1"], start: Int32[Array, "... P"], tile: int) -> KeyValues:
    """Copy the tiles that start at `start` out of a paged `flat` record: k and v [...,P*tile,H], scales [...,2,P*tile].

    `x` is the entry along X, and starts must be multiples of the tile. A start outside of the page table reads wrong
    keys, but never memory outside of the pool.
    """
    page = kv.k.shape[1]
    ids = kv.pages.at[x, start // page].get(mode="clip") * (page // tile) + start % page // tile
    k, v = (pick(part.reshape(-1, tile, part.shape[2]), ids) for part in kv[:2])
    k, v = (part.reshape(*ids.shape[:-1], -1, part.shape[-1]) for part in (k, v))
    if kv.scales is None:
        return KeyValues(k, v)
    scales = kv.scales.reshape(-1, 2, page // tile, tile)
    taken = scales.at[ids // (page // tile), :, ids % (page // tile)].get(mode="clip")  # [...,P,2,tile]
    return KeyValues(k, v, scales=jnp.swapaxes(taken, -2, -3).reshape(*ids.shape[:-1], 2, -1))


def pick(x: Array, ids: Array) -> Array:
    """Return x[ids], with ids clipped to the range of x."""
    return x.at[ids].get(mode="clip")
