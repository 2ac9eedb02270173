"""Policies for calibration's experiments: some heads read almost nothing, or each head gets a given budget.

The arrays in these policies may be traced, so one compiled program serves every layer and head. The policies are
therefore built inside the jitted call and never hashed.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from tessera.attention import dispatch
from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.selection import capacity_for, select_tiles, tile_budget
from tessera.core.shapes import ceil_div
from tessera.sparse.baselines import Counted
from tessera.sparse.contract import Policy
from tessera.sparse.estimate import Estimate, estimate_mass
from tessera.sparse.reads import count_read, count_visible, record_reads

GRID = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Budgets that a head may get, as fractions of the visible keys. A finer grid made no measurable difference on text."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The fields of a plan that calibration fixes first: tile sizes, always-read keys, and how tiles are scored."""

    tile: int = 16
    query_tile: int = 32
    local: int = 64
    sinks: int = 16
    minimum: int = 0
    score_keys: int = 1
    score_rows: int = 4

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, tile=self.tile, query_tile=self.query_tile)

    def always(self) -> dict[str, int]:
        return {"minimum": self.minimum, "local": self.local, "sinks": self.sinks}


@dataclass(frozen=True, kw_only=True)
class LocalHeads(Counted):
    """Dense attention, except that KV heads in `local_LK` read only the query tile's own and the always-read tiles."""

    tiling: Tiling
    local_LK: Bool[Array, "L K"]

    @property
    def query_tile(self) -> int:
        return self.tiling.query_tile

    def attend(self, layer, q, kv, spec, positions, state):
        spec, shapes = self.tiling.spec(spec), kv.shapes(q)
        tiles = ceil_div(shapes.num_queries, spec.query_tile), ceil_div(shapes.num_keys, spec.tile)
        heads = (shapes.batch, shapes.num_kv_heads, *tiles)
        near = select_tiles(jnp.zeros(heads), spec, fraction=0.0, **self.tiling.always(), **positions._asdict())
        dense = dispatch.attend(q, kv, spec, **positions._asdict()).out
        local = dispatch.attend(q, kv, spec, **positions._asdict(), selection=near).out
        chosen = jnp.repeat(self.local_LK[layer], shapes.num_heads // shapes.num_kv_heads)
        visible = count_visible(spec, positions, shapes)
        read = jnp.where(self.local_LK[layer], count_read(near, spec, positions, shapes), visible)
        return jnp.where(chosen[:, None], local, dense), record_reads(state, layer, read, visible)


@dataclass(frozen=True, kw_only=True)
class Budgeted(Counted):
    """Every layer selects tiles by cheap scores (`estimate.py`), within a budget per KV head, as in `Plan`."""

    tiling: Tiling  # tile sizes, always-read keys, and how tiles are scored
    budgets_LK: Float[Array, "L K"]

    @property
    def query_tile(self) -> int:
        return self.tiling.query_tile

    def attend(self, layer, q, kv, spec, positions, state):
        spec, shapes = self.tiling.spec(spec), kv.shapes(q)
        how = Estimate(keys=self.tiling.score_keys, rows=self.tiling.score_rows)
        mass = estimate_mass(q, kv, spec, positions, how)
        always = self.tiling.always()
        size = capacity_for(spec, shapes.num_keys, shapes.num_queries, fraction=1.0, **always)
        selection = select_tiles(
            mass, spec, fraction=self.budgets_LK[layer], capacity=size, **always, **positions._asdict()
        )
        return self.read_listed(layer, q, kv, spec, positions, selection, state)


@dataclass(frozen=True, kw_only=True)
class MassRecorder(Policy):
    """Dense attention whose final state holds every layer's tile masses [L,B,K,I,J].

    The caller sorts the masses on the host, because XLA on CPU takes seconds to compile each layer's sort.
    """

    tiling: Tiling

    @property
    def name(self) -> str:
        return "mass recorder"

    @property
    def query_tile(self) -> int:
        return self.tiling.query_tile

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> Array:
        tiles = ceil_div(shapes.num_queries, self.query_tile), ceil_div(shapes.num_keys, self.tiling.tile)
        return jnp.zeros((num_layers, shapes.batch, shapes.num_kv_heads, *tiles), jnp.float32)

    def attend(self, layer, q, kv, spec, positions: Positions, state):
        found = dispatch.attend(q, kv, replace(self.tiling.spec(spec), mass=True), **positions._asdict())
        return found.out, state.at[layer].set(found.mass)


def missed_mass(mass_LBKIJ: np.ndarray, spec: AttentionSpec, positions: Positions, tiling: Tiling) -> np.ndarray:
    """Return the probability [L,K,F] that attention would miss with each of the F budgets in GRID."""
    shape = mass_LBKIJ.shape[1:]
    (tiles, count), budgets = jax.device_get(_near_and_budgets(positions, shape=shape, spec=spec, tiling=tiling))
    far = np.array(mass_LBKIJ, np.float64)
    for index in np.ndindex(*count.shape):
        far[(slice(None), *index, tiles[index][: count[index]])] = 0.0
    held = np.cumsum(-np.sort(-far, axis=-1), axis=-1)
    held = np.pad(held, ((0, 0),) * 4 + ((1, 0),))
    missing = []
    for budget in budgets:
        number = np.minimum(np.broadcast_to(budget, count.shape) - count, shape[-1])
        taken = np.take_along_axis(held, np.broadcast_to(number, held.shape[:4])[..., None], axis=-1)[..., 0]
        missing.append((held[..., -1] - taken).sum((1, 3)))
    return np.stack(missing, axis=-1)


@partial(jax.jit, static_argnames=("shape", "spec", "tiling"))
def _near_and_budgets(
    positions: Positions, *, shape: tuple[int, ...], spec: AttentionSpec, tiling: Tiling
) -> tuple[Selection, list[Array]]:
    """Return the always-read tiles, and the number of tiles within each budget in GRID.

    Jitted as a whole, because its operations would take longer to compile one by one.
    """
    spec, always = tiling.spec(spec), tiling.always()
    near = select_tiles(jnp.zeros(shape), spec, fraction=0.0, **always, **positions._asdict())
    return near, [tile_budget(spec, shape[2], *positions, fraction=f, **always).budget for f in GRID]
