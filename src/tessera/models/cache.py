"""The KV cache: allocated once and updated in place. The keys of one head are contiguous, so a tile of keys is one
block of memory.

An int8 cache stores every key and value as int8 times a bfloat16 scale, max |x| / 127, one per position and KV head. If
several positions shared a scale, a new position could change the scale, and then all their stored integers.

A paged cache has a pool of P pages, [P,K,page,H], for each layer's keys and one for its values, of `page` positions
each. All layers share one page table; `models.pages` hands out the pages.
"""

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import BFloat16, Float, Int8, Int32

from tessera.attention import context
from tessera.attention.contract import KeyValues
from tessera.core.mesh import keep
from tessera.models.config import ModelConfig
from tessera.models.pages import NULL

INT8_MAX = 127


class Cache(NamedTuple):
    """Keys and values of every layer, each a tuple over layers (unrolled layers) or one stacked array (lax.scan).

    A one-layer cache holds that layer's arrays.

    Attributes:
        k, v: [B,K,S,H] per layer; in a paged cache, pools of P pages, [P,K,page,H]. Stacked arrays have a leading L.
        scales: scales of the keys (index 0) and values (index 1) of an int8 cache, [B,K,2,S] per layer, or
            [P,K,2,page] if paged; None for a float cache.
        pages: page table of a paged cache: the pages of each sequence, in order of position. None if not paged.
    """

    k: tuple[Array, ...] | Array
    v: tuple[Array, ...] | Array
    scales: tuple[Array, ...] | Array | None = None
    pages: Int32[Array, "B J"] | None = None

    @classmethod
    def of_layers(cls, layers: Iterable["Cache"]) -> "Cache":
        *arrays, pages = zip(*layers)
        return cls(*(None if parts[0] is None else parts for parts in arrays), pages=pages[0])

    def layer(self, index: int) -> "Cache":
        """Return layer `index` as a one-layer cache; this cache's arrays must be tuples over layers."""
        return Cache(*(None if part is None else part[index] for part in self[:3]), pages=self.pages)

    def key_values(self, at: tuple[Int32[Array, ""], ...] = ()) -> KeyValues:
        """Return this one-layer cache as kernels read it; in a stacked cache, `at` = (index,) selects the layer."""
        return KeyValues(self.k[at], self.v[at], self.pages, None if self.scales is None else self.scales[at])

    @property
    def num_keys(self) -> int:
        """Number of positions per sequence for which the cache has room."""
        return self._slots if self.pages is None else self._slots * self.pages.shape[1]

    @property
    def page(self) -> int | None:
        """Number of positions per page; None if the cache is not paged."""
        return None if self.pages is None else self._slots

    @property
    def _slots(self) -> int:
        return (self.k[0] if isinstance(self.k, tuple) else self.k).shape[-2]


def init_cache(config: ModelConfig, batch: int, num_keys: int, *, dtype: DTypeLike, stacked: bool) -> Cache:
    """Create an empty cache; for a paged one, pass batch = pages and num_keys = page, then add the page table."""
    lead = (batch, config.num_kv_heads)

    def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Array, ...] | Array:
        if stacked:
            return jnp.zeros((config.num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    k, v = (zeros((*lead, num_keys, config.head_dim), dtype) for _ in "kv")
    return Cache(k, v, zeros((*lead, 2, num_keys), jnp.bfloat16) if jnp.dtype(dtype) == jnp.int8 else None)


def extend(
    cache: Cache,
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    q_start: Int32[Array, "B"],
    layer: tuple[Int32[Array, ""], ...] = (),
    stripe: int | None = None,
    q_len: Int32[Array, "B"] | None = None,
) -> Cache:
    """Write T new keys and values per sequence, from position q_start on; for an int8 cache, quantise them first.

    `layer` and `stripe` are as in `append`; only float caches support `stripe`. A paged cache needs q_len, the number
    of new positions per sequence that are not padding; see `append_pages`.
    """
    if cache.pages is not None:
        if q_len is None:
            raise ValueError("q_len=None, but a paged cache needs it: pass the number of new tokens of each sequence")
        return append_pages(cache, k_BTKH, v_BTKH, q_start, q_len, layer)
    if cache.scales is None:
        k, v = (append(held, new, q_start, layer, stripe) for held, new in ((cache.k, k_BTKH), (cache.v, v_BTKH)))
        return Cache(k, v)
    k, v, scales = quantised(k_BTKH, v_BTKH)
    held = _write(cache.scales, scales, q_start, layer, axis=2)
    return Cache(append(cache.k, k, q_start, layer), append(cache.v, v, q_start, layer), held)


def quantised(k_BTKH: Array, v_BTKH: Array) -> tuple[Array, Array, BFloat16[Array, "B K 2 T"]]:
    """Return int8 keys and values [B,T,K,H] and their scales."""
    (k, k_scale), (v, v_scale) = quantise(k_BTKH), quantise(v_BTKH)
    return k, v, jnp.moveaxis(jnp.stack([k_scale, v_scale], axis=3), 1, 3)  # [B,T,K] each -> [B,K,2,T]


def quantise(x: Float[Array, "... H"]) -> tuple[Int8[Array, "... H"], BFloat16[Array, "..."]]:
    """Return int8 q and one scale per vector, with |q * scale - x| <= scale / 2; the scale is NaN if x is not finite.

    The scale is max |x| / 127, rounded up to a bfloat16 so that no q exceeds 127.
    """
    x = x.astype(jnp.float32)
    exact = jnp.max(jnp.abs(x), axis=-1) / INT8_MAX
    bits = jax.lax.bitcast_convert_type(exact, jnp.int32)
    upward = jax.lax.bitcast_convert_type((bits + 0xFFFF) & ~0xFFFF, jnp.float32)  # the next bfloat16
    scale = jnp.where(jnp.isfinite(exact), upward, jnp.nan)[..., None]
    whole = jnp.where(scale > 0, jnp.round(x / jnp.where(scale > 0, scale, 1.0)), 0.0)
    return whole.astype(jnp.int8), scale[..., 0].astype(jnp.bfloat16)


def keep_split(cache: Cache, stripe: int | None = None) -> Cache:
    """Inside a program, fix the cache's sharding on the mesh: split by KV head and, with `stripe`, also by position."""
    stacked = not isinstance(cache.k, tuple)
    axes = *((None, None) if stacked else (None,)), "kv_heads", None if stripe is None else "slots"
    return keep(cache._replace(pages=None), *axes)._replace(pages=keep(cache.pages))


def append(
    cache: Float[Array, "*L B K S H"],
    new: Float[Array, "B T K H"],
    q_start: Int32[Array, "B"],
    layer: tuple[Int32[Array, ""], ...] = (),
    stripe: int | None = None,
) -> Float[Array, "*L B K S H"]:
    """Write the keys or values of T new positions per sequence, from position q_start on.

    `layer` = (index,) selects the layer of a stacked cache. With `stripe`, the devices of the mesh axis "context" hold
    the cache in stripes of `stripe` positions; `context.append` states the conditions. The caller must ensure
    q_start + T <= S, because XLA silently clamps the position of a write.
    """
    rows = jnp.swapaxes(new, 1, 2).astype(cache.dtype)
    if stripe is not None and context.traced_stripes() > 1:
        return context.append(cache, rows, q_start, layer, stripe)
    return _write(cache, rows, q_start, layer, axis=1)


def append_pages(
    cache: Cache,
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    q_start: Int32[Array, "B"],
    q_len: Int32[Array, "B"],
    layer: tuple[Int32[Array, ""], ...] = (),
) -> Cache:
    """Write T new keys and values per sequence into the sequence's pages, from position q_start on.

    They are written in runs of gcd(T, page) positions, and q_start must be a multiple of that length. The new keys and
    values from index q_len on are padding. A run that holds only padding is written to the null page (`pages.NULL`);
    padding in other runs goes to positions that hold no token yet.
    """
    k, v, scales = (k_BTKH, v_BTKH, None) if cache.scales is None else quantised(k_BTKH, v_BTKH)
    num_rows, page = k.shape[1], cache.page
    run = gcd(num_rows, page)
    first = jnp.arange(0, num_rows, run, dtype=jnp.int32)
    position = q_start[:, None] + first
    entry = jnp.clip(position // page, 0, cache.pages.shape[1] - 1)  # padding may have any position
    ids = jnp.where(first < q_len[:, None], jnp.take_along_axis(cache.pages, entry, axis=1), NULL)
    where = ids.reshape(-1), (position % page).reshape(-1)

    def write(pool: Array, new: Array, axis: int) -> Array:
        """Write `new` [B,K,...], whose axis `axis` has the new positions, into the pool, run by run."""
        new = jnp.stack(jnp.split(new, len(first), axis=axis), axis=1).astype(pool.dtype)
        new = new.reshape(-1, *new.shape[2:])

        def put(i: Array, pool: Array) -> Array:
            at = [zero, zero, zero]
            at[axis - 1] = where[1][i]
            row = jnp.expand_dims(new[i], range(pool.ndim - 3))
            return jax.lax.dynamic_update_slice(pool, row, (*layer, where[0][i], *at))

        zero = jnp.int32(0)
        # XLA would unroll a loop of one round, fuse the write with later reads and copy the pool for each.
        return jax.lax.optimization_barrier(jax.lax.fori_loop(0, new.shape[0], put, pool))

    k, v = (write(pool, jnp.swapaxes(x, 1, 2), 2) for pool, x in ((cache.k, k), (cache.v, v)))
    return cache._replace(k=k, v=v, scales=None if scales is None else write(cache.scales, scales, 3))


def _write(cache: Array, rows: Array, q_start: Array, layer: tuple[Array, ...], axis: int) -> Array:
    """For each sequence b, write rows[b] at q_start[b] along dimension `axis` of the cache's last three."""
    zero = jnp.int32(0)  # not a Python 0: with 64-bit types enabled that would be int64, unlike q_start's int32
    for b in range(rows.shape[0]):  # one in-place update per sequence; a vmapped one becomes a slow scatter on CPU
        row = jnp.expand_dims(rows[b], range(cache.ndim - 3))
        at = [zero, zero, zero]
        at[axis] = q_start[b]
        cache = jax.lax.dynamic_update_slice(cache, row, (*layer, zero + b, *at))
    return cache
