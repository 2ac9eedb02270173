"""Parts of a layer as programs to compile for an absent TPU, each in the forms that a study compares."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from tessera.models import layers
from tessera.models.catalogue import MODELS

ROTATIONS = MappingProxyType({"halves": layers.rotate_by_halves, "product": layers.rotate_by_product})
"""Form -> rotation of heads [B,T,N,H] by the tables cos and sin."""


def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Return an abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def rotation(form: str, model: str = "llama-3.1-8b", batch: int = 1, rows: int = 2048) -> tuple[Callable, tuple]:
    """Build a layer's queries and keys: projected, rotated, and head-major as kernels and the cache take them.

    "none" leaves out the rotation, which bounds what any form could gain.
    """
    config = MODELS[model]
    width, size = config.hidden_size, config.head_dim

    def project(h, q, k, cos, sin):
        found = (layers.linear(h, w).reshape(batch, rows, -1, size) for w in (q, k))
        if form != "none":
            found = (ROTATIONS[form](x, cos, sin) for x in found)
        return tuple(jnp.swapaxes(x, 1, 2) for x in found)

    weights = (of(config.num_heads * size, width), of(config.num_kv_heads * size, width))
    tables = [of(batch, rows, 1, size // 2, dtype=jnp.float32)] * 2  # computed once for all layers
    return jax.jit(project), (of(batch, rows, width), *weights, *tables)
