"""Merging of partial attention results over splits of the keys, in one launch, in float32, with lse in bits (base 2).

out = sum_p 2^(lse_p - m) out_p / sum_p 2^(lse_p - m) over splits p, with m = max_p lse_p. Each partial result stores
its lse in every column of a row, so the merge works number by number: each thread block takes a flat stretch, and every
load is coalesced. XLA would take two to five launches, each as long as the attention of a small call.

`decode_mass` uses `merge_stretch` and `fold` in a launch that also computes masses.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from tessera.attention.online_softmax import FLOOR

THREADS = 128
STRETCH = 256
"""Numbers that a thread block merges, two per thread. If STRETCH does not divide the total number, it merges THREADS,
one per thread.

Thread blocks are small because each waits for memory once per AT_ONCE splits; many thread blocks hide that wait.
"""
AT_ONCE = 16
"""Maximum splits whose numbers a thread loads together; it takes up to two numbers from each split."""


def merge_splits(
    out: Float[Array, "splits *rows"], lse: Float[Array, "splits *rows"], dtype: DTypeLike
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Merge the partial results of all splits.

    Args:
        out: each split's softmax-weighted values, float32; 0 where the split saw no key.
        lse: log2 of each split's sum of exponentials, in every column of a row; -inf where the split saw no key.
        dtype: dtype of the merged values.

    Returns:
        The merged values, and log2 of the whole sum in every column (float32).
    """
    rows, size = out.shape[1:], out[0].size
    flat = [flatten(x) for x in (out, lse)]
    merged = plgpu.kernel(
        lambda *refs: merge_stretch(jax.lax.axis_index("stretch"), *refs),
        out_type=merged_types(flat[0], dtype),
        grid=(num_stretches(flat[0]),),
        grid_names=("stretch",),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="gpu_merge_splits",
    )(*flat)
    return tuple(x[:size].reshape(rows) for x in merged)


def flatten(x: Float[Array, "splits *rows"]) -> Float[Array, "splits size"]:
    """Flatten each split's numbers, padded to a multiple of THREADS; no copy is made if they need no padding."""
    x = x.reshape(x.shape[0], -1)
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % THREADS)])


def merged_types(flat: Float[Array, "splits size"], dtype: DTypeLike) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the merged values and of their lse."""
    return [jax.ShapeDtypeStruct(flat.shape[1:], x) for x in (dtype, jnp.float32)]


def num_stretches(flat: Float[Array, "splits size"]) -> int:
    """Return the number of thread blocks that merge."""
    return flat.shape[1] // stretch_of(flat.shape[1])


def stretch_of(size: int) -> int:
    """Return how many of `size` numbers a thread block merges."""
    return THREADS if size % STRETCH else STRETCH


def merge_stretch(index, out_ref, lse_ref, merged_ref, merged_lse_ref) -> None:
    """Merge the stretch of numbers with this index; the references hold flattened numbers."""
    stretch = stretch_of(merged_ref.shape[0])
    here = pl.ds(index * stretch, stretch)
    state = tuple(jnp.full((stretch,), x, jnp.float32) for x in (FLOOR, 0.0, 0.0))
    m, total, acc = fold(lambda i: (lse_ref[i, here], out_ref[i, here]), out_ref.shape[0], state)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    merged_ref[here] = (acc / safe).astype(merged_ref.dtype)
    merged_lse_ref[here] = jnp.where(seen, m + jnp.log2(safe), -jnp.inf)


def fold(load: Callable, splits: int, state: tuple, at_once: int = AT_ONCE) -> tuple:
    """Return the state (m, sum of weights 2^(lse - m), weighted sums of values) after all splits.

    Args:
        load: split -> (lse, values ...), with as many values as the state has weighted sums.
        splits: number of splits.
        state: state before the first split: m is FLOOR, the sums are 0.
        at_once: splits whose loads are in flight together.
    """

    def absorb(first, count: int, state: tuple) -> tuple:
        m_old, *sums = state
        parts = [load(first + i) for i in range(count)]
        m = functools.reduce(jnp.maximum, [bits for bits, *_ in parts], m_old)
        alpha = jnp.exp2(m_old - m)
        total, *sums = (x * alpha for x in sums)
        for bits, *values in parts:
            weight = jnp.exp2(bits - m)
            total, sums = total + weight, [x + weight * value for x, value in zip(sums, values, strict=True)]
        return m, total, *sums

    whole, rest = divmod(splits, at_once)
    if whole:
        state = jax.lax.fori_loop(0, whole, lambda i, state: absorb(i * at_once, at_once, state), state)
    return absorb(whole * at_once, rest, state) if rest else state
