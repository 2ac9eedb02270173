"""How decode kernels bring blocks of the cache on chip: copies of K and V into one of two buffers, and what they leave.

Blocks that every row sees whole are copied in one piece (keys) or in straight-line runs of tiles, and awaited at once;
blocks that the end of a range cuts, unit by unit, so that no copy goes past what is needed by more than a unit.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.decode_blocks import Cut, Ranges


class Stream(NamedTuple):
    """Where blocks come from and go to."""

    ranges: Ranges
    ids: Any  # [1, 1, 1, 2 * heads * piece] in SMEM: this step's and the next one's; sparse only
    k: Any  # [B * K, S, H] in HBM, or [B * K, H, S]; as v
    v: Any
    k_block: Any  # [2, heads, block_s, H] or [2, heads, H, block_s], as v_block
    v_block: Any
    copied: Any  # a semaphore for each buffer of K and of V


def span(stream: Stream, cut: Cut, step, head, block) -> tuple:
    """Which rows [lo, hi) of a head's block the query row sees."""
    index = first_row(cut, step) + head
    lo, hi = (x[index] - block * cut.block_s for x in (stream.ranges.lo, stream.ranges.hi))
    return jnp.clip(lo, 0, cut.block_s), jnp.clip(hi, 0, cut.block_s)


def first_row(cut: Cut, step):
    """Of K and V as [B * K, S, H]: the step's first head."""
    return step // cut.pieces * cut.kv_heads + pl.program_id(0) // cut.splits * cut.heads


def entry(stream: Stream, cut: Cut, step, head, block, i):
    """Entry i of a head's list in a block: a unit's id; of several tiles, times 256 and a bit for each listed one."""
    listed = (step - pl.program_id(1)) * cut.heads * cut.piece + block * (cut.block_s // cut.unit) % cut.piece
    return stream.ids[0, 0, 0, listed + head * cut.piece + i]


def listed_keys(stream: Stream, cut: Cut, step, head, block) -> Array | bool:
    """Which keys of a head's block [1, block_s] lie in listed tiles, all if a unit is one tile."""
    if cut.tiles_per_unit == 1:
        return True
    tile = jax.lax.broadcasted_iota(jnp.int32, (1, cut.unit), 1) // cut.spec.tile
    bits = [entry(stream, cut, step, head, block, i) >> tile for i in range(cut.block_s // cut.unit)]
    return (jnp.concatenate(bits, axis=1) & 1) == 1


def is_whole(stream: Stream, cut: Cut, step, block):
    """Whether every head's row sees all of the block."""
    index = pl.program_id(0) * cut.steps + step
    return (block >= stream.ranges.whole_from[index]) & (block < stream.ranges.whole_to[index])


def part(cut: Cut, heads, keys) -> tuple:
    """The index of some keys of some heads, keys in rows or in lanes."""
    return (heads, slice(None), keys) if cut.lanes else (heads, keys)


def copies(stream: Stream, cut: Cut, source: tuple, slot, target: tuple) -> list:
    """The copies of some heads' keys (source and target: heads, keys) of K and V from HBM into a buffer."""
    source, target = part(cut, *source), (slot, *part(cut, *target))
    pairs = ((stream.k, stream.k_block, 0), (stream.v, stream.v_block, 1))
    return [pltpu.make_async_copy(x.at[source], y.at[target], stream.copied.at[slot, i]) for x, y, i in pairs]


def each(act: str, copies: list) -> None:
    """Start or await copies. A wait counts bytes, so one may stand for many starts."""
    for copy in copies:
        getattr(copy, act)()


def move_keys(stream: Stream, cut: Cut, step, block, slot, act: str, name: str) -> None:
    """Start or await the copies of a block of consecutive keys."""
    heads = pl.ds(first_row(cut, step), cut.heads)
    begin = pl.multiple_of(block * cut.block_s, cut.unit)
    whole = is_whole(stream, cut, step, block)

    @pl.when(whole)
    def _():
        with jax.named_scope(f"{name}_whole"):
            each(act, copies(stream, cut, (heads, pl.ds(begin, cut.block_s)), slot, (slice(None), slice(None))))

    @pl.when(~whole)
    def _():
        with jax.named_scope(f"{name}_part"):
            lo, hi = span(stream, cut, step, 0, block)

            def unit(i, _):
                with jax.named_scope(f"{name}_unit"):
                    at = pl.multiple_of(i * cut.unit, cut.unit)
                    source, target = pl.ds(begin + at, cut.unit), pl.ds(at, cut.unit)
                    each(act, copies(stream, cut, (heads, source), slot, (slice(None), target)))

            jax.lax.fori_loop(lo // cut.unit, (hi + cut.unit - 1) // cut.unit, unit, None)


def move_tiles(stream: Stream, cut: Cut, step, block, slot, act: str, name: str) -> None:
    """Start or await the copies of each head's listed tiles of a block."""
    row, per_block = first_row(cut, step), cut.block_s // cut.unit
    at_once = cut.tiles_at_once
    tail, last = cut.stored % cut.unit, cut.stored // cut.unit
    whole = is_whole(stream, cut, step, block)

    def unit_id(head, i):
        found = entry(stream, cut, step, head, block, i)
        return found if cut.tiles_per_unit == 1 else found >> 8

    def move(head, tile, id_, size=cut.unit):
        source = pl.ds(pl.multiple_of(id_ * cut.unit, cut.unit), size)
        target = pl.ds(pl.multiple_of(tile * cut.unit, cut.unit), size)
        each(act, copies(stream, cut, (row + head, source), slot, (head, target)))

    def some(n, _):
        with jax.named_scope(f"{name}_tiles"):
            head, first = n // (per_block // at_once), n % (per_block // at_once) * at_once
            for i in range(at_once):  # straight-line scalar code: addresses share their parts
                move(head, first + i, unit_id(head, first + i))

    @pl.when(whole)
    def _():
        with jax.named_scope(f"{name}_whole"):
            if act == "start":
                jax.lax.fori_loop(0, cut.heads * (per_block // at_once), some, None)
            else:
                whole_block = (slice(None), slice(None))
                each(act, copies(stream, cut, (pl.ds(0, cut.heads), pl.ds(0, cut.block_s)), slot, whole_block))

    def one(tile, head):
        with jax.named_scope(f"{name}_tile"):
            id_ = unit_id(head, tile)
            if tail == 0:
                move(head, tile, id_)
            else:  # the cache ends inside its last tile
                pl.when(id_ < last)(functools.partial(move, head, tile, id_))
                pl.when(id_ >= last)(functools.partial(move, head, tile, id_, tail))
        return head

    def head_tiles(head, _):
        with jax.named_scope(f"{name}_head"):
            lo, hi = span(stream, cut, step, head, block)
            jax.lax.fori_loop(lo // cut.unit, (hi + cut.unit - 1) // cut.unit, one, head)

    @pl.when(~whole)
    def _():
        with jax.named_scope(f"{name}_part"):
            jax.lax.fori_loop(0, cut.heads, head_tiles, None)


def blank_values(stream: Stream, cut: Cut, step, block, slot) -> None:
    """Zero the values that the row does not see: whatever lies there, its weight is 0 and 0 * NaN is NaN."""

    def head_rows(head, _):
        with jax.named_scope("blank_head"):
            lo, hi = span(stream, cut, step, head, block)
            start = (lo + cut.unit - 1) // cut.unit
            stop = jnp.maximum(hi // cut.unit, start)  # units [start, stop) are seen whole

            def unit(i, _):
                with jax.named_scope("blank_unit"):
                    at = pl.multiple_of(jnp.where(i < start, i, i + stop - start) * cut.unit, cut.unit)
                    index = (slot, *part(cut, head, pl.ds(at, cut.unit)))
                    v = stream.v_block[index]
                    key = at + jax.lax.broadcasted_iota(jnp.int32, v.shape, 1 if cut.lanes else 0)
                    seen = jnp.where((key >= lo) & (key < hi), v.astype(jnp.float32), 0.0)
                    stream.v_block[index] = seen.astype(v.dtype)

            jax.lax.fori_loop(0, cut.block_s // cut.unit - (stop - start), unit, None)

    with jax.named_scope("blank"):
        jax.lax.fori_loop(0, cut.heads, head_rows, None)
