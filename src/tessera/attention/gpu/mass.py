"""Mass of key tiles on Hopper from the results of score prefill: the sum over a query tile's rows of 2^(bits - lse).

bits [B,N,U,R] is log2 of the sum of exponentials per row and unit; a *unit* of keys is a tile, or as much of a tile as
fits in one block. lse [B,N,R] is log2 of the whole sum per row (-inf for padding and for rows that see no key). The
score kernel does not write units that a row does not see, so this kernel masks them by position. If no row of the query
tile sees any of a thread block's 64 units, the thread block reads nothing.

Work: one exponential per (row, unit). The time is bounded by reading bits once, at 4 bytes per number. The loads go
straight to registers in a product's layout (eight rows of 32 bytes per load), UNROLLED loads at a time.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float, Int32

from tessera.attention.contract import AttentionSpec, Positions
from tessera.attention.gpu.warpgroup import ROWS, filled
from tessera.core.shapes import ceil_div, round_up

UNITS = ROWS
"""Units of keys per thread block."""
ALIGNED = 8
"""Alignment of a load, in rows: each begins at a multiple of this number."""
MOST_ROWS = 64
"""Maximum rows per load."""
UNROLLED = 4
"""Maximum loads in flight together."""
MOST_TILES = 65535
"""Maximum query tiles per launch: the limit of CUDA's second grid axis."""


class Cut(NamedTuple):
    """Static sizes of a launch."""

    spec: AttentionSpec
    groups: int  # query heads per KV head
    unit: int  # keys per unit
    width: int  # rows per load
    pieces: int  # loads per query head, as many as cover a query tile's rows


def tile_mass(
    bits: Float[Array, "B N U R"],
    lse: Float[Array, "B N R"],
    positions: Positions,
    skipped: Int32[Array, "1"],
    cut: Cut,
    rows: int,
) -> Float[Array, "B K I U"]:
    """Return the mass per unit of the query tiles in rows [0, rows) of `bits`. Row 0 of `bits` is row `skipped` of the
    call."""
    batch, num_heads, units, _ = bits.shape
    num_tiles = ceil_div(rows, cut.spec.query_tile)
    return plgpu.kernel(
        functools.partial(body, cut=cut),
        out_type=jax.ShapeDtypeStruct((batch, num_heads // cut.groups, num_tiles, units), jnp.float32),
        grid=(units // UNITS, num_tiles, batch * num_heads // cut.groups),
        grid_names=("units", "query_tile", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="gpu_tile_mass",
    )(positions.q_start, positions.kv_len, skipped, bits, lse)


def cut_call(spec: AttentionSpec, groups: int, unit: int) -> Cut:
    aligned = spec.query_tile % ALIGNED == 0
    span = spec.query_tile if aligned else round_up(spec.query_tile + ALIGNED - 1, ALIGNED)
    width = min(span, MOST_ROWS)
    return Cut(spec, groups, unit, width, ceil_div(span, width))


def body(q_start, kv_len, skipped, bits, lse, mass, *, cut: Cut):
    """Run one thread block: a query tile of one KV head, and 64 units of keys."""
    spec, i = cut.spec, jax.lax.axis_index("query_tile")
    head, heads = jax.lax.axis_index("head"), mass.shape[1]
    b, h = jax.lax.div(head, heads), jax.lax.rem(head, heads)
    unit = pl.multiple_of(jax.lax.axis_index("units") * UNITS, UNITS)
    row, stop_row = i * spec.query_tile, (i + 1) * spec.query_tile
    aligned = jax.lax.div(row, ALIGNED) * ALIGNED
    first, kv_len = q_start[b] + skipped[0], kv_len[b]  # position of row 0
    some = unit * cut.unit < (jnp.minimum(kv_len, first + stop_row) if spec.causal else kv_len)
    if spec.window is not None:
        some = some & ((unit + UNITS) * cut.unit > first + row - spec.window + 1)

    def load(n: Array) -> Array:
        """Return probabilities [units, rows] of the n-th load; 0 for rows of other query tiles and for unseen units."""
        begin = aligned + jax.lax.rem(n, cut.pieces) * cut.width
        # A load that would pass the end starts earlier; `place >= begin` below drops the rows that it repeats.
        at = pl.multiple_of(jnp.minimum(begin, bits.shape[3] - cut.width), ALIGNED)
        query_head = h * cut.groups + jax.lax.div(n, cut.pieces)
        # Units are rows of the layout and query rows its columns, so the sum over query rows stays within one warp.
        x = plgpu.load(
            bits.at[b, query_head, pl.ds(unit, UNITS), pl.ds(at, cut.width)],
            layout=plgpu.Layout.WGMMA,
            optimized=False,
        )
        total = plgpu.load(
            lse.at[b, query_head, pl.ds(at, cut.width)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        total = jax.lax.broadcast_in_dim(total, x.shape, [1])
        place = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA) + at
        key = (plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA) + unit) * cut.unit
        seen = (place >= jnp.maximum(begin, row)) & (place < stop_row) & (total > -jnp.inf) & (key < kv_len)
        if spec.causal:
            seen = seen & (key <= place + first)
        if spec.window is not None:
            seen = seen & (key + (cut.unit + spec.window - 1) > place + first)
        return jnp.where(seen, jnp.exp2(x - total), 0.0)

    # Issue several loads before the first sum: each waits for memory, and one after another they would wait in turn.
    loads = cut.groups * cut.pieces
    together = next(n for n in range(UNROLLED, 0, -1) if loads % n == 0)

    def add(step: Array, acc: Array) -> Array:
        return functools.reduce(jnp.add, [load(step * together + n) for n in range(together)], acc)

    steps = jnp.where(some, loads // together, 0)
    acc = jax.lax.fori_loop(0, steps, add, filled((UNITS, cut.width), 0.0))
    mass[b, h, i, pl.ds(unit, UNITS)] = acc.sum(1)
