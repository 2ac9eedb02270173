"""Portable sparse prefill attention: each query tile reads only its listed key tiles, in plain XLA.

A query tile of one KV head has query_tile * G rows and one list of key tiles. A step takes several consecutive query
tiles of one head, because their lists have similar lengths; lists of different KV heads may differ in length, because
each head has its own budget. If heads have few query tiles, a step takes all tiles of several heads.

Listed tiles ascend, so without a window the tiles that every row sees in full come first. Those run several per step
without a mask. The rest, mainly the diagonal, run in smaller masked steps, which waste little when the list is rounded
up to whole steps. Each step copies the K and V tiles that it reads into one contiguous block: 2 H elements per key,
little compared with the products. The number of steps is a run-time value. Work is 4 H flops per (row, listed key)
pair.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from tessera.attention import online_softmax, paging
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.kernel import family
from tessera.core.shapes import ceil_div

DTYPES = ("float32", "bfloat16", "float16")
STEP_SCORES = 1 << 18
"""Scores per step. They take 1 MB in float32, half of the 2 MB that two cores' second-level caches hold together."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys per unmasked step (block_s) and per masked step (mask_s), both rounded down to whole tiles, at least one."""

    block_s: int
    mask_s: int

    def __post_init__(self):
        if self.block_s < 1 or self.mask_s < 1:
            raise ValueError(f"block_s={self.block_s} and mask_s={self.mask_s} must be at least 1")


class Lists(NamedTuple):
    """Y query tiles that one step processes together."""

    x: Int32[Array, "Y"]  # KV head of each query tile, as an index into X = B * K
    row: Int32[Array, "Y R"]  # absolute position of each row
    kv_len: Int32[Array, "Y"]  # valid keys of each query tile's sequence
    tiles: Int32[Array, "Y C"]  # listed key tiles of each query tile
    count: Int32[Array, "Y"]  # their number


def count_full(lists: Lists, spec: AttentionSpec) -> Int32[Array, "Y"]:
    """Count, per query tile, the leading listed tiles that all rows see in full; 0 if spec has a window."""
    if spec.window is not None:
        return jnp.zeros_like(lists.count)
    stop = jnp.minimum(lists.kv_len, lists.row[:, 0] + 1) if spec.causal else lists.kv_len
    listed = jnp.arange(lists.tiles.shape[1], dtype=jnp.int32) < lists.count[:, None]
    return (listed & (lists.tiles < stop[:, None] // spec.tile)).sum(-1, dtype=jnp.int32)


def read_tiles(kv: KeyValues, lists: Lists, start: Int32[Array, "Y P"], tile: int, dtype: jnp.dtype) -> KeyValues:
    """Copy P tiles per query tile, given where they start, out of a `paging.flat` record into k and v [Y, P * tile, H].

    The returned scales are [Y, P * tile, 2]. Invalid starts read wrong keys, but never memory outside of kv.
    """
    if kv.pages is not None:
        k, v, _, scales = paging.take_tiles(kv, lists.x[:, None], start, tile)
        scales = None if scales is None else jnp.swapaxes(scales, 1, 2).astype(jnp.float32)
        return KeyValues(online_softmax.widened(k, dtype), online_softmax.widened(v, dtype), scales=scales)
    key = (start[:, :, None] + jnp.arange(tile, dtype=jnp.int32)).reshape(start.shape[0], -1)
    k, v = (online_softmax.widened(x.at[lists.x[:, None], key].get(mode="clip"), dtype) for x in kv[:2])
    if kv.scales is None:
        return KeyValues(k, v)
    return KeyValues(k, v, scales=kv.scales.at[lists.x[:, None], :, key].get(mode="clip").astype(jnp.float32))


def score_tiles(q_tile: Array, kv: KeyValues, spec: AttentionSpec) -> tuple[Array, float, Array | None]:
    """Return z and its factor, as `raw_scores` does, and the scales [Y, 1, P * tile] of int8 values."""
    if kv.scales is None:
        return *online_softmax.raw_scores(q_tile, kv.k, spec), None
    return *online_softmax.raw_scores(q_tile, kv.k, spec, kv.scales[:, None, :, 0]), kv.scales[:, None, :, 1]


def step_masks(
    lists: Lists, entry: Int32[Array, "P"], num_keys: int, spec: AttentionSpec
) -> tuple[Array, Bool[Array, "Y R P"], Bool[Array, "Y P 1"]]:
    """Return the starts of the tiles at indices `entry` of the lists, and masks of their seen and their valid keys."""
    listed = entry < lists.count[:, None]
    first = jnp.where(listed, take_ids(lists, entry), 0) * spec.tile
    start = jnp.minimum(first, num_keys - spec.tile)  # a short last tile starts earlier, and is masked
    key = start[..., None] + jnp.arange(spec.tile, dtype=jnp.int32)
    real = (listed[..., None] & (key >= first[..., None])).reshape(key.shape[0], 1, -1)
    key = key.reshape(real.shape)
    kv_len = lists.kv_len[:, None, None]
    mask = real & online_softmax.visible_mask(lists.row[:, :, None], key, kv_len, spec)
    return start, mask, jnp.swapaxes(real & (key < kv_len), 1, 2)


def take_ids(lists: Lists, entry: Int32[Array, "P"]) -> Int32[Array, "Y P"]:
    """Return the tile ids at indices `entry` of each list of C ids; indices from C on repeat the list's last id."""
    return jnp.take(lists.tiles, jnp.minimum(entry, lists.tiles.shape[1] - 1), axis=1)


def attend_tile(q_tile: Float[Array, "Y R H"], kv: KeyValues, lists: Lists, spec: AttentionSpec, config: Config):
    """Run the online softmax of Y query tiles over their listed key tiles; that of an empty list is meaningless."""
    capacity, num_keys = lists.tiles.shape[1], kv.num_keys
    per_step = min(max(config.block_s // spec.tile, 1), capacity)
    per_mask = min(max(config.mask_s // spec.tile, 1), capacity)

    def full(i, state):
        start = take_ids(lists, i * per_step + jnp.arange(per_step, dtype=jnp.int32)) * spec.tile
        read = read_tiles(kv, lists, start, spec.tile, q_tile.dtype)
        z, factor, v_scale = score_tiles(q_tile, read, spec)
        return online_softmax.absorb(state, z, read.v, factor, scale=v_scale)[0]

    def masked(i, state):
        entry = done + i * per_mask + jnp.arange(per_mask, dtype=jnp.int32)
        start, mask, real = step_masks(lists, entry, num_keys, spec)
        read = read_tiles(kv, lists, start, spec.tile, q_tile.dtype)
        z, factor, v_scale = score_tiles(q_tile, read, spec)
        v_tiles, v_scale = online_softmax.blank(read.v, v_scale, real)
        return online_softmax.absorb(state, jnp.where(mask, z, -jnp.inf), v_tiles, factor, scale=v_scale)[0]

    full_steps = jnp.where(lists.count > 0, count_full(lists, spec), lists.count.max()).min() // per_step
    done = full_steps * per_step
    state = jax.lax.fori_loop(0, full_steps, full, online_softmax.init_state(q_tile.shape[:2], q_tile.shape[2]))
    return jax.lax.fori_loop(0, (lists.count.max() - done + per_mask - 1) // per_mask, masked, state)


class Groups(NamedTuple):
    """Division of all query tiles into groups, each with `side` consecutive query tiles from each of `heads` heads."""

    total: int  # KV heads of all sequences, B * K
    num_tiles: int  # query tiles per head
    heads: int
    side: int

    @classmethod
    def of(cls, total: int, num_tiles: int, wanted: int) -> "Groups":
        """Choose groups of up to `wanted` tiles: all of one or more heads, or of one head with the least padding."""
        if num_tiles <= wanted:
            heads = next(h for h in range(wanted // num_tiles, 0, -1) if total % h == 0)
            return cls(total, num_tiles, heads, num_tiles)
        side = min(range(wanted, wanted // 2, -1), key=lambda side: ceil_div(num_tiles, side) * side)
        return cls(total, num_tiles, 1, side)

    @property
    def parts(self) -> int:
        """Number of groups along one head's query tiles; the last group may be padded."""
        return ceil_div(self.num_tiles, self.side)

    def group(self, x: Array) -> Array:
        """Reshape [X, I, ...] to [groups, Y, ...], padded with zeros (for lists: count 0, so empty)."""
        x = jnp.pad(x, [(0, 0), (0, self.parts * self.side - self.num_tiles)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(self.total // self.heads, self.heads, self.parts, self.side, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2).reshape(-1, self.heads * self.side, *x.shape[4:])

    def ungroup(self, x: Array) -> Array:
        """Invert `group`."""
        x = x.reshape(self.total // self.heads, self.parts, self.heads, self.side, *x.shape[2:])
        x = jnp.swapaxes(x, 1, 2).reshape(self.total, -1, *x.shape[4:])
        return x[:, : self.num_tiles]


def launch(
    q, kv: KeyValues, spec: AttentionSpec, positions: Positions, selection: Selection, config: Config
) -> AttentionOut:
    """Run attention over the listed tiles only; not differentiable."""
    batch, num_queries, num_heads, head_dim = q.shape
    kv_heads, num_keys = kv.k.shape[1], kv.num_keys
    flat = paging.flat(kv)
    if num_keys < spec.tile:
        flat = paging.padded(flat, spec.tile)
    groups, num_tiles = num_heads // kv_heads, ceil_div(num_queries, spec.query_tile)
    rows, total = spec.query_tile * groups, batch * kv_heads
    cut = Groups.of(total, num_tiles, max(STEP_SCORES // (rows * max(config.block_s, spec.tile)), 1))

    token = jnp.arange(num_queries, dtype=jnp.int32)
    q_rows = jnp.where((token < positions.q_len[:, None])[..., None, None], q, 0)  # padding rows may hold anything
    q_rows = jnp.pad(q_rows, [(0, 0), (0, num_tiles * spec.query_tile - num_queries), (0, 0), (0, 0)])
    q_rows = jnp.moveaxis(q_rows.reshape(batch, num_tiles, spec.query_tile, kv_heads, groups, head_dim), 3, 1)

    def attend_group(args):
        x, tile, q_tile, tiles, count = args
        start, kv_len, q_len = (p[x // kv_heads][:, None] for p in positions)
        kv_len = jnp.clip(kv_len, 0, num_keys)
        token = jnp.repeat(jnp.arange(spec.query_tile, dtype=jnp.int32), groups)
        token = tile[:, None] * spec.query_tile + token
        row = start + token
        lists = Lists(x, row, kv_len[:, 0], tiles, count)
        state = attend_tile(q_tile, flat, lists, spec, config)
        out, lse = online_softmax.finish_state(
            state, (count[:, None] > 0) & (token < q_len) & online_softmax.sees_any(row, kv_len, spec)
        )
        return out.astype(q.dtype), lse

    index = jnp.arange(total * num_tiles, dtype=jnp.int32).reshape(total, num_tiles)
    chosen = [x.reshape(total, num_tiles, *x.shape[3:]) for x in (selection.tiles, selection.count)]
    q_rows = q_rows.reshape(total, num_tiles, rows, head_dim)
    xs = [cut.group(x) for x in (index // num_tiles, index % num_tiles, q_rows, *chosen)]
    out, lse = (cut.ungroup(x) for x in jax.lax.map(attend_group, tuple(xs)))

    def by_token(x: Array) -> Array:  # [X, I, R, ...] -> [B, T, N, ...]
        x = x.reshape(batch, kv_heads, num_tiles * spec.query_tile, groups, *x.shape[3:])
        return jnp.moveaxis(x, 1, 2).reshape(batch, -1, num_heads, *x.shape[4:])[:, :num_queries]

    return AttentionOut(by_token(out), by_token(lse))


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Return 512 keys per unmasked step and 128 per masked step: four tiles and one tile of 128 keys."""
    return Config(block_s=512, mask_s=128)


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    for block_s in (128, 256, 512, 1024):
        for mask_s in (128, 256):
            yield Config(block_s=block_s, mask_s=mask_s)


KERNELS = family(
    "xla_prefill",
    ("sparse",),
    dtypes=DTYPES,
    launch=launch,
    Config=Config,
    default_config=default_config,
    search_space=search_space,
    scaled=True,
    paged=True,
)
