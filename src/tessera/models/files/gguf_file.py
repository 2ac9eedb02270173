"""GGUF files: read and check the header first, then dequantise tensors one at a time.

A GGUF file is untrusted input. This module parses the header itself, because the gguf package's reader trusts every
count and offset in the header; the package only dequantises. The format is little-endian: the magic "GGUF", a
version (2 or 3), the counts of tensors and of metadata entries (64 bits each), the entries (key, type, value), the
tensors (name, dimensions with the innermost first, type, offset), padding, then the data.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tessera.core.escapes import quoted
from tessera.core.quant import STORED_GROUP
from tessera.models.files.tensor_file import raw_rows

MAGIC = b"GGUF"


class Layout(NamedTuple):
    """Storage layout of a tensor type: blocks of `values` values in `num_bytes` bytes."""

    name: str
    values: int
    num_bytes: int


TYPES = {
    0: Layout("F32", 1, 4),
    1: Layout("F16", 1, 2),
    2: Layout("Q4_0", 32, 18),
    3: Layout("Q4_1", 32, 20),
    6: Layout("Q5_0", 32, 22),
    7: Layout("Q5_1", 32, 24),
    8: Layout("Q8_0", 32, 34),
    10: Layout("Q2_K", 256, 84),
    11: Layout("Q3_K", 256, 110),
    12: Layout("Q4_K", 256, 144),
    13: Layout("Q5_K", 256, 176),
    14: Layout("Q6_K", 256, 210),
    30: Layout("BF16", 1, 2),
}
"""Tensor types of most files, by their number in the file. `layout_of` finds the others in the gguf package, whose
import takes longer than reading a header."""

KINDS = {"Q4_0": "int4", "Q4_1": "uint4", "Q8_0": "int8"}
"""Tensor type -> kind of `Quantised` values, for the types that `read_stored` reads."""
FLOATS = ("F32", "F16", "BF16")
"""Tensor types that are loaded in the model's float dtype."""

SCALARS = dict(enumerate("<u1 <i1 <u2 <i2 <u4 <i4 <f4 ?".split())) | {10: "<u8", 11: "<i8", 12: "<f8"}
"""Metadata types of fixed size as NumPy dtypes, by their number in the file."""
STRING, ARRAY = 8, 9

MAX_ENTRIES = 1 << 16
"""Maximum number of metadata entries, and of tensors: ten times what the largest models have."""
MAX_STRINGS = 1 << 22
"""Maximum number of strings in one list. The largest vocabularies hold 2 ** 18 tokens and 2 ** 19 merges. A limit is
needed because an empty string takes ten times as many bytes in Python as in the file."""
MAX_NAME_BYTES = 1 << 16
"""Maximum length in bytes of a key or of a tensor's name, set by the format."""

BLOCK_VALUES = 1 << 18
"""Number of values dequantised at a time: so few that the gguf package's copies of them fit in a core's cache."""
STORED_BYTES = 4 << 20
"""Number of bytes that `read_stored` reads at a time."""


class GgufTensor(NamedTuple):
    """Location and layout of one tensor in a GGUF file."""

    path: Path
    layout: Layout
    shape: tuple[int, ...]  # outermost dimension first, as in NumPy
    offset: int  # position of the tensor's first byte in the file
    heads: int | None = None  # number of heads whose rows llama.cpp interleaved; None for Hugging Face's order

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the file, in Python's integers: NumPy's would overflow for a hostile shape."""
        return prod(self.shape) // self.layout.values * self.layout.num_bytes


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A checked header: metadata (Python scalars, lists of strings, NumPy arrays of numbers) and tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Header:
    """Reader of little-endian values, one after another; it raises ValueError if the file ends inside a value."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file = file
        self.path = path
        self.size = os.fstat(file.fileno()).st_size

    @property
    def position(self) -> int:
        return self._file.tell()

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} is not a usable GGUF file: {problem}: download it again")

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self._file.tell():
            raise self.error(f"it ends inside {what} ({self.size} bytes)")
        data = self._file.read(count)
        if len(data) != count:
            raise self.error(f"it was truncated while being read, inside {what}")
        return data

    def number(self, code: str, what: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number("Q", what)
        if limit is not None and length > limit:
            raise self.error(f"{what} has {length} bytes, more than the {limit} allowed")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 ({error.reason})") from error

    def value(self, key: str) -> Any:
        """Read a metadata value's type, then the value."""
        what = f"metadata {key!r:.80}"
        kind = self.number("I", what)
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self.items(what)
        return self.scalars(kind, 1, what)[0].item()

    def items(self, what: str) -> list[str] | np.ndarray:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == ARRAY:
            raise self.error(f"{what} is a list of lists, which no supported model has")
        if kind != STRING:
            return self.scalars(kind, count, what)
        if count > MAX_STRINGS or count * 8 > self.size - self.position:
            raise self.error(f"{what} claims {count} strings, too many for a file of {self.size} bytes")
        # this loop takes most of a header's time, so the method calls of `text` are inlined
        read, left, found = self._file.read, self.size - self.position, []
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            left -= 8 + length
            if left < 0:
                raise self.error(f"it ends inside {what} ({self.size} bytes)")
            found.append(read(length))
        try:
            return [item.decode() for item in found]
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 ({error.reason})") from error

    def scalars(self, kind: int, count: int, what: str) -> np.ndarray:
        if kind not in SCALARS:
            raise self.error(f"{what} has the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        data = np.frombuffer(self.take(count * dtype.itemsize, what), np.uint8 if kind == 7 else dtype)
        if kind == 7 and np.any(data > 1):
            raise self.error(f"{what} holds a boolean that is neither 0 nor 1")
        return data.view(dtype)


def read_gguf(path: str | os.PathLike) -> GgufFile:
    """Read and check a GGUF file's header, in a small multiple of its bytes, whatever sizes it claims."""
    path = Path(path)
    with open(path, "rb") as file:
        header = _Header(file, path)
        if (magic := file.read(4)) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}: pass a GGUF file")
        version = header.number("I", "the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            form = "big-endian" if swapped in (2, 3) else f"version {version}"
            raise ValueError(
                f"{path} is a {form} GGUF file: only little-endian versions 2 and 3 are supported: convert it again"
            )
        num_tensors, num_entries = header.number("Q", "the tensor count"), header.number("Q", "the metadata count")
        if max(num_tensors, num_entries) > MAX_ENTRIES:
            raise header.error(
                f"it claims {num_tensors} tensors and {num_entries} metadata entries, but at most {MAX_ENTRIES} of "
                f"each are allowed"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = header.text("a metadata key", MAX_NAME_BYTES)
            if key in metadata:
                raise header.error(f"metadata {key!r:.80} appears twice")
            metadata[key] = header.value(key)
        parts = metadata.get("split.count", 1)
        if not isinstance(parts, int) or parts not in (0, 1):
            raise ValueError(
                f"{path} is one of {quoted(parts)} parts of a model (split.count): join them with "
                f"`llama-gguf-split --merge` first"
            )
        return GgufFile(path=path, metadata=metadata, tensors=_read_tensor_table(header, num_tensors, metadata))


def read_gguf_rows(
    name: str, tensor: GgufTensor, rows: range, columns: range
) -> Iterator[tuple[slice | np.ndarray, np.ndarray]]:
    """Yield blocks of a tensor's dequantised rows: their row numbers, and their values [rows, columns] as float32.

    A vector has one column. Only the quantised blocks that hold the columns are dequantised. If llama.cpp interleaved
    the rows of each head, the row numbers follow Hugging Face's order, and `rows` must hold whole heads.
    """
    order = None if tensor.heads is None else order_of_rows(tensor.shape[0], tensor.heads)
    if len(tensor.shape) == 1:  # stored as one row
        for _, values in _blocks(name, tensor, range(1), range(tensor.shape[0])):
            yield slice(0, tensor.shape[0]) if order is None else order, values.reshape(-1, 1)
        return
    if order is not None and set(order[rows.start : rows.stop]) != set(rows):
        raise ValueError(f"rows {rows.start} to {rows.stop} of {name} must hold whole heads")
    for block, values in _blocks(name, tensor, rows, columns):
        yield block if order is None else order[block], values


def order_of_rows(count: int, heads: int) -> np.ndarray:
    """Return int [count]: for each row of q or k in llama.cpp's order, the row's index in Hugging Face's order.

    Rows 2 i and 2 i + 1 of a head rotate together in llama.cpp's order, rows i and i + H / 2 in Hugging Face's.
    """
    return np.arange(count).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _blocks(name: str, tensor: GgufTensor, rows: range, columns: range) -> Iterator[tuple[slice, np.ndarray]]:
    import gguf  # the import takes half a second, and reading a header does not need it

    kind = gguf.GGMLQuantizationType[tensor.layout.name]
    unit, unit_bytes, width = tensor.layout.values, tensor.layout.num_bytes, tensor.shape[-1]
    first, end = columns.start // unit, -(-columns.stop // unit)  # quantised blocks of a row
    cut = slice(columns.start - first * unit, columns.stop - first * unit)
    step, row_bytes = max(BLOCK_VALUES // width, 1), width // unit * unit_bytes
    for start, raw in raw_rows(name, tensor, rows, row_bytes, step):
        count, raw = len(raw), raw[:, first * unit_bytes : end * unit_bytes]
        with np.errstate(all="ignore"):  # infinite scales are refused below
            values = gguf.dequantize(np.ascontiguousarray(raw).reshape(1, -1), kind).reshape(count, -1)[:, cut]
        if not np.isfinite(values).all():
            raise ValueError(f"{name} in {tensor.path} holds values that are not finite: download it again")
        yield slice(start, start + count), values


def check_stored_type(name: str, tensor: GgufTensor) -> None:
    kind = tensor.layout.name
    if kind not in KINDS and kind not in FLOATS:
        raise ValueError(
            f"weights='gguf' supports {', '.join(KINDS)} and floats, but {name} in {tensor.path} is {kind}: pass "
            f"weights='int8', or None to dequantise all matrices"
        )


def read_stored(
    name: str, tensor: GgufTensor, rows: range, columns: range
) -> Iterator[tuple[slice | np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield M rows of a matrix at a time, as stored in n blocks of 32 inputs: as `read_gguf_rows`, but not dequantised.

    A yielded tuple holds the row numbers, values int8 [M,n,32], scales float16 [M,n], and zero points [M,n] or None.
    """
    kind, inputs = KINDS[tensor.layout.name], tensor.shape[1]
    row_bytes = inputs // STORED_GROUP * tensor.layout.num_bytes
    order = None if tensor.heads is None else order_of_rows(tensor.shape[0], tensor.heads)
    step = max(STORED_BYTES // row_bytes, 1)
    wanted = slice(columns.start // STORED_GROUP, columns.stop // STORED_GROUP)
    for start, raw in raw_rows(name, tensor, rows, row_bytes, step):
        count = len(raw)
        blocks = raw.reshape(count, inputs // STORED_GROUP, -1)[:, wanted]
        taken = _taken_apart(blocks, kind)
        if not all(np.isfinite(part).all() for part in taken[1:] if part is not None):
            raise ValueError(f"{name} in {tensor.path} holds values that are not finite: download it again")
        yield slice(start, start + count) if order is None else order[start : start + count], *taken


def _taken_apart(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the values, scales and zero points of `blocks`, uint8 [M,n,bytes].

    Q4_0: d (q - 8)      Q4_1: d q + m      Q8_0: d q      q: stored integer; d, m: one float16 per block
    """
    count = 4 if kind == "uint4" else 2
    scale, *zero = np.moveaxis(np.ascontiguousarray(blocks[..., :count]).view("<f2"), -1, 0)
    body = blocks[..., count:]
    if kind == "int8":
        return body.view(np.int8), scale, None
    values = np.concatenate([body & 15, body >> 4], -1).view(np.int8)  # a byte holds elements i and i + 16
    return (values, scale, *zero) if zero else (values - np.int8(8), scale, None)


def _read_tensor_table(header: _Header, count: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise header.error(f"general.alignment={alignment!r:.80} is not a power of two from 8 to {1 << 20}")
    found: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = header.text("a tensor's name", MAX_NAME_BYTES)
        if name in found:
            raise header.error(f"tensor {name!r:.80} appears twice")
        found[name] = _read_tensor_entry(header, name, alignment)
    start = -(-header.position // alignment) * alignment
    end, last = start, "the header"
    for name, tensor in sorted(found.items(), key=lambda item: item[1].offset):
        found[name] = tensor = tensor._replace(offset=tensor.offset + start)
        if tensor.offset < end:
            raise header.error(f"tensor {name!r:.80} overlaps {last!r:.80}")
        end, last = tensor.offset + tensor.num_bytes, name
        if end > header.size:
            raise header.error(f"it is cut short: tensor {name!r:.80} ends at byte {end} of {header.size}")
    return found


def _read_tensor_entry(header: _Header, name: str, alignment: int) -> GgufTensor:
    what = f"tensor {name!r:.80}"
    num_dims = header.number("I", what)
    if not 1 <= num_dims <= 4:
        raise header.error(f"{what} has {num_dims} dimensions instead of 1 to 4")
    shape = tuple(header.number("Q", what) for _ in range(num_dims))[::-1]
    kind, offset = header.number("I", what), header.number("Q", what)
    if (layout := TYPES.get(kind) or layout_of(kind)) is None:
        raise ValueError(
            f"{what} in {header.path} has the type {_type_name(kind)}, which the gguf package cannot dequantise: take "
            f"a file of another type, such as Q4_K_M or Q8_0, or update the package"
        )
    if min(shape) < 1 or shape[-1] % layout.values:
        raise header.error(f"{what} has shape {shape}, which {layout.name} cannot store")
    if offset % alignment:
        raise header.error(f"{what} is at offset {offset}, which is not a multiple of {alignment}")
    tensor = GgufTensor(header.path, layout, shape, offset)
    if offset + tensor.num_bytes > header.size:
        raise header.error(f"it is cut short: {what} of shape {shape} at {offset} does not fit in {header.size} bytes")
    return tensor


@cache
def layout_of(kind: int) -> Layout | None:
    """Return the layout of the tensor type with this number, if the gguf package can dequantise the type."""
    import gguf

    try:
        found = gguf.GGMLQuantizationType(kind)
        layout = Layout(found.name, *gguf.GGML_QUANT_SIZES[found])
        gguf.dequantize(np.zeros((1, layout.num_bytes), np.uint8), found)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return layout


def _type_name(kind: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return f"{kind} (unknown)"
