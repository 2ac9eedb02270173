"""Online softmax: the visibility rule, and the running state (max, sum, weighted values) a sweep over keys carries.

Scores here are in bits: y = log2(e) * softcap(scale * q.k), so that every exponential is an exp2 with nothing to
multiply. A state holds, per row, the largest score seen (m), the sum of 2^(y - m) (l) and that sum weighted by the
values (acc). Masked scores are -inf; m starts at a finite floor, so 2^(-inf - m) is 0 and never NaN.
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
"""Initial running max: below every finite score worth weighting, above -inf."""


class SoftmaxState(NamedTuple):
    """Running softmax of rows R over the keys seen so far; scores in bits."""

    m: Float[Array, "... R"]
    l: Float[Array, "... R"]  # noqa: E741
    acc: Float[Array, "... R H"]


def init_state(rows: tuple[int, ...], head_dim: int) -> SoftmaxState:
    """The state before any key."""
    return SoftmaxState(
        jnp.full(rows, FLOOR, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, head_dim), jnp.float32)
    )


def dot(a: Array, b: Array, contract_a: int, contract_b: int) -> Float[Array, "..."]:
    """Batched product over all leading dimensions but two, accumulated in float32.

    A float32 left operand (probabilities) is rounded to the right one's dtype for 16-bit matrix units. On CPU nothing
    is rounded: 16-bit operands are widened, as XLA's float32 product is the faster one there (LOG.md).
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
    """The factor on q.k."""
    return head_dim**-0.5 if spec.scale is None else spec.scale


def widened(x: Array, dtype: jnp.dtype) -> Array:
    """Return a block of int8 keys or values in a dtype whose products are exact enough, any other block as it is.

    For float16 that is float32: a probability times a value's scale would be subnormal there.
    """
    if x.dtype != jnp.int8:
        return x
    return x.astype(jnp.float32 if dtype == jnp.float16 else dtype)


def blank(v: Array, scale: Array | None, seen: Bool[Array, "... S 1"]) -> tuple[Array, Array | None]:
    """Zero unseen values, which may be NaN, and 0 * NaN is NaN; of int8 values only the scale [..., 1, S] can be."""
    if scale is None:
        return jnp.where(seen, v, 0), None
    return v, jnp.where(jnp.swapaxes(seen, -1, -2), scale, 0)


def raw_scores(
    a: Float[Array, "... R H"], b: Float[Array, "... S H"], spec: AttentionSpec, scale: Array | None = None
) -> tuple[Array, float]:
    """z [..., R, S] and a factor > 0 with y = factor * z; `scale` [..., 1, S] is that of int8 keys.

    The factor stays out of z because a row maximum commutes with it: the product is then read once by the maximum
    and once by the exponential, and never written in between.
    """
    z, factor = dot(a, b, -1, -1), scale_of(spec, a.shape[-1])
    if scale is not None:
        z = z * scale
    if spec.softcap:
        return spec.softcap * jnp.tanh(z * (factor / spec.softcap)), LOG2_E
    if factor <= 0:
        return z * factor, LOG2_E
    return z, factor * LOG2_E


def score_bits(
    q: Float[Array, "... R H"], k: Float[Array, "... S H"], spec: AttentionSpec, scale: Array | None = None
) -> Float[Array, "... R S"]:
    """y = log2(e) * softcap(scale * q k^T), float32; the argument `scale` is that of int8 keys."""
    z, factor = raw_scores(q, k, spec, scale)
    return z * factor


def visible_mask(
    row: Int32[Array, "... R 1"], key: Int32[Array, "... 1 S"], kv_len: Int32[Array, "... 1 1"], spec: AttentionSpec
) -> Bool[Array, "... R S"]:
    """The contract's visibility rule for absolute positions."""
    mask = key < kv_len
    if spec.causal:
        mask = mask & (key <= row)
    if spec.window is not None:
        mask = mask & (key > row - spec.window)
    return mask


def sees_any(row: Int32[Array, "... R"], kv_len: Int32[Array, "... 1"], spec: AttentionSpec) -> Bool[Array, "... R"]:
    """Whether a row sees any key at all."""
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
    """Add one block of keys with scores y = factor * z; also return each tile's sum of 2^(y - m) at the new m.

    `scale` is that of int8 values.
    """
    m = jnp.maximum(state.m, z.max(-1) * factor)
    p = jnp.exp2(z * factor - m[..., None])
    # The row sum is the sum of the tiles' sums: scoring adds no pass over p.
    parts = p if tile == 1 else p.reshape(*p.shape[:-1], -1, tile).sum(-1)
    alpha = jnp.exp2(state.m - m)
    acc = alpha[..., None] * state.acc + dot(p if scale is None else p * scale, v, -1, -2)
    return SoftmaxState(m, alpha * state.l + parts.sum(-1), acc), parts


def finish_state(state: SoftmaxState, valid: Bool[Array, "... R"]) -> tuple[Float[Array, "... R H"], Array]:
    """out = acc / l and lse = ln(sum e^z), both float32; 0 and -inf where nothing was seen or the row is not valid."""
    seen = valid & (state.l > 0)
    l = jnp.where(seen, state.l, 1.0)  # noqa: E741
    out = jnp.where(seen[..., None], state.acc / l[..., None], 0.0)
    return out, jnp.where(seen, LN_2 * (state.m + jnp.log2(l)), -jnp.inf)
