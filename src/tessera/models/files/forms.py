"""Check in which forms (`core.quant`) a model's matrices can be stored, and whether they fit in memory."""

import jax
from jax.sharding import Mesh

from tessera.core.memory import require, require_programs
from tessera.core.mesh import MeshShape, num_head_parts
from tessera.core.quant import STORED, STORED_GROUP, check_name, check_shape
from tessera.models.config import ModelConfig
from tessera.models.files.gguf_file import check_stored_type
from tessera.models.files.source import Source
from tessera.models.footprint import Types, weight_bytes
from tessera.models.weights import form_of, input_parts, layer_name, layer_weights, outer_weights, shape_of


def require_weights(source: Source, config: ModelConfig, weight_format: str | None, on: Mesh | None) -> None:
    """Raise an error if matrices cannot be stored in a form, or if weights and their programs do not fit in memory."""
    check_forms(source, weight_format, num_head_parts(on))
    kinds = source.kinds if weight_format == STORED else {}
    types = Types(weights=weight_format or config.dtype, dtype=config.dtype, kinds=kinds)
    num_bytes = sum(weight_bytes(config, types=types, division=MeshShape(heads=num_head_parts(on))).values())
    what = f"the model that {source.described} describes, in {types.weights},"
    devices = jax.devices()[:1] if on is None else on.local_devices
    require(num_bytes, devices, what, "take a smaller model, more devices, bfloat16, or quantised weights (int8, int4)")
    require_programs(num_bytes * len(devices), what)


def check_forms(source: Source, weight_format: str | None, heads: int = 1) -> None:
    """Raise ValueError if a matrix, split over `heads` devices, cannot be stored in this form of `core.quant.NAMES`."""
    check_name(weight_format)
    if weight_format == STORED:
        _check_kept(source, heads)
    else:
        check_split(source.config, weight_format, heads)


def check_split(config: ModelConfig, weight_format: str | None, heads: int = 1) -> None:
    for weight in (*layer_weights(config), *outer_weights(config)):
        if form := form_of(weight, config, weight_format):
            check_shape(weight.stored, shape_of(weight, config), form, input_parts(weight, heads))


def _check_kept(source: Source, heads: int) -> None:
    config, kept = source.config, source.kinds
    if kept is None:
        raise ValueError(
            f"weights='gguf' keeps the blocks of a GGUF file, but {source} is a folder: pass weights='int8'"
        )
    for name, tensor in source.tensors.items():
        if len(tensor.shape) == 2:
            check_stored_type(name, tensor)
    if not kept:
        raise ValueError(f"weights='gguf' keeps quantised blocks, but {source} holds only floats: pass weights='int8'")
    for weight in layer_weights(config):
        parts = input_parts(weight, heads) if weight.is_matrix else 1
        blocks = any(layer_name(index, weight) in kept for index in range(config.num_layers))
        if parts > 1 and blocks and (share := shape_of(weight, config)[1] // parts) % STORED_GROUP:
            raise ValueError(
                f"weights='gguf' keeps blocks of {STORED_GROUP} inputs, but {weight.stored} has {share} inputs on each "
                f"of {parts} devices: pass weights='int8', or use fewer devices"
            )
