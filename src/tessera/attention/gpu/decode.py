"""Decode attention for Hopper: one query row per sequence.

Reading the KV cache limits the speed of decode, so every byte is read only once.

The visible keys of each (sequence, KV head) are cut into `splits` equal runs of key blocks, one thread block per run.
The number of splits is static and their positions follow from kv_len, so a short sequence reads only its own keys. A
thread block is one warpgroup, which packs the G query heads of its KV head into the 64 rows of one product. (The other
rows are zeros: the tensor core has time to spare.) It keeps `stages` blocks of keys and values in flight by TMA and
refills a buffer as soon as the last product has read it. Because one warpgroup both fetches and computes, registers and
shared memory allow two or three thread blocks per multiprocessor; one computes while the others wait. A second launch
merges the partial results of the splits, using their lse.

Int8 keys and values are copied as they are, and then converted to bfloat16 in one additional block of each
(`int8_keys`). Their scales multiply scores and weights. Keys may be in pages (`pages`).

In the dense and score roles, a block holds block_s consecutive keys. In the sparse role, it holds listed tiles, each
copied from its place in the cache; ids ascend, so there, too, the row sees one range of a block's columns. In the score
role, with scores y in bits (times log2(e)) and their running maximum m, the thread block also writes
m + log2(sum of 2^(y - m)) per tile and query head. These numbers go to the *bank*, a small array [J, G] per KV head
(`Refs.bank`), from which the merging launch computes the masses 2^(bank - lse) (`decode_splits`).

Work: 4 H flops per (row, key) pair. Traffic: 2 H elements per visible or listed key and KV head.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Shapes
from tessera.attention.gpu import decode_splits, warpgroup
from tessera.attention.gpu.decode_splits import Cut, Run
from tessera.attention.gpu.int8_keys import ROWS_OF_BYTES, load_scales, padded, per_column, store_scales, widen
from tessera.attention.gpu.pages import page_refusal, places
from tessera.attention.gpu.warpgroup import HOPPER, ROWS, SHARED_BYTES
from tessera.attention.gradient import differentiable_decode
from tessera.attention.kernel import distinct, family, role_of
from tessera.attention.online_softmax import LN_2, LOG2_E, scale_of
from tessera.core.shapes import ceil_div, round_up

DTYPES = ("bfloat16", "float16")
MULTIPROCESSORS, REGISTERS, SHARED = 132, 65_536, 233_472
"""Multiprocessors of an H100 or H200; registers, and bytes of shared memory, per multiprocessor."""
UNEVEN_KEYS = 8192
"""Maximum keys per split in a batch. Splits of this size cost little, and fill the gaps that short sequences leave."""
THREAD_REGISTERS = {(64, 64): 168, (64, 128): 255, (128, 64): 200, (256, 64): 255}
"""(head_dim, block_s) -> registers per thread, as compiled, in the role that takes the most. Other pairs spill."""
INT8_REGISTERS = {(64, 64): 200, (64, 128): 255, (128, 64): 255, (256, 64): 255}
"""`THREAD_REGISTERS` for int8 keys and values, which a thread converts in registers, a few at a time."""
NARROW = 4
"""Minimum copies per block of listed keys for which a thread takes up to 200 registers, even at head_dim 64."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes."""

    block_s: int  # keys per block (in the sparse role, listed keys): 64 or 128
    stages: int  # buffers in shared memory, each for one block of keys and values
    splits: int  # runs of blocks per sequence and KV head that are computed in parallel and merged

    def __post_init__(self):
        if self.block_s not in (64, 128):
            raise ValueError(f"block_s={self.block_s} must be 64 or 128")
        for name in ("stages", "splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


class Refs(NamedTuple):
    """References of the kernel body: arrays in global memory, then shared memory and barriers."""

    positions: Positions
    q: Any  # [B, K, stored G, H]
    k: Any  # [B, K, S, H], or a pool of pages
    v: Any
    tiles: Any  # [B, K, 1, C]; sparse only
    count: Any  # [B, K, 1]; sparse only
    scales: Any  # [B, K, 2, S]; int8 only
    pages: Any  # [B, J]; only if k, v and scales are pools of pages, which have pages instead of sequences
    out: Any  # [splits, B, K, stored G, H] float32
    lse: Any  # likewise: lse in bits, repeated in every column
    bank: Any  # [B, K, parts, units, rows] float32: log2 of each unit's sum of exponentials; score only
    totals: Any  # [splits, B, K, parts, rows] float32: lse in bits, once per row; score only
    q_block: Any = None  # [64, H]
    k_block: Any = None  # [stages, block_s, H]
    v_block: Any = None
    out_block: Any = None  # [64, H] float32; out_block and lse_block share the memory of k_block and v_block
    lse_block: Any = None
    row_block: Any = None  # [2, units, 64] float32: sums on their way to the bank, for two blocks of keys; score only
    q_landed: Any = None  # barrier
    k_landed: Any = None  # barrier [stages]
    v_landed: Any = None
    k_wide: Any = None  # [block_s, H]: a block of int8 keys, converted for the product; int8 only
    v_wide: Any = None
    scale_block: Any = None  # [stages, 2, block_s]


class Place(NamedTuple):
    """Work of one thread block: the keys of one split (`run`) for up to 64 query heads (group `part`) of a KV head."""

    split: Any
    sequence: Any
    head: Any
    part: Any
    run: Run


def name_refs(refs: tuple, cut: Cut) -> Refs:
    it, sparse, score = iter(refs), cut.role == "sparse", cut.role == "score"
    positions = Positions(next(it), next(it), next(it))
    paged = cut.shapes.page is not None
    passed = (True, True, True, sparse, sparse, cut.shapes.scaled, paged, True, True, score, score)  # q to totals
    return Refs(positions, *[next(it) if some else None for some in passed])


def locate(refs: Refs, cut: Cut) -> Place:
    split, sequence = jax.lax.axis_index("split"), jax.lax.axis_index("sequence")
    head, part = (op(jax.lax.axis_index("head"), jnp.int32(cut.parts)) for op in (jax.lax.div, jax.lax.rem))
    positions = Positions(*(x[sequence] for x in refs.positions))
    listed = refs.count[sequence, head, 0] if cut.role == "sparse" else 0
    return Place(split, sequence, head, part, decode_splits.find_run(cut, split, positions, listed))


def starts_of(refs: Refs, cut: Cut, at: Place, block) -> list:
    return decode_splits.unit_starts(cut, at.run, block, lambda entry: refs.tiles[at.sequence, at.head, 0, entry])


def places_of(refs: Refs, cut: Cut, at: Place, block) -> list[tuple]:
    starts = starts_of(refs, cut, at, block)
    found = [places(refs.pages, at.sequence, start, cut.unit, cut.shapes.page) for start in starts]
    return list(itertools.chain(*found))


def fetch(refs: Refs, cut: Cut, at: Place, sources: list[tuple], slot) -> None:
    """Start the copies of a block's keys and values from their places into buffer `slot`."""
    for source, blocks, landed in ((refs.k, refs.k_block, refs.k_landed), (refs.v, refs.v_block, refs.v_landed)):
        for i, (row, start) in enumerate(sources):
            block = blocks.at[slot, pl.ds(i * cut.piece, cut.piece)]
            plgpu.copy_gmem_to_smem(source.at[row, at.head, pl.ds(start, cut.piece)], block, landed.at[slot])


def scales_of(refs: Refs, cut: Cut, at: Place, sources: list[tuple]) -> list:
    return load_scales(refs.scales, at.head, sources, cut.piece) if cut.shapes.scaled else []


def in_bits(z: Array, cut: Cut) -> Array:
    scale, cap = scale_of(cut.spec, cut.shapes.head_dim), cut.spec.softcap
    if cap is None:
        return z * (scale * LOG2_E)
    return (cap * LOG2_E) * warpgroup.tanh(z, scale / cap)


def block_scores(refs: Refs, cut: Cut, slot) -> Array:
    if not cut.shapes.scaled:
        return warpgroup.scores(refs.q_block, refs.k_block.at[slot])
    # No warp still reads the block before: k_wide and v_wide take turns, and each `widen` ends with a barrier.
    widen(refs.k_block.at[slot], refs.k_wide)
    z = warpgroup.scores(refs.q_block, refs.k_wide)
    return z * per_column(refs.scale_block.at[slot], 0, z)


def absorb(refs: Refs, cut: Cut, config: Config, at: Place, i, carry: tuple) -> tuple:
    """Add block i of this run to the running softmax, refill its buffer and, in the score role, write the bank."""
    m_old, l, acc = carry  # noqa: E741
    run, slot = at.run, jax.lax.rem(i, jnp.int32(config.stages))
    block = run.first + i
    lo, hi = decode_splits.visible_columns(cut, run, block, starts_of(refs, cut, at, block))
    # Read tile ids, page tables and scales of the block to copy next before this block's products: they are loads from
    # global memory, whose latency the products then hide.
    ahead = jnp.minimum(i + config.stages, run.count - 1)
    ahead = places_of(refs, cut, at, run.first + ahead)
    ahead_scales = scales_of(refs, cut, at, ahead)

    plgpu.barrier_wait(refs.k_landed.at[slot])
    y = in_bits(block_scores(refs, cut, slot), cut)
    key = plgpu.broadcasted_iota(jnp.int32, y.shape, 1, layout=plgpu.Layout.WGMMA)
    seen = (key >= lo) & (key < hi)
    y = jnp.where(seen, y, -jnp.inf)
    m = jnp.maximum(m_old, y.max(axis=1))
    p = jnp.exp2(y - warpgroup.per_row(m, y))
    alpha = jnp.exp2(m_old - m)
    sums = [p[:, n * cut.unit : (n + 1) * cut.unit].sum(axis=1) for n in range(cut.units)]
    l = l * alpha + functools.reduce(jnp.add, sums)  # noqa: E741
    acc = acc * warpgroup.per_row(alpha, acc)
    if cut.role == "score":
        half = jax.lax.rem(i, jnp.int32(2))  # the copy of block i - 1's sums may still read the other half
        for n, total in enumerate(sums):
            refs.row_block[half, n] = m + jnp.log(total) * LOG2_E

    plgpu.barrier_wait(refs.v_landed.at[slot])
    if cut.shapes.scaled:
        widen(refs.v_block.at[slot], refs.v_wide)
        p = jnp.where(seen, p * per_column(refs.scale_block.at[slot], 1, p), 0.0)  # a hidden scale may be NaN
        acc = warpgroup.accumulate(acc, p.astype(refs.v_wide.dtype), refs.v_wide)
    else:
        # Only blocks at the ends of the range hold values that no row sees; a branch is cheaper than a mask in each.
        pl.when((lo > 0) | (hi < cut.block_s))(lambda: warpgroup.blank_values(refs.v_block.at[slot], lo, hi))
        acc = warpgroup.accumulate(acc, p.astype(refs.v_block.dtype), refs.v_block.at[slot])

    @pl.when(i + config.stages < run.count)
    def _():
        # The compiler inserts a warpgroup barrier before a copy, so all four warps have read the buffers by then.
        fetch(refs, cut, at, ahead, slot)
        if cut.shapes.scaled:
            store_scales(ahead_scales, refs.scale_block.at[slot])

    if cut.role == "score":
        plgpu.commit_smem()  # the copy engine reads through the async proxy, which sees threads' writes only after this
        for n in range(cut.units):
            rows = refs.row_block.at[half, n, pl.ds(0, cut.rows)]
            plgpu.copy_smem_to_gmem(rows, refs.bank.at[at.sequence, at.head, at.part, block * cut.units + n])
        plgpu.wait_smem_to_gmem(cut.units, wait_read_only=True)  # frees the other half, with the sums of block i - 1
    return m, l, acc


def finish(refs: Refs, cut: Cut, at: Place, state: tuple) -> None:
    """Write out = acc / l and lse in bits; 0 and -inf for rows that saw no key."""
    m, l, acc = state  # noqa: E741
    seen = l > 0
    safe = jnp.where(seen, l, 1.0)
    lse = jnp.where(seen, m + jnp.log(safe) * LOG2_E, -jnp.inf)
    refs.out_block[...] = acc * warpgroup.per_row(1.0 / safe, acc)  # acc is 0 where l is
    refs.lse_block[...] = warpgroup.per_row(lse, acc)
    if cut.role == "score":
        half = jax.lax.rem(at.run.count, jnp.int32(2))  # the other half may still be copied: the last block's sums
        refs.row_block[half, 0] = lse
    plgpu.commit_smem()  # out_block, lse_block and row_block, for the copies below
    if cut.role == "score":
        rows = refs.totals.at[at.split, at.sequence, at.head, at.part]
        plgpu.copy_smem_to_gmem(refs.row_block.at[half, 0, pl.ds(0, cut.rows)], rows)
    for block, target in ((refs.out_block, refs.out), (refs.lse_block, refs.lse)):  # TMA omits rows past stored_groups
        rows = target.at[at.split, at.sequence, at.head, pl.ds(at.part * ROWS, cut.rows)]
        plgpu.copy_smem_to_gmem(block.at[pl.ds(0, cut.rows)], rows)
    plgpu.wait_smem_to_gmem(0)


def body(*refs, cut: Cut, config: Config):
    """Copy q and the first blocks, absorb every block of the run, and write the partial result."""
    head_dim = cut.shapes.head_dim

    def with_memory(shared, **memory):
        names = ("k_block", "v_block", "k_wide", "v_wide"), ("out_block", "lse_block")
        memory |= {name: ref for own, some in zip(names, shared, strict=True) for name, ref in zip(own, some)}
        named = name_refs(refs, cut)._replace(**memory)
        at = locate(named, cut)
        # Rows past G are out of bounds, which the copy engine fills with zeros.
        rows = named.q.at[at.sequence, at.head, pl.ds(at.part * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(rows, named.q_block, named.q_landed)
        for i in range(config.stages):  # fill every buffer; `absorb` refills one as soon as it has read it

            @pl.when(i < at.run.count)
            def _(i=i):
                sources = places_of(named, cut, at, at.run.first + i)
                fetch(named, cut, at, sources, i)
                if cut.shapes.scaled:
                    store_scales(scales_of(named, cut, at, sources), named.scale_block.at[i])

        state = warpgroup.initial_state(head_dim)
        plgpu.barrier_wait(named.q_landed)  # here, after the copies of keys have started: all are in flight together
        step = functools.partial(absorb, named, cut, config, at)
        finish(named, cut, at, jax.lax.fori_loop(0, at.run.count, step, state))

    dtype, scaled = jnp.dtype(cut.shapes.dtype), cut.shapes.scaled
    line = warpgroup.swizzled(dtype)
    stored, stored_line = (jnp.int8, ROWS_OF_BYTES) if scaled else (dtype, line)
    block = plgpu.SMEM((config.stages, cut.block_s, head_dim), stored, transforms=stored_line)
    wide = [plgpu.SMEM((cut.block_s, head_dim), dtype, transforms=line)] * 2 if scaled else []
    out = plgpu.SMEM((ROWS, head_dim), jnp.float32, transforms=warpgroup.swizzled(jnp.float32))
    landed = plgpu.Barrier(num_arrivals=cut.block_s // cut.piece, num_barriers=config.stages)
    # The result is written once no block is in flight and no product reads one: it may take the blocks' memory.
    memory = {
        "q_block": plgpu.SMEM((ROWS, head_dim), dtype, transforms=line),
        "shared": plgpu.RefUnion([block, block, *wide], [out, out]),
        "q_landed": plgpu.Barrier(),
        "k_landed": landed,
        "v_landed": landed,
    }
    if cut.role == "score":
        memory["row_block"] = plgpu.SMEM((2, cut.units, ROWS), jnp.float32)
    if scaled:
        memory["scale_block"] = plgpu.SMEM((config.stages, 2, cut.block_s), jnp.bfloat16)
    pl.run_scoped(with_memory, **memory)


def call(cut: Cut, config: Config):
    """Build the launch: (positions, q, k, v, lists) -> partial out and lse and, in the score role, bank and totals."""
    shapes, lead = cut.shapes, (cut.shapes.batch, cut.shapes.num_kv_heads)
    out = [jax.ShapeDtypeStruct((cut.splits, *lead, cut.stored_groups, shapes.head_dim), jnp.float32)] * 2
    if cut.role == "score":
        out.append(jax.ShapeDtypeStruct((*lead, cut.parts, decode_splits.stored_units(cut), cut.rows), jnp.float32))
        out.append(jax.ShapeDtypeStruct((cut.splits, *lead, cut.parts, cut.rows), jnp.float32))
    return plgpu.kernel(
        functools.partial(body, cut=cut, config=config),
        out_type=out,
        grid=(cut.splits, shapes.num_kv_heads * cut.parts, shapes.batch),
        grid_names=("split", "head", "sequence"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # reductions over a row stay within one warp
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name=f"gpu_decode_{cut.role}",
    )


def attend(q, kv: KeyValues, spec, positions, selection, config: Config) -> AttentionOut:
    """Run the whole call: compute partial results, then merge them."""
    shapes = kv.shapes(q, selection)
    cut = cut_call(spec, shapes, config)
    # TMA copies 8 rows at a time. K and V with S a multiple of 8, and q with G up to 8, are not copied here.
    k, v = (warpgroup.whole_lines(x, 2) for x in (kv.k, kv.v))
    rows = q.reshape(shapes.batch, shapes.num_kv_heads, cut.groups, shapes.head_dim)
    rows = jnp.pad(rows, [(0, 0), (0, 0), (0, cut.stored_groups - cut.groups), (0, 0)])
    lists = () if selection is None else selection
    scales = () if kv.scales is None else (padded(kv.scales) if kv.pages is None else kv.scales,)
    table = () if kv.pages is None else (kv.pages,)
    partial = call(cut, config)(*positions, rows, k, v, *lists, *scales, *table)
    if cut.role == "score":
        out, lse, mass = decode_splits.merge_and_weigh(*partial, cut, positions, q.dtype)
    else:
        (out, lse), mass = decode_splits.merge_splits(*partial, q.dtype), None
    out, lse = (x[:, :, : cut.groups] for x in (out, lse))
    return AttentionOut(out.reshape(q.shape), LN_2 * lse[..., 0].reshape(q.shape[:3]), mass)


def cut_call(spec: AttentionSpec, shapes: Shapes, config: Config) -> Cut:
    return Cut(role_of(spec, shapes), spec, shapes, config.block_s, config.splits)


def shared_bytes(cut: Cut, config: Config) -> int:
    """Return a thread block's bytes of shared memory: for q, for K and V (later the result), tile sums and barriers."""
    head_dim, scales = cut.shapes.head_dim, 0
    blocks = config.stages * config.block_s
    if cut.shapes.scaled:
        blocks, scales = ceil_div(blocks, 2) + config.block_s, round_up(4 * blocks, 1024)
    buffers = 4 * head_dim * max(blocks, 2 * ROWS) + scales
    sums = round_up(8 * ROWS * cut.units, 1024) if cut.role == "score" else 0
    return 2 * ROWS * head_dim + buffers + sums + 8 * (2 * config.stages + 1)


def resident(cut: Cut, config: Config) -> int:
    """Return how many thread blocks run at once on the chip."""
    by_memory = SHARED // (shared_bytes(cut, config) + 1024)  # the system reserves 1 KiB per thread block
    registers = (INT8_REGISTERS if cut.shapes.scaled else THREAD_REGISTERS)[cut.shapes.head_dim, config.block_s]
    registers = max(registers, 200) if cut.role == "sparse" and cut.units >= NARROW else registers
    by_registers = REGISTERS // (128 * registers)
    return MULTIPROCESSORS * max(min(by_memory, by_registers), 1)


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    role = role_of(spec, shapes)
    if shapes.scaled and shapes.dtype != "bfloat16":
        return f"dtype={shapes.dtype}: int8 values times their scales may underflow in this dtype; use bfloat16"
    if shapes.head_dim not in (64, 128, 256):
        return f"head_dim={shapes.head_dim} must be 64, 128 or 256: products read whole swizzled lines of shared memory"
    if role != "dense" and spec.tile < 16:
        return f"tile={spec.tile} must be at least 16: copies and sums work on 16 keys or more"
    if role == "sparse" and shapes.head_dim == 256 and spec.tile < 64:
        return f"tile={spec.tile} must be at least 64 at head_dim=256: registers do not suffice for smaller tiles"
    if role == "score" and shapes.scaled and shapes.head_dim == 256 and spec.tile < 64:
        return f"tile={spec.tile} must be at least 64 at head_dim=256 with int8 keys: registers do not suffice"
    return page_refusal(shapes)


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Choose stages and splits: two or three thread blocks per multiprocessor (one at head_dim=256), each with at least
    64 KB of keys and values in flight (48 KB if they are int8).

    A single sequence gets as many splits as can run at once. A batch, whose lengths may differ, gets at least one split
    per UNEVEN_KEYS keys. A split has at least about four blocks of keys.
    """
    stages = {64: 4, 128: 2 if spec.mass else 3, 256: 2}[shapes.head_dim]
    if shapes.scaled:
        stages = {64: 6, 128: 3, 256: 2}[shapes.head_dim]
    config = Config(block_s=64, stages=stages, splits=1)
    listed = shapes.num_keys if shapes.capacity is None else min(shapes.capacity * spec.tile, shapes.num_keys)
    keys = listed if spec.window is None else min(listed, spec.window + config.block_s)
    cut = cut_call(spec, shapes, config)
    runs = shapes.batch * shapes.num_kv_heads * cut.parts
    splits = max(resident(cut, config) // runs, ceil_div(keys, UNEVEN_KEYS) if shapes.batch > 1 else 1)
    return replace(config, splits=max(min(splits, ceil_div(keys, 4 * config.block_s)), 1))


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    """Yield stages, block sizes and splits around the default that fit in registers and shared memory."""
    best = default_config(spec, shapes)
    splits = (max(best.splits // 2, 1), 2 * best.splits)
    for config in distinct(best, {"block_s": (64, 128), "stages": (2, 3, 4, 6), "splits": splits}, lambda x: x):
        cut = cut_call(spec, shapes, config)
        # With sums of several units and a third stage, the compiler spills
        # (found by `python -m lab study compiles --platform gpu`).
        spills = cut.role == "score" and shapes.head_dim == 256 and cut.units > 1 and config.stages > 2
        fits = shared_bytes(cut, config) <= SHARED_BYTES and not spills
        if fits and (shapes.head_dim, config.block_s) in THREAD_REGISTERS:
            yield config


KERNELS = family(
    "gpu_decode",
    ("dense", "score", "sparse"),
    dtypes=DTYPES,
    supports=supports,
    launch=differentiable_decode(attend),
    Config=Config,
    default_config=default_config,
    search_space=search_space,
    capability=HOPPER,
    scaled=True,
    paged=True,
)
