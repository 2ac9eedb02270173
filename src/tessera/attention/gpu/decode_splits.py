"""Splits of a Hopper decode call: which of a sequence's keys each thread block reads.

A *block* consists of the block_s keys of one step of a kernel. It is divided into `units` *units*; one copy moves a
unit, unless a page is shorter. In the dense role a unit is a whole block; in the sparse and score roles it is a tile if
a tile is smaller than a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tessera.attention.contract import AttentionSpec, Positions, Shapes
from tessera.attention.gpu.pages import piece_of
from tessera.core.shapes import ceil_div, round_up

ROWS = 64
"""Rows of one matrix product (wgmma)."""


class Cut(NamedTuple):
    """Static sizes of one call. Its keys are divided into splits, and each split into blocks of block_s keys."""

    role: str
    spec: AttentionSpec
    shapes: Shapes
    block_s: int
    splits: int

    @property
    def groups(self) -> int:
        return self.shapes.num_heads // self.shapes.num_kv_heads

    @property
    def parts(self) -> int:
        """Number of 64-row products for the G query heads of a KV head; separate thread blocks compute them."""
        return ceil_div(self.groups, ROWS)

    @property
    def rows(self) -> int:
        """Rows of a product that may hold query heads, a multiple of 8, since TMA copies 8 rows at a time."""
        return min(round_up(self.groups, 8), ROWS)

    @property
    def stored_groups(self) -> int:
        """Rows per KV head that are stored in memory: G, rounded up to a multiple of 8 if G exceeds 8."""
        return self.groups if self.groups <= 8 else round_up(self.groups, 8)

    @property
    def unit(self) -> int:
        return self.block_s if self.role == "dense" else min(self.block_s, self.spec.tile)

    @property
    def units(self) -> int:
        return self.block_s // self.unit

    @property
    def piece(self) -> int:
        """Keys per copy: a unit, or as much of a unit as lies in one page."""
        return piece_of(self.unit, self.shapes.page)

    @property
    def banked(self) -> int:
        """Number of units that hold all S keys, rounded up to whole blocks."""
        return ceil_div(self.shapes.num_keys, self.block_s) * self.units

    @property
    def tiles(self) -> int:
        return ceil_div(self.shapes.num_keys, self.spec.tile)

    @property
    def per_tile(self) -> int:
        """Units per tile."""
        return self.spec.tile // self.unit


class Run(NamedTuple):
    """Keys that one split reads for one sequence and KV head, as scalars.

    Attributes:
        start, stop: keys [start, stop) that the row sees; both 0 if none.
        listed: units in the list of tiles; 0 outside the sparse role.
        first, count: blocks [first, first + count) that the split reads; in the sparse role, blocks of listed units.
    """

    start: Any
    stop: Any
    listed: Any
    first: Any
    count: Any


def find_run(cut: Cut, split, positions: Positions, listed_tiles=0) -> Run:
    """Compute the `Run` of one split from the scalar positions of one sequence and the number of its listed tiles."""
    spec, block_s = cut.spec, cut.block_s
    row = positions.q_start
    stop = jnp.minimum(positions.kv_len, cut.shapes.num_keys)
    stop = jnp.minimum(stop, row + 1) if spec.causal else stop
    start = jnp.int32(0) if spec.window is None else jnp.maximum(row - (spec.window - 1), 0)
    seen = (positions.q_len > 0) & (stop > start)
    start, stop = jnp.where(seen, start, 0), jnp.where(seen, stop, 0)  # nothing seen: no block, and no mask needed
    listed = jnp.int32(0)
    if cut.role == "sparse":
        listed = jnp.where(seen, listed_tiles * (spec.tile // cut.unit), 0)
        begin, end = jnp.int32(0), jax.lax.div(listed + (cut.units - 1), jnp.int32(cut.units))
    else:
        begin, end = jax.lax.div(start, jnp.int32(block_s)), jax.lax.div(stop + (block_s - 1), jnp.int32(block_s))
    # Shares of what this sequence sees, not of the cache: a short sequence, too, keeps all splits busy.
    share = jax.lax.div(end - begin + (cut.splits - 1), jnp.int32(cut.splits))
    first = begin + split * share
    return Run(start, stop, listed, first, jnp.clip(end - first, 0, share))


def unit_starts(cut: Cut, run: Run, block, tile_at: Callable) -> list:
    """Return the position of the first key of each unit of a block.

    In the sparse role, units past the end of the list repeat the last listed unit; tile_at(n) is the n-th tile id.
    """
    if cut.role != "sparse":
        return [block * cut.block_s + i * cut.unit for i in range(cut.units)]
    per_tile = jnp.int32(cut.spec.tile // cut.unit)
    units = [jnp.minimum(block * cut.units + i, run.listed - 1) for i in range(cut.units)]
    return [
        tile_at(jax.lax.div(unit, per_tile)) * cut.spec.tile + jax.lax.rem(unit, per_tile) * cut.unit for unit in units
    ]


def visible_columns(cut: Cut, run: Run, block, starts: list) -> tuple[Any, Any]:
    """Return the columns [lo, hi) of a block that the row sees; listed keys also give one range, because ids ascend."""
    if cut.role != "sparse":
        return jnp.maximum(run.start - starts[0], 0), jnp.minimum(run.stop - starts[0], cut.block_s)
    # Count the keys of listed units before the visible range's start, and before its stop.
    lo = hi = jnp.int32(0)
    for i, start in enumerate(starts):
        listed = block * cut.units + i < run.listed
        lo += jnp.where(listed, jnp.clip(run.start - start, 0, cut.unit), 0)
        hi += jnp.where(listed, jnp.clip(run.stop - start, 0, cut.unit), 0)
    return lo, hi
