"""Flops of an attention call, and the bytes of its inputs and outputs that a kernel moves."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.core.shapes import ceil_div


def head_bytes(shapes: Shapes) -> float:
    """Return the bytes of one KV head's key (or value) at one position, including its scale."""
    return shapes.head_dim + 2 if shapes.scaled else shapes.head_dim * jnp.dtype(shapes.dtype).itemsize


def prefill(spec: AttentionSpec, shapes: Shapes) -> Mapping[str, float]:
    """Count flops of q.k and p.v over visible (row, key) pairs, and bytes of q, k, v, out and lse, each moved once.

    The queries are assumed to be the last T of the S positions: q_start = S - T.
    """
    t, s = shapes.num_queries, shapes.num_keys
    rows_in = min(t, s)  # rows before position 0 see nothing if causal
    pairs = rows_in * s - rows_in * (rows_in - 1) / 2 if spec.causal else t * s
    if spec.window is not None:
        pairs = min(pairs, t * spec.window)
    width = jnp.dtype(shapes.dtype).itemsize
    rows = shapes.batch * shapes.num_heads * t
    kv_bytes = 2 * shapes.batch * shapes.num_kv_heads * s * head_bytes(shapes)
    return {
        "flops": 4.0 * shapes.batch * shapes.num_heads * shapes.head_dim * pairs,
        "bytes": float(2 * rows * shapes.head_dim * width + 4 * rows + kv_bytes),
    }


def sparse_prefill(spec: AttentionSpec, shapes: Shapes) -> Mapping[str, float]:
    """Count flops of q.k and p.v over all keys of the listed tiles, and bytes moved.

    q, out and lse are moved once each; the K and V of a listed tile are read once per list that holds the tile.
    """
    width = jnp.dtype(shapes.dtype).itemsize
    keys = listed_keys(spec, shapes)
    rows = shapes.batch * shapes.num_heads * shapes.num_queries
    lists = shapes.batch * shapes.num_kv_heads * ceil_div(shapes.num_queries, spec.query_tile)
    return {
        "flops": 4.0 * rows * shapes.head_dim * keys,
        "bytes": float(2 * rows * shapes.head_dim * width + 4 * rows + 2 * lists * keys * head_bytes(shapes)),
    }


def listed_keys(spec: AttentionSpec, shapes: Shapes) -> float:
    """Return the mean number of keys that a query tile lists if it lists as many visible tiles as its list can hold.

    The queries are assumed to be the last T of the S positions: q_start = S - T.
    """
    start = np.arange(0, shapes.num_queries, spec.query_tile) + shapes.num_keys - shapes.num_queries
    stop = np.clip(start + spec.query_tile, 0, shapes.num_keys) if spec.causal else shapes.num_keys
    first = 0 if spec.window is None else np.maximum(start - spec.window + 1, 0)
    listed = np.clip(-(-stop // spec.tile) - first // spec.tile, 0, shapes.capacity)
    return float(np.mean(np.minimum(np.broadcast_to(listed, start.shape) * spec.tile, shapes.num_keys)))


def decode(role: str, spec: AttentionSpec, shapes: Shapes) -> Mapping[str, float]:
    """Count 4 H flops per (query head, key) pair, and the bytes of K and V, each read once.

    A sparse call reads the keys of C tiles, at most S; any other call reads S keys, or as many as its window spans.
    """
    keys = shapes.num_keys if spec.window is None else min(shapes.num_keys, spec.window)
    if role == "sparse":
        keys = min(shapes.capacity * spec.tile, shapes.num_keys)
    return {
        "flops": 4.0 * shapes.batch * shapes.num_heads * shapes.head_dim * keys,
        "bytes": 2.0 * shapes.batch * shapes.num_kv_heads * keys * head_bytes(shapes),
    }
