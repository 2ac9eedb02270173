"""Products on a TPU's matrix unit, and rows of equal lanes widened to match their results."""

import jax
import jax.numpy as jnp
from jax import Array

from tessera.core.shapes import ceil_div

LANES = 128
"""Elements of a vector register's last dimension."""


def dot(a: Array, b: Array, contract_b: int) -> Array:
    """Multiply a [R,X] by b, contracting a's last dimension, in float32 sums; float32 operands at full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def widen(x: Array, width: int) -> Array:
    """Widen [R,128] of equal lanes to [R,width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.tile(x, (1, ceil_div(width, LANES)))[:, :width]
