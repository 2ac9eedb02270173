"""Programs to compile without a chip: attention calls as the model makes them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tessera.attention.contract import AttentionSpec, Kernel, Positions, Selection, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.shapes import ceil_div


def kernel_named(name: str) -> Kernel:
    """The kernel of the table.

    Raises:
        ValueError: there is none of this name.
    """
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    raise ValueError(f"kernel={name!r} must be one of {', '.join(k.name for k in KERNELS)}")


def attention_call(
    kernel: str, spec: Mapping, shapes: Mapping, config: Mapping | None = None
) -> tuple[Any, tuple, dict]:
    """(function, abstract arguments, about) of one attention call, traced for the chip whose mesh is in use.

    q comes head-major, as the fusion that rotates it writes it where a kernel asks (seen in the model's own program),
    K and V as the cache stores them, head-major; all are presented transposed. out leaves as the projection reads it.
    """
    found, spec, shapes = kernel_named(kernel), AttentionSpec(**spec), Shapes(**shapes)
    reason = found.supports(spec, shapes)
    if reason is not None:
        raise ValueError(f"{kernel} does not support this call: {reason}")
    settings = found.default_config(spec, shapes) if config is None else found.Config(**config)
    s = shapes
    dtype = jnp.dtype(s.dtype)
    query = jax.ShapeDtypeStruct((s.batch, s.num_heads, s.num_queries, s.head_dim), dtype)
    cache = jax.ShapeDtypeStruct((s.batch, s.num_kv_heads, s.num_keys, s.head_dim), dtype)
    positions = Positions(*[jax.ShapeDtypeStruct((s.batch,), jnp.int32)] * 3)
    selection = None
    if s.capacity is not None:
        lead = (s.batch, s.num_kv_heads, ceil_div(s.num_queries, spec.query_tile))
        selection = Selection(
            jax.ShapeDtypeStruct((*lead, s.capacity), jnp.int32), jax.ShapeDtypeStruct(lead, jnp.int32)
        )

    def call(q, k_cache, v_cache, positions, selection):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k_cache, v_cache))
        result = found.launch(q, k, v, spec, positions, selection, settings)
        return result._replace(out=result.out.reshape(*result.out.shape[:2], -1))

    executions = None if found.executions is None else dict(found.executions(spec, shapes, settings))
    return call, (query, cache, cache, positions, selection), {"executions": executions, "settings": str(settings)}
