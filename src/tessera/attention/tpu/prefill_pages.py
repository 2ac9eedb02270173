"""Key blocks of a paged TPU prefill call: pages are copied from HBM into one of two buffers while the other is in use.

Contiguous keys reach the body of `prefill` as windows that the grid's pipeline fetches. Paged keys would need one
window per page. Here, each grid step instead starts to copy the next key block of its row block (or, at the end, the
first key block of the next row block). Then it runs the body of `prefill` on the buffer that holds the current key
block. Row blocks of one head therefore run in order on one core; heads and sequences are independent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.contract import Positions
from tessera.attention.tpu import pages
from tessera.attention.tpu.prefill_blocks import Cut, key_range, whole


class Pool(NamedTuple):
    """References of the copies: pools in HBM, the sequence's page table in SMEM, two buffers per pool, semaphores."""

    arrays: tuple[Any, ...]  # K and V [P,K,page,H], then any scales [P,K,2,page]
    table: Any  # [1,1,J]
    buffers: tuple[Any, ...]  # [2,1,block_s,H] twice, then [2,1,2,block_s]
    arrived: Any  # [2, arrays]


def scratch(cut: Cut, dtype) -> list:
    """Return the scratch that `body` needs; it follows the scratch of `prefill.body`."""
    block = pltpu.VMEM((2, 1, cut.block_s, cut.head_dim), dtype)
    scales = [pltpu.VMEM((2, 1, 2, cut.block_s), jnp.bfloat16)] * cut.scaled
    return [block, block, *scales, pltpu.SemaphoreType.DMA((2, 2 + cut.scaled)), pltpu.SMEM((2,), jnp.int32)]


def body(inner: Callable, q_start, kv_len, q_len, q, *refs, cut: Cut):
    """Run grid step (b, h, i, j): start fetching the next key block, await the current one, and run `inner` on it."""
    n = 2 + cut.scaled
    *rest, arrived, state = refs[n + 1 :]
    rest, buffers = rest[:-n], tuple(rest[-n:])
    pool = Pool(refs[:n], refs[n], buffers, arrived)
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    keys, after = (key_range(b, x, Positions(q_start, kv_len, q_len), cut) for x in (i, i + 1))
    block = keys.lo + j

    @pl.when((i == 0) & (j == 0))
    def first():
        state[0] = 0  # the buffer of this step's block
        state[1] = 0  # whether the previous row block has fetched this one's first block

    slot = state[0]

    @pl.when(block < keys.hi)
    def fetch_and_wait():
        @pl.when((j == 0) & (state[1] == 0))
        def lead_in():
            start(pool, block, keys.kv_len, slot, "lead", cut)

        own = block + 1 < keys.hi
        more = own | (after.lo < after.hi)

        @pl.when(more)
        def ahead():
            start(pool, jnp.where(own, block + 1, after.lo), keys.kv_len, 1 - slot, "ahead", cut)

        wait(pool, block, keys.kv_len, slot, cut)
        state[0] = 1 - slot
        state[1] = more.astype(jnp.int32)

    inner(q_start, kv_len, q_len, q, *(x.at[pl.ds(slot, 1)] for x in buffers), *rest, cut=cut)


def held(block, kv_len, cut: Cut):
    """Count the units of a block that hold valid keys; the other units are not copied, and masks hide their keys."""
    return jnp.clip(whole(kv_len - block * cut.block_s + cut.unit - 1, cut.unit), 0, cut.block_s // cut.unit)


def copy_unit(pool: Pool, block, first, i: int, slot, cut: Cut) -> list:
    """Build the copies of the block's unit number first + i, where i is a constant."""
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


def start(pool: Pool, block, kv_len, slot, name: str, cut: Cut) -> None:
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


def wait(pool: Pool, block, kv_len, slot, cut: Cut) -> None:
    """Wait for a block's valid keys; semaphores count bytes, so one wait covers a whole block."""
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
