"""Compile to machine code for NVIDIA GPUs that this machine lacks, with the real compiler, in a separate process.

ptxas makes the machine code, and `sass` reads its report on every kernel. This needs the extra "deviceless" (jax's CUDA
plug-in, ptxas and nvdisasm), but no driver and no GPU. A compiler error is not raised: `Compiled.error` holds the
failure, its meaning and the way out.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.deviceless import compiler
from tessera.deviceless.compiler import INSTALL, CompileError, Meaning, Process, classify, worker
from tessera.deviceless.gpu import sass

TARGETS = MappingProxyType({"h200": Path(__file__).with_name("h200.txtpb")})
"""Chip -> its target configuration, a text file."""

MEANINGS: tuple[Meaning, ...] = (
    Meaning(
        "shared memory",
        r"(?i)exceeds available shared memory|uses too much shared",
        "the buffers and barriers of a thread block exceed its shared memory (232,448 bytes)",
        "use fewer stages or smaller blocks, or let the output reuse the queries' buffer",
    ),
    Meaning(
        "TMA",
        r"(?i)async.?cop|\btma\b|gmem strides|async_load|async_store|tma_load",
        "the copy engine cannot move this slice: it allows at most 5 dimensions of at most 256 elements each, strides "
        "and a first address that are multiples of 16 bytes, and sizes that are multiples of the swizzled tile",
        "copy in smaller pieces, pad the last size to 16 bytes, or use rows in multiples of 8",
    ),
    Meaning(
        "registers",
        r"(?i)must be a positive multiple of 8|setmaxnreg|register",
        "the requested registers do not fit: a thread may have 24 to 240 in multiples of 8, a thread block 65,536",
        "give the compute warpgroups fewer registers, or use fewer rows or columns per warpgroup",
    ),
    Meaning(
        "ptxas",
        r"(?i)\bptxas\b|\bptx\b|nvptx",
        "ptxas refused the assembly that Mosaic made",
        "read ptxas' message: it names the instruction",
    ),
    Meaning(
        "unsupported",
        r"(?i)not ?implemented|unimplemented|unsupported|not supported|failed to legalize",
        "Mosaic has no code for an operation of this kernel",
        "replace the operation that the error names, or use the other lowering semantics",
    ),
    Meaning(
        "layout",
        r"(?i)layout|constraint system|relayout|tiling|swizzle|transform|multiple of 64|wgmma|tile",
        "an array's shape or layout in registers or shared memory does not fit an operation on it",
        "give products 64 rows, columns in multiples of 8 and operands in swizzled tiles; cast where two layouts meet",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Compiled(compiler.Compiled):
    """Result of compiling one program for a GPU, or the error; `program` lacks the kernels' serialised code."""

    kernels: tuple[sass.Report, ...] = ()  # reports on the program's Mosaic kernels, in order of compilation


def compile_for(chip: str, program: Mapping[str, Any], *, limit_s: float = 300.0, **process: Any) -> Compiled:
    """Compile one program for a chip in a separate process; see `Compiler`."""
    with Compiler(chip, **process) as compiler:
        return compiler.compile(program, limit_s=limit_s)


class Compiler(Process):
    """A process that compiles one program after another; a timeout kills it, and the next program restarts it.

    `python` (default: this interpreter) compiles, and `paths` join its import path.
    """

    def __init__(self, chip: str, *, python: str | None = None, paths: Sequence[str] = ()):
        if chip not in TARGETS:
            raise ValueError(f"{chip=} must be one of {', '.join(TARGETS)}")
        self.chip, self._target = chip, TARGETS[chip].read_text()
        super().__init__(worker(python), environment(paths))

    def compile(self, program: Mapping[str, Any], *, limit_s: float = 300.0) -> Compiled:
        """Compile a program from `attention_program` or `factory_program`, in at most `limit_s` seconds."""
        request = {**program, "platform": "cuda", "target": self._target}
        with tempfile.TemporaryDirectory(prefix="tessera-compile-") as folder:
            paths = {"dump": folder, "report": str(Path(folder, sass.COMPILER))}
            reply = self.ask(request | paths, limit_s)
            details = {name: reply[name] for name in ("stage", "said") if name in reply}
            found = Compiled.from_reply(self.chip, reply, partial(explain, **details))
            if found.error is not None:
                return found
            text = Path(folder, "program.hlo").read_text()
            return replace(found, kernels=sass.read(Path(folder)), program=plain(text))


def environment(paths: Sequence[str] = ()) -> dict[str, str]:
    """Build the compiling process's environment; jax on CPU keeps the CUDA plug-in from looking for a driver."""
    source = str(Path(__file__).parents[3])  # the worker runs as a file and imports this package
    found = compiler.environment([*paths, source])
    return {name: value for name, value in found.items() if not name.startswith("MOSAIC_GPU_DUMP")}


def explain(text: str, *, stage: str = "lower", said: str = "") -> CompileError:
    """Classify a compiler's message and find the way out; `said` is the output that ptxas wrote before the message."""
    text = " ".join(text.split())
    missing = r"ptxas and nvdisasm are missing|topology not implemented for cuda|No module named 'jax_cuda13"
    if stage == "compiler" and re.search(missing, text):
        meaning = "the CUDA compiler (jax's CUDA plug-in, ptxas, nvdisasm) is missing"
        return CompileError("program", text, meaning, INSTALL)
    refused = next((line for line in said.splitlines() if re.match(r"ptxas.*(error|fatal)", line)), None)
    return classify(f"{refused} ({text})" if refused else text, MEANINGS)


def plain(program: str) -> str:
    """Strip the kernels' serialised code, which is most of a program's text."""
    return re.sub(r"backend_config=\{kernel_hash.*", "...", program)
