"""Read the compiler's final schedule of a TPU kernel: the bundles of each named scope, and the slots they use.

A TPU core is a VLIW machine: it runs one bundle per cycle, and a bundle has slots for each of the core's units. The
compiler dumps, per kernel, the bundles (`*-final_bundles.txt`, one line each; `>` marks loop depth) and each bundle's
used slots (`*-final_hlo-static-per-bundle-utilization.txt`). With region tracing on, a `jax.named_scope` of the
kernel's body appears as a pair of trace markers, and a bundle belongs to the innermost scope around it. A bundle
outside every scope belongs to "step" if it is inside the outermost loop (the loop over the grid), else to "launch".
Bundles that hold only a marker exist only because of the tracing and are not counted.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

STEP, LAUNCH = "step", "launch"

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:LH|LB|LE|PB|PF|CT)?\s*:\s*((?:>\s?)*)(\{.*)$", re.DOTALL)
_ONLY_MARKER = re.compile(r"^\{\s*%\d+ = vtrace \d+\s*(?:/\*[^*]*\*/)?\s*\}")
_OPEN = re.compile(r"/\* TraceMeStart\((.*?)\) \[ \*/")
_CLOSE = re.compile(r"/\* \] TraceMeEnd\((.*?)\) \*/")
_PRODUCT = re.compile(r"= vmatmul\S*?\.(bf16|f32)\b")
_FILE = re.compile(r"^\d+-(?P<kernel>.+?)-\d+-final_bundles\.txt$")
_ALLOCATION = re.compile(
    r"#allocation\d+ \[shape = .*?, space=(\w+), size = (0x[0-9a-f]+),[^\n]*?scoped, tag = '(.*?)'\]"
)

CYCLES = MappingProxyType({"bf16": 4, "f32": 2})
"""Dtype -> cycles of one product instruction on all matrix units of a core together (see `Region.product_cycles`)."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """All bundles of one scope.

    Attributes:
        product_cycles: cycles that the scope's products take in the matrix units; may exceed the number of bundles. One
            product instruction feeds a register of rows, 16 of bfloat16 or 8 of float32. Either 4 units of 128 columns
            take one row per cycle each, or 2 units of 256 columns take two rows per cycle each: 4 rows per cycle in
            all.
    """

    name: str  # the scope's name, or "step" or "launch"
    bundles: int  # number of bundles; one pass through the scope takes as many cycles if nothing waits
    slots: Mapping[str, int]  # unit -> slots used in one pass
    product_cycles: int
    depth: int  # depth of the deepest loop around bundles of the scope; 1 is the loop over the grid
    loops: int  # number of deeper loops that hold bundles of this scope but have no scope themselves

    @property
    def cycles(self) -> int:
        """Cycles of one pass: one per bundle, or `product_cycles` if that is more."""
        return max(self.bundles, self.product_cycles)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One kernel's schedule."""

    kernel: str  # the compiler's name of the kernel: the pallas_call's name and a number
    capacity: Mapping[str, int]  # slots per bundle of each unit
    regions: tuple[Region, ...]  # the kernel's regions, in order of first appearance
    vmem_bytes: int  # bytes of the kernel's scratch and windows in VMEM and SMEM, all buffers counted
    smem_bytes: int
    # Iterations of one core's loop over the grid; None if known only at run time, or if each core runs one step
    # and therefore needs no loop.
    turns: int | None = None

    @property
    def name(self) -> str:
        return re.sub(r"\.\d+$", "", self.kernel)

    def region(self, name: str) -> Region | None:
        return next((region for region in self.regions if region.name == name), None)


class _Tally:
    """Running counts of one region."""

    def __init__(self, units: Iterable[str]):
        self.bundles = self.product_cycles = self.loops = 0
        self.entered = self.deepest = None
        self.slots = dict.fromkeys(units, 0)

    def add(self, text: str, depth: int, used: Iterable[int]) -> None:
        self.bundles += 1
        self.product_cycles += sum(CYCLES[dtype] for dtype in _PRODUCT.findall(text))
        self.entered = depth if self.entered is None else min(depth, self.entered)
        if self.deepest is not None and depth > self.deepest:
            self.loops += 1
        self.deepest = depth if self.deepest is None else max(depth, self.deepest)
        for unit, count in zip(self.slots, used):
            self.slots[unit] += count

    def region(self, name: str) -> Region:
        counts = {field: getattr(self, field) for field in ("bundles", "slots", "product_cycles", "loops")}
        return Region(name=name, depth=self.deepest, **counts)


def parse(kernel: str, bundles: str, utilization: str, allocations: str = "") -> Schedule:
    """Parse a schedule from the text of its dump files."""
    capacity, rows = _utilization(utilization)
    texts = _bundles(bundles)
    if len(texts) != len(rows):
        raise ValueError(
            f"{kernel}: {len(texts)} bundles but {len(rows)} rows of utilization: pass files of the same kernel"
        )
    tallies: dict[str, _Tally] = {}
    scopes: list[str] = []
    depth = 0
    for (arrows, text), used in zip(texts, rows):
        if arrows or not re.match(r"^\{(\s*%\d+ = vtrace \d+\s*)?\}", text):  # an empty bundle is printed without depth
            depth = arrows
        scopes += _OPEN.findall(text)
        if not _ONLY_MARKER.match(text):
            name = scopes[-1] if scopes else (STEP if depth else LAUNCH)
            tallies.setdefault(name, _Tally(capacity)).add(text, depth, used)
        for closed in _CLOSE.findall(text):
            if closed in scopes:
                del scopes[len(scopes) - 1 - scopes[::-1].index(closed)]
    memory = {"vmem": 0, "smem": 0}
    for space, size, _ in _ALLOCATION.findall(allocations):
        if space in memory:
            memory[space] += int(size, 16)
    return Schedule(
        kernel=kernel,
        capacity=capacity,
        regions=tuple(tally.region(name) for name, tally in tallies.items()),
        vmem_bytes=memory["vmem"],
        smem_bytes=memory["smem"],
        turns=_turns(allocations),
    )


def _turns(text: str) -> int | None:
    """Return the iterations of the loop over the grid, the first loop before any scope; None if they are not stated."""
    first = re.search(r"\bloop: start=[^\n]*", text.partition("TraceMeStart(")[0])
    found = first and re.search(r"start=(\d+), step=(\d+), limit=(\d+)", first[0])
    return -(-(int(found[3]) - int(found[1])) // int(found[2])) if found else None


def _bundles(text: str) -> list[tuple[int, str]]:
    """Split the text into (depth, text) per bundle; a comment inside a bundle may run over several lines."""
    found: list[list] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            found.append([match[1].count(">"), match[2]])
        elif found:
            found[-1][1] += "\n" + line
    return [(depth, text) for depth, text in found]


def _utilization(text: str) -> tuple[dict[str, int], list[list[int]]]:
    lines = text.splitlines()
    if len(lines) < 4:
        raise ValueError("the compiler's utilization file is missing or incomplete: compile again")
    units = [name.strip() for name in lines[1].split(",")]
    capacity = dict(zip(units, map(int, lines[2].split()), strict=True))
    return capacity, [list(map(int, line.split())) for line in lines[4:] if line.strip()]


def read(folder: Path, names: Iterable[str] | None = None) -> tuple[Schedule, ...]:
    """Read the schedules in the dump `folder`, in program order.

    `names` are the compiler's names of the wanted kernels ("probe.1"); None reads every kernel with a bundle file.
    """
    wanted = None if names is None else set(names)
    found = []
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = _FILE.match(path.name)
        if not match or "schedule-analysis" in path.name or (wanted is not None and match["kernel"] not in wanted):
            continue
        kernel = match["kernel"]
        utilization = _one(folder, kernel, "final_hlo-static-per-bundle-utilization")
        allocations = _one(folder, kernel, "pre-finalize-registers-and-allocations")
        found.append(parse(kernel, path.read_text(), utilization, allocations))
    return tuple(found)


def _one(folder: Path, kernel: str, label: str) -> str:
    pattern = re.compile(rf"^\d+-{re.escape(kernel)}-\d+-{re.escape(label)}\.txt$")
    return next((path.read_text() for path in sorted(folder.iterdir()) if pattern.match(path.name)), "")
