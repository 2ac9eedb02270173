"""Safetensors files: check headers without reading data, and read or write tensors one at a time.

This module parses the files itself, because the safetensors package's NumPy interface copies each tensor, keeps whole
shards mapped (which counts as the process's memory) and does not support fp8. A file holds the header's length in 8
bytes, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tessera.core.escapes import escaped, quoted
from tessera.core.fields import SMALL_BYTES, TEXT, Rule, integer, items, maybe, parse_json, read_json, record

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}

EXPONENTS = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}
"""Integer type and mask of the exponent bits, by dtype. A value with all these bits set is infinity or NaN; integers
compare faster than bfloat16."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_PATTERN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

BLOCK_BYTES = 16 << 20
"""Number of bytes read and checked at a time."""

MAX_HEADER_BYTES = SMALL_BYTES

OFFSET = integer(0, 2**63 - 1)
ENTRY = record(
    {
        "dtype": TEXT,
        "shape": items(OFFSET, "sizes"),
        "data_offsets": Rule(
            "start and end", lambda v: items(OFFSET, "offsets").fits(v) and len(v) == 2 and v[0] <= v[1]
        ),
    },
    "an object with a dtype, a shape and data_offsets [start, end]",
)
METADATA = maybe(Rule("an object of strings", lambda v: isinstance(v, dict) and all(map(TEXT.fits, v.values()))))
WEIGHT_MAP = Rule(
    "the name of a file in this folder for each tensor",
    lambda v: isinstance(v, dict) and all(isinstance(n, str) and re.fullmatch(r"[\w-][\w.-]*", n) for n in v.values()),
)


class Stored(NamedTuple):
    """Location of one tensor on disk."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_index(folder: Path) -> dict[str, Stored]:
    """Return where each tensor of a folder is stored, from the files' headers, and check the files' sizes."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise no_weights(folder, sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")))
    weight_map = read_json(index).get("weight_map")
    if not WEIGHT_MAP.fits(weight_map):
        raise ValueError(
            f"{index} has no usable weight_map ({quoted(weight_map)}): it must hold {WEIGHT_MAP.allowed}: "
            f"download it again"
        )
    stored: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard} is missing, but {INDEX} lists it: download the shard again")
        for name, tensor in read_header(folder / shard).items():
            if weight_map.get(name, shard) != shard or name in stored:
                other = escaped(stored[name].path.name if name in stored else weight_map[name])
                raise ValueError(
                    f"{folder / shard} holds {escaped(name)}, which {INDEX} or another shard places in {other}: "
                    f"download the model again"
                )
            stored[name] = tensor
    if lost := sorted(weight_map.keys() - stored.keys()):
        raise ValueError(f"{index} lists {escaped(lost[0])}, which no shard holds: download the model again")
    return stored


def no_weights(place: object, names: Sequence[str]) -> ValueError:
    """Return the error for a folder or hub model that lacks SINGLE and INDEX, given the names of its files."""
    held = {suffix: [name for name in names if name.endswith(suffix)] for suffix in (".gguf", ".safetensors")}
    own = [name for name in names if Path(name).name.startswith("consolidated")]
    if held[".gguf"]:
        return ValueError(f"{place} holds GGUF files: download one, such as {held['.gguf'][0]}, and pass its path")
    if own:
        return ValueError(
            f"{place} holds its weights only as {own[0]}, in its authors' own form: take the model in Hugging Face's "
            f"form, or convert it with the script of its family in transformers"
        )
    if any(name.startswith("adapter_") for name in names):
        return ValueError(f"{place} holds only an adapter of another model: merge it into that model first, with peft")
    if held[".safetensors"]:
        return ValueError(
            f"{place} holds no {SINGLE} or {INDEX}, only {held['.safetensors'][0]}: rename it to {SINGLE}"
        )
    if any(name.endswith((".bin", ".pth", ".pt")) for name in names):
        return ValueError(
            f"{place} holds its weights as .bin or .pth files, which may run code: save them as safetensors"
        )
    return ValueError(f"{place} holds no weights ({SINGLE} or {INDEX}): download the model again")


def read_header(path: Path) -> dict[str, Stored]:
    """Return where each tensor of one safetensors file is stored."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} is cut short or not a safetensors file ({size} bytes): download it again")
        text = file.read(length)
    header = parse_json(text, f"the safetensors header of {path}")
    broken = f"{path} has a broken safetensors header"
    if not METADATA.fits(header.pop("__metadata__", None)):
        raise ValueError(f"{broken} (__metadata__ must be {METADATA.allowed}): download it again")
    stored = {}
    for name, entry in header.items():
        if not ENTRY.fits(entry):
            said = f"tensor {escaped(name)} is {quoted(entry, 120)} but must be {ENTRY.allowed}"
            raise ValueError(f"{broken} ({said}): download it again")
        start, end = entry["data_offsets"]
        stored[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
    end, last = 8 + length, "the header"
    for name, tensor in sorted(stored.items(), key=lambda item: item[1][-2:]):
        if tensor.offset != end:
            said = f"tensor {escaped(name)} " + ("overlaps" if tensor.offset < end else "leaves a gap after")
            raise ValueError(f"{broken} ({said} {escaped(last)}): download it again")
        end, last = tensor.offset + tensor.num_bytes, name
    if end != size:
        problem = "is cut short" if end > size else "is too long"
        raise ValueError(f"{path} {problem}: it has {size} bytes, not {end}: download it again")
    return stored


def check_stored(name: str, tensor: Stored, shape: tuple[int, ...]) -> None:
    """Check that a tensor has this shape, a supported dtype, and the number of bytes that follows from both."""
    if tensor.shape != shape:
        raise ValueError(
            f"{name} in {tensor.path} has shape {escaped(tensor.shape)}, but config.json calls for {shape}: "
            f"correct config.json, or download the model again"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} in {tensor.path} has dtype {escaped(tensor.dtype)}, which is not supported: it must be one of "
            f"{', '.join(DTYPES)}"
        )
    num_bytes = prod(shape) * DTYPES[tensor.dtype].itemsize
    if tensor.num_bytes != num_bytes:
        raise ValueError(
            f"{name} in {tensor.path} has {tensor.num_bytes} bytes, but its shape {shape} needs {num_bytes}: "
            f"download it again"
        )


def map_blocks(tensor: Stored) -> Iterator[np.ndarray]:
    """Yield one tensor's values in flat blocks; its file is memory-mapped only during the iteration."""
    dtype = DTYPES[tensor.dtype]
    flat = np.memmap(tensor.path, dtype, "r", tensor.offset, (tensor.num_bytes // dtype.itemsize,))
    step = BLOCK_BYTES // dtype.itemsize
    for start in range(0, flat.shape[0], step):
        yield flat[start : start + step]


def read_rows(name: str, tensor: Stored, rows: range, columns: range) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield blocks of a tensor's rows: their row numbers, and their finite values [rows, columns] as stored."""
    dtype, width = DTYPES[tensor.dtype], prod(tensor.shape[1:])
    bits, exponent = EXPONENTS[tensor.dtype]
    row_bytes = width * dtype.itemsize
    for start, raw in raw_rows(name, tensor, rows, row_bytes, max(BLOCK_BYTES // row_bytes, 1)):
        block = raw.view(bits)[:, columns.start : columns.stop]
        if np.any((block & exponent) == exponent):
            raise ValueError(f"{name} in {tensor.path} holds values that are not finite: download it again")
        yield slice(start, start + len(raw)), block.view(dtype)


def raw_rows(name: str, tensor: Any, rows: range, row_bytes: int, step: int) -> Iterator[tuple[int, np.ndarray]]:
    """Read a tensor's rows as bytes, `step` rows at a time; yield the first row's number and uint8 [rows,row_bytes]."""
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset + rows.start * row_bytes)
        for start in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - start)
            raw = np.fromfile(file, np.uint8, count * row_bytes)  # a copy: an array must not change when the file does
            if raw.size != count * row_bytes:
                raise ValueError(f"{tensor.path} was truncated while {name} was read from it: download it again")
            yield start, raw.reshape(count, row_bytes)


def write_file(
    path: Path,
    specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterator[np.ndarray],
    about: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write one safetensors file of tensors in the order of `specs`, with the entries `about` in its metadata."""
    codes = {dtype: code for code, dtype in DTYPES.items()} | {np.dtype(np.int32): "I32"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
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
