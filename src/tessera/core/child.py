"""A compiler in a process of its own, asked for one thing after another: it may hang or die, and the asker goes on."""

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


class Process:
    """A worker that reads a JSON request a line and writes a JSON reply a line; one that ends is started anew.

    Args:
        command: what starts it.
        environment: its whole environment.
        niceness: added to this process's own.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], niceness: int = 0):
        self._command = ["nice", "-n", str(niceness), *command] if niceness else [*command]
        self._environment = environment
        self._process: subprocess.Popen | None = None

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply; if there is none, {"compiled": False, "error", "stage"}.

        The stage is "time" where the worker was ended after `limit_s` seconds, else "compile": it died of the request.

        Raises:
            ValueError: the worker ended, by no signal, before it ever answered: it cannot be started.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it died after its last answer: no fault of this request
        if self._process is None:
            self._answered = False
            pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self._process = subprocess.Popen(
                self._command, **pipe, env=self._environment, text=True, start_new_session=True
            )
            self._errors = Tail(self._process.stderr)
        late = threading.Event()
        timer = threading.Timer(limit_s, self._end, [late])
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            self._answered = True
            if late.is_set():  # the answer and the end came together
                self.close()
            return json.loads(line)
        status = self.close()
        if late.is_set():
            return {"compiled": False, "stage": "time", "error": "ended", "compile_s": limit_s}
        said = self._errors.text()
        if status > 0 and not self._answered:  # below 0 a signal ended it: the compiler itself died, which is a result
            raise ValueError(f"the compiler did not start: {said}")
        return {"compiled": False, "stage": "compile", "error": f"it died with status {status}: {said}"}

    def _end(self, late: threading.Event) -> None:
        late.set()
        os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> int | None:
        """End the process; its exit status."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        try:
            process.stdin.close()
        except BrokenPipeError:  # it died with a request half read
            pass
        try:
            status = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        self._errors.join()
        process.stdout.close()
        process.stderr.close()
        return status

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is not None and self._process is not None:  # nobody waits for its answer
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()


class Tail(threading.Thread):
    """Reads a stream to its end, so that its writer never waits, and keeps the last lines."""

    def __init__(self, stream):
        super().__init__(daemon=True)
        self._stream, self._lines = stream, deque(maxlen=3)
        self.start()

    def run(self) -> None:
        self._lines.extend(line.strip() for line in self._stream)

    def text(self) -> str:
        """The last three lines."""
        return " ".join(self._lines)
