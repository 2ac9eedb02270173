"""Blocks of a TPU decode call: their sizes, the range of the cache that each sequence's query row sees, and the copies.

The kernel gets the ranges before it copies anything. A dense or score call has a range [lo, hi) of key positions per
sequence. In a sparse call, lo and hi are positions in the listed tiles laid end to end: ids ascend, so the visible part
is one range there too.

A *unit* is the run of keys that the smallest copy moves. A *split* is one of the parts of the visible range that run in
parallel. A *chain* consists of the grid steps of one group of KV heads and one split; they run in order on one core.

Blocks are copied from HBM into one of two on-chip buffers. A *whole* block is one that every row sees in full. It takes
one copy if its keys are consecutive, or straight-line runs of copies if it consists of pages or listed tiles; one wait
covers all its copies. Any other block is copied in units, so that less than one unit is copied needlessly at each end
of the visible range. Values outside of that range are then set to zero.
"""

import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int32

from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.kernel import role_of
from tessera.attention.tpu import pages
from tessera.attention.tpu.matrix_unit import LANES
from tessera.attention.visibility import decode_range
from tessera.core.shapes import ceil_div, round_up

SUBLANES = 8
PACKED = 16
"""Rows of a packed bfloat16 register. Every copy starts at a multiple of it."""
TILES_AT_ONCE = 32
"""Maximum tiles whose copies one run of straight-line code starts. Straight-line code takes 4 instruction bundles per
copy, a loop 13."""
PIECE_IDS = 1 << 14
"""Tile ids per grid step, all heads together. With the next step's ids and double buffering: 256 KiB of 1 MiB SMEM."""


class Cut(NamedTuple):
    """Static sizes of one call cut into blocks, as the kernel body needs them.

    If H does not fill 128 lanes, K and V are passed as a TPU then stores them, [B, K, H, S] (`lanes`). A copy then
    moves at least 128 keys, as it does if scales lie along lanes (`scaled`); lists of smaller tiles become lists of
    128-key units, with one bit per listed tile.
    """

    role: str
    spec: AttentionSpec
    batch: int
    num_keys: int
    stored: int  # length of K and V: num_keys padded to whole registers (a model's cache needs no padding)
    kv_heads: int
    groups: int  # G, query heads per KV head
    head_dim: int
    heads: int  # KV heads per grid step
    rows: int  # the G query rows of a KV head, padded to whole registers
    block_s: int
    unit: int
    splits: int
    pieces: int  # of a tile list, passed to the kernel one per grid step, with `piece` ids each
    piece: int
    lanes: bool
    scaled: bool
    exact: bool  # queries are float32; products with int8 keys and values then do not round the other operand
    page: int | None  # positions per page; None if K and V are contiguous

    @property
    def chains(self) -> int:
        return self.kv_heads // self.heads * self.splits

    @property
    def steps(self) -> int:
        return self.batch * self.pieces

    @property
    def by_unit(self) -> bool:
        """Whether K and V are passed as [units, tile, H], where a listed tile's address is a shift and an add."""
        return self.role == "sparse" and not (self.lanes or self.scaled) and self.stored % self.unit == 0

    @property
    def table(self) -> int:
        """Entries of a page table that a grid step reads; 0 in the sparse role, whose lists name units of the pool."""
        return 0 if self.page is None or self.role == "sparse" else self.stored // self.page

    @property
    def tiles_per_unit(self) -> int:
        """Key tiles per unit in the sparse role; 1 in the other roles."""
        return self.unit // self.spec.tile if self.role == "sparse" else 1

    @property
    def tiles_at_once(self) -> int:
        """Units per straight-line run of copies: at most TILES_AT_ONCE, and a divisor of the units per block."""
        per_block = self.block_s // self.unit
        return next(n for n in range(min(TILES_AT_ONCE, per_block), 0, -1) if per_block % n == 0)

    @property
    def banks(self) -> int:
        """Number of 128-lane registers for one row's tile masses, one lane per key tile."""
        return ceil_div(ceil_div(self.num_keys, self.spec.tile), LANES)


def cut_call(spec: AttentionSpec, shapes: Shapes, block_s: int, block_heads: int, splits: int) -> Cut:
    """Clip the block sizes to the call and round them to what the copies and mass sums need."""
    role = role_of(spec, shapes)
    kv_heads, groups = shapes.num_kv_heads, shapes.num_heads // shapes.num_kv_heads
    heads = next(h for h in range(min(block_heads, kv_heads), 0, -1) if kv_heads % h == 0)
    stored = round_up(shapes.num_keys, LANES if shapes.scaled else PACKED)
    stored = max(stored, spec.tile) if role == "sparse" else stored
    pieces = piece = 1
    consecutive = shapes.page or stored  # keys that one copy can bring
    if role != "sparse":
        unit = next(u for u in (128, 64, 32, 16) if consecutive % u == 0)  # no unit straddles two pages
    if role == "dense":
        block_s = round_up(min(block_s, stored), unit)
    elif role == "score":  # a block is 2^n tiles, at most 128, so that its sums never straddle two banks
        tiles = max(min(block_s, stored) // spec.tile, 1)
        block_s = max(min(1 << tiles.bit_length() - 1, LANES) * spec.tile, unit)
    else:
        # If keys or scales lie along lanes, a copy moves 128 of them, so small tiles are read in units of several.
        unit = LANES if (shapes.scaled or shapes.head_dim % LANES) and consecutive % LANES == 0 else spec.tile
        per_block = max(min(block_s // unit, shapes.capacity), 1)
        block_s = per_block * unit
        piece = round_up(min(shapes.capacity, max(PIECE_IDS // heads, 1)), per_block)
        pieces = ceil_div(shapes.capacity, piece)
    return Cut(
        role=role,
        spec=spec,
        batch=shapes.batch,
        num_keys=shapes.num_keys,
        stored=stored,
        kv_heads=kv_heads,
        groups=groups,
        head_dim=shapes.head_dim,
        heads=heads,
        rows=round_up(groups, SUBLANES),
        block_s=block_s,
        unit=unit,
        splits=1 if role == "score" else splits,
        pieces=pieces,
        piece=piece,
        lanes=shapes.head_dim % LANES != 0 and stored % LANES == 0 and unit == LANES,
        scaled=shapes.scaled,
        exact=shapes.dtype == "float32",
        page=shapes.page,
    )


class Ranges(NamedTuple):
    """Run-time scalars of a call: lo and hi are [B * K], per sequence and KV head, the rest [chains * steps]."""

    lo: Int32[Array, "..."]  # the row sees keys (sparse: listed keys) [lo, hi)
    hi: Int32[Array, "..."]
    first: Int32[Array, "..."]  # first block of the step
    count: Int32[Array, "..."]  # blocks of the step
    before: Int32[Array, "..."]  # blocks in the chain's earlier steps; its parity is the buffer of the first block
    whole_from: Int32[Array, "..."]  # blocks [whole_from, whole_to) are fully visible for every head
    whole_to: Int32[Array, "..."]


class Lists(NamedTuple):
    """For each sequence and KV head: ascending ids of the units to read, their number, and each unit's mask of tiles.

    `bits` is None if a unit is one tile.
    """

    units: Int32[Array, "B K C"]
    count: Int32[Array, "B K"]
    bits: Int32[Array, "B K C"] | None


def list_units(cut: Cut, selection: Selection) -> Lists:
    """Convert a decode selection into lists of units. Clipped ids may repeat: only a tile's first one sets its bit."""
    tiles, count = selection.tiles[:, :, 0], selection.count[:, :, 0]
    per_unit = cut.tiles_per_unit
    tiles = jnp.clip(tiles, 0, (cut.stored - 1) // cut.spec.tile)
    if per_unit == 1:
        return Lists(tiles, count, None)
    listed = jnp.arange(tiles.shape[-1], dtype=jnp.int32) < count[..., None]
    unit = tiles // per_unit
    before = jnp.pad(tiles, [(0, 0), (0, 0), (1, 0)], constant_values=-per_unit)[..., :-1]
    fresh, new = listed & (unit != before // per_unit), listed & (tiles != before)
    entry = jnp.where(listed, jnp.cumsum(fresh, axis=-1, dtype=jnp.int32) - 1, tiles.shape[-1])
    sequence, head = (jax.lax.broadcasted_iota(jnp.int32, tiles.shape, d) for d in (0, 1))
    empty = jnp.zeros_like(tiles)
    units = empty.at[sequence, head, entry].max(unit, mode="drop")
    bits = empty.at[sequence, head, entry].add(jnp.where(new, 1 << tiles % per_unit, 0), mode="drop")
    return Lists(units, fresh.sum(-1, dtype=jnp.int32), bits & (1 << per_unit) - 1)


def find_ranges(cut: Cut, positions: Positions, lists: Lists | None) -> Ranges:
    """Compute the range that each row sees (in listed keys if there are lists) and the blocks of every grid step."""
    visible = decode_range(cut.spec, positions, cut.num_keys)
    lo, hi = (jnp.broadcast_to(x[:, None], (cut.batch, cut.kv_heads)) for x in visible)
    if lists is not None:
        units, count, _ = lists
        listed = jnp.arange(units.shape[-1], dtype=jnp.int32) < count[..., None]
        lo, hi = (
            jnp.where(listed, jnp.clip(x[..., None] - units * cut.unit, 0, cut.unit), 0).sum(-1, dtype=jnp.int32)
            for x in (lo, hi)
        )
    lo, hi = jnp.where(hi > lo, lo, 0), jnp.where(hi > lo, hi, 0)
    by_group = (cut.batch, cut.kv_heads // cut.heads, cut.heads)
    # The heads of a group share blocks and copies: from the first key that any of them needs to the last.
    start = jnp.where(hi > lo, lo, cut.stored).reshape(by_group).min(-1).T // cut.block_s
    stop = (hi.reshape(by_group).max(-1).T + cut.block_s - 1) // cut.block_s  # [groups of heads, B]
    size = (jnp.maximum(stop - start, 0) + cut.splits - 1) // cut.splits
    split = jnp.arange(cut.splits, dtype=jnp.int32)[:, None]
    piece = jnp.arange(cut.pieces, dtype=jnp.int32) * (cut.piece * cut.unit // cut.block_s)
    begin = (start[:, None] + split * size[:, None])[..., None]  # [groups of heads, splits, B, 1]
    end = jnp.minimum(begin + size[:, None, :, None], stop[:, None, :, None])
    if cut.pieces > 1:
        begin, end = jnp.maximum(begin, piece), jnp.minimum(end, piece + cut.piece * cut.unit // cut.block_s)
    count = jnp.maximum(end - begin, 0).reshape(cut.chains, cut.steps)
    before = jnp.cumsum(count, axis=1, dtype=jnp.int32) - count
    # A block is whole only if all heads of the group see all of it: it then takes one wait, and no values are zeroed.
    whole_from = (lo.reshape(by_group).max(-1).T + cut.block_s - 1) // cut.block_s
    whole_to = hi.reshape(by_group).min(-1).T // cut.block_s
    whole_from, whole_to = (
        jnp.broadcast_to(x[:, None, :, None], (*x.shape[:1], cut.splits, cut.batch, cut.pieces))
        for x in (whole_from, whole_to)
    )
    return Ranges(*(x.reshape(-1) for x in (lo, hi, begin, count, before, whole_from, whole_to)))


def lay_out(cut: Cut, kv: KeyValues) -> tuple[Array, ...]:
    """Return K, V and any scales as the kernel takes them (`Stream`)."""
    if cut.page is None:
        pad = [(0, 0), (0, 0), (0, cut.stored - cut.num_keys), (0, 0)]  # none if S is a multiple of 16 (int8: 128)
        scales = ()
        if cut.scaled:
            scales = (jnp.pad(kv.scales, [*pad[:2], pad[3], pad[2]]).reshape(-1, 2, cut.stored),)
        k, v = (jnp.pad(x, pad).reshape(-1, cut.stored, cut.head_dim) for x in (kv.k, kv.v))
    else:
        k, v, scales = kv.k, kv.v, (kv.scales,) * cut.scaled
        if cut.role == "sparse":
            k, v, *scales = (x.reshape(-1, *x.shape[2:]) for x in (k, v, *scales))
    k, v = (jnp.swapaxes(x, -2, -1) if cut.lanes else x for x in (k, v))
    if cut.by_unit:
        k, v = (x.reshape(-1, cut.unit, cut.head_dim) for x in (k, v))
    return k, v, *scales


def stream_table(table: Int32[Array, "B J"]) -> Int32[Array, "1 B 1 2J"]:
    """Return each sequence's page table, followed by that of the next sequence."""
    return jnp.concatenate([table, jnp.roll(table, -1, axis=0)], axis=-1)[None, :, None]


def stream_lists(cut: Cut, lists: Lists, table: Int32[Array, "B J"] | None = None) -> Array:
    """Return list entries [groups of heads, steps, 1, 2 * heads * piece]: each step's own piece, then the next step's.

    An entry is a unit's id. If units hold several tiles, it is id * 256 plus the mask of listed tiles. If cut.by_unit,
    it is the unit's index in K viewed as [units, tile, H]. With a page table, it is the unit's index in the pool.
    """
    units = lists.units
    if table is not None:
        per_page, head = cut.page // cut.unit, jnp.arange(cut.kv_heads, dtype=jnp.int32)[:, None]
        page = jnp.take_along_axis(table[:, None], units // per_page, axis=2, mode="clip")
        units = (page * cut.kv_heads + head) * per_page + units % per_page
    tiles = units if cut.tiles_per_unit == 1 else units * 256 + lists.bits  # a unit has at most 8 tiles: 128 / 16
    if cut.by_unit and table is None:
        head = jnp.arange(cut.batch * cut.kv_heads, dtype=jnp.int32).reshape(cut.batch, cut.kv_heads, 1)
        tiles = tiles + head * (cut.stored // cut.unit)
    tiles = jnp.pad(tiles, [(0, 0), (0, 0), (0, cut.pieces * cut.piece - tiles.shape[-1])])
    tiles = tiles.reshape(cut.batch, -1, cut.heads, cut.pieces, cut.piece)
    tiles = tiles.transpose(1, 0, 3, 2, 4).reshape(-1, cut.steps, cut.heads * cut.piece)
    # A step copies the first block of the next step, for which it needs that step's ids. The last step copies none.
    return jnp.concatenate([tiles, jnp.roll(tiles, -1, axis=1)], axis=-1)[:, :, None]


class Stream(NamedTuple):
    """References that the copies of blocks use: ranges and ids of tiles or pages, K and V in HBM, and the buffers.

    A pool of pages is [P * K, page, H] in the sparse role, else [P, K, page, H]. The last two axes of K, V and their
    buffers are swapped if cut.lanes. Scales have [2, S] or [2, page] in their place.
    """

    ranges: Ranges
    ids: Any  # in SMEM, entries of this step and the next: see `stream_lists` (sparse) or `stream_table` (cut.table)
    k: Any  # in HBM: [B * K, S, H], or [units, tile, H] if cut.by_unit; v likewise, see below
    v: Any
    k_block: Any  # two buffers [2, heads, block_s, H]; v_block likewise
    v_block: Any
    copied: Any  # semaphores [2, 2], or [2, 3] if int8: buffer, then K, V or their scales
    scales: Any = None  # in HBM; int8 only
    scale_block: Any = None  # [2, heads, 2, block_s]

    def arrays(self, cut: Cut) -> list[tuple[Any, Any, bool]]:
        """Return each copied array as (source, its two buffers, whether keys are the last axis)."""
        found = [(self.k, self.k_block, cut.lanes), (self.v, self.v_block, cut.lanes)]
        return found if self.scales is None else [*found, (self.scales, self.scale_block, True)]


def span(stream: Stream, cut: Cut, step, head, block) -> tuple:
    """Return the range [lo, hi) of keys of a head's block that the query row sees, relative to the block's start."""
    index = first_row(cut, step) + head
    lo, hi = (x[index] - block * cut.block_s for x in (stream.ranges.lo, stream.ranges.hi))
    return jnp.clip(lo, 0, cut.block_s), jnp.clip(hi, 0, cut.block_s)


def first_row(cut: Cut, step):
    return step // cut.pieces * cut.kv_heads + first_head(cut)


def first_head(cut: Cut):
    return pl.program_id(0) // cut.splits * cut.heads


def first_entry(cut: Cut, step, head, block):
    # `stream.ids` holds the entries of this grid step, then those of the next, whose first block this step fetches.
    following = step - pl.program_id(1)
    return (following * cut.heads + head) * cut.piece + block * (cut.block_s // cut.unit) % cut.piece


def listed_keys(stream: Stream, cut: Cut, step, head, block) -> Array | bool:
    """Mask the keys [1, block_s] of a head's block that lie in listed tiles; True if a unit is one tile: all do."""
    if cut.tiles_per_unit == 1:
        return True
    tile = jax.lax.broadcasted_iota(jnp.int32, (1, cut.unit), 1) // cut.spec.tile
    first = first_entry(cut, step, head, block)
    bits = [stream.ids[0, 0, 0, first + i] >> tile for i in range(cut.block_s // cut.unit)]
    return (jnp.concatenate(bits, axis=1) & 1) == 1


def is_whole(stream: Stream, cut: Cut, step, block):
    index = pl.program_id(0) * cut.steps + step
    return (block >= stream.ranges.whole_from[index]) & (block < stream.ranges.whole_to[index])


def part(lanes: bool, *index) -> tuple:
    """Return (*index[:-1], keys, all of H), or (*index[:-1], all of H, keys) if `lanes`, with keys = index[-1]."""
    return (*index[:-1], slice(None), index[-1]) if lanes else index


def copies(stream: Stream, cut: Cut, source: tuple, target: tuple, inner: tuple = ()) -> list:
    """Build the copies of K, V and any scales from index `source` in HBM to index `target`; target[0] is the buffer.

    The last entry of each index selects keys. Constant offsets belong in `inner`, an index into the part that `target`
    selects, where they cost no scalar instructions.
    """
    found = []
    for i, (x, y, lanes) in enumerate(stream.arrays(cut)):
        into = y.at[part(lanes, *target)]
        into = into.at[part(lanes, *inner)] if inner else into
        found.append(pltpu.make_async_copy(x.at[part(lanes, *source)], into, stream.copied.at[target[0], i]))
    return found


def await_block(stream: Stream, cut: Cut, slot) -> None:
    """Wait for a whole block: semaphores count bytes, so one wait covers all of its copies."""
    for i, (_, blocks, _) in enumerate(stream.arrays(cut)):
        block = blocks.at[slot]
        pltpu.make_async_copy(block, block, stream.copied.at[slot, i]).wait()


def each(act: str, copies: list) -> None:
    for copy in copies:
        getattr(copy, act)()


def move_keys(stream: Stream, cut: Cut, step, block, slot, act: str, name: str) -> None:
    """Start or await (`act`) the copies of a block of consecutive keys; `name` prefixes the named scopes."""
    heads = pl.ds(first_head(cut) if cut.table else first_row(cut, step), cut.heads)
    begin = pl.multiple_of(block * cut.block_s, cut.unit)
    whole = is_whole(stream, cut, step, block)

    def source(at):
        if not cut.table:
            return heads, pl.ds(begin + at, cut.unit)
        entry, offset = pages.find(begin + at, cut.page, cut.unit)
        entry = (step - pl.program_id(1)) * cut.table + entry  # `step` is this grid step or the next
        return stream.ids[0, 0, 0, entry], heads, pl.ds(offset, cut.unit)

    def run(n, _):  # straight-line code, so that the copies' addresses share scalar instructions
        with jax.named_scope(f"{name}_pages"):
            first = pl.multiple_of(n * (cut.tiles_at_once * cut.unit), cut.unit)
            into = pl.ds(first, cut.tiles_at_once * cut.unit)
            for i in range(cut.tiles_at_once):
                at = i * cut.unit
                target = (slot, slice(None), into)
                inner = (slice(None), pl.ds(at, cut.unit))
                each(act, copies(stream, cut, source(first + at), target, inner))

    @pl.when(whole)
    def _():
        with jax.named_scope(f"{name}_whole"):
            if act == "start" and cut.table:
                jax.lax.fori_loop(0, cut.block_s // cut.unit // cut.tiles_at_once, run, None)
            elif act == "start":
                every = (slot, slice(None), slice(None))
                each(act, copies(stream, cut, (heads, pl.ds(begin, cut.block_s)), every))
            else:
                await_block(stream, cut, slot)

    @pl.when(~whole)
    def _():
        with jax.named_scope(f"{name}_part"):
            lo, hi = span(stream, cut, step, 0, block)  # head 0's: without lists, all heads see the same range

            def unit(i, _):
                with jax.named_scope(f"{name}_unit"):
                    at = pl.multiple_of(i * cut.unit, cut.unit)
                    each(act, copies(stream, cut, source(at), (slot, slice(None), pl.ds(at, cut.unit))))

            jax.lax.fori_loop(lo // cut.unit, (hi + cut.unit - 1) // cut.unit, unit, None)


def move_tiles(stream: Stream, cut: Cut, step, block, slot, act: str, name: str) -> None:
    """Start or await (`act`) the copies of each head's listed tiles in a block; `name` prefixes the named scopes."""
    row, runs = first_row(cut, step), cut.block_s // cut.unit // cut.tiles_at_once
    tail, last = cut.stored % cut.unit, cut.stored // cut.unit  # keys and id of a tile that the cache's end cuts
    whole = is_whole(stream, cut, step, block)

    def source(head, found, size=cut.unit):
        if cut.by_unit:
            return (found,)
        id_ = found if cut.tiles_per_unit == 1 else found >> 8
        if cut.page is not None:
            page, offset = pages.find(id_ * cut.unit, cut.page, cut.unit)
            return page, pl.ds(offset, size)
        return (row + head, pl.ds(pl.multiple_of(id_ * cut.unit, cut.unit), size))

    def run(head, first):  # straight-line code, so that the copies' addresses share scalar instructions
        at = first_entry(cut, step, head, block) + first
        into = pl.ds(pl.multiple_of(first * cut.unit, cut.unit), cut.tiles_at_once * cut.unit)
        for i in range(cut.tiles_at_once):
            one = source(head, stream.ids[0, 0, 0, at + i])
            each(act, copies(stream, cut, one, (slot, head, into), (pl.ds(i * cut.unit, cut.unit),)))

    def whole_run(n, _):
        with jax.named_scope(f"{name}_tiles"):
            run(n // runs, n % runs * cut.tiles_at_once)

    @pl.when(whole)
    def _():
        with jax.named_scope(f"{name}_whole"):
            if act == "start":
                jax.lax.fori_loop(0, cut.heads * runs, whole_run, None)
            else:
                await_block(stream, cut, slot)

    def single(tile, head):
        with jax.named_scope(f"{name}_tile"):
            found = stream.ids[0, 0, 0, first_entry(cut, step, head, block) + tile]

            def move(size):
                into = (slot, head, pl.ds(pl.multiple_of(tile * cut.unit, cut.unit), size))
                each(act, copies(stream, cut, source(head, found, size), into))

            if tail == 0:  # known when the kernel is traced: most caches need no branch
                move(cut.unit)
            else:  # the cache ends inside its last tile
                pl.when(found < last)(functools.partial(move, cut.unit))
                pl.when(found >= last)(functools.partial(move, tail))
        return head

    def head_tiles(head, _):
        with jax.named_scope(f"{name}_head"):
            lo, hi = span(stream, cut, step, head, block)
            begin, end = lo // cut.unit, (hi + cut.unit - 1) // cut.unit
            some = jnp.maximum(end - begin - (tail > 0), 0) // cut.tiles_at_once if act == "start" else 0

            def part_run(n, _):
                with jax.named_scope(f"{name}_run"):
                    run(head, begin + n * cut.tiles_at_once)

            jax.lax.fori_loop(0, some, part_run, None)
            jax.lax.fori_loop(begin + some * cut.tiles_at_once, end, single, head)

    @pl.when(~whole)
    def _():
        with jax.named_scope(f"{name}_part"):
            jax.lax.fori_loop(0, cut.heads, head_tiles, None)


def blank_values(stream: Stream, cut: Cut, step, block, slot) -> None:
    """Zero the values of keys that the row does not see: their weight is 0, but they may be NaN, and 0 * NaN is NaN."""

    def head_rows(head, _):
        with jax.named_scope("blank_head"):
            lo, hi = span(stream, cut, step, head, block)
            start = (lo + cut.unit - 1) // cut.unit
            stop = jnp.maximum(hi // cut.unit, start)  # units [start, stop) are seen in full

            def unit(i, _):
                with jax.named_scope("blank_unit"):
                    at = pl.multiple_of(jnp.where(i < start, i, i + stop - start) * cut.unit, cut.unit)
                    index = part(cut.lanes, slot, head, pl.ds(at, cut.unit))
                    v = stream.v_block[index]
                    key = at + jax.lax.broadcasted_iota(jnp.int32, v.shape, 1 if cut.lanes else 0)
                    seen = jnp.where((key >= lo) & (key < hi), v.astype(jnp.float32), 0.0)
                    stream.v_block[index] = seen.astype(v.dtype)

            jax.lax.fori_loop(0, cut.block_s // cut.unit - (stop - start), unit, None)

    with jax.named_scope("blank"):
        jax.lax.fori_loop(0, cut.heads, head_rows, None)


def merge(out: Array, lse: Array) -> tuple[Array, Array]:
    """Merge results [P, ...] over P disjoint sets of keys: average `out` with weights exp(lse), and merge lse."""
    if out.shape[0] == 1:
        return out[0], lse[0]
    top = jnp.where(jnp.isneginf(lse).all(0), 0.0, lse.max(0))  # -inf - -inf would be NaN
    weight = jnp.exp(lse - top)
    total = weight.sum(0)
    safe = jnp.where(total > 0, total, 1.0)
    return (weight[..., None] * out).sum(0) / safe[..., None], jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)


def count_blocks(cut: Cut, lo: int, hi: int) -> Counter[str]:
    """Count runs of the kernel's named scopes for copies and blocks in a call where every row sees [lo, hi)."""
    parts = ("tiles", "head", "run", "tile") if cut.role == "sparse" else ("unit", "pages") if cut.page else ("unit",)
    scopes = [f"{name}_{part}" for name in ("lead", "start", "wait") for part in ("whole", "part", *parts)]
    blanks = () if cut.scaled else ("blank", "blank_head", "blank_unit")
    counts = Counter(dict.fromkeys([*scopes, *blanks], 0))  # list every scope, even those that run 0 times
    first, last = lo // cut.block_s, ceil_div(hi, cut.block_s)
    size = ceil_div(last - first, cut.splits)
    for split in range(cut.splits):
        begin = first + split * size
        for block in range(begin, min(begin + size, last)):
            low, high = (min(max(x - block * cut.block_s, 0), cut.block_s) for x in (lo, hi))
            units, whole = ceil_div(high, cut.unit) - low // cut.unit, (low, high) == (0, cut.block_s)
            cut_units = cut.block_s // cut.unit - max(high // cut.unit - ceil_div(low, cut.unit), 0)
            lead = int(block == begin)  # the first block of a chain is not fetched ahead
            counts.update(block=cut.batch, prefetch=cut.batch - lead, lead_in=lead, units=cut.batch * units)
            for name, times in (("start", cut.batch - lead), ("lead", lead), ("wait", cut.batch)):
                counts[f"{name}_whole" if whole else f"{name}_part"] += times
                runs_each = cut.block_s // cut.unit // cut.tiles_at_once
                if whole and cut.role == "sparse" and name != "wait":
                    counts[f"{name}_tiles"] += times * cut.heads * runs_each
                elif whole and cut.table and name != "wait":
                    counts[f"{name}_pages"] += times * runs_each
                elif not whole and cut.role == "sparse":
                    runs = 0 if name == "wait" else max(units - (cut.stored % cut.unit > 0), 0) // cut.tiles_at_once
                    singles = units - runs * cut.tiles_at_once
                    found = {"head": 1, "run": runs, "tile": singles}
                    counts.update({f"{name}_{part}": times * cut.heads * n for part, n in found.items()})
                elif not whole:
                    counts[f"{name}_unit"] += times * units
            if not whole and blanks:
                heads = cut.batch * cut.heads
                counts.update(blank=cut.batch, blank_head=heads, blank_unit=heads * cut_units)
    return Counter({name: times * (cut.kv_heads // cut.heads) for name, times in counts.items()})


def count_scopes(cut: Cut, lo: int, hi: int, width: int) -> dict[str, float]:
    """Return all counts of a call: those of `count_blocks`, scopes outside of blocks, and bytes moved ("hbm_bytes").

    Lanes that pad H count, because K and V store them. `width` is bytes per element.
    """
    counts = count_blocks(cut, lo, hi)
    sequences = cut.chains * cut.batch
    lanes = cut.head_dim if cut.lanes else round_up(cut.head_dim, LANES)
    moved = 2 * counts.pop("units") * cut.heads * cut.unit * (lanes + 2 if cut.scaled else lanes * width)
    moved += sequences * cut.heads * cut.rows * 4 * (2 * lanes + LANES)  # q, out and lse
    counts.update(step=cut.chains * cut.steps, begin=sequences, finish=sequences)
    if cut.role == "score":
        banks = ceil_div(ceil_div(hi, cut.spec.tile), LANES) - lo // cut.spec.tile // LANES
        counts.update(one_hot=cut.chains, clear=sequences * cut.banks, mass=sequences * banks)
        moved += sequences * cut.heads * cut.banks * LANES * 4
    if cut.role == "sparse":
        moved += cut.chains // cut.splits * cut.steps * 2 * cut.heads * cut.piece * 4
    moved += cut.chains * cut.steps * 2 * cut.table * 4
    return {**counts, "hbm_bytes": moved}
