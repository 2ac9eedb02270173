"""Damage a model's files: wrong values, structures, text and bytes. The random generator alone decides the damage."""

import copy
import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

DEEP = "@deep@"
"""Placeholder for a list nested 200,000 deep, which `json` cannot write."""

STRANGE: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2, 7, 300, 7919, 1_000_000, 20_000_000, 2**31 - 1, 2**31, 2**32, 2**63, 2**64),
    *(10**40, 10**400, 0.0, 0.5, 1.5, -1.5, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "1", "true", "\x1b[2J", "\ud800", "\0", "x" * 10_000, "../../etc/passwd", "model.safetensors"),
    *([], {}, [1], [[]], ["x"], [None], {"a": 1}, [[1, 2], [3]], [0] * 1000, DEEP, -(2**63), -(10**30)),
)

EXTRA: Mapping[str, Sequence[tuple[str, Any]]] = {
    "config.json": (
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}),
        ("rope_scaling", {"rope_type": "yarn", "original_max_position_embeddings": 64, "mscale": 1.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 500000.0}),
        ("eos_token_id", [257, 261]),
        ("layer_types", ["full_attention"]),
        ("partial_rotary_factor", 1.0),
        ("pretraining_tp", 1),
        ("quantization_config", {"bits": 4}),
    ),
    "generation_config.json": (
        ("do_sample", True),
        ("temperature", 0.6),
        ("top_k", 20),
        ("top_p", 0.9),
        ("min_p", 0.05),
        ("repetition_penalty", 1.05),
        ("max_new_tokens", 2048),
        ("num_beams", 4),
    ),
    "tokenizer_config.json": (
        ("model_max_length", 10**30),
        ("chat_template", [{"name": "default", "template": "x"}]),
        ("eos_token", {"content": "<|end|>", "lstrip": False}),
        ("added_tokens_decoder", {"256": {"content": "<|bos|>"}}),
    ),
}
"""File -> fields that a valid file may have but the tiny model's file lacks."""


def mutate_json(rng: random.Random, data: bytes, name: str = "") -> bytes:
    """Damage one value, field or structure of a JSON object."""
    root = json.loads(data)
    if name in EXTRA and rng.random() < 0.3:
        key, value = rng.choice(EXTRA[name])
        root[key] = copy.deepcopy(value)
    holder, key = _pick(rng, root)
    value, doubled = holder[key], None
    match rng.choice("set set set set nudge nudge delete add rename swap double nest cut".split()):
        case "set":
            holder[key] = copy.deepcopy(rng.choice(STRANGE))
        case "nudge" if isinstance(value, int | float):
            holder[key] = rng.choice([-value, value + 1, value - 1, value * 2, value + 0.5, float(value), str(value)])
        case "delete":
            del holder[key]
        case "add" if isinstance(holder, dict):
            holder[rng.choice(["x", "", "\x1b[2J", "_x", "a" * 5000])] = copy.deepcopy(rng.choice(STRANGE))
        case "rename" if isinstance(holder, dict):
            holder[rng.choice([str(key) + "x", str(key).upper(), "", "\x1b"])] = holder.pop(key)
        case "swap":
            other, there = _pick(rng, root)
            if not _within(value, other) and not _within(other[there], holder):
                holder[key], other[there] = other[there], value
        case "double" if holder is root:
            doubled = {key: copy.deepcopy(rng.choice(STRANGE))}
        case "nest":
            holder[key] = rng.choice([[value], {"value": value}, [value, value]])
        case "cut" if isinstance(value, list | str):
            holder[key] = value[: len(value) // 2]
        case _:
            holder[key] = copy.deepcopy(rng.choice(STRANGE))
    text = json.dumps(root)
    if doubled is not None:
        text = text[:-1] + ", " + json.dumps(doubled)[1:]
    return text.replace(f'"{DEEP}"', "[" * 200_000 + "]" * 200_000).encode()


def _pick(rng: random.Random, root: Any) -> tuple[Any, Any]:
    """Return a random value's container and key; deep values are less likely."""
    node = root
    while True:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        child = node[key]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.35:
            return node, key
        node = child


def _within(outer: Any, inner: Any) -> bool:
    """Return whether `outer` is or contains `inner`; swapping two such values would make a cycle."""
    if outer is inner:
        return True
    children = outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
    return any(_within(child, inner) for child in children)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, overwrite, insert, remove or repeat bytes, mostly near the start of the file, where headers are."""
    limit = len(data) if rng.random() < 0.3 else min(len(data), 4096)
    at, length = rng.randrange(limit), rng.choice([1, 1, 8, 64, 1000])
    insert = rng.choice(
        [b"\xff", b"\xff" * 8, b"\0" * 8, b"\xc3(", b"[" * 5000, rng.randbytes(length), b"NaN", b"1e999"]
    )
    match rng.choice("flip flip cut insert overwrite remove repeat extend empty".split()):
        case "flip":
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case "cut":
            return data[:at]
        case "insert":
            return data[:at] + insert + data[at:]
        case "overwrite":
            return data[:at] + insert + data[at + len(insert) :]
        case "remove":
            return data[:at] + data[at + length :]
        case "repeat":
            return data[: at + length] + data[at:]
        case "extend":
            return data + insert
    return b""


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Damage a tensor's entry, the header's length, the header's JSON, a weight, or arbitrary bytes of the file."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    first, second = rng.sample(names, 2)
    claimed = None
    match rng.choice("share shift hole shape dtype drop swap count json json json bytes bytes weight".split()):
        case "share":
            header[first]["data_offsets"] = header[second]["data_offsets"]
        case "shift":
            header[first]["data_offsets"] = [x + rng.choice([-64, -4, 4, 64]) for x in header[first]["data_offsets"]]
        case "hole":
            body += bytes(64)
            header[names[-1]]["data_offsets"] = [x + 64 for x in header[names[-1]]["data_offsets"]]
        case "shape":
            header[first]["shape"] = rng.choice(
                [[], [0], [2**31, 2**33], header[first]["shape"][::-1], [1, 1, 1], [-1]]
            )
        case "dtype":
            header[first]["dtype"] = rng.choice(["F16", "BF16", "I32", "F64", "F8_E4M3", "", "f32"])
        case "drop":
            del header[first]
        case "swap":
            header[first], header[second] = header[second], header[first]
        case "count":
            claimed = rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, len(data)])
        case "json":
            text = mutate_json(rng, data[8 : 8 + length])
            return len(text).to_bytes(8, "little") + text + body
        case "weight":
            at = rng.randrange(len(body) - 4)
            body = body[:at] + rng.choice([b"\xff\xff\xff\x7f", b"\0\0\x80\x7f", rng.randbytes(4)]) + body[at + 4 :]
        case "bytes":
            return mutate_bytes(rng, data)
    text = json.dumps(header).encode()
    return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text + body


# GGUF


UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """A GGUF file's parts: metadata as (key, type, value), tensors as (name, sizes, type, offset), data."""

    entries: tuple[tuple[str, int, Any], ...]
    tensors: tuple[tuple[str, tuple[int, ...], int, int], ...]
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        counts = self.counts or (len(self.tensors), len(self.entries))
        out = b"GGUF" + struct.pack("<IQQ", self.version, *counts)
        out += b"".join(_text(key) + struct.pack("<I", kind) + _value(kind, value) for key, kind, value in self.entries)
        for name, sizes, kind, offset in self.tensors:
            sizes = struct.pack(f"<I{len(sizes)}Q", len(sizes), *(size % 2**64 for size in sizes))
            out += _text(name) + sizes + struct.pack("<IQ", kind, offset % 2**64)
        return out + bytes(-len(out) % 32) + self.data


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(str(value))
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(_value(inner, v) for v in values)
    code = CODES.get(kind, "Q")
    if code in "fd":
        try:
            return struct.pack("<" + code, value)
        except (OverflowError, struct.error):
            return struct.pack("<" + code, math.inf)
    size = struct.calcsize(code)
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    number = int(value) if finite else 0
    return (number % 2 ** (8 * size)).to_bytes(size, "little")


def mutate_gguf(rng: random.Random, parts: Gguf) -> bytes:
    """Damage one metadata entry, one tensor's description, the counts, the version, or arbitrary bytes of the file."""
    entries, tensors = list(parts.entries), list(parts.tensors)
    at, place = rng.randrange(len(entries)), rng.randrange(len(tensors))
    key, kind, value = entries[at]
    name, sizes, layout, offset = tensors[place]
    changes: dict[str, Any] = {}
    match rng.choice(
        "set set set set kind list drop double rename name sizes layout offset count version bytes".split()
    ):
        case "set":
            entries[at] = key, kind, _strange_like(rng, kind, value)
        case "kind":
            other = rng.choice([*CODES, STRING, 99])
            entries[at] = key, other, [*value[1], 0][0] if kind == ARRAY else value
        case "list":
            inner = rng.choice([UINT32, FLOAT32, STRING, ARRAY])
            entries[at] = key, ARRAY, (inner, [(UINT32, [1])] * 2 if inner == ARRAY else [1, 2])
        case "drop":
            del entries[at]
        case "double":
            entries.append((key, kind, value))
        case "rename":
            entries[at] = rng.choice([key + "x", "llama.rope.scaling.factor", "\x1b[2J", "x" * 70_000]), kind, value
        case "name":
            tensors[place] = rng.choice(["x", "\x1b[2J", "", tensors[place - 1][0], "\ud800"]), sizes, layout, offset
        case "sizes":
            other = rng.choice([(), (0,), (2**40, 2**40), sizes[::-1], (*sizes, 1), (1,) * 9, (sizes[0] * 2,)])
            tensors[place] = name, other, layout, offset
        case "layout":
            tensors[place] = name, sizes, rng.choice([0, 1, 2, 8, 14, 24, 30, 99, 2**32 - 1]), offset
        case "offset":
            tensors[place] = name, sizes, layout, rng.choice([0, 1, offset + 32, offset - 32, 2**40, 2**64 - 32])
        case "count":
            changes["counts"] = tuple(rng.choice([0, 1, 5, 2**16, 2**40, 2**64 - 1, len(tensors)]) for _ in range(2))
        case "version":
            changes["version"] = rng.choice([0, 1, 2, 4, 2**24 * 3, 2**32 - 1])
        case "bytes":
            return mutate_bytes(rng, parts.encode())
    return replace(parts, entries=tuple(entries), tensors=tuple(tensors), **changes).encode()


def _strange_like(rng: random.Random, kind: int, value: Any) -> Any:
    """Draw a strange value that the GGUF type `kind` can hold."""
    if kind == ARRAY:
        inner, values = value
        values = list(values) or ["a b"]
        at = rng.randrange(len(values))
        values[at] = _strange_like(rng, inner, values[at])
        return inner, rng.choice([values, values[: len(values) // 2], values * 2, []])
    if kind == STRING:
        return rng.choice([v for v in STRANGE if isinstance(v, str)] + ["llama", "gpt2", "qwen2"])
    numbers: list[Any] = [v for v in STRANGE if isinstance(v, int | float)]
    return rng.choice([*numbers, value + 1, value - 1, -value])
