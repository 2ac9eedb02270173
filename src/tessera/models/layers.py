"""The parts of a decoder layer: weights, norm, rotary embedding, linear projection, MLP."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from tessera.core.quant import Quantised
from tessera.models.config import Rope
from tessera.models.products import product
from tessera.models.thin import FEW_ROWS, thin


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one decoder layer, or of all layers if each array has a leading axis L (stacked layers).

    Matrices are [out, in], as in the checkpoint. Each is an Array or a Quantised; `linear` accepts both.
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
    """All weights of a model. `layers` is one stacked Layer (run under lax.scan) or a tuple of Layer (unrolled)."""

    embed: Array
    layers: Layer | tuple[Layer, ...]
    final_norm: Array
    head: Array | None = None


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Return weight * x / sqrt(mean(x^2) + eps) in x's dtype; the quotient is computed in float32."""
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
    """Return x W^T in float32, for W [E,D]. On CPU, a few rows (decode) take a faster path than XLA's own product."""
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

    XLA multiplies a float32 matrix by a single vector at memory speed, but would first convert a 16-bit matrix.
    """
    if x.dtype != weight.dtype:
        return _dot(x, weight)
    if x.shape[0] == 1 and x.dtype == jnp.float32:
        return _dot(x[0], weight)[None]
    return thin(x, weight, jnp.float32)


def mlp(x: Float[Array, "B T D"], layer: Layer) -> Float[Array, "B T D"]:
    """Return the SwiGLU MLP, W_down (silu(W_gate x) * W_up x)."""
    gate = linear(x, layer.gate, layer.gate_bias)
    up = linear(x, layer.up, layer.up_bias)
    return linear(jax.nn.silu(gate) * up, layer.down, layer.down_bias)


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[Float[Array, "H/2"], float]:
    """Return the angular frequency of each pair of dimensions, and a factor for cos and sin (1 except for yarn)."""
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
    """Divide low frequencies by rope.factor, keep high frequencies, and interpolate in between."""
    wavelength = 2 * math.pi / freq
    turns = rope.original_max_positions / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return (1 - blend) * freq / rope.factor + blend * freq


def _yarn(freq: Array, rope: Rope, head_dim: int) -> tuple[Array, float]:
    """Scale frequencies by YaRN's NTK-by-parts (arXiv 2309.00071), and return them with the factor for cos and sin."""

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
    """Return cos and sin of position * frequency, times the factor of `rope_frequencies`: float32 [B,T,1,H/2] each."""
    freq, factor = rope_frequencies(rope, head_dim)
    angle = position_BT[..., None, None].astype(jnp.float32) * freq
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: Float[Array, "B T N H"], tables: tuple[Array, Array]) -> Float[Array, "B T N H"]:
    """Rotate each pair (x_i, x_{i+H/2}) by its angle in the tables (cos, sin); compute in float32.

    A TPU rotates bfloat16 heads by a matrix product: half a head does not fill a register's lanes, and moving halves
    costs more cycles than the product (docs/runtime.md).
    """
    if x.dtype != jnp.bfloat16:  # the matrix unit would round float32
        return rotate_by_halves(x, *tables)
    return jax.lax.platform_dependent(x, *tables, tpu=rotate_by_product, default=rotate_by_halves)


def rotate_by_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Return [a cos - b sin, b cos + a sin] for the halves [a, b] of each head."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotate_by_product(x: Array, cos: Array, sin: Array) -> Array:
    """Return x [cos, cos] + (x P) [-sin, sin], where P [H,H] swaps a head's halves.

    The bfloat16 product x P is exact, because each of its sums has only one nonzero term. If one element of a head is
    not finite, the whole head becomes NaN.
    """
    shape, size = x.shape, x.shape[-1]
    if shape[0] == 1 or jax.sharding.get_abstract_mesh().size <= 1:
        # With one dimension of rows, XLA writes the projection head-major. A mesh may split T: then B and T stay apart.
        x, cos, sin = (part.reshape(-1, *part.shape[2:]) for part in (x, cos, sin))
    swap = jnp.asarray(np.roll(np.eye(size), size // 2, axis=-1), x.dtype)
    swapped = jax.lax.dot_general(x, swap, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    out = x.astype(jnp.float32) * jnp.concatenate([cos, cos], -1) + swapped * jnp.concatenate([-sin, sin], -1)
    return out.astype(x.dtype).reshape(shape)
