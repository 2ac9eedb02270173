"""Safetensors files: check headers without reading data, map tensors one at a time, write them one at a time.

This module parses the files itself: the safetensors package's NumPy path copies each tensor, keeps whole shards mapped
(they count as the process's memory) and has no name for fp8. The format is 8 bytes of header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the data.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tessera.core.escapes import escaped, quoted

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}

EXPONENTS = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}
"""Exponent bits by dtype: all set means infinity or NaN. Integers compare faster than bfloat16."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_PATTERN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

BLOCK_BYTES = 16 << 20
"""Bytes checked and converted at a time."""

MAX_HEADER_BYTES = 100 << 20


class Stored(NamedTuple):
    """Location of one tensor on disk."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_index(folder: Path) -> dict[str, Stored]:
    """Locate every tensor of a folder from the headers only, and check file sizes against them.

    Raises:
        ValueError: no weights, a missing shard, a file that is not safetensors or is cut short.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        if any(folder.glob("*.bin")):
            raise ValueError(f"{folder} holds its weights as .bin files, which run code when read: save as safetensors")
        raise ValueError(f"{folder} holds no weights: {SINGLE} or {INDEX} is missing")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(re.fullmatch(r"[\w.-]+", str(n)) for n in weight_map.values()):
        raise ValueError(f"{index} has no usable weight_map: download it again")
    stored: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard} is missing, but {INDEX} lists it: download the shard again")
        stored |= read_header(folder / shard)
    if lost := sorted(set(weight_map) - set(stored)):
        raise ValueError(f"{index} lists {escaped(lost[0])}, which no shard holds: download the model again")
    return stored


def read_header(path: Path) -> dict[str, Stored]:
    """Locate every tensor of one file.

    Raises:
        ValueError: the file is not safetensors or is cut short.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} is cut short or not a safetensors file ({size} bytes): download it again")
        text = file.read(length)
    stored = {}
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if not isinstance(dtype, str) or not all(type(number) is int for number in (*shape, start, end)):
                raise ValueError(f"tensor {escaped(name)} needs a string dtype and integer sizes and offsets")
            if not 0 <= start <= end:
                raise ValueError(f"tensor {escaped(name)} ends before it starts")
            stored[name] = Stored(path, dtype, shape, 8 + length + start, end - start)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = quoted(error, 300)
        raise ValueError(f"{path} has a broken safetensors header ({reason}): download it again") from error
    need = max((tensor.offset + tensor.num_bytes for tensor in stored.values()), default=0)
    if need > size:
        raise ValueError(f"{path} is cut short: it has {size} bytes of {escaped(need)}: download it again")
    return stored


def check_stored(name: str, tensor: Stored, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of unexpected dtype, shape or size.

    Raises:
        ValueError: the message names the tensor and the value.
    """
    if tensor.shape != shape:
        raise ValueError(
            f"{name} in {tensor.path} has shape {escaped(tensor.shape)}, but config.json calls for {shape}: "
            f"correct config.json, or download the model again"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} in {tensor.path} is {escaped(tensor.dtype)}: weights must be {', '.join(DTYPES)}, not quantised"
        )
    num_bytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[tensor.dtype].itemsize
    if tensor.num_bytes != num_bytes or tensor.offset < 8:
        raise ValueError(f"{name} in {tensor.path} has {tensor.num_bytes} bytes for shape {shape}: download it again")


def map_blocks(tensor: Stored) -> Iterator[np.ndarray]:
    """Yield flat pieces of one tensor, mapped only during the iteration."""
    dtype = DTYPES[tensor.dtype]
    flat = np.memmap(tensor.path, dtype, "r", tensor.offset, (tensor.num_bytes // dtype.itemsize,))
    step = BLOCK_BYTES // dtype.itemsize
    for start in range(0, flat.shape[0], step):
        yield flat[start : start + step]


def read_tensor(name: str, tensor: Stored, out: np.ndarray) -> np.ndarray:
    """Read one tensor into `out`, converting to its dtype.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    flat, done = out.reshape(-1), 0
    bits, exponent = EXPONENTS[tensor.dtype]
    for block in map_blocks(tensor):
        if np.any((block.view(bits) & exponent) == exponent):
            raise ValueError(f"{name} in {tensor.path} holds values that are not finite: download it again")
        flat[done : done + block.shape[0]] = block
        done += block.shape[0]
    return out


def write_file(path: Path, specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]], arrays: Iterator[np.ndarray]) -> None:
    """Write one file from dtypes and shapes known in advance and arrays that come one at a time, in the same order."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in specs.items():
        end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # data begins at a multiple of 64 bytes: readers can map it aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ValueError: the file is not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
