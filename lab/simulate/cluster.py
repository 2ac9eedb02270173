"""Simulate replicas behind a router, and losses of replicas. Prompts with the same start go to the same replica.

Rendezvous hashing of a prompt's first page (for a chat, of its whole text) ranks the replicas. A request goes to the
first one, or to the second if the second's queued prefill is shorter by more than SPILL_S seconds. If a replica is
lost, its requests start again on others. Their arrival times and deadlines do not change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from lab.simulate.machine import UNIT, Attention, Machine, pool_pages, step_times
from lab.simulate.replica import Open, Replica
from lab.simulate.traffic import Arrival, Hashes, due_s
from tessera.runtime.scheduler import Order, Scheduler, Work

STEP_S = 0.04
"""Target seconds of a step with decoding rows: less than ITL_S, so that a step may take longer than predicted."""
ITL_S = 0.05
"""Limit for a request's mean seconds per token after the first."""
SIZES = {"edf": (1, 4, 16), "fcfs": (8,)}
"""Scheduler order -> sizes of the compiled prefill programs, in segments of UNIT positions."""
SPILL_S = 2.0
DOWN_S = 120.0
"""Seconds until a lost replica is back, with an empty cache: its weights and compiled programs are on disk."""
TAIL_S = 3600.0
"""Seconds of simulation after the last arrival. A request that has not ended by then counts as lost."""


@dataclass(kw_only=True)
class Outcome:
    """Result of a simulation: the requests that ended, and the replicas, each with its counters (`Replica`).

    Attributes:
        submitted: number of requests.
        queue: (time, number of waiting and prefilling requests) at each arrival.
    """

    submitted: int
    ended: list[Open] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    queue: list[tuple[float, int]] = field(default_factory=list)


def simulate(
    machine: Machine,
    attention: Attention,
    order: Order,
    arrivals: Iterable[Arrival],
    *,
    losses: Sequence[tuple[float, int]] = (),
    most_late: int | None = None,
) -> Outcome:
    """Simulate how the replicas of a machine serve the arrivals.

    Args:
        machine: the chip, and the number of replicas and of their devices.
        attention: dense or Kascade.
        order: order of the scheduler.
        arrivals: requests in order of time.
        losses: (time, index) of each loss of a replica.
        most_late: number of requests that may miss a limit before the simulation stops early; None for no stop.
    """
    costs = step_times(machine, attention)
    replicas = [
        Replica(Scheduler(costs, unit=UNIT, sizes=SIZES[order], step_s=STEP_S, order=order), pool_pages(machine))
        for _ in range(machine.replicas)
    ]
    arrivals = list(arrivals)
    outcome, hashes = Outcome(submitted=len(arrivals), replicas=replicas), Hashes(replicas[0].prefix)
    back_s = [0.0] * len(replicas)
    events: list[tuple[float, int, Any]] = [(each.at_s, 1, each) for each in arrivals]
    events += [(at_s, 0, index) for at_s, index in losses]
    for number, (at_s, is_arrival, what) in enumerate(sorted(events, key=lambda event: event[:2])):
        for index, replica in enumerate(replicas):
            if back_s[index] <= at_s:
                replica.run_until(at_s)
        if most_late is not None and number % 16 == 0 and _late(replicas) > most_late:
            break
        if is_arrival:
            work = Work(
                id=number,
                tenant=what.tenant,
                arrived_s=at_s,
                deadline_s=at_s + due_s(what.prompt_tokens),
                prompt_tokens=what.prompt_tokens,
            )
            _route(Open(arrival=what, work=work, hashes=hashes.of(what)), replicas, back_s, at_s)
            outcome.queue.append((at_s, sum(len(each.waiting) + len(each.prefilling) for each in replicas)))
        else:
            back_s[what] = at_s + DOWN_S
            for request in replicas[what].restart():
                request.pages, request.published, request.first_s = [], 0, None
                request.work.position = request.work.generated = 0
                _route(request, replicas, back_s, at_s)
            replicas[what].now_s = at_s + DOWN_S
    else:
        _finish(replicas, arrivals)
    outcome.ended = [request for replica in replicas for request in replica.ended]
    return outcome


def _finish(replicas: Sequence[Replica], arrivals: Sequence[Arrival]) -> None:
    end_s = (arrivals[-1].at_s if arrivals else 0.0) + TAIL_S
    for replica in replicas:
        replica.run_until(end_s)


def _late(replicas: Sequence[Replica]) -> int:
    ended = sum(not good(request) for replica in replicas for request in replica.ended)
    waiting = (w for replica in replicas for group in (replica.waiting, replica.prefilling) for w in group.values())
    return ended + sum(request.work.deadline_s < replicas[0].now_s for request in waiting)


def _route(request: Open, replicas: Sequence[Replica], back_s: Sequence[float], now_s: float) -> None:
    name = request.hashes[0] if request.hashes else b""
    if request.arrival.text.system:  # every chat shares its first page, so route by the whole text
        name = repr(request.arrival.text).encode()
    alive = [index for index in range(len(replicas)) if back_s[index] <= now_s] or [int(np.argmin(back_s))]
    ranked = sorted(alive, key=lambda index: blake2b(name + bytes([index]), digest_size=8).digest())[:2]
    first, second = replicas[ranked[0]], replicas[ranked[-1]]
    chosen = second if second.backlog_s + SPILL_S < first.backlog_s else first
    chosen.submit(request)


def good(request: Open) -> bool:
    """Return whether a request met both limits: first token by the deadline, later tokens in ITL_S on average."""
    return request.first_s <= request.work.deadline_s and per_token_s(request) <= ITL_S


def per_token_s(request: Open) -> float:
    """Return the mean seconds per token after the first."""
    return (request.ended_s - request.first_s) / max(1, request.arrival.answer_tokens - 1)


def summary(outcome: Outcome) -> dict[str, Any]:
    """Summarise a simulation as JSON data. A request that did not end counts as lost, and in `in_slo` as late."""
    ended = outcome.ended
    kinds = sorted({each.arrival.kind for each in ended})
    met = sum(map(good, ended))
    prompts = sum(each.arrival.prompt_tokens for each in ended)
    end_s = max(each.now_s for each in outcome.replicas)
    found = {
        "submitted": outcome.submitted,
        "lost": outcome.submitted - len(ended),
        "in_slo": met / max(1, outcome.submitted),
        "ttft_s": {kind: _percentiles([_ttft_s(e) for e in ended if e.arrival.kind == kind]) for kind in kinds},
        "late_first": sum(each.first_s > each.work.deadline_s for each in ended),
        "late_tokens": sum(per_token_s(each) > ITL_S for each in ended),
        "itl_ms": _weighted([each.gaps for each in outcome.replicas]),
        "cached_share": sum(each.cached_tokens or 0 for each in ended) / max(1, prompts),
        "queue": _percentiles([count for _, count in outcome.queue]),
        "busy": sum(each.busy_s for each in outcome.replicas) / len(outcome.replicas) / max(end_s - TAIL_S, 1.0),
        "preempted": sum(each.preempted for each in outcome.replicas),
    }
    return found


def _ttft_s(request: Open) -> float:
    return request.first_s - request.work.arrived_s


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 90, 99)} if values else {}


def _weighted(counters: Sequence[dict[int, int]]) -> dict[str, float]:
    """Return percentiles of step times, counted by whole milliseconds; each percentile is rounded up."""
    values = sorted({value for counter in counters for value in counter})
    if not values:
        return {}
    counts = np.array([sum(counter.get(value, 0) for counter in counters) for value in values])
    shares = np.cumsum(counts) / counts.sum()
    return {f"p{q}": float(values[int(np.searchsorted(shares, q / 100))] + 1) for q in (50, 90, 99)}
