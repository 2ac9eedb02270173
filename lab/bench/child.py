"""Run code in a fresh interpreter and measure its peak memory."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Child:
    """Result of a child process: exit code, standard output and error, wall seconds, peak resident bytes.

    `peak_bytes` is None if the child died before reporting it.
    """

    status: int
    stdout: str
    stderr: str
    wall_s: float
    peak_bytes: int | None


# wait4's ru_maxrss is unusable: on Linux it includes the parent's peak, carried over fork and exec.
_WEIGH = """
import atexit, os
def _weigh(handle={handle}):
    try:
        with open("/proc/self/status") as status:
            peak = int(status.read().split("VmHWM:")[1].split()[0]) * 1024
    except FileNotFoundError:
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.write(handle, str(peak).encode())
atexit.register(_weigh)
"""


def run_child(code: str, *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 600.0) -> Child:
    """Run Python code in a fresh interpreter of this environment and measure its peak resident set (this child only).

    Raises:
        TimeoutError: the child ran past `timeout_s` and was killed.
    """
    receive, send = os.pipe()
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _WEIGH.format(handle=send) + code, *args],
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {})},
            pass_fds=(send,),
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        os.close(receive)
        raise TimeoutError(f"{timeout_s=} was not enough for the child process: raise it or run less") from error
    finally:
        os.close(send)
    wall_s = time.perf_counter() - start
    with os.fdopen(receive) as pipe:
        weight = pipe.read()
    return Child(
        status=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
        wall_s=wall_s,
        peak_bytes=int(weight) if weight else None,
    )
