"""Blocks of a TPU prefill call: sizes, which key blocks each row block needs, and how often each piece of work runs.

Everything the kernel must know before it computes a score, in plain arithmetic that index maps, body and prediction
share.
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
"""Fewest rows of a token block: with fewer, products in the matrix unit wait for each other's results."""
CORNER = 256
"""Diagonal step: tokens per token block, and keys per update."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes and where the row sum is computed.

    Attributes:
        block_t: query tokens per row block (times G rows); rounded up to whole query tiles when scoring.
        block_s: keys per grid step, a power of two of at least 128.
        chunk: keys per online-softmax update, a power of two of at least 128, at most block_s.
        step: keys, and query tokens, per iteration of the loop over a block that a mask may cut (outside the corner of
            the causal mask): a power of two, at least chunk. Longer is faster per score, shorter wastes less above
            the diagonal.
        matrix_sums: row sums (and tile masses) come from extra columns of V: free where the matrix unit has idle ones.
        half_exp: exponentials in bfloat16, for bfloat16 calls on chips whose vector unit has it (v6e on;
            `prefill_rows` states the assumption).
        state_in_vmem: store maximum and sums to VMEM after every update and load them for the next, instead of keeping
            them as values of straight-line code. Registers cannot hold a block of rows, so they spill otherwise.
    """

    block_t: int
    block_s: int
    chunk: int
    step: int = 512
    matrix_sums: bool = True
    half_exp: bool = False
    state_in_vmem: bool = False

    def __post_init__(self):
        if self.block_t < 1:
            raise ValueError(f"block_t={self.block_t} must be at least 1")
        for name in ("block_s", "chunk", "step"):
            value = getattr(self, name)
            if value < LANES or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two of at least {LANES}")


class Cut(NamedTuple):
    """One call cut into blocks: everything static the kernel body needs.

    turn_t tokens at a time go through a block that a mask touches; sub_t of them are a token block, whose heads lie
    side by side and share a mask.
    """

    spec: AttentionSpec
    groups: int
    head_dim: int
    num_keys: int
    block_t: int
    turn_t: int
    sub_t: int
    block_s: int
    chunk: int
    step: int
    flat: bool
    matrix_sums: bool
    half_exp: bool
    state_in_vmem: bool
    scaled: bool

    @property
    def rows(self) -> int:
        return self.block_t * self.groups

    @property
    def corner(self) -> bool:
        """Whether straight-line code handles the keys at a row block's own positions (`prefill.corner`).

        Not for short row blocks, which would take the keys before them in equally short pieces, nor for row blocks
        that do not divide a key block.
        """
        fits = self.block_s % self.block_t == 0 and self.block_t % self.step == 0
        return fits and self.sub_t % LANES == 0 and self.spec.causal and self.spec.window is None

    @property
    def bank_keys(self) -> int:
        """Keys of the 128 tiles whose masses share one group of lanes."""
        return LANES * self.spec.tile

    @property
    def banks(self) -> int:
        """Banks of 128 tiles that hold all keys; one where no masses are kept."""
        return ceil_div(self.num_keys, self.bank_keys) if self.spec.mass else 1

    @property
    def extra(self) -> int:
        """Columns appended to V: up to whole lanes with ones; whole lanes of ones, or one-hot, when H fills them."""
        pad = -self.head_dim % LANES
        if self.spec.mass:
            return pad + LANES if self.one_hot else 0
        return (pad or LANES) if self.matrix_sums else 0

    @property
    def one_hot(self) -> bool:
        """Whether tile masses come from the matrix unit; for narrow tiles always: a lane reduction each costs more."""
        return self.spec.mass and (self.matrix_sums or self.spec.tile < LANES)


def cut_call(spec: AttentionSpec, shapes: Shapes, config: Config) -> Cut:
    """Clip the block sizes to the call."""
    groups = shapes.num_heads // shapes.num_kv_heads
    unit = 16  # rows of a packed bfloat16 tile
    while spec.mass and unit % spec.query_tile:
        unit = unit + 16 if spec.query_tile % 16 else round_up(unit, spec.query_tile)
    block_t = min(round_up(config.block_t, unit), round_up(shapes.num_queries, unit))
    block_s = min(config.block_s, max(1 << (shapes.num_keys - 1).bit_length(), LANES))
    if spec.mass:
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
    return Cut(spec, *sizes, flat, config.matrix_sums, half, config.state_in_vmem, shapes.scaled)


def whole(x, size: int):
    """Whole blocks of `size`, a power of two, below x: a shift, since a TPU's scalar unit divides in a dozen steps."""
    return x >> (size.bit_length() - 1)


class Range(NamedTuple):
    """What a row block needs: key blocks lo to hi - 1, its first position, and how many keys and rows exist."""

    lo: Array
    hi: Array
    first: Array
    kv_len: Array
    q_len: Array


def key_range(b: Array, i: Array, positions: Positions, cut: Cut) -> Range:
    """Key blocks that row block i of sequence b needs; scalar arithmetic, for index maps and body alike."""
    q_start, kv_len, q_len = (p[b] for p in positions)
    kv_len = jnp.clip(kv_len, 0, cut.num_keys)
    first = q_start + i * cut.block_t
    last = q_start + jnp.minimum((i + 1) * cut.block_t, q_len) - 1
    stop = jnp.minimum(kv_len, last + 1) if cut.spec.causal else kv_len
    stop = jnp.where(i * cut.block_t < q_len, jnp.maximum(stop, 0), 0)
    hi = whole(stop + cut.block_s - 1, cut.block_s)
    start = 0 if cut.spec.window is None else jnp.maximum(first - cut.spec.window + 1, 0)
    return Range(jnp.minimum(whole(start, cut.block_s), hi), hi, first, kv_len, q_len)


def banks_of(keys: Range, cut: Cut) -> tuple[Array, Array]:
    """Banks that this row block visited: [start, stop)."""
    stop = whole(keys.hi * cut.block_s + cut.bank_keys - 1, cut.bank_keys)
    return whole(keys.lo * cut.block_s, cut.bank_keys), jnp.where(keys.hi > keys.lo, stop, 0)


def bank_bytes(spec: AttentionSpec, shapes: Shapes) -> int:
    """Bytes of one row's banked masses and maxima."""
    banks = ceil_div(shapes.num_keys, LANES * spec.tile)
    return 4 * LANES * (banks + ceil_div(banks, LANES))


def is_whole(first, start, kv_len, cut: Cut):
    """Whether every row from position `first` on sees all of the key block from `start`."""
    fits = start + cut.block_s <= kv_len
    if cut.spec.causal:
        fits = fits & (start + cut.block_s - 1 <= first)
    if cut.spec.window is not None:
        fits = fits & (start > first + cut.block_t - 1 - cut.spec.window)
    return fits


def is_diagonal(first, start, kv_len, cut: Cut):
    """Whether the rows' first position, `first`, is a multiple of block_t past `start`, and the keys at the rows' own
    positions all exist.

    A key block that some row needs and not every row sees in full then consists of keys that all rows see, followed by
    the corner.
    """
    return cut.corner & ((first - start) & (cut.block_t - 1) == 0) & (first + cut.block_t <= kv_len)


def masked_runs(first, last, kv_len, spec: AttentionSpec, step_of: Callable, xp) -> tuple:
    """Steps of a key block that rows at positions `first` to `last` need, in three runs:

    [begin, full_begin) and [full_stop, stop) need a mask, [full_begin, full_stop) do not. step_of(position, up) is the
    number of whole steps of the block below a position, with `up` of any; xp is jax.numpy in a kernel, numpy in the
    prediction. `last` may be below `first` (no rows) only where kv_len is 0.
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
    """Return `masked_runs` of the key block from `start` for the token block from position `first`."""

    def step_of(position, up: bool):
        return whole(xp.clip(position - start, 0, cut.block_s) + (cut.step - 1 if up else 0), cut.step)

    return masked_runs(first, first + cut.turn_t - 1, kv_len, cut.spec, step_of, xp)


def executions(spec: AttentionSpec, shapes: Shapes, config: Config) -> Mapping[str, float]:
    """How often each named scope runs in a call with q_start = S - T and every key and row valid; HBM bytes moved."""
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


def launch_steps(spec: AttentionSpec, shapes: Shapes, cut: Cut) -> int:
    """Grid steps per row block: all key blocks, or as many as a window can touch."""
    steps = ceil_div(max(shapes.num_keys, cut.block_s), cut.block_s)
    if spec.window is None:
        return steps
    return min(steps, ceil_div(spec.window + cut.block_t, cut.block_s) + 1)
