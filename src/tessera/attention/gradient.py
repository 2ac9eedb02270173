"""Gradients of dense attention: the custom_vjp that wraps dense kernels, and the gradient of decode kernels.

The decode gradient takes O(S) memory for its one row per sequence, so it needs no blocks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions
from tessera.attention.online_softmax import LOG2_E, scale_of, score_bits
from tessera.attention.visibility import decode_range


def row_gradients(
    q: Float[Array, "B K G H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B S"],
    result: tuple[Float[Array, "B K G H"], Float[Array, "B K G"]],
    cotangents: tuple[Float[Array, "B K G H"], Float[Array, "B K G"]],
    spec: AttentionSpec,
) -> tuple[Array, Array, Array]:
    """Compute dq = ds k, dk = ds^T q and dv = p^T do for one query row per sequence, from its result (out, lse).

    p are the probabilities; ds = scale * p (do v^T - rowsum(do * out) + dlse), times the derivative of the softcap.
    `mask` marks the visible keys; `cotangents` are (do, dlse).
    """
    (out, lse), (d_out, d_lse) = result, cotangents
    seen = jnp.isfinite(lse)[..., None]  # other rows and their cotangents may hold NaN, and 0 * NaN is NaN: zero them
    q32, out, d_out = (jnp.where(seen, x, 0).astype(jnp.float32) for x in (q, out, d_out))
    k32, v32 = (jnp.where(mask[:, None, :, None], x, 0).astype(jnp.float32) for x in (k, v))
    y = score_bits(q32, k32, spec)
    p = jnp.where(mask[:, None, None] & seen, jnp.exp2(y - jnp.where(seen, lse[..., None] * LOG2_E, 0.0)), 0.0)
    offset = jnp.where(seen[..., 0], d_lse - jnp.sum(d_out * out, axis=-1), 0.0)
    ds = p * (jnp.einsum("bkgh,bksh->bkgs", d_out, v32) + offset[..., None])
    ds = ds * scale_of(spec, q.shape[-1])
    if spec.softcap is not None:
        ds = ds * (1 - jnp.square(y / (spec.softcap * LOG2_E)))
    dq = jnp.einsum("bkgs,bksh->bkgh", ds, k32).astype(q.dtype)
    dk = jnp.einsum("bkgs,bkgh->bksh", ds, q32).astype(k.dtype)
    dv = jnp.einsum("bkgs,bkgh->bksh", p, d_out).astype(v.dtype)
    return dq, dk, dv


def differentiable(attend: Callable[..., Any], gradients: Callable[..., tuple[Array, Array, Array]]) -> Callable:
    """Return dense(q, k, v, positions, spec, config): `attend`, with `gradients` as its custom gradient.

    The forward pass saves only its inputs and its result, which gradients(q, k, v, result, cotangents, spec, positions,
    config) gets.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
    def dense(q, k, v, positions: Positions, spec: AttentionSpec, config: Any):
        return attend(q, k, v, positions, spec, config)

    def forward(q, k, v, positions, spec, config):
        result = attend(q, k, v, positions, spec, config)
        return result, (q, k, v, positions, result)

    def backward(spec: AttentionSpec, config: Any, saved, cotangents):
        q, k, v, positions, result = saved
        return *gradients(q, k, v, result, cotangents, spec, positions, config), None

    dense.defvjp(forward, backward)
    return dense


def differentiable_decode(attend: Callable[..., AttentionOut]) -> Callable[..., AttentionOut]:
    """Return a decode kernel's launch: `attend`, whose dense calls on contiguous float keys are differentiable."""

    def dense(q, k, v, positions, spec: AttentionSpec, config: Any) -> AttentionOut:
        return attend(q, KeyValues(k, v), spec, positions, None, config)

    def gradients(q, k, v, result, cotangents, spec: AttentionSpec, positions, config: Any):
        start, stop = (x[:, None] for x in decode_range(spec, positions, k.shape[2]))
        key = jnp.arange(k.shape[2], dtype=jnp.int32)
        shape = (q.shape[0], k.shape[1], -1)
        rows = [(x.out.reshape(*shape, q.shape[3]), x.lse.reshape(shape)) for x in (result, cotangents)]
        dq, dk, dv = row_gradients(q.reshape(rows[0][0].shape), k, v, (key >= start) & (key < stop), *rows, spec)
        return dq.reshape(q.shape), dk, dv

    with_gradient = differentiable(dense, gradients)

    def launch(q, kv: KeyValues, spec: AttentionSpec, positions, selection, config: Any) -> AttentionOut:
        if spec.mass or any(x is not None for x in (selection, kv.scales, kv.pages)):
            return attend(q, kv, spec, positions, selection, config)
        return with_gradient(q, kv.k, kv.v, positions, spec, config)

    return launch
