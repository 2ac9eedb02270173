"""Sparse prefill attention for Hopper: each query tile reads only its listed key tiles, in place.

A thread block computes the rows of a query tile (see `sparse_rows`). TMA copies the listed tiles of K and V, in list
order, end to end into shared-memory blocks of block_s keys, up to `stages` blocks ahead. Each block has a barrier that
counts its copies and a second one, on which the compute warpgroups hand the block back.

If the last block holds fewer tiles, its last tile is copied repeatedly and the copies are masked. The kernel never
reads ids past count. Values at or past kv_len may be NaN, and 0 * NaN is NaN: in the one block of a list that can hold
any, the fetching warpgroup zeroes them before it announces the block.

Int8 keys and values are copied into int8 buffers. The fetching warpgroup multiplies them by their scales and writes the
products, rounded to bfloat16, into the blocks (`int8_keys`). Keys may be in pages (`pages`).

Query tiles are padded to a multiple of 8 tokens, and their rows to 64-row products: 64 * ceil(G * query_tile / 64) rows
are computed for G query heads. With query_tile 32, G = 1 wastes half of every product, and G = 4 (Llama 3 8B) wastes
nothing.

Work: 4 H flops per (row, listed key) pair. L2 traffic: 2 H elements per (thread block, listed key).
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.gpu import int8_keys, sparse_rows
from tessera.attention.gpu.int8_keys import ROWS_OF_BYTES, convert_blocks, row_scales
from tessera.attention.gpu.pages import page_refusal, places
from tessera.attention.gpu.sparse_rows import NEVER, Config, Cut, Item, Refs, blocks_of, cut_call, read, token_of
from tessera.attention.gpu.warpgroup import HOPPER, ROWS, SHARED_BYTES, per_row, whole_lines
from tessera.attention.kernel import family

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
COLUMNS = 64
"""16-bit numbers per swizzled line of 128 bytes."""


def key_of(refs: Refs, item: Item, at: Array, cut: Cut) -> tuple[Array, Array]:
    """Return the position of the first key of a unit (see `sparse_rows`), and whether the list holds that unit.

    `at` counts the list's units from the first one that some row sees (`ListBounds.begin`). Past the end of the list,
    the position is that of the last unit.
    """
    per_tile, at, end = cut.spec.tile // cut.unit, at + read(refs, item, "begin"), read(refs, item, "end")
    listed = jnp.maximum(jnp.minimum(at, end - 1), 0)
    tile = refs.tiles[item.b, item.h, item.i, jax.lax.div(listed, per_tile)]
    return tile * cut.spec.tile + jax.lax.rem(listed, per_tile) * cut.unit, at < end


def keys_of(refs: Refs, item: Item, block: Array, cut: Cut) -> list[tuple[Array, Array]]:
    return [key_of(refs, item, block * cut.units + n, cut) for n in range(cut.units)]


def places_of(refs: Refs, item: Item, block: Array, cut: Cut) -> list[tuple]:
    # A page holds whole units (`dispatch` checks that the tile divides it), so each unit is one copy.
    found = [places(refs.pages, item.b, key, cut.unit, cut.page) for key, _ in keys_of(refs, item, block, cut)]
    return list(itertools.chain(*found))


def copies(source, target, landed, sources: list[tuple], item: Item, cut: Cut) -> None:
    for n, (row, key) in enumerate(sources):
        keys = source.at[row, item.h, pl.ds(key, cut.unit)]
        plgpu.copy_gmem_to_smem(keys, target.at[pl.ds(n * cut.unit, cut.unit)], landed)


class Padding(NamedTuple):
    """Invalid values in the last block of a list."""

    some: Array  # whether the block holds keys at or past kv_len
    row: Array  # first row of the block to zero; all later rows (invalid keys and repeated copies) are zeroed, too
    stop: Array  # number of blocks in the list


def padding_of(refs: Refs, item: Item, cut: Cut) -> Padding:
    stop = blocks_of(refs, item, cut)[2]
    last = read(refs, item, "end") - read(refs, item, "begin") - 1
    kept = read(refs, item, "kv_len") - key_of(refs, item, last, cut)[0]
    return Padding((stop > 0) & (kept < cut.unit), jax.lax.rem(last, cut.units) * cut.unit + kept, stop)


def fetch(refs: Refs, items: list[Item], cut: Cut) -> None:
    """Run the fetching warpgroup: copy every block of the lists, K before V, as stages are handed back."""
    padding = [padding_of(refs, item, cut) for item in items]

    def block_step(c, _):
        for item, padded in zip(items, padding, strict=True):

            @pl.when(c < padded.stop)
            def fetch_block(item=item, padded=padded):
                slot, sources = item.slot(c, cut), places_of(refs, item, c, cut)
                # K and V are handed back at different times (see `Rows.rounds`): start K's copies as early as possible.
                pl.when(c >= cut.stages)(lambda: plgpu.barrier_wait(refs.k_free.at[slot]))
                copies(refs.k, refs.k_smem.at[slot], refs.k_full.at[slot], sources, item, cut)
                pl.when(c >= cut.stages)(lambda: plgpu.barrier_wait(refs.v_free.at[slot]))
                full = jnp.where(padded.some & (c == padded.stop - 1), unseen(item, cut), slot)
                copies(refs.v, refs.v_smem.at[slot], refs.v_full.at[full], sources, item, cut)

    jax.lax.fori_loop(0, functools.reduce(jnp.maximum, [p.stop for p in padding]), block_step, None)
    for item, padded in zip(items, padding, strict=True):

        def drain(c, _, item=item):
            plgpu.barrier_wait(refs.k_free.at[item.slot(c, cut)])
            plgpu.barrier_wait(refs.v_free.at[item.slot(c, cut)])

        # Clear before draining: the compute warpgroups hand the last stage back only after they got these values.
        pl.when(padded.some)(functools.partial(clear_values, refs, item, padded, cut))
        jax.lax.fori_loop(jnp.maximum(padded.stop - cut.stages, 0), padded.stop, drain, None)


def fetch_int8(refs: Refs, items: list[Item], cut: Cut) -> None:
    """Run the fetching warpgroup for int8 keys (see `int8_keys`). Rows at or past kv_len become zeros."""
    (item,) = items

    def copy(c, which: int):
        landing, landed = refs.landing.at[which], refs.landed.at[which]
        copies((refs.k, refs.v)[which], landing, landed, places_of(refs, item, c, cut), item, cut)

    def scales(c):
        sources = places_of(refs, item, c, cut)
        return [row_scales(refs.scales, item.h, which, sources, cut.unit) for which in range(2)]

    def valid(c):
        kv_len = read(refs, item, "kv_len")
        return [kv_len - key - n for key, _ in keys_of(refs, item, c, cut) for n in range(0, cut.unit, ROWS)]

    convert_blocks(refs, blocks_of(refs, item, cut)[2], cut.stages, copy, scales, valid)


def unseen(item: Item, cut: Cut) -> int:
    """Return the barrier for a list's last block if some of its values must be zeroed before they are announced."""
    return cut.lists * cut.stages + item.lane


def clear_values(refs: Refs, item: Item, padded: Padding, cut: Cut) -> None:
    """Zero the invalid rows of a list's last block of values, then signal that the block is ready."""
    slot = item.slot(padded.stop - 1, cut)
    plgpu.barrier_wait(refs.v_full.at[unseen(item, cut)])
    for row, column in itertools.product(range(0, cut.block_s, ROWS), range(0, cut.head_dim, COLUMNS)):
        values = refs.v_smem.at[slot, pl.ds(row, ROWS), pl.ds(column, COLUMNS)]
        place = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
        held = plgpu.load(values, layout=plgpu.Layout.WGMMA)
        values[...] = jnp.where(place < padded.row - row, held, jnp.zeros_like(held))
    plgpu.commit_smem()  # a fence: products read through the async proxy
    for _ in range(cut.units):  # v_full expects one arrival per copy; these stand in for the copies that went elsewhere
        plgpu.barrier_arrive(refs.v_full.at[slot])


def hide(s: Array, block: Array, row_block: Array, refs: Refs, item: Item, cut: Cut) -> Array:
    """Set scores [64,X] to -inf where unseen, by one limit per row and unit: cheaper than each key's position."""
    spec, place = cut.spec, plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
    row = token_of(row_block, cut) + read(refs, item, "first")
    last = jnp.minimum(row if spec.causal else row + NEVER, read(refs, item, "kv_len") - 1)
    units = keys_of(refs, item, block, cut)
    moved = [n * cut.unit - key for n, (key, _) in enumerate(units)]
    until = [last + jnp.where(listed, m, -NEVER) for m, (_, listed) in zip(moved, units, strict=True)]
    seen = place <= by_unit(until, place, cut)
    if spec.window is not None:
        seen = seen & (place > by_unit([row - spec.window + m for m in moved], place, cut))
    return jnp.where(seen, s, -jnp.inf)


def by_unit(limits: list, place: Array, cut: Cut) -> Array:
    """Broadcast one limit per row and unit to the columns [64,X] of a block, each of which belongs to one unit."""
    found = per_row(limits[0], place)
    for n in range(1, cut.units):
        found = jnp.where(place >= n * cut.unit, per_row(limits[n], place), found)
    return found


def launch(
    q, kv: KeyValues, spec: AttentionSpec, positions: Positions, selection: Selection, config: Config
) -> AttentionOut:
    """Run attention over the listed tiles only; not differentiable."""
    cut = cut_call(spec, kv.shapes(q, selection), config)
    source = sparse_rows.Source("gpu_prefill_sparse", fetch, hide, arrivals=cut.units)
    if cut.scaled:
        landing = plgpu.SMEM((2, cut.block_s, cut.head_dim), jnp.int8, transforms=ROWS_OF_BYTES)
        landed = plgpu.Barrier(num_arrivals=cut.units, num_barriers=2)
        source = source._replace(fetch=fetch_int8, arrivals=1, scratch={"landing": landing, "landed": landed})
    # TMA needs S in multiples of 8; other caches are copied here.
    scales = int8_keys.padded(kv.scales) if cut.scaled and cut.page is None else kv.scales
    kv = kv._replace(k=whole_lines(kv.k, 2), v=whole_lines(kv.v, 2), scales=scales)
    return sparse_rows.launch(q, kv, positions, selection, cut, source)


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    if spec.tile < 16:
        return f"tile={spec.tile} must be at least 16: smaller tiles are not worth one copy each"
    if shapes.head_dim not in HEAD_DIMS:
        return f"head_dim={shapes.head_dim} must be one of {', '.join(map(str, HEAD_DIMS))}"
    if shapes.scaled and shapes.dtype != "bfloat16":
        return f"dtype={shapes.dtype}: int8 values times their scales may underflow in this dtype; use bfloat16"
    if shapes.scaled and shapes.head_dim == 256:
        return "head_dim=256 must be at most 128 with int8 keys: converting them takes registers that the products need"
    if shapes.scaled and spec.tile < ROWS:
        return f"tile={spec.tile} must be at least {ROWS} with int8 keys: 64 rows are converted at once"
    scale = 1.0 if spec.scale is None else spec.scale
    if not scale > 0:
        return f"scale={scale} must be positive"
    if not any(True for _ in search_space(spec, shapes)):
        return f"head_dim={shapes.head_dim} with window={spec.window} does not fit in the registers"
    return page_refusal(shapes)


def fits(config: Config, spec: AttentionSpec, shapes: Shapes) -> bool:
    """Return whether the config fits in shared memory and compiles without spills; a sweep found the limits."""
    cut = cut_call(spec, shapes, config)
    if cut.smem_bytes > SHARED_BYTES:
        return False
    if shapes.scaled and cut.row_blocks == 2:
        return False  # the fetching warpgroup, which converts, takes the registers
    if config.rows == 2 * ROWS and config.stages == 3 and shapes.head_dim == 128:
        # spills two registers with some tiles and groups (found by `python -m lab study compiles --platform gpu`)
        return False
    columns = cut.row_blocks * (shapes.head_dim + config.block_s)  # accumulators and scores: half a register per column
    plain = spec.tile >= ROWS and (cut.row_blocks == 1 or cut.chunk >= 32)
    most = 256 if spec.window is not None else 384 if plain else 320  # masks and copies of q need registers too
    return columns <= most and cut.row_blocks * config.block_s <= 128


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Choose the config that fits with the most rows, then the longest blocks, then the most stages."""
    return max(search_space(spec, shapes), key=lambda c: (c.rows, c.block_s, c.stages))


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    """Yield every config that fits in shared memory and registers; rows=128 only if query tiles have enough rows."""
    for rows, block_s, stages in itertools.product((64, 128), (64, 128), (2, 3, 4, 6)):
        config = Config(rows=rows, block_s=block_s, stages=stages)
        used = cut_call(spec, shapes, config).row_blocks * ROWS == rows
        if used and fits(config, spec, shapes):
            yield config


KERNELS = family(
    "gpu_prefill",
    ("sparse",),
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
