"""Compile for TPUs that this machine lacks, with the real compiler, in a separate process and under a time limit.

A compiler error is not raised: `Compiled.error` holds the failure, its meaning and the way out. The interpreter that
compiles (this process's, unless the call names another) needs jax and libtpu (the extra "deviceless"), but no chip.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.core import hardware
from tessera.deviceless import compiler, hlo
from tessera.deviceless.compiler import INSTALL, LONGEST_TEXT, CompileError, Meaning, Process, classify, worker
from tessera.deviceless.tpu import fusions as xla
from tessera.deviceless.tpu import schedule

TOPOLOGIES = MappingProxyType({"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"})
"""Chip -> smallest topology that the compiler accepts on a host without this chip."""

FLAGS = (
    # Dump only the last stage: all stages are twenty times as many bytes and double the compile time.
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final",
    # Mark each jax.named_scope in the bundles. The marks add bundles, which the parser leaves out.
    "--xla_enable_custom_call_region_trace=true",
)

MEANINGS: tuple[Meaning, ...] = (
    Meaning(
        "SMEM",
        r"(?i)\bsmem\b",
        "the scalar memory of a core (1 MiB) is full: it holds prefetched scalars, index lists and their windows",
        "stream the list through SMEM blocks per query tile, or list fewer tiles per step",
    ),
    Meaning(
        "VMEM",
        r"(?i)\bvmem\b",
        "the vector memory of a core is full: it holds every block twice (double buffering), scratch and spills",
        "use smaller blocks, or raise vmem_limit_bytes if the chip has more",
    ),
    Meaning(
        "HBM",
        r"(?i)memory space hbm|\bhbm\b.*(exceed|exhaust)|(exceed|exhaust|out of memory).*\bhbm\b",
        "the chip's main memory is full: arguments, outputs and temporaries of the whole program",
        "use a shorter length, a smaller batch, or more chips",
    ),
    Meaning(
        "layout",
        r"(?i)layout|divisible by|relayout|unaligned|not aligned|tiling|infer-vector|shape.?cast|bitcast",
        "an array's shape or slice does not fit the tiles of vector registers (8 or 16 sublanes of 128 lanes)",
        "make the last two sizes of blocks and slices multiples of the tile, or pad the head dim",
    ),
    Meaning(
        "unsupported",
        r"(?i)not ?implemented|unimplemented|unsupported|not supported|failed to legalize",
        "the TPU compiler has no code for an operation of this kernel on this chip",
        "replace the operation that the error names",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Compiled(compiler.Compiled):
    """Result of compiling one program for a TPU, or the error."""

    schedules: tuple[schedule.Schedule, ...] = ()  # schedules of the program's Pallas kernels
    operations: tuple[hlo.Operation, ...] = ()  # operations around the kernels that move data, with their bytes
    fusions: Mapping[str, xla.Fusion] = MappingProxyType({})  # if `compile_for` was asked for them

    @property
    def executions(self) -> Mapping[str, float] | None:
        """Executions of each scope, if the program's factory or kernel states them."""
        return self.about.get("executions")


def compile_for(
    chip: str,
    program: Mapping[str, Any],
    *,
    topology: str | None = None,
    devices: int = 1,
    limit_s: float = 300.0,
    python: str | None = None,
    paths: Sequence[str] = (),
    with_fusions: bool = False,
) -> Compiled:
    """Compile a program from `attention_program` or `factory_program` in a separate process.

    Args:
        topology: the topology to compile for; None is the chip's smallest.
        devices: number of the topology's devices to pass to a factory that takes `devices`.
        python: interpreter that compiles; None is the interpreter of this process. It needs jax and libtpu, and tessera
            only for a program that imports tessera.
        paths: folders to add to the import path of the compiling process.
        with_fusions: also read the schedules of XLA's operations, which are most of the dump.
    """
    request = {**program, "platform": "tpu", "topology": topology or topology_of(chip), "devices": devices}
    with tempfile.TemporaryDirectory(prefix="tessera-compile-") as folder:
        with Process(worker(python), environment(folder, paths)) as process:
            found = Compiled.from_reply(chip, process.ask({**request, "dump": folder}, limit_s), explain)
        if found.error is not None:
            return found
        text, on = (Path(folder) / "program.hlo").read_text(), hardware.chip(chip)
        return replace(
            found,
            schedules=schedule.read(Path(folder), hlo.kernel_names(text)),
            operations=hlo.operations(text),
            fusions=xla.read(Path(folder), text, on.cores // on.devices) if with_fusions else {},
            program=text,
        )


class Compiler(Process):
    """A process that compiles one program after another, for any TPU; a timeout kills it, and the next restarts it.

    It returns no schedule and no program text: the compiler writes all schedules of a process to one folder, and
    writing them takes a third of the compile time.
    """

    def __init__(self, *, paths: Sequence[str] = ()):
        super().__init__(worker(), environment(None, paths))

    def compile(self, chip: str, program: Mapping[str, Any], *, limit_s: float = 300.0) -> Compiled:
        """Compile a program from `attention_program` or `factory_program`; see `compile_for`."""
        request = {**program, "platform": "tpu", "topology": topology_of(chip)}
        return Compiled.from_reply(chip, self.ask(request, limit_s), explain)


def topology_of(chip: str) -> str:
    if chip not in TOPOLOGIES:
        raise ValueError(f"{chip=} must be one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[chip]


def environment(folder: str | None = None, paths: Sequence[str] = ()) -> dict[str, str]:
    """Build an environment in which libtpu looks for no chip and writes schedules to `folder`, if it is given."""
    return compiler.environment(paths) | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOAD_LIBRARY": "1",  # libtpu allows only one process per machine, to guard a chip; none is here
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join((f"--xla_jf_dump_to={folder}", *FLAGS)) if folder else "",
    }


def explain(text: str) -> CompileError:
    text = " ".join(text.split())
    if re.search(r"TPU support not installed|No module named", text):
        return CompileError("program", text, "the TPU compiler (libtpu) or a module is missing", INSTALL)
    named = re.search(r"(?i)memory space (smem|vmem|hbm)\b", text[:LONGEST_TEXT])
    return classify(text, [m for m in MEANINGS if m.kind == named[1].upper()] if named else MEANINGS)
