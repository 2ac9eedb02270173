"""Scenarios of the simulation: the capacity of a replica, a day with losses of replicas, and a greedy tenant."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lab.simulate.cluster import Outcome, good, simulate, summary
from lab.simulate.machine import MACHINES, Attention
from lab.simulate.traffic import MIXES, Arrival, Stream
from tessera.runtime.scheduler import Order

GOAL = 0.99
"""Share of requests that must meet both limits: on the first token and on later tokens (`cluster.good`)."""
WINDOW_S = 1200.0
"""Seconds of constant load in each trial of the search for a capacity."""
PRECISION = 1.05
"""The search for a capacity ends when the smallest rate that failed is at most this times the largest that passed."""
LOAD = 0.8
"""Load at a day's busiest moment, as a share of the capacity."""
LOSSES = (0.39, 0.6, 0.83)
"""Times at which a replica is lost, as fractions of the day: about 09:20, 14:20 and 20:00."""
TENANTS = 10
GREEDY = 10.0
"""Load of the greedy tenant, as a multiple of that of each other tenant."""


def capacity(
    machine: str, attention: Attention, order: Order, mix: str, *, seconds: float = WINDOW_S
) -> dict[str, Any]:
    """Find by bisection the highest rate (requests/s) at which one replica serves a share GOAL within the limits.

    Returns:
        the rate, the summary of its run, and `tried`: every rate tried and whether it passed.
    """
    one = replace(MACHINES[machine], replicas=1)
    tried: dict[float, bool] = {}
    best: dict[str, Any] = {}

    def holds(rate: float) -> bool:
        arrivals = Stream(mix=MIXES[mix], rate=rate, seconds=seconds).arrivals()
        most_late = int((1 - GOAL) * len(arrivals))
        found = summary(simulate(one, attention, order, arrivals, most_late=most_late))
        tried[rate] = bool(arrivals) and found["in_slo"] >= GOAL
        if tried[rate] and rate > best.get("rate", 0.0):
            best.update(found, rate=rate)
        return tried[rate]

    low = high = 1.0
    if holds(1.0):
        while holds(high := 2 * low):
            low = high
    else:
        while low > 1e-3 and not holds(low := high / 2):
            high = low
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return {"rate": 0.0, **best, "tried": sorted(tried.items())}


def day(machine: str, attention: Attention, order: Order, peak: float, *, seconds: float) -> dict[str, Any]:
    """Serve a day of mixed load during which replicas are lost (LOSSES).

    The busiest moment has `peak` requests per second. The day lasts `seconds`; a shorter day has the same rates, but
    fewer requests.

    Returns:
        the summary, and for each 24th of the day: requests per second, share within both limits, and the 99th
        percentile of time to first token / its limit.
    """
    on = MACHINES[machine]
    losses = [(seconds * part, number % on.replicas) for number, part in enumerate(LOSSES)]
    arrivals = Stream(mix=MIXES["mixed"], rate=peak, seconds=seconds, daily=True).arrivals()
    outcome = simulate(on, attention, order, arrivals, losses=losses)
    return {**summary(outcome), "peak": peak, "hours": hours(outcome, arrivals, seconds / 24)}


def hours(outcome: Outcome, arrivals: Sequence[Arrival], hour_s: float) -> list[Mapping[str, float]]:
    """Summarise the requests that arrived in each hour."""
    found = []
    for hour in range(24):
        came = sum(each.at_s // hour_s == hour for each in arrivals)
        own = [each for each in outcome.ended if each.arrival.at_s // hour_s == hour]
        used = [(each.first_s - each.work.arrived_s) / (each.work.deadline_s - each.work.arrived_s) for each in own]
        row = {"hour": hour, "requests_per_s": came / hour_s, "in_slo": sum(map(good, own)) / max(1, came)}
        found.append(row | {"ttft_of_limit_p99": round(float(np.percentile(used, 99)), 4) if used else 0.0})
    return found


def greedy(
    machine: str, attention: Attention, order: Order, rate: float, *, seconds: float = WINDOW_S
) -> dict[str, Any]:
    """Serve TENANTS equal tenants on one replica, then again with one of them sending GREEDY times as much.

    The equal tenants together send `rate` requests per second.

    Returns:
        Jain's index (see `jain`) of the second run. For the nine other tenants, in the first and in the second run:
        99th percentile of the time to first token, share within both limits, share of prompt tokens from the cache.
    """
    one = replace(MACHINES[machine], replicas=1)
    runs = []
    for factor in (1.0, GREEDY):
        arrivals = tenants(rate, factor, seconds)
        runs.append((arrivals, simulate(one, attention, order, arrivals)))
    others = [[each for each in run.ended if each.arrival.tenant != "tenant 0"] for _, run in runs]
    p99 = [float(np.percentile([each.first_s - each.work.arrived_s for each in own], 99)) for own in others]
    return {
        "jain": jain(*runs[1], seconds),
        "others_p99_s": p99,
        "ratio": p99[1] / p99[0],
        "others_in_slo": [sum(map(good, own)) / len(own) for own in others],
        "others_cached_share": [
            sum(each.cached_tokens or 0 for each in own) / sum(each.arrival.prompt_tokens for each in own)
            for own in others
        ],
        "rate": rate,
    }


def tenants(rate: float, factor: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """Draw the requests of TENANTS tenants.

    Each sends rate / TENANTS requests per second, but the first sends `factor` times as many. The others' requests do
    not depend on the factor, so two runs compare the same requests.
    """
    found = []
    for number in range(TENANTS):
        own = rate / TENANTS * (1.0 if number else factor)
        name, own_seed = f"tenant {number}", TENANTS * seed + number
        stream = Stream(mix=MIXES["mixed"], rate=own, seconds=seconds, seed=own_seed, tenant=name)
        found += stream.arrivals()
    return sorted(found, key=lambda each: each.at_s)


def jain(arrivals: Sequence[Arrival], outcome: Outcome, until_s: float) -> float:
    """Return Jain's index of n tenants, (sum x)^2 / (n sum x^2), where x is served prompt tokens / fair share."""
    asked: dict[str, float] = {}
    served = dict.fromkeys((each.tenant for each in arrivals), 0.0)
    for each in arrivals:
        asked[each.tenant] = asked.get(each.tenant, 0.0) + each.prompt_tokens
    for each in outcome.ended:
        if each.first_s <= until_s:
            served[each.arrival.tenant] += each.arrival.prompt_tokens
    shares = _max_min(asked, sum(served.values()))
    x = np.array([served[name] / shares[name] for name in shares])
    return float(x.sum() ** 2 / (len(x) * (x**2).sum()))


def _max_min(asked: Mapping[str, float], total: float) -> dict[str, float]:
    """Divide a total max-min fairly: a tenant gets as much as it asked for, but at most an equal share of the rest."""
    shares, left = {}, total
    for count, name in zip(range(len(asked), 0, -1), sorted(asked, key=asked.get)):
        shares[name] = min(asked[name], left / count)
        left -= shares[name]
    return shares
