"""Online softmax in jax.numpy: scores, masks, and the running state that a loop over blocks of keys carries.

Scores are in bits: y = log2(e) * softcap(scale * q.k), so that e^z = 2^y needs no multiplication in the exponential.
Per row, the state holds m, the largest y so far; l, the sum of 2^(y - m); and acc, the sum of 2^(y - m) * v. Masked
scores are -inf; m starts at a finite floor, so that 2^(-inf - m) is 0, not NaN.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from tessera.attention.contract import AttentionSpec

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
FLOOR = -1e30
"""Initial running maximum, in bits: finite, and below every score that occurs."""


class SoftmaxState(NamedTuple):
    """Running softmax of R rows: maximum score m (bits), sum l of 2^(y - m), and acc, the sum of 2^(y - m) * v."""

    m: Float[Array, "... R"]
    l: Float[Array, "... R"]  # noqa: E741
    acc: Float[Array, "... R H"]


def init_state(rows: tuple[int, ...], head_dim: int) -> SoftmaxState:
    """Return the state before any key; `rows` is the shape of m and l."""
    return SoftmaxState(
        jnp.full(rows, FLOOR, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, head_dim), jnp.float32)
    )


def dot(a: Array, b: Array, contract_a: int, contract_b: int) -> Float[Array, "..."]:
    """Multiply matrices (the last two axes) with float32 sums; all leading axes are batch axes.

    For 16-bit matrix units, a float32 left operand (probabilities) is rounded to the right operand's dtype. On CPU,
    16-bit operands are widened instead, because XLA's float32 product is faster there (LOG.md).
    """
    batch = tuple(range(a.ndim - 2))
    dims = (((contract_a % a.ndim,), (contract_b % b.ndim,)), (batch, batch))

    def product(a, b):
        return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)

    if a.dtype == b.dtype == jnp.float32:
        return product(a, b)
    return jax.lax.platform_dependent(
        a,
        b,
        cpu=lambda a, b: product(a.astype(jnp.float32), b.astype(jnp.float32)),
        default=lambda a, b: product(a.astype(b.dtype), b),
    )


def scale_of(spec: AttentionSpec, head_dim: int) -> float:
    """Return the factor on q.k: spec.scale, or head_dim ** -0.5 if it is None."""
    return head_dim**-0.5 if spec.scale is None else spec.scale


def query_factor(spec: AttentionSpec, head_dim: int) -> float:
    """Return the factor on q with which q.k are scores in bits or, with a softcap, arguments of tanh."""
    scale = scale_of(spec, head_dim)
    return scale / spec.softcap if spec.softcap else scale * LOG2_E


def widened(x: Array, dtype: jnp.dtype) -> Array:
    """Convert a block of int8 keys or values to `dtype`; return any other block unchanged.

    For float16, convert to float32: a probability times a value's scale would be subnormal in float16.
    """
    if x.dtype != jnp.int8:
        return x
    return x.astype(jnp.float32 if dtype == jnp.float16 else dtype)


def blank(v: Array, scale: Array | None, seen: Bool[Array, "... S 1"]) -> tuple[Array, Array | None]:
    """Zero unseen values, or unseen scales [..., 1, S] if `scale` is given, because 0 * NaN is NaN."""
    if scale is None:
        return jnp.where(seen, v, 0), None
    return v, jnp.where(jnp.swapaxes(seen, -1, -2), scale, 0)


def raw_scores(
    a: Float[Array, "... R H"], b: Float[Array, "... S H"], spec: AttentionSpec, scale: Array | None = None
) -> tuple[Array, float]:
    """Return z [..., R, S] and a factor > 0 such that factor * z are the scores in bits.

    `scale` [..., 1, S] holds the scales of int8 keys. Without a softcap, and if the scale on q.k (`scale_of`) is
    positive, z is q.k and the factor includes that scale. A row's maximum can be taken before the factor is applied, so
    z need not be rewritten between the maximum and the exponential.
    """
    z = dot(a, b, -1, -1)
    return in_bits(z if scale is None else z * scale, spec, a.shape[-1])


def in_bits(z: Float[Array, "..."], spec: AttentionSpec, head_dim: int) -> tuple[Array, float]:
    """Turn the products z = q.k into the result of `raw_scores`: a new z, and the factor that converts it to bits."""
    factor = scale_of(spec, head_dim)
    if spec.softcap:
        return spec.softcap * jnp.tanh(z * (factor / spec.softcap)), LOG2_E
    if factor <= 0:
        return z * factor, LOG2_E
    return z, factor * LOG2_E


def score_bits(
    q: Float[Array, "... R H"], k: Float[Array, "... S H"], spec: AttentionSpec, scale: Array | None = None
) -> Float[Array, "... R S"]:
    """Compute the scores in bits, log2(e) * softcap(scale * q k^T), in float32; `scale` as in `raw_scores`."""
    z, factor = raw_scores(q, k, spec, scale)
    return z * factor


def visible_mask(
    row: Int32[Array, "... R 1"], key: Int32[Array, "... 1 S"], kv_len: Int32[Array, "... 1 1"], spec: AttentionSpec
) -> Bool[Array, "... R S"]:
    """Mark the keys that each row sees, by the contract's rule; `row` and `key` are absolute positions."""
    mask = key < kv_len
    if spec.causal:
        mask = mask & (key <= row)
    if spec.window is not None:
        mask = mask & (key > row - spec.window)
    return mask


def sees_any(row: Int32[Array, "... R"], kv_len: Int32[Array, "... 1"], spec: AttentionSpec) -> Bool[Array, "... R"]:
    """Mark the rows (absolute positions) that see at least one key by the contract's rule."""
    stop = jnp.minimum(kv_len, row + 1) if spec.causal else kv_len + 0 * row
    return stop > (0 if spec.window is None else jnp.maximum(row - spec.window + 1, 0))


def absorb(
    state: SoftmaxState,
    z: Float[Array, "... R S"],
    v: Float[Array, "... S H"],
    factor: float = 1.0,
    tile: int = 1,
    scale: Float[Array, "... 1 S"] | None = None,
) -> tuple[SoftmaxState, Float[Array, "... R J"]]:
    """Add one block of keys with scores y = factor * z to the state.

    Also return, per row and key tile, the sum of 2^(y - m) with the new m. `scale` holds the scales of int8 values.
    """
    m = jnp.maximum(state.m, z.max(-1) * factor)
    p = jnp.exp2(z * factor - m[..., None])
    # The row sum below adds the tiles' sums, so that the tile sums cost no extra pass over p.
    parts = p if tile == 1 else p.reshape(*p.shape[:-1], -1, tile).sum(-1)
    alpha = jnp.exp2(state.m - m)
    acc = alpha[..., None] * state.acc + dot(p if scale is None else p * scale, v, -1, -2)
    return SoftmaxState(m, alpha * state.l + parts.sum(-1), acc), parts


def finish_state(state: SoftmaxState, valid: Bool[Array, "... R"]) -> tuple[Float[Array, "... R H"], Array]:
    """Return out = acc / l and lse = ln(sum e^z) in float32; 0 and -inf for rows that are not valid or saw no key."""
    seen = valid & (state.l != 0)  # NaN passes: a row that sees a bad key must not get a finite output
    l = jnp.where(seen, state.l, 1.0)  # noqa: E741
    out = jnp.where(seen[..., None], state.acc / l[..., None], 0.0)
    return out, jnp.where(seen, LN_2 * (state.m + jnp.log2(l)), -jnp.inf)
