"""Read a compiled program's text: the Pallas kernels it calls, and XLA's operations around them.

Sizes are physical: an array laid out in tiles of 8 x 128 with a last dimension of 64 takes twice its logical bytes.
"""

import re
from collections import Counter
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

_SHAPE = re.compile(r"(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](?:\{([\d,]*)(?::((?:[A-Z]\([^)]*\)|\([^)]*\))*))?[^}]*\})?")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.+?) (?P<opcode>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{\s*$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element after-all partition-id replica-id opt-barrier iota "
    "copy-done slice-done async-done all-gather-done all-reduce-done collective-permute-done "
    "call-start call-done while conditional call".split()
)
"""Opcodes that move no data themselves."""
COMMUNICATION = frozenset("all-reduce all-gather reduce-scatter collective-permute all-to-all".split())


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a compiled program; names are the compiler's."""

    name: str
    opcode: str
    bytes: int  # read from and written to main memory, with padding; an upper bound for a fusion that reads a slice
    cycles: int | None  # XLA's estimate of the operation's cycles; None if XLA gives none


class Collective(NamedTuple):
    """One exchange between devices: opcode, bytes of the result on one device, and where it runs.

    `where` is "program" (the program's entry), "layer" (the loop over layers) or "inner loop" (a loop or branch inside
    the loop over layers).
    """

    opcode: str
    bytes: int
    where: str


def kernel_names(text: str) -> tuple[str, ...]:
    """List the Pallas TPU kernels that the program calls, by the compiler's names, in program order."""
    found = re.findall(r'%([\w.\-]+) = [^\n]*custom_call_target="tpu_custom_call"', text)
    return tuple(dict.fromkeys(found))


def kernel_launches(text: str) -> dict[str, int]:
    """Count how often one run of the program launches each of its Mosaic GPU kernels, by name.

    Kernels in a branch are left out, and so are kernels in a loop whose trip count the compiler does not know.
    """
    lines, found, unknown = computations(text), Counter(), set()

    def run(computation: str, times: int | None) -> None:
        for line in lines.get(computation, ()):
            if 'custom_call_target="mosaic_gpu' in line and (name := re.search(r'op_name="[^"]*?(\w+)/\w+"', line)):
                found[name[1]] += times or 0
                unknown.update([name[1]] if times is None else [])
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for part in re.findall(r"\b(?:calls|to_apply)=%([\w.\-]+)", line):
                run(part, times)
            for part in re.findall(r"\bbody=%([\w.\-]+)", line):
                run(part, None if times is None or turns is None else times * int(turns[1]))

    run("ENTRY", 1)
    return {name: times for name, times in found.items() if name not in unknown}


def operations(text: str, computation: str | None = None, turns: int = 1) -> tuple[Operation, ...]:
    """List the operations of a computation that move data, except Pallas kernels and exchanges between devices.

    Without a name, the computation is the entry. `turns` is the number of iterations, if it is the body of the loop
    over layers: an array whose first dimension is `turns` then counts as one slice, and an operation that takes and
    returns such an array, of the same type, counts as an in-place update of one slice.
    """
    found, types = [], {}
    for line in entry(text) if computation is None else computations(text).get(computation, ()):
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        types[match["name"]] = match["type"]
        if (
            match["opcode"] in FREE
            or match["opcode"].removesuffix("-start") in COMMUNICATION
            or 'custom_call_target="tpu_custom_call"' in match["rest"]
        ):
            continue
        if match["opcode"].endswith(("-start", "-update")):
            moved = _transferred_bytes(match["type"])
        else:
            touched = [types.get(n, "") for n in re.findall(r"%([\w.\-]+)", match["operands"])]
            if match["opcode"] == "dynamic-update-slice":  # in place: copies, if any, are separate operations
                moved = 2 * physical_bytes(touched[1])
            elif turns > 1 and match["type"] in touched and _slices(match["type"], turns) > 1:
                moved = 2 * sum(physical_bytes(t) for t in touched if t != match["type"])
            else:
                moved = sum(physical_bytes(t) // _slices(t, turns) for t in [match["type"], *touched])
        cycles = _CYCLES.search(match["rest"])
        found.append(
            Operation(
                name=match["name"], opcode=match["opcode"], bytes=moved, cycles=int(cycles[1]) if cycles else None
            )
        )
    return tuple(found)


def entry(text: str) -> list[str]:
    return computations(text).get("ENTRY", [])


def computations(text: str) -> dict[str, list[str]]:
    """Return {name of a computation: its lines}; the entry computation is also under "ENTRY"."""
    found: dict[str, list[str]] = {}
    lines = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = found.setdefault(match["name"], [])
            if match["entry"]:
                found["ENTRY"] = lines
        elif line.rstrip() == "}":  # exact, since lines of attributes may begin with "}"
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def loop_body(text: str) -> str | None:
    """Return the name of the body of the loop over layers: the longest body of a `while` in the entry, or None."""
    bodies = re.findall(r" while\([^\n]*?body=%([\w.\-]+)", "\n".join(entry(text)))
    found = computations(text)
    return max(bodies, key=lambda name: len(found.get(name, ())), default=None)


def collectives(text: str) -> tuple[Collective, ...]:
    """List every exchange between devices with the place where it runs."""
    body, found, all_lines = loop_body(text), [], computations(text)
    for name, lines in all_lines.items():
        where = "program" if name == "ENTRY" else "layer" if name == body else "inner loop"
        if name != "ENTRY" and lines is all_lines.get("ENTRY"):
            continue
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match and match["opcode"].removesuffix("-start") in COMMUNICATION:
                sizes = [size for size, _ in _arrays(match["type"])]
                found.append(Collective(match["opcode"].removesuffix("-start"), max(sizes, default=0), where))
    return tuple(found)


def _slices(type_text: str, turns: int) -> int:
    return turns if turns > 1 and re.match(rf"\w+\[{turns},", type_text) else 1


def _transferred_bytes(type_text: str) -> int:
    """Return the bytes that an asynchronous copy, slice or call reads from and writes to main memory.

    The operation's type lists the source, the target and a token.
    """
    sizes = [size for size, _ in _arrays(type_text) if size > 4]
    both_ends = all(in_main for size, in_main in _arrays(type_text) if size > 4)
    return min(sizes, default=0) * (2 if both_ends else 1)


def physical_bytes(type_text: str) -> int:
    """Sum the bytes of a type's arrays in main memory, with the padding of tiles; on-chip arrays count as 0."""
    return sum(size for size, in_main in _arrays(type_text) if in_main)


def _arrays(type_text: str) -> list[tuple[int, bool]]:
    """List (physical bytes, whether in main memory) for each array of a type; S(n) with n > 0 is on-chip memory."""
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
