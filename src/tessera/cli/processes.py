"""Flags that make a command run in several processes, which share one model; only process 0 prints."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tessera.cli.flags import Omittable
from tessera.core import interrupt

if TYPE_CHECKING:
    from tessera.core.processes import Place

MOST_WAIT_S = 86_400
"""Maximum of --wait-s: a day, in seconds. The system's sockets refuse timeouts above 24 days."""


@dataclass(frozen=True, kw_only=True)
class ProcessFlags:
    """Flags that make this process one of several."""

    coordinator: Omittable[str] = None
    """Run as one of several processes. The value is the address, HOST:PORT, at which process 0 listens; JAX uses the
    next port."""
    processes: Omittable[int] = None
    """With --coordinator: number of processes."""
    process: Omittable[int] = None
    """With --coordinator: number of this process, from 0; process 0 prints."""
    wait_s: float = 60.0
    """With --coordinator: seconds to wait for the other processes to start."""

    def check_processes(self):
        """Return this process's place among the processes; None without --coordinator."""
        from tessera.core.processes import place

        if not 0 < self.wait_s <= MOST_WAIT_S:
            raise ValueError(f"--wait-s {self.wait_s:g} must be above 0 and at most {MOST_WAIT_S:,}")
        given = {"--processes": self.processes, "--process": self.process}
        if self.coordinator is None:
            if extra := [name for name, value in given.items() if value is not None]:
                raise ValueError(f"{extra[0]} needs --coordinator HOST:PORT, the address of process 0")
            return None
        if lacking := [name for name, value in given.items() if value is None]:
            raise ValueError(f"--coordinator {self.coordinator} needs {lacking[0]} too")
        return place(self.coordinator, self.processes, self.process)

    def run_together(self, run: Callable[[], int], prompts: Any) -> int:
        """Call `run` and return its exit code.

        With --coordinator, first connect to the other processes and check that they have the same model, flags and
        `prompts`; only process 0 prints.
        """
        place = self.check_processes()
        if place is None:
            return run()
        return together(place, facts_of(self, prompts), self.wait_s, run)


def together(place: "Place", facts: Mapping[str, str], wait_s: float, run: Callable[[], int]) -> int:
    """Connect to the other processes, check that their `facts` are equal, call `run` and return its exit code."""
    from tessera.core.processes import FAILED, join

    lifeline, status = join(place, facts, wait_s), FAILED
    try:
        with speaking(place.index == 0):
            found = run()
        status = found  # only now: leaving the block writes the output, which may fail
    except KeyboardInterrupt:
        status = interrupt.STATUS
        raise
    except RuntimeError:  # most likely a collective failed because another process ended
        lifeline.settle()
        raise
    except (ValueError, MemoryError, OSError):
        if place.index:  # most likely an error in all processes, which process 0 should be the first to print
            lifeline.settle()
        raise
    finally:
        lifeline.leave(status)
    return status


def facts_of(command: ProcessFlags, prompts: Any) -> dict[str, str]:
    """Return digests of everything that must be the same in all processes; paths may differ between machines."""
    from importlib.metadata import version

    from tessera.generate import find_plan
    from tessera.models.files.checkpoint import files_digest

    own = {"process", "wait_s", "debug", "model", "plan", "prompt", "option", "file", "stream", "json"}
    plan = find_plan(command.attention, command.plan, str(command.source))
    found = {
        "version of JAX or Tessera": (version("jax"), version("tessera-attention")),
        "model": files_digest(command.source),
        "plan": plan,
        "prompt": prompts,
        "set of flags": {name: value for name, value in asdict(command).items() if name not in own},
    }
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in found.items()}


@contextmanager
def speaking(aloud: bool):
    """Keep what libraries print out of standard output. Unless `aloud`, also discard what this process itself prints on
    standard output and standard error."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # gloo prints each connection to file descriptor 1
    before = sys.stdout, sys.stderr
    with (
        open(kept if aloud else os.dup(nowhere), "w", encoding=sys.stdout.encoding) as out,
        open(os.devnull, "w") as no,
    ):
        sys.stdout, sys.stderr = out, sys.stderr if aloud else no
        try:
            yield
        finally:
            out.flush()
            sys.stdout, sys.stderr = before
            os.dup2(kept if aloud else nowhere, 1)
            os.close(nowhere)
