"""Splits of a Hopper decode call: which of a sequence's keys each thread block reads, and how their results are merged.

A *block* consists of the block_s keys of one step of a kernel. It is divided into `units` *units*; one copy moves a
unit, unless a page is shorter. In the sparse and score roles, a unit is a tile if a tile is smaller than a block.

The second launch of a call merges the results of the splits and, in the score role, computes tile masses. Merging works
in float32, with lse in bits (base 2):

    out = sum_p 2^(lse_p - m) out_p / sum_p 2^(lse_p - m) over splits p, with m = max_p lse_p.

Each partial result stores its lse in every column of a row, so the merge works number by number: each thread block
takes a flat stretch, and every load is coalesced. XLA would take two to five launches, each as long as the attention of
a small call.

A tile's mass is 2^(bank - lse), summed over rows. The bank is log2 of each unit's sum of exponentials per row; lse is
log2 of a row's whole sum. The first thread blocks merge the splits. Each other one computes the masses of a *piece*: a
few hundred tiles of one KV head. It cannot wait for the merged lse, so it merges lse again from the splits' values, 4
bytes per row and split, while its part of the bank is being loaded. Units that no row sees are not written, so they are
masked by position. Reading the bank once, at 4 bytes per row and unit, bounds the time.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from tessera.attention.contract import AttentionSpec, Positions, Shapes
from tessera.attention.gpu.pages import piece_of
from tessera.attention.gpu.warpgroup import ROW, ROWS, filled
from tessera.attention.online_softmax import FLOOR
from tessera.core.shapes import ceil_div, round_up

THREADS = 128
STRETCH = 256
"""Numbers that a thread block merges, two per thread. If STRETCH does not divide the total number, it merges THREADS,
one per thread.

Thread blocks are small because each waits for memory once per AT_ONCE splits; many thread blocks hide that wait.
"""
AT_ONCE = 16
"""Maximum splits whose numbers a thread loads together; it takes up to two numbers from each split."""
TILES = ROWS
"""Tiles per load: one per row of a product."""
MOST_NUMBERS = 32
"""Maximum numbers of the bank that are loaded together, per tile of a load. For 64 tiles, each of 128 threads then
holds 16 numbers."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""Register layout of one number per column."""


class Cut(NamedTuple):
    """Static sizes of one call. Its keys are divided into splits, and each split into blocks of block_s keys."""

    role: str
    spec: AttentionSpec
    shapes: Shapes
    block_s: int
    splits: int

    @property
    def groups(self) -> int:
        return self.shapes.num_heads // self.shapes.num_kv_heads

    @property
    def parts(self) -> int:
        """Number of 64-row products for the G query heads of a KV head; separate thread blocks compute them."""
        return ceil_div(self.groups, ROWS)

    @property
    def rows(self) -> int:
        """Rows of a product that may hold query heads, a multiple of 8, since TMA copies 8 rows at a time."""
        return min(round_up(self.groups, 8), ROWS)

    @property
    def stored_groups(self) -> int:
        """Rows per KV head that are stored in memory: G, rounded up to a multiple of 8 if G exceeds 8."""
        return self.groups if self.groups <= 8 else round_up(self.groups, 8)

    @property
    def unit(self) -> int:
        return self.block_s if self.role == "dense" else min(self.block_s, self.spec.tile)

    @property
    def units(self) -> int:
        return self.block_s // self.unit

    @property
    def piece(self) -> int:
        """Keys per copy: a unit, or as much of a unit as lies in one page."""
        return piece_of(self.unit, self.shapes.page)

    @property
    def banked(self) -> int:
        """Number of units that hold all S keys, rounded up to whole blocks."""
        return ceil_div(self.shapes.num_keys, self.block_s) * self.units

    @property
    def tiles(self) -> int:
        return ceil_div(self.shapes.num_keys, self.spec.tile)

    @property
    def per_tile(self) -> int:
        """Units per tile."""
        return self.spec.tile // self.unit


class Run(NamedTuple):
    """Keys that one split reads for one sequence and KV head, as scalars."""

    start: Any  # keys [start, stop) that the row sees; both 0 if none
    stop: Any
    listed: Any  # units in the list of tiles; 0 outside the sparse role
    first: Any  # blocks [first, first + count) that the split reads; in the sparse role, blocks of listed units
    count: Any


def find_run(cut: Cut, split, positions: Positions, listed_tiles=0) -> Run:
    """Compute the `Run` of one split from the scalar positions of one sequence and the number of its listed tiles."""
    spec, block_s = cut.spec, cut.block_s
    row = positions.q_start
    stop = jnp.minimum(positions.kv_len, cut.shapes.num_keys)
    stop = jnp.minimum(stop, row + 1) if spec.causal else stop
    start = jnp.int32(0) if spec.window is None else jnp.maximum(row - (spec.window - 1), 0)
    seen = (positions.q_len > 0) & (stop > start)
    start, stop = jnp.where(seen, start, 0), jnp.where(seen, stop, 0)  # nothing seen: no block, and no mask needed
    listed = jnp.int32(0)
    if cut.role == "sparse":
        listed = jnp.where(seen, listed_tiles * (spec.tile // cut.unit), 0)
        begin, end = jnp.int32(0), jax.lax.div(listed + (cut.units - 1), jnp.int32(cut.units))
    else:
        begin, end = jax.lax.div(start, jnp.int32(block_s)), jax.lax.div(stop + (block_s - 1), jnp.int32(block_s))
    # Shares of what this sequence sees, not of the cache: a short sequence, too, keeps all splits busy.
    share = jax.lax.div(end - begin + (cut.splits - 1), jnp.int32(cut.splits))
    first = begin + split * share
    return Run(start, stop, listed, first, jnp.clip(end - first, 0, share))


def unit_starts(cut: Cut, run: Run, block, tile_at: Callable) -> list:
    """Return the position of the first key of each unit of a block.

    In the sparse role, units past the end of the list repeat the last listed unit; tile_at(n) is the n-th tile id.
    """
    if cut.role != "sparse":
        return [block * cut.block_s + i * cut.unit for i in range(cut.units)]
    per_tile = jnp.int32(cut.spec.tile // cut.unit)
    units = [jnp.minimum(block * cut.units + i, run.listed - 1) for i in range(cut.units)]
    return [
        tile_at(jax.lax.div(unit, per_tile)) * cut.spec.tile + jax.lax.rem(unit, per_tile) * cut.unit for unit in units
    ]


def visible_columns(cut: Cut, run: Run, block, starts: list) -> tuple[Any, Any]:
    """Return the columns [lo, hi) of a block that the row sees; listed keys also give one range, because ids ascend."""
    if cut.role != "sparse":
        return jnp.maximum(run.start - starts[0], 0), jnp.minimum(run.stop - starts[0], cut.block_s)
    # Count the keys of listed units before the visible range's start, and before its stop.
    lo = hi = jnp.int32(0)
    for i, start in enumerate(starts):
        listed = block * cut.units + i < run.listed
        lo += jnp.where(listed, jnp.clip(run.start - start, 0, cut.unit), 0)
        hi += jnp.where(listed, jnp.clip(run.stop - start, 0, cut.unit), 0)
    return lo, hi


def merge_splits(
    out: Float[Array, "splits *rows"], lse: Float[Array, "splits *rows"], dtype: DTypeLike
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Merge the splits' softmax-weighted values `out` and their `lse`; return both, in this order.

    lse is log2 of a sum of exponentials, in every column of a row. A split that saw no key has values 0 and lse -inf.
    All but the returned values, of type `dtype`, are float32.
    """
    rows, size = out.shape[1:], out[0].size
    flat = [flatten(x) for x in (out, lse)]
    merged = plgpu.kernel(
        lambda *refs: merge_stretch(jax.lax.axis_index("stretch"), *refs),
        out_type=merged_types(flat[0], dtype),
        grid=(num_stretches(flat[0]),),
        grid_names=("stretch",),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="gpu_merge_splits",
    )(*flat)
    return tuple(x[:size].reshape(rows) for x in merged)


def flatten(x: Float[Array, "splits *rows"]) -> Float[Array, "splits size"]:
    """Flatten each split's numbers, padded to a multiple of THREADS; no copy is made if they need no padding."""
    x = x.reshape(x.shape[0], -1)
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % THREADS)])


def merged_types(flat: Float[Array, "splits size"], dtype: DTypeLike) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(flat.shape[1:], x) for x in (dtype, jnp.float32)]


def num_stretches(flat: Float[Array, "splits size"]) -> int:
    return flat.shape[1] // stretch_of(flat.shape[1])


def stretch_of(size: int) -> int:
    return THREADS if size % STRETCH else STRETCH


def merge_stretch(index, out_ref, lse_ref, merged_ref, merged_lse_ref) -> None:
    """Merge the stretch of numbers with this index; the references hold flattened numbers."""
    stretch = stretch_of(merged_ref.shape[0])
    here = pl.ds(index * stretch, stretch)
    state = tuple(jnp.full((stretch,), x, jnp.float32) for x in (FLOOR, 0.0, 0.0))
    m, total, acc = fold(lambda i: (lse_ref[i, here], out_ref[i, here]), out_ref.shape[0], state)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    merged_ref[here] = (acc / safe).astype(merged_ref.dtype)
    merged_lse_ref[here] = jnp.where(seen, m + jnp.log2(safe), -jnp.inf)


def fold(load: Callable, splits: int, state: tuple, at_once: int = AT_ONCE) -> tuple:
    """Return the state (m, sum of weights 2^(lse - m), weighted sums of values) after all splits.

    load(split) returns (lse, values ...); the loads of `at_once` splits are in flight together.
    """

    def absorb(first, count: int, state: tuple) -> tuple:
        m_old, *sums = state
        parts = [load(first + i) for i in range(count)]
        m = functools.reduce(jnp.maximum, [bits for bits, *_ in parts], m_old)
        alpha = jnp.exp2(m_old - m)  # m_old is at least FLOOR, which is finite: no split without keys makes NaN here
        total, *sums = (x * alpha for x in sums)
        for bits, *values in parts:
            weight = jnp.exp2(bits - m)
            total, sums = total + weight, [x + weight * value for x, value in zip(sums, values, strict=True)]
        return m, total, *sums

    whole, rest = divmod(splits, at_once)
    if whole:
        state = jax.lax.fori_loop(0, whole, lambda i, state: absorb(i * at_once, at_once, state), state)
    return absorb(whole * at_once, rest, state) if rest else state


class Refs(NamedTuple):
    """References of the kernel body, to arrays in global memory."""

    positions: Positions
    out: Any  # [splits, numbers] float32
    lse: Any  # likewise: lse in bits, repeated in every column
    totals: Any  # [splits, B, K, parts, rows]: lse in bits, once per row
    bank: Any  # [B, K, parts, tiles, units per tile, rows]
    merged: Any  # [numbers]
    merged_lse: Any
    mass: Any  # [B, K, 1, tiles], padded to 16 bytes


def merge_and_weigh(
    out: Float[Array, "splits B K G H"],
    lse: Float[Array, "splits B K G H"],
    bank: Float[Array, "B K parts units rows"],
    totals: Float[Array, "splits B K parts rows"],
    cut: Cut,
    positions: Positions,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B K G H"], Float[Array, "B K G H"], Float[Array, "B K 1 J"]]:
    """Merge partial results like `merge_splits`, and also return the mass of every tile, 0 for tiles that no row sees.

    `bank` is log2 of each unit's sum of exponentials per row of a product; units that no row sees may hold anything.
    `totals` is lse in bits, once per row; -inf where the split saw no key.
    """
    flat = [flatten(x) for x in (out, lse)]
    rows, size = out.shape[1:], out[0].size
    bank = bank.reshape(*bank.shape[:3], -1, cut.per_tile, cut.rows)
    mass = jax.ShapeDtypeStruct((*bank.shape[:2], 1, round_up(cut.tiles, 4)), jnp.float32)
    merging = num_stretches(flat[0])
    weighing = bank.shape[0] * bank.shape[1] * num_pieces(cut)
    merged, merged_lse, mass = plgpu.kernel(
        functools.partial(body, cut=cut, merging=merging),
        out_type=[*merged_types(flat[0], dtype), mass],
        grid=(merging + weighing,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # reductions over a tile's rows stay within one warp
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name="gpu_merge_mass",
    )(*positions, *flat, totals, bank)
    merged, merged_lse = (x[:size].reshape(rows) for x in (merged, merged_lse))
    return merged, merged_lse, mass[..., : cut.tiles]


def stored_units(cut: Cut) -> int:
    """Return how many units the bank stores: enough for all blocks of keys and for all loads of `weigh`."""
    return max(cut.banked, num_pieces(cut) * loads_per_piece(cut) * TILES * cut.per_tile)


def loads_per_piece(cut: Cut) -> int:
    most = max(MOST_NUMBERS // (cut.parts * cut.per_tile * cut.rows), 1)
    return min(most, ceil_div(cut.tiles, TILES))


def num_pieces(cut: Cut) -> int:
    return ceil_div(cut.tiles, loads_per_piece(cut) * TILES)


def body(*refs, cut: Cut, merging: int):
    """Run one thread block: merge a stretch of numbers, or compute the masses of one piece of tiles."""
    refs = Refs(Positions(*refs[:3]), *refs[3:])
    block = jax.lax.axis_index("block")

    @pl.when(block < merging)
    def _():
        merge_stretch(block, refs.out, refs.lse, refs.merged, refs.merged_lse)

    @pl.when(block >= merging)
    def _():
        stored = plgpu.SMEM((loads_per_piece(cut) * TILES,), jnp.float32)
        pl.run_scoped(lambda piece_mass: weigh(refs, cut, block - merging, piece_mass), stored)


def weigh(refs: Refs, cut: Cut, index, piece_mass) -> None:
    """Compute the masses of one piece and write them by TMA, which drops the masses past the last tile."""
    head, piece = (op(index, jnp.int32(num_pieces(cut))) for op in (jax.lax.div, jax.lax.rem))
    sequence, head = (op(head, jnp.int32(cut.shapes.num_kv_heads)) for op in (jax.lax.div, jax.lax.rem))
    run = find_run(cut, 0, Positions(*(x[sequence] for x in refs.positions)))
    size = piece_mass.shape[0]
    first, after = piece * size * cut.spec.tile, (piece + 1) * size * cut.spec.tile
    firsts = [piece * size + n for n in range(0, size, TILES)]

    def note(masses: list[Array]) -> None:
        for n, mass in enumerate(masses):
            piece_mass[pl.ds(n * TILES, TILES)] = mass

    @pl.when((first < run.stop) & (after > run.start))
    def _():
        parts = [weights(refs, cut, (sequence, head, part), run, firsts) for part in range(cut.parts)]
        note([functools.reduce(jnp.add, found).sum(1) for found in zip(*parts, strict=True)])

    @pl.when((first >= run.stop) | (after <= run.start))
    def _():
        note([filled((TILES,), 0.0, ROW)] * len(firsts))

    plgpu.commit_smem()  # make the threads' writes visible to the copy engine
    plgpu.copy_smem_to_gmem(piece_mass, refs.mass.at[sequence, head, 0, pl.ds(piece * size, size)])
    plgpu.wait_smem_to_gmem(0)  # a thread block's shared memory is gone once it ends


def weights(refs: Refs, cut: Cut, at: tuple, run: Run, firsts: list) -> list[Array]:
    """Compute 2^(bank - lse), summed over each tile's units, for the product `at` (sequence, KV head, part).

    Return one array [64 tiles, rows] per entry of `firsts`, which holds the first tile of each load.
    """
    sequence, head, part = at
    bits = [
        plgpu.load(refs.bank.at[*at, pl.ds(first, TILES), n], layout=plgpu.Layout.WGMMA, optimized=False)
        for first in firsts
        for n in range(cut.per_tile)
    ]

    def load(split) -> tuple[Array]:
        return (plgpu.load(refs.totals.at[split, *at], layout=COLUMN, optimized=False),)

    state = (filled((cut.rows,), FLOOR, COLUMN), filled((cut.rows,), 0.0, COLUMN))
    # The loads of `bits` above are in flight while the totals are merged; the masses need both.
    m, total = fold(load, refs.totals.shape[0], state, at_once=min(AT_ONCE, 256 // cut.rows))
    lse = jax.lax.broadcast_in_dim(m + jnp.log2(total), bits[0].shape, [1])  # unused for rows that see no key
    tile, row = (plgpu.broadcasted_iota(jnp.int32, lse.shape, n, layout=plgpu.Layout.WGMMA) for n in (0, 1))

    def weight(bits: Array, first, n: int) -> Array:
        key = (tile + first) * cut.spec.tile + n * cut.unit
        seen = (key + cut.unit > run.start) & (key < run.stop) & (row + part * ROWS < cut.groups)
        return jnp.where(seen, jnp.exp2(bits - lse), 0.0)

    found = iter(bits)
    return [functools.reduce(jnp.add, [weight(next(found), first, n) for n in range(cut.per_tile)]) for first in firsts]
