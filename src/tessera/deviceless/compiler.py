"""The code that the TPU and GPU compilers share: the worker process, the requests, the result and the errors.

A kernel may crash the compiler or keep it busy forever, so a failure is returned as a result, not raised.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.core.child import Ended, Worker

WORKER = Path(__file__).with_name("worker.py")

INSTALL = "install the extra: pip install 'tessera-attention[deviceless]'"

LONGEST_TEXT = 500
"""Maximum characters to keep of a compiler's message. The rest of a long message usually lists allocations."""


def attention_program(
    kernel: str, spec: AttentionSpec, shapes: Shapes, config: Mapping[str, Any] | None = None, **variant: Any
) -> dict[str, Any]:
    """Build the request to compile `programs.attention_call` with these arguments; `variant` holds the others."""
    call = {"kernel": kernel, "spec": asdict(spec), "shapes": shapes._asdict(), "config": config}
    return factory_program("tessera.deviceless.programs:attention_call", **call, **variant)


def factory_program(factory: str, **kwargs: Any) -> dict[str, Any]:
    """Build the request to compile the program that the factory "module:function" returns for `kwargs`."""
    return {"factory": factory, "kwargs": kwargs}


class Process(Worker):
    """A process that compiles programs: a crash or a timeout becomes a reply, not an exception."""

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the worker's reply, or {"compiled": False, "error", "stage"} if it gives none.

        The stage is "time" if the worker was killed after `limit_s` seconds, and "compile" if the request crashed it. A
        worker that cannot start raises ValueError.
        """
        try:
            return super().ask(request, limit_s)
        except Ended as end:
            if end.late:
                return {"compiled": False, "stage": "time", "error": "ended", "compile_s": limit_s}
            if end.status > 0 and not end.answered:  # a status below 0 is a signal: a compiler crash, which is a result
                raise ValueError(f"the compiler did not start: {end.said}") from None
            return {
                "compiled": False,
                "stage": "compile",
                "error": f"the compiler died with status {end.status}: {end.said}",
            }


def worker(python: str | None = None) -> list[str]:
    return [python or sys.executable, "-P", str(WORKER)]


def environment(paths: Sequence[str]) -> dict[str, str]:
    found = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    found["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a program taken from the cache leaves no schedule and no report
    if paths:
        found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


TIME = "time"
"""`CompileError.kind` when the compiler was stopped at its time limit: whether the program compiles is unknown."""


class Meaning(NamedTuple):
    """Messages of a compiler that match `pattern` have this meaning and this way out."""

    kind: str
    pattern: str
    meaning: str
    way_out: str


class CompileError(NamedTuple):
    """A compiler's refusal, its meaning and the way out.

    `kind` is "time", "program" or a kind of the compiler's `MEANINGS`, such as "VMEM" or "registers".
    """

    kind: str
    text: str
    meaning: str
    way_out: str

    def __str__(self) -> str:
        said = f". The compiler: {self.text}" if self.text else ""
        return f"{self.kind}: {self.meaning}; {self.way_out}{said}"


def classify(text: str, meanings: Sequence[Meaning]) -> CompileError:
    """Return the error with the first meaning whose pattern matches a compiler's message, or of kind "program"."""
    text = text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ..."
    for kind, pattern, meaning, way_out in meanings:
        if re.search(pattern, text):
            return CompileError(kind, text, meaning, way_out)
    return CompileError(
        "program", text, "the error is in the program, not in a limit of the chip", "read the compiler's message"
    )


def out_of_time(limit_s: float) -> CompileError:
    meaning = f"the compiler was stopped at --limit-s {limit_s:g}; with more time, this call may compile"
    return CompileError(TIME, "", meaning, "raise --limit-s, or use smaller or fewer unrolled blocks")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Result of compiling one program, or the error."""

    chip: str  # short name ("v6e")
    error: CompileError | None  # None if it compiled
    compile_s: float  # seconds in the compiler; after a failure, seconds of the whole attempt
    memory: Mapping[str, int] = MappingProxyType({})  # bytes on one device: argument, output, temp, alias, ...
    about: Mapping[str, Any] = MappingProxyType({})  # what else the program's factory returned, such as "settings"
    program: str = ""  # the compiled program's text

    @classmethod
    def from_reply(cls, chip: str, reply: Mapping[str, Any], explain: Callable[[str], CompileError]) -> Self:
        if reply["compiled"]:
            found = {name: reply[name] for name in ("compile_s", "memory", "about")}
            return cls(chip=chip, error=None, **found)
        text, took = reply["error"], reply.get("compile_s", 0.0)
        error = out_of_time(took) if reply["stage"] == "time" else explain(text)
        return cls(chip=chip, error=error, compile_s=took)

    @property
    def timed_out(self) -> bool:
        return self.error is not None and self.error.kind == TIME

    @property
    def settings(self) -> str | None:
        """Block sizes of the compiled kernel, as text; None if the program's factory states none."""
        return self.about.get("settings")

    @property
    def hbm_bytes(self) -> int:
        """Bytes of main memory that the program holds on one device while it runs."""
        m = self.memory
        return m["argument"] + m["output"] + m["temp"] + m["generated_code"] - m["alias"] if m else 0
