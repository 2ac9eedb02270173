"""A device that takes the seconds of given costs, on a clock that only the device and the test move."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tessera.runtime import choosing, dispatched, engine, lane
from tessera.runtime.costs import LinearCosts
from tessera.runtime.dispatched import Dispatched, Due

COSTS = LinearCosts(base=2e-3, row=8e-4, pair=3e-7, answer=5e-3, key=4e-6)


@dataclass
class Device:
    """Runs the engine's own programs in the order of dispatch; only their seconds are set.

    Attributes:
        factor: seconds of a program / seconds by COSTS.
        now_s: the clock.
        programs: (dispatch, start, end, Due) of each program that prefills or decodes.
    """

    factor: Callable[[float], float] = lambda now_s: 1.0
    now_s: float = 0.0
    free_s: float = 0.0
    programs: list[tuple[float, float, float, Due]] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)

    def dispatch(self, due: Due) -> None:
        start = max(self.free_s, due.began_s)
        work = due.prefill or due.decode
        self.free_s = start + (self.factor(start) * COSTS.step_s(due.prefill, due.decode) if work else 0.0)
        self.ends[id(due.found)] = self.free_s
        if work:
            self.programs.append((due.began_s, start, self.free_s, due))

    def ended(self, due: Due) -> bool:
        return self.ends[id(due.found)] <= self.now_s

    def wait(self, due: Due) -> None:
        self.now_s = max(self.now_s, self.ends[id(due.found)])

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        for module in (choosing, dispatched, engine, lane):
            monkeypatch.setattr(module, "time", clock)
        add = Dispatched.add

        def added(queue: Dispatched, due: Due) -> None:
            self.dispatch(due)
            add(queue, due)

        monkeypatch.setattr(Dispatched, "add", added)
        monkeypatch.setattr(Due, "ready", property(self.ended))
        monkeypatch.setattr(Due, "wait", lambda due: self.wait(due))
