"""The attention contract: what every kernel takes, returns and promises.

A query row at absolute position p sees key s if and only if

    s < kv_len   and   (not causal or s <= p)   and   (window is None or s > p - window).

Scores are z = softcap(scale * q.k), softcap(z) = c * tanh(z / c); out = softmax(z) v; lse = ln(sum(exp(z))).
A row that sees no key gives out = 0, lse = -inf and zero gradient. K and V at positions >= kv_len may hold anything,
even NaN.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

TILES = (1, 16, 32, 64, 128)
"""Allowed tile sizes, in keys. With tiles of 1, a call selects single keys, as the Kascade paper does. The only score
and sparse kernels that take tiles of 1 are those in `reference`, `xla` and `gpu.keys`."""

MAX_QUERY_TILE = 2**20
"""Maximum query positions per query tile; equal to the longest supported context."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static options of one attention call.

    Attributes:
        causal: whether keys after a query's position are hidden from that query.
        window: sliding window in tokens, which counts the query's own position; needs `causal`. None for no window.
        scale: factor on q.k; None means head_dim ** -0.5.
        softcap: c in c * tanh(z / c); None for no cap.
        tile: key positions per tile.
        query_tile: query positions that share one list of selected key tiles and one row of mass.
        mass: whether to also return each key tile's probability mass. A call has the role "sparse" if it passes a
            selection, "score" if `mass` is set, and "dense" otherwise.
        stripe: positions per stripe if keys are dealt over the mesh axis "context" (see `attention.context`); None if
            keys are in order of position. Ignored on a mesh without that axis.
    """

    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    tile: int = 128
    query_tile: int = 32
    mass: bool = False
    stripe: int | None = None

    def __post_init__(self):
        if self.tile not in TILES:
            raise ValueError(f"tile={self.tile} must be one of {TILES}")
        if not 1 <= self.query_tile <= MAX_QUERY_TILE:
            raise ValueError(f"query_tile={self.query_tile} must be from 1 to {MAX_QUERY_TILE:,}")
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window={self.window} must be at least 1 and needs causal=True, got causal={self.causal}")
        if self.stripe is not None and self.stripe < 1:
            raise ValueError(f"stripe={self.stripe} must be at least 1, or None")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be positive, or None for no cap")


class Selection(NamedTuple):
    """Key tiles that each query tile reads, as lists of tile ids (absolute key position // tile).

    The first `count` ids of a list must ascend strictly; kernels ignore the rest. If an id is repeated, a kernel may
    count the tile once or several times.
    """

    tiles: Int32[Array, "B K I C"]
    count: Int32[Array, "B K I"]


class KeyValues(NamedTuple):
    """Keys and values of one call, head-major, so that the keys of one tile and one head are contiguous in memory.

    Attributes:
        k, v: [B,K,S,H]; with `pages`, a pool of P pages [P,K,page,H] that all sequences share.
        pages: pool index of each sequence's J pages, in order of position; None if k and v are contiguous. S is then
            J * page. Entries for positions at or past kv_len may be any page of the pool, such as page 0.
        scales: bfloat16 scales of int8 keys ([:, :, 0]) and values ([:, :, 1]), one per position and KV head. The two
            share an array so that one copy fetches both. The key is k * scale and the value v * scale; multiplying the
            scores and the probabilities by the scales instead is mathematically equal. With `pages`, the shape is
            [P,K,2,page]. None if k and v have q's dtype.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    pages: Int32[Array, "B J"] | None = None
    scales: Float[Array, "B K 2 S"] | None = None

    @classmethod
    def of(cls, k_BSKH: Float[Array, "B S K H"], v_BSKH: Float[Array, "B S K H"]) -> "KeyValues":
        """Build the record from token-major arrays, the layout that `attention` takes."""
        return cls(jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2))

    @property
    def num_keys(self) -> int:
        """Allocated keys per sequence, S."""
        return self.k.shape[-2] * (1 if self.pages is None else self.pages.shape[-1])

    def shapes(self, q_BTNH: Float[Array, "B T N H"], selection: "Selection | None" = None) -> "Shapes":
        """Return the static sizes and dtype of a call with these queries."""
        sizes = _shapes(q_BTNH, self.num_keys, self.k.shape[1], selection)
        page = None if self.pages is None else self.k.shape[-2]
        return sizes._replace(page=page, scaled=self.scales is not None)


class AttentionOut(NamedTuple):
    """Result of one attention call.

    Attributes:
        out: weighted values, in q's dtype.
        lse: natural log of the sum of exp(z) over the keys that a row reads, float32; -inf for a row that sees no key.
        mass: softmax probability of each key tile, summed over its keys and over the rows of each query tile
            (query_tile positions x G query heads per KV head), float32; None unless spec.mass.
    """

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]
    mass: Float[Array, "B K I J"] | None = None


class Positions(NamedTuple):
    """Per sequence, the position of the first query row and the numbers of valid keys and query rows.

    Attributes:
        q_start: absolute position of the first query row. If negative and the call is causal, rows before position 0
            see no key.
        kv_len: number of valid keys.
        q_len: number of valid query rows. Rows from q_len on are padding: out = 0, lse = -inf, and they add no mass.
    """

    q_start: Int32[Array, "B"]
    kv_len: Int32[Array, "B"]
    q_len: Int32[Array, "B"]


class Shapes(NamedTuple):
    """Static sizes and dtype of one call: the argument of a kernel's `refusal` and `cost`.

    Attributes:
        batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim: B, T, S, N, K and H. S is the allocated length
            of the keys, including unused slots.
        capacity: C, the allocated length of each list of tile ids in the selection; None without a selection.
        dtype: dtype of the queries.
        page: positions per page; None if keys and values are contiguous.
        scaled: whether keys and values are int8 with scales.
    """

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int | None
    dtype: str
    page: int | None = None
    scaled: bool = False

    @property
    def paged(self) -> bool:
        """Whether keys and values are stored in pages."""
        return self.page is not None

    @property
    def num_pages(self) -> int:
        """Pages per sequence, J; 0 if keys and values are contiguous."""
        return 0 if self.page is None else self.num_keys // self.page

    @property
    def num_scores(self) -> int:
        """Entries of the call's score matrix over all sequences and heads: B * N * T * S."""
        return self.batch * self.num_heads * self.num_queries * self.num_keys


def call_shapes(q_BTNH: Array, k_BSKH: Array, selection: Selection | None = None) -> Shapes:
    """Return the static sizes and dtype of a call on token-major arrays, the layout that `attention` takes."""
    num_keys, num_kv_heads = k_BSKH.shape[1:3]
    return _shapes(q_BTNH, num_keys, num_kv_heads, selection)


def _shapes(q_BTNH: Array, num_keys: int, num_kv_heads: int, selection: Selection | None) -> Shapes:
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    capacity = None if selection is None else selection.tiles.shape[-1]
    return Shapes(batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim, capacity, str(q_BTNH.dtype))
