"""Read the CUDA compiler's report on a Hopper kernel: registers, spills, shared memory, and instruction counts.

The compiling process writes two kinds of files to a folder. `<kernel>_<n>.resources.txt`, written when a kernel is
lowered, holds the resources that the kernel requests. `compiler.txt` holds ptxas' report and the disassembly of every
kernel, in the order of compilation.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

COMPILER = "compiler.txt"
BARRIER_BYTES = 8
WIDE = ("LDGSTS",)
"""Instructions that are also counted per width: asynchronous copies should move 16 bytes per thread."""

_SUFFIX = "_mosaic_gpu_kernel"
_NUMBER = re.compile(r"_(\d+)\.resources\.txt$")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?.*?(?:, (\d+) bytes smem)?$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_LAUNCH = re.compile(r"gpu\.launch.* blocks\(.*?\) in \((.*?)\) threads\(.*?\) in \((.*?)\)")
_BARRIERS = re.compile(r"num_barriers=(\d+)[^()]*\): (\d+)")


@dataclass(frozen=True, kw_only=True)
class Report:
    """One compiled kernel."""

    kernel: str
    registers: int  # registers per thread at launch; warpgroups redistribute them with set_max_registers
    spill_bytes: tuple[int, int]  # bytes per thread of (stores, loads) of spilled registers
    stack_bytes: int  # bytes of local memory per thread
    shared_bytes: int  # bytes of shared memory per thread block: static memory, buffers and barriers
    barriers: int  # number of barriers (mbarrier) in shared memory
    instructions: Mapping[str, int]  # HGMMA, UTMALDG, ... -> occurrences in the code; those in WIDE also by width
    local: tuple[str, ...]  # the lines of code that access local memory
    report: str  # ptxas' text about the kernel
    blocks: int | None = None  # in the grid; None if the lowering does not state it
    threads: int | None = None  # in a block

    def line(self, pattern: str) -> str:
        return next((line.strip() for line in self.report.splitlines() if re.search(pattern, line)), "no such line")


def read(folder: Path) -> tuple[Report, ...]:
    """Read the reports on all kernels whose files are in the folder."""
    text = (folder / COMPILER).read_text()
    asked: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.resources.txt"), key=lambda path: int(_NUMBER.search(path.name)[1])):
        asked.setdefault(path.name[: _NUMBER.search(path.name).start()], []).append(path)
    codes = _codes(text)
    found = []
    for name, report in _reports(text):
        kernel = name.removesuffix(_SUFFIX)
        if not codes.get(name):
            raise ValueError(f"{kernel} was compiled but not disassembled: is nvdisasm installed next to ptxas?")
        paths = asked[kernel]
        resources = paths.pop(0) if len(paths) > 1 else paths[0]  # identical kernels are compiled once
        found.append(parse(kernel, report, codes[name].pop(0), resources.read_text(), _launch(resources)))
    return tuple(found)


def parse(kernel: str, report: str, code: str, resources: str, launch: tuple[int, int] | None = None) -> Report:
    """Parse the report on one kernel from ptxas' text, the kernel's disassembly and the resources that it requests."""
    stack, stores, loads = map(int, _SPILLS.search(report).groups())
    used = _USED.search(report)
    barriers = sum(int(number) * int(times) for number, times in _BARRIERS.findall(resources))
    scratch = int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1])
    return Report(
        kernel=kernel,
        registers=int(used[1]),
        spill_bytes=(stores, loads),
        stack_bytes=stack,
        shared_bytes=int(used[3] or 0) + scratch + BARRIER_BYTES * barriers,
        barriers=barriers,
        instructions=count(code),
        local=tuple(" ".join(line.split()) for line in code.splitlines() if re.search(r"\b(LDL|STL)\b", line)),
        report=report,
        blocks=launch and launch[0],
        threads=launch and launch[1],
    )


def count(code: str) -> dict[str, int]:
    """Count each operation in a disassembly, most frequent first."""
    found: Counter[str] = Counter()
    for operation in _INSTRUCTION.findall(code):
        root, _, modifiers = operation.partition(".")
        found[root] += 1
        if root in WIDE:
            found[f"{root}.{modifiers.rpartition('.')[2]}"] += 1
    return dict(found.most_common())


def _reports(text: str) -> list[tuple[str, str]]:
    """Split ptxas' output into (entry function, its lines), in order.

    Warnings before a "Compiling" line belong to the function that the line names.
    """
    lines = [line for line in text.splitlines() if line.startswith("ptxas") or _SPILLS.search(line)]
    found: list[tuple[str, list[str]]] = []
    waiting: list[str] = []
    for line in lines:
        entry = _ENTRY.search(line)
        if entry:
            found.append((entry[1], [*waiting, line]))
            waiting = []
        elif found and not (line.startswith(("ptxas info    : (", "ptxas warning")) or "bytes gmem" in line):
            found[-1][1].append(line)
        else:
            waiting.append(line)
    return [(name, "\n".join(lines)) for name, lines in found]


def _codes(text: str) -> dict[str, list[str]]:
    """Map each entry function to its disassemblies, in order."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^//-+ \.text\.", text, flags=re.MULTILINE)[1:]:
        found.setdefault(re.match(r"\w+", part)[0], []).append(part)
    return found


def _launch(resources: Path) -> tuple[int, int] | None:
    """Read (blocks, threads per block) from the kernel's dump that precedes layout inference."""
    path = resources.with_name(resources.name.replace(".resources.", ".before_layout_inference."))
    found = _LAUNCH.search(path.read_text()) if path.exists() else None
    if found is None:
        return None
    blocks, threads = (re.findall(r"= %c(\d+)", sizes) for sizes in found.groups())
    return prod(map(int, blocks)), prod(map(int, threads))
