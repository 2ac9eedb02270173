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

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Shapes
from tessera.attention.gpu import backward as gpu_backward
from tessera.attention.gpu import int8_keys
from tessera.attention.gpu import mass as gpu_mass
from tessera.attention.gpu.block_ranges import Blocks, key_blocks
from tessera.attention.gpu.int8_keys import ROWS_OF_BYTES, convert_blocks, padded, row_scales
from tessera.attention.gpu.pages import LEAST_KEYS, page_refusal, places
from tessera.attention.gpu.prefill_rows import BLOCK_T, Config, Cut, Item, Refs, Rows
from tessera.attention.gpu.warpgroup import (
    COMPUTE_REGISTERS,
    FETCH_REGISTERS,
    HOPPER,
    ROW,
    ROWS,
    SHARED_BYTES,
    WARPGROUPS,
    filled,
    swizzled,
    whole_lines,
)
from tessera.attention.gradient import differentiable
from tessera.attention.kernel import family
from tessera.attention.online_softmax import FLOOR, LN_2
from tessera.core.shapes import ceil_div, round_up

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
BITS = 1 << 27
"""Maximum number of float32 values in `Refs.bits` per launch in the score role: 512 MiB."""


def read_item(refs: Refs, cut: Cut) -> Item:
    """Return the sequence, heads and rows of this thread block."""
    n, block, b = (jax.lax.axis_index(name) for name in ("head", "rows", "sequence"))
    # Later causal rows see more keys: run the longest thread blocks first, so that short ones fill the gaps at the end.
    at = (jax.lax.axis_size("rows") - 1 - block) * BLOCK_T
    return Item(b, n, jax.lax.div(n, cut.groups), at, pl.multiple_of(refs.skipped[0] + at, BLOCK_T))


def blocks_of(refs: Refs, item: Item, cut: Cut) -> Blocks:
    """Return the key blocks of an item; callers recompute them where needed, which saves registers."""
    rows = jnp.minimum(refs.q_len[item.b] - item.row, BLOCK_T)
    first = refs.q_start[item.b] + item.row
    return key_blocks(first, rows, refs.kv_len[item.b], cut.spec, cut.config.block_s)


def places_of(refs: Refs, item: Item, block: Array, cut: Cut) -> list[tuple]:
    """Return the place in memory of each copy of a key block (see `pages.places`)."""
    size = cut.config.block_s
    return places(refs.pages, item.b, block * size, size, cut.page)


def copy_pieces(source, target, landed, sources: list[tuple], item: Item, cut: Cut) -> None:
    """Start the copies of a key block from their places in `source`."""
    for n, (row, key) in enumerate(sources):
        part = target if len(sources) == 1 else target.at[pl.ds(n * cut.piece, cut.piece)]
        plgpu.copy_gmem_to_smem(source.at[row, item.h, pl.ds(key, cut.piece)], part, landed)


def fetch(refs: Refs, item: Item, cut: Cut) -> None:
    """Run the fetching warpgroup: copy every key block of the range, K before V, as stages are handed back."""
    plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
    stages, blocks = cut.config.stages, blocks_of(refs, item, cut)
    count = blocks.stop - blocks.start
    both = ((refs.k, refs.k_smem, refs.k_full, refs.k_free), (refs.v, refs.v_smem, refs.v_full, refs.v_free))

    def copy_block(c, _):
        slot, sources = jax.lax.rem(c, stages), places_of(refs, item, blocks.start + c, cut)
        for source, target, full, free in both:
            pl.when(c >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            copy_pieces(source, target.at[slot], full.at[slot], sources, item, cut)

    def drain(c, _):
        for *_, free in both:
            plgpu.barrier_wait(free.at[jax.lax.rem(c, stages)])

    jax.lax.fori_loop(0, count, copy_block, None)
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
    plgpu.set_max_registers(int8_keys.COMPUTE_REGISTERS if cut.scaled else COMPUTE_REGISTERS, action="increase")
    source = refs.q.at[item.b, pl.ds(item.row + wg * ROWS, ROWS), item.n]
    plgpu.copy_gmem_to_smem(source, refs.q_smem.at[wg], refs.q_full.at[wg])
    blocks = blocks_of(refs, item, cut)
    rows = Rows(refs, item, wg, blocks.start, cut)
    state = (filled((ROWS,), FLOOR, ROW), filled((ROWS,), 0.0, ROW), filled((ROWS, cut.head_dim), 0.0))
    plgpu.barrier_wait(refs.q_full.at[wg])
    if cut.spec.window is not None:
        state = jax.lax.fori_loop(blocks.start, blocks.whole, rows.masked, state)
    pl.when(wg == 1)(rows.take_turn)  # from here on, warpgroup 1 runs half a round behind warpgroup 0
    if cut.config.overlap:
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
    line = swizzled(q.dtype)
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
    # Pad S and T to multiples of 8 with zeros, which kv_len and q_len exclude.
    q, k, v = whole_lines(q, 1), *(whole_lines(x, 2) for x in kv[:2])
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
    """Return the query rows per chunk, in whole thread blocks and whole query tiles.

    If possible, a chunk's `bits` hold at most BITS numbers and no more numbers than q does, and a chunk has at most
    gpu_mass.MOST_TILES query tiles.
    """
    bound = min(BITS, batch * num_queries * num_heads * cut.head_dim) // (batch * num_heads * cut.units)
    bound = min(bound, gpu_mass.MOST_TILES * cut.spec.query_tile)
    whole = math.lcm(BLOCK_T, cut.spec.query_tile)
    chunks = ceil_div(num_queries, max(bound // whole, 1) * whole)
    return round_up(ceil_div(num_queries, chunks), whole)


def natural(lse: Array, num_queries: int) -> Array:
    """Convert lse [B,N,rows] in bits to lse [B,T,N] in nats."""
    return LN_2 * jnp.swapaxes(lse, 1, 2)[:, :num_queries]


def launch(q, kv: KeyValues, spec: AttentionSpec, positions: Positions, selection, config: Config) -> AttentionOut:
    """Run dense prefill, or the score role if spec.mass. Dense calls on contiguous keys in q's dtype are
    differentiable."""
    lengths = jnp.minimum(positions.kv_len, kv.num_keys), jnp.minimum(positions.q_len, q.shape[1])
    positions = Positions(positions.q_start, *lengths)  # clip: padding must not count as valid keys or rows
    if spec.mass or kv.scales is not None or kv.pages is not None:
        return attend(q, kv, positions, spec, config)
    return dense(q, kv.k, kv.v, positions, spec, config)


def attend_to_floats(q, k, v, *call) -> AttentionOut:
    """Run `attend` on contiguous keys and values [B,K,S,H] in q's dtype."""
    return attend(q, KeyValues(k, v), *call)


dense = differentiable(attend_to_floats, gpu_backward.gradients)
"""Dense prefill with a gradient, which `gpu.backward` computes."""


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    """Return why the kernel cannot run this call; None if it can."""
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
    """Return the bytes of shared memory for q, K and V, and 2 KiB for barriers and reductions.

    Int8 keys also need an int8 buffer for a block of K and one for a block of V.
    """
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
        # With a window and 256 sums per row, the compiler spills a register (found by `python -m lab study gpu-gates`).
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
