"""Read the schedules of XLA's own operations: fusions, copies and products.

The compiler dumps them as it dumps Pallas kernels. An operation is straight-line code, or one loop over blocks that
overlaps copies with computation. The program's text states the number of blocks ("iteration_bounds"), so

    cycles = bundles outside the loop + blocks x max(bundles in the loop, cycles of the products in the loop)

Loops inside a block count as one iteration, because no text states their trip count. Operations that the compiler
implements by copies alone, and scalar code between operations, have no schedule of their own.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tessera.core.shapes import ceil_div
from tessera.deviceless import hlo
from tessera.deviceless.tpu import schedule
from tessera.deviceless.tpu.schedule import LAUNCH, STEP, Schedule

_NAME = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = ")
_BLOCKS = re.compile(r'"iteration_bounds":\[([^\]]*)\]')
_PROGRAM = re.compile(r"^(TLP|<.*>)$")


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """One operation's schedule."""

    name: str  # as the compiler writes it in the program's text
    blocks: int  # of one core
    cycles: int  # of the whole operation
    loops: int  # inside a block, each of which counts as one iteration


def read(folder: Path, text: str, cores: int) -> Mapping[str, Fusion]:
    """Return the schedules, by name, of the operations of the program `text` whose dump is in `folder`.

    The `cores` of one jax device share the blocks of most operations.
    """
    kernels, blocks = set(hlo.kernel_names(text)), block_counts(text)
    found = (made for made in schedule.read(folder) if made.kernel not in kernels and not _PROGRAM.match(made.kernel))
    return {made.kernel: of_schedule(made, blocks.get(made.kernel), cores) for made in found}


def block_counts(text: str) -> dict[str, int]:
    """Read the number of blocks that each operation's loop processes from the program's text."""
    found = {}
    for line in text.splitlines():
        name, bounds = _NAME.match(line), _BLOCKS.search(line)
        if name and bounds:
            found[name[1]] = prod(map(int, re.findall(r"\d+", bounds[1])))
    return found


def of_schedule(made: Schedule, blocks: int | None, cores: int) -> Fusion:
    """Convert an operation's schedule to a `Fusion`, with the cycles of all blocks.

    A loop over n blocks has at least n + 2 iterations, because the first iteration only copies in and the last only
    copies out. If the loop has fewer, the cores share the blocks. If `blocks` is None, the number of blocks is the
    number of iterations minus 2.
    """
    outside, block = (made.region(name) for name in (LAUNCH, STEP))
    if blocks is None:
        blocks = max((made.turns or 3) - 2, 1)
    elif cores > 1 and made.turns is not None and made.turns < blocks + 2:
        blocks = ceil_div(blocks, cores)
    cycles = (outside.cycles if outside else 0) + (blocks * block.cycles if block else 0)
    return Fusion(name=made.kernel, blocks=blocks, cycles=cycles, loops=block.loops if block else 0)


def seconds(
    operations: Iterable[hlo.Operation], fusions: Mapping[str, Fusion], clock_hz: float, bandwidth: float
) -> tuple[float, float]:
    """Predict the time of operations that run one after another: (seconds of all their bytes, seconds in total).

    An operation takes the time of its cycles or the time of its bytes, whichever is longer. Asynchronous copies overlap
    with the other operations. The total is therefore the sum over the other operations, or the time of all bytes if
    that is longer.
    """
    moved = busy = 0.0
    for operation in operations:
        cycles = fusions[operation.name].cycles if operation.name in fusions else 0
        bytes_s = operation.bytes / bandwidth
        moved += bytes_s
        if not operation.opcode.endswith("-start"):
            busy += max(bytes_s, cycles / clock_hz)
    return moved, max(moved, busy)
