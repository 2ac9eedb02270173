"""One run of the GPU script as its child process sees it: where records go, what is still to be done, the time left.

A record without an error that these very sources made is done. What has none is tried first; what failed is tried again
after everything else, and what hung, crashed or did not fit into memory only once more. While an item runs, a note on
the disk says so and how long it may take: the parent (`supervisor.py`) ends a process that took longer, and the next
process turns the note into the item's error record. A note without an end is of a run that ended whole, parent and all:
a machine that was taken away, or one that this item brings down. The first such end of an item counts for nothing.
"""

import collections
import functools
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.error_handling import MosaicError
from jax._src.pallas.mosaic_gpu.lowering import LoweringError
from jaxlib.mlir import ir

from tessera.core import files
from tessera.workbench import evidence
from tessera.workbench.evidence import How, Record, What
from tessera.workbench.gpu_check.supervisor import IDLE_S, NOTE_SUFFIX, RESTART, Unwritable, writing

REFUSALS = (
    *(ValueError, TypeError, NotImplementedError, AssertionError, LookupError, ImportError, AttributeError),
    *(BufferError, MosaicError, LoweringError, ir.MLIRError),
)
"""Errors that leave the process whole. After XLA's, and those of no kind that is known, a fresh one goes on; after a
plain RuntimeError, by which libraries refuse calls and report CUDA's faults alike, only if the device fails too."""
CRASHED = ("hung after", "crashed", "does not fit")
"""How the error of an item begins that took its process with it."""
FULL = re.compile(r"(?i)^(?!.*shared memory).*(resource_exhausted|out[ _]of[ _]memory)", re.DOTALL)
"""What XLA, CUDA and PyTorch say of main memory that is not there; a block's shared memory is a kernel's fault."""
FULL_DISK = re.compile(r"(?i)no space left on device|disk quota exceeded")
"""What an item says whose compiler, say, finds no room for its files; never the reason to give an item up."""
CUT = "cut short:"
"""How the error of an item begins in whose middle everything ended, the parent too."""
MOST_CRASHES = 2
LIMIT_S = 150.0
"""Of an item, compiling included, if it names no other."""


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
    """Appends records, knows what is to be done, and when to stop.

    Attributes:
        first: whether a little of every piece is wanted before the whole of any: the time may run out.
        retry: whether it is the turn of what failed before.
    """

    def __init__(self, out: Path, *, dry: bool, limit_s: float, again: bool = False, since: int | None = None):
        """since: records of the file that earlier runs made, all if None; with `again` they do not count."""
        self.out, self.dry = out, dry
        self.scale = Scale(rounds=1, tune_rounds=1, flush_bytes=1 << 16) if dry else Scale()
        self._end = time.monotonic() + limit_s
        self.piece, self.first, self.retry = "", False, False
        self._good, self._failed, self._refused, self._cut = set(), set(), set(), set()
        self._crashes: collections.Counter = collections.Counter()
        self._notes: list[dict[str, Any]] = []
        self._numbers = 0
        self._sources = files.sources()
        records = evidence.read(out) if out.exists() else []
        since = len(records) if since is None else since
        for number, record in enumerate(records):
            if number >= since or not again and (dry or record.facts.get("sources") == self._sources):
                self._count(record, now=number >= since)
        self._settle()

    @property
    def seconds_left(self) -> float:
        """Until the limit; pieces begin nothing they cannot end."""
        return self._end - time.monotonic()

    def is_done(self, what: What) -> bool:
        """Whether there is nothing to do for it now, see the module."""
        key = _key(what)
        if key in self._good or key in self._refused or self._crashes[key] >= MOST_CRASHES:
            return True
        return key in self._failed and not self.retry

    def is_good(self, what: What) -> bool:
        """Whether there is a result, and never was an error."""
        return _key(what) in self._good - self._failed

    def _count(self, record: Record, *, now: bool) -> None:
        key = _key(record.what)
        if record.error is None:
            self._good.add(key)
            return
        self._failed.add(key)
        if record.error.startswith(CUT) and key not in self._cut:
            self._cut.add(key)
        elif record.error.startswith((*CRASHED, CUT)):
            self._crashes[key] += 1
        elif now:
            self._refused.add(key)

    def add(self, what: What, samples: Sequence[float], **fields: Any) -> Record:
        """Append a record of samples, or of `error`; a dry run says of itself that nothing was measured."""
        if self.dry:
            how = fields.get("how") or How(iterations=max(len(samples), 1))
            fields["how"] = replace(how, check=f"dry run: {how.check or 'nothing measured'}")
        fields["facts"] = {**fields.get("facts", {}), "sources": self._sources}
        made = evidence.make(what, samples, command=f"scripts/gpu_check.sh {self.piece}", **fields)
        made = replace(made, where=replace(made.where, **state_of_gpu()))
        with writing(self.out):
            evidence.append(self.out, made)
        self._count(made, now=True)
        said = made.error or f"{made.median:.4g} {made.unit}"
        say(f"{self.piece}: {what.kernel} {what.workload} {what.dtype}: {said}"[:220])
        return made

    def fail(self, what: What, error: BaseException) -> None:
        """Append a record of an error; ends this process if it may not be whole any more.

        Raises:
            SystemExit: it is not; the parent starts a fresh one.
        """
        if isinstance(error, REFUSALS) or type(error) is RuntimeError and device_works():
            self.add(what, (), error=plain(error))
            return
        fault = "does not fit" if FULL.search(str(error)) else "crashed"  # a fresh process holds nothing
        fault = "no room on the disk" if FULL_DISK.search(str(error)) else fault
        self.add(what, (), error=f"{fault}: {plain(error)}")
        self._notes = []
        self._write_note()
        raise SystemExit(RESTART)

    def guard(self, what: What, limit_s: float = LIMIT_S) -> "Guard":
        """A context that runs an item: it may take limit_s, and its error becomes a record and goes no further."""
        return Guard(self, what, limit_s)

    def attempt(self, what: What, run: Callable[[], Mapping[str, Any]], limit_s: float = LIMIT_S) -> bool:
        """A record of what `run` returns (the fields of `add`), or of its error; False if there is nothing to do."""
        if self.is_done(what) or self.seconds_left <= 0:
            return False
        with self.guard(what, limit_s):
            fields = dict(run())
            self.add(what, fields.pop("samples"), **fields)
        return True

    @property
    def _note_path(self) -> Path:
        return self.out.with_suffix(NOTE_SUFFIX)

    def _write_note(self) -> None:
        """What runs, for the parent and for the next process."""
        self._numbers += 1
        note = self._notes[-1] if self._notes else {"what": None, "limit_s": IDLE_S}
        note = note | {"number": f"{os.getpid()}.{self._numbers}", "piece": self.piece}
        beside = self._note_path.with_name(f".{self._note_path.name}")
        with writing(self._note_path):
            self._note_path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(note))
            os.replace(beside, self._note_path)  # whole whenever it is read; a lost machine costs a note, no sync

    def begin(self, what: What, limit_s: float) -> None:
        """Note that an item runs; one within another is blamed before it."""
        self._notes.append({"what": asdict(what), "limit_s": limit_s})
        self._write_note()

    def end(self) -> None:
        """Note that the last item noted does not run any more."""
        self._notes = self._notes[:-1]
        self._write_note()

    def _settle(self) -> None:
        """Turn the note of a process that did not end by itself into a record."""
        if self._note_path.exists():
            note = json.loads(self._note_path.read_text())
            if note.get("what"):
                self.piece = note["piece"]
                error = note.get("end") or f"{CUT} everything ended in the middle of it"
                self.add(What(**note["what"]), (), error=plain(error))
        self._write_note()


class Guard:
    """See Session.guard. A class, as no clause may catch every error: this one hides none, all become records."""

    def __init__(self, session: Session, what: What, limit_s: float):
        self.session, self.what, self.limit_s = session, what, limit_s
        self.failed = False

    def __enter__(self) -> "Guard":
        self.session.begin(self.what, self.limit_s)
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> bool:
        if isinstance(error, Unwritable):
            return False
        if isinstance(error, Exception):
            self.failed = True
            self.session.fail(self.what, error)
        self.session.end()
        return self.failed


def say(text: str) -> None:
    """Print a line."""
    with writing("standard output"):
        print(text, flush=True)


def _key(what: What) -> tuple[str, str, str, str]:
    return what.op, what.kernel, what.workload, what.dtype


def plain(error: BaseException | str) -> str:
    """An error's first lines without names of this machine."""
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    text = " ".join(said.split())
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


def device_works() -> bool:
    """Whether the device still computes: no fault of CUDA's is forgotten before its process ends."""
    try:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(np.zeros(8)))
    except RuntimeError:
        return False
    return True


def until_late(session: Session, items: Sequence[Any], seconds: float) -> Iterator[Any]:
    """The items in order while there are this many seconds left; says so when some are left for the next run."""
    for number, item in enumerate(items):
        if session.seconds_left < seconds:
            say(f"{session.piece}: {len(items) - number} left for the next run: the time is up")
            return
        yield item
