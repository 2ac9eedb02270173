"""Prefill attention for TPU: the dense role, and the score role, which also computes tile masses in the same pass.

A grid step computes one row block of a KV head (block_t tokens x G query heads, 2,048 to 4,096 rows) against one key
block of block_s keys. A key block falls into one of four cases:
- No row sees any of it: it is neither fetched nor computed.
- Every row sees all of it: straight-line code runs block_s / chunk online-softmax updates without masks.
- Only the causal diagonal cuts it: keys before the row block run without masks. The corner (keys at the rows' own
  positions) runs in straight-line code, in updates of sub_t keys, each applied only to the rows at or after its keys.
  On average, sub_t / 2 masked keys per row are computed needlessly.
- Another mask cuts it, or the row block is not aligned with the key block: a loop runs turn_t tokens at a time.

Rows lie in VMEM as [U, G, sub_t]: U token blocks of sub_t tokens, each for G heads, so that all heads share one mask.
No array is transposed in HBM: q is head-major, as the fusion that applies the rotary embedding can write it; K and V
are head-major, as the cache stores them; out is [B,T,N*H], as the output projection reads it, if G * H is a multiple of
128.

The vector unit's work besides exp2 decides the speed (docs/tpu.md). Where the matrix unit has idle columns, it
therefore computes the row sum: V is extended by columns of ones. The score role extends V by one-hot columns instead
(column = tile mod 128), so that the accumulator holds every tile's sum; adding up these columns gives the row sum. The
sums of every 128 tiles form a bank, which is stored with the running maximum m that the sums use, and is multiplied by
2^(m - lse) after the last block, m and lse in bits.

Work: 4 H flops per visible (row, key) pair. Int8 keys and values are converted to the queries' dtype in VMEM, one chunk
at a time.

Contiguous keys reach `body` as windows that the grid's pipeline fetches. Paged keys would need one window per page.
There, each grid step instead starts to copy the next key block of its row block (or, at the end, the first key block of
the next row block) into one of two buffers, and runs `body` on the buffer that holds the current key block
(`paged_body`). Row blocks of one head then run in order on one core; heads and sequences are independent.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention import work
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Shapes
from tessera.attention.gradient import differentiable
from tessera.attention.kernel import distinct, family
from tessera.attention.online_softmax import FLOOR, query_factor
from tessera.attention.tpu import backward as tpu_backward
from tessera.attention.tpu import pages, prefill_blocks
from tessera.attention.tpu.matrix_unit import chip, dequantised, estimate
from tessera.attention.tpu.prefill_blocks import LANES, Config, Cut, Range, cut_call, whole
from tessera.attention.tpu.prefill_rows import Refs, Rows, absorb, load, own_keys, split, store, visible, write_results
from tessera.core.shapes import ceil_div

DTYPES = ("float32", "bfloat16")
BANK_BYTES = 24 << 20
"""Target maximum bytes of VMEM for the banks (tile sums) of one row block; `default_config` limits its rows to fit."""


def body(q_start, kv_len, q_len, *refs, cut: Cut):
    """Run grid step (b, h, i, j): row block i of KV head h against the j-th key block that it needs."""
    if not cut.scaled:
        refs = (*refs[:3], None, *refs[3:])
    if not cut.spec.mass:
        refs = (*refs[:6], None, *refs[6:])
    refs = Refs(*refs, *[None] * (len(Refs._fields) - len(refs)))
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    keys = prefill_blocks.key_range(b, i, Positions(q_start, kv_len, q_len), cut)
    block = keys.lo + j
    start = block * cut.block_s
    bank = whole(start, cut.bank_keys) if cut.spec.mass else 0
    no_mask = prefill_blocks.is_whole(keys.first, start, keys.kv_len, cut)

    @pl.when(j == 0)
    @jax.named_scope("first")
    def first():
        take_queries(refs, i, keys.q_len, cut)  # once per row block: scaled queries stay in VMEM for all key blocks
        refs.m[...] = jnp.full_like(refs.m, FLOOR)
        refs.acc[...] = jnp.zeros_like(refs.acc)
        if refs.sums is not None and cut.banks == 1:  # without this, rows that see no key would keep an earlier block's
            refs.sums[0] = jnp.zeros(refs.sums.shape[1:], jnp.float32)

    if cut.banks > 1:

        @pl.when((block < keys.hi) & ((j == 0) | (start & (cut.bank_keys - 1) == 0)))
        @jax.named_scope("new_bank")
        def new_bank():
            refs.sums[bank] = jnp.zeros(refs.sums.shape[1:], jnp.float32)

    # Grid steps past the last key block (block >= hi) compute nothing: the grid is as long as the longest row block's.
    @pl.when((block < keys.hi) & no_mask)
    @jax.named_scope("full")
    def full():
        state = load(refs, slice(None), bank)
        for c in range(cut.block_s // cut.chunk):
            state = update(refs, slice(None), state, start, pl.ds(c * cut.chunk, cut.chunk), bank, cut)
        store(refs, slice(None), bank, state)

    on_diagonal = prefill_blocks.is_diagonal(keys.first, start, keys.kv_len, cut)

    if cut.corner:

        @pl.when((block < keys.hi) & ~no_mask & on_diagonal)
        def diagonal_block():
            before_corner(refs, start, keys, bank, cut)
            corner(refs, start, keys, bank, cut)

    @pl.when((block < keys.hi) & ~no_mask & ~on_diagonal)
    def partial():
        turn = functools.partial(partial_block, refs, start=start, keys=keys, bank=bank, cut=cut)
        jax.lax.fori_loop(0, cut.block_t // cut.turn_t, lambda u, _: turn(u), None)

    if cut.banks > 1:

        @pl.when((block == keys.hi - 1) | ((block < keys.hi) & ((start + cut.block_s) & (cut.bank_keys - 1) == 0)))
        @jax.named_scope("keep_maximum")
        def keep_maximum():
            # The bank's sums are relative to the maximum so far; later banks may raise it. Keep it, one lane per bank.
            lane = jax.lax.broadcasted_iota(jnp.int32, refs.m.shape, 1)
            kept = refs.bank_m[whole(bank, LANES)]
            refs.bank_m[whole(bank, LANES)] = jnp.where(lane == bank & (LANES - 1), refs.m[...], kept)

    @pl.when(j == pl.num_programs(3) - 1)
    @jax.named_scope("last")
    def last_step():
        write_results(refs, i, keys, cut)


def before_corner(refs: Refs, start, keys: Range, bank, cut: Cut) -> None:
    """Absorb, block_t at a time, the keys of the key block that precede the row block; every row sees them."""
    if cut.block_t == cut.block_s:
        return

    @jax.named_scope("before_corner")
    def step(index, _):
        state = load(refs, slice(None), bank)
        for c in range(cut.block_t // cut.chunk):
            at = pl.ds(pl.multiple_of(index * cut.block_t + c * cut.chunk, cut.chunk), cut.chunk)
            state = update(refs, slice(None), state, start, at, bank, cut)
        store(refs, slice(None), bank, state)

    jax.lax.fori_loop(0, whole(keys.first - start, cut.block_t), step, None)


@jax.named_scope("corner")
def corner(refs: Refs, start, keys: Range, bank, cut: Cut) -> None:
    """Absorb the keys at the rows' own positions, in updates of sub_t keys for the rows at or after these keys."""
    rows, mask = cut.groups * cut.sub_t, own_keys(cut)
    state = load(refs, slice(None), bank)
    for c in range(cut.block_t // cut.sub_t):
        at = pl.ds(pl.multiple_of(keys.first - start + c * cut.sub_t, cut.sub_t), cut.sub_t)
        state = update(refs, slice(c * rows, cut.rows), state, start, at, bank, cut, mask)
        # Rows of token block c see no later key: their state is final, and the next update starts at token block c + 1.
        done, state = split(state, rows)
        if not cut.state_in_vmem:  # otherwise `update` has stored it
            store(refs, slice(c * rows, (c + 1) * rows), bank, done)


def partial_block(refs: Refs, u, start, keys: Range, bank, cut: Cut) -> None:
    """Run pass u, over turn_t tokens of the row block, against a key block whose ends need masks."""
    first = keys.first + u * cut.turn_t
    size = cut.turn_t * cut.groups
    rows = pl.ds(pl.multiple_of(u * size, size), size)
    begin, full_begin, full_stop, stop = prefill_blocks.step_ranges(first, start, keys.kv_len, cut, jnp)

    def step(index, _, masked: bool, name: str):
        with jax.named_scope(name):
            state = load(refs, rows, bank)
            for c in range(cut.step // cut.chunk):
                offset = pl.multiple_of(index * cut.step + c * cut.chunk, cut.chunk)
                seen = visible(first, start + offset, keys.kv_len, cut) if masked else ()
                state = update(refs, rows, state, start, pl.ds(offset, cut.chunk), bank, cut, *seen)
            store(refs, rows, bank, state)

    if cut.spec.window is not None:
        jax.lax.fori_loop(begin, full_begin, functools.partial(step, masked=True, name="window_step"), None)
    jax.lax.fori_loop(full_begin, full_stop, functools.partial(step, masked=False, name="whole_step"), None)
    jax.lax.fori_loop(full_stop, stop, functools.partial(step, masked=True, name="masked_step"), None)


def update(refs: Refs, rows: slice, state: Rows, start, at: pl.Slice, bank, cut: Cut, mask=None, real=None) -> Rows:
    """Absorb the keys at index `at` of the key block that begins at position `start`."""
    k, v = refs.k[0, 0, at], refs.v[0, 0, at]
    if cut.scaled:
        scales, dtype = refs.scales[0, 0, :, at], refs.q_scaled.dtype
        k, v = dequantised(k, scales[:1], dtype), dequantised(v, scales[1:], dtype)
    state = absorb(state, refs.q_scaled[rows], k, v, cut, start + at.start, mask, real)
    if cut.state_in_vmem:  # the round trip ends the values' lives: registers hold them only within one update
        store(refs, rows, bank, state)
        return load(refs, rows, bank)
    return state


def take_queries(refs: Refs, i, q_len, cut: Cut) -> None:
    """Scale the row block's queries into VMEM as rows [U, G, sub_t]; padding tokens, which may hold NaN, become 0."""
    factor = query_factor(cut.spec, cut.head_dim)
    shape = (cut.sub_t, cut.head_dim)
    for u in range(cut.block_t // cut.sub_t):
        tokens = slice(u * cut.sub_t, (u + 1) * cut.sub_t)
        token = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (i * cut.block_t + u * cut.sub_t)
        for g in range(cut.groups):
            x = jnp.where(token < q_len, refs.q[0, g, tokens].astype(jnp.float32) * factor, 0.0)
            at = (u * cut.groups + g) * cut.sub_t
            refs.q_scaled[at : at + cut.sub_t] = x.astype(refs.q_scaled.dtype)


class Pool(NamedTuple):
    """References of the copies: pools in HBM, the sequence's page table in SMEM, two buffers per pool, semaphores."""

    arrays: tuple[Any, ...]  # K and V [P,K,page,H], then any scales [P,K,2,page]
    table: Any  # [1,1,J]
    buffers: tuple[Any, ...]  # [2,1,block_s,H] twice, then [2,1,2,block_s]
    arrived: Any  # [2, arrays]


def page_scratch(cut: Cut, dtype) -> list:
    """Return the scratch of `paged_body`, which follows that of `body`."""
    block = pltpu.VMEM((2, 1, cut.block_s, cut.head_dim), dtype)
    scales = [pltpu.VMEM((2, 1, 2, cut.block_s), jnp.bfloat16)] * cut.scaled
    return [block, block, *scales, pltpu.SemaphoreType.DMA((2, 2 + cut.scaled)), pltpu.SMEM((2,), jnp.int32)]


def paged_body(q_start, kv_len, q_len, q, *refs, cut: Cut):
    """Run grid step (b, h, i, j): start fetching the next key block, await the current one, and run `body` on it."""
    n = 2 + cut.scaled
    *rest, arrived, state = refs[n + 1 :]
    rest, buffers = rest[:-n], tuple(rest[-n:])
    pool = Pool(refs[:n], refs[n], buffers, arrived)
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    keys, after = (prefill_blocks.key_range(b, x, Positions(q_start, kv_len, q_len), cut) for x in (i, i + 1))
    block = keys.lo + j

    @pl.when((i == 0) & (j == 0))
    def first():
        state[0] = 0  # the buffer of this step's block
        state[1] = 0  # whether the previous row block has fetched this one's first block

    # Scalars in SMEM keep their values from one grid step to the next, because the row axis is "arbitrary": in order.
    slot = state[0]

    @pl.when(block < keys.hi)
    def fetch_and_wait():
        @pl.when((j == 0) & (state[1] == 0))
        def lead_in():
            start_block(pool, block, keys.kv_len, slot, "lead", cut)

        own = block + 1 < keys.hi
        more = own | (after.lo < after.hi)

        # Start the next copies before awaiting the current ones, so that the copy engine never idles. The other buffer
        # is free: the previous grid step computed on it, and its loads were done when this one began.
        @pl.when(more)
        def ahead():
            start_block(pool, jnp.where(own, block + 1, after.lo), keys.kv_len, 1 - slot, "ahead", cut)

        await_block(pool, block, keys.kv_len, slot, cut)  # as late as possible: `body` reads the buffer next
        state[0] = 1 - slot
        state[1] = more.astype(jnp.int32)

    body(q_start, kv_len, q_len, q, *(x.at[pl.ds(slot, 1)] for x in buffers), *rest, cut=cut)


def held(block, kv_len, cut: Cut):
    """Count the units of a block that hold valid keys; the other units are not copied, and masks hide their keys."""
    return jnp.clip(whole(kv_len - block * cut.block_s + cut.unit - 1, cut.unit), 0, cut.block_s // cut.unit)


def copy_unit(pool: Pool, block, first, i: int, slot, cut: Cut) -> list:
    unit = cut.unit
    at = pl.multiple_of(first * unit, unit)
    entry, offset = pages.find(block * cut.block_s + at + i * unit, cut.page, unit)
    page, head, into = pool.table[0, 0, entry], pl.program_id(1), pl.ds(at + i * unit, unit)
    copies = []
    for n, (array, buffer) in enumerate(zip(pool.arrays, pool.buffers, strict=True)):
        source, target = array.at[page, head], buffer.at[slot, 0]
        if n == 2:  # scales lie along lanes
            source, target = source.at[:, pl.ds(offset, unit)], target.at[:, into]
        else:
            source, target = source.at[pl.ds(offset, unit)], target.at[into]
        copies.append(pltpu.make_async_copy(source, target, pool.arrived.at[slot, n]))
    return copies


def start_block(pool: Pool, block, kv_len, slot, name: str, cut: Cut) -> None:
    """Start the copies of a block's valid keys; `name` prefixes the named scopes."""
    count, at_once = held(block, kv_len, cut), cut.units_at_once
    runs = whole(count, at_once)

    def run(n, _):
        with jax.named_scope(f"{name}_run"):
            for i in range(at_once):
                for copy in copy_unit(pool, block, n * at_once, i, slot, cut):
                    copy.start()

    def single(n, _):
        with jax.named_scope(f"{name}_unit"):
            for copy in copy_unit(pool, block, n, 0, slot, cut):
                copy.start()

    jax.lax.fori_loop(0, runs, run, None)
    jax.lax.fori_loop(runs * at_once, count, single, None)


def await_block(pool: Pool, block, kv_len, slot, cut: Cut) -> None:
    # A semaphore counts bytes: a wait for a copy of the whole buffer covers all copies into it. A partly valid block
    # got fewer bytes, and its waits must add up to exactly those: the next block uses the same semaphore.
    count = held(block, kv_len, cut)
    every = count == cut.block_s // cut.unit

    @pl.when(every)
    def at_once():
        for n, buffer in enumerate(pool.buffers):
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], pool.arrived.at[slot, n]).wait()

    @pl.when(~every)
    def one_by_one():
        def single(n, _):
            with jax.named_scope("wait_unit"):
                for copy in copy_unit(pool, block, n, 0, slot, cut):
                    copy.wait()

        jax.lax.fori_loop(0, count, single, None)


def attend(
    q: Array,
    k: Array,
    v: Array,
    positions: Positions,
    spec: AttentionSpec,
    config: Config,
    scales: Array | None = None,
    table: Array | None = None,
) -> AttentionOut:
    """Run the kernel on [B,T,N,H] queries; k, v, scales and table are the fields of `KeyValues`."""
    shapes = KeyValues(k, v, table, scales).shapes(q)
    cut = cut_call(spec, shapes, config)
    batch, num_queries, num_heads, dim = q.shape
    kv_heads = k.shape[1]
    if num_queries < cut.block_t:  # only an array shorter than one block needs padding
        q = jnp.pad(q, [(0, 0), (0, cut.block_t - num_queries), (0, 0), (0, 0)])
    scales = () if scales is None else (scales,)
    if cut.page is None and (short := cut.block_s - k.shape[2]) > 0:
        k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, short), (0, 0)]) for x in (k, v))
        scales = [jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, short)]) for x in scales]
    q = jnp.swapaxes(q, 1, 2)
    blocks, steps = ceil_div(num_queries, cut.block_t), prefill_blocks.launch_steps(spec, shapes, cut)
    last_block = ceil_div(shapes.num_keys, cut.block_s) - 1

    def key_block(b, h, i, j, *positions):
        keys, after = (prefill_blocks.key_range(b, x, Positions(*positions), cut) for x in (i, i + 1))
        # Steps past the last block point at the next row block's first key block, so that it is fetched during compute.
        return b, h, jnp.where(keys.lo + j < keys.hi, keys.lo + j, jnp.minimum(after.lo, last_block)), 0

    # q and the results keep their block while j runs: the pipeline fetches and writes them once per row block.
    rows = pl.BlockSpec((1, cut.groups, cut.block_t, dim), lambda b, h, i, j, *_: (b, h, i, 0))
    result, result_shape = rows, q.shape
    if cut.flat:
        result = pl.BlockSpec((1, cut.block_t, cut.groups * dim), lambda b, h, i, j, *_: (b, i, h))
        result_shape = (batch, q.shape[2], num_heads * dim)
    block = pl.BlockSpec((1, 1, cut.block_s, dim), key_block)
    in_lanes = pl.BlockSpec((1, 1, 2, cut.block_s), lambda *at: (*key_block(*at)[:2], 0, key_block(*at)[2]))
    keys_in = [block, block, *[in_lanes] * cut.scaled]
    out_specs = [result, pl.BlockSpec((1, 1, 1, 1, cut.rows), lambda b, h, i, j, *_: (b, h, i, 0, 0))]
    out_shape = [
        jax.ShapeDtypeStruct(result_shape, q.dtype),
        jax.ShapeDtypeStruct((batch, kv_heads, blocks, 1, cut.rows), jnp.float32),
    ]
    wide = cut.head_dim + (0 if spec.mass else cut.extra)
    scratch = [
        pltpu.VMEM((cut.rows, dim), q.dtype),
        pltpu.VMEM((cut.rows, LANES), jnp.float32),
        pltpu.VMEM((cut.rows, wide), jnp.float32),
    ]
    banks = cut.banks
    if spec.mass or not cut.extra:
        scratch.append(pltpu.VMEM((banks, cut.rows, LANES), jnp.float32))
    if spec.mass:
        tiles = cut.block_t // spec.query_tile
        out_specs.append(pl.BlockSpec((1, 1, 1, tiles, banks * LANES), lambda b, h, i, j, *_: (b, h, i, 0, 0)))
        out_shape.append(jax.ShapeDtypeStruct((batch, kv_heads, blocks, tiles, banks * LANES), jnp.float32))
        scratch.append(pltpu.VMEM((ceil_div(banks, LANES), cut.rows, LANES), jnp.float32))
    run, order = functools.partial(body, cut=cut), "parallel"
    if table is not None:
        table = pages.clipped(table, k)[:, None]
        keys_in = [*[pl.BlockSpec(memory_space=pl.ANY)] * (2 + cut.scaled), pages.table_spec(table)]
        scratch += page_scratch(cut, k.dtype)
        run, order = functools.partial(paged_body, cut=cut), "arbitrary"
    out, lse, *mass = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads, blocks, steps),
            in_specs=[rows, *keys_in],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", order, "arbitrary"),
            vmem_limit_bytes=chip().vmem_limit,
            disable_bounds_checks=table is not None,  # the table is clipped; a check costs 7 instruction bundles a copy
        ),
        cost_estimate=estimate(work.prefill(spec, shapes), dim),
        name="tessera_tpu_score" if spec.mass else "tessera_tpu_dense",
    )(*positions, q, k, v, *scales, *([] if table is None else [table]))
    out = out.reshape(batch, -1, num_heads, dim) if cut.flat else jnp.swapaxes(out, 1, 2)
    lse = lse.reshape(batch, kv_heads, blocks, -1, cut.groups, cut.sub_t)
    lse = lse.transpose(0, 2, 3, 5, 1, 4).reshape(batch, -1, num_heads)[:, :num_queries]
    if not spec.mass:
        return AttentionOut(out[:, :num_queries], lse)
    mass = mass[0].reshape(batch, kv_heads, -1, banks * LANES)
    tiles = ceil_div(num_queries, spec.query_tile), ceil_div(shapes.num_keys, spec.tile)
    return AttentionOut(out[:, :num_queries], lse, mass[:, :, : tiles[0], : tiles[1]])


def launch(q, kv: KeyValues, spec: AttentionSpec, positions: Positions, selection, config: Config) -> AttentionOut:
    """Run dense prefill, or the score role if spec.mass; `dense` runs the calls that it can: it is differentiable."""
    if spec.mass or kv.scales is not None or kv.pages is not None:
        return attend(q, kv.k, kv.v, positions, spec, config, kv.scales, kv.pages)
    return dense(q, kv.k, kv.v, positions, spec, config)


dense = differentiable(attend, lambda *call: tpu_backward.gradients(*call[:-1]))  # its block sizes are its own
"""Dense prefill, differentiable in q, k and v."""


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    if shapes.head_dim > 256:
        return f"head_dim={shapes.head_dim} must be at most 256"
    if (reason := pages.refusal(shapes, in_rows=True)) is not None or not spec.mass:
        return reason
    if spec.tile not in (16, 32, 64, 128):
        return f"tile={spec.tile} must be 16, 32, 64 or 128: the kernel sums masses over 16 keys or more"
    rows = cut_call(spec, shapes, Config(block_t=1, block_s=LANES, chunk=LANES)).rows
    if rows * prefill_blocks.bank_bytes(spec, shapes) > 2 * BANK_BYTES:
        return f"the masses of {rows} rows over {shapes.num_keys} keys in tiles of {spec.tile} do not fit in VMEM"
    return None


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Choose 2,048 or 4,096 rows by 4,096 keys (float32: 1,024 by 1,024), or less if the masses would not fit in VMEM.

    The sizes come from compiled schedules (LOG.md). 256 keys per update suit v7x and chips with 128-wide matrix units;
    512 keys suit v6e. With more rows per block, the cost of a block's first and last step is shared by more rows, which
    matters where products are fast. On v7x, keeping the state in VMEM halves the register spills; on v6e it is slower,
    and on chips with 128-wide matrix units it makes no difference.
    """
    groups = shapes.num_heads // shapes.num_kv_heads
    _, width, vmem_bytes, _ = chip()
    rows, block_s = (1024, 1024) if shapes.dtype == "float32" else (4096 if width == 256 else 2048, 4096)
    if spec.mass and shapes.head_dim > LANES and vmem_bytes <= 64 << 20:
        block_s = min(block_s, 2048)  # with longer blocks, the spills of the masses do not fit VMEM
    if spec.mass:
        while rows > LANES and rows * prefill_blocks.bank_bytes(spec, shapes) > BANK_BYTES:
            rows //= 2
    return Config(
        block_t=tokens_of(rows, groups, spec),
        block_s=block_s,
        chunk=512 if width == 256 and vmem_bytes > 64 << 20 else 256,
        matrix_sums=shapes.head_dim % LANES != 0 or shapes.head_dim + LANES <= width,
        half_exp=width == 256,
        state_in_vmem=width == 256 and vmem_bytes <= 64 << 20,
    )


def tokens_of(rows: int, groups: int, spec: AttentionSpec) -> int:
    """Return the tokens per row block of at most `rows` rows.

    For causal calls without a window, the tokens are rounded down to a power of two: `corner` needs that, and it saves
    more time than the smaller row block costs (LOG.md).
    """
    tokens = max(rows // groups, 1)
    return 1 << (tokens.bit_length() - 1) if spec.causal and spec.window is None else tokens


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    groups = shapes.num_heads // shapes.num_kv_heads
    axes = {
        "block_t": [tokens_of(rows, groups, spec) for rows in (512, 1024, 2048, 4096, 8192)],
        "block_s": (1024, 2048, 4096, 8192),
        "chunk": (128, 256, 512, 1024),
        "step": (256, 512, 1024, 2048),
        "matrix_sums": (False, True),
        "state_in_vmem": (False, True),
    }
    return distinct(default_config(spec, shapes), axes, functools.partial(cut_call, spec, shapes))


KERNELS = family(
    "tpu_prefill",
    ("dense", "score"),
    dtypes=DTYPES,
    supports=supports,
    launch=launch,
    Config=Config,
    default_config=default_config,
    search_space=search_space,
    executions=prefill_blocks.executions,
    scaled=True,
    paged=True,
)
