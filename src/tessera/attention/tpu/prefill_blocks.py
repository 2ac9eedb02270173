"""Blocks of a TPU prefill call: their sizes, the key blocks that each row block needs, and runs of each named scope.

The functions are scalar arithmetic, shared by the kernel's index maps, its body and the prediction of its time. The
*corner* consists of the keys at a row block's own positions. In the score role, a *bank* holds the sums of 128 tiles,
one per lane.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tessera.attention.contract import AttentionSpec, Positions, Shapes
from tessera.attention.tpu.matrix_unit import LANES
from tessera.core.shapes import ceil_div, round_up

SUB_ROWS = 1024
"""Target rows per pass of the loop over a key block that a mask may cut: `cut_call` halves passes with more rows. With
fewer rows, products in the matrix unit wait for each other's results."""
PAGES_AT_ONCE = 8
"""Units (pages or parts of pages) whose copies one run of straight-line code starts: a loop over single units takes
three times as long."""
CORNER = 256
"""Tokens per token block, and keys per update in the corner."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes and where the row sum is computed; block_s, chunk and step are powers of two of at least 128."""

    block_t: int  # query tokens per row block (block_t * G rows); rounded up to whole query tiles in the score role
    block_s: int  # keys per grid step
    chunk: int  # keys per online-softmax update, clipped to `step`
    # Keys, and about as many query tokens, per iteration of the loop over a key block that a mask may cut. Longer steps
    # are faster per score; shorter steps compute fewer masked scores. (`corner` may use other code there.)
    step: int = 512
    matrix_sums: bool = True  # whether row sums (and tile masses) come from extra columns of V: free if some are idle
    # Whether to compute exponentials in bfloat16. Only for bfloat16 calls on v6e and later chips, whose vector unit can
    # do so. This relies on an untested assumption about rounding (see `prefill_rows`).
    half_exp: bool = False
    # Whether to store the maximum and the sums to VMEM after every update and load them for the next one, instead of
    # keeping them as values, which spill because registers cannot hold a block of rows.
    state_in_vmem: bool = False

    def __post_init__(self):
        if self.block_t < 1:
            raise ValueError(f"block_t={self.block_t} must be at least 1")
        for name in ("block_s", "chunk", "step"):
            value = getattr(self, name)
            if value < LANES or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two of at least {LANES}")


class Cut(NamedTuple):
    """Static sizes of one call cut into blocks, as the kernel body needs them; `Config` defines the tunable fields."""

    spec: AttentionSpec
    groups: int  # G, query heads per KV head
    head_dim: int
    num_keys: int
    block_t: int
    turn_t: int  # tokens per pass of the loop over a block that a mask may cut
    sub_t: int  # tokens per token block, which divides turn_t; the G heads of a token block share one mask
    block_s: int
    chunk: int
    step: int
    flat: bool  # out is written as [B,T,N*H], which needs G * H to be a multiple of 128
    matrix_sums: bool
    half_exp: bool
    state_in_vmem: bool
    scaled: bool
    page: int | None  # positions per page; None if K and V are contiguous

    @property
    def rows(self) -> int:
        return self.block_t * self.groups

    @property
    def unit(self) -> int:
        """Keys per copy out of pages: a page, or a key block if pages are longer."""
        return min(self.page, self.block_s)

    @property
    def units_at_once(self) -> int:
        return min(PAGES_AT_ONCE, self.block_s // self.unit)

    @property
    def corner(self) -> bool:
        """Whether the corner has straight-line code (`prefill.corner`): only in causal calls without a window.

        In addition, sub_t must be a multiple of 128, block_t must divide block_s, and block_t must be a multiple of
        `step`. The last condition rules out a small block_t: `prefill.before_corner` absorbs the keys of the key block
        that precede the corner in runs of block_t keys, and short runs are slow.
        """
        fits = self.block_s % self.block_t == 0 and self.block_t % self.step == 0
        return fits and self.sub_t % LANES == 0 and self.spec.causal and self.spec.window is None

    @property
    def bank_keys(self) -> int:
        """Keys per bank: 128 tiles, whose sums lie in the 128 lanes of a register."""
        return LANES * self.spec.tile

    @property
    def banks(self) -> int:
        """Number of banks that cover all keys; 1 outside the score role."""
        return ceil_div(self.num_keys, self.bank_keys) if self.spec.mass else 1

    @property
    def extra(self) -> int:
        """Columns appended to V: for row sums, ones up to a multiple of 128; for tile masses, 128 after padding."""
        pad = -self.head_dim % LANES
        if self.spec.mass:
            return pad + LANES if self.one_hot else 0
        return (pad or LANES) if self.matrix_sums else 0

    @property
    def one_hot(self) -> bool:
        """Whether tile masses come from the matrix unit: always for tiles below 128 keys, whose lane sums cost more."""
        return self.spec.mass and (self.matrix_sums or self.spec.tile < LANES)


def cut_call(spec: AttentionSpec, shapes: Shapes, config: Config) -> Cut:
    groups = shapes.num_heads // shapes.num_kv_heads
    unit = 16  # rows of a packed bfloat16 tile
    while spec.mass and unit % spec.query_tile:  # masses are summed within a row block: whole query tiles
        unit = unit + 16 if spec.query_tile % 16 else round_up(unit, spec.query_tile)
    block_t = min(round_up(config.block_t, unit), round_up(shapes.num_queries, unit))
    block_s = min(config.block_s, max(1 << (shapes.num_keys - 1).bit_length(), LANES))
    if spec.mass:  # a key block lies in one bank
        block_s = min(block_s, LANES * spec.tile)
    step = min(config.step, block_s)
    chunk = min(config.chunk, step)
    turn_t = block_t
    while turn_t > step and turn_t * groups > SUB_ROWS and turn_t % 32 == 0:
        turn_t //= 2
    sub_t = CORNER if turn_t % CORNER == 0 else turn_t
    half = config.half_exp and shapes.dtype == "bfloat16"
    flat = (groups * shapes.head_dim) % LANES == 0
    sizes = (groups, shapes.head_dim, shapes.num_keys, block_t, turn_t, sub_t, block_s, chunk, step)
    return Cut(spec, *sizes, flat, config.matrix_sums, half, config.state_in_vmem, shapes.scaled, shapes.page)


def whole(x, size: int):
    """Return x // size for a power of two: a shift, because a division takes a TPU's scalar unit a dozen steps."""
    return x >> (size.bit_length() - 1)


class Range(NamedTuple):
    """A row block's key blocks [lo, hi), the position of its first row, and its sequence's kv_len and q_len."""

    lo: Array
    hi: Array
    first: Array
    kv_len: Array
    q_len: Array


def key_range(b: Array, i: Array, positions: Positions, cut: Cut) -> Range:
    """Return the key blocks that row block i of sequence b needs; index maps and the body both call this."""
    q_start, kv_len, q_len = (p[b] for p in positions)
    kv_len = jnp.clip(kv_len, 0, cut.num_keys)
    first = q_start + i * cut.block_t
    last = q_start + jnp.minimum((i + 1) * cut.block_t, q_len) - 1
    stop = jnp.minimum(kv_len, last + 1) if cut.spec.causal else kv_len
    stop = jnp.where(i * cut.block_t < q_len, jnp.maximum(stop, 0), 0)  # row blocks of padding need no key
    hi = whole(stop + cut.block_s - 1, cut.block_s)
    start = 0 if cut.spec.window is None else jnp.maximum(first - cut.spec.window + 1, 0)
    return Range(jnp.minimum(whole(start, cut.block_s), hi), hi, first, kv_len, q_len)


def banks_of(keys: Range, cut: Cut) -> tuple[Array, Array]:
    """Return the banks [start, stop) that hold the row block's key blocks."""
    stop = whole(keys.hi * cut.block_s + cut.bank_keys - 1, cut.bank_keys)
    return whole(keys.lo * cut.block_s, cut.bank_keys), jnp.where(keys.hi > keys.lo, stop, 0)


def bank_bytes(spec: AttentionSpec, shapes: Shapes) -> int:
    banks = ceil_div(shapes.num_keys, LANES * spec.tile)
    return 4 * LANES * (banks + ceil_div(banks, LANES))


def is_whole(first, start, kv_len, cut: Cut):
    """Return whether every row of the row block at position `first` sees all of the key block at position `start`."""
    fits = start + cut.block_s <= kv_len
    if cut.spec.causal:
        fits = fits & (start + cut.block_s - 1 <= first)
    if cut.spec.window is not None:  # the last row's window begins last
        fits = fits & (start > first + cut.block_t - 1 - cut.spec.window)
    return fits


def is_diagonal(first, start, kv_len, cut: Cut):
    """Return whether the call has a corner (`Cut.corner`) and this row block and key block are aligned for it.

    A key block that is visible only in part then consists of keys that every row sees, followed by the corner.
    """
    return cut.corner & ((first - start) & (cut.block_t - 1) == 0) & (first + cut.block_t <= kv_len)


def masked_runs(first, last, kv_len, spec: AttentionSpec, step_of: Callable, xp) -> tuple:
    """Return the steps (begin, full_begin, full_stop, stop) of a key block for rows at positions `first` to `last`.

    Steps [begin, full_begin) and [full_stop, stop) need a mask; steps [full_begin, full_stop) do not. step_of(position,
    up) counts the block's steps below a position, rounded up if `up`; `xp` is jax.numpy in a kernel, numpy in the
    prediction. `last` may be below `first` (no rows) only if kv_len is 0.
    """
    stop = full_stop = kv_len
    if spec.causal:
        stop, full_stop = xp.minimum(kv_len, last + 1), xp.minimum(kv_len, first + 1)
    stop, full_stop = step_of(stop, True), step_of(full_stop, False)
    begin = full_begin = 0
    if spec.window is not None:
        begin = xp.minimum(step_of(first - spec.window + 1, False), stop)
        full_begin = xp.clip(step_of(last - spec.window + 1, True), begin, stop)
    return begin, full_begin, xp.maximum(full_stop, full_begin), stop


def step_ranges(first, start, kv_len, cut: Cut, xp) -> tuple:
    """Return `masked_runs` of the key block at position `start` for the turn_t tokens from position `first` on."""

    def step_of(position, up: bool):
        return whole(xp.clip(position - start, 0, cut.block_s) + (cut.step - 1 if up else 0), cut.step)

    return masked_runs(first, first + cut.turn_t - 1, kv_len, cut.spec, step_of, xp)


def executions(spec: AttentionSpec, shapes: Shapes, config: Config) -> Mapping[str, float]:
    """Count runs of each named scope, and HBM bytes, of a call with q_start = S - T and all keys and rows valid."""
    cut = cut_call(spec, shapes, config)
    blocks = ceil_div(shapes.num_queries, cut.block_t)
    first = shapes.num_keys - shapes.num_queries + cut.block_t * np.arange(blocks)[:, None]
    end = np.minimum(first + cut.block_t, shapes.num_keys) if spec.causal else np.full_like(first, shapes.num_keys)
    start = cut.block_s * np.arange(ceil_div(max(shapes.num_keys, cut.block_s), cut.block_s))
    seen = start < end
    if spec.window is not None:
        seen = seen & (start + cut.block_s > first - spec.window + 1)
    full = seen & is_whole(first, start, shapes.num_keys, cut)
    diagonal = seen & ~full & is_diagonal(first, start, shapes.num_keys, cut)
    runs = np.zeros(3)
    for u in range(cut.block_t // cut.turn_t):
        edges = step_ranges(first + u * cut.turn_t, start, shapes.num_keys, cut, np)
        runs += [((high - low) * (seen & ~full & ~diagonal)).sum() for low, high in zip(edges, edges[1:])]
    window_step, whole_step, masked_step = runs
    counts = {
        "step": blocks * launch_steps(spec, shapes, cut),
        "first": blocks,
        "last": blocks,
        "full": full.sum(),
        "whole_step": whole_step,
        "masked_step": masked_step,
    }
    if spec.window is not None:
        counts["window_step"] = window_step
    if cut.corner:
        counts["corner"] = diagonal.sum()
    if cut.corner and cut.block_t < cut.block_s:
        counts["before_corner"] = (diagonal * (first - start)).sum() // cut.block_t
    if cut.page is not None:
        counts |= count_copies(seen, shapes.num_keys - start, cut)
    width, dim = jnp.dtype(shapes.dtype).itemsize, round_up(shapes.head_dim, LANES)
    rows = blocks * cut.block_t * cut.groups
    moved = 2 * seen.sum() * cut.block_s * (dim + 2 if cut.scaled else dim * width) + rows * (2 * dim * width + 4)
    if spec.mass:
        banks = sum(len(set(np.flatnonzero(row) * cut.block_s // cut.bank_keys)) for row in seen)
        names = ("new_bank", "keep_maximum", "sum_bank", "pool_bank") if cut.banks > 1 else ("pool_bank",)
        counts |= dict.fromkeys(names, banks)
        moved += 4 * LANES * ceil_div(shapes.num_keys, cut.bank_keys) * blocks * (cut.block_t // spec.query_tile)
    heads = shapes.batch * shapes.num_kv_heads
    return {name: float(heads * count) for name, count in (counts | {"hbm_bytes": moved}).items()}


def count_copies(seen: np.ndarray, left: np.ndarray, cut: Cut) -> dict[str, int]:
    """Count runs of the scopes of `prefill.paged_body`.

    `seen` [row blocks, key blocks] marks the needed key blocks; `left` are the valid keys from each block's start on.
    """
    units = np.clip(-(-left // cut.unit), 0, cut.block_s // cut.unit)
    counts = {"wait_unit": (seen * units * (units < cut.block_s // cut.unit)).sum()}
    for name, times in (("run", units // cut.units_at_once), ("unit", units % cut.units_at_once)):
        lead = times[seen[0].argmax()]  # every other block is fetched ahead
        counts |= {f"lead_{name}": lead, f"ahead_{name}": (seen * times).sum() - lead}
    return counts


def launch_steps(spec: AttentionSpec, shapes: Shapes, cut: Cut) -> int:
    """Return the grid steps per row block: one per key block or, with a window, per key block that it can overlap."""
    steps = ceil_div(max(shapes.num_keys, cut.block_s), cut.block_s)
    if spec.window is None:
        return steps
    return min(steps, ceil_div(spec.window + cut.block_t, cut.block_s) + 1)
