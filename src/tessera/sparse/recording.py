"""Policies that record a model's attention for calibration and evaluation.

The final state of each policy holds sums or minima over one call's query tiles and, in `SimilarityRecorder`, each
layer's best keys, but nothing of size T x S. The caller combines the states of several calls.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tessera.attention import dispatch
from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.selection import select_tiles
from tessera.attention.visibility import row_ranges
from tessera.core.shapes import ceil_div
from tessera.sparse.anchors import importance, similarity
from tessera.sparse.baselines import Dense, Oracle, Window
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade

NUM_KEYS = 64
"""Number of keys that each head chooses per query tile when two layers are compared; the paper's k for anchors.

Always-read keys are not among these keys. The paper's implementation counts the query tile's own 32 keys among the 64;
with query tiles of 64 or 128 rows, no other keys would be left to compare.
"""


class SimilarityState(NamedTuple):
    """Record of one call. a and b are layers; K' is the number of KV heads, 1 if pooled."""

    ids: Array  # [L,B,K',I,C] the C keys with the most mass in each layer
    least: Array  # [L,L,K',K'] minimum over query tiles of sim(a, b) per head of a and head of b
    num_tiles: Array  # number of query tiles with more than NUM_KEYS keys to choose from
    turned: Array
    num_tokens: Array  # number of tokens summed over in `turned`


@dataclass(frozen=True, kw_only=True)
class SimilarityRecorder(Policy):
    """Measures how well each layer would do with the keys that each earlier layer chose, with tiles of one key.

    Every layer reads the query tile's own keys, the `local` keys before them and the first `sinks` keys, whatever it
    chooses. The ranking therefore leaves these keys out, and their mass counts as found.
    """

    query_tile: int = 32  # query positions pooled into one ranking, after the softmax
    pooled: bool = False  # whether to pool over all KV heads, too
    local: int = 0  # keys before the query tile's own that are always read
    sinks: int = 0  # first keys of the sequence that are always read

    def __post_init__(self):
        if self.local < 0 or self.sinks < 0:
            raise ValueError(f"local={self.local} and sinks={self.sinks} must be at least 0 keys")
        AttentionSpec(query_tile=self.query_tile)

    @property
    def name(self) -> str:
        return "similarity recorder"

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> SimilarityState:
        heads = 1 if self.pooled else shapes.num_kv_heads
        tiles = ceil_div(shapes.num_queries, self.query_tile)
        pairs = (num_layers, num_layers, heads, heads)
        return SimilarityState(
            ids=jnp.zeros((num_layers, shapes.batch, heads, tiles, min(NUM_KEYS, shapes.num_keys)), jnp.int32),
            least=jnp.ones(pairs, jnp.float32),
            num_tiles=jnp.zeros((), jnp.int32),
            turned=jnp.zeros(num_layers, jnp.float32),
            num_tokens=jnp.zeros((), jnp.int32),
        )

    def attend(self, layer, q, kv, spec, positions, state):
        spec = replace(spec, tile=1, query_tile=self.query_tile, mass=True)
        out = dispatch.attend(q, kv, spec, **positions._asdict())
        mass = out.mass.sum(1, keepdims=True) if self.pooled else out.mass
        first, end = self._choice(spec, positions, mass.shape[2])
        id_S = jnp.arange(mass.shape[-1], dtype=jnp.int32)
        free = ((id_S >= first[..., None]) & (id_S < end[..., None]))[:, None]
        always = jnp.where(free, 0.0, mass).sum(-1)
        own = jax.lax.top_k(jnp.where(free, mass, -1.0), state.ids.shape[-1])[1].astype(jnp.int32)
        ids = state.ids.at[layer].set(own)
        compare = jax.vmap(similarity, in_axes=(0, 1, 0, 0), out_axes=-1)
        pairs = compare(jnp.where(free, mass, 0.0), ids, own, always)  # [a, head of a, head of b, I, B]
        counts = (end - first > NUM_KEYS).T  # with fewer keys, every choice is equally good
        earlier = jnp.arange(len(ids)) <= layer  # later layers have no ids yet
        least = jnp.where(counts, pairs, 1.0).min((-2, -1))
        return out.out, state._replace(
            ids=ids,
            least=state.least.at[:, layer].set(jnp.where(earlier[:, None, None], least, 0.0)),
            num_tiles=counts.sum(dtype=jnp.int32),
        )

    def observe(self, layer, x, y, positions, state):
        valid = jnp.arange(x.shape[1], dtype=jnp.int32) < positions.q_len[:, None]
        turned = jnp.where(valid, importance(x, y), 0.0).sum()
        return state._replace(turned=state.turned.at[layer].set(turned), num_tokens=valid.sum(dtype=jnp.int32))

    def _choice(self, spec: AttentionSpec, positions: Positions, num_tiles: int) -> tuple[Array, Array]:
        """Return the first and the end (exclusive) [B,I] of the keys that each query tile chooses from."""
        row = jnp.arange(num_tiles, dtype=jnp.int32) * self.query_tile
        bounds = row_ranges(spec, positions, num_tiles * self.query_tile)
        seen, newest = (bound.reshape(-1, num_tiles, self.query_tile)[..., 0] for bound in bounds)
        end = positions.q_start[:, None] + row - self.local
        return jnp.maximum(seen, self.sinks), jnp.where(newest > seen, end, 0)


class RecallState(NamedTuple):
    policy: Any  # the policy's own state
    held: Array  # [L,K] probability on the keys that the layer's KV head may read, summed over rows and query heads
    total: Array  # [L,K] the same over all keys that are visible


@dataclass(frozen=True, kw_only=True)
class RecallRecorder(Policy):
    """Measures how much of dense attention's probability lies on the keys that a policy reads, per layer and KV head.

    The probabilities are computed from each layer's own q and k. If a layer reads every key by definition, as Kascade's
    anchors and all layers of Dense do, `held` equals `total`. With `dense`, layers return the output of dense
    attention, so that each is judged on the inputs of a dense run; else on those of the policy's run.
    """

    policy: Policy  # a `Kascade`, `Window`, `Oracle` or `Dense`
    dense: bool = False

    @property
    def name(self) -> str:
        return "recall recorder"

    @property
    def query_tile(self) -> int:
        return self.policy.query_tile

    def sparse_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers that choose which keys to read; all other layers read every key by definition."""
        match self.policy:
            case Kascade(anchors=anchors):
                return tuple(layer for layer in range(num_layers) if layer not in anchors)
            case Dense():
                return ()
        return tuple(range(num_layers))

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> RecallState:
        zeros = jnp.zeros((num_layers, shapes.num_kv_heads), jnp.float32)
        return RecallState(self.policy.init_state(num_layers, shapes, spec), zeros, zeros)

    def attend(self, layer, q, kv, spec, positions, state):
        policy = self.policy
        tiled = spec
        if isinstance(policy, Kascade | Oracle | Window):
            tiled = replace(spec, tile=policy.tile, query_tile=policy.query_tile)
        whole = dispatch.attend(q, kv, replace(tiled, mass=True), **positions._asdict())
        out, inner = self.policy.attend(layer, q, kv, spec, positions, state.policy)
        out = whole.out if self.dense else out
        listed = self._listed(layer, whole.mass, tiled, positions, kv.shapes(q), inner)
        valid = jnp.arange(listed.tiles.shape[-1], dtype=jnp.int32) < listed.count[..., None]
        held = jnp.where(valid, jnp.take_along_axis(whole.mass, listed.tiles, axis=-1), 0.0).sum((0, 2, 3))
        total = whole.mass.sum((0, 2, 3))
        chooses = jnp.isin(layer, jnp.asarray(self.sparse_layers(len(state.total)), jnp.int32))
        held = jnp.where(chooses, held, total)
        return out, RecallState(inner, state.held.at[layer].set(held), state.total.at[layer].set(total))

    def _listed(
        self, layer: int | Array, mass: Array, spec: AttentionSpec, positions: Positions, shapes: Shapes, state: Any
    ) -> Selection:
        """Return the tiles that the layer reads if it is sparse, given the policy's state after the layer."""
        policy, where = self.policy, positions._asdict()
        match policy:
            case Kascade():
                return policy.chosen(layer, spec, positions, shapes, state)
            case Oracle():
                return policy.select(mass, spec, positions)
            case Window():
                return policy.select(positions, shapes)
            case Dense():
                return select_tiles(mass, spec, fraction=1.0, **where)
        raise TypeError(f"recall cannot be recorded for {policy.name!r}: use a Kascade, Window, Oracle or Dense policy")
