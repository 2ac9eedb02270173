"""Multiply a few rows by a large matrix on CPU, as in decode.

XLA's product on CPU packs its right operand in every call. If the matrix is on the right, packing writes a copy of the
matrix; `thin` therefore computes W x^T, which packs only the rows. XLA would swap the operands of a single product, so
the matrix is cut into BLOCKS blocks of outputs: XLA does not swap operands in a batch of products. (LOG.md has times.)
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tessera.attention.parallel import traced_head_parts

FEW_ROWS = 4
"""Maximum number of rows for which a product on CPU takes no longer than reading the matrix."""
BLOCKS = 4
NARROW_ROWS = 8
"""Minimum number of rows of x if its elements have fewer than 32 bits. Fewer rows are padded, because eight take as
long as one."""


def thin(x: Array, weight: Array, dtype: DTypeLike) -> Array:
    """Return x W^T in `dtype` for a few rows x [M,D] and W [E,D] of the same dtype.

    W is not cut, and the product slower, if several devices share W: blocks would not match the devices' parts.
    """
    (count, inputs), outputs = x.shape, weight.shape[0]
    rows = max(count + count % 2, 2) if x.dtype.itemsize >= 4 else max(count, NARROW_ROWS)
    x = jnp.pad(x, ((0, rows - count), (0, 0)))
    if outputs % BLOCKS or traced_head_parts() > 1:
        return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)[:count]
    blocks = weight.reshape(BLOCKS, outputs // BLOCKS, inputs)
    x = jnp.broadcast_to(x, (BLOCKS, rows, inputs))
    out = jax.lax.dot_general(blocks, x, (((2,), (2,)), ((0,), (0,))), preferred_element_type=dtype)
    return out.reshape(outputs, rows)[:, :count].T
