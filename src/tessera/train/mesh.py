"""The devices that train one model: a mesh with the axes "data" and "shard".

All devices share each batch by rows. The devices along "shard" also share the weights, the gradients and the
optimizer's moments, each split equally (`core.mesh.TRAINING_RULES`): the weights of a layer are gathered when the layer
runs, forward and backward, and the sum of its gradients is split like the weights (Rajbhandari et al., arXiv
1910.02054, stage 3). The devices along "data" hold equal copies of all three. XLA inserts the collectives; `gathered`
only sets shardings.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tessera.core.files import TEMPORARY
from tessera.core.mesh import DATA, SHARD, TRAINING_RULES, sharding, spec
from tessera.models.config import ModelConfig
from tessera.models.layers import Layer, Params
from tessera.models.weights import Weight, layer_weights, outer_weights, sizes
from tessera.train.recipes import Recipe

AXES = (DATA, SHARD)


class MeshShape(NamedTuple):
    """Number of devices along each axis."""

    data: int = 1
    shard: int = 1

    def __str__(self) -> str:
        return f"mesh data={self.data},shard={self.shard}"


def parse(text: str) -> MeshShape:
    """Read the shape of a mesh: "data=8", "shard=4" or "data=2,shard=4"."""
    found = re.findall(r"(data|shard)=([1-9]\d{0,5})(?:,|$)", text)
    if ",".join(f"{axis}={size}" for axis, size in found) != text or len(dict(found)) != len(found) or not found:
        raise ValueError(
            f"mesh {text!r:.40} must be like data=8 (each device holds all weights), shard=8 (each holds an eighth of "
            f"them) or data=2,shard=4"
        )
    return MeshShape(**{axis: int(size) for axis, size in found})


def check(shape: MeshShape, recipe: Recipe, num_devices: int, num_processes: int = 1) -> None:
    """Raise ValueError if the mesh cannot split the recipe's model, share its batches, or fit the devices of all
    processes."""
    split = _split_sizes(recipe.config)
    count = shape.data * shape.shard
    for name, size in split.items():
        if size % shape.shard:
            fits = max(n for n in range(1, shape.shard) if not any(size % n for size in split.values()))
            raise ValueError(f"{shape} cannot split {name}={size} into {shape.shard} equal parts: use shard={fits}")
    for number, stage in enumerate(recipe.stages, start=1):
        if stage.batch % (count * stage.accumulate):
            slices = f" in {stage.accumulate} slices" if stage.accumulate > 1 else ""
            where = f" of stage {number}" if len(recipe.stages) > 1 else ""
            raise ValueError(
                f"{shape} cannot share batch={stage.batch}{where}{slices} equally among {count} devices: take a batch "
                f"that is a multiple of {count * stage.accumulate}, or fewer devices"
            )
    if count > num_devices:
        raise ValueError(f"{shape} needs {count} devices, but JAX finds {num_devices}: name a smaller mesh")
    if num_processes > 1 and count < num_devices:
        raise ValueError(
            f"{shape} leaves out {num_devices - count} of the {num_devices} devices of {num_processes} processes: use "
            f"all, or start fewer processes"
        )


def _split_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes that the "shard" axis splits, by their names in ModelConfig."""
    names = {
        "model": "hidden_size",
        "mlp": "intermediate_size",
        "heads": "num_heads * head_dim",
        "kv_heads": "num_kv_heads * head_dim",
        "head_dim": "head_dim",
    }
    weights = (*outer_weights(config), *layer_weights(config))
    split = {a for w in weights for a, over in zip(w.axes, spec(w.axes, TRAINING_RULES)) if over}
    return {name: sizes(config)[axis] for axis, name in names.items() if axis in split}


def build(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh over the first data * shard of `devices`; None means all devices of all processes."""
    devices = (jax.devices() if devices is None else devices)[: shape.data * shape.shard]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def find_mesh(text: str | None, recipe: Recipe) -> Mesh:
    """Return the mesh that `text` describes (see `parse`); None means data parallelism on all devices."""
    if text is None:
        return build(MeshShape(data=jax.device_count()))
    shape = parse(text)
    check(shape, recipe, jax.device_count(), jax.process_count())
    return build(shape)


def row_axes(mesh: Mesh, num_rows: int) -> tuple[str, ...]:
    """Return the logical axes of a batch of `num_rows` rows: ("batch",) if the devices can share the rows equally, else
    (), and each device computes the whole batch. `check` lets no mesh that the user names come to that."""
    return ("batch",) if num_rows % mesh.size == 0 else ()


def gathered(weights: Layer | Params, table: Sequence[Weight], mesh: Mesh) -> Layer | Params:
    """Return `weights` with the weights in `table` whole on every device; each gradient is split like its weight."""
    return replace(weights, **{w.name: _whole(getattr(weights, w.name), sharding(mesh, w.axes)) for w in table})


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _whole(weight: Array, placed: NamedSharding) -> Array:
    return _whole_forward(weight, placed)[0]


def _whole_forward(weight: Array, placed: NamedSharding) -> tuple[Array, None]:
    return jax.lax.with_sharding_constraint(weight, NamedSharding(placed.mesh, PartitionSpec())), None


def _whole_backward(placed: NamedSharding, _: None, gradient: Array) -> tuple[Array]:
    # JAX's own gradient of the constraint would be summed whole on every device.
    return (jax.lax.with_sharding_constraint(gradient, placed),)


_whole.defvjp(_whole_forward, _whole_backward)


def is_lead() -> bool:
    """Return whether this is process 0, which writes the log, the picture and the model for all processes."""
    return jax.process_index() == 0


def told_by_lead(value: int) -> int:
    """Return the value of process 0 in every process, after all processes have called this function."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def anywhere(*flags: bool) -> tuple[bool, ...]:
    """Return for each flag whether it is set in any process; every process must call this function."""
    if jax.process_count() == 1:
        return flags
    return tuple(bool(flag) for flag in multihost_utils.process_allgather(np.array(flags)).any(0))


def check_shared(folder: Path) -> None:
    """Raise ValueError in all processes if one of them does not see the folder of process 0."""
    if jax.process_count() == 1:
        return
    mark = folder / f".shared.{os.getpid()}{TEMPORARY}"
    if is_lead():
        mark.touch()
    seen = (folder / f".shared.{told_by_lead(os.getpid())}{TEMPORARY}").exists()
    (missing,) = anywhere(not seen)
    if is_lead():
        mark.unlink()
    if missing:
        raise ValueError(f"{folder} is not one folder for all processes: name one on a file system that they share")
