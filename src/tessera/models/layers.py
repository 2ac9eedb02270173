"""The parts of a decoder layer: weights, norm, rotary embedding, linear projection, MLP."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tessera.attention.parallel import num_parts
from tessera.core.quant import Quantised
from tessera.models.config import Rope
from tessera.models.products import product

FEW_ROWS = 4
"""Maximum rows with which `matmul` takes its decode path on CPU."""

CACHED_BYTES = 4 << 20
"""Bytes of a matrix block that stay in a CPU's cache while several rows are multiplied by it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one decoder layer; matrices are [out, in] as in the checkpoint. Stacked layers have a leading L.

    Each matrix is an Array or a Quantised; `linear` takes both.
    """

    attn_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None
    o_bias: Array | None = None
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Params:
    """All weights: `layers` is one stacked Layer (run under lax.scan) or a tuple of Layer (unrolled)."""

    embed: Array
    layers: Layer | tuple[Layer, ...]
    final_norm: Array
    head: Array | None = None


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Return x / sqrt(mean(x^2) + eps) * weight in x's dtype; the quotient is computed in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight * normed.astype(x.dtype)


def linear(x: Float[Array, "... D"], weight: Array | Quantised, bias: Array | None = None) -> Float[Array, "... E"]:
    """Return x W^T + b in x's dtype, accumulated in float32, for W [E,D]."""
    out = matmul(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def matmul(x: Float[Array, "... D"], weight: Array | Quantised) -> Float[Array, "... E"]:
    """Return x W^T in float32, for W [E,D]. A few rows (decode) take another path on CPU, where XLA's is slow."""
    if isinstance(weight, Quantised):
        return product(x, weight)
    if math.prod(x.shape[:-1]) > FEW_ROWS:
        return _dot(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    out = jax.lax.platform_dependent(rows, weight, cpu=_few_rows, default=_dot)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _dot(x: Array, weight: Array) -> Array:
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _few_rows(x: Array, weight: Array) -> Array:
    """Return x W^T on CPU for a few rows x [M,D] and W [E,D].

    In float32, XLA multiplies a matrix by one vector at memory speed, but repacks the matrix for two or more rows,
    which is several times slower. Rows therefore run one by one over blocks of the matrix that stay in the cache. In
    bfloat16, a single row is by far the slowest case, so rows are padded to FEW_ROWS.
    """
    count, num_outputs = x.shape[0], weight.shape[0]
    if x.dtype != jnp.float32:
        return _dot(jnp.pad(x, ((0, FEW_ROWS - count), (0, 0))), weight)[:count]
    if count == 1:
        return _dot(x[0], weight)[None]

    if num_parts() > 1:  # the blocks below would cut across the devices' parts, and XLA would gather the matrix
        return _dot(x, weight)

    def each_row(block: Array) -> Array:
        return jax.lax.map(lambda row: _dot(row, block), x)  # a loop: unrolled, it compiles longer and runs no faster

    if weight.nbytes <= 2 * CACHED_BYTES:
        return each_row(weight)
    divisors = (n for n in range(1, num_outputs + 1) if num_outputs % n == 0)
    blocks = next((n for n in divisors if weight.nbytes / n <= CACHED_BYTES), num_outputs)
    if num_outputs // blocks < 64:  # E has few divisors, as for some vocabularies: many thin blocks cost more
        return _dot(x, weight)
    out = jax.lax.map(each_row, weight.reshape(blocks, num_outputs // blocks, -1))
    return jnp.swapaxes(out, 0, 1).reshape(count, num_outputs)


def mlp(x: Float[Array, "B T D"], layer: Layer) -> Float[Array, "B T D"]:
    """Return the SwiGLU MLP, W_down (silu(W_gate x) * W_up x)."""
    gate = linear(x, layer.gate, layer.gate_bias)
    up = linear(x, layer.up, layer.up_bias)
    return linear(jax.nn.silu(gate) * up, layer.down, layer.down_bias)


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[Float[Array, "H/2"], float]:
    """Return the angular frequency per pair of dimensions, and the factor on cos and sin, 1 for all kinds but yarn."""
    pairs = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    freq = rope.theta**-pairs
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(freq, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(freq, rope, head_dim)
    return freq, 1.0


def _llama3(freq: Array, rope: Rope) -> Array:
    """Divide frequencies of long wavelengths by rope.factor, keep those of short ones, and interpolate in between."""
    wavelength = 2 * math.pi / freq
    turns = rope.original_max_positions / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return (1 - blend) * freq / rope.factor + blend * freq


def _yarn(freq: Array, rope: Rope, head_dim: int) -> tuple[Array, float]:
    """Scale by YaRN's NTK-by-parts (arXiv 2309.00071): divide slow pairs' frequencies by rope.factor, keep those of
    fast pairs, ramp in between. Also return the factor on cos and sin."""

    def pair_at(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_at(rope.beta_fast), pair_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
    blended = freq / rope.factor * ramp + freq * (1 - ramp)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return blended, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return blended, mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return blended, mscale(1.0)


def rope_tables(rope: Rope, head_dim: int, position_BT: Int32[Array, "B T"]) -> tuple[Array, Array]:
    """Return cos and sin of position * frequency, times yarn's factor, as float32 [B,T,1,H/2] each."""
    freq, factor = rope_frequencies(rope, head_dim)
    angle = position_BT[..., None, None].astype(jnp.float32) * freq
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: Float[Array, "B T N H"], tables: tuple[Array, Array]) -> Float[Array, "B T N H"]:
    """Rotate each pair (x_i, x_{i+H/2}) by its angle in the tables (cos, sin); compute in float32."""
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
