"""Temporary: naive attention until the kernels land (this file belongs to the dispatch work)."""

import jax
import jax.numpy as jnp

from tessera.attention.contract import AttentionOut, AttentionSpec


def attention(q, k, v, spec=AttentionSpec(), *, q_start=None, kv_len=None, q_len=None, selection=None, backend=None):
    b, t, n, h = q.shape
    s, heads = k.shape[1], k.shape[2]
    q_start = jnp.zeros(b, jnp.int32) if q_start is None else q_start
    kv_len = jnp.full(b, s, jnp.int32) if kv_len is None else kv_len
    z = jnp.einsum("btkgh,bskh->bkgts", q.reshape(b, t, heads, n // heads, h), k, preferred_element_type=jnp.float32)
    z = z * (h**-0.5 if spec.scale is None else spec.scale)
    p = q_start[:, None, None] + jnp.arange(t)[None, :, None]
    key = jnp.arange(s)[None, None]
    mask = (key < kv_len[:, None, None]) & (key <= p)
    z = jnp.where(mask[:, None, None], z, -1e30)
    w = jax.nn.softmax(z, -1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", w, v).reshape(b, t, n, h).astype(q.dtype)
    return AttentionOut(out, jax.nn.logsumexp(z, -1).reshape(b, n, t).swapaxes(1, 2))
