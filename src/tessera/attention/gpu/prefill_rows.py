"""Compute warpgroup of dense and score prefill on Hopper: 64 query rows against the key blocks that they see.

Key blocks that a mask may cut run one after another (`Rows.masked`). The other blocks run overlapped
(`Rows.overlapped`) or, as in JAX's own kernel, without overlap: scores, weights and values one after the other
(`Rows.plain`).
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.contract import AttentionSpec
from tessera.attention.gpu import mass as gpu_mass
from tessera.attention.gpu.pages import piece_of
from tessera.attention.gpu.warpgroup import (
    LINE_BYTES,
    ROW,
    ROWS,
    WARPGROUPS,
    accumulate,
    both_products,
    per_row,
    scores,
    tanh,
)
from tessera.attention.online_softmax import LOG2_E, scale_of
from tessera.core.shapes import round_up

BLOCK_T = WARPGROUPS * ROWS
"""Query rows per thread block."""
LINE = LINE_BYTES // 2
"""16-bit numbers per swizzled line."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes.

    Attributes:
        block_s: keys per block in shared memory: 64 or 128.
        stages: blocks of K, and of V, that shared memory holds.
        overlap: whether the tensor core still multiplies a block's weights and values while the next block's scores
            are turned into weights.
        turns: whether the two warpgroups take turns at the tensor core.
    """

    block_s: int = 128
    stages: int = 2
    overlap: bool = True
    turns: bool = True

    def __post_init__(self):
        if self.block_s not in (64, 128):
            raise ValueError(f"block_s={self.block_s} must be 64 or 128")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")


class Refs(NamedTuple):
    """References of the kernel body: arrays in global memory, then shared memory and barriers."""

    q_start: Any  # [B]
    kv_len: Any
    q_len: Any
    skipped: Any  # [1]: the first row of q that this launch computes
    q: Any  # [B, T, N, H]
    k: Any  # [B, K, S, H]
    v: Any
    scales: Any  # [B, K, 2, S]; int8 only, as landing and landed
    pages: Any  # [B, J]; only if k, v and scales are pools of pages, which have pages instead of sequences
    out: Any  # [B, rows, N, H]
    lse: Any  # [B, N, rows], in bits
    bits: Any  # [B, N, units, rows]: log2 of each unit's sum of exponentials; score only
    q_smem: Any
    k_smem: Any
    v_smem: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any
    zeroed: Any
    landing: Any  # [2, block_s, H]: a block of K and one of V as int8
    landed: Any


class Cut(NamedTuple):
    """Static sizes of a launch.

    Attributes:
        groups: G, query heads per KV head.
        scaled: whether keys are int8.
        page: positions per page; None if keys are contiguous.
    """

    spec: AttentionSpec
    config: Config
    groups: int
    num_keys: int
    head_dim: int
    dtype: str
    scaled: bool = False
    page: int | None = None

    @property
    def piece(self) -> int:
        """Keys per copy: a block, or as much of a block as lies in one page."""
        return piece_of(self.config.block_s, self.page)

    @property
    def unit(self) -> int:
        """Number of keys whose mass is one number: a tile, or as much of a tile as fits in one block."""
        return min(self.spec.tile, self.config.block_s)

    @property
    def units(self) -> int:
        """Number of units (see `unit`) in `bits`: those of all key blocks, rounded up to a multiple of `mass.UNITS`."""
        return round_up(round_up(self.num_keys, self.config.block_s) // self.unit, gpu_mass.UNITS)


class Item(NamedTuple):
    """Work of one thread block: sequence b, query head n, KV head h; first row, in this launch (at) and in q (row)."""

    b: Array
    n: Array
    h: Array
    at: Array
    row: Array


class Rows(NamedTuple):
    """The 64 rows of compute warpgroup `wg`, with methods that update their online-softmax state (m, l, acc)."""

    refs: Refs
    item: Item
    wg: Array
    start: Array  # the first block of the range
    cut: Cut

    def slot(self, c: Array) -> Array:
        """Return the stage (buffer in shared memory) of key block c."""
        return jax.lax.rem(c - self.start, self.cut.config.stages)

    def position(self) -> Array:
        """Return the absolute positions of the rows."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        return row + (self.refs.q_start[self.item.b] + self.item.row + self.wg * ROWS)

    def take_turn(self) -> None:
        """Wait for the other warpgroup: the two alternate between issuing products and computing weights."""
        if self.cut.config.turns:
            plgpu.barrier_arrive(self.refs.turn)
            plgpu.barrier_wait(self.refs.turn)

    def masked(self, c: Array, state: tuple) -> tuple:
        """Absorb key block c with the mask."""
        refs, slot = self.refs, self.slot(c)
        plgpu.barrier_wait(refs.k_full.at[slot])
        plgpu.barrier_wait(refs.v_full.at[slot])
        if not self.cut.scaled:  # the fetching warpgroup clears int8 values
            self.clear_values(c)  # before the scores, while registers are free
        s = scores(refs.q_smem.at[self.wg], refs.k_smem.at[slot])
        plgpu.barrier_arrive(refs.k_free.at[slot])
        m, l, alpha, p = self.weigh(s, c, *state[:2], masked=True)  # noqa: E741
        acc = accumulate(state[2] * per_row(alpha, state[2]), p.astype(self.cut.dtype), refs.v_smem.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return m, l, acc

    def plain(self, c: Array, state: tuple) -> tuple:
        """Absorb key block c, which every row sees in full: scores, weights and values one after the other."""
        refs, slot = self.refs, self.slot(c)
        plgpu.barrier_wait(refs.k_full.at[slot])
        s = scores(refs.q_smem.at[self.wg], refs.k_smem.at[slot], self.take_turn)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        m, l, alpha, p = self.weigh(s, c, *state[:2])  # noqa: E741
        acc = state[2] * per_row(alpha, state[2])
        acc, m, l, p = jax.lax.optimization_barrier((acc, m, l, p.astype(self.cut.dtype)))  # noqa: E741
        plgpu.barrier_wait(refs.v_full.at[slot])
        self.take_turn()
        acc = accumulate(acc, p, refs.v_smem.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return m, l, acc

    def overlapped(self, first: Array, stop: Array, state: tuple) -> tuple:
        """Absorb key blocks [first, stop), at least one, with overlap (see `Config`); every row sees them in full."""
        refs, wg = self.refs, self.wg
        plgpu.barrier_wait(refs.k_full.at[self.slot(first)])
        s = scores(refs.q_smem.at[wg], refs.k_smem.at[self.slot(first)], self.take_turn)
        m, l, alpha, p = self.weights(s, first, *state[:2])  # noqa: E741
        acc = state[2] * per_row(alpha, state[2])
        self.take_turn()

        def round_of(c, carry):
            (m, l, acc), p = carry  # noqa: E741
            slot, before = self.slot(c), self.slot(c - 1)
            plgpu.barrier_wait(refs.k_full.at[slot])
            plgpu.barrier_wait(refs.v_full.at[before])

            def weights(s):
                return self.weights(s, c, m, l)

            acc, (m, l, alpha, p) = both_products(  # noqa: E741
                refs.q_smem.at[wg], refs.k_smem.at[slot], acc, p, refs.v_smem.at[before], weights, self.take_turn
            )
            plgpu.barrier_arrive(refs.v_free.at[before])
            acc = acc * per_row(alpha, acc)
            # Round only now: until here the tensor core reads the registers that receive the rounded weights.
            p = jax.lax.optimization_barrier(p.astype(self.cut.dtype))
            self.take_turn()
            return (m, l, acc), p

        carry = (m, l, acc), p.astype(self.cut.dtype)
        (m, l, acc), p = jax.lax.fori_loop(first + 1, stop, round_of, carry)  # noqa: E741
        slot = self.slot(stop - 1)
        plgpu.barrier_wait(refs.v_full.at[slot])
        acc = accumulate(acc, p, refs.v_smem.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return m, l, acc

    def weights(self, s: Array, c: Array, m: Array, l: Array) -> tuple:  # noqa: E741
        """Hand back the stage of block c's keys, because its scores s are computed; then `weigh` s."""
        plgpu.barrier_arrive(self.refs.k_free.at[self.slot(c)])
        return self.weigh(s, c, m, l)

    def weigh(self, s: Array, c: Array, m: Array, l: Array, masked: bool = False) -> tuple:  # noqa: E741
        """Run a softmax update with the scores s of block c: return new m, new l, the factor on acc, and the weights.

        In the score role, also write `bits`.
        """
        cut = self.cut
        s, factor = in_bits(s, cut)
        s = self.hide(s, c) if masked else s
        new_m = jnp.maximum(m, s.max(1) * factor)
        alpha = jnp.exp2(m - new_m)
        p = jnp.exp2(s * factor - per_row(new_m, s))
        if not cut.spec.mass:
            return new_m, l * alpha + p.sum(1), alpha, p
        units, item = cut.config.block_s // cut.unit, self.item
        sums = [p[:, n * cut.unit : (n + 1) * cut.unit].sum(1) for n in range(units)]
        rows = pl.ds(item.at + self.wg * ROWS, ROWS)
        for n, total in enumerate(sums):
            self.refs.bits[item.b, item.n, c * units + n, rows] = new_m + jnp.log(total) * LOG2_E
        return new_m, l * alpha + functools.reduce(jnp.add, sums), alpha, p

    def hide(self, s: Array, c: Array) -> Array:
        """Set the scores [64,X] of block c to -inf where a row does not see a key."""
        start, spec = c * self.cut.config.block_s, self.cut.spec
        key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        stop = self.refs.kv_len[self.item.b]
        if not spec.causal:
            return jnp.where(key < stop - start, s, -jnp.inf)
        row = self.position()
        seen = key < per_row(jnp.minimum(stop, row + 1) - start, s)
        if spec.window is not None:
            seen = seen & (key > per_row(row - start - spec.window, s))
        return jnp.where(seen, s, -jnp.inf)

    def clear_values(self, c: Array) -> None:
        """If block c reaches past kv_len, zero its values from there on.

        Warpgroup 0 writes the zeros; both compute warpgroups wait until they are written.
        """
        refs, size = self.refs, self.cut.config.block_s
        valid = refs.kv_len[self.item.b] - c * size

        @pl.when(valid < jnp.minimum(size, self.cut.num_keys - c * size))  # past S: zeros, or again the last page
        def reaches_past_the_end():
            @pl.when(self.wg == 0)
            def clear():
                for at, line in itertools.product(range(0, size, ROWS), range(0, self.cut.head_dim, LINE)):
                    values = refs.v_smem.at[self.slot(c), pl.ds(at, ROWS), pl.ds(line, LINE)]
                    key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                    held = plgpu.load(values, layout=plgpu.Layout.WGMMA)
                    kept = jnp.where(key + at < valid, held, jnp.zeros_like(held))
                    values[...] = plgpu.layout_cast(kept, plgpu.Layout.WGMMA)
                plgpu.commit_smem()

            plgpu.barrier_arrive(refs.zeroed)
            plgpu.barrier_wait(refs.zeroed)

    def write(self, state: tuple) -> None:
        """Write out = acc / l and lse = m + log2 l (bits); 0 and -inf for padding rows and rows that saw no key."""
        (m, l, acc), refs, item = state, self.refs, self.item  # noqa: E741
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + (item.row + self.wg * ROWS)
        seen = (l > 0) & (row < refs.q_len[item.b])
        inverse = per_row(jnp.where(seen, 1.0 / l, 0.0), acc)
        rows, out_smem = pl.ds(item.at + self.wg * ROWS, ROWS), refs.q_smem.at[self.wg]
        out_smem[...] = jnp.where(inverse > 0, acc * inverse, 0.0).astype(self.cut.dtype)
        refs.lse[item.b, item.n, rows] = jnp.where(seen, m + jnp.log(l) * LOG2_E, -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, refs.out.at[item.b, rows, item.n])
        plgpu.wait_smem_to_gmem(0)


def in_bits(s: Array, cut: Cut) -> tuple[Array, float]:
    """Return z and a factor > 0 such that z * factor are the scores in bits: log2(e) * softcap(scale * s), s = q.k."""
    scale, cap = scale_of(cut.spec, cut.head_dim), cut.spec.softcap
    if cap is not None:
        return tanh(s, scale / cap), cap * LOG2_E
    return (s, scale * LOG2_E) if scale > 0 else (s * (scale * LOG2_E), 1.0)
