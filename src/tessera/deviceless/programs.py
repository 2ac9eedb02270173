"""Programs to compile without a chip: attention calls as the model makes them, gradients, and key tile selection."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from tessera.attention import tuned
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.attention.gpu import backward as gpu_backward
from tessera.attention.kernel import Kernel
from tessera.attention.selection import select_tiles
from tessera.attention.tpu import backward as tpu_backward
from tessera.core.shapes import ceil_div

WANTED = MappingProxyType({bool: "true or false", int: "a whole number", int | None: "a whole number or null"})
"""Annotation of a field of a kernel's `Config` -> JSON values that the field takes, in words."""


def kernel_named(name: str) -> Kernel:
    """Return the kernel of `dispatch.KERNELS` that has this name.

    Raises:
        ValueError: no kernel has this name.
    """
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    raise ValueError(f"kernel={name!r} must be one of {', '.join(k.name for k in KERNELS)}")


def check(
    kernel: Kernel,
    spec: AttentionSpec,
    shapes: Shapes,
    config: Mapping[str, Any] | None,
    platform: str,
    capability: str | None = None,
) -> None:
    """Check a request before a compiler starts.

    Raises:
        ValueError: the kernel runs on another platform or refuses the call, or `config` does not fit the kernel.
    """
    if kernel.platform not in ("any", platform):
        raise ValueError(
            f"kernel {kernel.name} runs on {kernel.platform}, but this chip is a {platform}: use another kernel"
        )
    if not kernel.simulable:
        kind = attrgetter("platform", "role", "phase")
        ours = next(k for k in KERNELS if k.simulable and kind(k) == kind(kernel))
        raise ValueError(
            f"kernel {kernel.name} is compiled by {kernel.library}, only on a GPU: use {ours.name} instead"
        )
    reason = kernel.refusal(spec, shapes, capability=capability)
    if reason is not None:
        raise ValueError(f"kernel {kernel.name} does not support this call: {reason}")
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise ValueError(f"config {config!r} must be a JSON object of block sizes")
    names = {field.name: field.type for field in fields(kernel.Config)}
    if strange := [name for name in config if name not in names]:
        raise ValueError(f"config {', '.join(strange)}: {kernel.name} has no such size; it has {', '.join(names)}")
    for name, value in config.items():
        if not isinstance(value, names[name]) or (isinstance(value, bool) and names[name] is not bool):
            raise ValueError(f"config {name}={value!r}: {kernel.name} needs {WANTED[names[name]]} there")
    needed = [field.name for field in fields(kernel.Config) if field.default is field.default_factory is MISSING]
    if missing := [name for name in needed if name not in config]:
        raise ValueError(f"config lacks {', '.join(missing)}: {kernel.name} needs {', '.join(needed)}")
    kernel.Config(**config)  # raises on sizes that no call can have


def attention_call(
    kernel: str,
    spec: Mapping,
    shapes: Mapping,
    config: Mapping | None = None,
    *,
    changes: Mapping = MappingProxyType({}),
    token_major: bool = False,
) -> tuple[Any, tuple, dict]:
    """Return (function, abstract arguments, about) of one attention call, for the chip of jax's current mesh.

    `about` holds the kernel's "executions" and "settings". q arrives head-major: in the model's own program, the fusion
    that applies the rotary embedding writes q in this layout for kernels that request it. K and V arrive head-major, as
    the cache stores them, or as pools of pages (`shapes.page`). out is returned as [B,T,N*H], as the output projection
    reads it.

    Args:
        kernel: name of the kernel.
        spec, shapes: fields of the call's `AttentionSpec` and `Shapes`.
        config: block sizes; None uses the sizes that dispatch chooses for the call.
        changes: fields of the config to replace.
        token_major: whether q arrives as [B,T,N,H] instead. The program then includes any transpose that the kernel
            needs.
    """
    found, spec, shapes = kernel_named(kernel), AttentionSpec(**spec), Shapes(**shapes)
    reason = found.refusal(spec, shapes)
    if reason is not None:
        raise ValueError(f"{kernel} does not support this call: {reason}")
    settings = replace(tuned.config(found, spec, shapes) if config is None else found.Config(**config), **changes)
    s = shapes
    dtype = jnp.dtype(s.dtype)
    lead = (s.num_queries, s.num_heads) if token_major else (s.num_heads, s.num_queries)
    query = jax.ShapeDtypeStruct((s.batch, *lead, s.head_dim), dtype)
    # a pool holds the pages of all sequences and the null page
    rows, slots = (s.batch, s.num_keys) if s.page is None else (s.batch * s.num_pages + 1, s.page)
    cache = jax.ShapeDtypeStruct((rows, s.num_kv_heads, slots, s.head_dim), jnp.int8 if s.scaled else dtype)
    scales = jax.ShapeDtypeStruct((rows, s.num_kv_heads, 2, slots), jnp.bfloat16) if s.scaled else None
    pages = jax.ShapeDtypeStruct((s.batch, s.num_pages), jnp.int32) if s.paged else None
    positions = Positions(*[jax.ShapeDtypeStruct((s.batch,), jnp.int32)] * 3)
    selection = None
    if s.capacity is not None:
        lead = (s.batch, s.num_kv_heads, ceil_div(s.num_queries, spec.query_tile))
        selection = Selection(
            jax.ShapeDtypeStruct((*lead, s.capacity), jnp.int32), jax.ShapeDtypeStruct(lead, jnp.int32)
        )

    def call(q, k, v, positions, selection, scales=None, pages=None):
        q_BTNH = q if token_major else jnp.swapaxes(q, 1, 2)
        result = found.launch(q_BTNH, KeyValues(k, v, pages, scales), spec, positions, selection, settings)
        return result._replace(out=result.out.reshape(*result.out.shape[:2], -1))

    executions = None if found.executions is None else dict(found.executions(spec, shapes, settings))
    arguments = (query, cache, cache, positions, selection, *([scales, pages] if s.scaled or s.paged else []))
    return call, arguments, {"executions": executions, "settings": str(settings)}


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
