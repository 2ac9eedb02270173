"""Tensor parallelism of one attention call: every device of a mesh axis named "heads" takes its share of the KV heads.

A Pallas kernel is opaque to the partitioner, so `split` states how the call divides: KV heads, each with its G query
heads, are independent. Nothing is communicated.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from tessera.attention.contract import AttentionOut, Shapes

AXIS = "heads"


def num_parts() -> int:
    """Count the devices that share the heads of the traced call: the size of the mesh's axis "heads", 1 without one."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def platform() -> str:
    """Return the platform that the traced program will run on: the mesh's, whose devices may be absent, else JAX's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def local_shapes(shapes: Shapes) -> Shapes:
    """The shapes of one device's share.

    Raises:
        ValueError: the KV heads do not divide among the devices.
    """
    parts = num_parts()
    if shapes.num_kv_heads % parts:
        raise ValueError(
            f"num_kv_heads={shapes.num_kv_heads} must be a multiple of the {parts} devices that share them"
        )
    return shapes._replace(num_heads=shapes.num_heads // parts, num_kv_heads=shapes.num_kv_heads // parts)


def split(launch: Callable[..., AttentionOut], with_mass: bool) -> Callable[..., AttentionOut]:
    """Wrap launch(q, kv, positions, selection) so that each device runs its own heads; on one device, return launch."""
    if num_parts() == 1:
        return launch
    heads, by_head = P(None, None, AXIS), P(None, AXIS)
    out = AttentionOut(heads, heads, by_head if with_mass else None)
    # check_vma=False: JAX cannot track through a kernel which mesh axes its outputs vary over.
    return jax.shard_map(launch, in_specs=(heads, by_head, P(), by_head), out_specs=out, check_vma=False)
