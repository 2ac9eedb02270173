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
"""Where the running max starts: below every finite score worth weighting, above -inf."""


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


def score_factor(spec: AttentionSpec, head_dim: int) -> float:
    """What q.k is multiplied by: scale * log2(e), or scale alone when a softcap follows."""
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    return scale if spec.softcap else scale * LOG2_E


def score_bits(q: Float[Array, "... R H"], k: Float[Array, "... S H"], spec: AttentionSpec) -> Float[Array, "... R S"]:
    """y = log2(e) * softcap(scale * q k^T), float32."""
    batch = tuple(range(q.ndim - 2))
    dims = (((q.ndim - 1,), (k.ndim - 1,)), (batch, batch))
    z = jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * score_factor(spec, q.shape[-1])
    if spec.softcap:
        z = spec.softcap * LOG2_E * jnp.tanh(z / spec.softcap)
    return z


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


def weigh(p: Float[Array, "... R S"], v: Float[Array, "... S H"]) -> Float[Array, "... R H"]:
    """p v, with p in v's dtype, accumulated in float32."""
    batch = tuple(range(p.ndim - 2))
    dims = (((p.ndim - 1,), (v.ndim - 2,)), (batch, batch))
    return jax.lax.dot_general(p.astype(v.dtype), v, dims, preferred_element_type=jnp.float32)


def absorb(state: SoftmaxState, y: Float[Array, "... R S"], v: Float[Array, "... S H"]) -> tuple[SoftmaxState, Array]:
    """Add one block of keys; returns the new state and p = 2^(y - m) at the new m."""
    m = jnp.maximum(state.m, y.max(-1))
    p = jnp.exp2(y - m[..., None])
    alpha = jnp.exp2(state.m - m)
    return SoftmaxState(m, alpha * state.l + p.sum(-1), alpha[..., None] * state.acc + weigh(p, v)), p


def merge_states(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The state over the keys of both."""
    m = jnp.maximum(a.m, b.m)
    alpha, beta = jnp.exp2(a.m - m), jnp.exp2(b.m - m)
    return SoftmaxState(m, alpha * a.l + beta * b.l, alpha[..., None] * a.acc + beta[..., None] * b.acc)


def finish_state(state: SoftmaxState, valid: Bool[Array, "... R"]) -> tuple[Float[Array, "... R H"], Array]:
    """out = acc / l and lse = ln(sum e^z), both float32; 0 and -inf where nothing was seen or the row is not valid."""
    seen = valid & (state.l > 0)
    l = jnp.where(seen, state.l, 1.0)  # noqa: E741
    out = jnp.where(seen[..., None], state.acc / l[..., None], 0.0)
    return out, jnp.where(seen, LN_2 * (state.m + jnp.log2(l)), -jnp.inf)
