"""Reference kernel, slow and simple: one masked softmax over the whole T x S score matrix, in float32.

It takes 4 B N T S H flops and holds B N T S float32 scores at once, so use it for small shapes and read it to learn the
contract. It runs every role, in prefill and decode, on every platform; JAX differentiates it without a custom rule.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.kernel import NoConfig, family

AUTOMATIC_SCORES = 2**28
"""Largest call, in scores (B * N * T * S), for which this kernel is chosen without being named as the backend.
That many scores take 1 GiB in float32."""


def cost(spec: AttentionSpec, shapes: Shapes) -> Mapping[str, float]:
    """Count flops of q.k and p.v over the whole T x S matrix, and bytes to write and read the float32 scores once."""
    scores = float(shapes.num_scores)
    return {"flops": 4.0 * scores * shapes.head_dim, "bytes": 8.0 * scores}


def attend(
    q_BTNH: Float[Array, "B T N H"],
    kv: KeyValues,
    spec: AttentionSpec,
    positions: Positions,
    selection: Selection | None,
    config: NoConfig | None,
) -> AttentionOut:
    """Compute out = softmax(z) v over the visible (if sparse: visible and listed) keys; `contract` defines z."""
    kv = contiguous(kv)
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    num_kv_heads, num_keys = kv.k.shape[1:3]
    groups = num_heads // num_kv_heads
    valid_B1S1 = (jnp.arange(num_keys) < positions.kv_len[:, None])[:, None, :, None]
    k, v = (x.astype(jnp.float32) for x in kv[:2])
    if kv.scales is not None:
        k, v = k * kv.scales[:, :, 0, :, None], v * kv.scales[:, :, 1, :, None]
    k, v = jnp.where(valid_B1S1, k, 0), jnp.where(valid_B1S1, v, 0)  # padding may hold NaN, and 0 * NaN is NaN
    mask = visible(spec, positions, num_queries, num_keys)[:, None, None]
    if selection is not None:
        mask = mask & listed(spec, selection, num_queries, num_keys)[:, :, None]
    sees = jnp.moveaxis(jnp.any(mask, axis=-1), 3, 1)[..., None]  # other rows are zeroed, and so are their cotangents
    q = q_BTNH.astype(jnp.float32).reshape(batch, num_queries, num_kv_heads, groups, head_dim)
    q = jnp.where(sees, q, 0)
    z = jnp.einsum("BTKGH,BKSH->BKGTS", q, k, precision="highest")
    z = z * (head_dim**-0.5 if spec.scale is None else spec.scale)
    if spec.softcap is not None:
        z = spec.softcap * jnp.tanh(z / spec.softcap)
    z = jnp.where(mask, z, -jnp.inf)
    top = jnp.max(z, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.where(mask, jnp.exp(z - top), 0.0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    seen = total > 0
    prob = weight / jnp.where(seen, total, 1.0)
    out = jnp.where(sees, jnp.einsum("BKGTS,BKSH->BTKGH", prob, v, precision="highest"), 0)
    out = out.reshape(q_BTNH.shape).astype(q_BTNH.dtype)
    lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    lse_BTN = lse[..., 0].reshape(batch, num_heads, num_queries).swapaxes(1, 2)
    return AttentionOut(out, lse_BTN, tile_mass(spec, prob) if spec.mass else None)


def contiguous(kv: KeyValues) -> KeyValues:
    """Return contiguous keys and values [B,K,S,H], in order of position; only paged ones are copied."""
    if kv.pages is None:
        return kv
    k, v = (jnp.concatenate(jnp.moveaxis(x[kv.pages], 1, 0), axis=2) for x in kv[:2])
    scales = None if kv.scales is None else jnp.concatenate(jnp.moveaxis(kv.scales[kv.pages], 1, 0), axis=3)
    return KeyValues(k, v, scales=scales)


def visible(spec: AttentionSpec, positions: Positions, num_queries: int, num_keys: int) -> Bool[Array, "B T S"]:
    """Mark the keys that each row sees by the contract's rule; padding rows see none."""
    row = jnp.arange(num_queries)
    p_BT1 = (positions.q_start[:, None] + row)[:, :, None]
    s = jnp.arange(num_keys)
    mask = (s < positions.kv_len[:, None, None]) & (row < positions.q_len[:, None])[:, :, None]
    if spec.causal:
        mask = mask & (s <= p_BT1)
    if spec.window is not None:
        mask = mask & (s > p_BT1 - spec.window)
    return mask


def listed(spec: AttentionSpec, selection: Selection, num_queries: int, num_keys: int) -> Bool[Array, "B K T S"]:
    """Mark, for each row, the keys of the tiles that the row's query tile lists."""
    num_tiles = -(-num_keys // spec.tile)
    live = jnp.arange(selection.tiles.shape[-1]) < selection.count[..., None]
    ids = jnp.where(live, selection.tiles, num_tiles)
    hits_BKIJ = jnp.any(ids[..., None] == jnp.arange(num_tiles), axis=-2)
    hits_BKTJ = jnp.repeat(hits_BKIJ, spec.query_tile, axis=2)[:, :, :num_queries]
    return jnp.repeat(hits_BKTJ, spec.tile, axis=3)[..., :num_keys]


def tile_mass(spec: AttentionSpec, prob_BKGTS: Float[Array, "B K G T S"]) -> Float[Array, "B K I J"]:
    """Sum probabilities over the keys of each key tile and the rows (tokens x G heads) of each query tile."""
    batch, num_kv_heads, _, num_queries, num_keys = prob_BKGTS.shape
    num_rows, num_tiles = -(-num_queries // spec.query_tile), -(-num_keys // spec.tile)
    pad = ((0, 0), (0, 0), (0, num_rows * spec.query_tile - num_queries), (0, num_tiles * spec.tile - num_keys))
    prob_BKTS = jnp.pad(jnp.sum(prob_BKGTS, axis=2), pad)
    split = prob_BKTS.reshape(batch, num_kv_heads, num_rows, spec.query_tile, num_tiles, spec.tile)
    return jnp.sum(split, axis=(3, 5))


KERNELS = family(
    "reference",
    ("dense", "score", "sparse"),
    dtypes=("float32", "bfloat16", "float16"),
    launch=attend,
    own_work=cost,
    automatic_limit=AUTOMATIC_SCORES,
    scaled=True,
    paged=True,
)
