"""Which blocks of keys a run of rows sees, and which blocks of rows see a run of keys: in part, or every pair of them.

Blocks that a mask can touch are at the two ends of a range: a kernel runs masked blocks, plain ones, and masked ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tessera.attention.contract import AttentionSpec


class Blocks(NamedTuple):
    """Some pair is visible in blocks [start, stop), every pair in blocks [whole, masked)."""

    start: Array | int
    whole: Array | int
    masked: Array
    stop: Array


def key_blocks(first: Array, rows: Array, kv_len: Array, spec: AttentionSpec, size: int) -> Blocks:
    """Return the blocks of `size` keys for `rows` rows (none if not positive), the first at position `first`."""
    some, every, start, whole = kv_len, kv_len, 0, 0  # keys before these limits, blocks from these
    if spec.causal:
        some, every = jnp.minimum(kv_len, first + rows), jnp.minimum(kv_len, first + 1)
    if spec.window is not None:
        start = down(first - spec.window + 1, size)
        whole = up(first + rows - spec.window, size)
    stop = jnp.where(rows > 0, jnp.maximum(up(some, size), start), start)
    whole = jnp.clip(whole, start, stop)
    return Blocks(start, whole, jnp.clip(down(every, size), whole, stop), stop)


def row_blocks(key: Array, keys: int, q_start: Array, limits: tuple, spec: AttentionSpec, size: int) -> Blocks:
    """Return the blocks of `size` rows for the keys [key, key + keys); limits: kv_len and q_len.

    Rows past q_len count as seeing every key; keys past kv_len count as seen by rows that see another key of the run.
    """
    kv_len, q_len = limits
    start, whole, masked = 0, 0, up(q_len, size)
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
    """Whole blocks in x, none if it is negative."""
    return jax.lax.div(jnp.maximum(x, 0), size)


def up(x: Array, size: int) -> Array:
    """Blocks that hold x, none if it is negative."""
    return jax.lax.div(jnp.maximum(x, 0) + size - 1, size)
