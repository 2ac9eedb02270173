"""Copies in Hopper decode: the work of a thread block, where its keys are in memory, and how they are fetched."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tessera.attention.contract import Positions
from tessera.attention.gpu.decode_splits import Cut, Run, find_run, unit_starts
from tessera.attention.gpu.int8_keys import load_scales
from tessera.attention.gpu.pages import places


class Refs(NamedTuple):
    """References of the kernel body: arrays in global memory, then shared memory and barriers."""

    positions: Positions
    q: Any  # [B, K, stored G, H]
    k: Any
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
    q_landed: Any = None
    k_landed: Any = None  # [stages]
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
    """Name the kernel's positional references."""
    it, sparse, score = iter(refs), cut.role == "sparse", cut.role == "score"
    positions = Positions(next(it), next(it), next(it))
    paged = cut.shapes.page is not None
    passed = (True, True, True, sparse, sparse, cut.shapes.scaled, paged, True, True, score, score)  # q to totals
    return Refs(positions, *[next(it) if some else None for some in passed])


def locate(refs: Refs, cut: Cut) -> Place:
    """Return the `Place` of this thread block."""
    split, sequence = jax.lax.axis_index("split"), jax.lax.axis_index("sequence")
    head, part = (op(jax.lax.axis_index("head"), jnp.int32(cut.parts)) for op in (jax.lax.div, jax.lax.rem))
    positions = Positions(*(x[sequence] for x in refs.positions))
    listed = refs.count[sequence, head, 0] if cut.role == "sparse" else 0
    return Place(split, sequence, head, part, find_run(cut, split, positions, listed))


def starts_of(refs: Refs, cut: Cut, at: Place, block) -> list:
    """Return the position of the first key of each unit of a block (see `decode_splits`)."""
    return unit_starts(cut, at.run, block, lambda entry: refs.tiles[at.sequence, at.head, 0, entry])


def places_of(refs: Refs, cut: Cut, at: Place, block) -> list[tuple]:
    """Return the place in memory of each copy of a block (see `pages.places`)."""
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
    """Start loading the scales of a block's keys and values; return an empty list if they are not int8."""
    return load_scales(refs.scales, at.head, sources, cut.piece) if cut.shapes.scaled else []
