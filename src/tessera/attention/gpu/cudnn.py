"""Dense prefill on NVIDIA GPUs with cuDNN's fused attention, for the calls that it can run.

cuDNN masks by length and by a causal diagonal that starts at the first key, so a causal call must be square (T = S) and
start at position 0. q_start is known only at run time: `lax.cond` checks it, and plain JAX runs the rare other calls in
blocks of rows, exactly but slowly. K and V are zeroed from kv_len on before the call, because cuDNN multiplies those
values by 0 and they may be NaN. Zeroing would double the time of a decode step, which only moves bytes, so decode is
refused.

The kernel calls the private function behind `jax.nn.dot_product_attention`: the public one rounds lse to q's dtype.

The gradient does not use cuDNN's own rule, which drops the cotangent of lse and would make `lax.cond` keep the scores
of the path not taken. `gpu.backward` computes the gradient from q, k, v, out and lse: with our own kernels, or in plain
JAX, a block of rows at a time, for chips and head dims that the kernels do not support.

Work: 4 H flops per visible (row, key) pair. Traffic: each array once, and K and V once more to zero them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Float

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.gpu import backward as gpu_backward
from tessera.attention.gradient import differentiable
from tessera.attention.kernel import Capability, Kernel, NoConfig

AMPERE = Capability(name="8.0 (Ampere) or later", least=8.0)
DTYPES = ("bfloat16", "float16")
ROWS = 128
"""Rows per block of the plain JAX path. The scores of a block are B * N * ROWS * S numbers."""


def cudnn(q: Array, k: Array, v: Array, kv_len: Array, scale: float, causal: bool) -> tuple[Array, Array]:
    """Run cuDNN: return out [B,T,N,H] and lse [B,N,T] (natural log, float32); kv_len must be at least 1."""
    mask = fused.MaskType.PADDING_CAUSAL if causal else fused.MaskType.PADDING
    rows = jnp.full_like(kv_len, q.shape[1])
    return fused.dot_product_attention(
        q, k, v, q_seqlen=rows, kv_seqlen=kv_len, scale=scale, mask_type=mask, return_residual=True
    )


def row_blocks(q: Array, k: Array, v: Array, positions: Positions, scale: float) -> tuple[Array, Array]:
    """Compute the result of `cudnn` for a causal call at any q_start, ROWS rows at a time, in float32."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, blocks = k.shape[2], -(-num_queries // ROWS)
    key = jnp.arange(k.shape[1])
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    rows = jnp.pad(q, [(0, 0), (0, blocks * ROWS - num_queries), (0, 0), (0, 0)]).astype(jnp.float32)
    rows = rows.reshape(batch, blocks, ROWS, num_kv_heads, -1, head_dim).swapaxes(0, 1)

    def block(first_and_rows):
        first, part = first_and_rows
        z = jnp.einsum("BTKGH,BSKH->BKGTS", part, k, precision="highest") * scale
        place = positions.q_start[:, None] + first + jnp.arange(ROWS)
        seen = (key < positions.kv_len[:, None, None]) & (key <= place[:, :, None])
        lse = jax.nn.logsumexp(jnp.where(seen[:, None, None], z, -jnp.inf), axis=-1)
        weight = jnp.exp(z - jnp.where(jnp.isfinite(lse), lse, jnp.inf)[..., None])
        weight = jnp.where(seen[:, None, None], weight, 0.0)
        return jnp.einsum("BKGTS,BSKH->BTKGH", weight, v, precision="highest"), lse

    out, lse = jax.lax.map(block, (jnp.arange(blocks) * ROWS, rows))
    out = out.swapaxes(0, 1).reshape(batch, -1, num_heads, head_dim)[:, :num_queries]
    lse = jnp.moveaxis(lse, 0, 3).reshape(batch, num_heads, -1)[..., :num_queries]
    return out.astype(q.dtype), lse


def launch(
    q_BTNH: Float[Array, "B T N H"],
    kv: KeyValues,
    spec: AttentionSpec,
    positions: Positions,
    selection: Selection | None,
    config: NoConfig,
) -> AttentionOut:
    """Compute out = softmax(scale q k^T) v and lse over the visible keys, both differentiable in q, k and v."""
    lengths = jnp.clip(positions.kv_len, 0, kv.k.shape[2]), jnp.clip(positions.q_len, 0, q_BTNH.shape[1])
    return dense(q_BTNH, kv.k, kv.v, Positions(positions.q_start, *lengths), spec, config)


def attend(
    q_BTNH: Array, k_BKSH: Array, v_BKSH: Array, positions: Positions, spec: AttentionSpec, config: NoConfig
) -> AttentionOut:
    """Run the call; kv_len and q_len must lie within the arrays.

    K and V are zeroed from kv_len on and, in the same pass over memory, transposed to the [B,S,K,H] that cuDNN takes.
    """
    scale = q_BTNH.shape[3] ** -0.5 if spec.scale is None else spec.scale
    valid = (jnp.arange(k_BKSH.shape[2]) < positions.kv_len[:, None])[:, None, :, None]
    row = jnp.arange(q_BTNH.shape[1])
    alive = (row < positions.q_len[:, None]) & (positions.kv_len > 0)[:, None]
    if spec.causal:
        alive &= positions.q_start[:, None] + row >= 0
    # Padding rows may hold NaN. cuDNN computes them like any other row; `alive` clears their results.
    q = jnp.where((row < positions.q_len[:, None])[:, :, None, None], q_BTNH, 0)
    k, v = (jnp.swapaxes(jnp.where(valid, x, 0), 1, 2) for x in (k_BKSH, v_BKSH))
    fused_path = functools.partial(cudnn, scale=scale, causal=spec.causal)
    kv_len = jnp.maximum(positions.kv_len, 1)  # cuDNN needs a key; `alive` clears the rows of sequences without any
    if spec.causal:
        out, lse = jax.lax.cond(
            jnp.all(positions.q_start == 0),
            lambda q, k, v: fused_path(q, k, v, kv_len),
            lambda q, k, v: row_blocks(q, k, v, positions, scale),
            *(q, k, v),
        )
    else:
        out, lse = fused_path(q, k, v, kv_len)
    lse = jnp.where(alive[:, :, None], jnp.moveaxis(lse, 1, 2).astype(jnp.float32), -jnp.inf)
    return AttentionOut(jnp.where(alive[:, :, None, None], out, 0), lse)


dense = differentiable(attend, gpu_backward.gradients)
"""`attend` with the gradient of `gpu.backward`, which takes memory proportional to the number of tokens."""


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    if shapes.num_queries == 1:
        return "K and V past kv_len must be zeroed first, which doubles the traffic of a decode step"
    for name in ("window", "softcap"):
        if getattr(spec, name) is not None:
            return f"cuDNN's fused attention does not support a {name}, but the call has {name}={getattr(spec, name)}"
    if spec.causal and shapes.num_queries != shapes.num_keys:
        sizes = f"{shapes.num_queries} queries and {shapes.num_keys} keys"
        return f"its causal diagonal starts at the first key, so T must equal S, but the call has {sizes}"
    if shapes.head_dim > 128 or shapes.head_dim % 8:
        return f"head_dim={shapes.head_dim} must be a multiple of 8 and at most 128"
    return None


KERNELS = (
    Kernel(name="gpu_cudnn_dense", dtypes=DTYPES, supports=supports, launch=launch, capability=AMPERE, library="cuDNN"),
)
