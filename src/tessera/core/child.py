"""A worker process that answers requests. If it hangs, crashes or runs out of memory, the caller survives."""

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tessera.core import interrupt


class Ended(RuntimeError):
    """Error: a worker ended without answering.

    `status` is its exit code, or minus the number of the signal that ended it; `said` is the end of its standard error.
    It was killed at its time limit (`late`), ended by its own limit on processor time (`spent`), or had answered an
    earlier request (`answered`).
    """

    def __init__(self, status: int, late: bool, answered: bool, said: str):
        super().__init__(f"the worker ended with exit status {status}: {said}")
        self.spent = status == -signal.SIGPROF
        self.status, self.late, self.answered, self.said = status, late, answered, said


class Worker:
    """Worker process that reads JSON requests and writes JSON replies, one per line. Bytes may follow a request.

    The process starts when the first request is sent. If it has ended, the next request starts it again. It must write
    a line within `ready_s` seconds to say that it is ready (None: it writes no such line), and exit within `exit_s`
    seconds after its input ends, or `close` kills it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        niceness: int = 0,
        ready_s: float | None = None,
        exit_s: float = 5.0,
    ):
        self._command = ["nice", "-n", str(niceness), *command] if niceness else [*command]
        self._environment, self._ready_s, self._exit_s = environment, ready_s, exit_s
        self._process: subprocess.Popen | None = None

    def ask(self, request: Mapping[str, Any], limit_s: float | None = None, data: bytes = b"") -> dict[str, Any]:
        """Send a request, followed by `data`, and return the reply; kill a worker that takes over `limit_s` seconds.

        Raise Ended if the worker ended without a reply. The next request starts another worker.
        """
        self.start()  # before the request: start-up does not count towards limit_s
        line = self._read(limit_s, json.dumps(request).encode() + b"\n" + data)
        self._answered = True
        return json.loads(line)

    def ask_again(self, request: Mapping[str, Any], limit_s: float | None = None, data: bytes = b"") -> dict[str, Any]:
        """Send a request as `ask` does; if the worker is killed from outside, send it once more, to a new worker.

        When memory runs out, the system kills processes. Only a request that ends two workers so is itself the cause. A
        request that crashes the worker, or exceeds a time limit, is not sent again.
        """
        try:
            return self.ask(request, limit_s, data)
        except Ended as ended:
            if ended.late or -ended.status not in (signal.SIGKILL, signal.SIGTERM):
                raise
        return self.ask(request, limit_s, data)

    def start(self) -> None:
        """Start the worker, unless it is running, and wait until it is ready; raise Ended if it is not in `ready_s`."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # the worker died between its last reply and this request
        if self._process is None:
            self._start()
            if self._ready_s is not None:
                self._read(self._ready_s)

    def _start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # In a new session, Ctrl-C reaches only the caller, and killing the group kills the worker's children too.
        self._process = subprocess.Popen(
            self._command, **pipes, env=self._environment, text=True, start_new_session=True
        )
        interrupt.end_with_us(self._process.pid)
        self._answered, self._errors = False, Tail(self._process.stderr)

    def _read(self, limit_s: float | None, sent: bytes = b"") -> str:
        """Send bytes and return the next line of output."""
        late, timer = threading.Event(), None
        if limit_s is not None:
            timer = threading.Timer(limit_s, self._kill, [late])
            timer.start()
        try:
            with interrupt.at_once():
                with suppress(BrokenPipeError):  # the end of the output says how the worker ended
                    self._process.stdin.buffer.write(sent)
                    self._process.stdin.flush()
                line = self._process.stdout.readline()
        finally:
            if timer is not None:
                timer.cancel()
        whole = line.endswith("\n")  # a worker that is killed may leave half a line
        if whole and not late.is_set():
            return line
        answered = self._answered
        status = self.close()
        if whole:  # the reply arrived just at the limit
            return line
        raise Ended(status, late.is_set(), answered, self._errors.text())

    def _kill(self, late: threading.Event) -> None:
        late.set()
        if (process := self._process) is not None:  # None if it ended just at the limit
            os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> int | None:
        """Close the worker's input, and return its exit code; None if it is not running."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        with suppress(BrokenPipeError):  # the worker died while it was reading a request
            process.stdin.close()
        try:
            status = process.wait(timeout=self._exit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        interrupt.ended(process.pid)
        self._errors.join()
        process.stdout.close()
        process.stderr.close()
        return status

    def __enter__(self):
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is not None and self._process is not None:  # the caller no longer wants the answer
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()


class Tail(threading.Thread):
    """Thread that drains a stream, so that the stream's writer never blocks, and keeps the last three lines."""

    def __init__(self, stream):
        super().__init__(daemon=True)
        self._stream, self._lines = stream, deque(maxlen=3)
        self.start()

    def run(self) -> None:
        self._lines.extend(line.strip() for line in self._stream)

    def text(self) -> str:
        return " ".join(self._lines)
