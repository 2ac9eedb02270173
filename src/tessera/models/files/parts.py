"""Read a weight's file, in one pass, into the parts of the weight that this process's devices hold.

The reader of a file format yields blocks of a tensor's rows. Each block is rounded, if the weight is to be quantised,
and copied to every part that it belongs to, so host memory holds the process's parts plus one block. The scale of an
output channel depends on all of the channel's inputs: even if devices share the inputs, each process reads whole rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from tessera.core.mesh import num_head_parts, sharding
from tessera.core.quant import SAMPLE, STORED_GROUP, Form, Quantised, arrays_of, pack, round_rows
from tessera.models.files.gguf_file import KINDS, read_stored
from tessera.models.weights import Weight, input_parts, quantised_axes

Where = slice | np.ndarray
"""Row numbers of a block, as a slice or an array."""

Reader = Callable[[str, Any, range, range], Iterator[tuple[Where, np.ndarray]]]
"""Function read(name, tensor, rows, columns) that yields some rows of a stored tensor at a time. A vector has one
column."""

Box = tuple[int, int, int, int]
"""Part of a tensor: (first row, end of rows, first column, end of columns)."""


class Block(NamedTuple):
    """M rows of a tensor."""

    where: Where
    values: np.ndarray  # [M,columns]; if the rows are quantised, [M,n,g] in n groups of g inputs (n = 1 without groups)
    scale: np.ndarray | None = None  # [M,n], or None for floats
    zero: np.ndarray | None = None  # zero points [M,n], or None


class Sample:
    """Evenly spaced elements of one matrix [E,D], collected while the matrix is read; `fingerprint` hashes them."""

    def __init__(self, shape: tuple[int, ...]):
        self.rows, self.columns = np.divmod(sampled(shape[0] * shape[1]), shape[1])
        self.values, self.missing = np.full(SAMPLE, np.nan, np.float32), np.ones(SAMPLE, bool)

    def take(self, where: Where, columns: range, pick: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
        """Take the sample's elements from a block with the rows `where` and these columns of the matrix.

        pick(rows, columns) returns the block's elements at these indices, counted from its first row and column.
        """
        numbers = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        wanted = np.isin(self.rows, numbers) & (self.columns >= columns.start) & (self.columns < columns.stop)
        order = np.argsort(numbers)
        places = order[np.searchsorted(numbers[order], self.rows[wanted])]
        self.values[wanted] = pick(places, self.columns[wanted] - columns.start)
        self.missing &= ~wanted

    def complete(self, read: Reader, name: str, tensor: Any) -> np.ndarray:
        """Read the elements that no part of this process holds, and return all elements as bfloat16 [SAMPLE]."""
        outputs, inputs = tensor.shape
        heads = getattr(tensor, "heads", None)
        unit = 1 if heads is None else outputs // heads  # GGUF's readers need whole heads
        for start in sorted({int(row) // unit * unit for row in self.rows[self.missing]}):
            for where, values in read(name, tensor, range(start, start + unit), range(inputs)):
                self.take(where, range(inputs), lambda rows, columns, values=values: values[rows, columns])
        return self.values.astype(ml_dtypes.bfloat16)


class Part:
    """One device's part of a weight, or of L stacked weights: arrays [L,...], by their names in `Quantised`."""

    def __init__(self, box: Box, count: int, form: Form | None, packed: bool, dtype: np.dtype):
        self.box, self.form, self.packed = box, form, packed
        arrays = shapes_of((box[1] - box[0], box[3] - box[2]), form, packed, dtype)
        arrays.pop("sample", None)
        self.arrays = {name: aligned_empty((count, *array.shape), array.dtype) for name, array in arrays.items()}

    def write(self, layer: int, block: Block, first: int) -> None:
        """Copy from a block of layer `layer` the rows and inputs of this part; `first` is the block's first input."""
        source, target = overlap(block.where, *self.box[:2])
        inputs = slice(self.box[2] - first, self.box[3] - first)
        held = {name: array[layer] for name, array in self.arrays.items()}
        if self.form is None:
            held["values"][target] = block.values[source, inputs]
        elif not self.form.group:
            values = block.values[source, 0, inputs]
            held["values"][target] = pack(values, 1) if self.packed else values
            held["scale"][target] = block.scale[source, 0]
        else:
            groups = slice(inputs.start // self.form.group, inputs.stop // self.form.group)
            values = block.values[source, groups]
            held["values"][..., target] = (pack(values, 2) if self.packed else values).transpose(1, 2, 0)
            for name in held.keys() - {"values"}:
                held[name][:, target] = getattr(block, name)[source, groups].T


def load_weight(
    read: Reader,
    tensors: Mapping[str, Any],
    weight: Weight,
    *,
    form: Form | None = None,
    kept: bool = False,
    lead: tuple[int, ...] = (),
    dtype: np.dtype,
    mesh: Mesh | None = None,
) -> jax.Array | Quantised:
    """Load one weight: one tensor or, with `lead` = (L,), a stack of L tensors of the same shape.

    A matrix is rounded to `form`, or, if `kept`, keeps a GGUF file's blocks; else it is loaded as floats of `dtype`.
    """
    form = stored_form(tensors) if kept else form
    shape = next(iter(tensors.values())).shape
    boxes = boxes_of(shape, weight, mesh)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    packed = form is not None and form.bits == 4 and platform == "cpu"
    how = {"form": form, "kept": kept, "packed": packed, "dtype": dtype}
    parts, samples = read_parts(read, tensors, boxes.values(), **how)

    def place(name: str, whole: tuple[int, ...], axes: tuple[str | None, ...]) -> jax.Array:
        """Put each device's array [L,...] on the device, and return them as one array [*lead,*whole]."""
        held = {device: samples if name == "sample" else parts[box].arrays[name] for device, box in boxes.items()}
        held = {device: array.reshape(*lead, *array.shape[1 : 1 + len(axes)]) for device, array in held.items()}
        if mesh is None:
            return jax.device_put(held[None])
        where = sharding(mesh, (*(None for _ in lead), *axes))
        arrays = [jax.device_put(array, device) for device, array in held.items()]
        return jax.make_array_from_single_device_arrays((*lead, *whole), where, arrays)

    if form is None:
        return place("values", shape, weight.axes)
    axes, shared = quantised_axes(weight, form), input_parts(weight, num_head_parts(mesh))
    arrays = shapes_of(shape, form, packed, dtype)
    return Quantised(
        **{name: place(name, array.shape, axes[name]) for name, array in arrays.items()},
        kind=form.kind, group=form.group, rounds_rows=form.rounds_rows, shared=shared,
        stretches=shared if packed and not form.group else 1, float_dtype=np.dtype(dtype).name,
    )  # fmt: skip


def read_parts(
    read: Reader,
    tensors: Mapping[str, Any],
    boxes: Iterable[Box],
    *,
    form: Form | None,
    kept: bool,
    packed: bool,
    dtype: np.dtype,
) -> tuple[dict[Box, Part], np.ndarray | None]:
    """Read tensors into parts by distinct box, and samples as bfloat16 [L,SAMPLE], which floats lack."""
    parts = {box: Part(box, len(tensors), form, packed, dtype) for box in dict.fromkeys(boxes)}
    rows = range(min(box[0] for box in parts), max(box[1] for box in parts))
    columns = range(min(box[2] for box in parts), max(box[3] for box in parts))
    samples = []
    for layer, (name, tensor) in enumerate(tensors.items()):
        if form is not None and not form.group:
            columns = range(tensor.shape[1])
        sample = None if form is None else Sample(tensor.shape)
        if kept:
            blocks = stored_blocks(name, tensor, rows, columns, sample)
        else:
            blocks = read_blocks(read(name, tensor, rows, columns), columns, form, sample)
        for block in blocks:
            for part in parts.values():
                part.write(layer, block, columns.start)
        if sample is not None:
            samples.append(sample.complete(read, name, tensor))
    return parts, np.stack(samples) if samples else None


def read_blocks(
    rows: Iterator[tuple[Where, np.ndarray]], columns: range, form: Form | None, sample: Sample | None
) -> Iterator[Block]:
    for where, values in rows:
        if form is None:
            yield Block(where, values)
            continue
        sample.take(where, columns, lambda rows, columns, values=values: values[rows, columns])
        yield Block(where, *round_rows(values, form))


def stored_blocks(name: str, tensor: Any, rows: range, columns: range, sample: Sample) -> Iterator[Block]:
    """Yield blocks of rows of a GGUF matrix as they are stored; `sample` takes its elements after dequantising them."""
    for block in map(Block._make, read_stored(name, tensor, rows, columns)):

        def pick(rows: np.ndarray, columns: np.ndarray, block: Block = block) -> np.ndarray:
            group, place = np.divmod(columns, STORED_GROUP)
            values = block.scale[rows, group].astype(np.float32) * block.values[rows, group, place]
            return values if block.zero is None else values + block.zero[rows, group].astype(np.float32)

        sample.take(block.where, columns, pick)
        yield block


def boxes_of(shape: tuple[int, ...], weight: Weight, mesh: Mesh | None) -> dict[Any, Box]:
    """Map each device of this process to the rows and columns that it holds; without a mesh, map None to all."""
    everything = {None: (slice(None),) * len(shape)}
    indices = everything if mesh is None else sharding(mesh, weight.axes).addressable_devices_indices_map(shape)

    def box(index: tuple[slice, ...]) -> Box:
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape)]
        first, second = (*bounds, (0, 1))[:2]
        return *first, *second

    return {device: box(index) for device, index in indices.items()}


def shapes_of(
    shape: tuple[int, ...], form: Form | None, packed: bool, dtype: np.dtype
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a weight, or of a part of it, by their names in `Quantised`; floats are "values"."""
    return {"values": jax.ShapeDtypeStruct(shape, dtype)} if form is None else arrays_of(*shape, form, packed=packed)


def stored_form(tensors: Mapping[str, Any]) -> Form:
    """Return the form of GGUF tensors; raise ValueError if they have different types and so cannot be stacked."""
    types = sorted({tensor.layout.name for tensor in tensors.values()})
    if len(types) > 1:
        raise ValueError(
            f"weights='gguf' cannot stack {', '.join(tensors)}, because their types are {' and '.join(types)}: pass "
            f"stacked=False"
        )
    return Form(kind=KINDS[types[0]], group=STORED_GROUP)


def sampled(size: int) -> np.ndarray:
    """Return the flat indices of SAMPLE evenly spaced elements of a weight of `size` elements."""
    return np.linspace(0, size - 1, SAMPLE).astype(np.int64)


def overlap(where: Where, first: int, end: int) -> tuple[Where, Where]:
    """Return two indices of the rows that a block and a part [first, end) share: into the block, and into the part."""
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
