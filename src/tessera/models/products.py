"""Products of activations with quantised weights, per platform, and lookups in a quantised embedding.

On TPU and GPU, XLA fuses the conversion of the values into the product, so that a product reads only the quantised
bytes. On CPU, XLA does not, so integer matrices without groups are multiplied as int8 by int8, exact in int32 and
several times faster than in floats (LOG.md). Each row x of activations becomes two rows of int8 digits, h and l:

    x ~ a (h + l / 254),  a = max |x| / 127,  |error| <= a / 508
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tessera.attention.parallel import traced_head_parts
from tessera.core.quant import Quantised, unpack
from tessera.models import grouped
from tessera.models.thin import FEW_ROWS, thin

ROUNDED_ROWS = 64
"""Minimum number of rows at which w8a8 rounds activations. With fewer rows, reading the weights takes at least as long
as a float product, so rounding would save no time."""


def product(x: Float[Array, "... D"], weight: Quantised) -> Float[Array, "... E"]:
    """Return x W^T in float32 for a quantised weight W [E,D].

    Axes are never merged under a mesh, because XLA would gather a split axis before merging it.
    """
    if weight.packed:  # only ever on CPU
        return _on_cpu(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=_on_cpu, tpu=_on_tpu, default=_fused)


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
    """Return the values of a weight with G groups of g inputs as [G,g,...], unpacked if they are packed."""
    return jnp.concatenate(unpack(values, weight.kind == "int4"), 1) if weight.packed else values


def _num_rows(x: Array) -> int:
    return math.prod(x.shape[:-1])


def _fused(x: Float[Array, "... D"], weight: Quantised) -> Float[Array, "... E"]:
    """Return x W^T on TPU and GPU, written so that XLA fuses the conversion of the values into the product."""
    if weight.group:
        return grouped_by_xla(x, weight)
    if weight.rounds_rows and _num_rows(x) >= ROUNDED_ROWS:
        return _digits(x, weight, 1, weight.shared)
    out = _by_part(x, weight.values.astype(x.dtype), weight.shared, jnp.float32)
    return jnp.sum(out * weight.scale, 0)


def _by_part(x: Float[Array, "... D"], w: Array, parts: int, dtype: jnp.dtype) -> Array:
    """Return one product per part of the inputs, [parts,...,E], each of which the caller scales before it sums them.

    If it scaled the sum instead, XLA could not round the products to half their bytes before devices send them.
    """
    if parts == 1:
        return _transposed(x, w, dtype)[None]
    x, w = x.reshape(*x.shape[:-1], parts, -1), w.reshape(w.shape[0], parts, -1)
    last = x.ndim - 1
    return jax.lax.dot_general(x, w, (((last,), (2,)), ((last - 1,), (1,))), preferred_element_type=dtype)


def _on_tpu(x: Float[Array, "... D"], weight: Quantised) -> Float[Array, "... E"]:
    """Return x W^T on TPU, by the kernel in `grouped` or by XLA.

    XLA gets a single row padded to two, because it would multiply one row outside the matrix unit, in ten times as many
    cycles.
    """
    if weight.group and x.dtype == jnp.bfloat16 and grouped.wins(_num_rows(x), weight):
        return grouped.product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
    if _num_rows(x) > 1:
        return _fused(x, weight)
    row = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
    return _fused(row, weight)[0].reshape(*x.shape[:-1], -1)


def grouped_by_xla(x: Float[Array, "... D"], weight: Quantised) -> Float[Array, "... E"]:
    """Return x W^T for a weight with groups by one batched product, into which XLA fuses the conversion."""
    values, scale = weight.values, weight.scale.astype(jnp.float32)
    groups = jnp.moveaxis(x.reshape(*x.shape[:-1], values.shape[0], -1), -2, 0)  # [G,...,g]
    last = groups.ndim - 1
    dims = (((last,), (1,)), ((0,), (0,)))
    out = jax.lax.dot_general(groups, values.astype(x.dtype), dims, preferred_element_type=jnp.float32)
    rows = (slice(None), *(None,) * (last - 1))  # [G,E] -> [G,...,E]
    out = out * scale[rows]
    if weight.zero is not None:  # before the sum over groups, which devices may share, so that each is added once
        sums = jnp.sum(groups.astype(jnp.float32), -1, keepdims=True)
        out = out + sums * weight.zero.astype(jnp.float32)[rows]
    return jnp.sum(out, 0)


def _transposed(x: Array, w: Array, dtype: jnp.dtype) -> Array:
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)


def _on_cpu(x: Float[Array, "... D"], weight: Quantised) -> Float[Array, "... E"]:
    if not weight.group and weight.kind != "fp8":
        return _digits(x, weight, 1 if weight.rounds_rows and _num_rows(x) >= ROUNDED_ROWS else 2)
    if _num_rows(x) > FEW_ROWS or traced_head_parts() > 1:
        return _converted(x, weight)
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return jnp.stack([_summed(row, weight) for row in rows]).reshape(*x.shape[:-1], -1)


def _digits(x: Float[Array, "... D"], weight: Quantised, count: int, parts: int = 1) -> Float[Array, "... E"]:
    """Return x W^T by int8 products, with `count` int8 digits per element of x and one scale per row of x.

    Devices that share the inputs first agree on the largest element of each row, so that they round to the same
    integers as a single device would.
    """
    num_rows = _num_rows(x)
    if traced_head_parts() > 1 and 0 < num_rows * count < FEW_ROWS:
        # XLA's int8 product on CPU is many times slower with a single row.
        rows = jnp.pad(x.reshape(num_rows, -1), ((0, -(-FEW_ROWS // count) - num_rows), (0, 0)))
        return _digits(rows, weight, count)[:num_rows].reshape(*x.shape[:-1], -1)
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    scaled = x / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)  # no 0 / 0 in a row of zeros
    high = jnp.round(scaled)
    rows = jnp.stack([high, jnp.round((scaled - high) * 254)][:count]).astype(jnp.int8)
    if weight.packed:
        # The barrier keeps the halves from being unpacked again for each row.
        halves = jax.lax.optimization_barrier(unpack(weight.values, weight.kind == "int4"))
        stretches = rows.reshape(*rows.shape[:-1], weight.stretches, 2, -1)
        out = sum(
            _integers(stretches[..., half, :].reshape(*rows.shape[:-1], -1), values)
            for half, values in enumerate(halves)
        )[None]
    elif parts > 1:
        out = _by_part(rows, weight.values.astype(jnp.int8), parts, jnp.int32)
    else:
        out = _integers(rows, weight.values.astype(jnp.int8))[None]
    out = out.astype(jnp.float32)
    whole = out[:, 0] if count == 1 else out[:, 0] + out[:, 1] * (1 / 254)
    return jnp.sum(whole * (scale * weight.scale), 0)


def _integers(x: Array, w: Array) -> Array:
    if traced_head_parts() > 1 or _num_rows(x) > 2 * FEW_ROWS:
        return _transposed(x, w, jnp.int32)
    return thin(x.reshape(-1, x.shape[-1]), w, jnp.int32).reshape(*x.shape[:-1], -1)


def _converted(x: Float[Array, "... D"], weight: Quantised) -> Float[Array, "... E"]:
    """Convert the whole matrix to float32, which costs little in comparison to a product with many rows."""
    x = x.astype(jnp.float32)
    if not weight.group:
        values = jax.lax.optimization_barrier(_from_fp8(weight.values))
        return _transposed(x, values, jnp.float32) * (weight.scale * FP8_FACTOR)
    values = _joined(weight, weight.values).astype(jnp.float32) * weight.scale[:, None].astype(jnp.float32)
    if weight.zero is not None:
        values = values + weight.zero[:, None].astype(jnp.float32)
    values = jax.lax.optimization_barrier(values.reshape(-1, values.shape[-1]))
    return jax.lax.dot_general(x, values, (((x.ndim - 1,), (0,)), ((), ())))


def _summed(row: Array, weight: Quantised) -> Array:
    """Return row W^T for one row [D] as a sum: XLA on CPU fuses the conversion into it, but not into a dot product."""
    if not weight.group:
        return jnp.sum(_from_fp8(weight.values) * row, -1) * (weight.scale * FP8_FACTOR)
    x_Gg = row.reshape(weight.values.shape[0], -1)
    scale = weight.scale[:, None].astype(jnp.float32)
    if weight.packed:
        parts = zip(jnp.split(x_Gg, 2, -1), unpack(weight.values, weight.kind == "int4"))
    else:
        parts = [(x_Gg, weight.values)]
    out = jnp.sum(sum(x[..., None] * values.astype(jnp.float32) for x, values in parts) * scale, (0, 1))
    if weight.zero is None:
        return out
    return out + jnp.sum(x_Gg, -1) @ weight.zero.astype(jnp.float32)


FP8_FACTOR = 2.0**8
"""2^(15 - 7). The exponent bias is 15 in float16 and 7 in e4m3, so e4m3 bits read as float16 give a 2^8 times smaller
value."""


def _from_fp8(values: Array) -> Array:
    """Return e4m3 values / FP8_FACTOR as float32, by way of float16: XLA on CPU would convert e4m3 one by one."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
