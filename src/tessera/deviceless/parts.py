"""Parts of a layer as programs to compile for an absent TPU. A study compares several forms of each part.

Each function that is named after a part returns (program, abstract arguments of the program). Its argument `form`
chooses how the program computes the part.
"""

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
    """Return an abstract array of this shape and dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)


def rotation(form: str, model: str = "llama-3.1-8b", batch: int = 1, rows: int = 2048) -> tuple[Callable, tuple]:
    """Return the program that makes a layer's queries [B,N,T,H] and keys [B,K,T,H]: project, rotate, transpose.

    The form is a key of ROTATIONS, or "none". The form "none" leaves out the rotation, so no other form can be faster.
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


def mlp(form: str, model: str = "llama-3.1-8b", rows: int = 2048) -> tuple[Callable, tuple]:
    """Return the program of a layer's second half: norm, SwiGLU, down projection and residual sum.

    The form "whole" computes all of this. The form "products" leaves out norm, SwiGLU and sum, so no fused kernel can
    be faster.
    """
    config = MODELS[model]
    width, wide = config.hidden_size, config.intermediate_size

    def whole(x, norm, gate, up, down):
        h = layers.rms_norm(x, norm, config.norm_eps)
        return x + layers.linear(jax.nn.silu(layers.linear(h, gate)) * layers.linear(h, up), down)

    def products_alone(x, norm, gate, up, down):
        first, second = layers.linear(x, gate), layers.linear(x, up)
        return layers.linear(first, down), second

    weights = (of(width), of(wide, width), of(wide, width), of(width, wide))
    return jax.jit(whole if form == "whole" else products_alone), (of(1, rows, width), *weights)


def inputs(form: str, model: str = "llama-3.1-8b", rows: int = 2048) -> tuple[Callable, tuple]:
    """Return the program that computes a layer's norm, queries, keys and values.

    The form "joined" computes the norm and one product. The form "products" computes three products without the norm.
    Any other form computes the norm and three products.
    """
    config = MODELS[model]
    heads, keys = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    width = config.hidden_size

    def three(x, norm, q, k, v):
        h = x if form == "products" else layers.rms_norm(x, norm, config.norm_eps)
        return tuple(layers.linear(h, w) for w in (q, k, v))

    def joined(x, norm, weight):
        out = layers.linear(layers.rms_norm(x, norm, config.norm_eps), weight)
        return jnp.split(out, [heads, heads + keys], axis=-1)

    matrices = [heads + 2 * keys] if form == "joined" else [heads, keys, keys]
    arguments = (of(1, rows, width), of(width), *(of(size, width) for size in matrices))
    return jax.jit(joined if form == "joined" else three), arguments


def order(form: str, model: str = "llama-3.1-8b", rows: int = 2048) -> tuple[Callable, tuple]:
    """Return the program of the up projection.

    In the form "stored", the weight is [out,in], as in checkpoints. In any other form, it is [in,out].
    """
    config = MODELS[model]
    shape = (config.intermediate_size, config.hidden_size)
    x, dims = of(rows, shape[1]), (((1,), (1 if form == "stored" else 0,)), ((), ()))

    def multiply(x, w):
        return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32).astype(x.dtype)

    return jax.jit(multiply), (x, of(*shape) if form == "stored" else of(*shape[::-1]))


def groups(form: str, rows: int, group: int, size: tuple[int, int] = (14336, 4096)) -> tuple[Callable, tuple, dict]:
    """Return (program, abstract arguments, about) of a product of `rows` rows with a weight quantised to 4 bits.

    The form "xla" leaves the product to XLA. The form "bfloat16" has a bfloat16 weight, for comparison. Any other form
    runs the Pallas kernel of `models.grouped`; `about` then states how often each named scope of the kernel runs, under
    "executions". In the first two forms, `about` is empty.

    Args:
        form: how the program computes the product.
        rows: number of rows of the other operand.
        group: number of consecutive inputs that share a scale.
        size: number of outputs and of inputs of the weight.
    """
    outputs, inputs = size
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
