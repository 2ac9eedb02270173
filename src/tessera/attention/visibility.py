"""Ranges of keys that query rows see, by the visibility rule in `contract`, computed on whole arrays.

A kernel that runs block by block evaluates the rule itself, on scalars and in units of its blocks.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from tessera.attention.contract import AttentionSpec, Positions


class Range(NamedTuple):
    """Keys [start, stop) that the one query row of each sequence sees; [0, 0) if it sees none."""

    start: Int32[Array, "B"]
    stop: Int32[Array, "B"]


def decode_range(spec: AttentionSpec, positions: Positions, num_keys: int) -> Range:
    """Return the range of keys that the one query row of each sequence (at position q_start) sees."""
    stop = jnp.clip(positions.kv_len, 0, num_keys)
    if spec.causal:
        stop = jnp.minimum(stop, positions.q_start + 1)
    start = jnp.zeros_like(stop)
    if spec.window is not None:
        start = jnp.maximum(positions.q_start - spec.window + 1, 0)
    seen = (positions.q_len > 0) & (stop > start)
    return Range(jnp.where(seen, start, 0), jnp.where(seen, stop, 0))


def row_ranges(
    spec: AttentionSpec, positions: Positions, num_queries: int
) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
    """Return (first, end): without a selection, each row sees keys [first, end); end = first if it sees none."""
    row = jnp.arange(num_queries, dtype=jnp.int32)
    p = positions.q_start[:, None] + row
    kv_len = positions.kv_len[:, None]
    end = jnp.minimum(kv_len, p + 1) if spec.causal else kv_len + 0 * p
    first = jnp.maximum(p - spec.window + 1, 0) if spec.window else 0 * p
    return first, jnp.where(row < positions.q_len[:, None], jnp.maximum(end, first), first)
