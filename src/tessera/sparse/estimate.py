"""Cheap scores of key tiles, for layers that neither run dense nor reuse another layer's choice.

Keys are averaged in blocks of `keys`. Only every `rows`-th query row is scored, counted back from the query tile's last
valid row, because a prompt's last row decides the first token of its answer. A tile's mass is thus estimated from
1 / (keys * rows) of the scores of a dense pass, and no value is read. For query tile i and key tile j,

    mass[i,j] ~ sum over sampled rows r of tile i, blocks b of tile j:  exp(z[r,b] - lse[r]),
    z[r,b] = softcap(scale * q[r] . mean of block b's keys),   lse[r] = ln(sum over whole visible blocks exp(z[r,b])).

With keys = 1 the scores are exact. With rows = 1 too, the mass is exact, except in blocks of which a row sees only a
part. These do not matter: a selection ranks only tiles that are not always read, and every row of a query tile sees
every key of such a tile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from tessera.attention import context, paging
from tessera.attention.contract import AttentionSpec, KeyValues, Positions
from tessera.core.shapes import ceil_div, round_up

BLOCK_SCORES = 512
"""Number of key blocks scored per step. The scores of 96 rows then just fit in a CPU's second-level cache."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Parameters of the cheap scores.

    Attributes:
        keys: number of consecutive keys (a block) that share one score; must divide the tile.
        rows: every `rows`-th query row of a query tile is scored, including the last valid one.
        summary: "mean" scores a block by the mean of its keys; "minmax" by the largest score that a key within the
            block's elementwise bounds could have (Quest, arXiv 2406.10774).
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
        if tile % self.keys:
            raise ValueError(f"keys={self.keys} must divide tile={tile}")


def estimate_mass(
    q_BTNH: Float[Array, "B T N H"],
    kv: KeyValues,
    spec: AttentionSpec,
    positions: Positions,
    how: Estimate,
    heads: Sequence[int] | None = None,
) -> Float[Array, "B K I J"]:
    """Estimate each key tile's probability, summed over a query tile's sampled rows, as an input of `select_tiles`.

    Work is 2 H N T S / (keys * rows) flops; scratch memory holds one query tile's sum per key tile. A single query row
    (decode) is scored key by key, because averaging would read every key anyway. Int8 keys have `kv.scales`: blocks
    average keys times scales, and for a single row the scores are scaled instead of the keys. With `heads`, q holds
    only the query heads of these KV heads, and the result's K is their number.
    """
    how.check(spec.tile)
    if spec.stripe is not None and context.traced_stripes() > 1:
        mine = partial(estimate_mass, spec=replace(spec, stripe=None), how=how)
        return context.tile_masses(
            lambda q, k, where: mine(q, KeyValues(k, k), positions=where), q_BTNH, kv.k, spec, positions
        )
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = kv.k.shape[1] if heads is None else len(heads)
    keys, rows = (1, 1) if num_queries == 1 else (how.keys, min(how.rows, spec.query_tile))
    num_tiles, num_query_tiles = ceil_div(kv.num_keys, spec.tile), ceil_div(num_queries, spec.query_tile)
    per_step = round_up(min(BLOCK_SCORES, num_tiles * spec.tile // keys), spec.tile // keys)
    if num_queries == 1:
        per_step = per_step if kv.pages is None else round_up(per_step, kv.k.shape[-2])
        read, num_steps = _read_keys(kv, heads, per_step)
    else:
        num_steps = ceil_div(num_tiles * spec.tile // keys, per_step)
        blocks = _summaries(kv, heads, positions.kv_len, keys, num_steps * per_step, how.summary, q_BTNH.dtype)
        read = partial(_slice, blocks=blocks, per_step=per_step)

    padding = num_query_tiles * spec.query_tile - num_queries
    q = jnp.pad(q_BTNH, ((0, 0), (0, padding), (0, 0), (0, 0)))
    q = q.reshape(batch, num_query_tiles, spec.query_tile, num_kv_heads, num_heads // num_kv_heads, head_dim)
    first_I = jnp.arange(num_query_tiles, dtype=jnp.int32) * spec.query_tile
    offset = _sampled(rows, min(num_queries, spec.query_tile), positions.q_len[:, None] - first_I)  # [B,I,R]
    q = jnp.take_along_axis(q, jnp.maximum(offset, 0)[..., None, None, None], axis=2)
    q = jnp.transpose(q, (1, 0, 3, 2, 4, 5))  # [I,B,K,R,G,H]
    tile_mass = partial(
        _query_tile, read=read, num_steps=num_steps, spec=spec, positions=positions, keys=keys, per_step=per_step
    )
    row = jnp.where(offset < 0, num_query_tiles * spec.query_tile, first_I[:, None] + offset)
    row = jnp.swapaxes(row, 0, 1)  # [I,B,R]
    mass = jax.lax.map(lambda args: tile_mass(*args), (q, row))
    return jnp.moveaxis(mass, 0, 2)[..., :num_tiles]


def _sampled(rows: int, height: int, left_BI: Array) -> Int32[Array, "B I R"]:
    """Return the sampled rows' offsets in their query tile; a negative one means no row.

    `left_BI` is the number of valid rows from the query tile's first row on.
    """
    from_end = jnp.arange(ceil_div(height, rows), dtype=jnp.int32)[::-1] * rows
    last = jnp.clip(left_BI, 1, height)[..., None] - 1
    return last - from_end


class Blocks(NamedTuple):
    """Blocks of keys that one step scores: one array [B,K,X,H] of means, or two of upper and lower bounds."""

    sides: tuple[Array, ...]
    k_scale: Array | None  # scales [B,K,1,X] of int8 keys if each block is one key; else None


def _read_keys(kv: KeyValues, heads: Sequence[int] | None, per_step: int) -> tuple[Callable[[Array], Blocks], int]:
    """Return a function that reads `per_step` keys from a position on, and the number of steps.

    A decode step scores each key once, so it reads keys in place: a copy would cost as much as the scores.
    """
    extra = -kv.num_keys % per_step
    if kv.pages is None:
        k, scales = kv.k, kv.scales
        k = jnp.pad(k, ((0, 0), (0, 0), (0, extra), (0, 0))) if extra else k
        scales = jnp.pad(scales, ((0, 0), (0, 0), (0, 0), (0, extra))) if extra and scales is not None else scales
        kv = KeyValues(k, k, scales=scales)
    else:
        kv = kv._replace(pages=jnp.pad(kv.pages, ((0, 0), (0, extra // kv.k.shape[2]))))

    def read(first: Array) -> Blocks:
        block = paging.read_positions(kv, first, per_step)
        return Blocks((_pick(block.k, heads),), None if block.scales is None else _first_scales(block.scales, heads))

    return read, kv.num_keys // per_step


def _first_scales(scales: Float[Array, "B K 2 S"], heads: Sequence[int] | None) -> Float[Array, "B K 1 S"]:
    return _pick(scales, heads)[:, :, :1].astype(jnp.float32)


def _slice(first: Array, *, blocks: Blocks, per_step: int) -> Blocks:
    return Blocks(
        tuple(jax.lax.dynamic_slice_in_dim(side, first, per_step, axis=2) for side in blocks.sides),
        None if blocks.k_scale is None else jax.lax.dynamic_slice_in_dim(blocks.k_scale, first, per_step, axis=3),
    )


def _pick(x: Array, heads: Sequence[int] | None) -> Array:
    return x if heads is None else x[:, jnp.asarray(heads, jnp.int32)]


def _summaries(
    kv: KeyValues,
    heads: Sequence[int] | None,
    kv_len: Array,
    keys: int,
    num_blocks: int,
    summary: str,
    dtype: DTypeLike,
) -> Blocks:
    """Summarise `num_blocks` blocks of `keys` keys each; in blocks of several, keys past kv_len count as zeros."""
    if kv.pages is not None:
        kv = paging.read_positions(kv, jnp.int32(0), kv.num_keys)
    k, scale = _pick(kv.k, heads), None if kv.scales is None else _first_scales(kv.scales, heads)
    padding = (0, num_blocks * keys - k.shape[2])
    widths = ((0, 0), (0, 0), padding, (0, 0))
    if keys == 1:  # `_query_tile` masks scores of keys past kv_len
        k = jnp.pad(k, widths)
        return Blocks((k,), None if scale is None else jnp.pad(scale, (*widths[:2], (0, 0), padding)))
    valid = (jnp.arange(k.shape[2], dtype=jnp.int32) < kv_len[:, None])[:, None]
    if scale is None:
        k = jnp.where(valid[..., None], k, 0)
    else:  # fused with the mean: no array of this size is ever written
        k = k * jnp.where(valid, scale[:, :, 0], 0)[..., None]
    k = jnp.pad(k, widths)
    k = k.reshape(*k.shape[:2], num_blocks, keys, k.shape[-1])
    if summary == "mean":
        return Blocks((jnp.mean(k, axis=3, dtype=jnp.float32).astype(dtype),), None)
    return Blocks((k.max(3).astype(dtype), k.min(3).astype(dtype)), None)


def _query_tile(
    q: Float[Array, "B K R G H"],
    row: Array,
    *,
    read: Callable[[Array], Blocks],
    num_steps: int,
    spec: AttentionSpec,
    positions: Positions,
    keys: int,
    per_step: int,
) -> Float[Array, "B K J"]:
    """Sum the tile masses of one query tile's sampled rows; read(first) returns the blocks [first, first + per_step).

    The sums of a step are relative to the maximum score so far; at the end, the sums of all steps are rescaled by lse.
    """
    batch, num_kv_heads, num_rows, groups, head_dim = q.shape
    per_tile = spec.tile // keys
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    p = positions.q_start[:, None] + row  # [B,R]
    valid = row < positions.q_len[:, None]
    stop = jnp.minimum(p + 1, positions.kv_len[:, None]) if spec.causal else positions.kv_len[:, None] + 0 * p
    stop = jnp.where(valid, stop // keys, 0)  # number of whole blocks visible
    start = jnp.where(valid, ceil_div(jnp.maximum(p - spec.window + 1, 0), keys), 0) if spec.window else 0 * stop
    q = q.reshape(batch, num_kv_heads, num_rows * groups, head_dim)
    start, stop = (jnp.repeat(bound, groups, axis=1)[:, None, :, None] for bound in (start, stop))

    def scores(first: Array) -> Array:
        blocks, k_scale = read(first)
        taken = [side.astype(q.dtype) for side in blocks]
        sides = [q] if len(taken) == 1 else [jnp.maximum(q, 0), jnp.minimum(q, 0)]
        dot = partial(jnp.einsum, "bkrh,bkph->bkrp", preferred_element_type=jnp.float32)
        z = scale * sum(dot(side, block) for side, block in zip(sides, taken))
        z = z if k_scale is None else z * k_scale
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
