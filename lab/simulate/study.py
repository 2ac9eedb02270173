"""Run the scenarios of `python -m lab simulate` on a machine and build a record of each result."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lab.simulate import scenarios
from lab.simulate.machine import MACHINES, MODEL
from lab.simulate.traffic import MIXES
from tessera.measure import evidence

OP = "simulated serving"
CHECK = "step times predicted by the roofline, not measured; scheduler, page pool and prefix cache are the real ones"
PAIRS = (("kascade", "edf"), ("kascade", "fcfs"), ("dense", "edf"), ("dense", "fcfs"))
"""(attention, scheduler policy) pairs whose capacity is simulated. The first pair is compared with the others."""
GOALS: Mapping[tuple[str, str], float] = {
    ("mixed", "dense, edf"): 1.5,
    ("long", "dense, edf"): 2.0,
    ("mixed", "kascade, fcfs"): 2.0,
}
"""(mix, other pair) -> least acceptable ratio of the capacity of the first of PAIRS to the other pair's."""
JAIN_GOAL, OTHERS_GOAL = 0.95, 1.5
"""Goals with a greedy tenant: minimum of Jain's index, and maximum of the others' p99 time to first token / the same
without a greedy tenant."""


def run(
    machine: str, *, day_hours: float, minutes: float, tell: Callable[[str], Any] = print
) -> Iterator[evidence.Record]:
    """Simulate every scenario on a machine and yield the records as they come.

    Args:
        machine: name in MACHINES.
        day_hours: length of the simulated day; 0 skips the day.
        minutes: length of each run at a constant load.
        tell: called with a line of text for each result.

    Raises:
        ValueError: the machine is unknown, or a time is out of range.
    """
    if machine not in MACHINES:
        raise ValueError(f"{machine=} must be one of {', '.join(MACHINES)}")
    if not 0 <= day_hours <= 24 or not minutes > 0:
        raise ValueError(f"{day_hours=} must be from 0 to 24, and {minutes=} must be positive")
    command = f"python -m lab simulate --machine {machine} --day-hours {day_hours:g} --minutes {minutes:g}"

    def record(
        pair: tuple[str, str], scenario: str, value: float, unit: str, facts: Any, **more: Any
    ) -> evidence.Record:
        what = evidence.What(op=OP, kernel=", ".join(pair), workload=f"{machine}, {scenario}", title=MODEL)
        tell(f"{what.workload}: {what.kernel}: {value:.4g} {unit}")
        how = evidence.How(check=CHECK)
        return evidence.make(what, [value], command=command, unit=unit, how=how, facts=facts, **more)

    for mix in MIXES:
        found = {pair: scenarios.capacity(machine, *pair, mix, seconds=60 * minutes) for pair in PAIRS}
        best = found[PAIRS[0]]
        if mix == "mixed":
            rate = scenarios.LOAD * best["rate"]
        for pair, each in found.items():
            goal = GOALS.get((mix, ", ".join(pair)))
            ratio = best["rate"] / each["rate"] if each["rate"] else None
            target = None if goal is None else f">= {goal:g}"
            met = None if goal is None or ratio is None else ratio >= goal
            versus = (
                evidence.Comparison(against=", ".join(PAIRS[0]), ratio=ratio, target=target, met=met) if ratio else None
            )
            yield record(pair, f"capacity, {mix}", each["rate"], "requests/s", each, comparison=versus)
    pair = PAIRS[0]
    facts = scenarios.greedy(machine, *pair, rate, seconds=60 * minutes)
    facts["met"] = facts["jain"] >= JAIN_GOAL and facts["ratio"] <= OTHERS_GOAL
    yield record(pair, "greedy tenant", facts["jain"], "", facts)
    if day_hours:
        peak = rate * MACHINES[machine].replicas
        facts = scenarios.day(machine, *pair, peak, seconds=3600 * day_hours)
        facts["met"] = facts["lost"] == 0 and facts["in_slo"] >= scenarios.GOAL
        yield record(pair, f"day of {day_hours:g} hours", facts["in_slo"], "fraction", facts)
