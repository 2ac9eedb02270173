"""Check in which forms (`core.quant`) a checkpoint's matrices can be stored, and whether they fit in memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tessera.core.memory import require, require_programs
from tessera.core.mesh import num_head_parts
from tessera.core.quant import STORED, STORED_GROUP, check_name, check_shape
from tessera.models.config import ModelConfig
from tessera.models.files.gguf_file import GgufTensor, read_gguf
from tessera.models.files.gguf_model import gguf_tensors
from tessera.models.files.gguf_stored import KINDS, check_stored_type
from tessera.models.files.tensor_file import Stored, read_index
from tessera.models.footprint import Division, Types, weight_bytes
from tessera.models.weights import form_of, input_parts, layer_name, layer_weights, outer_weights, shape_of


def stored_tensors(source: str | os.PathLike, config: ModelConfig) -> Mapping[str, Any]:
    """Return where each tensor of a folder or GGUF file is stored, by Hugging Face's name."""
    source = Path(source)
    return gguf_tensors(read_gguf(source), config) if source.is_file() else read_index(source)


def stored_kinds(stored: Mapping[str, GgufTensor]) -> dict[str, str]:
    """Map the name of each matrix that `weights="gguf"` keeps in blocks to its `Quantised.kind`."""
    return {name: KINDS[t.layout.name] for name, t in stored.items() if len(t.shape) == 2 and t.layout.name in KINDS}


def require_weights(source: Path, config: ModelConfig, weights: str | None, on: Mesh | None) -> None:
    """Raise ValueError if this model's matrices do not support the number format `weights`, and MemoryError if the
    weights and the programs that use them do not fit in memory."""
    described = source / "config.json" if source.is_dir() else source
    what = f"the model that {described} describes, in {weights or config.dtype},"
    kinds = {}
    if weights is not None:
        stored = stored_tensors(source, config)
        check_forms(stored, config, source, weights, num_head_parts(on))
        kinds = stored_kinds(stored) if weights == STORED else kinds
    types = Types(weights=weights or config.dtype, dtype=config.dtype, kinds=kinds)
    num_bytes = sum(weight_bytes(config, types=types, division=Division(heads=num_head_parts(on))).values())
    devices = jax.devices()[:1] if on is None else on.local_devices
    require(num_bytes, devices, what, "take a smaller model, more devices, bfloat16, or quantised weights (int8, int4)")
    require_programs(num_bytes * len(devices), what)


def check_forms(
    stored: Mapping[str, Stored | GgufTensor], config: ModelConfig, source: Path, weights: str | None, heads: int = 1
) -> None:
    """Raise ValueError if a matrix, split over `heads` devices, cannot be stored in the form `weights`.

    No weight is read.
    """
    check_name(weights)
    if weights == STORED:
        _check_kept(stored, config, source, heads)
    else:
        check_split(config, weights, heads)


def check_split(config: ModelConfig, weights: str | None, heads: int = 1) -> None:
    """Raise ValueError if a matrix, split over `heads` devices, cannot be rounded to the form FORMS[weights]."""
    for weight in (*layer_weights(config), *outer_weights(config)):
        if form := form_of(weight, config, weights):
            check_shape(weight.stored, shape_of(weight, config), form, input_parts(weight, heads))


def _check_kept(stored: Mapping[str, GgufTensor], config: ModelConfig, source: Path, heads: int) -> None:
    if not source.is_file():
        raise ValueError(
            f"weights='gguf' keeps the blocks of a GGUF file, but {source} is a folder: pass weights='int8'"
        )
    matrices = {name: tensor for name, tensor in stored.items() if len(tensor.shape) == 2}
    for name, tensor in matrices.items():
        check_stored_type(name, tensor)
    kept = stored_kinds(stored)
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
