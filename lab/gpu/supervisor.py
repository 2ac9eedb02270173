"""The GPU script's parent process: keeps one child process at work, and starts another after a hang or a crash.

The child (`worker.py`) writes a note to disk that names the item (one measurement) that it runs, and the item's time
limit. The parent requests no device from jax, so a GPU fault hits only the child. After a hang or a crash, the parent
adds to the note how the child ended, and the next child turns the note into the item's error record. After a stop
signal or on a full disk, the parent removes the note, since no item is to blame.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tessera.core import files

RESTART = 75
"""Exit code of a child after an error that may have damaged its process. The child has already recorded the error."""
UNWRITABLE = 74
"""Exit code of a child that could not write a file. The last line of its stderr names the file and the reason."""
NO_GPU = 2
NOTE_SUFFIX = ".now"
"""Suffix of the note's file name, in place of the record file's suffix."""
IDLE_S = 150.0
"""Seconds that the child may spend on starting, or between two items."""
OVERTIME_S = 75.0
"""Seconds past the run's limit after which the parent ends the child and leaves the child's item for the next run."""
POLL_S = 0.2
SILENT = "it said nothing"
"""Text used in place of a child's error message if its stderr is empty, for example because the disk is full."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which people and job schedulers stop a run. The item that was running is not to blame."""
COMMAND = (sys.executable, "-m", "lab.gpu.worker")


class Unwritable(OSError):
    """A file or stream cannot be written; the message says which and why. The running item is not to blame."""


@contextlib.contextmanager
def writing(what: Path | str) -> Iterator[None]:
    """Raise an OSError of the block as Unwritable. The block must do nothing but write `what`.

    Raises:
        Unwritable: the block could not write.
    """
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{what} cannot be written: {error.strerror or error}") from error


def device() -> str | None:
    """Return the slug of this GPU, for the name of its file of records; None if a child finds no GPU within IDLE_S."""
    try:
        done = subprocess.run([*COMMAND], capture_output=True, text=True, timeout=IDLE_S)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.split()[-1] if done.returncode == 0 else None


def supervise(request: dict[str, Any], limit_s: float, paths: Sequence[str] = ()) -> bool:
    """Run the pieces of a request (see worker.py) to their end, or until time runs out.

    Args:
        request: {"pieces", "out", "dry", "again", "since"}.
        limit_s: seconds after which nothing new begins.
        paths: folders added to the child's import path.

    Returns:
        False if a child ended while no item ran, since the next child would, too. Otherwise True, even if time ran out.

    Raises:
        KeyboardInterrupt: someone stopped the run or its child.
        OSError: a file could not be written, or no child started.
    """
    note = Path(request["out"]).with_suffix(NOTE_SUFFIX)
    try:
        return _children(request, note, limit_s, paths)
    except (KeyboardInterrupt, OSError):
        note.unlink(missing_ok=True)  # no item is at fault
        raise


def _children(request: dict[str, Any], note: Path, limit_s: float, paths: Sequence[str]) -> bool:
    begun = time.monotonic()
    while True:
        left = limit_s - (time.monotonic() - begun)
        ended, said = _run_child({**request, "limit_s": left}, note, left + OVERTIME_S, paths)
        if ended in ("0", "late"):
            note.unlink(missing_ok=True)
            return True
        if ended == str(RESTART):
            continue
        if ended == str(UNWRITABLE):
            raise Unwritable(f"{request['out']} cannot be written" if said == SILENT else said.removeprefix("error: "))
        found = _read(note) or {}
        if not found.get("what") or "end" in found:
            print(f"error: the child process {ended} while no item ran: {said}", file=sys.stderr)
            return False
        end = ended if ended.startswith("hung") else f"crashed: {ended}; {said}"
        with writing(note):
            files.replace_text(note, json.dumps(found | {"end": end}))


def _run_child(request: dict[str, Any], note: Path, most_s: float, paths: Sequence[str]) -> tuple[str, str]:
    """Run a child; return how it ended (see `_watch`) and the last error line of its stderr."""
    path = os.pathsep.join((*paths, *filter(None, [os.environ.get("PYTHONPATH")])))
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        child = subprocess.Popen(
            [*COMMAND, json.dumps(request)],
            stdin=subprocess.PIPE,  # closes with the parent, which ends the child
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # so that _kill also ends the compilers that it starts
        )
        try:
            ended = _watch(child, note, most_s)
        finally:
            _kill(child)
            child.stdin.close()
        stderr.seek(0)
        lines = [line.strip() for line in stderr if line.strip()]
    telling = [line for line in lines if "rror" in line or "ailed" in line] or lines or [SILENT]
    return ended, telling[-1][:300]


def _watch(child: subprocess.Popen, note: Path, most_s: float) -> str:
    """Wait until the child ends, its item exceeds the item's limit, or the run exceeds `most_s` seconds.

    Returns the exit code 0, RESTART or UNWRITABLE as text; "ended with status N"; "hung after N s"; or "late".

    Raises:
        KeyboardInterrupt: someone stopped the child.
    """
    begun = since = time.monotonic()
    number, limit_s = (_read(note) or {}).get("number"), IDLE_S
    while True:
        try:
            status = child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        else:
            if -status in STOPS:
                raise KeyboardInterrupt
            return str(status) if status in (0, RESTART, UNWRITABLE) else f"ended with status {status}"
        found = _read(note)
        if found is not None and found.get("number") != number:
            number, limit_s, since = found.get("number"), found["limit_s"], now
        if now - since > limit_s:
            return f"hung after {limit_s:g} s"
        if now - begun > most_s:
            print("out of time: the item now running is left for the next run", flush=True)
            return "late"


def _kill(child: subprocess.Popen) -> None:
    """Kill the child and every process that it started. Wait 30 s at most, since the driver may keep a child alive."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(30)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        return


def _read(note: Path) -> dict[str, Any] | None:
    """Return the contents of the note on disk; None if the file does not exist."""
    return json.loads(note.read_text()) if note.exists() else None
