"""Prefill attention for Hopper: the dense role, and the score role, which also computes tile masses in the same pass.

A thread block computes 128 query rows of one head against all keys that they see. Each of two compute warpgroups holds
64 rows. A third warpgroup fetches K and V by TMA into a ring of `stages` buffers of block_s keys each; the compute
warpgroups hand a buffer (stage) back after both have read it. Heads are the grid's fastest axis, so that the query
heads of a KV head run at the same time and read the same K and V from L2.

A mask can cut blocks only at the ends of the range of keys (the window's edge; the diagonal and kv_len); these blocks
run one after another in `Rows.masked`. The blocks in between run unmasked and overlapped: the tensor core computes the
scores of a block and then the weighted values of the block before, while the vector units turn the scores into weights.
The two warpgroups also take turns, so that the products of one overlap with the exponentials of the other. Values at or
past kv_len may be NaN, and 0 * NaN is NaN, so they are zeroed in shared memory in the one block that can hold any.

The score role writes, per row and tile, m + log2(sum of 2^(y - m) over the tile). Here y are the scores times log2(e),
and m is their running maximum; these sums are needed for the row's sum anyway. Names and docstrings call such base-2
logarithms "bits". `gpu.mass` computes 2^(bits - lse) and sums it over the rows of a query tile. Queries run in chunks,
which limits the memory that one number per row and tile takes. The numbers are float32: in float16, an error in the
last bit would change a mass by 0.1 to 0.3 %, and logits of 1e4 would leave no precision at all.

Int8 keys and values are copied into int8 buffers. The fetching warpgroup multiplies them by their scales and writes the
products, rounded to bfloat16, into the ring (`int8_keys`). Keys may be in pages (`pages`).

Work: 4 H flops per visible (row, key) pair. L2 traffic: 4 H bytes per key and 128 rows, so 128 flops per byte.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Shapes
from tessera.attention.gpu import backward as gpu_backward
from tessera.attention.gpu import int8_keys, warpgroup
from tessera.attention.gpu import mass as gpu_mass
from tessera.attention.gpu.block_ranges import Blocks, key_blocks
from tessera.attention.gpu.int8_keys import ROWS_OF_BYTES, convert_blocks, padded, row_scales
from tessera.attention.gpu.pages import LEAST_KEYS, page_refusal, piece_of, places
from tessera.attention.gpu.warpgroup import HOPPER, ROW, ROWS, SHARED_BYTES, WARPGROUPS
from tessera.attention.gradient import differentiable
from tessera.attention.kernel import family
from tessera.attention.online_softmax import LN_2, LOG2_E
from tessera.core.shapes import ceil_div, round_up

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
BITS = 1 << 27
"""Maximum number of float32 values in `Refs.bits` per launch in the score role: 512 MiB."""
BLOCK_T = WARPGROUPS * ROWS
"""Query rows per thread block."""
LINE = warpgroup.LINE_BYTES // 2
"""16-bit numbers per swizzled line."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes, and what overlaps."""

    block_s: int = 128  # keys per block in shared memory: 64 or 128
    stages: int = 2  # blocks of K, and of V, that shared memory holds
    overlap: bool = True  # whether a block's weights are multiplied by its values while the next block's are computed
    turns: bool = True  # whether the two warpgroups take turns at the tensor core

    def __post_init__(self):
        if self.block_s not in (64, 128):
            raise ValueError(f"block_s={self.block_s} must be 64 or 128")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")


class Refs(NamedTuple):
    """References of the kernel body: arrays in global memory, then shared memory and barriers."""

    q_start: Any  # [B]
    kv_len: Any
    q_len: Any
    skipped: Any  # [1]: the first row of q that this launch computes
    q: Any  # [B, T, N, H]
    k: Any  # [B, K, S, H]
    v: Any
    scales: Any  # [B, K, 2, S]; int8 only, as landing and landed
    pages: Any  # [B, J]; only if k, v and scales are pools of pages, which have pages instead of sequences
    out: Any  # [B, rows, N, H]
    lse: Any  # [B, N, rows], in bits
    bits: Any  # [B, N, units, rows]: log2 of each unit's sum of exponentials; score only
    q_smem: Any  # [2, 64, H]: each compute warpgroup's rows of q and, at the end, of out
    k_smem: Any  # [stages, block_s, H]
    v_smem: Any
    q_full: Any  # barrier [2]: q has landed
    k_full: Any  # barrier [stages]: a block of K has landed
    v_full: Any
    k_free: Any  # barrier [stages]: both compute warpgroups have read a block of K
    v_free: Any
    turn: Any  # barrier on which the compute warpgroups meet to take turns
    zeroed: Any  # barrier: values past kv_len are zeroed
    landing: Any  # [2, block_s, H]: a block of K and one of V as int8
    landed: Any  # barrier [2]: a block of int8 K, of int8 V, has landed


class Cut(NamedTuple):
    """Static sizes of a launch."""

    spec: AttentionSpec
    config: Config
    groups: int  # query heads per KV head
    num_keys: int
    head_dim: int
    dtype: str  # of q
    scaled: bool = False  # keys are int8
    page: int | None = None  # positions per page

    @property
    def piece(self) -> int:
        """Keys per copy: a block, or as much of a block as lies in one page."""
        return piece_of(self.config.block_s, self.page)

    @property
    def unit(self) -> int:
        """Number of keys whose mass is one number: a tile, or as much of a tile as fits in one block."""
        return min(self.spec.tile, self.config.block_s)

    @property
    def units(self) -> int:
        """Number of units (see `unit`) in `bits`: those of all key blocks, rounded up to a multiple of `mass.UNITS`."""
        return round_up(round_up(self.num_keys, self.config.block_s) // self.unit, gpu_mass.UNITS)


class Item(NamedTuple):
    """Work of one thread block: sequence b, query head n, KV head h; first row, in this launch (at) and in q (row)."""

    b: Array
    n: Array
    h: Array
    at: Array
    row: Array


class Rows(NamedTuple):
    """The 64 rows of compute warpgroup `wg`, with methods that update their online-softmax state (m, l, acc)."""

    refs: Refs
    item: Item
    wg: Array
    start: Array  # the first block of the range
    cut: Cut

    def slot(self, c: Array) -> Array:
        return jax.lax.rem(c - self.start, self.cut.config.stages)

    def position(self) -> Array:
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        return row + (self.refs.q_start[self.item.b] + self.item.row + self.wg * ROWS)

    def take_turn(self) -> None:
        """Wait for the other warpgroup: the two alternate between issuing products and computing weights."""
        if self.cut.config.turns:
            plgpu.barrier_arrive(self.refs.turn)
            plgpu.barrier_wait(self.refs.turn)

    def masked(self, c: Array, state: tuple) -> tuple:
        refs, slot = self.refs, self.slot(c)
        plgpu.barrier_wait(refs.k_full.at[slot])
        plgpu.barrier_wait(refs.v_full.at[slot])
        if not self.cut.scaled:  # the fetching warpgroup clears int8 values
            self.clear_values(c)  # before the scores, while registers are free
        s = warpgroup.scores(refs.q_smem.at[self.wg], refs.k_smem.at[slot])
        plgpu.barrier_arrive(refs.k_free.at[slot])  # `scores` has waited for the product: nothing reads K any more
        m, l, alpha, p = self.weigh(s, c, *state[:2], masked=True)  # noqa: E741
        acc = warpgroup.accumulate(
            state[2] * warpgroup.per_row(alpha, state[2]), p.astype(self.cut.dtype), refs.v_smem.at[slot]
        )
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return m, l, acc

    def plain(self, c: Array, state: tuple) -> tuple:
        """Absorb key block c, which every row sees in full: scores, weights and values one after the other."""
        refs, slot = self.refs, self.slot(c)
        plgpu.barrier_wait(refs.k_full.at[slot])
        # The other warpgroup may issue its product once this one is issued, not once it is done.
        s = warpgroup.scores(refs.q_smem.at[self.wg], refs.k_smem.at[slot], self.take_turn)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        m, l, alpha, p = self.weigh(s, c, *state[:2])  # noqa: E741
        acc = state[2] * warpgroup.per_row(alpha, state[2])
        # Keep the compiler from moving this vector work past the turn, where it would delay the other warpgroup.
        acc, m, l, p = jax.lax.optimization_barrier((acc, m, l, p.astype(self.cut.dtype)))  # noqa: E741
        plgpu.barrier_wait(refs.v_full.at[slot])
        self.take_turn()
        acc = warpgroup.accumulate(acc, p, refs.v_smem.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return m, l, acc

    def overlapped(self, first: Array, stop: Array, state: tuple) -> tuple:
        """Absorb key blocks [first, stop), at least one, with overlap (see `Config`); every row sees them in full."""
        refs, wg = self.refs, self.wg
        plgpu.barrier_wait(refs.k_full.at[self.slot(first)])
        s = warpgroup.scores(refs.q_smem.at[wg], refs.k_smem.at[self.slot(first)], self.take_turn)
        m, l, alpha, p = self.weights(s, first, *state[:2])  # noqa: E741
        acc = state[2] * warpgroup.per_row(alpha, state[2])
        self.take_turn()

        def round_of(c, carry):
            (m, l, acc), p = carry  # noqa: E741
            slot, before = self.slot(c), self.slot(c - 1)
            # The values of a block are multiplied one round after its scores, so V is awaited and handed back one block
            # behind K. That is why K and V have barriers of their own.
            plgpu.barrier_wait(refs.k_full.at[slot])
            plgpu.barrier_wait(refs.v_full.at[before])

            def weights(s):
                return self.weights(s, c, m, l)

            acc, (m, l, alpha, p) = warpgroup.both_products(  # noqa: E741
                refs.q_smem.at[wg], refs.k_smem.at[slot], acc, p, refs.v_smem.at[before], weights, self.take_turn
            )
            plgpu.barrier_arrive(refs.v_free.at[before])
            # alpha belongs to block c, whose values are not in acc yet, so it scales acc after the sum of block c - 1.
            acc = acc * warpgroup.per_row(alpha, acc)
            # Round only now: until here the tensor core reads the registers that receive the rounded weights.
            p = jax.lax.optimization_barrier(p.astype(self.cut.dtype))
            self.take_turn()
            return (m, l, acc), p

        carry = (m, l, acc), p.astype(self.cut.dtype)
        (m, l, acc), p = jax.lax.fori_loop(first + 1, stop, round_of, carry)  # noqa: E741
        slot = self.slot(stop - 1)  # the last block's weights still lack their values
        plgpu.barrier_wait(refs.v_full.at[slot])
        acc = warpgroup.accumulate(acc, p, refs.v_smem.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return m, l, acc

    def weights(self, s: Array, c: Array, m: Array, l: Array) -> tuple:  # noqa: E741
        """Hand back the stage of block c's keys, because its scores s are computed; then `weigh` s."""
        plgpu.barrier_arrive(self.refs.k_free.at[self.slot(c)])
        return self.weigh(s, c, m, l)

    def weigh(self, s: Array, c: Array, m: Array, l: Array, masked: bool = False) -> tuple:  # noqa: E741
        """Update the softmax with block c's scores and write any `bits`: return new m and l, acc's factor, weights."""
        cut = self.cut
        hide = functools.partial(self.hide, c=c) if masked else None
        new_m, alpha, p = warpgroup.weigh(s, m, cut.spec, cut.head_dim, hide)
        if not cut.spec.mass:
            return new_m, l * alpha + p.sum(1), alpha, p
        units, item = cut.config.block_s // cut.unit, self.item
        # The row's sum is the sum of the units' sums, so the score role adds no pass over p.
        sums = [p[:, n * cut.unit : (n + 1) * cut.unit].sum(1) for n in range(units)]
        rows = pl.ds(item.at + self.wg * ROWS, ROWS)
        for n, total in enumerate(sums):
            self.refs.bits[item.b, item.n, c * units + n, rows] = new_m + jnp.log(total) * LOG2_E
        return new_m, l * alpha + functools.reduce(jnp.add, sums), alpha, p

    def hide(self, s: Array, c: Array) -> Array:
        """Set the scores [64,X] of block c to -inf where a row does not see a key."""
        start, spec = c * self.cut.config.block_s, self.cut.spec
        key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        stop = self.refs.kv_len[self.item.b]
        if not spec.causal:
            return jnp.where(key < stop - start, s, -jnp.inf)
        row = self.position()
        # One limit per row covers kv_len and the diagonal: one comparison per score instead of two.
        seen = key < warpgroup.per_row(jnp.minimum(stop, row + 1) - start, s)
        if spec.window is not None:
            seen = seen & (key > warpgroup.per_row(row - start - spec.window, s))
        return jnp.where(seen, s, -jnp.inf)

    def clear_values(self, c: Array) -> None:
        """If block c reaches past kv_len, zero its values from there on: warpgroup 0 writes, both wait."""
        refs, size = self.refs, self.cut.config.block_s
        valid = refs.kv_len[self.item.b] - c * size

        @pl.when(valid < jnp.minimum(size, self.cut.num_keys - c * size))  # past S: zeros, or again the last page
        def reaches_past_the_end():
            @pl.when(self.wg == 0)
            def clear():
                for at, line in itertools.product(range(0, size, ROWS), range(0, self.cut.head_dim, LINE)):
                    values = refs.v_smem.at[self.slot(c), pl.ds(at, ROWS), pl.ds(line, LINE)]
                    key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                    held = plgpu.load(values, layout=plgpu.Layout.WGMMA)
                    kept = jnp.where(key + at < valid, held, jnp.zeros_like(held))
                    values[...] = plgpu.layout_cast(kept, plgpu.Layout.WGMMA)
                plgpu.commit_smem()  # products read shared memory through the async proxy, which needs a fence

            # Without this, warpgroup 1 could multiply before the zeros are there.
            plgpu.barrier_arrive(refs.zeroed)
            plgpu.barrier_wait(refs.zeroed)

    def write(self, state: tuple) -> None:
        """Write out = acc / l and lse = m + log2 l (bits); 0 and -inf for padding rows and rows that saw no key."""
        (m, l, acc), refs, item = state, self.refs, self.item  # noqa: E741
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + (item.row + self.wg * ROWS)
        seen = (l > 0) & (row < refs.q_len[item.b])
        inverse = warpgroup.per_row(jnp.where(seen, 1.0 / l, 0.0), acc)
        rows, out_smem = pl.ds(item.at + self.wg * ROWS, ROWS), refs.q_smem.at[self.wg]
        out_smem[...] = jnp.where(inverse > 0, acc * inverse, 0.0).astype(self.cut.dtype)
        refs.lse[item.b, item.n, rows] = jnp.where(seen, m + jnp.log(l) * LOG2_E, -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, refs.out.at[item.b, rows, item.n])
        plgpu.wait_smem_to_gmem(0)


def read_item(refs: Refs, cut: Cut) -> Item:
    n, block, b = (jax.lax.axis_index(name) for name in ("head", "rows", "sequence"))
    # Later causal rows see more keys: run the longest thread blocks first, so that short ones fill the gaps at the end.
    at = (jax.lax.axis_size("rows") - 1 - block) * BLOCK_T
    return Item(b, n, jax.lax.div(n, cut.groups), at, pl.multiple_of(refs.skipped[0] + at, BLOCK_T))


def blocks_of(refs: Refs, item: Item, cut: Cut) -> Blocks:
    # Callers recompute the ranges where they need them; keeping them would take registers of every thread.
    rows = jnp.minimum(refs.q_len[item.b] - item.row, BLOCK_T)
    first = refs.q_start[item.b] + item.row
    return key_blocks(first, rows, refs.kv_len[item.b], cut.spec, cut.config.block_s)


def places_of(refs: Refs, item: Item, block: Array, cut: Cut) -> list[tuple]:
    size = cut.config.block_s
    return places(refs.pages, item.b, block * size, size, cut.page)


def copy_pieces(source, target, landed, sources: list[tuple], item: Item, cut: Cut) -> None:
    for n, (row, key) in enumerate(sources):
        part = target if len(sources) == 1 else target.at[pl.ds(n * cut.piece, cut.piece)]
        plgpu.copy_gmem_to_smem(source.at[row, item.h, pl.ds(key, cut.piece)], part, landed)


def fetch(refs: Refs, item: Item, cut: Cut) -> None:
    """Run the fetching warpgroup: copy every key block of the range, K before V, as stages are handed back."""
    # The warpgroups share 65,536 registers: issuing copies takes few, and accumulators need the rest.
    plgpu.set_max_registers(warpgroup.FETCH_REGISTERS, action="decrease")
    stages, blocks = cut.config.stages, blocks_of(refs, item, cut)
    count = blocks.stop - blocks.start
    both = ((refs.k, refs.k_smem, refs.k_full, refs.k_free), (refs.v, refs.v_smem, refs.v_full, refs.v_free))

    def copy_block(c, _):
        slot, sources = jax.lax.rem(c, stages), places_of(refs, item, blocks.start + c, cut)
        for source, target, full, free in both:
            # The first `stages` blocks fill empty buffers: no arrival has been made on `free` yet.
            pl.when(c >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            copy_pieces(source, target.at[slot], full.at[slot], sources, item, cut)

    def drain(c, _):
        for *_, free in both:
            plgpu.barrier_wait(free.at[jax.lax.rem(c, stages)])

    jax.lax.fori_loop(0, count, copy_block, None)
    # Pallas' interpreter demands that a thread which waits on a barrier observes all its phases, the last ones too.
    jax.lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)


def fetch_int8(refs: Refs, item: Item, cut: Cut) -> None:
    """Run the fetching warpgroup for int8 keys (see `int8_keys`). Rows at or past kv_len become zeros."""
    plgpu.set_max_registers(int8_keys.FETCH_REGISTERS, action="decrease")
    size, blocks = cut.config.block_s, blocks_of(refs, item, cut)

    def sources(c):
        return places_of(refs, item, blocks.start + c, cut)

    def copy(c, which: int):
        copy_pieces((refs.k, refs.v)[which], refs.landing.at[which], refs.landed.at[which], sources(c), item, cut)

    def scales(c):
        return [row_scales(refs.scales, item.h, which, sources(c), cut.piece) for which in range(2)]

    def valid(c):
        rows = refs.kv_len[item.b] - (blocks.start + c) * size
        return [rows - n for n in range(0, size, ROWS)]

    convert_blocks(refs, blocks.stop - blocks.start, cut.config.stages, copy, scales, valid)


def compute(refs: Refs, item: Item, wg: Array, cut: Cut) -> None:
    """Run a compute warpgroup: absorb every key block of the range for its 64 rows, then write `out` and `lse`."""
    plgpu.set_max_registers(
        int8_keys.COMPUTE_REGISTERS if cut.scaled else warpgroup.COMPUTE_REGISTERS, action="increase"
    )
    source = refs.q.at[item.b, pl.ds(item.row + wg * ROWS, ROWS), item.n]
    plgpu.copy_gmem_to_smem(source, refs.q_smem.at[wg], refs.q_full.at[wg])
    blocks = blocks_of(refs, item, cut)
    rows = Rows(refs, item, wg, blocks.start, cut)
    state = warpgroup.initial_state(cut.head_dim)
    plgpu.barrier_wait(refs.q_full.at[wg])
    if cut.spec.window is not None:
        state = jax.lax.fori_loop(blocks.start, blocks.whole, rows.masked, state)
    # Warpgroup 1 starts with a turn and so runs half a round behind; warpgroup 0 ends with one, because a warpgroup
    # that made fewer arrivals than the other would leave it waiting.
    pl.when(wg == 1)(rows.take_turn)
    if cut.config.overlap:
        # `overlapped` needs at least one block; a loop of 0 or 1 turns is a branch that carries the state.
        some = (blocks.masked > blocks.whole).astype(jnp.int32)
        state = jax.lax.fori_loop(0, some, lambda _, x: rows.overlapped(blocks.whole, blocks.masked, x), state)
    else:
        state = jax.lax.fori_loop(blocks.whole, blocks.masked, rows.plain, state)
    pl.when(wg == 0)(rows.take_turn)
    rows.write(jax.lax.fori_loop(blocks.masked, blocks.stop, rows.masked, state))


def body(*refs, cut: Cut):
    """Run one thread block: two warpgroups compute, the third fetches."""
    absent = ([] if cut.spec.mass else ["bits"]) + ([] if cut.scaled else ["scales", "landing", "landed"])
    absent += [] if cut.page is not None else ["pages"]
    names = [name for name in Refs._fields if name not in absent]
    refs = Refs(**dict.fromkeys(absent), **dict(zip(names, refs, strict=True)))
    wg = jax.lax.axis_index("warpgroup")
    pl.when(wg < WARPGROUPS)(lambda: compute(refs, read_item(refs, cut), wg, cut))
    pl.when(wg == WARPGROUPS)(lambda: (fetch_int8 if cut.scaled else fetch)(refs, read_item(refs, cut), cut))


def run_rows(q, kv: KeyValues, positions: Positions, skipped: Array, rows: int, cut: Cut) -> list[Array]:
    """Launch the kernel for q's rows [skipped, skipped + rows).

    Return out [B,rows,N,H], lse [B,N,rows] in bits and, if spec.mass, bits [B,N,units,rows]; the last axes of lse and
    bits are padded to whole thread blocks.
    """
    batch, _, num_heads, head_dim = q.shape
    blocks, config = ceil_div(rows, BLOCK_T), cut.config
    out = [
        jax.ShapeDtypeStruct((batch, rows, num_heads, head_dim), q.dtype),
        jax.ShapeDtypeStruct((batch, num_heads, blocks * BLOCK_T), jnp.float32),
    ]
    if cut.spec.mass:
        out.append(jax.ShapeDtypeStruct((batch, num_heads, cut.units, blocks * BLOCK_T), jnp.float32))
    line = warpgroup.swizzled(q.dtype)
    keys = plgpu.SMEM((config.stages, config.block_s, head_dim), q.dtype, transforms=line)
    free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages)
    landing = plgpu.SMEM((2, config.block_s, head_dim), jnp.int8, transforms=ROWS_OF_BYTES)
    pieces = config.block_s // cut.piece
    landed = plgpu.Barrier(num_arrivals=pieces, num_barriers=2)
    full = plgpu.Barrier(num_arrivals=1 if cut.scaled else pieces, num_barriers=config.stages)
    return plgpu.kernel(
        functools.partial(body, cut=cut),
        out_type=out,
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, ROWS, head_dim), q.dtype, transforms=line),
            keys,
            keys,
            plgpu.Barrier(num_barriers=WARPGROUPS),
            full,
            full,
            free,
            free,
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            *((landing, landed) if cut.scaled else ()),
        ],
        grid=(batch, blocks, num_heads),
        grid_names=("sequence", "rows", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="gpu_prefill_score" if cut.spec.mass else "gpu_prefill_dense",
    )(*positions, skipped, q, *(x for x in (kv.k, kv.v, kv.scales, kv.pages) if x is not None))


def attend(q, kv: KeyValues, positions: Positions, spec: AttentionSpec, config: Config) -> AttentionOut:
    """Run the call on [B,T,N,H] queries; if spec.mass, in chunks of queries."""
    batch, num_queries, num_heads, head_dim = q.shape
    shapes = kv.shapes(q)
    kv_heads, num_keys = shapes.num_kv_heads, shapes.num_keys
    cut = Cut(spec, config, num_heads // kv_heads, num_keys, head_dim, str(q.dtype), shapes.scaled, shapes.page)
    # TMA fills swizzled shared memory 8 rows at a time. Pad S and T with zeros, which kv_len and q_len exclude.
    q, k, v = warpgroup.whole_lines(q, 1), *(warpgroup.whole_lines(x, 2) for x in kv[:2])
    scales = padded(kv.scales) if shapes.scaled and shapes.page is None else kv.scales
    kv, rows = KeyValues(k, v, kv.pages, scales), q.shape[1]
    if not spec.mass:
        out, lse = run_rows(q, kv, positions, jnp.zeros((1,), jnp.int32), rows, cut)
        return AttentionOut(out[:, :num_queries], natural(lse, num_queries))
    step = chunk_rows(batch, rows, num_heads, cut)
    if step >= rows:
        out, lse, mass = score_rows(q, kv, positions, jnp.int32(0), rows, cut)
    else:
        starts = jnp.arange(0, rows, step, dtype=jnp.int32)

        def chunk(start):  # without the barrier, XLA launches the kernel twice to use one result in two places
            return jax.lax.optimization_barrier(score_rows(q, kv, positions, start, step, cut))

        chunks = jax.lax.map(chunk, starts)
        out = jnp.moveaxis(chunks[0], 0, 1).reshape(batch, -1, num_heads, head_dim)
        lse = jnp.moveaxis(chunks[1], 0, 2).reshape(batch, num_heads, -1)
        mass = jnp.moveaxis(chunks[2], 0, 2).reshape(batch, kv_heads, -1, cut.units)
    tiles = ceil_div(num_queries, spec.query_tile), ceil_div(num_keys, spec.tile)
    mass = mass.reshape(*mass.shape[:3], -1, spec.tile // cut.unit).sum(-1)
    return AttentionOut(out[:, :num_queries], natural(lse, num_queries), mass[:, :, : tiles[0], : tiles[1]])


def score_rows(
    q, kv: KeyValues, positions: Positions, skipped: Array, rows: int, cut: Cut
) -> tuple[Array, Array, Array]:
    """Return (out, lse in bits, mass per unit of keys) of q's rows [skipped, skipped + rows)."""
    skipped = skipped[None]
    out, lse, bits = run_rows(q, kv, positions, skipped, rows, cut)
    mass_cut = gpu_mass.cut_call(cut.spec, cut.groups, cut.unit)
    return out, lse, gpu_mass.tile_mass(bits, lse, positions, skipped, mass_cut, rows)


def chunk_rows(batch: int, num_queries: int, num_heads: int, cut: Cut) -> int:
    """Return the query rows per chunk, in whole thread blocks and query tiles.

    If possible, a chunk's `bits` hold at most BITS numbers and no more than q does.
    """
    bound = min(BITS, batch * num_queries * num_heads * cut.head_dim) // (batch * num_heads * cut.units)
    bound = min(bound, gpu_mass.MOST_TILES * cut.spec.query_tile)
    whole = math.lcm(BLOCK_T, cut.spec.query_tile)
    chunks = ceil_div(num_queries, max(bound // whole, 1) * whole)
    return round_up(ceil_div(num_queries, chunks), whole)


def natural(lse: Array, num_queries: int) -> Array:
    return LN_2 * jnp.swapaxes(lse, 1, 2)[:, :num_queries]


def launch(q, kv: KeyValues, spec: AttentionSpec, positions: Positions, selection, config: Config) -> AttentionOut:
    """Run dense prefill, or the score role if spec.mass; `dense` runs the calls that it can: it is differentiable."""
    lengths = jnp.minimum(positions.kv_len, kv.num_keys), jnp.minimum(positions.q_len, q.shape[1])
    positions = Positions(positions.q_start, *lengths)  # clip: padding must not count as valid keys or rows
    if spec.mass or kv.scales is not None or kv.pages is not None:
        return attend(q, kv, positions, spec, config)
    return dense(q, kv.k, kv.v, positions, spec, config)


dense = differentiable(lambda q, k, v, *call: attend(q, KeyValues(k, v), *call), gpu_backward.gradients)
"""Dense prefill with a gradient, which `gpu.backward` computes."""


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    if shapes.head_dim not in HEAD_DIMS:
        return f"head_dim={shapes.head_dim} must be one of {', '.join(map(str, HEAD_DIMS))}"
    if shapes.scaled and shapes.dtype != "bfloat16":
        return f"dtype={shapes.dtype}: int8 values times their scales may underflow in this dtype; use bfloat16"
    if shapes.scaled and shapes.head_dim == 256:
        return "head_dim=256 must be at most 128 with int8 keys: converting them takes registers that the products need"
    if spec.mass and spec.tile < 16:
        return f"tile={spec.tile} must be at least 16: the kernel writes one number per row and tile"
    tight = spec.tile < 64 or spec.softcap is not None or spec.window is not None
    if spec.mass and shapes.head_dim == 256 and tight:
        taken = f"tile={spec.tile}, softcap={spec.softcap}, window={spec.window}"
        return f"head_dim=256 with {taken}: registers suffice only if tile >= 64, without a softcap or window"
    return page_refusal(shapes, ROWS if shapes.scaled else LEAST_KEYS)


def shared_bytes(head_dim: int, config: Config, scaled: bool = False) -> int:
    """Return the bytes of shared memory for q, K and V, any int8 block of each, and 2 KiB for barriers and sums."""
    blocks = 2 * config.stages + (1 if scaled else 0)
    return 2 * head_dim * (BLOCK_T + blocks * config.block_s) + 2048


def overlaps(spec: AttentionSpec, shapes: Shapes) -> bool:
    """Return whether registers suffice for `Config.overlap`: they do, except at head_dim 256 in the score role."""
    return shapes.head_dim < 256 or not spec.mass


def is_short(spec: AttentionSpec, shapes: Shapes) -> bool:
    """Return whether registers suffice only for blocks of 64 keys.

    That is so at head_dim 256 and, in the score role with int8 keys, at head_dim 128.
    """
    return shapes.head_dim == 256 or (shapes.scaled and spec.mass and shapes.head_dim == 128)


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Choose 128 keys per block, or 64 where accumulators or conversions take half of the registers."""
    return Config(block_s=64 if is_short(spec, shapes) else 128, overlap=overlaps(spec, shapes))


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    """Yield block sizes and stages that fit in shared memory, with each useful combination of `overlap` and `turns`."""
    orders = ((True, True), (True, False), (False, True))
    for block_s, stages, (overlap, turns) in itertools.product((64, 128), (2, 3), orders):
        config = Config(block_s=block_s, stages=stages, overlap=overlap, turns=turns)
        # With a window and 256 sums per row, the compiler spills a register
        # (found by `python -m lab study compiles --platform gpu`).
        spills = shapes.head_dim == 256 and spec.window is not None and not (overlap or spec.mass)
        spills = spills or (shapes.scaled and block_s == 128 and is_short(spec, shapes))
        fits = shared_bytes(shapes.head_dim, config, shapes.scaled) <= SHARED_BYTES and not spills
        if fits and (overlaps(spec, shapes) or not overlap):
            yield config


KERNELS = family(
    "gpu_prefill",
    ("dense", "score"),
    dtypes=DTYPES,
    supports=supports,
    launch=launch,
    Config=Config,
    default_config=default_config,
    search_space=search_space,
    capability=HOPPER,
    scaled=True,
    paged=True,
)
