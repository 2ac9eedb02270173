"""Load Hugging Face folders and GGUF files tensor by tensor; save folders atomically.

Loading first checks a model from its headers only (files, sizes, names, shapes, dtypes), then reads the weights one
tensor at a time. Peak host memory is the model (on a mesh, the parts on this process's devices) plus one tensor.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
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

from tessera.core.escapes import escaped, quoted
from tessera.core.fields import read_json
from tessera.core.files import finish_swap, replace_folder, write_text
from tessera.core.mesh import keep, mesh_of, num_head_parts, program, sharding
from tessera.core.quant import STORED, Quantised, has_quantised
from tessera.models import catalogue
from tessera.models.config import ModelConfig, stable_repr
from tessera.models.files import families, gguf_model
from tessera.models.files.families import parse_config, render_config
from tessera.models.files.fetch import SOURCES, fetched
from tessera.models.files.gguf_file import GgufTensor, read_gguf, read_gguf_rows
from tessera.models.files.gguf_model import gguf_config, gguf_tensors
from tessera.models.files.gguf_stored import FLOATS
from tessera.models.files.gguf_tokenizer import gguf_tokenizer
from tessera.models.files.hub import download
from tessera.models.files.parts import load_weight
from tessera.models.files.quantised import check_forms, stored_tensors
from tessera.models.files.rounded import load_quantised, sampled
from tessera.models.files.tensor_file import (
    INDEX,
    SHARD_PATTERN,
    SINGLE,
    Stored,
    check_stored,
    map_blocks,
    read_index,
    read_rows,
    write_file,
)
from tessera.models.files.unread import ignoring
from tessera.models.layers import Layer, Params
from tessera.models.text.tokenizer import FILES as TOKENIZER_FILES
from tessera.models.text.tokenizer import Tokenizer
from tessera.models.text.tokenizer_files import load_tokenizer
from tessera.models.weights import (
    EMBED,
    FINAL_NORM,
    HEAD,
    LAYER,
    Weight,
    expected_shapes,
    form_of,
    layer_name,
    layer_weights,
    outer_weights,
)

logger = logging.getLogger(__name__)

Tensor = tuple[jax.Array | Quantised, int | None]
"""A weight: (its array, None), or (array of all layers' weights, index of the layer)."""


HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
"""Pattern of a hub id. A name that does not match, or that ends in .gguf, is taken as a path, so that a mistyped path
is not looked up on the hub."""
RETRY = "correct config.json, or download the model again"


def resolve(name: str | os.PathLike, *, config_only: bool = False) -> Path:
    """Return the path of a model, given as a local folder or GGUF file, a key of `fetch.SOURCES`, or a hub id.

    The model of a Hugging Face hub id ("owner/name") is downloaded into the hub's cache: first the JSON files, then, if
    the config is supported, the weights. With `config_only`, only the config files are downloaded. If a save of the
    folder was killed between its two renames, `finish_swap` first completes the save.

    Raises:
        ValueError: there is no such folder or file, the named model has not been fetched yet, or the hub has no such
            model or cannot be reached.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"model {quoted(str(name))} begins with an unknown home folder: pass the full path") from error
    finish_swap(path)
    if path.is_dir() or path.is_file():
        return path
    name = str(name)
    if name in SOURCES:
        return fetched(name)
    if path.exists() or name.lower().endswith(".gguf") or not re.fullmatch(HUB_ID, name):
        problem = "is neither a folder nor a file" if path.exists() else "does not exist"
        raise ValueError(
            f"model {name!r} {problem}: pass a Hugging Face folder, a GGUF file, a hub id like 'owner/name', or "
            f"{' or '.join(map(repr, SOURCES))}"
        )
    return download(name, config_only=config_only, check=read_config)


def find_config(name: str | os.PathLike) -> tuple[ModelConfig, Path | None]:
    """Return a model's config and the folder or file that holds it, without reading or downloading weights.

    `name` is as for `resolve`, or a key of `catalogue.MODELS`; for a key, the returned path is None. For a hub id, only
    config.json and generation_config.json are downloaded.

    Raises:
        ValueError: for the reasons given in `resolve` and `read_config`.
    """
    if str(name) in catalogue.MODELS and not Path(name).exists():
        return catalogue.MODELS[str(name)], None
    try:
        source = resolve(name, config_only=True)
    except ValueError as error:
        if "pass a Hugging Face folder" not in str(error):
            raise
        raise ValueError(f"{error}, or one of {', '.join(catalogue.MODELS)}") from None
    return read_config(source), source


def read_config(folder: str | os.PathLike, *, note: bool = False) -> ModelConfig:
    """Read a folder's config.json and generation_config.json, or a GGUF file's metadata.

    With `note`, log the unknown keys that are ignored.

    Raises:
        ValueError: the folder or file does not exist, its JSON or GGUF is broken, or a key or value is not supported;
            the message names the problem.
    """
    folder = Path(folder)
    if folder.is_file():
        file = read_gguf(folder)
        config = gguf_config(file)
        _check_tensors(gguf_tensors(file, config), config, folder)  # before a size that the file claims is allocated
        _note(note, folder, gguf_model.unread_keys(file))
        if note and (ignored := gguf_model.ignored_values(file)):
            logger.warning(
                "%s: ignoring %s, because the model has %d tokens", folder, ", ".join(ignored), config.vocab_size
            )
        return config
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model folder (it has no config.json): pass a Hugging Face folder")
    generation = folder / "generation_config.json"
    raw, extra = read_json(path), read_json(generation) if generation.is_file() else {}
    try:
        config = parse_config(raw, extra)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _note(note, path, families.unread_keys(raw))
    return config


def _note(wanted: bool, path: Path, keys: list[str]) -> None:
    if wanted and keys:
        logger.info("%s: %s", path, ignoring(keys))


def read_tokenizer(folder: str | os.PathLike) -> Tokenizer | None:
    """Read the tokenizer of a Hugging Face folder or a GGUF file; return None if the model has none.

    Raises:
        ValueError: the tokenizer is broken or of an unsupported kind.
    """
    folder = Path(folder)
    return gguf_tokenizer(read_gguf(folder)) if folder.is_file() else load_tokenizer(folder)


def load_params(
    folder: str | os.PathLike,
    config: ModelConfig,
    *,
    dtype: Any = None,
    stacked: bool = False,
    mesh: Mesh | None = None,
    weights: str | None = None,
) -> Params:
    """Load the weights of a folder or of a GGUF file.

    Args:
        folder: folder with model.safetensors, or with model.safetensors.index.json and its shards; or a GGUF file.
        config: the model's config; every tensor is checked against it before any is read.
        dtype: dtype of the weights in memory, float32 or bfloat16; None means config.dtype.
        stacked: return the layers as one Layer with a leading axis L, for lax.scan; else as a tuple of Layer. A tuple
            is better on CPU, where a scan copies every layer's weights and cache and compiles no faster.
        mesh: devices among which the weights are divided (`core.mesh.RULES`); each process reads only what its devices
            hold. None loads everything onto the default device.
        weights: form in which matrices are stored in memory, one of `core.quant.NAMES`; None stores them in `dtype`.

    Raises:
        ValueError: a file is missing or truncated; a tensor is missing, unexpected or of the wrong shape or dtype; a
            weight is not finite; a file was replaced while it was read; or the form cannot store a matrix.
    """
    dtype = np.dtype(dtype or config.dtype)
    if dtype not in (np.float32, ml_dtypes.bfloat16):
        raise ValueError(f"dtype={dtype.name!r} must be float32 or bfloat16")
    folder = Path(folder)
    before = _identities(folder)
    stored, read = stored_tensors(folder, config), read_gguf_rows if folder.is_file() else read_rows
    _check_tensors(stored, config, folder)
    if config.tie_embeddings and HEAD.stored in stored:
        _check_tied(stored[EMBED.stored], stored[HEAD.stored])

    if weights is not None:  # a mesh for training has other axes, and takes floats alone
        check_forms(stored, config, folder, weights, num_head_parts(mesh))

    def load(weight: Weight, *names: str, lead: tuple[int, ...] = ()) -> jax.Array | Quantised:
        tensors = {name: stored[name] for name in names}
        kept = weights == STORED and weight.is_matrix and stored[names[0]].layout.name not in FLOATS
        form = None if weights == STORED else form_of(weight, config, weights)
        if kept or form is not None:
            return load_quantised(read, tensors, weight, form=form, lead=lead, dtype=dtype, mesh=mesh)
        placed = None if mesh is None else sharding(mesh, (*(None for _ in lead), *weight.axes))
        return load_weight(read, tensors, lead, dtype, placed)

    def load_layers(*indices: int, lead: tuple[int, ...] = ()) -> Layer:
        weights = layer_weights(config)
        return Layer(**{w.name: load(w, *(layer_name(index, w) for index in indices), lead=lead) for w in weights})

    count = config.num_layers
    layers = load_layers(*range(count), lead=(count,)) if stacked else tuple(load_layers(i) for i in range(count))
    outer = {weight.name: load(weight, weight.stored) for weight in outer_weights(config)}
    if changed := [path for path, was in _identities(folder).items() if before.get(path) != was]:
        raise ValueError(f"{changed[0]} was replaced while it was being read: load the model again")
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

    All files go into a new folder, to which `extra(new)` may add more. The new folder then replaces the old one
    atomically, so a kill never leaves shards of both models (see `replace_folder`). Other files of the old folder stay,
    such as notes or, if `tokenizer` is None, the old tokenizer's files. The disk needs space for both folders.

    Raises:
        ValueError: the folder cannot be replaced (it is a file, a mount point or the working folder), the weights are
            quantised, or several processes hold parts of them.
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
    """Return whether a file of this name holds weights, a config or a tokenizer."""
    configs = {"config.json", "generation_config.json", INDEX, *TOKENIZER_FILES}
    return name in configs or name.endswith((".safetensors", ".gguf"))


def fingerprint(params: Params, config: ModelConfig) -> str:
    """Return a short id of the weights, equal for stacked and unrolled layers and for float32 and bfloat16 in memory.

    The id is the start of a SHA-256 hash of the config and of 64 evenly spaced elements of each tensor, rounded to
    bfloat16. Quantised weights keep these elements of the original weights, so their id is the same, and plans for the
    model apply to them, too.
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


def files_digest(source: str | os.PathLike) -> str:
    """Return an id of a model's files: a hash of the config, the headers and some bytes of each tensor.

    Unlike `fingerprint`, this needs no weights in memory, so processes can compare their models before they load them.
    """
    source, config = Path(source), read_config(source)
    stored = gguf_tensors(read_gguf(source), config) if source.is_file() else read_index(source)
    digest = hashlib.sha256(stable_repr(config).encode())
    for name, tensor in sorted(stored.items()):
        digest.update(repr((name, *tensor[1:])).encode())
        with open(tensor.path, "rb") as file:
            for part in range(4):
                file.seek(tensor.offset + part * max(tensor.num_bytes - 64, 0) // 3)
                digest.update(file.read(min(64, tensor.num_bytes)))
    return digest.hexdigest()[:16]


def _check_tensors(stored: Mapping[str, Stored | GgufTensor], config: ModelConfig, source: Path) -> None:
    """Raise ValueError if the tensors' names or shapes do not match the config.

    For a folder, also check sizes and dtypes, which `read_gguf` has already checked for a GGUF file.
    """
    is_gguf = source.is_file()
    caller = "metadata" if is_gguf else "config.json"
    retry = "download the model again" if is_gguf else RETRY
    if config.num_layers > len(stored):  # before lists are made for as many layers as it claims
        raise ValueError(
            f"{source} holds {len(stored)} tensors, but its {caller} calls for {config.num_layers} layers: {retry}"
        )
    expected = expected_shapes(config)
    if missing := sorted(expected.keys() - stored.keys()):
        raise ValueError(f"{source} lacks {_some(missing)}, which its {caller} calls for: {retry}")
    if config.tie_embeddings and HEAD.stored in stored:
        expected[HEAD.stored] = expected[EMBED.stored]
    # old checkpoints store the rope frequencies, which follow from the config
    extra = sorted(name for name in stored if name not in expected and not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise ValueError(f"{source} holds {_some(extra)}, which its {caller} does not call for: {retry}")
    for name, shape in expected.items():
        if not is_gguf:
            check_stored(name, stored[name], shape)
        elif stored[name].shape != shape:
            raise ValueError(
                f"{name} in {source} has shape {stored[name].shape}, but its metadata calls for {shape}: {retry}"
            )


def _check_tied(embed: Stored, head: Stored) -> None:
    same = embed.dtype == head.dtype
    if not same or not all(np.array_equal(a, b) for a, b in zip(map_blocks(embed), map_blocks(head))):
        raise ValueError(
            f"tie_word_embeddings is true, but {HEAD.stored} in {head.path} differs from {EMBED.stored}: "
            f"set tie_word_embeddings to false in config.json to use both"
        )


def _identities(source: Path) -> dict[Path, tuple[int, int, int]]:
    """Return size, modification time (ns) and inode of each file that may hold weights."""
    files = [source] if source.is_file() else sorted((*source.glob("*.safetensors"), *source.glob(INDEX)))
    return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for path in files for stat in [path.stat()]}


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


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(escaped(name) for name in names[:3]) + more
