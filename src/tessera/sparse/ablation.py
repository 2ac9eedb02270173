"""Policies that calibration asks "what if": some heads read next to nothing, or each head has the budget it is handed.

Their arrays may be traced, so one compiled program serves every layer and head. They are made inside the jitted call
and never hashed.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from tessera.attention.contract import AttentionSpec, Positions, Shapes
from tessera.attention.dispatch import attention
from tessera.attention.selection import capacity_for, select_tiles, tile_budget
from tessera.shapes import ceil_div
from tessera.sparse.baselines import Counted
from tessera.sparse.contract import Policy
from tessera.sparse.estimate import Estimate, estimate_mass
from tessera.sparse.reads import count_read, count_visible, record_reads, shapes_of

GRID = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Budgets a head may get, as fractions of the visible keys; a finer grid changed nothing that text could show."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """What is listed beyond the budget, and how tiles are scored: the fields of a plan that calibration fixes first."""

    tile: int = 16
    query_tile: int = 32
    local: int = 64
    sinks: int = 16
    minimum: int = 0
    score_keys: int = 1
    score_rows: int = 4

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        """The call's spec with these tiles."""
        return replace(spec, tile=self.tile, query_tile=self.query_tile)

    def always(self) -> dict[str, int]:
        """Arguments of `select_tiles`."""
        return {"minimum": self.minimum, "local": self.local, "sinks": self.sinks}


@dataclass(frozen=True, kw_only=True)
class LocalHeads(Counted):
    """Dense, but for some KV heads, which read only what is always listed.

    Attributes:
        tiling: what is always listed.
        local_LK: heads that read no far key.
    """

    tiling: Tiling
    local_LK: Bool[Array, "L K"]

    @property
    def query_tile(self) -> int:
        return self.tiling.query_tile

    def attend(self, layer, q, k, v, spec, positions, state):
        spec, shapes = self.tiling.spec(spec), shapes_of(q, k)
        heads = (q.shape[0], k.shape[2], ceil_div(q.shape[1], spec.query_tile), ceil_div(k.shape[1], spec.tile))
        near = select_tiles(jnp.zeros(heads), spec, fraction=0.0, **self.tiling.always(), **positions._asdict())
        dense = attention(q, k, v, spec, **positions._asdict()).out
        local = attention(q, k, v, spec, **positions._asdict(), selection=near).out
        chosen = jnp.repeat(self.local_LK[layer], q.shape[2] // k.shape[2])
        visible = count_visible(spec, positions, shapes)
        read = jnp.where(self.local_LK[layer], count_read(near, spec, positions, shapes), visible)
        return jnp.where(chosen[:, None], local, dense), record_reads(state, layer, read, visible)


@dataclass(frozen=True, kw_only=True)
class Budgeted(Counted):
    """Every layer chooses its own tiles by cheap scores, each KV head within its budget (0 to 1 of what is visible)."""

    tiling: Tiling
    budgets_LK: Float[Array, "L K"]

    @property
    def query_tile(self) -> int:
        return self.tiling.query_tile

    def attend(self, layer, q, k, v, spec, positions, state):
        spec, shapes = self.tiling.spec(spec), shapes_of(q, k)
        mass = estimate_mass(q, k, spec, positions, Estimate(keys=self.tiling.score_keys, rows=self.tiling.score_rows))
        always = self.tiling.always()
        size = capacity_for(spec, shapes.num_keys, shapes.num_queries, fraction=1.0, **always)
        selection = select_tiles(
            mass, spec, fraction=self.budgets_LK[layer], capacity=size, **always, **positions._asdict()
        )
        out = attention(q, k, v, spec, **positions._asdict(), selection=selection).out
        read = count_read(selection, spec, positions, shapes)
        return out, record_reads(state, layer, read, count_visible(spec, positions, shapes))


class Missed(NamedTuple):
    """Notes of one call.

    Attributes:
        missing: [L,K,F] probability on the tiles that the best choice within each budget of GRID leaves out, summed
            over rows and query heads.
        total: [L,K] probability in all.
    """

    missing: Array
    total: Array


@dataclass(frozen=True, kw_only=True)
class MassRecorder(Policy):
    """Dense attention that notes how much probability each head would miss at each budget of GRID."""

    tiling: Tiling

    @property
    def name(self) -> str:
        return "mass recorder"

    @property
    def query_tile(self) -> int:
        return self.tiling.query_tile

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> Missed:
        heads = (num_layers, shapes.num_kv_heads)
        return Missed(jnp.zeros((*heads, len(GRID))), jnp.zeros(heads))

    def attend(self, layer, q, k, v, spec, positions: Positions, state):
        spec = self.tiling.spec(spec)
        found = attention(q, k, v, replace(spec, mass=True), **positions._asdict())
        far, budgets = _far_mass(found.mass, spec, positions, self.tiling)
        heaviest = jnp.cumsum(-jnp.sort(-far, axis=-1), axis=-1)
        heaviest = jnp.pad(heaviest, ((0, 0), (0, 0), (0, 0), (1, 0)))
        held = jnp.take_along_axis(heaviest, jnp.minimum(budgets, far.shape[-1]), axis=-1)
        missing = (heaviest[..., -1:] - held).sum((0, 2))
        return found.out, Missed(
            state.missing.at[layer].set(missing), state.total.at[layer].set(found.mass.sum((0, 2, 3)))
        )


def _far_mass(mass: Array, spec: AttentionSpec, positions: Positions, tiling: Tiling) -> tuple[Array, Array]:
    """Masses of far tiles, others 0, [B,K,I,J], and how many far tiles each budget of GRID takes, [B,K,I,F]."""
    near = select_tiles(mass, spec, fraction=0.0, **tiling.always(), **positions._asdict())
    ids = jnp.where(jnp.arange(near.tiles.shape[-1]) < near.count[..., None], near.tiles, mass.shape[-1])
    batch, heads, rows = jnp.indices(ids.shape[:3])
    far = mass.at[batch[..., None], heads[..., None], rows[..., None], ids].set(0.0, mode="drop")
    counts = [
        tile_budget(spec, mass.shape[2], *positions, fraction=fraction, **tiling.always()).budget for fraction in GRID
    ]
    budgets = jnp.stack([jnp.broadcast_to(count, near.count.shape) - near.count for count in counts], axis=-1)
    return far, budgets
