"""Quantised weights of a checkpoint: check that its matrices fit a form, and read a matrix in that form."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tessera.core.quant import SAMPLE, STORED, Form, Quantised, check_name, check_shape, place, quantise
from tessera.models.config import ModelConfig
from tessera.models.gguf_file import GgufTensor, read_gguf
from tessera.models.gguf_model import gguf_tensors
from tessera.models.gguf_stored import FLOATS, STORED_FORM, check_stored_type, read_stored
from tessera.models.tensor_file import Stored, read_index
from tessera.models.weights import form_of, layer_weights, loaded_bytes, outer_weights, shape_of


def stored_tensors(source: str | os.PathLike, config: ModelConfig) -> Mapping[str, Any]:
    """Locate every tensor of a folder or GGUF file, by Hugging Face's name."""
    source = Path(source)
    return gguf_tensors(read_gguf(source), config) if source.is_file() else read_index(source)


def memory_bytes(source: Path, config: ModelConfig, weights: str | None) -> int:
    """Return the bytes of all weights in memory: in form `weights`, or in config.dtype if it is None."""
    if weights != STORED or not source.is_file():
        return loaded_bytes(config, None if weights == STORED else weights)
    itemsize = np.dtype(config.dtype).itemsize

    def num_bytes(tensor: GgufTensor) -> int:
        floats = len(tensor.shape) == 1 or tensor.layout.name in FLOATS
        return math.prod(tensor.shape) * itemsize if floats else tensor.num_bytes

    return sum(map(num_bytes, stored_tensors(source, config).values()))


def check_forms(
    stored: Mapping[str, Stored | GgufTensor], config: ModelConfig, source: Path, weights: str | None
) -> None:
    """Raise ValueError unless the form `weights` can hold every matrix; reads no weight."""
    check_name(weights)
    if weights == STORED:
        if not source.is_file():
            raise ValueError(f"weights='gguf' keeps the blocks of a GGUF file, and {source} is a folder: pass 'int8'")
        matrices = {name: tensor for name, tensor in stored.items() if len(tensor.shape) == 2}
        for name, tensor in matrices.items():
            check_stored_type(name, tensor)
        if all(tensor.layout.name in FLOATS for tensor in matrices.values()):
            raise ValueError(f"weights='gguf' keeps quantised blocks, and {source} holds only floats: pass 'int8'")
        return
    for weight in (*layer_weights(config), *outer_weights(config)):
        if form := form_of(weight, config, weights):
            check_shape(weight.stored, shape_of(weight, config), form)


def load_rounded(stored: Mapping[str, Any], read: Callable, name: str, *, form: Form, dtype: np.dtype) -> Quantised:
    """Read one matrix as float32 and round it to the form."""
    matrix = np.empty(stored[name].shape, np.float32)
    for where, values in read(name, stored[name], *map(range, matrix.shape)):
        matrix[where] = values
    sample = matrix.reshape(-1)[sampled(matrix.size)].astype(ml_dtypes.bfloat16)
    packed = jax.default_backend() == "cpu"
    return place(quantise(matrix, form), sample, kind=form.kind, form=form, dtype=dtype, packed=packed)


def load_stored(name: str, tensor: GgufTensor, dtype: np.dtype) -> Quantised:
    """Read one matrix of a GGUF file in its stored blocks, not dequantised."""
    parts, kind = read_stored(name, tensor)
    outputs, inputs = np.divmod(sampled(math.prod(tensor.shape)), tensor.shape[-1])
    group = inputs // STORED_FORM.group
    values = parts.scale[group, outputs].astype(np.float32) * parts.values[group, inputs % STORED_FORM.group, outputs]
    if parts.zero is not None:
        values = values + parts.zero[group, outputs].astype(np.float32)
    sample, packed = values.astype(ml_dtypes.bfloat16), jax.default_backend() == "cpu"
    return place(parts, sample, kind=kind, form=STORED_FORM, dtype=dtype, packed=packed)


def stack(parts: list[Quantised], lead: tuple[int, ...]) -> Quantised:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts) if lead else parts[0]


def sampled(size: int) -> np.ndarray:
    """Return the flat indices of SAMPLE evenly spaced elements, those that `fingerprint` reads."""
    return np.linspace(0, size - 1, SAMPLE).astype(np.int64)
