"""How a sparse prefill call on Hopper is cut: rows of query tiles, blocks of listed keys, and a plan for every list.

Before the launch, XLA computes which entries of a list some row sees, and which of those every row sees in full: tile
ids ascend, so each of these is one run, and the entries that need masks are at its ends.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.gpu.warpgroup import LEAST_TOKENS, ROWS, WARPGROUPS
from tessera.core.shapes import ceil_div, round_up

RESERVED_BYTES = 2048
"""Most bytes of shared memory for barriers and alignment."""
NEVER = 1 << 30
"""Beyond every position."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes.

    Attributes:
        rows: rows of a compute warpgroup: 64 or 128.
        block_s: keys of a block in shared memory: 64 or 128.
        stages: blocks of K and of V in shared memory.
    """

    rows: int = 64
    block_s: int = 128
    stages: int = 2

    def __post_init__(self):
        if self.rows not in (64, 128):
            raise ValueError(f"rows={self.rows} must be 64 or 128")
        if self.block_s not in (64, 128):
            raise ValueError(f"block_s={self.block_s} must be 64 or 128")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")


class Cut(NamedTuple):
    """Static sizes of a launch.

    Attributes:
        tokens: tokens of a query tile, padded to a multiple of 8.
        chunk: tokens of one copy of q: they never straddle a head or a 64-row block.
        chunks: copies that hold the G * tokens rows of a query tile.
        lists: query tiles of a thread block: 2 where one fits 64 rows and two fit shared memory.
        row_blocks: 64-row blocks of a compute warpgroup.
        parts: thread blocks that share a query tile's list.
        unit: keys of one copy of K or V: a tile, or the part of one that fills a block.
        stages: blocks of K and of V in shared memory, per list.
    """

    spec: AttentionSpec
    dtype: str
    num_queries: int
    num_keys: int
    groups: int
    head_dim: int
    num_tiles: int
    tokens: int
    chunk: int
    chunks: int
    lists: int
    row_blocks: int
    parts: int
    unit: int
    block_s: int
    stages: int

    @property
    def units(self) -> int:
        """Copies that fill one block of K, or of V."""
        return self.block_s // self.unit

    @property
    def block_chunks(self) -> int:
        """Copies that fill one 64-row block of q."""
        return ROWS // self.chunk

    @property
    def smem_bytes(self) -> int:
        """Shared memory, an upper bound."""
        rows = WARPGROUPS * self.row_blocks * ROWS
        keys = 2 * self.lists * self.stages * self.block_s
        return (rows + keys) * self.head_dim * jnp.dtype(self.dtype).itemsize + 4 * rows + RESERVED_BYTES


def cut_call(spec: AttentionSpec, shapes: Shapes, config: Config) -> Cut:
    """Compute the sizes of a launch from the call and the block sizes."""
    groups = shapes.num_heads // shapes.num_kv_heads
    tokens = round_up(min(spec.query_tile, shapes.num_queries), LEAST_TOKENS)
    chunk, rows = math.gcd(tokens, ROWS), groups * tokens
    row_blocks = config.rows // ROWS if rows > WARPGROUPS * ROWS else 1
    return Cut(
        spec=spec,
        dtype=shapes.dtype,
        num_queries=shapes.num_queries,
        num_keys=shapes.num_keys,
        groups=groups,
        head_dim=shapes.head_dim,
        num_tiles=ceil_div(shapes.num_queries, spec.query_tile),
        tokens=tokens,
        chunk=chunk,
        chunks=rows // chunk,
        lists=2 if rows <= ROWS and shapes.head_dim <= 128 else 1,  # shared memory holds no more
        row_blocks=row_blocks,
        parts=ceil_div(rows, WARPGROUPS * row_blocks * ROWS),
        unit=min(spec.tile, config.block_s),
        block_s=config.block_s,
        stages=config.stages,
    )


class Plan(NamedTuple):
    """What a thread block must know about its list, computed before the launch.

    Attributes:
        begin, end: units of the list that some row sees; the others are not read.
        whole_from, whole_to: units [whole_from, whole_to) that every row sees in full.
        first: absolute position of the query tile's first row.
        rows: rows of the query tile without padding.
        kv_len: valid keys.
    """

    begin: Array
    end: Array
    whole_from: Array
    whole_to: Array
    first: Array
    rows: Array
    kv_len: Array


def plan(selection: Selection, positions: Positions, cut: Cut) -> Int32[Array, "B K I 7"]:
    """Plan every list by counting entries before each limit, since ids ascend. Lengths are clipped to the arrays."""
    spec, (tiles, count) = cut.spec, selection
    kv_len, q_len = jnp.minimum(positions.kv_len, cut.num_keys), jnp.minimum(positions.q_len, cut.num_queries)
    listed = jnp.arange(tiles.shape[3]) < count[..., None]
    start = tiles * spec.tile
    block = jnp.arange(tiles.shape[2]) * spec.query_tile
    rows = jnp.clip(q_len[:, None] - block, 0, spec.query_tile)[:, None, :, None]
    first = (positions.q_start[:, None] + block)[:, None, :, None]
    last, kv_len = first + rows - 1, jnp.broadcast_to(kv_len[:, None, None, None], first.shape)
    some_see, all_see = kv_len, kv_len  # keys before these
    if spec.causal:
        some_see, all_see = jnp.minimum(kv_len, last + 1), jnp.minimum(kv_len, first + 1)
    some_see = jnp.where(rows > 0, some_see, 0)
    window = NEVER if spec.window is None else spec.window

    def units(keys):
        """Count units of the list among the first `keys` positions of their tiles."""
        return jnp.sum(jnp.where(listed, jnp.clip(keys // cut.unit, 0, spec.tile // cut.unit), 0), -1)

    numbers = Plan(
        begin=units(first - window + 1 - start),
        end=units(some_see - start + cut.unit - 1),
        whole_from=units(last - window + 1 - start + cut.unit - 1),
        whole_to=units(all_see - start),
        first=first[..., 0],
        rows=rows[..., 0],
        kv_len=kv_len[..., 0],
    )
    return jnp.stack([jnp.broadcast_to(x, count.shape) for x in numbers], -1)
