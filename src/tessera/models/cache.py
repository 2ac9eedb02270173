"""The KV cache: allocated once and updated in place. The keys of one head are contiguous, so a tile is one block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from tessera.attention import context
from tessera.core.mesh import keep
from tessera.models.config import ModelConfig


class Cache(NamedTuple):
    """Keys and values of every layer, [B,K,S,H] each: a tuple over layers (unrolled) or stacked [L,B,K,S,H] (scan)."""

    k: tuple[Array, ...] | Array
    v: tuple[Array, ...] | Array


def init_cache(config: ModelConfig, batch: int, num_keys: int, *, dtype: DTypeLike, stacked: bool) -> Cache:
    """Create an empty cache of 2 * L * B * K * S * H elements."""
    shape = (batch, config.num_kv_heads, num_keys, config.head_dim)
    if stacked:
        return Cache(jnp.zeros((config.num_layers, *shape), dtype), jnp.zeros((config.num_layers, *shape), dtype))
    layers = range(config.num_layers)
    return Cache(tuple(jnp.zeros(shape, dtype) for _ in layers), tuple(jnp.zeros(shape, dtype) for _ in layers))


def keep_split(cache: Cache, stripe: int | None = None) -> Cache:
    """Fix, inside a program, that the devices of a mesh share the cache by KV heads and, with a stripe, by slots."""
    stacked = not isinstance(cache.k, tuple)
    return keep(cache, *((None, None) if stacked else (None,)), "kv_heads", None if stripe is None else "slots")


def append(
    cache: Float[Array, "*L B K S H"],
    new: Float[Array, "B T K H"],
    q_start: Int32[Array, "B"],
    layer: tuple[Int32[Array, ""], ...] = (),
    stripe: int | None = None,
) -> Float[Array, "*L B K S H"]:
    """Write T new positions per sequence, from q_start on; `layer` selects the layer of a stacked cache.

    With `stripe`, the cache is dealt over the mesh axis "context"; see `context.append` for what it needs. The caller
    must ensure q_start + T <= S, because XLA silently clamps the position of a write.
    """
    rows = jnp.swapaxes(new, 1, 2).astype(cache.dtype)
    if stripe is not None and context.num_parts() > 1:
        return context.append(cache, rows, q_start, layer, stripe)
    zero = jnp.int32(0)  # not a Python 0: with 64-bit types enabled that would be int64, unlike q_start's int32
    for b in range(rows.shape[0]):  # one in-place update per sequence; a vmapped one becomes a slow scatter on CPU
        row = jnp.expand_dims(rows[b], range(cache.ndim - 3))
        cache = jax.lax.dynamic_update_slice(cache, row, (*layer, zero + b, zero, q_start[b], zero))
    return cache
