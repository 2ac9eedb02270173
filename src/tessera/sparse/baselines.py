"""Policies to compare with: dense, window + sinks, and the oracle in which every layer scores itself."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.dispatch import attention
from tessera.attention.selection import select_tiles
from tessera.shapes import ceil_div
from tessera.sparse.contract import Policy, Reads
from tessera.sparse.plan import check_budget
from tessera.sparse.reads import count_read, count_visible, init_reads, record_reads, shapes_of


@dataclass(frozen=True, kw_only=True)
class Counted(Policy):
    """A policy whose only state is the count of keys read."""

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> Reads:
        return init_reads(num_layers, shapes.batch)

    def reads(self, state: Reads) -> Reads:
        return state


@dataclass(frozen=True, kw_only=True)
class Dense(Counted):
    """Every row reads every key it sees."""

    @property
    def name(self) -> str:
        return "dense"

    def attend(self, layer, q, k, v, spec, positions, state):
        out = attention(q, k, v, spec, **positions._asdict())
        visible = count_visible(spec, positions, shapes_of(q, k))
        return out.out, record_reads(state, layer, visible, visible)


@dataclass(frozen=True, kw_only=True)
class Window(Counted):
    """Every row reads the first `sinks` keys and the last `window` keys, rounded out to whole tiles.

    The rounding goes by query tile: a query tile reads every key tile that holds a sink or a key in the window of any
    of its rows, so a row reads at most query_tile + 2 * tile keys more than asked, and never fewer. Keys keep their
    absolute rotary positions (StreamingLLM, arXiv 2309.17453, renumbers them within its cache).

    Attributes:
        window: newest keys kept, the row's own included.
        sinks: oldest keys kept.
        tile: key positions per tile.
        query_tile: query positions that share a selection.
    """

    window: int = 1024
    sinks: int = 64
    tile: int = 64
    query_tile: int = 32

    def __post_init__(self):
        if self.window < 1 or self.sinks < 0:
            raise ValueError(f"window={self.window} must be at least 1 and sinks={self.sinks} at least 0")
        AttentionSpec(tile=self.tile, query_tile=self.query_tile)

    @property
    def name(self) -> str:
        return "window"

    def select(self, positions: Positions, shapes: Shapes) -> Selection:
        """The window's tiles as a selection, the same for every KV head."""
        num_tiles = ceil_div(shapes.num_queries, self.query_tile)
        row = jnp.arange(num_tiles, dtype=jnp.int32) * self.query_tile
        rows = jnp.minimum(positions.q_len[:, None] - row, self.query_tile)
        oldest = positions.q_start[:, None] + row
        newest = jnp.minimum(oldest + rows, positions.kv_len[:, None]) - 1
        end = newest // self.tile + 1
        first = jnp.maximum(oldest - self.window + 1, 0) // self.tile
        sinks = jnp.minimum(ceil_div(self.sinks, self.tile), first)
        count = jnp.where((rows > 0) & (newest >= 0), sinks + jnp.maximum(end - first, 0), 0)
        capacity = ceil_div(self.sinks, self.tile) + (self.window + self.query_tile - 2) // self.tile + 2
        slot = jnp.arange(min(capacity, ceil_div(shapes.num_keys, self.tile)), dtype=jnp.int32)
        tiles = jnp.where(slot < sinks[..., None], slot, slot - sinks[..., None] + first[..., None])
        heads = (shapes.batch, shapes.num_kv_heads, num_tiles)
        return Selection(jnp.broadcast_to(tiles[:, None], (*heads, slot.size)), jnp.broadcast_to(count[:, None], heads))

    def attend(self, layer, q, k, v, spec, positions, state):
        spec = replace(spec, tile=self.tile, query_tile=self.query_tile)
        shapes = shapes_of(q, k)
        selection = self.select(positions, shapes)
        out = attention(q, k, v, spec, **positions._asdict(), selection=selection)
        read = count_read(selection, spec, positions, shapes)
        return out.out, record_reads(state, layer, read, count_visible(spec, positions, shapes))


@dataclass(frozen=True, kw_only=True)
class Oracle(Counted):
    """Every layer scores itself, then attends to its own best tiles only: the accuracy that Top-k could reach.

    It costs more than dense (the scoring pass reads every key); `reads` counts the keys its output depends on.

    Attributes:
        tile, query_tile, fraction, minimum: as in Kascade.
        pooled: one selection for all KV heads.
    """

    tile: int = 64
    query_tile: int = 32
    fraction: float = 0.1
    minimum: int = 128
    pooled: bool = False

    def __post_init__(self):
        check_budget(self.fraction, self.minimum)
        AttentionSpec(tile=self.tile, query_tile=self.query_tile)

    @property
    def name(self) -> str:
        return "oracle"

    def attend(self, layer, q, k, v, spec, positions, state):
        spec = replace(spec, tile=self.tile, query_tile=self.query_tile)
        where, shapes = positions._asdict(), shapes_of(q, k)
        mass = attention(q, k, v, replace(spec, mass=True), **where).mass
        budget = {"fraction": self.fraction, "minimum": self.minimum, "pooled": self.pooled}
        selection = select_tiles(mass, spec, **budget, **where)
        out = attention(q, k, v, spec, **where, selection=selection)
        read = count_read(selection, spec, positions, shapes)
        return out.out, record_reads(state, layer, read, count_visible(spec, positions, shapes))
