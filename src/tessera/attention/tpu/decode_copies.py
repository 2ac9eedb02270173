"""Copies of K and V blocks from HBM into one of two on-chip buffers, for the TPU decode kernel.

A *whole* block is one that every row sees in full. It takes one copy if its keys are consecutive, or straight-line runs
of copies if it consists of pages or listed tiles; one wait covers all its copies. Any other block is copied in *units*,
the smallest copies, so that less than one unit is copied needlessly at each end of the visible range. Values outside of
that range are then set to zero.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.tpu import pages
from tessera.attention.tpu.decode_blocks import Cut, Ranges


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
    """Return the index along B * K of the step's first KV head."""
    return step // cut.pieces * cut.kv_heads + first_head(cut)


def first_head(cut: Cut):
    """Return the index along K of the step's first KV head."""
    return pl.program_id(0) // cut.splits * cut.heads


def first_entry(cut: Cut, step, head, block):
    """Return the index in `stream.ids` of a head's first entry for a block; `step` is this grid step or the next."""
    following = step - pl.program_id(1)
    return (following * cut.heads + head) * cut.piece + block * (cut.block_s // cut.unit) % cut.piece


def listed_keys(stream: Stream, cut: Cut, step, head, block) -> Array | bool:
    """Return a mask [1, block_s] of the keys of a head's block that lie in listed tiles.

    If a unit is one tile, only listed tiles were copied, so every key counts: the mask is then a plain True.
    """
    if cut.tiles_per_unit == 1:
        return True
    tile = jax.lax.broadcasted_iota(jnp.int32, (1, cut.unit), 1) // cut.spec.tile
    first = first_entry(cut, step, head, block)
    bits = [stream.ids[0, 0, 0, first + i] >> tile for i in range(cut.block_s // cut.unit)]
    return (jnp.concatenate(bits, axis=1) & 1) == 1


def is_whole(stream: Stream, cut: Cut, step, block):
    """Return whether the rows of all heads see every key of the block."""
    index = pl.program_id(0) * cut.steps + step
    return (block >= stream.ranges.whole_from[index]) & (block < stream.ranges.whole_to[index])


def part(lanes: bool, *index) -> tuple:
    """Return (*index[:-1], keys, all of H), or (*index[:-1], all of H, keys) if `lanes`, with keys = index[-1]."""
    return (*index[:-1], slice(None), index[-1]) if lanes else index


def copies(stream: Stream, cut: Cut, source: tuple, target: tuple, inner: tuple = ()) -> list:
    """Build the copies of K, V and any scales from index `source` in HBM to index `target`; target[0] is the buffer.

    The last entry of each index selects keys. If given, `inner` indexes the part of the buffer that `target` selects.
    Constant offsets belong in `inner`, where they cost no scalar instructions.
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
    """Start the copies or wait for them: `act` is "start" or "wait"."""
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
            lo, hi = span(stream, cut, step, 0, block)

            def unit(i, _):
                with jax.named_scope(f"{name}_unit"):
                    at = pl.multiple_of(i * cut.unit, cut.unit)
                    each(act, copies(stream, cut, source(at), (slot, slice(None), pl.ds(at, cut.unit))))

            jax.lax.fori_loop(lo // cut.unit, (hi + cut.unit - 1) // cut.unit, unit, None)


def move_tiles(stream: Stream, cut: Cut, step, block, slot, act: str, name: str) -> None:
    """Start or await (`act`) the copies of each head's listed tiles in a block; `name` prefixes the named scopes."""
    row, runs = first_row(cut, step), cut.block_s // cut.unit // cut.tiles_at_once
    tail, last = cut.stored % cut.unit, cut.stored // cut.unit
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

            if tail == 0:
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
