"""Tensor parallelism of one attention call: every device of a mesh axis named "heads" takes its share of the KV heads.

A Pallas kernel is opaque to the partitioner, so the call says itself how it splits: K and V, and with them G query
heads each, are independent. Nothing is communicated.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from tessera.attention.contract import AttentionOut, Shapes

AXIS = "heads"


def num_parts() -> int:
    """Devices that share the heads of a call traced here: the size of the axis "heads" of the mesh in use, else 1."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def platform() -> str:
    """Where a program traced here will run: the platform of the mesh in use, which may be of absent devices."""
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
    """launch(q, kv, positions, selection), each device on its heads; itself where there is nothing to split."""
    if num_parts() == 1:
        return launch
    heads, by_head = P(None, None, AXIS), P(None, AXIS)
    out = AttentionOut(heads, heads, by_head if with_mass else None)
    # Kernels make their outputs from whole blocks: which mesh axes a value varies over is not tracked through them.
    return jax.shard_map(launch, in_specs=(heads, by_head, P(), by_head), out_specs=out, check_vma=False)
