"""Tile lists in sparse prefill on a TPU: which listed tiles a row block reads, and their copies from HBM into VMEM.

Listed tiles are copied end to end into one of two buffers while the other is computed on. SMEM holds the lists of this
grid step and of the next, so that a step can start the copies into the next step's first buffer.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int32

from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.tpu import pages
from tessera.attention.tpu.matrix_unit import LANES, dequantised
from tessera.core.shapes import ceil_div, round_up

PACKED = 16
"""Rows of a packed bfloat16 register. Row blocks and tile copies start at multiples of it."""
MOST_ITEMS, COPIES = 4, 256
"""Maximum row blocks per grid step, and maximum tile copies in straight-line code. More of either would only lengthen
the program."""
SMEM_BYTES = 1000 << 10
"""Bytes of SMEM that lists may take; every chip has 1 MiB."""
NEVER = 1 << 30
"""Position that marks a key as hidden from every row."""


class Cut(NamedTuple):
    """Static sizes of one call cut into blocks, as the kernel body needs them."""

    spec: AttentionSpec
    groups: int  # G, query heads per KV head
    head_dim: int
    num_keys: int
    num_blocks: int  # row blocks per KV head
    tokens: int  # per row block, without padding
    block_t: int  # with padding
    parts: int  # row blocks per query tile
    items: int  # row blocks per grid step
    block_tiles: int  # tiles per buffer
    chunk_tiles: int  # per unmasked update
    mask_tiles: int  # per masked update
    flat: bool  # out is written as [B,T,N*H], which needs G * H to be a multiple of 128
    matrix_sums: bool
    half_exp: bool
    scaled: bool
    page: int | None  # positions per page; None if K and V are contiguous

    @property
    def rows(self) -> int:
        return self.block_t * self.groups

    @property
    def ones(self) -> int:
        """Columns of ones appended to V: as many as fill H up to a multiple of 128, or 128 if H is such a multiple."""
        return (-self.head_dim % LANES or LANES) if self.matrix_sums else 0


def cut_call(spec: AttentionSpec, shapes: Shapes, config: Any) -> Cut:
    groups = shapes.num_heads // shapes.num_kv_heads
    tokens = min(spec.query_tile, round_up(shapes.num_queries, PACKED))
    parts = 1
    while tokens % (2 * PACKED) == 0 and tokens * groups > config.rows:
        tokens, parts = tokens // 2, parts * 2
    block_t = round_up(tokens, PACKED)
    num_blocks = ceil_div(shapes.num_queries, tokens)  # parts of the last query tile without any row are omitted
    num_keys = max(spec.tile, round_up(shapes.num_keys, LANES if shapes.scaled else PACKED))
    mask_tiles = min(max(config.mask_s // spec.tile, 1), shapes.capacity)
    block_tiles = round_up(min(max(config.block_s // spec.tile, 1), shapes.capacity), mask_tiles)
    chunk_tiles = min(max(config.chunk // spec.tile, 1), block_tiles)
    while block_tiles % chunk_tiles:
        chunk_tiles -= 1
    most = max(min(MOST_ITEMS, COPIES // block_tiles), 1) if parts == 1 else 1
    room = SMEM_BYTES - pages.table_bytes(shapes)
    most = max(min(most, room // list_bytes(shapes.capacity, block_tiles)), 1)
    items = min(max(config.step_rows // (block_t * groups), 1), num_blocks, most)
    flat = (groups * shapes.head_dim) % LANES == 0
    half = config.half_exp and shapes.dtype == "bfloat16"
    sizes = (groups, shapes.head_dim, num_keys, num_blocks, tokens, block_t, parts, items)
    switches = (flat, config.matrix_sums, half, shapes.scaled, shapes.page)
    return Cut(spec, *sizes, block_tiles, chunk_tiles, mask_tiles, *switches)


def list_bytes(capacity: int, block_tiles: int) -> int:
    """Return the bytes of SMEM per row block: the lists of this grid step and of the next, each double-buffered."""
    return 2 * 2 * 4 * round_up(1 + round_up(capacity, block_tiles), LANES)


class Refs(NamedTuple):
    """References of the kernel body, for P row blocks per grid step and two buffers (even and odd)."""

    lists: Array  # SMEM [1,1,P,1,X]: see pack_lists
    ahead: Array  # likewise, the lists of the next grid step
    q: Array  # [1,G,P*block_t,H]
    k: Array  # HBM [B,K,S,H], or a pool [pages,K,page,H]
    v: Array
    scales: Array | None  # HBM [B,K,2,S] or [pages,K,2,page]; int8 only, as its buffers [P,2,block_s]
    table: Array | None  # SMEM [1,1,J]: the sequence's pages; None if K and V are contiguous
    out: Array  # [1,P*block_t,G*H], or like q
    lse: Array  # [1,1,P,1,R]
    q_scaled: Array  # [P,R,H]
    m: Array  # [P,R,128], all lanes equal
    acc: Array  # [P,R,H+ones]
    sums: Array | None  # [P,R,128], per lane
    k_even: Array  # [P,block_s,H]
    v_even: Array
    k_odd: Array
    v_odd: Array
    scales_even: Array | None
    scales_odd: Array | None
    arrived: Array  # a DMA semaphore per buffer
    turn: Array  # SMEM [1]: slot of the grid step's first buffer, 0 or 1

    def tiles(self, slot: int) -> tuple[Array, Array]:
        """Return K and V of a buffer. The two buffers are separate arrays, so that loads from one never wait for copies
        into the other."""
        return (self.k_odd, self.v_odd) if slot else (self.k_even, self.v_even)

    def buffer_scales(self, slot: int) -> Array | None:
        return self.scales_odd if slot else self.scales_even

    def keys(self, p: int, at: slice | pl.Slice, slot: int) -> tuple[Array, Array]:
        """Return the keys and values at index `at` of row block p's buffer, in the queries' dtype."""
        k, v = (tiles[p, at] for tiles in self.tiles(slot))
        if self.scales is None:
            return k, v
        scales, dtype = self.buffer_scales(slot)[p, :, at], self.q_scaled.dtype
        return dequantised(k, scales[:1], dtype), dequantised(v, scales[1:], dtype)


class Item(NamedTuple):
    """Scalars of one row block."""

    block: Array  # index of the row block
    first: Array  # absolute position of its first row
    kv_len: Array  # valid keys of the sequence
    q_len: Array  # valid query rows of the sequence
    count: Array  # length of the list, not counting tiles at its end that no row sees
    whole_from: Array  # every row sees list entries [whole_from, whole) in full
    whole: Array


def read_item(lists: Array, p: int, step: Array, positions: Positions, cut: Cut) -> Item:
    """Compute the scalars of row block p of a grid step; drop tiles that no row sees from the end of its list."""
    spec, block = cut.spec, step * cut.items + p
    q_start, kv_len, q_len = (x[pl.program_id(0)] for x in positions)
    kv_len = jnp.clip(kv_len, 0, cut.num_keys)
    token = block * cut.tokens
    first = q_start + token
    last = first + cut.tokens - 1
    stop, whole_stop = kv_len, kv_len
    if spec.causal:
        stop, whole_stop = jnp.minimum(stop, last + 1), jnp.minimum(whole_stop, first + 1)
    live = (block < cut.num_blocks) & (token < q_len)
    count = jnp.where(live, lists[0, 0, p, 0, 0], 0)

    def drop(count: Array, reaches) -> Array:
        def fewer(n: Array) -> Array:
            with jax.named_scope("drop"):
                return n - 1

        return jax.lax.while_loop(lambda n: (n > 0) & reaches(lists[0, 0, p, 0, jnp.maximum(n, 1)]), fewer, count)

    count = drop(count, lambda tile: tile * spec.tile >= stop)
    whole = drop(count, lambda tile: (tile + 1) * spec.tile > whole_stop)
    whole_from = jnp.int32(0)
    if spec.window is not None:
        whole_from = jax.lax.while_loop(
            lambda n: (
                (n < whole) & (lists[0, 0, p, 0, jnp.minimum(n, whole - 1) + 1] * spec.tile <= last - spec.window)
            ),
            lambda n: n + 1,
            whole_from,
        )
    return Item(block, first, kv_len, q_len, count, whole_from, whole)


def pack_lists(selection: Selection, cut: Cut) -> Int32[Array, "B K I 1 X"]:
    """Pack each list: count, ids, then zeros up to whole buffers; clipped ids may read wrong keys, never past them."""
    tiles = jnp.clip(selection.tiles, 0, ceil_div(cut.num_keys, cut.spec.tile) - 1)
    tiles = jnp.pad(tiles, [(0, 0)] * 3 + [(0, -tiles.shape[-1] % cut.block_tiles)])
    return jnp.concatenate([selection.count[..., None], tiles], -1)[:, :, :, None]


def tile_start(index: Array, cut: Cut) -> Array:
    """Return the position from which a tile is read. A short last tile is read from an earlier position."""
    start = index * cut.spec.tile
    if cut.num_keys % cut.spec.tile:
        start = jnp.minimum(start, cut.num_keys - cut.spec.tile)
    return pl.multiple_of(start, PACKED)


class Next(NamedTuple):
    """The buffer to fill while the other is computed on."""

    slot: int  # 0 for the even buffers in VMEM, 1 for the odd
    buffer: Array  # copy list entries from buffer * block_tiles on
    counts: list[Array]  # tiles to copy for each row block
    own: Array  # whether the tiles belong to this grid step; otherwise they belong to the next


def fetch(refs: Refs, p: int, j: Array | int, target: Next, cut: Cut) -> None:
    """Start copying tile j of the target for row block p, if the row block has that many tiles."""
    batch, head, tile = pl.program_id(0), pl.program_id(1), cut.spec.tile
    entry = target.buffer * cut.block_tiles + j + 1
    index = jnp.where(target.own, refs.lists[0, 0, p, 0, entry], refs.ahead[0, 0, p, 0, entry])
    if cut.page is None:
        row, key = batch, tile_start(index, cut)
    else:
        at, key = pages.find(index * tile, cut.page, tile)
        row = refs.table[0, 0, at]

    @pl.when(j < target.counts[p])
    def start():
        at = pl.ds(j * tile if isinstance(j, int) else pl.multiple_of(j * tile, PACKED), tile)
        for hbm, tiles in zip((refs.k, refs.v), refs.tiles(target.slot), strict=True):
            source = hbm.at[row, head, pl.ds(key, tile)]
            pltpu.make_async_copy(source, tiles.at[p, at], refs.arrived.at[target.slot]).start()
        if cut.scaled:
            source, into = refs.scales.at[row, head, :, pl.ds(key, tile)], refs.buffer_scales(target.slot)
            pltpu.make_async_copy(source, into.at[p, :, at], refs.arrived.at[target.slot]).start()


def fetch_run(refs: Refs, u: Array, target: Next, cut: Cut) -> None:
    """Start copying run number u of the target, for all row blocks; a run is mask_tiles tiles."""
    for j in range(cut.mask_tiles):
        for p in range(cut.items):
            fetch(refs, p, u * cut.mask_tiles + j, target, cut)


def fetch_from(refs: Refs, first: Array | int, target: Next, scope: str, cut: Cut) -> None:
    """Start copying the target's runs (see `fetch_run`), from number `first` on; `scope` is the loop's named scope."""

    def run(u, _):
        with jax.named_scope(scope):
            fetch_run(refs, u, target, cut)

    runs = (functools.reduce(jnp.maximum, target.counts) + cut.mask_tiles - 1) // cut.mask_tiles
    jax.lax.fori_loop(first, runs, run, None)


def wait(refs: Refs, p: int, num_tiles: Array, slot: int, cut: Cut) -> None:
    """Wait for `num_tiles` tiles of K and V. A wait counts bytes: each set bit i of num_tiles waits for 2^i tiles."""
    for bit in range(cut.block_tiles.bit_length()):

        @pl.when((num_tiles >> bit) & 1 == 1)
        def part(bit=bit):
            for tiles in refs.tiles(slot):
                some = tiles.at[p, pl.ds(0, cut.spec.tile << bit)]
                pltpu.make_async_copy(some, some, refs.arrived.at[slot]).wait()
            if cut.scaled:
                some = refs.buffer_scales(slot).at[p, :, pl.ds(0, cut.spec.tile << bit)]
                pltpu.make_async_copy(some, some, refs.arrived.at[slot]).wait()


def key_positions(refs: Refs, p: int, entry: Array, item: Item, cut: Cut) -> Array:
    """Return positions [1,mask_s] of the keys in list entries [entry, entry + mask_tiles); NEVER for invalid keys.

    Keys are invalid at or past kv_len, in entries past count, and before the start of a short last tile that was read
    from an earlier position.
    """
    tile, groups = cut.spec.tile, []
    for at in range(0, cut.mask_tiles * tile, LANES):
        width = min(LANES, cut.mask_tiles * tile - at)
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
        position = jnp.full((1, width), NEVER, jnp.int32)
        for offset in range(0, width, tile):
            j = entry + (at + offset) // tile
            index = refs.lists[0, 0, p, 0, j + 1]
            mine = lane + jnp.where(j < item.count, tile_start(index, cut) - offset, NEVER)
            if cut.num_keys % tile:
                mine = jnp.where(mine >= index * tile, mine, NEVER)
            position = mine if width == tile else jnp.where((lane >= offset) & (lane < offset + tile), mine, position)
        groups.append(position)
    position = groups[0] if len(groups) == 1 else jnp.concatenate(groups, 1)
    return jnp.where(position < item.kv_len, position, NEVER)


def clear_values(refs: Refs, p: int, buffer: Array, num_tiles: Array, stop: Array, slot: int, item: Item, cut: Cut):
    """Zero V in tiles [num_tiles, stop) of a buffer, and from kv_len on in its last listed tile, since 0 * NaN is NaN.

    K stays as it is, because its scores are masked. For int8 values, only the scales are zeroed, because nothing else
    can be NaN.
    """
    tile = cut.spec.tile
    v_tiles = refs.buffer_scales(slot) if cut.scaled else refs.tiles(slot)[1]

    def rows(first: Array) -> tuple:
        at = pl.ds(pl.multiple_of(first * tile, PACKED), tile)
        return (p, slice(None), at) if cut.scaled else (p, at)

    def clear(j, _):
        with jax.named_scope("clear"):
            v_tiles[rows(j)] = jnp.zeros_like(v_tiles[rows(j)])

    jax.lax.fori_loop(num_tiles, stop, clear, None)

    @pl.when(num_tiles > 0)
    def tail():
        start = tile_start(refs.lists[0, 0, p, 0, buffer * cut.block_tiles + num_tiles], cut)

        @pl.when(start + tile > item.kv_len)
        def cross():
            with jax.named_scope("cross"):
                values = v_tiles[rows(num_tiles - 1)]
                key = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1 if cut.scaled else 0) + start
                v_tiles[rows(num_tiles - 1)] = jnp.where(key < item.kv_len, values, jnp.zeros_like(values))


def executions(shapes: Shapes, cut: Cut) -> Mapping[str, float]:
    """Count runs of each named scope, and HBM bytes, if every query tile lists the last C tiles that it sees."""
    spec, tile = cut.spec, cut.spec.tile
    first = shapes.num_keys - shapes.num_queries + np.arange(cut.num_blocks) * cut.tokens
    last = np.minimum(first + cut.tokens, shapes.num_keys) - 1
    stop, whole_stop = (last, first) if spec.causal else (first * 0 + shapes.num_keys - 1,) * 2
    start = 0 if spec.window is None else np.maximum(first - spec.window + 1, 0) // tile
    count = np.minimum(stop // tile + 1 - start, shapes.capacity)
    whole = np.maximum(count - (stop // tile + 1 - (whole_stop + 1) // tile), 0)
    edge = 0 if spec.window is None else -(-np.maximum(last - spec.window + 1, 0) // tile) - (stop // tile + 1 - count)

    def steps(x: np.ndarray, end: int) -> np.ndarray:
        pad = np.full(-len(x) % cut.items, end)
        return np.concatenate([x, pad]).reshape(-1, cut.items)

    longest, edge = steps(count, 0).max(1), steps(np.maximum(edge, 0) + 0 * count, 0).max(1)
    buffers = np.maximum(-(-longest // cut.block_tiles), 1)
    full = np.maximum(steps(whole, 0).min(1) // cut.block_tiles - -(-edge // cut.block_tiles), 0)
    rest = longest - full * cut.block_tiles
    updates = -(-rest // cut.mask_tiles)
    ahead = np.minimum(np.append(longest[1:], 0), cut.block_tiles)
    width, heads = jnp.dtype(shapes.dtype).itemsize, shapes.batch * shapes.num_kv_heads
    lists = 4 * (1 + shapes.capacity) * 2 * len(buffers) * cut.items
    rows = shapes.batch * shapes.num_heads * shapes.num_queries * (2 * shapes.head_dim * width + 4)
    # The program holds each scope in `either` twice, for the even and the odd buffer: each copy gets half of the runs.
    once = {
        "step": len(buffers),
        "first": 1,
        "fetch_first": -(-min(longest[0], cut.block_tiles) // cut.mask_tiles),
        "buffer": buffers.sum(),
    }
    either = {"turn": buffers.sum(), "full": full.sum(), "masked": (buffers - full).sum(), "update": updates.sum()}
    either["clear"] = (updates * cut.mask_tiles - rest).sum()
    either["cross"] = ((stop + 1) * (shapes.num_keys % tile > 0) > shapes.num_keys // tile * tile).sum() / cut.items
    either["fetch_rest"] = np.maximum(-(-ahead // cut.mask_tiles) - updates, 0).sum()
    runs = {name: float(heads * n) for name, n in once.items()}
    runs |= {name: heads * n / 2 for name, n in either.items()}
    runs["drop"] = runs["step"] * 2
    key_bytes = shapes.head_dim + 2 if cut.scaled else shapes.head_dim * width
    runs["hbm_bytes"] = float(rows + heads * (2 * count.sum() * tile * key_bytes + lists))
    return runs
