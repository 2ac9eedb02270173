"""Tensor parallelism of one attention call: the devices along the mesh axis "heads" share the KV heads equally.

XLA's partitioner cannot see into a Pallas kernel, so `split` divides the call explicitly. KV heads, each with its G
query heads, are independent, so the devices exchange nothing.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from tessera.attention.contract import AttentionOut, KeyValues, Shapes
from tessera.core.mesh import HEADS as AXIS


def traced_head_parts() -> int:
    """Count the devices that share the heads of the traced call: the size of the mesh axis "heads", or 1 without it."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def platform() -> str:
    """Return the platform that the traced program will run on: the mesh's if one is set, else JAX's default.

    The devices of a mesh may be absent: a program can be compiled for a chip that this machine lacks.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def local_shapes(shapes: Shapes) -> Shapes:
    """Return the call's shapes on one device, which holds only its share of the heads; raise ValueError if uneven."""
    parts = traced_head_parts()
    if shapes.num_kv_heads % parts:
        raise ValueError(
            f"num_kv_heads={shapes.num_kv_heads} must be a multiple of {parts}, the size of mesh axis {AXIS!r}"
        )
    return shapes._replace(num_heads=shapes.num_heads // parts, num_kv_heads=shapes.num_kv_heads // parts)


def split(launch: Callable[..., AttentionOut], with_mass: bool) -> Callable[..., AttentionOut]:
    """Wrap launch(q, kv, positions, selection) so that each device runs it on its share of the heads.

    On one device, return `launch` itself.
    """
    if traced_head_parts() == 1:
        return launch
    heads, by_head = P(None, None, AXIS), P(None, AXIS)
    keys = KeyValues(by_head, by_head, pages=P(), scales=by_head)
    out = AttentionOut(heads, heads, by_head if with_mass else None)
    # check_vma=False: JAX cannot infer which mesh axes a Pallas kernel's outputs vary over.
    return jax.shard_map(launch, in_specs=(heads, keys, P(), by_head), out_specs=out, check_vma=False)
