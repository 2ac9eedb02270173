"""Products of activations with quantised weights, per platform, and lookups in a quantised embedding.

On TPU and GPU, XLA fuses the conversion of the values into the product, so that a product reads only the quantised
bytes. On CPU it fuses neither; there, the integer forms multiply int8 by int8. Each row x of activations becomes
two int8 digits, h and l:

    x ~ a (h + l / 254),  a = max |x| / 127,  |error| <= a / 508

The product is then two rows of int8 products, exact in int32. At decode this is several times faster than multiplying
converted values and summing, and at prefill several times faster than a float product (LOG.md). x is rounded to
multiples of a / 254, 254 times finer than int8 alone.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tessera.core.quant import Quantised, unpack
from tessera.models import grouped
from tessera.models.thin import FEW_ROWS, thin

ROUNDED_ROWS = 64
"""Minimum rows at which w8a8 rounds activations. With fewer, reading the weights bounds even a float product."""


def product(x: Float[Array, "... D"], weight: Quantised) -> Float[Array, "... E"]:
    """Return x W^T in float32 for a quantised weight W [E,D]."""
    rows = x.reshape(-1, x.shape[-1])
    if weight.packed:  # only ever on CPU
        out = _on_cpu(rows, weight)
    else:
        out = jax.lax.platform_dependent(rows, weight, cpu=_on_cpu, tpu=_on_tpu, default=_fused)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def lookup(embed: Array | Quantised, tokens: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the tokens' rows of the embedding, in the model's float dtype."""
    if not isinstance(embed, Quantised):
        return embed[tokens]
    if not embed.group:
        rows = embed.values[tokens].astype(jnp.float32) * embed.scale[tokens][..., None]
        return rows.astype(embed.dtype)
    values = _joined(embed, embed.values[..., tokens])  # [G,g,B,T]
    rows = values.astype(jnp.float32) * embed.scale[:, None, tokens].astype(jnp.float32)
    if embed.zero is not None:
        rows = rows + embed.zero[:, None, tokens].astype(jnp.float32)
    return jnp.moveaxis(rows.reshape(-1, *tokens.shape), 0, -1).astype(embed.dtype)


def _joined(weight: Quantised, values: Array) -> Array:
    """Return grouped values as [G,g,...], unpacked if they are packed."""
    return jnp.concatenate(unpack(values, weight.kind == "int4"), 1) if weight.packed else values


def _fused(x: Float[Array, "M D"], weight: Quantised) -> Float[Array, "M E"]:
    """Return x W^T in the forms that XLA fuses on TPU and GPU."""
    if weight.group:
        return grouped_by_xla(x, weight)
    if weight.rounds_rows and x.shape[0] >= ROUNDED_ROWS:
        return _digits(x, weight, 1)
    return _transposed(x, weight.values.astype(x.dtype), jnp.float32) * weight.scale


def _on_tpu(x: Float[Array, "M D"], weight: Quantised) -> Float[Array, "M E"]:
    """Multiply a single row as two: XLA multiplies one row outside the matrix unit, in ten times the cycles.

    Many bfloat16 rows and a weight in groups take the kernel of `grouped`.
    """
    if weight.group and x.dtype == jnp.bfloat16 and grouped.wins(x.shape[0], weight):
        return grouped.product(x, weight)
    if x.shape[0] > 1:
        return _fused(x, weight)
    return _fused(jnp.pad(x, ((0, 1), (0, 0))), weight)[:1]


def grouped_by_xla(x: Float[Array, "M D"], weight: Quantised) -> Float[Array, "M E"]:
    """Sum one product per group. The batched product reads [G,g,E] in this order, so XLA fuses the conversion."""
    values = weight.values
    x_GMg = jnp.swapaxes(x.reshape(x.shape[0], values.shape[0], -1), 0, 1)
    dims = (((2,), (1,)), ((0,), (0,)))
    out = jax.lax.dot_general(x_GMg, values.astype(x.dtype), dims, preferred_element_type=jnp.float32)
    out = jnp.sum(out * weight.scale[:, None].astype(jnp.float32), 0)
    return out if weight.zero is None else out + _zeros(x_GMg, weight)


def _zeros(x_GMg: Float[Array, "G M g"], weight: Quantised) -> Float[Array, "M E"]:
    """Return the zero points' part of the product: the sum over groups of (sum of the group's x) * zero."""
    sums = jnp.sum(x_GMg.astype(jnp.float32), -1)
    return jax.lax.dot_general(sums, weight.zero.astype(jnp.float32), (((0,), (0,)), ((), ())))


def _transposed(x: Array, w: Array, dtype: jnp.dtype) -> Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _on_cpu(x: Float[Array, "M D"], weight: Quantised) -> Float[Array, "M E"]:
    if not weight.group and weight.kind != "fp8":
        return _digits(x, weight, 1 if weight.rounds_rows and x.shape[0] >= ROUNDED_ROWS else 2)
    if x.shape[0] > FEW_ROWS:
        return _converted(x, weight)
    return jnp.stack([_summed(row, weight) for row in x.astype(jnp.float32)])


def _digits(x: Float[Array, "M D"], weight: Quantised, count: int) -> Float[Array, "M E"]:
    """Return x W^T by int8 products, with x as `count` int8 digits per value and one scale per row."""
    num_rows = x.shape[0]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    scaled = x / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)  # a row of zeros
    high = jnp.round(scaled)
    parts = [high, jnp.round((scaled - high) * 254)][:count]
    rows = jnp.concatenate(parts).astype(jnp.int8)
    multiply = thin if rows.shape[0] <= 2 * FEW_ROWS else _transposed
    if weight.packed:
        # The barrier keeps the halves from being unpacked again for each row.
        halves = jax.lax.optimization_barrier(unpack(weight.values, weight.kind == "int4"))
        out = sum(multiply(part, half, jnp.int32) for part, half in zip(jnp.split(rows, 2, -1), halves))
    else:
        out = multiply(rows, weight.values.astype(jnp.int8), jnp.int32)
    out = out.astype(jnp.float32)
    whole = out[:num_rows] if count == 1 else out[:num_rows] + out[num_rows : 2 * num_rows] * (1 / 254)
    return whole * (scale * weight.scale)


def _converted(x: Float[Array, "M D"], weight: Quantised) -> Float[Array, "M E"]:
    """Convert the whole matrix on CPU, then multiply in float: with many rows, the conversion costs little."""
    if not weight.group:
        values = jax.lax.optimization_barrier(_from_fp8(weight.values))
        return _transposed(x.astype(jnp.float32), values, jnp.float32) * (weight.scale * FP8_FACTOR)
    values = _joined(weight, weight.values).astype(jnp.float32) * weight.scale[:, None].astype(jnp.float32)
    if weight.zero is not None:
        values = values + weight.zero[:, None].astype(jnp.float32)
    values = jax.lax.optimization_barrier(values.reshape(-1, values.shape[-1]))
    return jax.lax.dot_general(x.astype(jnp.float32), values, (((1,), (0,)), ((), ())))


def _summed(row: Array, weight: Quantised) -> Array:
    """Multiply the values by one row [D] and sum, in one pass: XLA on CPU fuses a conversion into this sum, but not
    into a dot."""
    if not weight.group:
        return jnp.sum(_from_fp8(weight.values) * row, -1) * (weight.scale * FP8_FACTOR)
    x_Gg = row.reshape(weight.values.shape[0], -1)
    scale = weight.scale[:, None].astype(jnp.float32)
    if weight.packed:
        parts = zip(jnp.split(x_Gg, 2, -1), unpack(weight.values, weight.kind == "int4"))
    else:
        parts = [(x_Gg, weight.values)]
    out = jnp.sum(sum(x[..., None] * values.astype(jnp.float32) for x, values in parts) * scale, (0, 1))
    return out if weight.zero is None else out + _zeros(x_Gg[:, None], weight)[0]


FP8_FACTOR = 2.0**8
"""2^(15 - 7): the exponent bias is 15 in float16 and 7 in e4m3, so e4m3 bits read as float16 are 2^8 times smaller."""


def _from_fp8(values: Array) -> Array:
    """Return e4m3 values / FP8_FACTOR as float32, by moving bits to a float16: XLA on CPU converts e4m3 one by one."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
