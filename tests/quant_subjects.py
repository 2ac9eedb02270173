"""Products that the tests compile for absent TPUs, in the forms of models/products.py; what quantised weights mean."""

import jax
import jax.numpy as jnp
import numpy as np

from tessera.core.mesh import MeshShape, build, sharding
from tessera.core.quant import FORMS, Quantised, arrays_of, unpack
from tessera.models import grouped
from tessera.models.layers import linear
from tessera.models.weights import LAYER, quantised_axes


def weight_product(name=None, rows=8, inputs=4096, outputs=14336):
    """Build [rows,inputs] times a weight in a form of FORMS; None is bfloat16."""

    def of(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    x = of((rows, inputs), jnp.bfloat16)
    if name is None:
        return jax.jit(linear), (x, of((outputs, inputs), jnp.bfloat16))
    form = FORMS[name]
    dtype = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}[form.kind]
    shape, scale = (outputs, inputs), of((outputs,), jnp.float32)
    if form.group:
        groups = inputs // form.group
        shape, scale = (groups, form.group, outputs), of((groups, outputs), jnp.float16)
    weight = Quantised(
        values=of(shape, dtype), scale=scale, sample=of((64,), jnp.bfloat16), kind=form.kind, group=form.group,
        rounds_rows=form.rounds_rows, float_dtype="bfloat16",
    )  # fmt: skip
    return jax.jit(linear), (x, weight)


def split_product(name, rows, inputs, outputs, devices):
    """Build a product whose inputs the devices share, as those of o and down."""
    mesh = build(MeshShape(len(devices), 1), devices)
    form = FORMS[name]
    axes = quantised_axes(next(weight for weight in LAYER if weight.name == "down"), form)
    held = {
        leaf: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(mesh, axes[leaf]))
        for leaf, array in arrays_of(outputs, inputs, form).items()
    }
    weight = Quantised(
        **held, kind=form.kind, group=form.group, rounds_rows=form.rounds_rows, shared=len(devices),
        float_dtype="bfloat16",
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16, sharding=sharding(mesh, (None, "mlp")))
    return jax.jit(linear, out_shardings=sharding(mesh, ())), (x, weight)


def grouped_kernel(rows, group, size):
    """Build the kernel of models/grouped.py on a weight of `size` (outputs, inputs) in 4 bits."""
    outputs, inputs = size
    count = inputs // group

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    weight = Quantised(
        values=of(count, group, outputs, dtype=jnp.int4), scale=of(count, outputs, dtype=jnp.float16), sample=of(64),
        kind="int4", group=group, float_dtype="bfloat16",
    )  # fmt: skip
    about = {"executions": grouped.executions(rows, inputs, outputs, group)}
    return jax.jit(grouped.product), (of(rows, inputs), weight), about


def dequantised(weight: Quantised) -> np.ndarray:
    """Compute, on the host, the float32 matrix [E,D] that a quantised matrix represents."""
    values, scale = np.asarray(weight.values), np.asarray(weight.scale, np.float32)
    if weight.packed and weight.group:
        values = np.concatenate([*map(np.asarray, unpack(values, weight.kind == "int4"))], -2)
    elif weight.packed:
        halves = [np.asarray(half).reshape(len(values), weight.stretches, -1) for half in unpack(values, True)]
        values = np.concatenate(halves, -1).reshape(len(values), -1)
    if not weight.group:
        return values.astype(np.float32) * scale[:, None]
    whole = values.astype(np.float32) * scale[:, None]
    if weight.zero is not None:
        whole = whole + np.asarray(weight.zero, np.float32)[:, None]
    return whole.reshape(-1, whole.shape[-1]).T
