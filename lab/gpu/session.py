"""State of one run of the GPU script in its child process: where records go, which items and how much time are left.

The script runs in pieces (env, correct, time, tune), each of which consists of items. An item is one measurement.

An item is done once the current sources have made a record of it without an error. Items without a record run first.
Failed items run again after everything else; items that hung, crashed or did not fit into memory run only once more.
While an item runs, a note on disk names it and its time limit. The parent (`supervisor.py`) kills a process that
exceeds the limit, and the next process turns the note into the item's error record. If the note does not say how the
process ended, parent and child died together: either the machine was taken away, or the item crashed the machine. The
first time that this happens to an item does not count as a crash.
"""

import collections
import functools
import json
import os
import re
import subprocess
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

from lab.gpu.supervisor import IDLE_S, NOTE_SUFFIX, RESTART, Unwritable, writing
from tessera.core import files
from tessera.measure import evidence
from tessera.measure.errors import plain
from tessera.measure.evidence import How, Record, What

REFUSALS = (
    *(ValueError, TypeError, NotImplementedError, AssertionError, LookupError, ImportError, AttributeError),
    *(BufferError, MosaicError, LoweringError, ir.MLIRError),
)
"""Errors after which the process can continue.

A plain RuntimeError also counts if the device still works, since libraries raise it for refused calls as well as for
CUDA faults. After any other error, a fresh process takes over.
"""
CRASHED = ("hung after", "crashed", "does not fit")
"""Prefixes of the error text of an item that ended its process."""
FULL = re.compile(r"(?i)^(?!.*shared memory).*(resource_exhausted|out[ _]of[ _]memory)", re.DOTALL)
"""Matches errors of XLA, CUDA and PyTorch about exhausted GPU memory. Too little shared memory is a kernel's fault, so
errors about it do not match."""
FULL_DISK = re.compile(r"(?i)no space left on device|disk quota exceeded")
"""Matches errors about a full disk, for example from a compiler. An item with this error does not count as crashed."""
CUT = "cut short:"
"""Prefix of the error text of an item during which child and parent both died."""
MOST_CRASHES = 2
LIMIT_S = 150.0
"""Seconds per item, compilation included, if the item names no other limit."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Size of a run.

    Attributes:
        rounds: samples per contender.
        tune_rounds: samples per configuration.
        flush_bytes: bytes written before each sample, so that nothing is left in the L2 cache.
    """

    rounds: int = 21
    tune_rounds: int = 7
    flush_bytes: int = 256 << 20


class Session:
    """One process's run of the script. It appends records, and knows what is left to do and when to stop.

    Attributes:
        first: whether to run only the first items of each piece, in case time runs out before the pieces are complete.
        retry: whether to run the items that failed before.
    """

    def __init__(self, out: Path, *, dry: bool, limit_s: float, again: bool = False, since: int | None = None):
        """Read which items are done from the file `out`, if it exists.

        The first `since` records (None: all) come from earlier runs. With `again`, they are ignored.
        """
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
        """Seconds until the limit, after which no item starts."""
        return self._end - time.monotonic()

    def is_done(self, what: What) -> bool:
        """Return whether to skip the item now: it is done, failed in this run, crashed twice, or waits for `retry`."""
        key = _key(what)
        if key in self._good or key in self._refused or self._crashes[key] >= MOST_CRASHES:
            return True
        return key in self._failed and not self.retry

    def is_good(self, what: What) -> bool:
        """Return whether the item has a result and never had an error."""
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
        """Append a record of samples or, with the field `error`, of a failure. A dry run marks its records as dry."""
        if self.dry:
            how = fields.get("how") or How(iterations=max(len(samples), 1))
            fields["how"] = replace(how, check=f"dry run: {how.check or 'nothing measured'}")
        fields["facts"] = {**fields.get("facts", {}), "sources": self._sources}
        made = evidence.make(what, samples, command=f"lab/gpu/check.sh {self.piece}", **fields)
        made = replace(made, where=replace(made.where, **state_of_gpu()))
        with writing(self.out):
            evidence.append(self.out, made)
        self._count(made, now=True)
        said = made.error or f"{made.median:.4g} {made.unit}"
        say(f"{self.piece}: {what.kernel} {what.workload} {what.dtype}: {said}"[:220])
        return made

    def fail(self, what: What, error: BaseException) -> None:
        """Append a record of an error, then end this process if it may be damaged.

        Raises:
            SystemExit: the process may be damaged; the parent starts a fresh one.
        """
        if isinstance(error, REFUSALS) or type(error) is RuntimeError and device_works():
            self.add(what, (), error=plain(error, whole=True))
            return
        fault = "does not fit" if FULL.search(str(error)) else "crashed"  # the retry starts with free memory
        fault = "no room on the disk" if FULL_DISK.search(str(error)) else fault
        self.add(what, (), error=f"{fault}: {plain(error, whole=True)}")
        self._notes = []
        self._write_note()
        raise SystemExit(RESTART)

    def guard(self, what: What, limit_s: float = LIMIT_S) -> "Guard":
        """Return a context that runs an item for at most `limit_s` seconds and turns its error into a record."""
        return Guard(self, what, limit_s)

    def attempt(self, what: What, run: Callable[[], Mapping[str, Any]], limit_s: float = LIMIT_S) -> bool:
        """Record what `run` returns (the fields of `add`), or its error; return False if the item is skipped."""
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
        """Write the note on disk, which tells the parent and the next process which item is running."""
        self._numbers += 1
        note = self._notes[-1] if self._notes else {"what": None, "limit_s": IDLE_S}
        note = note | {"number": f"{os.getpid()}.{self._numbers}", "piece": self.piece}
        beside = self._note_path.with_name(f".{self._note_path.name}")
        with writing(self._note_path):
            self._note_path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(note))
            os.replace(beside, self._note_path)  # atomic for readers; no sync, since a lost machine costs only a note

    def begin(self, what: What, limit_s: float) -> None:
        """Write to the note on disk that this item is running; if items are nested, the note names the innermost."""
        self._notes.append({"what": asdict(what), "limit_s": limit_s})
        self._write_note()

    def end(self) -> None:
        """Write to the note on disk that the innermost item has ended; the note then names the item around it."""
        self._notes = self._notes[:-1]
        self._write_note()

    def _settle(self) -> None:
        """Turn the note that a killed process left into an error record."""
        if self._note_path.exists():
            note = json.loads(self._note_path.read_text())
            if note.get("what"):
                self.piece = note["piece"]
                error = note.get("end") or f"{CUT} the child process and its parent both ended while it ran"
                self.add(What(**note["what"]), (), error=plain(error, whole=True))
        self._write_note()


class Guard:
    """Context of `Session.guard`: passes every Exception raised in its block to `Session.fail`, except Unwritable.

    It is a class with `__exit__`, because the linter forbids the clause `except Exception`.
    """

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
    with writing("standard output"):
        print(text, flush=True)


def _key(what: What) -> tuple[str, str, str, str]:
    return what.op, what.kernel, what.workload, what.dtype


@functools.cache
def state_of_gpu() -> dict[str, str]:
    """Return the driver and clocks that nvidia-smi reports; empty if nvidia-smi is absent or fails."""
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
    """Return whether jax runs on a GPU here."""
    return jax.default_backend() == "gpu"


def device_works() -> bool:
    """Return whether the device still computes. CUDA errors are sticky until the process exits."""
    try:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(np.zeros(8)))
    except RuntimeError:
        return False
    return True


def until_late(session: Session, items: Sequence[Any], seconds: float) -> Iterator[Any]:
    """Yield the items while at least `seconds` are left; print how many are left for the next run."""
    for number, item in enumerate(items):
        if session.seconds_left < seconds:
            say(f"{session.piece}: {len(items) - number} left for the next run: out of time")
            return
        yield item
