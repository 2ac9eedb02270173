"""How TPU kernels read keys and values in pages: which page sizes they take, and how page tables are kept in SMEM.

A copy moves a whole page or a *unit*, the smallest part of a page that a kernel copies. SMEM holds the page tables of
one or two sequences at a time, double-buffered, but never those of the whole batch.
"""

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int32

from tessera.attention.contract import Shapes
from tessera.attention.tpu.matrix_unit import LANES
from tessera.core.shapes import round_up

PACKED = 16
"""Rows of a packed bfloat16 register. A page of fewer rows could not be copied."""
MOST_PAGES = 1 << 14
"""Maximum pages per sequence. Decode keeps the tables of two sequences in SMEM, double-buffered: 256 KiB of 1 MiB."""


def refusal(shapes: Shapes, *, in_rows: bool) -> str | None:
    """Return why a TPU kernel cannot read the call's pages; None if it can or the keys are contiguous.

    `in_rows` says whether the kernel reads every key as a row of H lanes, whatever H is.
    """
    if shapes.page is None:
        return None
    if in_rows and shapes.head_dim % LANES:
        reason = "otherwise a TPU stores keys along lanes, and XLA would copy the whole pool for this kernel"
        return f"head_dim={shapes.head_dim} must be a multiple of {LANES} for keys in pages: {reason}"
    least = LANES if shapes.scaled else PACKED  # scales lie along lanes
    if shapes.page < least or shapes.page & (shapes.page - 1):
        kind = " with int8 keys" if shapes.scaled else ""
        return f"page size {shapes.page} must be a power of two of at least {least}{kind}"
    if shapes.num_pages > MOST_PAGES:
        return f"a table of {shapes.num_pages} pages is longer than the {MOST_PAGES} that fit in SMEM: use larger pages"
    return None


def table_bytes(shapes: Shapes) -> int:
    """Return the bytes of SMEM for one sequence's table, double-buffered."""
    return 2 * 4 * round_up(shapes.num_pages, LANES)


def table_spec(table: Int32[Array, "B 1 J"]) -> pl.BlockSpec:
    """Return the block spec that puts a sequence's table in SMEM; the grid's first axis must be the sequence."""
    return pl.BlockSpec((1, *table.shape[1:]), lambda b, *_: (b, 0, 0), memory_space=pltpu.SMEM)


def clipped(table: Int32[Array, "B J"], pool: Array) -> Int32[Array, "B J"]:
    """Return the table with entries clipped to the pool: an invalid entry reads wrong keys, but never other memory."""
    return jnp.clip(table, 0, pool.shape[0] - 1)


def find(position: Array, page: int, unit: int) -> tuple[Array, Array | int]:
    """Return where the unit that starts at `position` lies: its page's index in the table, and its offset in the page.

    Page sizes are powers of two, because a TPU's scalar unit takes one step for a shift or mask, but a dozen for a
    division.
    """
    bits = page.bit_length() - 1
    return position >> bits, 0 if unit == page else pl.multiple_of(position & (page - 1), unit)
