"""Policies that attend densely and take notes: what calibration knows about a model comes from them.

Both stream: their state holds sums over one call's query tiles and the last ids of each layer, nothing of size T x S;
the caller adds calls up.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.dispatch import attention
from tessera.attention.selection import select_tiles
from tessera.shapes import ceil_div
from tessera.sparse.anchors import importance, similarity
from tessera.sparse.contract import Policy, visible_keys
from tessera.sparse.kascade import Kascade, KascadeState

NUM_KEYS = 64
"""Keys per head and query tile that two layers are compared by (the paper's k for anchor choice)."""


class SimilarityState(NamedTuple):
    """Notes of one call; a and b are layers, K' KV heads (one if pooled).

    Attributes:
        ids: [L,B,K',I,C] each layer's heaviest keys.
        total: [L,L,K',K'] sum over query tiles of sim(a, b) per head of a and head of b.
        least: [L,L,K',K'] its minimum over query tiles.
        num_tiles: query tiles that saw more keys than they could list.
        turned: [L] sum over tokens of 1 - cos of the residual stream around the attention block.
        num_tokens: tokens seen.
    """

    ids: Array
    total: Array
    least: Array
    num_tiles: Array
    turned: Array
    num_tokens: Array


@dataclass(frozen=True, kw_only=True)
class SimilarityRecorder(Policy):
    """Measures how well each layer would do with every earlier layer's keys, one key at a time (tile 1).

    Attributes:
        query_tile: query positions pooled into one ranking, after the softmax.
        pooled: pool over all KV heads too.
    """

    query_tile: int = 32
    pooled: bool = False

    @property
    def name(self) -> str:
        return "similarity recorder"

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> SimilarityState:
        heads = 1 if self.pooled else shapes.num_kv_heads
        tiles = ceil_div(shapes.num_queries, self.query_tile)
        pairs = (num_layers, num_layers, heads, heads)
        return SimilarityState(
            ids=jnp.zeros((num_layers, shapes.batch, heads, tiles, min(NUM_KEYS, shapes.num_keys)), jnp.int32),
            total=jnp.zeros(pairs, jnp.float32),
            least=jnp.ones(pairs, jnp.float32),
            num_tiles=jnp.zeros((), jnp.int32),
            turned=jnp.zeros(num_layers, jnp.float32),
            num_tokens=jnp.zeros((), jnp.int32),
        )

    def attend(self, layer, q, k, v, spec, positions, state):
        spec = replace(spec, tile=1, query_tile=self.query_tile, mass=True)
        out = attention(q, k, v, spec, **positions._asdict())
        mass = out.mass.sum(1, keepdims=True) if self.pooled else out.mass
        own = jax.lax.top_k(mass, state.ids.shape[-1])[1].astype(jnp.int32)
        ids = state.ids.at[layer].set(own)
        pairs = jax.vmap(similarity, in_axes=(0, 1, 0), out_axes=-1)(mass, ids, own)  # [a, head of a, of b, I, B]
        counts = self._counts(spec, positions, q.shape[1]).T
        earlier = jnp.arange(len(ids)) <= layer  # later layers have no ids yet
        total = jnp.where(counts, pairs, 0.0).sum((-2, -1))
        least = jnp.where(counts, pairs, 1.0).min((-2, -1))
        return out.out, state._replace(
            ids=ids,
            total=state.total.at[:, layer].set(jnp.where(earlier[:, None, None], total, 0.0)),
            least=state.least.at[:, layer].set(jnp.where(earlier[:, None, None], least, 0.0)),
            num_tiles=counts.sum(dtype=jnp.int32),
        )

    def observe(self, layer, x, y, positions, state):
        valid = jnp.arange(x.shape[1], dtype=jnp.int32) < positions.q_len[:, None]
        turned = jnp.where(valid, importance(x, y), 0.0).sum()
        return state._replace(turned=state.turned.at[layer].set(turned), num_tokens=valid.sum(dtype=jnp.int32))

    def _counts(self, spec: AttentionSpec, positions: Positions, num_queries: int) -> Array:
        """[B,I]: whether the query tile sees more keys than a set holds; with fewer, every set is as good."""
        tiles = ceil_div(num_queries, self.query_tile)
        seen = visible_keys(spec, positions, tiles * self.query_tile)
        return seen.reshape(-1, tiles, self.query_tile).max(-1) > NUM_KEYS


class RecallState(NamedTuple):
    """The plan's own state, and per layer the probability that its selection holds and that all keys hold."""

    kascade: KascadeState
    held: Array
    total: Array


@dataclass(frozen=True, kw_only=True)
class RecallRecorder(Policy):
    """Measures, on dense activations, how much of its attention each layer keeps under a Kascade plan."""

    kascade: Kascade

    @property
    def name(self) -> str:
        return "recall recorder"

    @property
    def query_tile(self) -> int:
        """The plan's, so that chunks are cut on it."""
        return self.kascade.query_tile

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> RecallState:
        zeros = jnp.zeros(num_layers, jnp.float32)
        return RecallState(self.kascade.init_state(num_layers, shapes, spec), zeros, zeros)

    def attend(self, layer, q, k, v, spec, positions, state):
        plan, where = self.kascade, positions._asdict()
        spec = replace(spec, tile=plan.tile, query_tile=plan.query_tile, mass=True)
        out = attention(q, k, v, spec, **where)
        old = state.kascade.selection
        budget = {"fraction": plan.fraction, "minimum": plan.minimum, "pooled": plan.heads == "pooled"}
        own = select_tiles(out.mass, spec, **budget, capacity=old.tiles.shape[-1], **where)
        is_anchor = jnp.asarray([a in plan.anchors for a in range(len(plan.head_map))])[layer]
        selection = Selection(*(jnp.where(is_anchor, new, kept) for new, kept in zip(own, old)))
        used = plan.map_heads(layer, selection)
        listed = jnp.arange(used.tiles.shape[-1], dtype=jnp.int32) < used.count[..., None]
        held = jnp.where(listed, jnp.take_along_axis(out.mass, used.tiles, axis=-1), 0.0).sum()
        total = out.mass.sum()
        return out.out, RecallState(
            state.kascade._replace(selection=selection),
            state.held.at[layer].set(jnp.where(is_anchor, total, held)),
            state.total.at[layer].set(total),
        )
