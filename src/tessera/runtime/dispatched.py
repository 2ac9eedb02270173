"""The programs that a lane has dispatched and whose results the host has not taken yet, and their measured seconds.

The device runs programs one after the other, in the order of dispatch. The host knows when a program ended only if it
waited for it. A program that ended before the host looked is measured together with the next one that the host waited
for. If there is none, its seconds are at most those until the host looked.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from tessera.runtime.choosing import Pending

EXACT = 0.8
"""Minimum of the shortest / the longest time that programs may have taken, for their seconds to count as known."""


class Due(NamedTuple):
    """The result of a dispatched program, which the device may still be computing.

    Attributes:
        step: the step at whose end the host waits for it, if the device runs ahead of the host.
        began_s: time just before the dispatch.
        prefill, decode: what the program computes, as in `Costs.step_s`; both are empty if that is negligible.
    """

    step: int
    found: Pending | jax.Array
    began_s: float
    prefill: Sequence[tuple[int, int]] = ()
    decode: Sequence[int] = ()

    @property
    def array(self) -> jax.Array:
        return self.found.choice.token if isinstance(self.found, Pending) else self.found

    @property
    def ready(self) -> bool:
        """Whether the program has ended."""
        return self.array.is_ready()

    def wait(self) -> None:
        """Wait until the program has ended."""
        self.array.block_until_ready()


class Dispatched:
    """A queue of results, in the order of dispatch; `observe` is `Scheduler.observe`."""

    def __init__(self, observe: Callable[..., None]):
        self._observe = observe
        self._queue: deque[Due] = deque()
        self._ended_s = (0.0, 0.0)  # the earliest and the latest time at which the last program may have ended
        self._group: list[Due] = []  # results already taken, whose programs ended at unknown times
        self._began_s = (0.0, 0.0)  # the same two times for the start of the group's first program

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def next(self) -> Due | None:
        return self._queue[0] if self._queue else None

    def add(self, due: Due) -> None:
        self._queue.append(due)

    def take(self) -> Due:
        due = self._queue.popleft()
        over = due.ready
        due.wait()
        now_s = time.perf_counter()
        began_s = [max(due.began_s, ended_s) for ended_s in self._ended_s]
        if not self._group:
            self._began_s = began_s[0], began_s[1]
        self._group.append(due)
        self._ended_s = (began_s[0] if over else now_s), now_s
        if not over or not self._queue:
            self._report(now_s, over)
        return due

    def _report(self, now_s: float, over: bool) -> None:
        """Report the seconds of the group's programs as one step; `over` says that they may have ended before."""
        prefill = [part for due in self._group for part in due.prefill]
        decode = [keys for due in self._group for keys in due.decode]
        self._group = []
        least_s, most_s = (now_s - began_s for began_s in reversed(self._began_s))
        if (prefill or decode) and most_s > 0:
            self._observe(prefill, decode, most_s, at_most=over or least_s < EXACT * most_s)
