"""Programs that only studies compile: selection of key tiles, and the gradients of dense prefill on both chips."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tessera.attention.contract import AttentionOut, AttentionSpec, Positions, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.attention.gpu import backward as gpu_backward
from tessera.attention.kernel import Kernel
from tessera.attention.selection import select_tiles
from tessera.attention.tpu import backward as tpu_backward
from tessera.core import hardware
from tessera.core.shapes import ceil_div

ROOT = str(Path(__file__).parents[2])
"""Folder from which a compiling process imports these factories."""


def kernels_of(platform: str) -> tuple[Kernel, ...]:
    """List the kernels of `dispatch.KERNELS` that compile for a TPU, or for Hopper without a GPU."""
    ours = (kernel for kernel in KERNELS if kernel.platform == platform and kernel.simulable)
    return tuple(k for k in ours if platform == "tpu" or k.runs_on(hardware.chip("h200").capability))


def selection_call(
    length: int, kv_heads: int, tile: int, query_tile: int, fraction: float
) -> tuple[Any, tuple[jax.ShapeDtypeStruct]]:
    """Return (function, its one abstract argument) to select key tiles in a causal prefill of batch 1.

    The argument is the float32 probability mass of each key tile: [1, KV heads, query tiles, key tiles].
    """
    spec = AttentionSpec(tile=tile, query_tile=query_tile)
    mass = jax.ShapeDtypeStruct((1, kv_heads, ceil_div(length, query_tile), ceil_div(length, tile)), jnp.float32)
    return lambda mass_BKIJ: select_tiles(mass_BKIJ, spec, fraction=fraction), (mass,)


def tpu_gradient_call(
    length: int, head_dim: int, dtype: str, heads: int = 8, kv_heads: int = 2
) -> tuple[Any, tuple, dict]:
    """Return (function, abstract arguments, about) for dq, dk and dv of a causal prefill of batch 1 on a TPU.

    q, K, V and their gradients are head-major; out and its cotangent are [B,T,N*H], as in `attention_call`.
    """
    spec, shapes = AttentionSpec(), Shapes(1, length, length, heads, kv_heads, head_dim, None, dtype)
    config = tpu_backward.default_config(spec, shapes)

    def gradients(q, k, v, out, lse, d_out, d_lse, positions):
        q, (out, d_out) = jnp.swapaxes(q, 1, 2), (x.reshape(1, length, heads, head_dim) for x in (out, d_out))
        result, cotangents = AttentionOut(out, lse), AttentionOut(d_out, d_lse)
        dq, dk, dv = tpu_backward.gradients(q, k, v, result, cotangents, spec, positions, config)
        return jnp.swapaxes(dq, 1, 2), dk, dv

    q = jax.ShapeDtypeStruct((1, heads, length, head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, kv_heads, length, head_dim), dtype)
    out = jax.ShapeDtypeStruct((1, length, heads * head_dim), dtype)
    lse = jax.ShapeDtypeStruct((1, length, heads), jnp.float32)
    positions = Positions(*[jax.ShapeDtypeStruct((1,), jnp.int32)] * 3)
    about = {"executions": dict(tpu_backward.executions(spec, shapes, config)), "settings": str(config)}
    return gradients, (q, k, k, out, lse, out, lse, positions), about


def gpu_gradient_call(spec: Mapping, shapes: Mapping) -> tuple[Any, tuple, dict]:
    """Return (function, abstract arguments, about) for dq, dk and dv of a dense prefill on an NVIDIA GPU.

    q and dq are token-major, [B,T,N,H]; K, V, dk and dv are head-major, like the cache in `attention_call`.
    """
    spec, shapes = AttentionSpec(**spec), Shapes(**shapes)
    cut = gpu_backward.Cut(spec, shapes.num_heads // shapes.num_kv_heads, shapes.head_dim, shapes.dtype)
    q = jax.ShapeDtypeStruct((shapes.batch, shapes.num_queries, shapes.num_heads, shapes.head_dim), shapes.dtype)
    k = jax.ShapeDtypeStruct((shapes.batch, shapes.num_kv_heads, shapes.num_keys, shapes.head_dim), shapes.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    positions = Positions(*[jax.ShapeDtypeStruct((shapes.batch,), jnp.int32)] * 3)

    def gradients(q, k, v, out, lse, d_out, d_lse, positions):
        result, cotangents = AttentionOut(out, lse), AttentionOut(d_out, d_lse)
        return gpu_backward.gradients(q, k, v, result, cotangents, spec, positions)

    about = {"executions": None, "settings": f"keys={cut.keys}, step={gpu_backward.STEP}, stages={gpu_backward.STAGES}"}
    return gradients, (q, k, k, q, lse, q, lse, positions), about
