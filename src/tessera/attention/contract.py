"""The attention contract: what every kernel takes, returns and promises.

A query row at absolute position p sees key s if and only if

    s < kv_len   and   (not causal or s <= p)   and   (window is None or s > p - window).

Scores are z = softcap(scale * q.k), softcap(z) = c * tanh(z / c); out = softmax(z) v; lse = ln(sum(exp(z))).
A row that sees no key gives out = 0, lse = -inf and zero gradient. Keys at or past kv_len may hold anything, NaN too.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

TILES = (1, 16, 32, 64, 128)
"""Key tile sizes. 1 is the paper's own granularity: reference and portable path only."""

MAX_QUERY_TILE = 2**20
"""Rows of the longest context; chunks of a prompt are padded to whole query tiles."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Everything static about one attention call.

    Attributes:
        causal: a query sees no later key.
        window: sliding window in tokens, the query's own position included; needs `causal`.
        scale: factor on q.k; None is head_dim ** -0.5.
        softcap: c in c * tanh(z / c); None for no cap.
        tile: key positions per tile.
        query_tile: query positions that share one selection, and one row of mass.
        mass: also return each key tile's probability mass. A call with it has the role "score", one with a
            selection the role "sparse", any other the role "dense".
    """

    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    tile: int = 128
    query_tile: int = 32
    mass: bool = False

    def __post_init__(self):
        if self.tile not in TILES:
            raise ValueError(f"tile={self.tile} must be one of {TILES}")
        if not 1 <= self.query_tile <= MAX_QUERY_TILE:
            raise ValueError(f"query_tile={self.query_tile} must be from 1 to {MAX_QUERY_TILE:,}")
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window={self.window} must be at least 1 and needs causal=True, got causal={self.causal}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be positive, or None for no cap")


class Selection(NamedTuple):
    """Key tiles each query tile reads: ids (absolute position // tile), strictly ascending; ids past count are ignored.

    Repeated ids are undefined behaviour: a kernel may count the tile once or once per repeat.
    """

    tiles: Int32[Array, "B K I C"]
    count: Int32[Array, "B K I"]


class KeyValues(NamedTuple):
    """Keys and values of one call, head-major: a tile of one head is one contiguous copy.

    Attributes:
        k, v: [B,K,S,H], or with pages the pool [P,K,page,H].
        pages: physical page of each page of a sequence; None: contiguous.
        scales: bfloat16 scales of int8 keys ([:, :, 0]) and values ([:, :, 1]), one per key and KV head: the key is
            k * scale, the value v * scale; scores and probabilities may be multiplied instead, an exact identity. One
            copy brings both scales of a tile. None: keys and values are stored in q's dtype.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    pages: Int32[Array, "B J"] | None = None
    scales: Float[Array, "B K 2 S"] | None = None

    @classmethod
    def of(cls, k_BSKH: Float[Array, "B S K H"], v_BSKH: Float[Array, "B S K H"]) -> "KeyValues":
        """Build the record from token-major arrays, as users pass them."""
        return cls(jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2))

    def shapes(self, q_BTNH: Float[Array, "B T N H"], selection: "Selection | None" = None) -> "Shapes":
        """Return the static sizes and dtype of a call with these queries."""
        num_kv_heads, num_keys = self.k.shape[1:3]
        if self.pages is not None:
            num_keys *= self.pages.shape[1]
        sizes = _shapes(q_BTNH, num_keys, num_kv_heads, selection)
        return sizes._replace(paged=self.pages is not None, scaled=self.scales is not None)


class AttentionOut(NamedTuple):
    """Result of one attention call.

    Attributes:
        out: weighted values, in q's dtype.
        lse: natural log of the sum of exponentials, float32, -inf for a row that sees no key.
        mass: probability each key tile received, summed over the query tile's rows (tokens x G heads), float32;
            None unless spec.mass.
    """

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]
    mass: Float[Array, "B K I J"] | None = None


class Positions(NamedTuple):
    """Positions and lengths of one call's rows and keys, per sequence.

    Attributes:
        q_start: absolute position of the first query row (may be negative: such rows see no key when causal).
        kv_len: valid keys.
        q_len: valid query rows; rows at or past it are padding: out 0, lse -inf, no mass.
    """

    q_start: Int32[Array, "B"]
    kv_len: Int32[Array, "B"]
    q_len: Int32[Array, "B"]


class Shapes(NamedTuple):
    """Static sizes and dtype of one call, as a kernel's `refusal` and `cost` take them.

    Attributes:
        batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim: B, T, S, N, K and H; S counts free places too.
        capacity: places of a selection's lists per query tile, C; None without a selection. No size of the cache.
        dtype: of the queries.
        paged: whether keys and values lie in pages.
        scaled: whether they are int8 with scales.
    """

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int | None
    dtype: str
    paged: bool = False
    scaled: bool = False

    @property
    def num_scores(self) -> int:
        """Entries of the whole score matrix: B N T S."""
        return self.batch * self.num_heads * self.num_queries * self.num_keys


def call_shapes(q_BTNH: Array, k_BSKH: Array, selection: Selection | None = None) -> Shapes:
    """Return the static sizes and dtype of a call on token-major arrays, as users pass them."""
    num_keys, num_kv_heads = k_BSKH.shape[1:3]
    return _shapes(q_BTNH, num_keys, num_kv_heads, selection)


def _shapes(q_BTNH: Array, num_keys: int, num_kv_heads: int, selection: Selection | None) -> Shapes:
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    capacity = None if selection is None else selection.tiles.shape[-1]
    return Shapes(batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim, capacity, str(q_BTNH.dtype))
