"""Int8 keys and values on Hopper: their conversion in shared memory, and the loading of their scales.

The tensor core multiplies q and p, which are bfloat16, by keys and values of the same dtype in shared memory. Int8 rows
are therefore copied into separate buffers; threads convert them to bfloat16 and write them where a product reads them.
Compared with bfloat16 keys, global memory sends half as many bytes, and shared memory carries three times as many.

In decode, keys and values are converted without their scales, which is exact, and the scales multiply scores and
weights, one number per key: if the key is s c and the value t d, with scales s and t, then q.(s c) = (q.c) s and
p (t d) = (p t) d. In prefill, where 128 rows share a key, the fetching warpgroup writes s c and t d, rounded to
bfloat16, so the compute warpgroups need no scales.

Threads load scales themselves, because the copy engine (TMA) needs targets aligned to 128 bytes. That is 64 scales, and
a tile may have fewer. Scales of keys at or past kv_len may be NaN.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.gpu.warpgroup import ROWS

STORED_KEYS = 128
"""Scales are padded to a multiple of this many keys, so that a load of a whole block or tile stays inside the array."""
LINE = 64
"""Bytes per swizzled line of int8 rows, and number of columns converted at once: small, to save registers."""
ROWS_OF_BYTES = plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(LINE)
"""Layout transforms of int8 rows in shared memory: a warp's loads in the layout `WIDENED` cause no bank conflicts."""
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""Register layout of one number per column of a product, here one per key."""
WIDENED = plgpu.Layout.WGMMA_UPCAST_2X
"""Register layout in which a thread holds four neighbouring numbers of a row: one int8 load and one bfloat16 store."""
FETCH_REGISTERS, COMPUTE_REGISTERS = 72, 216
"""Registers per thread, in prefill, of a fetching warpgroup that also converts and of each of the two compute
warpgroups: 504 in total, as without int8."""
PER_ROW = WIDENED.reduce(1)
"""Register layout of one number per row of `WIDENED`."""


def padded(scales: Array) -> Array:
    """Pad scales [B,K,2,S] to whole blocks of keys; no copy is made if S is a multiple of STORED_KEYS."""
    missing = -scales.shape[3] % STORED_KEYS
    return jnp.pad(scales, [(0, 0), (0, 0), (0, 0), (0, missing)]) if missing else scales


def widen(source, target) -> None:
    """Convert int8 rows in shared memory to the target's dtype, exactly, and make them visible to products."""
    for row in range(0, source.shape[0], ROWS):
        for column in range(0, source.shape[1], LINE):
            part = pl.ds(row, ROWS), pl.ds(column, LINE)
            held = plgpu.load(source.at[part], layout=WIDENED)
            target[part] = held.astype(target.dtype)
    plgpu.commit_smem()


def dequantise(source, target, scales: list[Array]) -> None:
    """Convert int8 rows in shared memory to scale * row, rounded to the target's dtype, for products to read.

    `scales` holds one array of scales per 64 rows, as `row_scales` returns them.
    """
    for n, scale in enumerate(scales):
        for column in range(0, source.shape[1], LINE):
            part = pl.ds(n * ROWS, ROWS), pl.ds(column, LINE)
            held = plgpu.load(source.at[part], layout=WIDENED).astype(target.dtype)
            target[part] = held * jax.lax.broadcast_in_dim(scale, held.shape, [0])
    plgpu.commit_smem()


def row_scales(scales, head, which: int, sources: list[tuple], size: int) -> list[Array]:
    """Start loading scales of keys (which = 0) or values (1): `size` scales from each place in `sources`, 64 per load.

    `scales` refers to [B,K,2,S] or [P,K,2,page] in global memory; `size` is a multiple of 64.
    """
    at = [(row, head, which, pl.ds(start + n, ROWS)) for row, start in sources for n in range(0, size, ROWS)]
    return [plgpu.load(scales.at[keys], layout=PER_ROW, optimized=False) for keys in at]


def without_padding(scales: list[Array], valid: list[Array]) -> list[Array]:
    """Zero each array of 64 scales from index `valid` on, where rows are padding and their scales may be NaN."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
    return [jnp.where(row < limit, scale, jnp.zeros_like(scale)) for limit, scale in zip(valid, scales, strict=True)]


def convert_blocks(refs, count: Array, stages: int, copy: Callable, scales: Callable, valid: Callable) -> None:
    """Run prefill's fetching warpgroup: convert `count` blocks of K and V to q's dtype, as stages are handed back.

    While one block is converted, the next one is copied: copy(block, 0 for K or 1 for V) starts that. scales(block)
    returns the scales of its keys and values (`row_scales`), and valid(block) the number of valid keys per 64 rows.
    """
    both = ((refs.k_smem, refs.k_full, refs.k_free), (refs.v_smem, refs.v_full, refs.v_free))

    def convert_block(c, held):
        slot, ahead = jax.lax.rem(c, stages), scales(jnp.minimum(c + 1, count - 1))  # a block early: loads take long
        rows = valid(c)
        for which, (target, full, free) in enumerate(both):
            plgpu.barrier_wait(refs.landed.at[which])
            # The copy went to `landing`, so only the conversion has to wait until the stage is handed back.
            pl.when(c >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            dequantise(refs.landing.at[which], target.at[slot], without_padding(held[which], rows))
            plgpu.barrier_arrive(full.at[slot])  # after `dequantise`'s fence: products read the rows asynchronously
            # `landing` has been read (the fence waits for all threads): the next block of K lands while V is converted.
            pl.when(c + 1 < count)(functools.partial(copy, c + 1, which))
        return ahead

    def drain(c, _):  # Pallas' interpreter wants every phase of a barrier observed
        for *_, free in both:
            plgpu.barrier_wait(free.at[jax.lax.rem(c, stages)])

    @pl.when(count > 0)
    def convert():
        for which in range(2):
            copy(0, which)
        jax.lax.fori_loop(0, count, convert_block, scales(0))

    jax.lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)


def load_scales(scales, head, sources: list[tuple], size: int) -> list[tuple[Array, Array]]:
    """Start loading (scales of keys, scales of values) for `size` keys from each place (see `pages.places`)."""
    found = [[scales.at[row, head, which, pl.ds(start, size)] for which in range(2)] for row, start in sources]
    return [tuple(plgpu.load(x, layout=PER_COLUMN, optimized=False) for x in both) for both in found]


def store_scales(loaded: list[tuple[Array, Array]], target) -> None:
    """Write loaded scales end to end to `target` [2, block_s] in shared memory."""
    for n, both in enumerate(loaded):
        for which, part in enumerate(both):
            target[which, pl.ds(n * part.shape[0], part.shape[0])] = part


def per_column(target, which: int, like: Array) -> Array:
    """Read scales of keys (which = 0) or values (1) from shared memory, one per column of `like`, as float32."""
    scale = plgpu.load(target.at[which], layout=PER_COLUMN).astype(jnp.float32)
    return jax.lax.broadcast_in_dim(scale, like.shape, [1])
