"""Hostile and damaged GGUF files: each is refused in a sentence, or loads."""

import random
import resource
import struct
from pathlib import Path

import pytest
from gguf_files import small_file
from test_gguf import refusal

from tessera.models.files.checkpoint import load_params
from tessera.models.files.gguf_file import read_gguf_rows
from tessera.models.files.source import open_source


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], offset: int, kind: int = 0, dims: int | None = None) -> bytes:
    dims = len(shape) if dims is None else dims
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", dims, *shape, kind, offset)


def raw_file(path: Path, entries=(), tensors=(), data: bytes = bytes(4096), counts=None, version=3) -> Path:
    counts = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


HUGE = 2**63
HOSTILE = {
    "not a GGUF": ({}, "not a GGUF"),
    "an old version": ({"version": 1}, "version 1"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "absurd tensor count": ({"counts": (HUGE, 0)}, "tensors"),
    "absurd metadata count": ({"counts": (0, HUGE)}, "metadata entries"),
    "more entries than the file holds": ({"counts": (0, 60000)}, "GGUF"),
    "absurd key": ({"entries": [struct.pack("<Q", HUGE) + b"x"]}, "more than the 65536 allowed"),
    "absurd text": ({"entries": [entry("a", 8, struct.pack("<Q", HUGE))]}, "ends inside"),
    "absurd list of numbers": ({"entries": [entry("a", 9, struct.pack("<IQ", 10, HUGE))]}, "ends inside"),
    "absurd list of texts": ({"entries": [entry("a", 9, struct.pack("<IQ", 8, HUGE))]}, "strings"),
    "texts longer than the file": ({"entries": [entry("a", 9, struct.pack("<IQQ", 8, 1, HUGE))]}, "ends inside"),
    "a list of lists": ({"entries": [entry("a", 9, struct.pack("<IQ", 9, 1) * 1000)]}, "list of lists"),
    "unknown metadata type": ({"entries": [entry("a", 99, b"")]}, "unknown type 99"),
    "a boolean of 2": ({"entries": [entry("a", 7, b"\x02")]}, "boolean"),
    "a key twice": ({"entries": [entry("a", 0, b"1")] * 2}, "twice"),
    "a key that is not UTF-8": ({"entries": [struct.pack("<Q", 1) + b"\xff"]}, "UTF-8"),
    "texts that are not UTF-8": ({"entries": [entry("a", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")]}, "UTF-8"),
    "no dimensions": ({"tensors": [tensor("t", (), 0)]}, "0 dimensions"),
    "too many dimensions": ({"tensors": [tensor("t", (1,), 0, dims=2**31)]}, "2147483648 dimensions"),
    "absurd shape": ({"tensors": [tensor("t", (HUGE, HUGE, HUGE, HUGE), 0)]}, "cut short"),
    "a shape that overflows to 0": ({"tensors": [tensor("t", (2**32, 2**32), 0)]}, "cut short"),
    "an empty tensor": ({"tensors": [tensor("t", (0, 4), 0)]}, "shape (4, 0)"),
    "part of a block": ({"tensors": [tensor("t", (33,), 0, kind=2)]}, "Q4_0 cannot store"),
    "unknown tensor type": ({"tensors": [tensor("t", (4,), 0, kind=999)]}, "999 (unknown)"),
    "an offset past the end": ({"tensors": [tensor("t", (4,), HUGE)]}, "cut short"),
    "an offset inside another": ({"tensors": [tensor("t", (64,), 0), tensor("u", (4,), 32)]}, "overlaps"),
    "two tensors in one place": ({"tensors": [tensor("t", (4,), 0), tensor("u", (4,), 0)]}, "overlaps"),
    "an odd offset": ({"tensors": [tensor("t", (4,), 4)]}, "multiple of 32"),
    "a tensor twice": ({"tensors": [tensor("t", (4,), 0), tensor("t", (4,), 32)]}, "twice"),
    "absurd alignment": ({"entries": [entry("general.alignment", 10, struct.pack("<Q", HUGE))]}, "alignment"),
    "alignment of 0": ({"entries": [entry("general.alignment", 4, struct.pack("<I", 0))]}, "alignment"),
    "no architecture": ({"tensors": [tensor("t", (4,), 0)]}, "general.architecture=None"),
    "control characters": ({"entries": [entry("general.architecture", 8, text("\x1b[2J\n" * 99))]}, "not supported"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_in_a_sentence(tmp_path, case):
    fields, named = HOSTILE[case]
    path = raw_file(tmp_path / "x.gguf", **fields)
    if case == "not a GGUF":
        path.write_bytes(b"PK\x03\x04" + bytes(100))
    said = refusal(path)
    assert named in said
    assert said.isprintable()
    assert len(said) < 400


def load_or_refuse(path: Path) -> str:
    """Return the sentence that refused the file, or "loaded"; any error but a ValueError fails the test."""
    said = "loaded"
    try:
        source = open_source(path)
        load_params(source)
        _ = source.tokenizer
    except ValueError as error:
        said = str(error)
    assert "\n" not in said
    return said


def test_a_file_cut_anywhere_is_refused(tmp_path):
    data = small_file(tmp_path)
    assert load_or_refuse(tmp_path / "whole.gguf") == "loaded"
    header = data.index(b"token_embd.weight") + 400
    cuts = [*range(0, 200), *range(200, header, 41), *range(header, len(data), 997), len(data) - 1]
    path = tmp_path / "x.gguf"
    for cut in cuts:
        path.write_bytes(data[:cut])
        said = load_or_refuse(path)
        assert said != "loaded", cut
        assert "x.gguf" in said


def test_flipped_header_bytes_load_or_are_refused(tmp_path):
    """Damage 400 files under a memory limit: the only error is ValueError, and no allocation is absurd."""
    data = small_file(tmp_path)
    header = data.index(b"token_embd.weight") + 400
    rng, path, outcomes = random.Random(0), tmp_path / "x.gguf", []
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), hard))
    try:
        for _ in range(400):
            broken = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                broken[rng.randrange(4, header)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            path.write_bytes(broken)
            outcomes.append(load_or_refuse(path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert 50 < outcomes.count("loaded") < 350  # some damage is harmless: names of tokens, keys that are not read


def test_cut_between_the_header_and_the_weights(tmp_path):
    path = tmp_path / "x.gguf"
    data = small_file(tmp_path)
    path.write_bytes(data)
    source = open_source(path)
    stored = source.header
    path.write_bytes(data[:-64])
    name, last = max(stored.tensors.items(), key=lambda item: item[1].offset)
    with pytest.raises(ValueError, match="was truncated while"):
        list(read_gguf_rows(name, last, range(last.shape[0]), range(last.shape[-1])))
    with pytest.raises(ValueError, match="cut short"):
        load_params(open_source(path))
    with pytest.raises(ValueError, match="was truncated while"):
        load_params(source)
