"""Read GGUF matrices as they are stored: integers and scales per block of 32 inputs, not dequantised.

Q4_0: d (q - 8)      Q4_1: d q + m      Q8_0: d q      per block; d and m are float16
"""

import numpy as np

from tessera.core.quant import Form, Parts
from tessera.models.gguf_file import GgufTensor, order_of_rows

KINDS = {"Q4_0": "int4", "Q4_1": "uint4", "Q8_0": "int8"}
"""GGUF tensor type -> kind of `Quantised` values, for the types that are kept as stored."""
FLOATS = ("F32", "F16", "BF16")
"""GGUF tensor types that are loaded in the model's float dtype."""
BLOCK = 32
"""Inputs per block."""
STORED_FORM = Form(kind="int8", group=BLOCK)


def check_stored_type(name: str, tensor: GgufTensor) -> None:
    """Raise ValueError unless a matrix's type is in KINDS or in FLOATS."""
    kind = tensor.layout.name
    if kind not in KINDS and kind not in FLOATS:
        raise ValueError(
            f"weights='gguf' keeps {', '.join(KINDS)} and floats, and {name} in {tensor.path} is {kind}: pass "
            f"weights='int8', or None to widen it"
        )


def read_stored(name: str, tensor: GgufTensor) -> tuple[Parts, str]:
    """Read a matrix [E,D]; return values int8 [G,32,E], scale and zero float16 [G,E], and the kind of values.

    The rows of q and k are reordered as in `read_gguf_tensor`.

    Raises:
        ValueError: the file was cut short, or a scale is not finite.
    """
    kind = KINDS[tensor.layout.name]
    outputs, inputs = tensor.shape
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        raw = np.fromfile(file, np.uint8, tensor.num_bytes)
    if raw.size != tensor.num_bytes:
        raise ValueError(f"{tensor.path} was truncated while {name} was read from it: download it again")
    blocks = raw.reshape(outputs, inputs // BLOCK, -1)
    if tensor.heads is not None:
        ordered = np.empty_like(blocks)
        ordered[order_of_rows(outputs, tensor.heads)] = blocks
        blocks = ordered
    count = 4 if kind == "uint4" else 2
    scales = np.ascontiguousarray(blocks[..., :count]).view("<f2").transpose(2, 1, 0)  # [1 or 2,G,E]
    if not np.isfinite(scales).all():
        raise ValueError(f"{name} in {tensor.path} holds values that are not finite: download it again")
    body = blocks[..., count:]
    if kind == "int8":
        values = body.view(np.int8)
    else:  # a byte holds elements i and i + 16
        values = np.concatenate([body & 15, body >> 4], -1).view(np.int8)
        values = values - np.int8(8) if kind == "int4" else values
    values = np.ascontiguousarray(values.transpose(1, 2, 0))
    scale, *zero = (np.ascontiguousarray(part) for part in scales)
    return Parts(values, scale, *zero), kind
