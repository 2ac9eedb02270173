"""Read GGUF matrices as they are stored: integers and scales per block of 32 inputs, not dequantised.

Q4_0: d (q - 8)      Q4_1: d q + m      Q8_0: d q      q: stored integer; d, m: one float16 per block
"""

from collections.abc import Iterator

import numpy as np

from tessera.core.quant import STORED_GROUP
from tessera.models.files.gguf_file import GgufTensor, order_of_rows, raw_rows

KINDS = {"Q4_0": "int4", "Q4_1": "uint4", "Q8_0": "int8"}
"""GGUF tensor type -> kind of `Quantised` values, for the types that are kept as stored."""
FLOATS = ("F32", "F16", "BF16")
"""GGUF tensor types that are loaded in the model's float dtype."""
READ_BYTES = 4 << 20
"""Number of bytes read at a time."""


def check_stored_type(name: str, tensor: GgufTensor) -> None:
    """Raise ValueError unless a matrix's type is in KINDS or in FLOATS."""
    kind = tensor.layout.name
    if kind not in KINDS and kind not in FLOATS:
        raise ValueError(
            f"weights='gguf' supports {', '.join(KINDS)} and floats, but {name} in {tensor.path} is {kind}: pass "
            f"weights='int8', or None to dequantise all matrices"
        )


def read_stored(
    name: str, tensor: GgufTensor, rows: range, columns: range
) -> Iterator[tuple[slice | np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield several rows of a matrix at a time, as stored: M rows, each in n blocks of 32 inputs.

    A yielded tuple holds the row numbers, values int8 [M,n,32], scales float16 [M,n], and zero points [M,n] or None.

    The row numbers follow Hugging Face's order, as in `read_gguf_rows`. The columns must be whole blocks of 32 inputs.

    Raises:
        ValueError: the file was cut short, or a scale or zero point is not finite.
    """
    kind, inputs = KINDS[tensor.layout.name], tensor.shape[1]
    row_bytes = inputs // STORED_GROUP * tensor.layout.num_bytes
    order = None if tensor.heads is None else order_of_rows(tensor.shape[0], tensor.heads)
    step = max(READ_BYTES // row_bytes, 1)
    wanted = slice(columns.start // STORED_GROUP, columns.stop // STORED_GROUP)
    for start, raw in raw_rows(name, tensor, rows, row_bytes, step):
        count = len(raw)
        blocks = raw.reshape(count, inputs // STORED_GROUP, -1)[:, wanted]
        taken = _taken_apart(blocks, kind)
        if not all(np.isfinite(part).all() for part in taken[1:] if part is not None):
            raise ValueError(f"{name} in {tensor.path} holds values that are not finite: download it again")
        yield slice(start, start + count) if order is None else order[start : start + count], *taken


def _taken_apart(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the values, scales and zero points of `blocks`, uint8 [M,n,bytes]; see `read_stored`."""
    count = 4 if kind == "uint4" else 2
    scale, *zero = np.moveaxis(np.ascontiguousarray(blocks[..., :count]).view("<f2"), -1, 0)
    body = blocks[..., count:]
    if kind == "int8":
        return body.view(np.int8), scale, None
    values = np.concatenate([body & 15, body >> 4], -1).view(np.int8)  # a byte holds elements i and i + 16
    return (values, scale, *zero) if zero else (values - np.int8(8), scale, None)
