"""An attention call as the model makes it, as a program to compile without a chip."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from tessera.attention import tuned
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.attention.kernel import Kernel
from tessera.core.shapes import ceil_div

WANTED = MappingProxyType({bool: "true or false", int: "a whole number", int | None: "a whole number or null"})
"""Annotation of a field of a kernel's `Config` -> JSON values that the field takes, in words."""


def kernel_named(name: str) -> Kernel:
    """Return the kernel of `dispatch.KERNELS` that has this name, or raise ValueError."""
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
    """Raise ValueError, before a compiler starts, if the kernel or its config does not fit the platform or the call."""
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

    `config` None means the block sizes that dispatch chooses; `changes` replaces some of them. With `token_major`, q
    arrives as [B,T,N,H], and the program includes any transpose that the kernel needs.
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
