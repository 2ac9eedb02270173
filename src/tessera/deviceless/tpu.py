"""Compiles for TPUs that are not there: the real compiler, one process per program, with a time limit.

A compiler error is a result: `Compiled.error` says what failed, what it means and the way out. Needs libtpu (the extra
"deviceless") beside jax, in this interpreter or in the one that the call names; no chip.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tessera import hardware
from tessera.attention.contract import AttentionSpec, Shapes
from tessera.deviceless import hlo, schedule

WORKER = Path(__file__).with_name("tpu_worker.py")

TOPOLOGIES = MappingProxyType({"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"})
"""The smallest topology of each chip that the compiler answers for on a host without one."""

FLAGS = (
    # Only the last stage: all of them are twenty times as many bytes and double the compile time.
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final",
    # jax.named_scope shows in the bundles. It adds bundles of its own, which the parser leaves out.
    "--xla_enable_custom_call_region_trace=true",
)


LONGEST_TEXT = 500
"""Characters of the compiler's message that are kept; it lists every allocation after the first sentences."""


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
        "the vector memory of a core is full: blocks are held twice (double buffering), beside scratch and spills",
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
    """A compiler's refusal: kind ("SMEM", "VMEM", "HBM", "layout", "unsupported", "time", "program"), and in words."""

    kind: str
    text: str
    meaning: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.meaning}; {self.way_out}. The compiler: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of one program, or why it did not.

    Attributes:
        chip: short name ("v6e").
        error: None if it compiled.
        compile_s: seconds in the compiler; of the whole attempt where it failed.
        memory: bytes of main memory on one device: argument, output, temp, alias, generated_code.
        cost: XLA's own count for the program: flops, bytes.
        schedules: of every Pallas kernel in the program.
        operations: the operations around them that move data, with their bytes.
        entry: the program's entry computation, attributes left out.
        executions: how often each scope runs, where the program's factory or kernel says so.
        settings: the block sizes that the kernel chose for this chip.
        about: everything else that the program's factory says.
        program: the compiled program's text.
    """

    chip: str
    error: CompileError | None
    compile_s: float
    memory: Mapping[str, int]
    cost: Mapping[str, float]
    schedules: tuple[schedule.Schedule, ...]
    operations: tuple[hlo.Operation, ...]
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
    """The request for one kernel of `dispatch.KERNELS`; config None is the kernel's own default."""
    return {"kernel": kernel, "spec": asdict(spec), "shapes": shapes._asdict(), "config": config}


def factory_program(factory: str, **kwargs: Any) -> dict[str, Any]:
    """The request for what `module:function`(**kwargs) returns: (function, abstract arguments)."""
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
    """Compile a program for a chip in a process of its own.

    Args:
        chip: "v5e", "v5p", "v6e" or "v7x".
        program: from `attention_program` or `factory_program`.
        topology: another one than the chip's smallest.
        devices: how many of its devices a factory that asks for `devices` is given.
        limit_s: seconds after which the process is ended; then the error's kind is "time".
        python: interpreter to compile in; this one if not given. It needs jax and libtpu, not tessera.
        paths: folders added to the child's import path.
        niceness: of the child.

    Raises:
        ValueError: the chip is unknown, or the child could not start the compiler at all.
    """
    if chip not in TOPOLOGIES:
        raise ValueError(f"{chip=} must be one of {', '.join(TOPOLOGIES)}")
    with tempfile.TemporaryDirectory(prefix="tessera-compile-") as folder:
        request = {**program, "topology": topology or TOPOLOGIES[chip], "devices": devices, "dump": folder}
        command = [python or sys.executable, "-P", str(WORKER)]
        reply = ask(command, request, environment(folder, paths), limit_s, niceness)
        if not reply["compiled"]:
            error = explain(reply["error"], limit_s if reply["stage"] == "time" else None)
            return Compiled(
                chip=chip,
                error=error,
                compile_s=reply.get("compile_s", 0.0),
                memory={},
                cost={},
                schedules=(),
                operations=(),
            )
        program_text = (Path(folder) / "program.hlo").read_text()
        kernels = hlo.kernel_names(program_text)
        return Compiled(
            chip=chip,
            error=None,
            compile_s=reply["compile_s"],
            memory=reply["memory"],
            cost=reply["cost"],
            schedules=schedule.read(Path(folder), kernels),
            operations=hlo.operations(program_text),
            entry=hlo.plain_entry(program_text),
            executions=reply["about"].get("executions"),
            settings=reply["about"].get("settings"),
            about=reply["about"],
            program=program_text,
        )


def environment(folder: str, paths: Sequence[str] = ()) -> dict[str, str]:
    """The child's environment: jax on CPU, libtpu that looks for no chip and dumps the schedule into the folder."""
    found = dict(os.environ)
    found |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program taken from the cache leaves no schedule
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOAD_LIBRARY": "1",  # libtpu lets one process a machine in, for the chip's sake; here is none
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join((f"--xla_jf_dump_to={folder}", *FLAGS)),
    }
    if paths:
        found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def ask(command: list[str], request: dict, env: dict, limit_s: float, niceness: int = 0) -> dict:
    """The reply of a worker started for this request; {"compiled": False, "stage": "time"} if it was ended.

    Raises:
        ValueError: the worker could not start the compiler at all.
    """
    command = ["nice", "-n", str(niceness), *command] if niceness else command
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True,
        start_new_session=True,
    ) as child:  # fmt: skip
        try:
            out, err = child.communicate(json.dumps(request), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"compiled": False, "stage": "time", "error": "ended", "compile_s": limit_s}
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode == 0:
        return json.loads(out)
    last = " ".join(err.strip().splitlines()[-3:])
    if child.returncode < 0:  # the compiler itself died: a result too
        return {"compiled": False, "stage": "compile", "error": f"it died with signal {-child.returncode}: {last}"}
    raise ValueError(f"the compiler did not start: {last}")


def explain(text: str, limit_s: float | None = None) -> CompileError:
    """What a compiler's message means, and what helps."""
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
    """What it means that the worker was ended."""
    meaning = f"the compiler took longer than {limit_s:g} s and was ended"
    return CompileError("time", text, meaning, "take smaller or fewer unrolled blocks, or raise the limit")


def clock_hz(chip: str) -> float:
    """Cycles per second of a core."""
    return hardware.chip(chip).clock_hz
