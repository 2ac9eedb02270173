"""Sizes of a sparse prefill call on Hopper (rows of query tiles, blocks of listed keys), and a plan for every list.

Before the launch, XLA computes which part of each list some row sees, and which part every row sees in full. Tile ids
ascend, so each part is one range of the list, and entries that need masks lie between the ends of the two ranges. A
*unit* is the run of keys that one copy moves: a tile, or as much of a tile as fits in one block.
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
"""Bytes of shared memory for barriers and alignment, an upper bound."""
NEVER = 1 << 30
"""Position greater than every real position."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes.

    Attributes:
        rows: rows per compute warpgroup: 64 or 128.
        block_s: keys per block in shared memory: 64 or 128.
        stages: blocks of K, and of V, that shared memory holds per list.
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
        groups: G, query heads per KV head.
        num_tiles: query tiles of the call.
        tokens: tokens per query tile, padded to a multiple of 8.
        chunk: tokens per copy of q, chosen so that no copy straddles two heads or two 64-row blocks.
        chunks: copies that hold the G * tokens rows of a query tile.
        lists: query tiles per thread block: 2 if a query tile fits in 64 rows, two lists' blocks fit in shared memory,
            and keys are not int8.
        row_blocks: 64-row blocks per compute warpgroup.
        parts: thread blocks that share a query tile and its list.
        unit: keys per copy of K or V: a tile, or as much of a tile as fits in one block.
        stages: blocks of K, and of V, that shared memory holds per list.
        page: positions per page; None if keys are contiguous.
        scaled: whether keys are int8.
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
    page: int | None
    scaled: bool

    @property
    def units(self) -> int:
        """Copies per block of K (and of V)."""
        return self.block_s // self.unit

    @property
    def block_chunks(self) -> int:
        """Copies per 64-row block of q."""
        return ROWS // self.chunk

    @property
    def smem_bytes(self) -> int:
        """Upper bound on a thread block's shared memory, in bytes."""
        rows = WARPGROUPS * self.row_blocks * ROWS
        blocks = 2 * self.lists * self.block_s
        landing = blocks * self.head_dim if self.scaled else 0
        numbers = (rows + self.stages * blocks) * self.head_dim
        return numbers * jnp.dtype(self.dtype).itemsize + landing + 4 * rows + RESERVED_BYTES


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
        # At head_dim 256, two lists exceed shared memory. Int8 keys are converted for one list at a time.
        lists=2 if rows <= ROWS and shapes.head_dim <= 128 and not shapes.scaled else 1,
        row_blocks=row_blocks,
        parts=ceil_div(rows, WARPGROUPS * row_blocks * ROWS),
        unit=min(spec.tile, config.block_s),
        block_s=config.block_s,
        stages=config.stages,
        page=shapes.page,
        scaled=shapes.scaled,
    )


class Plan(NamedTuple):
    """Numbers about one list that a thread block needs, computed before the launch. Units are numbered along the list.

    Attributes:
        begin, end: some row sees units [begin, end); the kernel reads only these.
        whole_from, whole_to: every row sees units [whole_from, whole_to) in full.
        first: absolute position of the query tile's first row.
        rows: tokens of the query tile that are not padding.
        kv_len: valid keys of the sequence.
    """

    begin: Array
    end: Array
    whole_from: Array
    whole_to: Array
    first: Array
    rows: Array
    kv_len: Array


def plan(selection: Selection, positions: Positions, cut: Cut) -> Int32[Array, "B K I 7"]:
    """Compute the `Plan` of every list. Ids ascend, so each bound is the number of listed units before a position."""
    spec, (tiles, count) = cut.spec, selection
    kv_len, q_len = jnp.minimum(positions.kv_len, cut.num_keys), jnp.minimum(positions.q_len, cut.num_queries)
    listed = jnp.arange(tiles.shape[3]) < count[..., None]
    start = tiles * spec.tile
    block = jnp.arange(tiles.shape[2]) * spec.query_tile
    rows = jnp.clip(q_len[:, None] - block, 0, spec.query_tile)[:, None, :, None]
    first = (positions.q_start[:, None] + block)[:, None, :, None]
    last, kv_len = first + rows - 1, jnp.broadcast_to(kv_len[:, None, None, None], first.shape)
    some_see, all_see = kv_len, kv_len  # some row sees keys before the first limit, every row those before the second
    if spec.causal:
        some_see, all_see = jnp.minimum(kv_len, last + 1), jnp.minimum(kv_len, first + 1)
    some_see = jnp.where(rows > 0, some_see, 0)
    window = NEVER if spec.window is None else spec.window

    def units(keys):
        """Count the listed units that lie wholly before a position; `keys` is that position minus each tile's start."""
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
