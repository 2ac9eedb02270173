"""Cheap scores of key tiles, for layers that neither run dense nor reuse another layer's choice.

Keys are averaged in blocks of `keys`. Only every `rows`-th query row is scored, counted back from the query tile's last
valid row, because a prompt's last row decides the first token of its answer. A tile's mass is thus estimated from
1 / (keys * rows) of the scores of a dense pass, and no value is read. For query tile i and key tile j,

    mass[i,j] ~ sum over sampled rows r of tile i, blocks b of tile j:  exp(z[r,b] - lse[r]),
    z[r,b] = softcap(scale * q[r] . mean of block b's keys),   lse[r] = ln(sum over whole visible blocks exp(z[r,b])).

With keys = 1 the scores are exact. With rows = 1 too, the mass is exact, except in blocks of which a row sees only a
part. These blocks do not matter: a selection ranks only the tiles that are not always read, and every row of a query
tile sees every key of such a tile.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from tessera.attention import context
from tessera.attention.contract import AttentionSpec, KeyValues, Positions
from tessera.core.shapes import ceil_div, round_up

BLOCK_SCORES = 512
"""Blocks of keys scored per step. The scores of 96 rows then just fit in a second-level cache."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Parameters of the cheap scores.

    Attributes:
        keys: consecutive keys that share one score; divides the tile.
        rows: every `rows`-th query row of a query tile is scored, including the last valid one.
        summary: "mean" scores a block by its mean key; "minmax" by the largest score that a key within the block's
            elementwise bounds could have (Quest, arXiv 2406.10774).
    """

    keys: int = 4
    rows: int = 1
    summary: Literal["mean", "minmax"] = "mean"

    def __post_init__(self):
        if self.keys < 1 or self.rows < 1:
            raise ValueError(f"keys={self.keys} and rows={self.rows} must be at least 1")
        if self.summary not in ("mean", "minmax"):
            raise ValueError(f"summary={self.summary!r} must be 'mean' or 'minmax'")

    def check(self, tile: int) -> None:
        """Raise ValueError unless a tile holds a whole number of blocks."""
        if tile % self.keys:
            raise ValueError(f"keys={self.keys} must divide tile={tile}")


def estimate_mass(
    q_BTNH: Float[Array, "B T N H"],
    k_BKSH: Float[Array, "B K S H"],
    spec: AttentionSpec,
    positions: Positions,
    how: Estimate,
    scales: Float[Array, "B K 2 S"] | None = None,
) -> Float[Array, "B K I J"]:
    """Estimate each key tile's probability, summed over a query tile's sampled rows, as an input of `select_tiles`.

    Work is 2 H N T S / (keys * rows) flops; scratch memory holds one query tile's sum per key tile. A single query row
    (decode) is scored key by key, because averaging would read every key anyway. Int8 keys have `scales`, as in
    `KeyValues`: blocks average keys times scales, and for a single row the scores are scaled instead of the keys.
    """
    how.check(spec.tile)
    if spec.stripe is not None and context.traced_stripes() > 1:
        mine = partial(estimate_mass, spec=replace(spec, stripe=None), how=how)
        return context.tile_masses(lambda q, k, where: mine(q, k, positions=where), q_BTNH, k_BKSH, spec, positions)
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    num_kv_heads, num_keys = k_BKSH.shape[1:3]
    keys, rows = (1, 1) if num_queries == 1 else (how.keys, min(how.rows, spec.query_tile))
    num_tiles, num_query_tiles = ceil_div(num_keys, spec.tile), ceil_div(num_queries, spec.query_tile)
    per_step = round_up(min(BLOCK_SCORES, num_tiles * spec.tile // keys), spec.tile // keys)
    num_blocks = round_up(num_tiles * spec.tile // keys, per_step)
    k_scale = None if scales is None else scales[:, :, 0]
    blocks, k_scale = _summaries(k_BKSH, k_scale, positions.kv_len, keys, num_blocks, how.summary, q_BTNH.dtype)

    padding = num_query_tiles * spec.query_tile - num_queries
    q = jnp.pad(q_BTNH, ((0, 0), (0, padding), (0, 0), (0, 0)))
    q = q.reshape(batch, num_query_tiles, spec.query_tile, num_kv_heads, num_heads // num_kv_heads, head_dim)
    first_I = jnp.arange(num_query_tiles, dtype=jnp.int32) * spec.query_tile
    offset = _sampled(rows, min(num_queries, spec.query_tile), positions.q_len[:, None] - first_I)  # [B,I,R]
    q = jnp.take_along_axis(q, jnp.maximum(offset, 0)[..., None, None, None], axis=2)
    q = jnp.transpose(q, (1, 0, 3, 2, 4, 5))  # [I,B,K,R,G,H]
    tile_mass = partial(
        _query_tile, blocks=blocks, k_scale=k_scale, spec=spec, positions=positions, keys=keys, per_step=per_step
    )
    row = jnp.where(offset < 0, num_query_tiles * spec.query_tile, first_I[:, None] + offset)
    row = jnp.swapaxes(row, 0, 1)  # [I,B,R]
    mass = jax.lax.map(lambda args: tile_mass(*args), (q, row))
    return jnp.moveaxis(mass, 0, 2)[..., :num_tiles]


def keys_of(kv: KeyValues) -> Float[Array, "B K S H"]:
    """Return the keys that `estimate_mass` reads; raise ValueError if they are stored in pages."""
    if kv.pages is not None:
        raise ValueError("cheap scores cannot read keys that are stored in pages: use a plan without `own` layers")
    return kv.k


def _sampled(rows: int, height: int, left_BI: Array) -> Int32[Array, "B I R"]:
    """Return the sampled rows' offsets in their query tile: every `rows`-th, counted back from the last valid row.

    `left_BI` are the numbers of valid rows. A negative offset means that there is no such row.
    """
    from_end = jnp.arange(ceil_div(height, rows), dtype=jnp.int32)[::-1] * rows
    last = jnp.clip(left_BI, 1, height)[..., None] - 1
    return last - from_end


def _summaries(
    k: Float[Array, "B K S H"],
    k_scale: Float[Array, "B K S"] | None,
    kv_len: Array,
    keys: int,
    num_blocks: int,
    summary: str,
    dtype: DTypeLike,
) -> tuple[tuple[Array, ...], Array | None]:
    """Return the means, or the upper and lower bounds, of blocks of keys, each [B,K,num_blocks,H].

    Keys past kv_len count as zeros. Blocks of one int8 key stay int8; their scales [B,K,1,num_blocks] are returned
    too.
    """
    valid = (jnp.arange(k.shape[2], dtype=jnp.int32) < kv_len[:, None])[:, None]
    padding = (0, num_blocks * keys - k.shape[2])
    if k_scale is None:
        k = jnp.where(valid[..., None], k, 0)
    else:
        k_scale = jnp.where(valid, k_scale.astype(jnp.float32), 0)
        if keys > 1:  # fused with the mean: no array of this size is ever written
            k = k * k_scale[..., None]
    k = jnp.pad(k, ((0, 0), (0, 0), padding, (0, 0)))
    if keys == 1:
        return (k,), None if k_scale is None else jnp.pad(k_scale, ((0, 0), (0, 0), padding))[:, :, None]
    k = k.reshape(*k.shape[:2], num_blocks, keys, k.shape[-1])
    if summary == "mean":
        return (jnp.mean(k, axis=3, dtype=jnp.float32).astype(dtype),), None
    return (k.max(3).astype(dtype), k.min(3).astype(dtype)), None


def _query_tile(
    q: Float[Array, "B K R G H"],
    row: Array,
    *,
    blocks: tuple[Array, ...],
    k_scale: Array | None,
    spec: AttentionSpec,
    positions: Positions,
    keys: int,
    per_step: int,
) -> Float[Array, "B K J"]:
    """Sum the mass of one query tile's sampled rows. Each step's sums are relative to the running maximum; at the end,
    all are rescaled by lse."""
    batch, num_kv_heads, num_rows, groups, head_dim = q.shape
    per_tile = spec.tile // keys
    num_steps = blocks[0].shape[2] // per_step
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    p = positions.q_start[:, None] + row  # [B,R]
    valid = row < positions.q_len[:, None]
    stop = jnp.minimum(p + 1, positions.kv_len[:, None]) if spec.causal else positions.kv_len[:, None] + 0 * p
    stop = jnp.where(valid, stop // keys, 0)  # number of whole blocks visible
    start = jnp.where(valid, ceil_div(jnp.maximum(p - spec.window + 1, 0), keys), 0) if spec.window else 0 * stop
    q = q.reshape(batch, num_kv_heads, num_rows * groups, head_dim)
    start, stop = (jnp.repeat(bound, groups, axis=1)[:, None, :, None] for bound in (start, stop))

    def scores(first: Array) -> Array:
        taken = [jax.lax.dynamic_slice_in_dim(b, first, per_step, axis=2).astype(q.dtype) for b in blocks]
        sides = [q] if len(taken) == 1 else [jnp.maximum(q, 0), jnp.minimum(q, 0)]
        dot = partial(jnp.einsum, "bkrh,bkph->bkrp", preferred_element_type=jnp.float32)
        z = scale * sum(dot(side, block) for side, block in zip(sides, taken))
        z = z if k_scale is None else z * jax.lax.dynamic_slice_in_dim(k_scale, first, per_step, axis=3)
        z = z if spec.softcap is None else spec.softcap * jnp.tanh(z / spec.softcap)
        block = first + jnp.arange(per_step, dtype=jnp.int32)
        return jnp.where((block >= start) & (block < stop), z, -jnp.inf)

    def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        m, total, sums, maxima = carry
        z = scores(i * per_step)
        new = jnp.maximum(m, z.max(-1))
        finite = jnp.where(jnp.isfinite(new), new, 0.0)
        e = jnp.exp(z - finite[..., None])
        part = e.reshape(*e.shape[:3], per_step // per_tile, per_tile).sum(-1)
        total = total * jnp.exp(m - finite) + e.sum(-1)
        sums = jax.lax.dynamic_update_index_in_dim(sums, part, i, 0)
        return new, total, sums, jax.lax.dynamic_update_index_in_dim(maxima, finite, i, 0)

    lead = q.shape[:3]
    carry = (
        jnp.full(lead, -jnp.inf),
        jnp.zeros(lead),
        jnp.zeros((num_steps, *lead, per_step // per_tile)),
        jnp.full((num_steps, *lead), -jnp.inf),
    )
    used = jnp.minimum(ceil_div(stop.max(), per_step), num_steps)
    m, total, sums, maxima = jax.lax.fori_loop(0, used, step, carry)
    weight = jnp.exp(maxima - jnp.where(total > 0, m, jnp.inf)) / jnp.where(total > 0, total, 1.0)
    mass = jnp.einsum("nbkrj,nbkr->bknj", sums, weight)
    return mass.reshape(batch, num_kv_heads, -1)
