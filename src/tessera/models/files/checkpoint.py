"""Load Hugging Face folders and GGUF files tensor by tensor; save folders atomically.

Loading first checks a model from its headers only (files, sizes, names, shapes, dtypes), then reads the weights one
tensor at a time. Peak host memory is the model (on a mesh, the parts on this process's devices) plus one tensor.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from math import prod
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from tessera.core.files import replace_folder, write_text
from tessera.core.mesh import keep, mesh_of, program
from tessera.core.quant import STORED, Quantised, has_quantised
from tessera.models.config import ModelConfig, stable_repr
from tessera.models.files.families import render_config
from tessera.models.files.gguf_file import FLOATS
from tessera.models.files.parts import load_weight, sampled
from tessera.models.files.source import Source
from tessera.models.files.tensor_file import INDEX, SHARD_PATTERN, SINGLE, Stored, map_blocks, write_file
from tessera.models.layers import Layer, Params
from tessera.models.text.tokenizer import FILES as TOKENIZER_FILES
from tessera.models.text.tokenizer import Tokenizer
from tessera.models.weights import (
    EMBED,
    FINAL_NORM,
    HEAD,
    LAYER,
    Weight,
    form_of,
    layer_name,
    layer_weights,
    outer_weights,
)

Tensor = tuple[jax.Array | Quantised, int | None]
"""A weight: (its array, None), or (array of all layers' weights, index of the layer)."""


def load_params(
    source: Source,
    *,
    dtype: Any = None,
    stacked: bool = False,
    mesh: Mesh | None = None,
    weight_format: str | None = None,
) -> Params:
    """Load a model's weights, whose dtype is float32 or bfloat16, by default that of the model's config.

    Args:
        stacked: return the layers as one Layer with a leading axis L, for lax.scan; else as a tuple of Layer. A tuple
            is better on CPU, where a scan copies every layer's weights and cache and compiles no faster.
        mesh: devices among which the weights are divided; each process reads only what its devices hold.
        weight_format: form of matrices in memory, one of `core.quant.NAMES` that `check_forms` allows.
    """
    config, stored = source.config, source.tensors
    dtype = np.dtype(dtype or config.dtype)
    if dtype not in (np.float32, ml_dtypes.bfloat16):
        raise ValueError(f"dtype={dtype.name!r} must be float32 or bfloat16")
    if config.tie_embeddings and HEAD.stored in stored:
        _check_tied(stored[EMBED.stored], stored[HEAD.stored])

    def load(weight: Weight, *names: str, lead: tuple[int, ...] = ()) -> jax.Array | Quantised:
        kept = weight_format == STORED and weight.is_matrix and stored[names[0]].layout.name not in FLOATS
        form = None if weight_format == STORED else form_of(weight, config, weight_format)
        tensors = {name: stored[name] for name in names}
        how = {"form": form, "kept": kept, "lead": lead, "dtype": dtype, "mesh": mesh}
        return load_weight(source.read_rows, tensors, weight, **how)

    def load_layers(*indices: int, lead: tuple[int, ...] = ()) -> Layer:
        weights = layer_weights(config)
        return Layer(**{w.name: load(w, *(layer_name(index, w) for index in indices), lead=lead) for w in weights})

    count = config.num_layers
    layers = load_layers(*range(count), lead=(count,)) if stacked else tuple(load_layers(i) for i in range(count))
    outer = {weight.name: load(weight, weight.stored) for weight in outer_weights(config)}
    source.check_unchanged()
    return Params(layers=layers, **outer)


def save_folder(
    folder: str | os.PathLike,
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    *,
    generation: Mapping[str, Any] = MappingProxyType({}),
    shard_bytes: int = 5 << 30,
    extra: Callable[[Path], None] | None = None,
) -> None:
    """Write a folder that `load` and Hugging Face transformers read: config, weights, generation config, tokenizer.

    `generation` holds the contents of generation_config.json besides the ids of special tokens. Weights are written one
    tensor at a time, in their dtype, in shards of at most `shard_bytes` (a larger tensor gets a separate shard).

    All files go into a new folder, to which `extra(new)` may add more, and which then replaces the old one atomically
    (see `replace_folder`). Other files of the old folder stay, such as notes or, if `tokenizer` is None, the old
    tokenizer's files. The disk needs space for both folders. Weights that are quantised, or that several processes
    hold, cannot be saved.
    """
    if not getattr(params.embed, "is_fully_addressable", True):
        raise ValueError("several processes hold parts of the weights: load the model in one process to save it")
    if has_quantised(params):
        raise ValueError(
            "these weights are quantised, and saving them would pass off rounded values as the model's own: load the "
            "model without weights=, and save that"
        )
    raw = render_config(config, params.embed.dtype.name, tokenizer.pad_id if tokenizer else None)
    ids = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw[key] is not None}
    shards = _assign_shards(_tensors(params), shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]

    def outdated(name: str) -> bool:  # leftover shards of an earlier save would be read instead of these
        return bool(SHARD_PATTERN.fullmatch(name)) or (tokenizer is not None and name in TOKENIZER_FILES)

    with replace_folder(Path(folder), outdated) as new:
        for name, tensors in zip(names, shards):
            specs = {key: (tensor[0].dtype, _shape(tensor)) for key, tensor in tensors.items()}
            arrays = (np.asarray(array if row is None else array[row]) for array, row in tensors.values())
            write_file(new / name, specs, arrays)
        if count > 1:
            total = sum(_num_bytes(tensor) for tensors in shards for tensor in tensors.values())
            weight_map = {key: name for name, tensors in zip(names, shards) for key in tensors}
            _write_json(new / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(new / "config.json", raw)
        _write_json(new / "generation_config.json", {**ids, **generation})
        if tokenizer is not None:
            tokenizer.write(new)
        if extra is not None:
            extra(new)


def is_model_file(name: str) -> bool:
    configs = {"config.json", "generation_config.json", INDEX, *TOKENIZER_FILES}
    return name in configs or name.endswith((".safetensors", ".gguf"))


def fingerprint(params: Params, config: ModelConfig) -> str:
    """Return a short id of the weights, equal for stacked and unrolled layers and for float32 and bfloat16 in memory.

    It hashes the config and 64 evenly spaced elements of each tensor, rounded to bfloat16. Quantised weights keep these
    elements of the original weights, so their id is the same, and plans for the model apply to them, too.
    """
    digest, take = hashlib.sha256(), getitem if mesh_of(params) is None else take_split
    digest.update(stable_repr(dataclasses.replace(config, dtype="", eos_ids=(), bos_id=None)).encode())
    for name, (array, row) in sorted(_tensors(params).items()):
        if isinstance(array, Quantised):
            picked = array.sample if row is None else array.sample[row]
        else:
            shape = _shape((array, row))
            flat = sampled(prod(shape))
            at = tuple(place.astype(np.int32) for place in np.unravel_index(flat, shape))
            picked = take(array, at if row is None else (np.full(len(flat), row, np.int32), *at))
        digest.update(name.encode())
        digest.update(np.asarray(picked).astype(ml_dtypes.bfloat16).view(np.uint16).tobytes())
    return digest.hexdigest()[:16]


@program()
def take_split(array: jax.Array, at: tuple[np.ndarray, ...]) -> jax.Array:
    """Return array[at] on every device, for an array that a mesh splits. Flattening the array first would gather it."""
    return keep(array[at])


def files_digest(source: Source) -> str:
    """Return a hash of config, headers and some bytes of each tensor, which processes compare before they load."""
    digest = hashlib.sha256(stable_repr(source.config).encode())
    for name, tensor in sorted(source.tensors.items()):
        digest.update(repr((name, *tensor[1:])).encode())
        with open(tensor.path, "rb") as file:
            for part in range(4):
                file.seek(tensor.offset + part * max(tensor.num_bytes - 64, 0) // 3)
                digest.update(file.read(min(64, tensor.num_bytes)))
    return digest.hexdigest()[:16]


def _check_tied(embed: Stored, head: Stored) -> None:
    same = embed.dtype == head.dtype
    if not same or not all(np.array_equal(a, b) for a, b in zip(map_blocks(embed), map_blocks(head))):
        raise ValueError(
            f"tie_word_embeddings is true, but {HEAD.stored} in {head.path} differs from {EMBED.stored}: "
            f"set tie_word_embeddings to false in config.json to use both"
        )


def _tensors(params: Params) -> dict[str, Tensor]:
    stacked = isinstance(params.layers, Layer)
    first = params.layers if stacked else params.layers[0]
    weights = [weight for weight in LAYER if getattr(first, weight.name) is not None]
    found: dict[str, Tensor] = {EMBED.stored: (params.embed, None)}
    for i in range(first.q.shape[0] if stacked else len(params.layers)):
        layer, row = (first, i) if stacked else (params.layers[i], None)
        found |= {layer_name(i, weight): (getattr(layer, weight.name), row) for weight in weights}
    found[FINAL_NORM.stored] = (params.final_norm, None)
    if params.head is not None:
        found[HEAD.stored] = (params.head, None)
    return found


def _shape(tensor: Tensor) -> tuple[int, ...]:
    array, row = tensor
    return array.shape if row is None else array.shape[1:]


def _num_bytes(tensor: Tensor) -> int:
    return int(np.prod(_shape(tensor), dtype=np.int64)) * tensor[0].dtype.itemsize


def _assign_shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + _num_bytes(tensor) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += _num_bytes(tensor)
    return shards


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")
