"""Sparse prefill attention for Hopper over single keys (tile=1, as in the Kascade paper), to measure the cost of tiles.

The kernel is like `gpu.sparse`, but cannot fetch by TMA, whose copies take at least eight rows. Instead, the 128
threads of the fetching warpgroup copy the listed rows of K and V with cp.async, 16 bytes at a time, to where the
products expect them (`place_of`). Keys' positions also go to shared memory, for the masks at the ends of a list. A
thread waits for its own copies of a block, while copies of the next `stages - 2` blocks are in flight, makes them
visible to the tensor core (a proxy fence) and arrives at the block's barrier.

Pallas' interpreter cannot run copies by single threads; there, plain loads of the listed rows replace them. Simulated
tests thus cover the barriers and the masks but not `copy_rows`, which only the checks of compiled code
(`deviceless.gpu`) and lab/gpu/check.sh cover.

Work: 4 H flops per (row, listed key) pair. L2 traffic: 2 H elements per (thread block, listed key), in rows of H
elements.
"""

import itertools
from collections.abc import Iterator

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.gpu import sparse_rows
from tessera.attention.gpu.sparse_rows import NEVER, Config, Cut, Item, Refs, blocks_of, cut_call, read, token_of
from tessera.attention.gpu.warpgroup import HOPPER, LINE_BYTES, SHARED_BYTES, per_row, simulated, swizzled
from tessera.attention.kernel import family

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
COPY_BYTES = 16
"""Bytes per asynchronous copy of a thread: the most that cp.async can copy."""
THREADS = 128
LEAST_STAGES = 3
PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
"""Register layout of one number per thread."""
LIST = plgpu.Layout.WGMMA.reduce(0)
"""Register layout of one number per column of a product."""


def place_of(row, column, columns: int):
    """Return the offset of one of a row's 16-byte columns in swizzled shared memory, in units of 16 bytes.

    Each group of 8 rows is stored as pieces of [8 rows, 128 bytes]. Within its 128-byte line, column c of row r is
    stored at c ^ (r % 8), by the rule of TMA's and wgmma's 128-byte swizzle.
    """
    line = LINE_BYTES // COPY_BYTES
    piece = (row // 8) * (columns // line) + column // line
    return (piece * 8 + row % 8) * line + ((column % line) ^ (row % 8))


def copy_rows(refs: Refs, item: Item, first: Array, slot: Array, cut: Cut) -> None:
    """Start this thread's part of the copies of block_s keys and values, listed from entry `first` on.

    Entries past the end of the list copy the last key, with position NEVER.
    """
    last = read(refs, item, "end") - 1
    if simulated():  # the interpreter has no copies by single threads

        def copy_row(row, _):
            key = refs.tiles[item.b, item.h, item.i, jnp.minimum(first + row, last)]
            refs.k_smem[slot, row] = refs.k[item.b, item.h, key]
            refs.v_smem[slot, row] = refs.v[item.b, item.h, key]
            refs.ids[slot, row] = jnp.where(first + row <= last, key, NEVER)

        jax.lax.fori_loop(0, cut.block_s, copy_row, None)
        return
    columns = cut.head_dim * jnp.dtype(cut.dtype).itemsize // COPY_BYTES
    # Neighbouring threads copy neighbouring 16-byte columns of a row, so that a row's copies share memory transactions;
    # the thread block's 128 threads take `together` rows at a time.
    together, lines = THREADS // columns, swizzled(cut.dtype)
    thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=PER_THREAD)
    place = place_of(thread // columns, thread % columns, columns)
    (kv_heads, num_keys), capacity = refs.k.shape[1:3], refs.tiles.shape[3]
    memory, one = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    swizzled_memory = plgpu.RefType(lines)

    @plgpu.inline_mgpu(
        arg_types=(memory, memory, memory, swizzled_memory, swizzled_memory, memory, PER_THREAD, one, one, one, one)
    )
    def start(_, *operands):
        k, v, tiles, k_smem, v_smem, ids, *numbers = operands
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        number = ir.MemRefType(k.type).element_type
        place, first, last, base, nth_list = (x.registers.item() for x in numbers)
        place = vector.extract(place, dynamic_position=[], static_position=[0])
        thread = arith.remui(mosaic.utils.thread_idx(), mosaic.c(THREADS, i32))
        column, row = (op(thread, mosaic.c(columns, i32)) for op in (arith.remui, arith.divui))
        place = arith.muli(place, mosaic.c(8, i32))  # 16 bytes are 8 numbers
        # All lists together may hold more entries than 32 bits count.
        listed = arith.muli(arith.extui(i64, nth_list), mosaic.c(capacity, i64))
        listed = mosaic.utils.getelementptr(mosaic.utils.memref_ptr(tiles), [listed], i32)

        def key_at(row):
            at = arith.addi(first, row)
            key = llvm.load(i32, mosaic.utils.getelementptr(listed, [arith.minsi(at, last)], i32))
            return key, arith.cmpi(arith.CmpIPredicate.sle, at, last)

        # The rows of a pass lie `together` rows, a multiple of 8, after those of the pass before: the swizzle, which
        # depends on the row modulo 8, is the same, and `place` needs to be computed only once.
        for n in range(cut.block_s // together):
            key, _ = key_at(arith.addi(row, mosaic.c(n * together, i32)))
            line = arith.addi(arith.extui(i64, base), arith.extui(i64, key))
            at = arith.muli(line, mosaic.c(cut.head_dim, i64))
            at = arith.addi(at, arith.extui(i64, arith.muli(column, mosaic.c(8, i32))))
            to = arith.addi(place, mosaic.c(n * together * cut.head_dim, i32))
            for source, target in ((k, k_smem), (v, v_smem)):
                source = mosaic.utils.getelementptr(mosaic.utils.memref_ptr(source), [at], number)
                source = llvm.addrspacecast(llvm.PointerType.get(address_space=1), source)
                target = mosaic.utils.getelementptr(mosaic.utils.memref_ptr(target), [to], number)
                # CG: through L2 only. A thread block reads a row once, so L1 would not help.
                nvvm.cp_async_shared_global(target, source, COPY_BYTES, nvvm.LoadCacheModifierKind.CG)
        nvvm.cp_async_commit_group()
        # One position per thread. With blocks of 64 keys, two threads write the same number to the same place.
        row = arith.remui(thread, mosaic.c(cut.block_s, i32))
        key, inside = key_at(row)
        target = mosaic.utils.getelementptr(mosaic.utils.memref_ptr(ids), [row], i32)
        llvm.store(arith.select(inside, key, mosaic.c(NEVER, i32)), target)

    head = item.b * kv_heads + item.h
    k_smem, v_smem, ids = (x.at[slot] for x in (refs.k_smem, refs.v_smem, refs.ids))
    numbers = first, last, head * num_keys, head * cut.num_tiles + item.i
    start(refs.k, refs.v, refs.tiles, k_smem, v_smem, ids, place, *numbers)


def wait_for_copies(left: int) -> None:
    """Wait until at most `left` blocks of this thread's copies are in flight; make the others visible to products."""

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(left)

    if not simulated():
        wait()
    plgpu.commit_smem()  # cp.async writes through the threads' proxy; products read through the async proxy


def fetch(refs: Refs, items: list[Item], cut: Cut) -> None:
    """Run the fetching warpgroup: copy every block of the list as stages are handed back, stages - 2 in flight.

    The other two are in use: a block's values are handed back only after the next block's scores.
    """
    (item,), ahead = items, cut.stages - 2
    begin, stop = read(refs, item, "begin"), blocks_of(refs, item, cut)[2]

    def wait_free(c, _=None):
        plgpu.barrier_wait(refs.k_free.at[item.slot(c, cut)])
        plgpu.barrier_wait(refs.v_free.at[item.slot(c, cut)])

    def announce(c, _=None):
        plgpu.barrier_arrive(refs.k_full.at[item.slot(c, cut)])
        plgpu.barrier_arrive(refs.v_full.at[item.slot(c, cut)])

    def block_step(c, _):
        pl.when(c >= cut.stages)(lambda: wait_free(c))
        copy_rows(refs, item, begin + c * cut.block_s, item.slot(c, cut), cut)

        @pl.when(c >= ahead)
        def before():
            wait_for_copies(ahead)  # groups complete in order: the oldest block, c - ahead, has landed
            announce(c - ahead)

    jax.lax.fori_loop(0, stop, block_step, None)
    # The last `ahead` blocks are still in flight; then drain (Pallas' interpreter wants every phase observed).
    wait_for_copies(0)
    jax.lax.fori_loop(jnp.maximum(stop - ahead, 0), stop, announce, None)
    jax.lax.fori_loop(jnp.maximum(stop - cut.stages, 0), stop, wait_free, None)


def hide(s: Array, block: Array, row_block: Array, refs: Refs, item: Item, cut: Cut) -> Array:
    """Set scores [64,X] to -inf where a row does not see a key."""
    key = plgpu.load(refs.ids.at[item.slot(block, cut)], layout=LIST)
    key = jax.lax.broadcast_in_dim(key, s.shape, [1])
    seen = key < NEVER
    if cut.spec.causal:
        row = per_row(token_of(row_block, cut) + read(refs, item, "first"), s)
        seen = key <= row
        if cut.spec.window is not None:
            seen = seen & (key > row - cut.spec.window)
    return jnp.where(seen, s, -jnp.inf)


def cut_keys(spec: AttentionSpec, shapes: Shapes, config: Config) -> Cut:
    """Compute the sizes of a launch, with one list per thread block even if a query tile has few rows."""
    if config.stages < LEAST_STAGES:
        raise ValueError(f"stages={config.stages} must be at least {LEAST_STAGES}")
    return cut_call(spec, shapes, config)._replace(lists=1)


def launch(
    q, kv: KeyValues, spec: AttentionSpec, positions: Positions, selection: Selection, config: Config
) -> AttentionOut:
    """Run attention over the listed keys only; not differentiable."""
    cut = cut_keys(spec, kv.shapes(q, selection), config)
    ids = plgpu.SMEM((cut.stages, cut.block_s), jnp.int32)
    source = sparse_rows.Source("gpu_keys_sparse", fetch, hide, arrivals=1, scratch={"ids": ids})
    return sparse_rows.launch(q, kv, positions, selection, cut, source)


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    if spec.tile != 1:
        return f"tile={spec.tile} must be 1: gpu_prefill_sparse is faster for larger tiles"
    if shapes.head_dim not in HEAD_DIMS:
        return f"head_dim={shapes.head_dim} must be one of {', '.join(map(str, HEAD_DIMS))}"
    scale = 1.0 if spec.scale is None else spec.scale
    if not scale > 0:
        return f"scale={scale} must be positive"
    return None


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Choose the longest blocks that fit in shared memory, then the most stages."""
    return max(search_space(spec, shapes), key=lambda c: (c.rows, c.block_s, c.stages))


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    for block_s, stages in itertools.product((64, 128), (3, 4, 6)):
        config = Config(rows=64, block_s=block_s, stages=stages)
        ids_bytes = 4 * stages * block_s
        if cut_keys(spec, shapes, config).smem_bytes + ids_bytes <= SHARED_BYTES:
            yield config


KERNELS = family(
    "gpu_keys",
    ("sparse",),
    dtypes=DTYPES,
    supports=supports,
    launch=launch,
    Config=Config,
    default_config=default_config,
    search_space=search_space,
    capability=HOPPER,
)
