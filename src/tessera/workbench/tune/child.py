"""The tuner's side of the child process: ask, wait no longer than the limit, and start a new one if it is gone."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

START_S = 300.0
"""A worker that has not said that it is ready by then never will."""


class Child:
    """One worker at a time, started when it is needed; close() or leaving the context ends it."""

    def __init__(self, *, limit_s: float, memory_bytes: int, paths: Sequence[str] = ()):
        self.limit_s, self.memory_bytes, self.paths = limit_s, memory_bytes, tuple(paths)
        self._process: subprocess.Popen | None = None
        self._lines: queue.SimpleQueue = queue.SimpleQueue()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer; its end or its silence past the limit is an answer with an error."""
        if self._process is None:
            self._start()
            try:
                ready = self._lines.get(timeout=START_S)  # what follows is the candidate's own time
            except queue.Empty:
                self.close()
                return _failure(f"the worker was not ready after {START_S:g} s")
            if ready is None:
                return self._ended()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        try:
            line = self._lines.get(timeout=self.limit_s)
        except queue.Empty:
            self.close()
            return _failure(f"killed after {self.limit_s:g} s without an answer")
        return self._ended() if line is None else json.loads(line)

    def close(self) -> None:
        """Kill the worker, if one runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process = None

    def _start(self) -> None:
        path = os.pathsep.join((*self.paths, *filter(None, [os.environ.get("PYTHONPATH")])))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tessera.workbench.tune.worker", str(self.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is the tuner's to handle
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()

    def _ended(self) -> dict[str, Any]:
        status = self._process.wait()
        self.close()
        return _failure(f"the worker died with status {status}: a crash, or more than its memory")

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _pump(stream, lines: queue.SimpleQueue) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _failure(said: str) -> dict[str, Any]:
    return {"samples": [], "compile_s": 0.0, "error": said}
