"""Readers of rows and columns give exactly that part of the tensor, and refuse what is not finite in it alone."""

import gguf
import numpy as np
import pytest
from gguf_files import Q, write_gguf

from tessera.models.files.gguf_file import read_gguf, read_gguf_rows
from tessera.models.files.tensor_file import read_header, read_rows, write_file

VALUES = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
PARTS = [(range(64), range(96)), (range(16, 48), range(96)), (range(64), range(32, 64)), (range(32, 64), range(40, 75))]


def assembled(blocks, rows: range, columns: range) -> np.ndarray:
    out = np.full((64, len(columns)), np.nan, np.float32)
    for where, values in blocks:
        out[where] = values
    assert np.isnan(np.delete(out, rows, axis=0)).all()
    return out[rows.start : rows.stop]


@pytest.mark.parametrize(("rows", "columns"), PARTS)
@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q8_0, Q.Q4_0])
@pytest.mark.parametrize("heads", [None, 4])
def test_parts_of_a_gguf_tensor(tmp_path, kind, heads, rows, columns):
    stored = VALUES.astype(np.float16) if kind == Q.F16 else VALUES if kind == Q.F32 else gguf.quantize(VALUES, kind)
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, {"x": (stored, kind)})
    tensor = read_gguf(path).tensors["x"]._replace(heads=heads)
    everything = range(64), range(96)
    whole = assembled(read_gguf_rows("x", tensor, *everything), *everything)
    found = assembled(read_gguf_rows("x", tensor, rows, columns), rows, columns)
    np.testing.assert_array_equal(found, whole[rows.start : rows.stop, columns.start : columns.stop])


def test_rows_that_cut_a_head_are_refused(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, {"x": (VALUES, Q.F32)})
    tensor = read_gguf(path).tensors["x"]._replace(heads=4)
    with pytest.raises(ValueError, match="rows 8 to 24 of x must hold whole heads"):
        list(read_gguf_rows("x", tensor, range(8, 24), range(96)))


@pytest.mark.parametrize(("rows", "columns"), PARTS)
def test_parts_of_a_safetensors_file(tmp_path, rows, columns):
    broken = VALUES.copy()
    broken[0, 0] = np.nan
    path = tmp_path / "x.safetensors"
    specs = {name: (np.dtype(np.float32), VALUES.shape) for name in ("good", "broken")}
    write_file(path, specs, iter((VALUES, broken)))
    stored = read_header(path)
    found = assembled(read_rows("good", stored["good"], rows, columns), rows, columns)
    np.testing.assert_array_equal(found, VALUES[rows.start : rows.stop, columns.start : columns.stop])
    if rows.start or columns.start:
        assembled(read_rows("broken", stored["broken"], rows, columns), rows, columns)
    else:
        with pytest.raises(ValueError, match="broken in .* holds values that are not finite"):
            list(read_rows("broken", stored["broken"], rows, columns))


def test_a_file_cut_short_after_its_header_was_read(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, {"x": (VALUES.dtype, VALUES.shape)}, iter((VALUES,)))
    stored = read_header(path)["x"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"x.safetensors was truncated while x was read from it"):
        list(read_rows("x", stored, range(64), range(96)))
