"""Reads what the CUDA compiler says of a Hopper kernel: registers, spills, shared memory, and what instructions it has.

The worker leaves three kinds of text in a folder: `<kernel>_<n>.resources.txt` (what the kernel asks for, written when
it is lowered), and in `compiler.txt` ptxas' report and the disassembly of every kernel in the order of compilation.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

COMPILER = "compiler.txt"
BARRIER_BYTES = 8
WIDE = ("LDGSTS",)
"""Instructions counted with their width too: asynchronous copies should move 16 bytes a thread."""

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
    """One kernel as compiled.

    Attributes:
        kernel: its name.
        registers: of a thread at launch; warpgroups redistribute them with set_max_registers.
        spill_bytes: stores and loads of registers that went to local memory, bytes per thread.
        stack_bytes: local memory of a thread.
        shared_bytes: shared memory of a block: static, buffers and barriers.
        barriers: phase barriers in shared memory.
        instructions: how often each operation stands in the code (HGMMA, UTMALDG, ...), and "LDGSTS.128".
        local: the lines of code that touch local memory.
        report: ptxas' own words.
        blocks, threads: size of the grid and of a block; None where the lowering does not say.
    """

    kernel: str
    registers: int
    spill_bytes: tuple[int, int]
    stack_bytes: int
    shared_bytes: int
    barriers: int
    instructions: Mapping[str, int]
    local: tuple[str, ...]
    report: str
    blocks: int | None = None
    threads: int | None = None

    def line(self, pattern: str) -> str:
        """The line of ptxas' report that holds this."""
        return next((line.strip() for line in self.report.splitlines() if re.search(pattern, line)), "no such line")


def read(folder: Path) -> tuple[Report, ...]:
    """The reports of every kernel compiled into the folder.

    Raises:
        ValueError: a kernel was compiled but not disassembled.
    """
    text = (folder / COMPILER).read_text()
    asked: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.resources.txt"), key=lambda path: int(_NUMBER.search(path.name)[1])):
        asked.setdefault(path.name[: _NUMBER.search(path.name).start()], []).append(path)
    codes = _codes(text)
    found = []
    for name, report in _reports(text):
        kernel = name.removesuffix(_SUFFIX)
        if not codes.get(name):
            raise ValueError(f"{kernel} was compiled but not disassembled: is nvdisasm installed beside ptxas?")
        paths = asked[kernel]
        resources = paths.pop(0) if len(paths) > 1 else paths[0]  # identical kernels are compiled once
        found.append(parse(kernel, report, codes[name].pop(0), resources.read_text(), _launch(resources)))
    return tuple(found)


def parse(kernel: str, report: str, code: str, resources: str, launch: tuple[int, int] | None = None) -> Report:
    """The report of one kernel from ptxas' words, its disassembly and what it asked for."""
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
    """How often each operation stands in a disassembly, most frequent first."""
    found: Counter[str] = Counter()
    for operation in _INSTRUCTION.findall(code):
        root, _, modifiers = operation.partition(".")
        found[root] += 1
        if root in WIDE:
            found[f"{root}.{modifiers.rpartition('.')[2]}"] += 1
    return dict(found.most_common())


def _reports(text: str) -> list[tuple[str, str]]:
    """(entry function, ptxas' lines about it) in order; the lines before "Compiling" that name it are its warnings."""
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
    """Entry function -> its disassemblies in order."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^//-+ \.text\.", text, flags=re.MULTILINE)[1:]:
        found.setdefault(re.match(r"\w+", part)[0], []).append(part)
    return found


def _launch(resources: Path) -> tuple[int, int] | None:
    """(blocks, threads of a block) from the kernel as it was before its layouts were inferred."""
    path = resources.with_name(resources.name.replace(".resources.", ".before_layout_inference."))
    found = _LAUNCH.search(path.read_text()) if path.exists() else None
    if found is None:
        return None
    blocks, threads = (re.findall(r"= %c(\d+)", sizes) for sizes in found.groups())
    return _product(blocks), _product(threads)


def _product(sizes: list[str]) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total
