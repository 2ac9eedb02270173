"""Compile for TPUs that this machine lacks: the real compiler, one process per program, with a time limit.

A compiler error is a result: `Compiled.error` holds the failure, its meaning and the way out. Compiling needs jax and
libtpu (the extra "deviceless"), in this interpreter or in the one that the call names, and no chip.
"""

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.core import hardware
from tessera.deviceless import hlo
from tessera.deviceless.process import Process
from tessera.deviceless.tpu import schedule

WORKER = Path(__file__).with_name("worker.py")

TOPOLOGIES = MappingProxyType({"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"})
"""Smallest topology of each chip that the compiler accepts on a host without that chip."""

FLAGS = (
    # Dump only the last stage: all stages are twenty times as many bytes and double the compile time.
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final",
    # Mark each jax.named_scope in the bundles. The marks add bundles, which the parser leaves out.
    "--xla_enable_custom_call_region_trace=true",
)


LONGEST_TEXT = 500
"""Characters kept of a compiler's message, which lists every allocation after the first sentences."""


class Meaning(NamedTuple):
    """One kind of compiler error."""

    kind: str
    pattern: str
    meaning: str
    way_out: str


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
        "the vector memory of a core is full: blocks are held twice (double buffering), next to scratch and spills",
        "take smaller blocks, or raise vmem_limit_bytes if the chip has more",
    ),
    Meaning(
        "HBM",
        r"(?i)memory space hbm|\bhbm\b.*(exceed|exhaust)|(exceed|exhaust|out of memory).*\bhbm\b",
        "the chip's main memory is full: arguments, outputs and temporaries of the whole program",
        "take a shorter length, a smaller batch, or more chips",
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
        "write it with other operations; the error names the one",
    ),
)


class CompileError(NamedTuple):
    """A compiler's refusal, its meaning and the way out.

    `kind` is "time", "program" or a kind of `MEANINGS` ("SMEM", "VMEM", "HBM", "layout", "unsupported").
    """

    kind: str
    text: str
    meaning: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.meaning}; {self.way_out}. The compiler: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Result of compiling one program, or the error.

    Attributes:
        chip: short name ("v6e").
        error: None if it compiled.
        compile_s: seconds in the compiler; of the whole attempt if it failed.
        memory: bytes of main memory on one device: argument, output, temp, alias, generated_code.
        cost: XLA's own count for the program: flops, bytes.
        schedules: schedules of the program's Pallas kernels.
        operations: operations around the kernels that move data, with their bytes.
        entry: the program's entry computation, without attributes.
        executions: executions of each scope, if the program's factory or kernel states them.
        settings: block sizes that the kernel chose for this chip.
        about: everything else that the program's factory returned.
        program: the compiled program's text.
    """

    chip: str
    error: CompileError | None
    compile_s: float
    memory: Mapping[str, int] = MappingProxyType({})
    cost: Mapping[str, float] = MappingProxyType({})
    schedules: tuple[schedule.Schedule, ...] = ()
    operations: tuple[hlo.Operation, ...] = ()
    entry: str = ""
    executions: Mapping[str, float] | None = None
    settings: str | None = None
    about: Mapping[str, Any] = MappingProxyType({})
    program: str = ""

    @property
    def hbm_bytes(self) -> int:
        """Main memory the program holds on one device while it runs."""
        m = self.memory
        return m["argument"] + m["output"] + m["temp"] + m["generated_code"] - m["alias"] if m else 0


def attention_program(
    kernel: str, spec: AttentionSpec, shapes: Shapes, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Build the request for one kernel of `dispatch.KERNELS`; config None takes the kernel's own default."""
    return {"kernel": kernel, "spec": asdict(spec), "shapes": shapes._asdict(), "config": config}


def factory_program(factory: str, **kwargs: Any) -> dict[str, Any]:
    """Build the request for the result of `module:function`(**kwargs): (function, abstract arguments)."""
    return {"factory": factory, "kwargs": kwargs}


def compile_for(
    chip: str,
    program: Mapping[str, Any],
    *,
    topology: str | None = None,
    devices: int = 1,
    limit_s: float = 300.0,
    python: str | None = None,
    paths: Sequence[str] = (),
    niceness: int = 0,
) -> Compiled:
    """Compile a program for a chip in a separate process.

    Args:
        chip: "v5e", "v5p", "v6e" or "v7x".
        program: from `attention_program` or `factory_program`.
        topology: the chip's smallest if not given.
        devices: number of its devices to pass to a factory that takes `devices`.
        limit_s: seconds before the process is killed; the error's kind is then "time".
        python: interpreter to compile in; this one if not given. It needs jax and libtpu, not tessera.
        paths: folders added to the child's import path.
        niceness: added to this process's own.

    Raises:
        ValueError: the chip is unknown, or the child could not start the compiler at all.
    """
    request = {**program, "topology": topology or topology_of(chip), "devices": devices}
    with tempfile.TemporaryDirectory(prefix="tessera-compile-") as folder:
        request["dump"] = folder
        with Process(worker(python), environment(folder, paths), niceness) as process:
            found = compiled(chip, process.ask(request, limit_s), limit_s)
        if found.error is not None:
            return found
        text = (Path(folder) / "program.hlo").read_text()
        return replace(
            found,
            schedules=schedule.read(Path(folder), hlo.kernel_names(text)),
            operations=hlo.operations(text),
            entry=hlo.plain_entry(text),
            program=text,
        )


class Compiler:
    """A process that compiles one program after another, for any of the chips; a timeout kills it.

    Use it to learn whether a program compiles and how long that takes. It returns no schedule and no program text: the
    compiler writes those to one folder per process, and writing them takes a third of its time.
    """

    def __init__(self, *, paths: Sequence[str] = (), niceness: int = 0):
        self._process = Process(worker(), environment(None, paths), niceness)

    def compile(self, chip: str, program: Mapping[str, Any], *, limit_s: float = 300.0) -> Compiled:
        """Compile a program from `attention_program` or `factory_program`; see `compile_for`."""
        return compiled(chip, self._process.ask({**program, "topology": topology_of(chip)}, limit_s), limit_s)

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.__exit__(*exc)


def topology_of(chip: str) -> str:
    """Return the smallest topology of a chip.

    Raises:
        ValueError: the chip is unknown.
    """
    if chip not in TOPOLOGIES:
        raise ValueError(f"{chip=} must be one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[chip]


def worker(python: str | None = None) -> list[str]:
    """Return the command that starts a worker, in this interpreter or another."""
    return [python or sys.executable, "-P", str(WORKER)]


def compiled(chip: str, reply: Mapping[str, Any], limit_s: float) -> Compiled:
    """Convert a worker's reply to a `Compiled`."""
    if reply["compiled"]:
        return Compiled(
            chip=chip,
            error=None,
            compile_s=reply["compile_s"],
            memory=reply["memory"],
            cost=reply["cost"],
            executions=reply["about"].get("executions"),
            settings=reply["about"].get("settings"),
            about=reply["about"],
        )
    error = explain(reply["error"], limit_s if reply["stage"] == "time" else None)
    return Compiled(chip=chip, error=error, compile_s=reply.get("compile_s", 0.0))


def environment(folder: str | None = None, paths: Sequence[str] = ()) -> dict[str, str]:
    """Build the child's environment: jax on CPU, libtpu that looks for no chip; schedules go to the folder, if any."""
    found = dict(os.environ)
    found |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program taken from the cache leaves no schedule
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOAD_LIBRARY": "1",  # libtpu admits one process per machine to guard the chip; here is none
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join((f"--xla_jf_dump_to={folder}", *FLAGS)) if folder else "",
    }
    if paths:
        found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def explain(text: str, limit_s: float | None = None) -> CompileError:
    """Classify a compiler's message and find the way out."""
    text = " ".join(text.split())
    if limit_s is not None:
        return out_of_time(text, limit_s)
    if re.search(r"TPU support not installed|No module named", text):
        way_out = "install the extra: pip install 'tessera-attention[deviceless]'"
        return CompileError("program", text, "the TPU compiler (libtpu) or a module is missing", way_out)
    text = text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ..."
    named = re.search(r"(?i)memory space (smem|vmem|hbm)", text)
    for kind, pattern, meaning, way_out in MEANINGS:
        if named[1].upper() == kind if named else re.search(pattern, text):
            return CompileError(kind, text, meaning, way_out)
    return CompileError("program", text, "the program is wrong before it meets the chip", "read the message")


def out_of_time(text: str, limit_s: float) -> CompileError:
    """Return the error of a worker that was killed at its time limit."""
    meaning = f"the compiler took longer than {limit_s:g} s and was ended"
    return CompileError("time", text, meaning, "take smaller or fewer unrolled blocks, or raise the limit")


def clock_hz(chip: str) -> float:
    """Return the clock of a core in cycles per second."""
    return hardware.chip(chip).clock_hz
