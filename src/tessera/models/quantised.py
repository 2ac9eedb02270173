"""Check in which forms (`core.quant`) a checkpoint's matrices can be stored, on one device or split over several."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.core.quant import STORED, check_name, check_shape
from tessera.models.config import ModelConfig
from tessera.models.gguf_file import GgufTensor, read_gguf
from tessera.models.gguf_model import gguf_tensors
from tessera.models.gguf_stored import BLOCK, KINDS, check_stored_type
from tessera.models.tensor_file import Stored, read_index
from tessera.models.weights import form_of, input_parts, layer_name, layer_weights, outer_weights, shape_of


def stored_tensors(source: str | os.PathLike, config: ModelConfig) -> Mapping[str, Any]:
    """Return where each tensor of a folder or GGUF file is stored, by Hugging Face's name."""
    source = Path(source)
    return gguf_tensors(read_gguf(source), config) if source.is_file() else read_index(source)


def stored_kinds(stored: Mapping[str, GgufTensor]) -> dict[str, str]:
    """Map the name of each matrix that `weights="gguf"` keeps in blocks to its `Quantised.kind`."""
    return {name: KINDS[t.layout.name] for name, t in stored.items() if len(t.shape) == 2 and t.layout.name in KINDS}


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
        if parts > 1 and blocks and (share := shape_of(weight, config)[1] // parts) % BLOCK:
            raise ValueError(
                f"weights='gguf' keeps blocks of {BLOCK} inputs, but {weight.stored} has {share} inputs on each of "
                f"{parts} devices: pass weights='int8', or use fewer devices"
            )
