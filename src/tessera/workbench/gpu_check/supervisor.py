"""The GPU script's parent: keeps one child process at work, and starts another after a hang or a crash.

The child (`worker.py`) notes on the disk what it does and how long that may take. The parent asks jax for no device: a
GPU's fault is the child's alone. It adds to the note how the child ended; the next child makes a record of that. Who
stops it by a signal, and a disk that is full, blame no item: the note is removed.
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
"""The child's exit status after an error that may have broken it; the record is written."""
UNWRITABLE = 74
"""The child's exit status when it could not write; the last that it said is what and why."""
NO_GPU = 2
NOTE_SUFFIX = ".now"
"""The note lies beside the records."""
IDLE_S = 150.0
"""Seconds that the child may spend on starting, and between items."""
OVERTIME_S = 75.0
"""Past the time after which nothing new begins: then the child is ended, and what it did is left for the next run."""
POLL_S = 0.2
SILENT = "it said nothing"
"""As a child ends whose last words found no room either."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""How people and job schedulers end what runs: nobody's fault."""
COMMAND = (sys.executable, "-m", "tessera.workbench.gpu_check.worker")


class Unwritable(OSError):
    """What has to be written cannot be; says what and why. No item's fault."""


@contextlib.contextmanager
def writing(what: Path | str) -> Iterator[None]:
    """The block writes this, and nothing else is done in it.

    Raises:
        Unwritable: it could not.
    """
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{what} cannot be written: {error.strerror or error}") from error


def device() -> str | None:
    """The file name of this GPU's records; None if jax, asked in a process of its own, finds no GPU in time."""
    try:
        done = subprocess.run([*COMMAND], capture_output=True, text=True, timeout=IDLE_S)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.split()[-1] if done.returncode == 0 else None


def supervise(request: dict[str, Any], limit_s: float, paths: Sequence[str] = ()) -> bool:
    """Run the pieces of a request (see worker.py) to their end, or until the time is up.

    Args:
        request: {"pieces", "out", "dry", "again", "since"}.
        limit_s: seconds after which nothing new begins.
        paths: folders added to the child's import path.

    Returns:
        Whether it got through; False if a child ended outside of every item, which another would do as well.

    Raises:
        KeyboardInterrupt: someone stopped it or its child.
        OSError: something could not be written, or no child started.
    """
    note = Path(request["out"]).with_suffix(NOTE_SUFFIX)
    try:
        return _children(request, note, limit_s, paths)
    except (KeyboardInterrupt, OSError):
        note.unlink(missing_ok=True)  # nobody's fault
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
            print(f"error: the child {ended} outside of every item: {said}", file=sys.stderr)
            return False
        end = ended if ended.startswith("hung") else f"crashed: {ended}; {said}"
        with writing(note):
            files.replace_text(note, json.dumps(found | {"end": end}))


def _run_child(request: dict[str, Any], note: Path, most_s: float, paths: Sequence[str]) -> tuple[str, str]:
    """(exit status in words, "late", or "hung after N s"; the last that it said on stderr)."""
    path = os.pathsep.join((*paths, *filter(None, [os.environ.get("PYTHONPATH")])))
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        child = subprocess.Popen(
            [*COMMAND, json.dumps(request)],
            stdin=subprocess.PIPE,  # whose end tells the child that its parent is gone
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # with the compilers it starts: all end together
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
    """Wait for the child's end, for the limit of the item it is at, or for the end of all time.

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
            print("the time is up: what runs is left for the next run", flush=True)
            return "late"


def _kill(child: subprocess.Popen) -> None:
    """End the child and what it started; one that the driver holds is left behind."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(30)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        return


def _read(note: Path) -> dict[str, Any] | None:
    """The note; None while there is none."""
    return json.loads(note.read_text()) if note.exists() else None
