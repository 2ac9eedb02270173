"""Ranges of key blocks that a block of rows sees, and of row blocks that see a block of keys.

A mask can cut blocks only at the two ends of a range, so a kernel runs some blocks with a mask, the next blocks without
one, and the last blocks with a mask again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tessera.attention.contract import AttentionSpec


class Blocks(NamedTuple):
    """Ranges of blocks: each block in [start, stop) has a visible (row, key) pair; in [whole, masked), every pair is
    visible."""

    start: Array | int
    whole: Array | int
    masked: Array
    stop: Array


def key_blocks(first: Array, rows: Array, kv_len: Array, spec: AttentionSpec, size: int) -> Blocks:
    """Return the blocks of `size` keys that `rows` rows from position `first` on see; none if rows <= 0."""
    some, every, start, whole = kv_len, kv_len, 0, 0  # some row sees keys before `some`, every row keys before `every`
    if spec.causal:
        some, every = jnp.minimum(kv_len, first + rows), jnp.minimum(kv_len, first + 1)
    if spec.window is not None:
        start = down(first - spec.window + 1, size)
        whole = up(first + rows - spec.window, size)
    stop = jnp.where(rows > 0, jnp.maximum(up(some, size), start), start)
    whole = jnp.clip(whole, start, stop)
    return Blocks(start, whole, jnp.clip(down(every, size), whole, stop), stop)


def row_blocks(key: Array, keys: int, q_start: Array, limits: tuple, spec: AttentionSpec, size: int) -> Blocks:
    """Return the blocks of `size` rows that see keys [key, key + keys); `limits` are kv_len and q_len.

    In [whole, masked), padding rows and keys at or past kv_len count as visible: callers must zero them.
    """
    kv_len, q_len = limits
    start, whole, masked = 0, 0, up(q_len, size)  # without a mask, every row sees every key
    stop = jnp.where(key < kv_len, masked, 0)
    if spec.causal:
        start, whole = down(key - q_start, size), up(key + keys - 1 - q_start, size)
    if spec.window is not None:
        masked = down(key + spec.window - q_start, size)
        stop = jnp.minimum(stop, up(jnp.minimum(key + keys, kv_len) + spec.window - 1 - q_start, size))
    stop = jnp.maximum(stop, start)
    whole = jnp.clip(whole, start, stop)
    return Blocks(start, whole, jnp.clip(masked, whole, stop), stop)


def down(x: Array, size: int) -> Array:
    """Return x // size, or 0 if x is negative."""
    return jax.lax.div(jnp.maximum(x, 0), size)


def up(x: Array, size: int) -> Array:
    """Return x / size rounded up, or 0 if x is negative."""
    return jax.lax.div(jnp.maximum(x, 0) + size - 1, size)
