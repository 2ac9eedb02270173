"""Baseline policies: dense; window and sinks; exact scores in every layer (the oracle)."""

from dataclasses import dataclass, replace
from math import lcm

import jax.numpy as jnp
from jax import Array

from tessera.attention import dispatch
from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.selection import check_budget, select_tiles
from tessera.core.shapes import ceil_div, round_up
from tessera.sparse.contract import Policy, Reads
from tessera.sparse.reads import count_read, count_visible, init_reads, record_reads


@dataclass(frozen=True, kw_only=True)
class Counted(Policy):
    """A policy whose only state is its key counts."""

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> Reads:
        return init_reads(num_layers, shapes.batch)

    def reads(self, state: Reads) -> Reads:
        return state

    def read_listed(self, layer, q, kv, spec, positions, selection, state) -> tuple[Array, Reads]:
        out, shapes = dispatch.attend(q, kv, spec, **positions._asdict(), selection=selection).out, kv.shapes(q)
        read = count_read(selection, spec, positions, shapes)
        return out, record_reads(state, layer, read, count_visible(spec, positions, shapes))


@dataclass(frozen=True, kw_only=True)
class Dense(Counted):
    """Dense attention: every query row reads every key that is visible to it."""

    layers_alike = True

    @property
    def name(self) -> str:
        return "dense"

    def attend(self, layer, q, kv, spec, positions, state):
        out = dispatch.attend(q, kv, spec, **positions._asdict()).out
        visible = count_visible(spec, positions, kv.shapes(q))
        return out, record_reads(state, layer, visible, visible)


STEP = 1024
"""A cross-over of at least so many tokens is rounded up to a multiple of it, so that it is one position in all pools,
whose chunks begin at multiples of 64 to 1,024 rows. A smaller one is rounded up to the chunks of its pool."""


def first_sparse(crossover_tokens: int, unit: int) -> int:
    """Return the position from which a prefill in chunks of whole `unit`s is sparse."""
    return round_up(crossover_tokens, unit if crossover_tokens < STEP else lcm(unit, STEP))


class DenseBefore:
    """Rule of position of a plan: dense before `first_sparse`; in decode, dense below `decode_crossover`, if that is
    set.
    """

    def at_position(self, position: int, unit: int) -> Policy:
        return Dense() if position < first_sparse(self.crossover_tokens, unit) else self

    def decode_at(self, position: int, unit: int) -> Policy:
        if self.decode_crossover is None:
            return self.at_position(position, unit)
        return Dense() if position < self.decode_crossover else self


@dataclass(frozen=True, kw_only=True)
class Window(Counted):
    """Window attention: every row reads the first `sinks` and the last `window` keys, rounded out to whole tiles.

    A query tile reads every key tile that holds a sink or a key in the window of any of its rows. A row therefore reads
    at most query_tile + 2 * tile keys more than requested, and never fewer. Keys keep their absolute rotary positions
    (StreamingLLM, arXiv 2309.17453, renumbers keys within its cache).
    """

    window: int = 1024  # newest keys kept, the row's own included
    sinks: int = 64  # oldest keys kept
    tile: int = 64  # key positions per tile
    query_tile: int = 32  # query positions that share a selection

    def __post_init__(self):
        if self.window < 1 or self.sinks < 0:
            raise ValueError(f"window={self.window} must be at least 1 and sinks={self.sinks} at least 0")
        AttentionSpec(tile=self.tile, query_tile=self.query_tile)

    @property
    def name(self) -> str:
        return "window"

    def select(self, positions: Positions, shapes: Shapes) -> Selection:
        """Return the tiles of the sinks and of the window, the same for every KV head."""
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

    def attend(self, layer, q, kv, spec, positions, state):
        spec = replace(spec, tile=self.tile, query_tile=self.query_tile)
        return self.read_listed(layer, q, kv, spec, positions, self.select(positions, kv.shapes(q)), state)


@dataclass(frozen=True, kw_only=True)
class Oracle(Counted):
    """Attention in which every layer scores all keys exactly, then attends only to the best tiles.

    This is the best that top-k selection of tiles can do. The oracle costs more than dense attention, because scoring
    reads every key; `reads` counts only the keys that it attends to.
    """

    tile: int = 16  # as in Kascade
    query_tile: int = 32
    local: int = 0
    sinks: int = 0
    fraction: float = 0.1
    minimum: int = 128
    pooled: bool = False  # whether all KV heads share one selection

    def __post_init__(self):
        check_budget(self.fraction, self.minimum, self.local, self.sinks)
        AttentionSpec(tile=self.tile, query_tile=self.query_tile)

    @property
    def name(self) -> str:
        return "oracle"

    def select(self, mass: Array, spec: AttentionSpec, positions: Positions) -> Selection:
        """Select the always-read tiles, and the heaviest other tiles that the budget allows."""
        always = {"local": self.local, "sinks": self.sinks, "pooled": self.pooled}
        budget = {"fraction": self.fraction, "minimum": self.minimum}
        return select_tiles(mass, spec, **budget, **always, **positions._asdict())

    def attend(self, layer, q, kv, spec, positions, state):
        spec = replace(spec, tile=self.tile, query_tile=self.query_tile)
        mass = dispatch.attend(q, kv, replace(spec, mass=True), **positions._asdict()).mass
        return self.read_listed(layer, q, kv, spec, positions, self.select(mass, spec, positions), state)
