"""The mesh of devices that share one model: its axes "heads" and "context", and the logical axes that they split.

Weights, cache and logits carry the mesh in their shardings, so functions need no mesh argument. A function that
`program` compiles runs in the mesh of its first argument; in that function, `keep` fixes the sharding of an array.
Without a mesh, `keep` does nothing.

Training splits the same weights over another mesh, with the axes "data" and "shard" (`train.mesh`).
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import gcd
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HEADS, CONTEXT = "heads", "context"
AXES = (HEADS, CONTEXT)
DATA, SHARD = "data", "shard"

RULES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "spread_rows"), HEADS),
        **dict.fromkeys(("rows", "slots"), CONTEXT),
    }
)
"""Logical axis -> mesh axis that splits it. Logical axes that are not listed are not split."""

TRAINING_RULES: Mapping[str, str | tuple[str, str]] = MappingProxyType(
    {"batch": (DATA, SHARD), **dict.fromkeys(("model", "heads", "kv_heads", "mlp", "head_dim"), SHARD)}
)
"""Logical axis -> mesh axes that split it, in training: "shard" splits each weight along its axis "model", or without
that axis along the one axis that it has."""


class MeshShape(NamedTuple):
    """Number of devices along each axis."""

    heads: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        return self.heads * self.context

    def __str__(self) -> str:
        return f"{self.heads}x{self.context}"


ONE_DEVICE = MeshShape()


def parse(text: str | int, num_kv_heads: int) -> MeshShape:
    """Parse the shape of a mesh: "4x2" is heads = 4, context = 2; for "8", heads = gcd(num_kv_heads, 8)."""
    found = re.fullmatch(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", str(text))
    if not found:
        raise ValueError(f"mesh {str(text)!r:.40} must be a number of devices, like 8, or heads x context, like 4x2")
    first, context = int(found[1]), found[2]
    if context is not None:
        return MeshShape(first, int(context))
    heads = gcd(num_kv_heads, first)
    return MeshShape(heads, first // heads)


def check(
    shape: MeshShape, sizes: Mapping[str, int], num_devices: int, num_processes: int = 1, window: int | None = None
) -> None:
    """Raise ValueError if the mesh cannot split the model or does not match the devices of all processes.

    `shape.heads` must divide each of `sizes`, the model's sizes by name. A sliding window allows only one device along
    "context". Several processes must use every device.
    """
    fits = max(n for n in range(1, num_devices + 1) if not any(size % n for size in sizes.values()))
    way_out = f"use mesh {fits}x1" if fits > 1 else "leave out the mesh"
    named, count = f"mesh {shape} (heads x context)", shape.devices
    if shape.context > 1 and window is not None:
        raise ValueError(
            f"{named} cannot split the context of a model with a sliding window (window={window}): {way_out}"
        )
    for name, size in sizes.items():
        if size % shape.heads:
            raise ValueError(f"{named} cannot split {name}={size} into {shape.heads} equal parts: {way_out}")
    if count > num_devices:
        raise ValueError(f"{named} needs {count} devices, but JAX finds {num_devices}: {way_out}")
    if num_processes > 1 and count < num_devices:
        raise ValueError(
            f"{named} leaves out {num_devices - count} of the {num_devices} devices of {num_processes} processes: "
            f"use mesh {num_devices}, or start fewer processes"
        )


def build(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh over the first heads x context of `devices`, which default to the devices of all processes."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: shape.devices]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(axes: Sequence[str | None], rules: Mapping[str, Any] = RULES) -> P:
    """Return an array's PartitionSpec; a mesh axis splits only the first in `rules` of the axes assigned to it."""
    chosen: dict[Any, str] = {}
    for axis, over in rules.items():
        if axis in axes:
            chosen.setdefault(over, axis)
    split = [rules[axis] if axis in chosen.values() else None for axis in axes]
    while split and split[-1] is None:  # P("heads", None) and P("heads") differ in JAX, and JAX returns the short one
        split.pop()
    return P(*split)


def sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of an array with these logical axes on a mesh for inference or training."""
    return NamedSharding(mesh, spec(axes, TRAINING_RULES if SHARD in mesh.axis_names else RULES))


def mesh_of(tree: Any) -> Mesh | None:
    """Return the mesh of the first array of a pytree; None if that array has no mesh or is traced."""
    leaf = _first_leaf(tree)
    placed = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    return placed.mesh if isinstance(placed, NamedSharding) else None


def _first_leaf(tree: Any) -> Any:
    """Return the first leaf of a pytree, or None. Flattening all of a model's weights at each call would be slow."""
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None:
        return tree
    return next((_first_leaf(child) for child in level[0] if child is not None), None)


def num_stripes(mesh: Mesh | None) -> int:
    """Count the devices along the "context" axis, which divide every sequence's keys; 1 without a mesh."""
    return _along(mesh, CONTEXT)


def num_head_parts(mesh: Mesh | None) -> int:
    """Count the devices along the "heads" axis, which divide the heads; 1 without a mesh."""
    return _along(mesh, HEADS)


def _along(mesh: Mesh | None, axis: str) -> int:
    if mesh is not None and axis not in mesh.shape:
        raise ValueError(
            f"a mesh with the axes {', '.join(mesh.axis_names)} has no axis {axis!r}, so it can train a "
            "model but not run one: save the trained weights, and load them with mesh=N"
        )
    return 1 if mesh is None else mesh.shape[axis]


def local_devices(tree: Any) -> list[jax.Device]:
    """Return the devices of this process that hold the first array of a pytree."""
    return sorted(_first_leaf(tree).sharding.addressable_devices, key=lambda device: device.id)


class Program:
    """A function, compiled by jax.jit, that runs in the mesh of its first argument, which is a pytree or a Mesh."""

    def __init__(self, function: Callable, **options: Any):
        functools.update_wrapper(self, function)
        self._compiled = jax.jit(function, **options)

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(first if isinstance(first, Mesh) else mesh_of(first)):
            return self._compiled(first, *args, **kwargs)

    def lower(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(first if isinstance(first, Mesh) else mesh_of(first)):
            return self._compiled.lower(first, *args, **kwargs)


def program(**options: Any) -> Callable[[Callable], Program]:
    """Return a decorator that makes a function a `Program`, with options of jax.jit."""
    return lambda function: Program(function, **options)


def entered(mesh: Mesh | None) -> AbstractContextManager:
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def keep(tree: Any, *axes: str | None) -> Any:
    """Fix the sharding of arrays inside a program; without a mesh, return them unchanged.

    `axes` gives the logical axis, or None, of each dimension. Without `axes`, every device holds the whole arrays.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec(axes)), tree)


def put(x: np.ndarray, mesh: Mesh | None, *axes: str | None) -> np.ndarray | jax.Array:
    """Put a host array, the same in every process, on a mesh, split as `keep` would split it.

    A program compiles once for a host array and again for an array on the mesh. A loop that passes a program's result
    back to the program therefore calls `put` on the first input.
    """
    if mesh is None:
        return x
    return jax.make_array_from_callback(x.shape, sharding(mesh, axes), lambda index: x[index])
