"""Count the keys that a call reads. The density reported to users comes from these counts, not from the plan."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.visibility import row_ranges
from tessera.sparse.contract import Reads


def init_reads(num_layers: int, batch: int) -> Reads:
    return Reads(jnp.zeros((num_layers, batch), jnp.float32), jnp.zeros((num_layers, batch), jnp.float32))


def record_reads(
    reads: Reads, layer: int | Array, read_BK: Float[Array, "B K"], visible_BK: Float[Array, "B K"]
) -> Reads:
    return Reads(reads.read.at[layer].set(read_BK.sum(-1)), reads.visible.at[layer].set(visible_BK.sum(-1)))


def count_visible(spec: AttentionSpec, positions: Positions, shapes: Shapes) -> Float[Array, "B K"]:
    """Count the keys that a dense pass would read, per KV head, summed over query rows."""
    first, end = row_ranges(spec, positions, shapes.num_queries)
    total = (end - first).sum(-1, dtype=_accumulator(shapes)).astype(jnp.float32)
    return jnp.broadcast_to(total[:, None], (shapes.batch, shapes.num_kv_heads))


def count_read(selection: Selection, spec: AttentionSpec, positions: Positions, shapes: Shapes) -> Float[Array, "B K"]:
    """Count the keys that are both selected and visible, per KV head, summed over query rows."""
    num_tiles, capacity = selection.tiles.shape[-2:]
    rows = num_tiles * spec.query_tile
    bounds = row_ranges(spec, positions, rows)
    first, end = (b.reshape(shapes.batch, 1, num_tiles, spec.query_tile, 1) for b in bounds)
    listed = jnp.arange(capacity, dtype=jnp.int32) < selection.count[..., None]
    start = jnp.where(listed, selection.tiles * spec.tile, jnp.iinfo(jnp.int32).max - spec.tile)[..., None, :]
    keys = jnp.maximum(jnp.minimum(end, start + spec.tile) - jnp.maximum(first, start), 0)
    return keys.sum((-3, -2, -1), dtype=_accumulator(shapes)).astype(jnp.float32)


def _accumulator(shapes: Shapes) -> jnp.dtype:
    """Return int32, which is exact, for calls of fewer than 2^31 (row, key) pairs, else float32, which rounds."""
    return jnp.int32 if shapes.num_queries * shapes.num_keys < 2**31 else jnp.float32
