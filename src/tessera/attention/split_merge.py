"""One launch that merges the partial results of attention whose keys were split: weights 2^lse, in float32.

out = sum_p 2^(lse_p - m) out_p / sum_p 2^(lse_p - m), m = max_p lse_p. The partial results carry their lse in every
column, so that merging knows no rows: a flat stretch of numbers per block of threads, every load coalesced. XLA would
take two to five launches, each as long as a small call's attention.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from tessera.attention.online_softmax import FLOOR
from tessera.shapes import round_up

THREADS = 128
STRETCH = 256
"""Numbers per block of threads, two per thread: many small blocks, as each waits for memory once per AT_ONCE splits."""
AT_ONCE = 16
"""Splits whose loads are on their way together."""


def merge_splits(
    out: Float[Array, "splits *rows"], lse: Float[Array, "splits *rows"], dtype: DTypeLike
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Merge partial results.

    Args:
        out: each split's own softmax-weighted values, float32; 0 where it saw no key.
        lse: log2 of each split's sum of exponentials, in every column of its row; -inf where it saw no key.
        dtype: what to round the merged values to.

    Returns:
        The merged values, and log2 of the whole sum in every column (float32).
    """
    splits, *rows = out.shape
    size = jnp.size(out) // splits
    stretch = min(STRETCH, round_up(size, THREADS))
    padded = round_up(size, stretch)
    flat = [jnp.pad(x.reshape(splits, -1), [(0, 0), (0, padded - size)]) for x in (out, lse)]
    merged = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((padded,), dtype), jax.ShapeDtypeStruct((padded,), jnp.float32)],
        grid=(padded // stretch,),
        grid_names=("stretch",),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="gpu_merge_splits",
    )(*flat)
    return tuple(x[:size].reshape(rows) for x in merged)


def body(out_ref, lse_ref, merged_ref, merged_lse_ref):
    """Merge one stretch, AT_ONCE splits at a time."""
    splits = out_ref.shape[0]
    stretch = merged_ref.shape[0] // jax.lax.axis_size("stretch")
    here = pl.ds(jax.lax.axis_index("stretch") * stretch, stretch)

    def absorb(first, count: int, state: tuple) -> tuple:
        m_old, total, acc = state
        values = [out_ref[first + i, here] for i in range(count)]
        bits = [lse_ref[first + i, here] for i in range(count)]
        m = m_old
        for b in bits:
            m = jnp.maximum(m, b)
        alpha = jnp.exp2(m_old - m)
        total, acc = total * alpha, acc * alpha
        for x, b in zip(values, bits, strict=True):
            weight = jnp.exp2(b - m)
            total, acc = total + weight, acc + weight * x
        return m, total, acc

    state = tuple(jnp.full((stretch,), x, jnp.float32) for x in (FLOOR, 0.0, 0.0))
    whole = splits // AT_ONCE
    if whole:
        state = jax.lax.fori_loop(0, whole, lambda i, state: absorb(i * AT_ONCE, AT_ONCE, state), state)
    m, total, acc = absorb(whole * AT_ONCE, splits % AT_ONCE, state) if splits % AT_ONCE else state
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    merged_ref[here] = (acc / safe).astype(merged_ref.dtype)
    merged_lse_ref[here] = jnp.where(seen, m + jnp.log2(safe), -jnp.inf)
