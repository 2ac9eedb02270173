"""Reads a compiled program's text: which Pallas kernels it calls, and what XLA does around them.

Sizes are physical: an array laid out in tiles of 8 x 128 with a last dimension of 64 takes twice its own bytes.
"""

import re
from dataclasses import dataclass
from math import ceil, prod

_SHAPE = re.compile(r"(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](?:\{([\d,]*)(?::((?:[A-Z]\([^)]*\)|\([^)]*\))*))?[^}]*\})?")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.+?) (?P<opcode>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{\s*$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element after-all partition-id replica-id opt-barrier iota "
    "copy-done slice-done async-done all-gather-done all-reduce-done collective-permute-done "
    "call-start call-done".split()
)
"""Opcodes that move nothing of their own."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of the program's entry.

    Attributes:
        name, opcode: the compiler's.
        bytes: read from and written to main memory, tiles padded; an upper bound for fusions that slice.
        cycles: XLA's own estimate, where it gives one.
    """

    name: str
    opcode: str
    bytes: int
    cycles: int | None


def kernel_names(text: str) -> tuple[str, ...]:
    """The compiler's names of the Pallas kernels that the program calls, in program order."""
    found = re.findall(r'%([\w.\-]+) = [^\n]*custom_call_target="tpu_custom_call"', text)
    return tuple(dict.fromkeys(found))


def operations(text: str) -> tuple[Operation, ...]:
    """The operations of the entry computation that move data, Pallas kernels left out."""
    found, types = [], {}
    for line in entry(text):
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        types[match["name"]] = match["type"]
        if match["opcode"] in FREE or 'custom_call_target="tpu_custom_call"' in match["rest"]:
            continue
        if match["opcode"].endswith(("-start", "-update")):
            moved = _transferred_bytes(match["type"])
        else:
            names = re.findall(r"%([\w.\-]+)", match["operands"])
            moved = sum(physical_bytes(t) for t in [match["type"], *(types.get(n, "") for n in names)])
        cycles = _CYCLES.search(match["rest"])
        found.append(
            Operation(
                name=match["name"], opcode=match["opcode"], bytes=moved, cycles=int(cycles[1]) if cycles else None
            )
        )
    return tuple(found)


def plain_entry(text: str) -> str:
    """The entry computation with what matters for cost: types, opcodes, operands, the compiler's cycles."""
    lines = []
    for line in entry(text):
        if match := _INSTRUCTION.match(line):
            cycles = _CYCLES.search(match["rest"])
            head = f"{match['name']} = {match['type']} {match['opcode']}({match['operands']})"
            lines.append(head + (f" cycles={cycles[1]}" if cycles else ""))
    return "\n".join(lines)


def entry(text: str) -> list[str]:
    """The lines of the entry computation."""
    lines, inside = [], False
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            inside = bool(match["entry"])
        elif inside and line.rstrip() == "}":  # attributes may hold lines that begin so
            return lines
        elif inside:
            lines.append(line)
    return lines


def _transferred_bytes(type_text: str) -> int:
    """Main memory bytes of an asynchronous copy, slice or call: its type names source, target, token."""
    sizes = [size for size, _ in _arrays(type_text) if size > 4]
    both_ends = all(in_main for size, in_main in _arrays(type_text) if size > 4)
    return min(sizes, default=0) * (2 if both_ends else 1)


def physical_bytes(type_text: str) -> int:
    """Bytes of the arrays of a type in main memory, tiles padded; arrays in on-chip memory count nothing."""
    return sum(size for size, in_main in _arrays(type_text) if in_main)


def _arrays(type_text: str) -> list[tuple[int, bool]]:
    """(physical bytes, whether in main memory) of each array of a type; S(n), n > 0, is memory on the chip."""
    found = []
    for kind, dims, order, layout in _SHAPE.findall(type_text):
        sizes = [int(d) for d in dims.split(",") if d]
        minor_to_major = [int(d) for d in order.split(",") if d] or list(reversed(range(len(sizes))))
        tile = re.match(r"T\(([\d,]+)\)", layout)
        if tile and sizes:
            tile_sizes = [int(t) for t in tile[1].split(",")]
            for dim, size in zip(minor_to_major, reversed(tile_sizes)):
                sizes[dim] = ceil(sizes[dim] / size) * size
        found.append((prod(sizes) * _bits(kind) // 8, not re.search(r"S\([1-9]\d*\)", layout)))
    return found


def _bits(kind: str) -> int:
    if kind == "pred":
        return 8
    digits = re.search(r"\d+", kind)
    return int(digits[0]) if digits else 0
