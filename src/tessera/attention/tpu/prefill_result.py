"""Results of a TPU prefill's row block after its last key: output, lse, and the tile masses of its rows."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tessera.attention.online_softmax import LN_2
from tessera.attention.tpu.matrix_unit import LANES, dot, widen
from tessera.attention.tpu.prefill_blocks import Cut, Range, banks_of, whole
from tessera.attention.tpu.prefill_rows import Refs


def write(refs: Refs, i, keys: Range, cut: Cut) -> None:
    """out = acc / l, lse = ln 2 (m + log2 l); 0 and -inf for rows that saw nothing; then the masses."""
    m = refs.m[...]
    l = row_sums(refs, m, keys, cut)  # noqa: E741
    # Padding tokens carry zero queries and see keys: they are excluded here, per token block.
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
    """l = sum of 2^(s - m) per row, in every lane."""
    if cut.banks > 1:

        @jax.named_scope("sum_bank")
        def add(g, total):
            x = refs.sums[g] * jnp.exp2(bank_maximum(refs, g) - m)  # from here on every bank is relative to the same m
            refs.sums[g] = x
            return total + x

        return lane_sum(jax.lax.fori_loop(*banks_of(keys, cut), add, jnp.zeros_like(m)))
    if refs.sums is not None:
        return lane_sum(refs.sums[0])
    if cut.extra >= LANES:
        return refs.acc[:, cut.head_dim : cut.head_dim + LANES]
    return jnp.broadcast_to(refs.acc[:, cut.head_dim : cut.head_dim + 1], m.shape)


def lane_sum(x: Array) -> Array:
    """Sum over lanes, in every lane."""
    return jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape)


def bank_maximum(refs: Refs, g) -> Array:
    """The running maximum bank g was taken at, in every lane."""
    kept = refs.bank_m[whole(g, LANES)]
    lane = jax.lax.broadcasted_iota(jnp.int32, kept.shape, 1)
    return jnp.broadcast_to(jnp.where(lane == g & (LANES - 1), kept, -jnp.inf).max(-1, keepdims=True), kept.shape)


def write_mass(refs: Refs, scale: Array, keys: Range, cut: Cut) -> None:
    """Each tile's probability summed over the rows of each query tile; scale is 1 / l, 0 for rows that do not count."""
    refs.mass[...] = jnp.zeros_like(refs.mass)
    tiles = cut.block_t // cut.spec.query_tile
    first = jax.lax.broadcasted_iota(jnp.int32, (tiles, cut.block_t), 0) * cut.spec.query_tile
    token = jax.lax.broadcasted_iota(jnp.int32, (tiles, cut.block_t), 1)
    pool = jnp.where((token >= first) & (token < first + cut.spec.query_tile), 1.0, 0.0)

    @jax.named_scope("pool_bank")
    def put(g, _):
        x = refs.sums[g] * scale
        x = x.reshape(-1, cut.groups, cut.sub_t, LANES).sum(1).reshape(cut.block_t, LANES)
        refs.mass[0, 0, 0, :, pl.ds(pl.multiple_of(g * LANES, LANES), LANES)] = dot(pool, x, 0)

    jax.lax.fori_loop(*banks_of(keys, cut), put, None)
