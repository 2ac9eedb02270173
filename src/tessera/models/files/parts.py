"""Read from a weight's file, in one pass, the parts of the weight that this process's devices hold.

The reader of a file format yields blocks of a tensor's rows, checked for NaN and infinity. Each block is copied to
every part that it belongs to, so a file is read and dequantised once, whatever the number of devices, and host memory
holds the process's parts plus one block.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

Rows = Iterator[tuple[slice | np.ndarray, np.ndarray]]
"""Iterator over blocks of a tensor: (row numbers as a slice or an array, their values [rows, columns])."""

Reader = Callable[[str, Any, range, range], Rows]
"""Function read(name, tensor, rows, columns) that yields these rows and columns of a tensor in a file.

`tensor` says where the file holds it. A vector has one column.
"""

Box = tuple[int, int, int, int]
"""Part of a tensor: (first row, end of rows, first column, end of columns)."""


def load_weight(
    read: Reader, tensors: Mapping[str, Any], lead: tuple[int, ...], dtype: np.dtype, placed: NamedSharding | None
) -> jax.Array:
    """Load one weight: one tensor or, with `lead` = (L,), a stack of L tensors of the same shape.

    Args:
        read: reader for the file's format.
        tensors: location of each tensor, by name.
        lead: () or (L,).
        dtype: dtype of the result.
        placed: sharding of the result; each process reads only what its devices hold. None means the default device.

    Raises:
        ValueError: a value that this process reads is NaN or infinite, or the file ends early.
    """
    shape = next(iter(tensors.values())).shape
    whole = (*lead, *shape)
    everything = {None: (slice(None),) * len(whole)}
    indices = (everything if placed is None else placed.addressable_devices_indices_map(whole)).values()
    boxes = {box_of(index[len(lead) :], shape) for index in indices}
    parts = {box: aligned_empty((len(tensors), box[1] - box[0], box[3] - box[2]), dtype) for box in boxes}
    rows = range(min(box[0] for box in boxes), max(box[1] for box in boxes))
    columns = range(min(box[2] for box in boxes), max(box[3] for box in boxes))
    for layer, (name, tensor) in enumerate(tensors.items()):
        for where, values in read(name, tensor, rows, columns):
            for box, part in parts.items():
                source, target = overlap(where, *box[:2])
                part[layer][target] = values[source, box[2] - columns.start : box[3] - columns.start]
    if placed is None:
        [part] = parts.values()
        return jax.device_put(part.reshape(whole))

    def held(index: tuple[slice, ...]) -> np.ndarray:
        part = parts[box_of(index[len(lead) :], shape)]
        return part.reshape(*lead, *part.shape[1 : 1 + len(shape)])

    return jax.make_array_from_callback(whole, placed, held)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Return the rows and columns that an index of a tensor's shape selects; a vector has one column."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape)]
    first, second = (*bounds, (0, 1))[:2]
    return *first, *second


def overlap(where: slice | np.ndarray, first: int, end: int) -> tuple[slice | np.ndarray, slice | np.ndarray]:
    """Return two indices for copying rows from a block to a part of a tensor: one into the block, one into the part.

    `where` gives the block's rows as row numbers of the tensor. The part holds the tensor's rows from `first` up to,
    but not including, `end`.
    """
    if isinstance(where, slice):
        start = max(where.start, first)
        stop = max(min(where.stop, end), start)
        return slice(start - where.start, stop - where.start), slice(start - first, stop - first)
    mine = np.flatnonzero((where >= first) & (where < end))
    return mine, where[mine] - first


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array aligned to 64 bytes, which JAX on CPU can use in place, without a second copy."""
    num_bytes = prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
