"""One run of the GPU script: where records go, what is done already, how much time is left."""

import functools
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax._src.pallas.mosaic.error_handling import MosaicError
from jax._src.pallas.mosaic_gpu.lowering import LoweringError

from tessera import evidence
from tessera.evidence import How, Record, What

ERRORS = (
    *(RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, LookupError, ImportError, OSError),
    *(MosaicError, LoweringError),
)
"""What a kernel, a compiler or a peer may fail with; the failure becomes a record."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is.

    Attributes:
        rounds: samples of a contender.
        tune_rounds: samples of a configuration.
        flush_bytes: written before each sample, so that nothing is left in the L2 cache.
    """

    rounds: int = 21
    tune_rounds: int = 7
    flush_bytes: int = 256 << 20


class Session:
    """Appends records, skips what is done, and knows when to stop."""

    def __init__(self, out: Path, *, dry: bool, limit_s: float, again: bool = False):
        self.out, self.dry = out, dry
        self.scale = Scale(rounds=2, tune_rounds=1, flush_bytes=1 << 16) if dry else Scale()
        self._end = time.monotonic() + limit_s
        self.piece = ""
        self.failed = 0
        self._done = set() if again else finished(out, any_commit=dry)

    @property
    def seconds_left(self) -> float:
        """Until the limit; pieces begin nothing they cannot end."""
        return self._end - time.monotonic()

    def is_done(self, what: What) -> bool:
        """Whether the file holds this already, made by this commit."""
        return (what.op, what.kernel, what.workload, what.dtype) in self._done

    def add(self, what: What, samples: Sequence[float], **fields: Any) -> Record:
        """Append a record of samples, or of `error`; a dry run says of itself that nothing was measured."""
        if self.dry:
            how = fields.get("how") or How(iterations=max(len(samples), 1))
            fields["how"] = replace(how, check=f"dry run: {how.check or 'nothing measured'}")
        made = evidence.make(what, samples, command=f"scripts/gpu_check.sh {self.piece}", **fields)
        made = replace(made, where=replace(made.where, **state_of_gpu()))
        evidence.append(self.out, made)
        self._done.add((what.op, what.kernel, what.workload, what.dtype))
        self.failed += made.error is not None
        said = made.error or f"{made.median:.4g} {made.unit}"
        print(f"{self.piece}: {what.kernel} {what.workload} {what.dtype}: {said}"[:220], flush=True)
        return made

    def attempt(self, what: What, run: Callable[[], Mapping[str, Any]]) -> Record | None:
        """A record of what `run` returns (the fields of `add`), or of its error; None if it was done before."""
        if self.is_done(what):
            return None
        try:
            fields = run()
        except ERRORS as error:
            return self.add(what, (), error=plain(error))
        return self.add(what, fields.pop("samples"), **fields)


def finished(path: Path, *, any_commit: bool = False) -> set[tuple[str, str, str, str]]:
    """(op, kernel, workload, dtype) of the file's records that this commit made, or no known one."""
    if not path.exists():
        return set()
    commits = (None, evidence.code().commit)
    return {tuple(r.key[:4]) for r in evidence.read(path) if any_commit or r.code.commit in commits}


def plain(error: BaseException) -> str:
    """An error's first lines without names of this machine."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for name in (os.getcwd(), os.path.expanduser("~"), tempfile.gettempdir(), platform.node()):
        text = text.replace(name, "...") if len(name) > 3 else text
    return text[:600]


@functools.cache
def state_of_gpu() -> dict[str, str]:
    """Driver and clocks as nvidia-smi tells them; empty where there is none."""
    names = "driver_version,clocks.max.sm,clocks.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    driver, most, now, memory, power = (part.strip() for part in done.stdout.splitlines()[0].split(","))
    return {"driver": driver, "clocks": f"SM {now} of {most}, memory {memory}, power limit {power}"}


def on_gpu() -> bool:
    """Whether jax runs on a GPU here."""
    return jax.default_backend() == "gpu"


def until_late(session: Session, items: Sequence[Any], seconds: float) -> Iterator[Any]:
    """The items in order while there are this many seconds left; says so when some are left for the next run."""
    for number, item in enumerate(items):
        if session.seconds_left < seconds:
            print(f"{session.piece}: {len(items) - number} left for the next run: the time is up", flush=True)
            return
        yield item
