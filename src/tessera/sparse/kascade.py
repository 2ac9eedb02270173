"""Kascade (arXiv 2512.16391): a few anchor layers score all keys; the layers after each read only what it found.

Anchor layers attend densely and, in the same pass, learn the probability mass of every key tile per query tile and KV
head; `select_tiles` keeps the best. Reuse layers read those tiles of their own keys and values, through a table that
maps each of their KV heads to one of the anchor's. Deviations from the paper: tiles instead of single keys (`tile=1` is
the paper's granularity), and anchors return their dense output, which the fused pass yields anyway.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.dispatch import attention
from tessera.attention.selection import capacity_for, select_tiles
from tessera.shapes import ceil_div
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy, Reads
from tessera.sparse.plan import HEADS, Plan, check_anchors, check_budget, check_head_map
from tessera.sparse.reads import count_read, count_visible, init_reads, record_reads, shapes_of


class KascadeState(NamedTuple):
    """What passes from layer to layer: the current anchor's selection and what it reads per KV head [B,K]."""

    selection: Selection
    read: Array
    reads: Reads


@dataclass(frozen=True, kw_only=True)
class Kascade(Policy):
    """Anchors score, the layers between reuse. Attributes as in `Plan`."""

    anchors: tuple[int, ...]
    head_map: tuple[tuple[int, ...], ...]
    heads: str = "remap"
    tile: int = 64
    query_tile: int = 32
    fraction: float = 0.1
    minimum: int = 128
    crossover_tokens: int = 0

    def __post_init__(self):
        check_anchors(self.anchors, len(self.head_map))
        check_head_map(self.head_map, len(self.head_map), len(self.head_map[0]))
        check_budget(self.fraction, self.minimum)
        AttentionSpec(tile=self.tile, query_tile=self.query_tile)
        if self.heads not in HEADS:
            raise ValueError(f"heads={self.heads!r} must be one of {HEADS}")

    @classmethod
    def from_plan(cls, plan: Plan) -> "Kascade":
        """The policy a plan describes."""
        return cls(**{f.name: getattr(plan, f.name) for f in fields(cls)})

    @property
    def name(self) -> str:
        return "kascade"

    def at_length(self, num_tokens: int) -> Policy:
        """Dense below the measured cross-over, else itself."""
        return Dense() if num_tokens < self.crossover_tokens else self

    def roles(self) -> tuple[str, ...]:
        """Per layer: "score" (anchor), "sparse" (reuse), or "dense" (an anchor that no layer reuses)."""
        return tuple(
            "sparse" if layer not in self.anchors
            else "score" if layer + 1 < len(self.head_map) and layer + 1 not in self.anchors
            else "dense"
            for layer in range(len(self.head_map))
        )  # fmt: skip

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> KascadeState:
        if num_layers != len(self.head_map):
            raise ValueError(f"num_layers={num_layers} must be {len(self.head_map)}, the number the plan was made for")
        if shapes.num_kv_heads != len(self.head_map[0]):
            raise ValueError(f"num_kv_heads={shapes.num_kv_heads} must be {len(self.head_map[0])}, as in the plan")
        size = self._capacity(self._spec(spec), shapes)
        heads = (shapes.batch, shapes.num_kv_heads)
        tiles = (*heads, ceil_div(shapes.num_queries, self.query_tile))
        empty = Selection(jnp.zeros((*tiles, size), jnp.int32), jnp.zeros(tiles, jnp.int32))
        return KascadeState(empty, jnp.zeros(heads, jnp.float32), init_reads(num_layers, shapes.batch))

    def attend(self, layer, q, k, v, spec, positions, state):
        spec, roles = self._spec(spec), self.roles()
        branches = {"dense": self._dense, "score": self._score, "sparse": self._sparse}
        if isinstance(layer, int):
            return branches[roles[layer]](layer, q, k, v, spec, positions, state)
        used = tuple(role for role in branches if role in roles)
        table = jnp.asarray([used.index(role) for role in roles], jnp.int32)

        def run(role):
            return lambda q, k, v, positions, state: branches[role](layer, q, k, v, spec, positions, state)

        return jax.lax.switch(table[layer], [run(role) for role in used], q, k, v, positions, state)

    def reads(self, state: KascadeState) -> Reads:
        return state.reads

    def map_heads(self, layer: int | Array, per_head: Any) -> Any:
        """Reorder arrays [B,K,...] of the anchor to what each of this layer's heads uses."""
        if self.heads != "remap":
            return per_head
        head = jnp.asarray(self.head_map, jnp.int32)[layer]
        return jax.tree.map(lambda array: array[:, head], per_head)

    def _spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, tile=self.tile, query_tile=self.query_tile)

    def _capacity(self, spec: AttentionSpec, shapes: Shapes) -> int:
        budget = {"fraction": self.fraction, "minimum": self.minimum}
        return capacity_for(spec, shapes.num_keys, shapes.num_queries, **budget)

    def _dense(self, layer, q, k, v, spec: AttentionSpec, positions: Positions, state: KascadeState):
        out = attention(q, k, v, spec, **positions._asdict())
        visible = count_visible(spec, positions, shapes_of(q, k))
        return out.out, state._replace(reads=record_reads(state.reads, layer, visible, visible))

    def _score(self, layer, q, k, v, spec: AttentionSpec, positions: Positions, state: KascadeState):
        where, shapes = positions._asdict(), shapes_of(q, k)
        out = attention(q, k, v, replace(spec, mass=True), **where)
        selection = select_tiles(
            out.mass,
            spec,
            fraction=self.fraction,
            minimum=self.minimum,
            capacity=self._capacity(spec, shapes),
            pooled=self.heads == "pooled",
            **where,
        )
        visible = count_visible(spec, positions, shapes)
        read = count_read(selection, spec, positions, shapes)
        return out.out, KascadeState(selection, read, record_reads(state.reads, layer, visible, visible))

    def _sparse(self, layer, q, k, v, spec: AttentionSpec, positions: Positions, state: KascadeState):
        selection, read = self.map_heads(layer, (state.selection, state.read))
        out = attention(q, k, v, spec, **positions._asdict(), selection=selection)
        visible = count_visible(spec, positions, shapes_of(q, k))
        return out.out, state._replace(reads=record_reads(state.reads, layer, read, visible))
