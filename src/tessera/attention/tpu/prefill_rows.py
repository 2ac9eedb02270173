"""Online softmax on a TPU: one update of the state of a block of rows, and the results after the last key.

A row is one query token of one query head. The maximum m and the sums are [R,128], because a TPU register has 128
lanes even if only one is needed: all lanes of m are equal; sums are per lane or, in the score role, per tile. The sums
of 128 tiles form a bank. Scores are in bits (q is scaled by scale * log2 e), so exponentials are exp2.

`half_exp` assumes that the chip's exp2 of a bfloat16 is 2^x rounded once, or at least errs up as often as down; a bias
would move lse by the mean relative error of a weight. This has not been tested on a chip. For v6e and v7x, the compiler
turns this exp2 into one instruction, vpow.bf16, and exp(x) into the same instruction on x log2 e, so the instruction's
base is 2. On other platforms, XLA's exp2 rounds x ln 2 first, which makes 2^-5 1.6 % too large; simulations avoid that
error (see `weigh`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.online_softmax import LN_2, LOG2_E
from tessera.attention.simulation import simulated_by
from tessera.attention.tpu.matrix_unit import LANES, dot, widen
from tessera.attention.tpu.prefill_blocks import Cut, Range, banks_of, whole


class Rows(NamedTuple):
    """State of R rows: running maximum [R,128], weighted values [R,H+X], and row or tile sums [R,128].

    If V is extended by X columns of ones, `acc` holds the row sums in those columns, and `sums` is None; otherwise
    X is 0.
    """

    m: Array
    acc: Array
    sums: Array | None


class Refs(NamedTuple):
    """References of the kernel body: inputs, outputs, then scratch."""

    q: Array  # [1, G, block_t, H]
    k: Array  # [1, 1, block_s, H]
    v: Array
    scales: Array | None  # [1, 1, 2, block_s]; int8 only
    out: Array  # [1, block_t, G * H] if cut.flat, else like q
    lse: Array  # [1, 1, 1, 1, R]
    mass: Array | None  # [1, 1, 1, query tiles, banks * 128]; score only
    q_scaled: Array  # [R, H]
    m: Array  # [R, 128]
    acc: Array  # [R, H + X]
    sums: Array | None  # [banks, R, 128]
    bank_m: Array | None  # [banks / 128, R, 128]: the maximum of each bank, one lane per bank; score only


def absorb(state: Rows, q, k, v, cut: Cut, start, mask=None, real=None) -> Rows:
    """Add one chunk of keys k and values v, which begins at position `start`, to the state of rows with queries q.

    `mask` [blocks, 1, sub_t, keys] marks the visible keys of the rows' first `blocks` token blocks; later ones see
    every key. `real` [keys, H] marks valid keys.
    """
    s = dot(q, k, 1)
    if cut.spec.softcap:
        s = jnp.tanh(s) * (cut.spec.softcap * LOG2_E)
    if mask is not None:
        s = masked(s, mask, cut.groups)
    if real is not None:  # K needs no such mask: its scores are hidden, but weights of 0 times NaN would be NaN
        v = jnp.where(real, v, jnp.zeros_like(v))
    m = jnp.maximum(state.m, jnp.broadcast_to(s.max(-1, keepdims=True), state.m.shape))
    # m starts at FLOOR, which is finite: a row that has seen no key gets 2^0, not NaN, as its factor.
    alpha = jnp.exp2(state.m - m)
    p = weigh(s - jnp.tile(m, (1, s.shape[1] // LANES)), cut.half_exp)
    pv = dot(p.astype(v.dtype), extend(v, start, cut), 0)
    acc = state.acc * widen(alpha, state.acc.shape[1]) + pv[:, : state.acc.shape[1]]
    if state.sums is None:
        return Rows(m, acc, None)
    sums = state.sums * alpha
    if cut.one_hot:
        sums = sums + pv[:, -LANES:]
    elif cut.spec.mass:
        sums = put_tile_sums(sums, p, start)
    else:
        sums = add_lanes(sums, p)
    return Rows(m, acc, sums)


def masked(s: Array, mask: Array, groups: int) -> Array:
    """Set the scores [rows, keys] of the first token blocks to -inf where their mask is false."""
    blocks, _, tokens, keys = mask.shape
    rows = blocks * groups * tokens
    head = jnp.where(mask, s[:rows].reshape(blocks, groups, tokens, keys), -jnp.inf).reshape(rows, keys)
    return head if rows == s.shape[0] else jnp.concatenate([head, s[rows:]], 0)


def weigh(bits: Array, half: bool) -> Array:
    """Compute 2^bits, in bfloat16 if `half`; a simulation then rounds in the way that a chip is assumed to round."""
    if not half:
        return jnp.exp2(bits)
    bits = bits.astype(jnp.bfloat16)
    if simulated_by(pltpu.InterpretParams):
        return jnp.exp2(bits.astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.exp2(bits)


def add_lanes(sums: Array, p: Array) -> Array:
    """Add p to row sums kept per lane, one addition per register; the lanes are summed once, after the last key."""
    for at in range(0, p.shape[1], LANES):
        sums = sums + p[:, at : at + LANES].astype(jnp.float32)
    return sums


def put_tile_sums(sums: Array, p: Array, start: Array) -> Array:
    """Store the sums of p over tiles of 128 keys, each in its tile's lane of `sums`; that lane holds no sum yet."""
    lane = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1)
    first = whole(start, LANES) & (LANES - 1)
    for c in range(p.shape[1] // LANES):
        part = p[:, c * LANES : (c + 1) * LANES].astype(jnp.float32).sum(-1, keepdims=True)
        sums = jnp.where(lane == first + c, jnp.broadcast_to(part, sums.shape), sums)
    return sums


def extend(v: Array, start: Array, cut: Cut) -> Array:
    """Append cut.extra columns to V: ones for row sums, or one-hot columns by tile for tile sums."""
    if not cut.extra:
        return v
    keys = v.shape[0]
    if not cut.one_hot:
        return jnp.concatenate([v, jnp.ones((keys, cut.extra), v.dtype)], 1)
    shape, bits = (keys, LANES), cut.spec.tile.bit_length() - 1
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    tile = ((key >> bits) + (start >> bits)) & (LANES - 1)
    marks = jnp.where(tile == jax.lax.broadcasted_iota(jnp.int32, shape, 1), 1.0, 0.0).astype(v.dtype)
    pad = [jnp.zeros((keys, -cut.head_dim % LANES), v.dtype)] if cut.head_dim % LANES else []
    return jnp.concatenate([v, *pad, marks], 1)


def visible(first, start, kv_len, cut: Cut) -> tuple[Array, Array]:
    """Return `absorb`'s `mask` and `real` for the turn_t tokens from position `first` and the chunk from `start`."""
    row = jax.lax.broadcasted_iota(jnp.int32, (cut.turn_t, cut.chunk), 0) + first
    key = jax.lax.broadcasted_iota(jnp.int32, (cut.turn_t, cut.chunk), 1) + start
    mask = key < kv_len
    if cut.spec.causal:
        mask = mask & (key <= row)
    if cut.spec.window is not None:
        mask = mask & (key > row - cut.spec.window)
    mask = mask.reshape(cut.turn_t // cut.sub_t, 1, cut.sub_t, cut.chunk)
    return mask, jax.lax.broadcasted_iota(jnp.int32, (cut.chunk, cut.head_dim), 0) + start < kv_len


def own_keys(cut: Cut) -> Array:
    """Build the causal mask, as `absorb` takes it, of a token block against the keys at the block's own positions."""
    shape = (1, 1, cut.sub_t, cut.sub_t)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 3) <= jax.lax.broadcasted_iota(jnp.int32, shape, 2)


def load(refs: Refs, rows: slice, bank) -> Rows:
    return Rows(refs.m[rows], refs.acc[rows], None if refs.sums is None else refs.sums[bank, rows])


def store(refs: Refs, rows: slice, bank, state: Rows) -> None:
    refs.m[rows], refs.acc[rows] = state.m, state.acc
    if refs.sums is not None:
        refs.sums[bank, rows] = state.sums


def split(state: Rows, rows: int) -> tuple[Rows, Rows]:
    parts = [(None, None) if x is None else (x[:rows], x[rows:]) for x in state]
    return Rows(*(head for head, _ in parts)), Rows(*(tail for _, tail in parts))


def write_results(refs: Refs, i, keys: Range, cut: Cut) -> None:
    """Write out = acc / l and lse = ln 2 (m + log2 l), or 0 and -inf for rows that saw no key; then the masses."""
    m = refs.m[...]
    l = row_sums(refs, m, keys, cut)  # noqa: E741
    # Padding tokens have zero queries but see keys: exclude them here.
    token = jax.lax.broadcasted_iota(jnp.int32, (cut.block_t // cut.sub_t, 1, cut.sub_t, LANES), 2)
    token = token + cut.sub_t * jax.lax.broadcasted_iota(jnp.int32, token.shape, 0) + i * cut.block_t
    token = jnp.broadcast_to(token, (token.shape[0], cut.groups, *token.shape[2:])).reshape(m.shape)
    seen = (l > 0) & (token < keys.q_len)
    bits = jnp.where(seen, m + jnp.log2(jnp.where(seen, l, 1.0)), -jnp.inf)
    scale = jnp.where(seen, 1.0 / jnp.where(seen, l, 1.0), 0.0)
    out = (refs.acc[:, : cut.head_dim] * widen(scale, cut.head_dim)).astype(refs.out.dtype)
    for u in range(cut.block_t // cut.sub_t):
        for g in range(cut.groups):
            at, tokens = (u * cut.groups + g) * cut.sub_t, slice(u * cut.sub_t, (u + 1) * cut.sub_t)
            if cut.flat:
                refs.out[0, tokens, g * cut.head_dim : (g + 1) * cut.head_dim] = out[at : at + cut.sub_t]
            else:
                refs.out[0, g, tokens] = out[at : at + cut.sub_t]
    refs.lse[0, 0, 0] = (bits * LN_2).T[:1]
    if cut.spec.mass:
        write_mass(refs, scale, keys, cut)


def row_sums(refs: Refs, m: Array, keys: Range, cut: Cut) -> Array:
    """Return l, the sum of 2^(s - m) per row, repeated in every lane."""
    if cut.banks > 1:

        @jax.named_scope("sum_bank")
        def add(g, total):
            x = refs.sums[g] * jnp.exp2(bank_maximum(refs, g) - m)  # makes all banks relative to the final m
            refs.sums[g] = x
            return total + x

        return lane_sum(jax.lax.fori_loop(*banks_of(keys, cut), add, jnp.zeros_like(m)))
    if refs.sums is not None:
        return lane_sum(refs.sums[0])
    if cut.extra >= LANES:
        return refs.acc[:, cut.head_dim : cut.head_dim + LANES]
    return jnp.broadcast_to(refs.acc[:, cut.head_dim : cut.head_dim + 1], m.shape)


def lane_sum(x: Array) -> Array:
    return jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape)


def bank_maximum(refs: Refs, g) -> Array:
    """Return the running maximum to which bank g's sums are relative, repeated in every lane."""
    kept = refs.bank_m[whole(g, LANES)]
    lane = jax.lax.broadcasted_iota(jnp.int32, kept.shape, 1)
    return jnp.broadcast_to(jnp.where(lane == g & (LANES - 1), kept, -jnp.inf).max(-1, keepdims=True), kept.shape)


def write_mass(refs: Refs, scale: Array, keys: Range, cut: Cut) -> None:
    """Write each key tile's probability, summed over each query tile's rows; `scale` is 1 / l, 0 for unseen rows."""
    refs.mass[...] = jnp.zeros_like(refs.mass)  # banks that the row block does not need are not written below
    tiles = cut.block_t // cut.spec.query_tile
    first = jax.lax.broadcasted_iota(jnp.int32, (tiles, cut.block_t), 0) * cut.spec.query_tile
    token = jax.lax.broadcasted_iota(jnp.int32, (tiles, cut.block_t), 1)
    # The sum over a query tile's tokens as a product with a matrix of zeros and ones: the matrix unit is idle here.
    pool = jnp.where((token >= first) & (token < first + cut.spec.query_tile), 1.0, 0.0)

    @jax.named_scope("pool_bank")
    def put(g, _):
        x = refs.sums[g] * scale
        x = x.reshape(-1, cut.groups, cut.sub_t, LANES).sum(1).reshape(cut.block_t, LANES)
        refs.mass[0, 0, 0, :, pl.ds(pl.multiple_of(g * LANES, LANES), LANES)] = dot(pool, x, 0)

    jax.lax.fori_loop(*banks_of(keys, cut), put, None)
