"""Decode attention for TPU: one query row per sequence.

Reading the KV cache limits the speed of decode, so every byte is read only once. K and V stay in HBM. A grid step
processes one sequence and a few KV heads. It loops over the blocks of block_s keys that hold the sequence's visible
keys (a run-time trip count). While it computes on one of two buffers, it copies the next block into the other; during
its last block it copies the first block of the next sequence. A ragged batch therefore wastes no step, and the copies
never pause. A block that is only partly visible is copied in small units, so that less than one unit is copied
needlessly at each end of the visible range. Int8 keys and values enter the matrix unit as bfloat16, which holds them
exactly. Their scales are copied with them and multiply the scores and the weights; in all three arrays, keys lie along
lanes.

In the dense and score roles, a block holds block_s consecutive keys. In the sparse role, it holds the listed tiles of
each head, laid end to end. Ids ascend, so there, too, a row sees one range [lo, hi), now of positions in the list, and
the same mask works. The ids reach SMEM in pieces: each step gets its own piece and the next step's.

In the score role, the matrix unit also sums each tile's weights (split exactly into three bfloat16 parts). A scratch
array, the bank, keeps log2(s) + m for each tile's sum s, where m is the running maximum that s uses. Scores, m and lse
are in bits (times log2(e)). After the last block, the mass is 2^(bank - lse), summed over the G rows.

If keys are in pages, a sparse call's lists name units of the pool instead of units of a sequence; nothing else changes.
Dense and score calls copy a block page by page; the page tables of this sequence and the next reach SMEM as lists do.

Work: 4 H flops per (row, key) pair. Traffic: 2 H elements per visible or listed key and KV head.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Shapes
from tessera.attention.gradient import differentiable_decode
from tessera.attention.kernel import distinct, family, role_of
from tessera.attention.online_softmax import FLOOR, LN_2, LOG2_E, scale_of
from tessera.attention.tpu import decode_blocks, pages
from tessera.attention.tpu.decode_blocks import LANES, Cut, Ranges, Stream, cut_call
from tessera.attention.tpu.matrix_unit import chip, product, thirds
from tessera.core.shapes import ceil_div, round_up

DTYPES = ("bfloat16", "float32")
COPY_BYTES = 1 << 20
"""Target bytes of K per block, and of V: large enough that the transfer takes far longer than a copy's latency."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes, clipped to the call's sizes."""

    block_s: int  # keys per block and head (in the sparse role, listed keys)
    block_heads: int  # KV heads per grid step, rounded down to a divisor of K
    splits: int = 1  # parts of the visible range that run in parallel and are merged by lse; always 1 in the score role

    def __post_init__(self):
        for name in ("block_s", "block_heads", "splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


class Refs(NamedTuple):
    """References of the kernel body: the stream of K and V blocks, the queries, the outputs, then scratch in VMEM."""

    stream: Stream
    q: Any  # [1, 1, heads * rows, H]
    out: Any  # [1, 1, 1, heads * rows, H]
    lse: Any  # [1, 1, 1, heads * rows, 128]
    mass: Any  # [1, 1, heads, banks * 128]; score only
    m: Any  # [heads * rows, 128]: the running maximum, repeated in every lane; l, the running sum, likewise
    l: Any  # noqa: E741
    acc: Any  # [heads * rows, H]
    tile_of: Any  # [block_s, 128] one-hot: the tile of each key of a block; score only
    bank: Any  # [banks, heads * rows, 128]: log2 of each tile's sum; score only


def name_refs(refs: tuple, cut: Cut) -> Refs:
    it = iter(refs)
    sparse, score = cut.role == "sparse", cut.role == "score"
    ranges = Ranges(*(next(it) for _ in Ranges._fields))
    q, ids, k, v = next(it), next(it) if sparse or cut.table else None, next(it), next(it)
    scales = next(it) if cut.scaled else None
    out, lse, mass = next(it), next(it), next(it) if score else None
    stream = Stream(ranges, ids, k, v, next(it), next(it), next(it), scales, next(it) if cut.scaled else None)
    return Refs(
        stream, q, out, lse, mass, *(next(it) for _ in range(3)), *((next(it), next(it)) if score else (None,) * 2)
    )


def spread(x: Array, width: int) -> Array:
    """Widen x [rows, 128], whose lanes are all equal, to [rows, width]; whole registers are reused, not copied."""
    return jnp.tile(x, (1, width // LANES)) if width % LANES == 0 else jnp.broadcast_to(x[:, :1], (x.shape[0], width))


def score_block(refs: Refs, cut: Cut, step, head: int, block, slot) -> tuple[Array, Array | None]:
    """Return scores in bits [rows, block_s] of a head's block, -inf where unseen, and any scales of values, 0 there."""
    rows, scale = pl.ds(head * cut.rows, cut.rows), scale_of(cut.spec, cut.head_dim)
    z = product(refs.q[0, 0, rows], refs.stream.k_block[slot, head], 0 if cut.lanes else 1, cut.exact)
    if cut.scaled:
        scales = refs.stream.scale_block[slot, head].astype(jnp.float32)
        z = z * scales[:1]
    cap = cut.spec.softcap
    y = z * (scale * LOG2_E) if cap is None else (cap * LOG2_E) * jnp.tanh(z * (scale / cap))
    lo, hi = decode_blocks.span(refs.stream, cut, step, head, block)
    key = jax.lax.broadcasted_iota(jnp.int32, y.shape, 1)
    seen = (
        (key >= lo)
        & (key < hi)
        & (cut.role != "sparse" or decode_blocks.listed_keys(refs.stream, cut, step, head, block))
    )
    v_scale = jnp.where(seen, scales[1:], 0.0) if cut.scaled else None  # p is 0 there, and 0 * NaN is NaN
    return jnp.where(seen, y, -jnp.inf), v_scale


def absorb(refs: Refs, cut: Cut, step, block, slot) -> None:
    """Add one block of every head to the running softmax. The heads are independent, so their latencies overlap."""
    state, weights = [], []
    # Store only after all heads are computed: no store may stand between one head's work and the next's.
    for head in range(cut.heads):
        rows = pl.ds(head * cut.rows, cut.rows)
        y, v_scale = score_block(refs, cut, step, head, block, slot)
        m_old = refs.m[rows]
        m = jnp.maximum(m_old, jnp.max(y, axis=1, keepdims=True))
        alpha = jnp.exp2(m_old - m)
        p = jnp.exp2(y - spread(m, cut.block_s))
        l = refs.l[rows] * alpha + jnp.sum(p, axis=1, keepdims=True)  # noqa: E741
        weight = p * v_scale if cut.scaled else p
        acc = refs.acc[rows] * spread(alpha, cut.head_dim) + product(
            weight, refs.stream.v_block[slot, head], 1 if cut.lanes else 0, cut.exact
        )
        state.append((m, l, acc))
        weights.append(p)
    for head, values in enumerate(state):
        for ref, value in zip((refs.m, refs.l, refs.acc), values, strict=True):
            ref[pl.ds(head * cut.rows, cut.rows)] = value
    if cut.role == "score":
        bank_sums(refs, cut, block, jnp.concatenate(weights), jnp.concatenate([m for m, _, _ in state]))


def bank_sums(refs: Refs, cut: Cut, block, p: Array, m: Array) -> None:
    """Store log2(s) + m in each tile's lane of `refs.bank`; s is the tile's sum of the weights p = 2^(y - m)."""
    # One product of three stacked parts: the one-hot matrix enters the matrix unit once.
    sums = product(jnp.concatenate(thirds(p)), refs.tile_of[...], 0)
    rows = cut.heads * cut.rows
    sums = sums[:rows] + (sums[rows : 2 * rows] + sums[2 * rows :])
    per_block = cut.block_s // cut.spec.tile
    bank, lane = block * per_block // LANES, block * per_block % LANES
    at = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1) - lane
    held = refs.bank[bank]
    # The product leaves the sums in lanes 0, 1, ...: rotate them to their tiles' lanes in the bank.
    refs.bank[bank] = jnp.where((at >= 0) & (at < per_block), pltpu.roll(jnp.log2(sums), lane, 1) + m, held)


def finish(refs: Refs, cut: Cut, index) -> None:
    """Write out = acc / l, lse and, in the score role, the masses from the bank."""
    l = refs.l[...]  # noqa: E741
    seen = l > 0
    safe = jnp.where(seen, l, 1.0)
    out = jnp.where(spread(l, cut.head_dim) > 0, refs.acc[...] / spread(safe, cut.head_dim), 0.0)
    refs.out[0, 0, 0] = out.astype(refs.out.dtype)
    bits = refs.m[...] + jnp.log2(safe)
    refs.lse[0, 0, 0] = jnp.where(seen, LN_2 * bits, -jnp.inf)
    if cut.role != "score":
        return
    per_block = cut.block_s // cut.spec.tile
    start = refs.stream.ranges.first[index] * per_block
    stop = start + refs.stream.ranges.count[index] * per_block
    row = jax.lax.broadcasted_iota(jnp.int32, bits.shape, 0) % cut.rows
    lane = jax.lax.broadcasted_iota(jnp.int32, bits.shape, 1)

    def write(bank, _):
        with jax.named_scope("mass"):
            tile = bank * LANES + lane
            real = (row < cut.groups) & (tile >= start) & (tile < stop)
            mass = jnp.where(real, jnp.exp2(refs.bank[bank] - bits), 0.0)
            mass = mass.reshape(cut.heads, cut.rows, LANES).sum(1)
            refs.mass[0, 0, :, pl.ds(pl.multiple_of(bank * LANES, LANES), LANES)] = mass

    def clear(bank, _):
        with jax.named_scope("clear"):
            zeros = jnp.zeros((cut.heads, LANES), jnp.float32)
            refs.mass[0, 0, :, pl.ds(pl.multiple_of(bank * LANES, LANES), LANES)] = zeros

    # Tiles outside the visible range hold no sums: clear all masses, then write those of the range.
    jax.lax.fori_loop(0, cut.banks, clear, None)
    jax.lax.fori_loop(start // LANES, (stop + LANES - 1) // LANES, write, None)


def body(*refs, cut: Cut):
    """Process one sequence (in the sparse role, one piece of its lists) for one group of KV heads."""
    refs = name_refs(refs, cut)
    step = pl.program_id(1)
    index = pl.program_id(0) * cut.steps + step
    ranges = refs.stream.ranges
    first, count, before = ranges.first[index], ranges.count[index], ranges.before[index]
    move = decode_blocks.move_tiles if cut.role == "sparse" else decode_blocks.move_keys

    @pl.when(step % cut.pieces == 0)
    def _():
        with jax.named_scope("begin"):
            refs.m[...] = jnp.full_like(refs.m, FLOOR)
            refs.l[...] = jnp.zeros_like(refs.l)
            refs.acc[...] = jnp.zeros_like(refs.acc)

    if cut.role == "score":

        @pl.when(step == 0)
        def _():
            with jax.named_scope("one_hot"):
                key, lane = (jax.lax.broadcasted_iota(jnp.int32, refs.tile_of.shape, d) for d in (0, 1))
                refs.tile_of[...] = jnp.where(key // cut.spec.tile == lane, 1.0, 0.0).astype(jnp.bfloat16)

    fetched = (step > 0) & (ranges.count[jnp.maximum(index - 1, 0)] > 0)  # the previous step copied our first block

    @pl.when((count > 0) & ~fetched)
    def _():
        with jax.named_scope("lead_in"):
            move(refs.stream, cut, step, first, before % 2, "start", "lead")

    # The next step of the chain: its first block is copied while this step's last block is computed on. The parity of
    # all blocks before it (`Ranges.before`) tells which buffer that is, so no state passes from step to step.
    at = jnp.minimum(step + 1, cut.steps - 1) - step + index
    next_first, next_count = ranges.first[at], jnp.where(step + 1 < cut.steps, ranges.count[at], 0)

    def one_block(i, _):
        with jax.named_scope("block"):
            slot, more = (before + i) % 2, i + 1 < count

            @pl.when(more | (next_count > 0))
            def _():
                with jax.named_scope("prefetch"):
                    ahead = jnp.where(more, first + i + 1, next_first)
                    move(refs.stream, cut, jnp.where(more, step, step + 1), ahead, 1 - slot, "start", "start")

            # Wait for this block only after the next one's copies have started, so that HBM never idles. Semaphores
            # count bytes, so the waits must add up to what was copied: `move` takes the same branches for both.
            move(refs.stream, cut, step, first + i, slot, "wait", "wait")
            if not cut.scaled:  # an int8 value is never NaN
                pl.when(~decode_blocks.is_whole(refs.stream, cut, step, first + i))(
                    lambda: decode_blocks.blank_values(refs.stream, cut, step, first + i, slot)
                )
            absorb(refs, cut, step, first + i, slot)

    jax.lax.fori_loop(0, count, one_block, None)

    @pl.when(step % cut.pieces == cut.pieces - 1)
    def _():
        with jax.named_scope("finish"):
            finish(refs, cut, index)


def attend(q, kv: KeyValues, spec, positions, selection, config: Config) -> AttentionOut:
    """Run the whole call: lay out q as rows per KV head, launch the kernel once, and merge the splits."""
    shapes = kv.shapes(q, selection)
    cut = cut_call(spec, shapes, config.block_s, config.block_heads, config.splits)
    # Padding rows may hold NaN. G rows fill whole registers of 8; the matrix unit has time to spare for the others.
    rows = jnp.where(
        (positions.q_len > 0)[:, None, None, None], q[:, 0].reshape(cut.batch, cut.kv_heads, -1, cut.head_dim), 0
    )
    rows = jnp.pad(rows, [(0, 0), (0, 0), (0, cut.rows - cut.groups), (0, 0)]).astype(jnp.float32)
    rows = rows.reshape(cut.batch, cut.kv_heads // cut.heads, cut.heads * cut.rows, cut.head_dim)
    keys = decode_blocks.lay_out(cut, kv)
    lists = None if selection is None else decode_blocks.list_units(cut, selection)
    table = None if kv.pages is None else pages.clipped(kv.pages, kv.k)
    ids = () if table is None else (decode_blocks.stream_table(table),)
    if lists is not None:
        ids = (decode_blocks.stream_lists(cut, lists, table),)
    out, lse, *mass = call(cut, q.dtype, kv.k.dtype)(
        *decode_blocks.find_ranges(cut, positions, lists), rows, *ids, *keys
    )
    out, lse = decode_blocks.merge(out, lse[..., 0])
    shape = (cut.batch, cut.kv_heads, cut.rows)
    out = out.reshape(*shape, cut.head_dim)[:, :, : cut.groups].reshape(q.shape).astype(q.dtype)
    lse = lse.reshape(shape)[:, :, : cut.groups].reshape(q.shape[:3])
    if not mass:
        return AttentionOut(out, lse)
    tiles = ceil_div(shapes.num_keys, spec.tile)
    return AttentionOut(out, lse, mass[0].reshape(*shape[:2], 1, -1)[..., :tiles])


def call(cut: Cut, out_dtype, dtype):
    groups, rows = cut.kv_heads // cut.heads, cut.heads * cut.rows
    out = jax.ShapeDtypeStruct(
        (cut.splits, cut.batch, groups, rows, cut.head_dim), out_dtype if cut.splits == 1 else jnp.float32
    )
    lse = jax.ShapeDtypeStruct((cut.splits, cut.batch, groups, rows, LANES), jnp.float32)
    mass = jax.ShapeDtypeStruct((cut.batch, groups, cut.heads, cut.banks * LANES), jnp.float32)

    def of_sequence(*block):
        return pl.BlockSpec((1, 1, *block), lambda x, t, *_: (t // cut.pieces, x // cut.splits, 0, 0))

    def of_split(*block):
        return pl.BlockSpec(
            (1, 1, 1, *block), lambda x, t, *_: (x % cut.splits, t // cut.pieces, x // cut.splits, 0, 0)
        )

    in_specs, out_specs = [of_sequence(rows, cut.head_dim)], [of_split(rows, cut.head_dim), of_split(rows, LANES)]
    if cut.role == "sparse":
        in_specs.append(
            pl.BlockSpec(
                (1, 1, 1, 2 * cut.heads * cut.piece),
                lambda x, t, *_: (x // cut.splits, t, 0, 0),
                memory_space=pltpu.SMEM,
            )
        )
    if cut.table:
        table = pl.BlockSpec((1, 1, 1, 2 * cut.table), lambda x, t, *_: (0, t, 0, 0), memory_space=pltpu.SMEM)
        in_specs.append(table)
    sizes = (cut.head_dim, cut.block_s) if cut.lanes else (cut.block_s, cut.head_dim)
    buffer = pltpu.VMEM((2, cut.heads, *sizes), dtype)
    scratch = [
        buffer,
        buffer,
        pltpu.SemaphoreType.DMA((2, 2 + cut.scaled)),
        *([pltpu.VMEM((2, cut.heads, 2, cut.block_s), jnp.bfloat16)] if cut.scaled else []),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, cut.head_dim), jnp.float32),
    ]
    if cut.role == "score":
        out_specs.append(of_sequence(cut.heads, cut.banks * LANES))
        scratch += [pltpu.VMEM((cut.block_s, LANES), jnp.bfloat16), pltpu.VMEM((cut.banks, rows, LANES), jnp.float32)]
    return pl.pallas_call(
        functools.partial(body, cut=cut),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Ranges._fields),
            grid=(cut.chains, cut.steps),
            in_specs=[*in_specs, *[pl.BlockSpec(memory_space=pl.ANY)] * (2 + cut.scaled)],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=[out, lse] + [mass] * (cut.role == "score"),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),  # a chain's steps hand buffers on: in order, on one core
            vmem_limit_bytes=chip().vmem_limit,
            disable_bounds_checks=True,  # ids and tables are clipped before the launch
        ),
        name=f"tpu_decode_{cut.role}",
    )


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    role = role_of(spec, shapes)
    if shapes.head_dim > 256:
        return f"head_dim={shapes.head_dim} must be at most 256"
    if role != "dense" and spec.tile < 16:
        return f"tile={spec.tile} must be at least 16: copies and sums work on 16 keys or more"
    return pages.refusal(shapes, in_rows=False)


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Choose up to 8 KV heads per grid step and about COPY_BYTES of K per block, or twice that in the sparse role.

    The cores of a chip share the groups of heads if each core gets equally many. Otherwise they share the splits of
    each sequence, except in the score role, which has one split.
    """
    cores = chip().cores
    most = min(8, max(shapes.num_kv_heads // cores, 1))
    heads = next(h for h in range(most, 0, -1) if shapes.num_kv_heads % h == 0)
    lanes = cut_call(spec, shapes, LANES, 1, 1).lanes
    width = shapes.head_dim if lanes else round_up(shapes.head_dim, LANES)
    per_key = heads * width * (1 if shapes.scaled else jnp.dtype(shapes.dtype).itemsize)
    block_s = min(max(1 << (COPY_BYTES * (1 + (shapes.capacity is not None)) // per_key).bit_length() - 1, LANES), 4096)
    shared = shapes.num_kv_heads // heads % cores == 0
    return Config(block_s=block_s, block_heads=heads, splits=1 if shared or spec.mass else cores)


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    best = default_config(spec, shapes)
    axes = {
        "block_s": [max(best.block_s * times // 4, LANES) for times in (1, 2, 4, 8)],
        "block_heads": [max(best.block_heads // parts, 1) for parts in (1, 2, 4)],
        "splits": (1, 2, 4),
    }
    return distinct(best, axes, lambda c: cut_call(spec, shapes, c.block_s, c.block_heads, c.splits))


def executions(spec: AttentionSpec, shapes: Shapes, config: Config) -> Mapping[str, float]:
    """Count runs of each named scope, and HBM bytes, if sequences and lists are full and every copy is one tile."""
    cut = cut_call(spec, shapes, config.block_s, config.block_heads, config.splits)
    start = 0 if spec.window is None else max(shapes.num_keys - spec.window, 0)
    listed = min((shapes.capacity or 0) * cut.unit, shapes.num_keys)
    lo, hi = (0, listed) if cut.role == "sparse" else (start, shapes.num_keys)
    return decode_blocks.count_scopes(cut, lo, hi, jnp.dtype(shapes.dtype).itemsize)


KERNELS = family(
    "tpu_decode",
    ("dense", "score", "sparse"),
    dtypes=DTYPES,
    supports=supports,
    launch=differentiable_decode(attend),
    Config=Config,
    default_config=default_config,
    search_space=search_space,
    executions=executions,
    scaled=True,
    paged=True,
)
