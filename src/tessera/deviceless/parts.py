"""Parts of a layer as programs to compile for an absent TPU, each in the forms that a study compares."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from tessera.core.quant import Quantised
from tessera.models import grouped, layers, products
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


def groups(form: str, rows: int, group: int, inputs: int = 4096, outputs: int = 14336) -> tuple[Callable, tuple, dict]:
    """Build a product with a weight of 4-bit groups: by XLA ("xla"), by the kernel, or in bfloat16 for comparison."""
    x = of(rows, inputs)
    if form == "bfloat16":
        return jax.jit(layers.linear), (x, of(outputs, inputs)), {}
    count = inputs // group
    weight = Quantised(
        values=of(count, group, outputs, dtype=jnp.int4), scale=of(count, outputs, dtype=jnp.float16), sample=of(64),
        kind="int4", group=group, float_dtype="bfloat16",
    )  # fmt: skip
    if form == "xla":
        return jax.jit(products.grouped_by_xla), (x, weight), {}
    return jax.jit(grouped.product), (x, weight), {"executions": grouped.executions(rows, inputs, outputs, group)}
