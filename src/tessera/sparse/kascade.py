"""Kascade (arXiv 2512.16391): a few anchor layers score all keys; the layers after an anchor read only its selection.

Anchor layers attend densely and, in the same pass, compute the probability mass of every key tile per query tile and KV
head; `select_tiles` selects the heaviest tiles. Reuse layers read these tiles of their own keys and values; `head_map`
maps each of their KV heads to a KV head of their source, the layer that selected the tiles.

There are three deviations from the paper. Selections consist of tiles instead of single keys (`tile=1` is the paper's
granularity). Anchors return their dense output, which the fused pass yields anyway. Layers in `own` select by
themselves with cheap scores (`estimate.py`), because on a real model, the heads that retrieve facts read keys that no
other layer selects.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tessera.attention import dispatch
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.parallel import traced_head_parts
from tessera.attention.selection import capacity_for, select_tiles
from tessera.core.shapes import ceil_div
from tessera.sparse.baselines import DenseBefore
from tessera.sparse.contract import Policy, Reads
from tessera.sparse.estimate import Estimate, estimate_mass
from tessera.sparse.plan import Choice, Plan
from tessera.sparse.reads import count_read, count_visible, init_reads, record_reads


class KascadeState(NamedTuple):
    """State passed from layer to layer. The source is the last layer that selected.

    `choice` is the source's selection; with `budgets`, its masses [B,K,I,J], from which each layer selects by its own.
    """

    choice: Selection | Array
    read: Array  # number of keys that the source's selection reads per KV head [B,K]; zeros with `budgets`
    reads: Reads  # key counts of the layers so far


@dataclass(frozen=True, kw_only=True)
class Kascade(DenseBefore, Choice, Policy):
    """Anchor layers score all keys, layers in `own` select by cheap scores, and all other layers reuse a selection."""

    @classmethod
    def from_plan(cls, plan: Plan) -> "Kascade":
        return cls(**plan.choice())

    @property
    def name(self) -> str:
        return "kascade"

    def roles(self) -> tuple[str, ...]:
        """Return each layer's role: "score" (anchor), "sparse" (reuse), "own", or "dense" (an anchor without reuse)."""
        num_layers = len(self.head_map)
        reused = {layer for layer in range(num_layers) if layer + 1 < num_layers and self._reuses(layer + 1)}
        return tuple(
            "sparse" if self._reuses(layer)
            else "own" if layer in self.own
            else "score" if layer in reused
            else "dense"
            for layer in range(num_layers)
        )  # fmt: skip

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> KascadeState:
        if num_layers != len(self.head_map):
            raise ValueError(f"num_layers={num_layers} must be {len(self.head_map)}, the number of layers in the plan")
        if shapes.num_kv_heads != len(self.head_map[0]):
            raise ValueError(f"num_kv_heads={shapes.num_kv_heads} must be {len(self.head_map[0])}, as in the plan")
        heads = (shapes.batch, shapes.num_kv_heads)
        tiles = (*heads, ceil_div(shapes.num_queries, self.query_tile))
        if self.budgets:
            choice = jnp.zeros((*tiles, ceil_div(shapes.num_keys, self.tile)), jnp.float32)
        else:
            size = self._capacity(self._spec(spec), shapes, self.fraction)
            choice = Selection(jnp.zeros((*tiles, size), jnp.int32), jnp.zeros(tiles, jnp.int32))
        return KascadeState(choice, jnp.zeros(heads, jnp.float32), init_reads(num_layers, shapes.batch))

    def attend(self, layer, q, kv, spec, positions, state):
        spec, roles = self._spec(spec), self.roles()
        branches = {"dense": self._dense, "score": self._score, "own": self._own, "sparse": self._sparse}
        if isinstance(layer, int):
            return branches[roles[layer]](layer, q, kv, spec, positions, state)
        used = tuple(role for role in branches if role in roles)
        table = jnp.asarray([used.index(role) for role in roles], jnp.int32)

        def run(role):
            return lambda q, kv, positions, state: branches[role](layer, q, kv, spec, positions, state)

        return jax.lax.switch(table[layer], [run(role) for role in used], q, kv, positions, state)

    def reads(self, state: KascadeState) -> Reads:
        return state.reads

    def map_heads(self, layer: int | Array, per_head: Any) -> Any:
        """Reorder the source's arrays [B,K,...] so that each head of this layer gets the source head that it uses."""
        if self.heads != "remap":
            return per_head
        head = jnp.asarray(self.head_map, jnp.int32)[layer]
        return jax.tree.map(lambda array: array[:, head], per_head)

    def select(
        self, layer: int | Array, mass: Array, spec: AttentionSpec, positions: Positions, shapes: Shapes
    ) -> Selection:
        """Select the always-read tiles, and the other tiles of largest mass [B,K,I,J] within the layer's budget."""
        fraction, largest = self._budget(layer)
        return select_tiles(
            mass,
            spec,
            fraction=fraction,
            minimum=self.minimum,
            local=self.local,
            sinks=self.sinks,
            capacity=self._capacity(spec, shapes, largest),
            pooled=self.heads == "pooled",
            **positions._asdict(),
        )

    def chosen(
        self, layer: int | Array, spec: AttentionSpec, positions: Positions, shapes: Shapes, state: KascadeState
    ) -> Selection:
        """Return the tiles that a layer reads; `state` is that after its source, or after its own choice."""
        choice = self.map_heads(layer, state.choice)
        return self.select(layer, choice, spec, positions, shapes) if self.budgets else choice

    def _reuses(self, layer: int) -> bool:
        return layer not in self.anchors and layer not in self.own

    def _spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, tile=self.tile, query_tile=self.query_tile)

    def _budget(self, layer: int | Array) -> tuple[float | Array, float]:
        """Return the layer's fraction (with `budgets`, one per KV head), and its maximum as a Python number."""
        if not self.budgets:
            return self.fraction, self.fraction
        if isinstance(layer, int):
            return jnp.asarray(self.budgets[layer], jnp.float32), max(self.budgets[layer])
        return jnp.asarray(self.budgets, jnp.float32)[layer], max(max(row) for row in self.budgets)

    def _capacity(self, spec: AttentionSpec, shapes: Shapes, fraction: float) -> int:
        always = {"minimum": self.minimum, "local": self.local, "sinks": self.sinks}
        return capacity_for(spec, shapes.num_keys, shapes.num_queries, fraction=fraction, **always)

    def _leave(self, layer, mass, spec: AttentionSpec, positions: Positions, shapes: Shapes, state: KascadeState):
        """Store this layer's choice for the layers that reuse it: with `budgets` the masses, else the selection."""
        if self.budgets:
            return state._replace(choice=mass)
        selection = self.select(layer, mass, spec, positions, shapes)
        return state._replace(choice=selection, read=count_read(selection, spec, positions, shapes))

    def _dense(self, layer, q, kv, spec: AttentionSpec, positions: Positions, state: KascadeState):
        out = dispatch.attend(q, kv, spec, **positions._asdict())
        visible = count_visible(spec, positions, kv.shapes(q))
        return out.out, state._replace(reads=record_reads(state.reads, layer, visible, visible))

    def _score(self, layer, q, kv, spec: AttentionSpec, positions: Positions, state: KascadeState):
        shapes = kv.shapes(q)
        out = dispatch.attend(q, kv, replace(spec, mass=True), **positions._asdict())
        state = self._leave(layer, out.mass, spec, positions, shapes, state)
        visible = count_visible(spec, positions, shapes)
        return out.out, state._replace(reads=record_reads(state.reads, layer, visible, visible))

    def _own(self, layer, q, kv, spec: AttentionSpec, positions: Positions, state: KascadeState):
        mass = self._scores(layer, q, kv, spec, positions)
        state = self._leave(layer, mass, spec, positions, kv.shapes(q), state)
        return self._sparse(layer, q, kv, spec, positions, state)

    def _scores(self, layer, q, kv: KeyValues, spec: AttentionSpec, positions: Positions) -> Array:
        """Estimate tile masses; heads with budget 0 or 1 get zeros if no layer reuses the choice, as they need none."""
        how = Estimate(keys=self.score_keys, rows=self.score_rows)
        reused = isinstance(layer, int) and layer + 1 < len(self.head_map) and self._reuses(layer + 1)
        # On a mesh, picking heads would move keys between devices; each device scores all of its own heads instead.
        if not self.budgets or reused or not isinstance(layer, int) or traced_head_parts() > 1:
            return estimate_mass(q, kv, spec, positions, how)
        heads = tuple(h for h, budget in enumerate(self.budgets[layer]) if 0 < budget < 1)
        shapes = kv.shapes(q)
        tiles = ceil_div(shapes.num_queries, spec.query_tile), ceil_div(shapes.num_keys, spec.tile)
        mass = jnp.zeros((shapes.batch, shapes.num_kv_heads, *tiles), jnp.float32)
        if not heads:
            return mass
        index = jnp.asarray(heads, jnp.int32)
        grouped = q.reshape(*q.shape[:2], shapes.num_kv_heads, -1, shapes.head_dim)[:, :, index]
        grouped = grouped.reshape(*q.shape[:2], -1, shapes.head_dim)
        return mass.at[:, index].set(estimate_mass(grouped, kv, spec, positions, how, heads))

    def _sparse(self, layer, q, kv, spec: AttentionSpec, positions: Positions, state: KascadeState):
        shapes = kv.shapes(q)
        selection = self.chosen(layer, spec, positions, shapes, state)
        read = count_read(selection, spec, positions, shapes) if self.budgets else self.map_heads(layer, state.read)
        out = dispatch.attend(q, kv, spec, **positions._asdict(), selection=selection)
        visible = count_visible(spec, positions, shapes)
        return out.out, state._replace(reads=record_reads(state.reads, layer, read, visible))
