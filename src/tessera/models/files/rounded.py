"""Read quantised matrices from a file, in one pass, as the parts that this process's devices hold.

Each block of rows is rounded, or taken as a GGUF file stores it, and copied to every part that it belongs to, so host
memory holds the process's parts plus one block. A mesh splits a quantised matrix into the same parts as a float matrix.
The scale of an output channel depends on all of the channel's inputs, so if devices share the inputs, each process
reads whole rows and keeps its columns. The scale of a group depends only on the group's inputs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tessera.core.mesh import num_head_parts, sharding
from tessera.core.quant import SAMPLE, STORED_GROUP, Form, Quantised, arrays_of, pack, round_rows
from tessera.models.files.gguf_stored import KINDS, read_stored
from tessera.models.files.parts import Box, Reader, aligned_empty, box_of, overlap
from tessera.models.weights import Weight, input_parts, quantised_axes


class Block(NamedTuple):
    """M quantised rows of a matrix, each in n groups of g inputs (n = 1 without groups).

    Attributes:
        where: row numbers, as a slice or an array.
        values: [M,n,g].
        scale: [M,n].
        zero: zero points [M,n], or None.
    """

    where: slice | np.ndarray
    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None


class Sample:
    """Evenly spaced elements of one matrix [E,D], collected while the matrix is read; `fingerprint` hashes them."""

    def __init__(self, shape: tuple[int, ...]):
        self.rows, self.columns = np.divmod(sampled(shape[0] * shape[1]), shape[1])
        self.values, self.missing = np.full(SAMPLE, np.nan, np.float32), np.ones(SAMPLE, bool)

    def take(
        self, where: slice | np.ndarray, columns: range, pick: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> None:
        """Take the sample's elements from a block, which holds the rows `where` and these columns of the matrix.

        pick(rows, columns) returns the block's elements at these indices, which start at the block's first row and
        column.
        """
        numbers = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        wanted = np.isin(self.rows, numbers) & (self.columns >= columns.start) & (self.columns < columns.stop)
        order = np.argsort(numbers)
        places = order[np.searchsorted(numbers[order], self.rows[wanted])]
        self.values[wanted] = pick(places, self.columns[wanted] - columns.start)
        self.missing &= ~wanted

    def complete(self, read: Reader, name: str, tensor: Any) -> np.ndarray:
        """Read the elements that are still missing because no part of this process holds them, and return all elements.

        The result is bfloat16 [SAMPLE].
        """
        outputs, inputs = tensor.shape
        heads = getattr(tensor, "heads", None)
        unit = 1 if heads is None else outputs // heads  # GGUF's readers need whole heads
        for start in sorted({int(row) // unit * unit for row in self.rows[self.missing]}):
            for where, values in read(name, tensor, range(start, start + unit), range(inputs)):
                self.take(where, range(inputs), lambda rows, columns, values=values: values[rows, columns])
        return self.values.astype(ml_dtypes.bfloat16)


class Part:
    """One device's part of a matrix, or of L stacked matrices: arrays [L,...], by their names in `Quantised`."""

    def __init__(self, box: Box, count: int, form: Form, packed: bool):
        self.box, self.form, self.packed = box, form, packed
        arrays = arrays_of(box[1] - box[0], box[3] - box[2], form, packed=packed)
        arrays.pop("sample")
        self.arrays = {name: aligned_empty((count, *array.shape), array.dtype) for name, array in arrays.items()}

    def write(self, layer: int, block: Block, first: int) -> None:
        """Copy from a block of layer `layer` the rows and inputs of this part; `first` is the block's first input."""
        source, target = overlap(block.where, *self.box[:2])
        inputs = slice(self.box[2] - first, self.box[3] - first)
        held = {name: array[layer] for name, array in self.arrays.items()}
        if not self.form.group:
            values = block.values[source, 0, inputs]
            held["values"][target] = pack(values, 1) if self.packed else values
            held["scale"][target] = block.scale[source, 0]
            return
        groups = slice(inputs.start // self.form.group, inputs.stop // self.form.group)
        values = block.values[source, groups]
        held["values"][..., target] = (pack(values, 2) if self.packed else values).transpose(1, 2, 0)
        for name in held.keys() - {"values"}:
            held[name][:, target] = getattr(block, name)[source, groups].T


def load_quantised(
    read: Reader,
    tensors: Mapping[str, Any],
    weight: Weight,
    *,
    form: Form | None,
    lead: tuple[int, ...] = (),
    dtype: np.dtype,
    mesh: Mesh | None = None,
) -> Quantised:
    """Load one quantised matrix: one tensor or, with `lead` = (L,), a stack of L tensors of the same shape.

    Args:
        read: reader for the file's format.
        tensors: location of each tensor, by name.
        weight: the matrix's entry in the table of `models.weights`, which says how a mesh splits the matrix.
        form: form to round to; None keeps a GGUF file's blocks.
        lead: () or (L,).
        dtype: float dtype of the model.
        mesh: mesh over whose devices the matrix is split; None means the default device.

    Raises:
        ValueError: a value that this process reads is NaN or infinite, the file ends early, or the tensors to stack
            have different GGUF types.
    """
    kept = form is None
    form = stored_form(tensors) if form is None else form
    boxes = boxes_of(next(iter(tensors.values())).shape, weight, mesh)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    packed = platform == "cpu" and form.bits == 4
    parts, samples = read_parts(read, tensors, boxes.values(), form=form, kept=kept, packed=packed)
    axes, shared = quantised_axes(weight, form), input_parts(weight, num_head_parts(mesh))

    def place(name: str, held: Mapping[Any, np.ndarray]) -> jax.Array:
        """Put each device's array [L,...] on the device, and return them as one array."""
        held = {device: array.reshape(*lead, *array.shape[1:]) for device, array in held.items()}
        if mesh is None:
            return jax.device_put(held[None])
        where = sharding(mesh, (*(None for _ in lead), *axes[name]))
        arrays = [jax.device_put(array, device) for device, array in held.items()]
        return jax.make_array_from_single_device_arrays(whole_shape(where, arrays[0].shape), where, arrays)

    names = next(iter(parts.values())).arrays
    placed = {name: place(name, {device: parts[box].arrays[name] for device, box in boxes.items()}) for name in names}
    return Quantised(
        **placed, sample=place("sample", dict.fromkeys(boxes, samples)), kind=form.kind, group=form.group,
        rounds_rows=form.rounds_rows, stretches=shared if packed and not form.group else 1, shared=shared,
        float_dtype=np.dtype(dtype).name,
    )  # fmt: skip


def read_parts(
    read: Reader, tensors: Mapping[str, Any], boxes: Iterable[Box], *, form: Form, kept: bool, packed: bool
) -> tuple[dict[Box, Part], np.ndarray]:
    """Read tensors into parts, one per distinct box; return the parts by box, and samples as bfloat16 [L,SAMPLE].

    With `kept`, blocks of a GGUF file are read as they are stored instead of being rounded to `form`. With `packed`, a
    byte holds two four-bit values.
    """
    parts = {box: Part(box, len(tensors), form, packed) for box in dict.fromkeys(boxes)}
    rows = range(min(box[0] for box in parts), max(box[1] for box in parts))
    columns = range(min(box[2] for box in parts), max(box[3] for box in parts))
    samples = []
    for layer, (name, tensor) in enumerate(tensors.items()):
        columns = columns if form.group else range(tensor.shape[1])
        sample = Sample(tensor.shape)
        if kept:
            blocks = stored_blocks(name, tensor, rows, columns, sample)
        else:
            blocks = rounded_blocks(read(name, tensor, rows, columns), columns, form, sample)
        for block in blocks:
            for part in parts.values():
                part.write(layer, block, columns.start)
        samples.append(sample.complete(read, name, tensor))
    return parts, np.stack(samples)


def rounded_blocks(
    rows: Iterator[tuple[slice | np.ndarray, np.ndarray]], columns: range, form: Form, sample: Sample
) -> Iterator[Block]:
    """Yield blocks of rows, rounded to `form` as they are read; `sample` takes its elements before they are rounded."""
    for where, values in rows:
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
    if mesh is None:
        return {None: (0, shape[0], 0, shape[1])}
    indices = sharding(mesh, weight.axes).addressable_devices_indices_map(shape)
    return {device: box_of(index, shape) for device, index in indices.items()}


def whole_shape(where: NamedSharding, part: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array, given its sharding `where` and the shape of one device's part."""
    counts = (1 if axis is None else where.mesh.shape[axis] for axis in (*where.spec, *(None for _ in part)))
    return tuple(size * count for size, count in zip(part, counts))


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
