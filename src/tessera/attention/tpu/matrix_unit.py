"""Products of a TPU's matrix unit, and rows of equal lanes made as wide as their results."""

import jax
import jax.numpy as jnp
from jax import Array

from tessera.core.shapes import ceil_div

LANES = 128
"""Elements of a vector register's last dimension."""


def dot(a: Array, b: Array, contract_b: int) -> Array:
    """a [R,X] with b, contracting a's last dimension, accumulated in float32; float32 operands at full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def widen(x: Array, width: int) -> Array:
    """[R,128] of equal lanes as [R,width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.tile(x, (1, ceil_div(width, LANES)))[:, :width]
