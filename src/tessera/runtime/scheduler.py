"""Decide which request gets a row, whose prompt is computed next and who gives way. Pure Python, without a clock.

The engine and the simulator (`tessera simulate`) run the same scheduler. A step decodes one token of every answering
row and prefills some segments, each of `unit` positions of one prompt:

    segments = the largest compiled size whose predicted step takes at most step_s

Requests are ordered by the rule of Moore and Hodgson, which on one machine makes the fewest requests late: sort by
deadline; wherever the predicted end of a prompt passes its deadline, the longest prompt up to there becomes late. Late
requests go last, but every `ageing`-th time the oldest of them goes first, so all of them end.

Each tenant has a virtual time, the tokens computed for it. The share is the virtual time of a tenant that always gets
its equal part: each computed token adds 1 / tenants to it. A tenant's level is the whole multiples of `burst` tokens by
which it is ahead of the share. Lower levels go first, and may take rows and pages from higher ones. An idle tenant
saves nothing: it is never behind the share. It is never ahead by more than MOST bursts either, so that one that had the
machine to itself soon gets its part again.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, Self, get_args

from tessera.core.shapes import ceil_div

Policy = Literal["edf", "fcfs"]

HORIZON = 4
"""A request gets a row when its prompt would be computed within this many of the largest prefill steps."""
MOST = 4
"""Bursts by which a tenant can be ahead of its share."""


@dataclass(eq=False, kw_only=True)
class Work:
    """A request as the scheduler sees it; the caller updates `position` and `generated`.

    Attributes:
        id: unique; breaks ties.
        tenant: whom the request is charged to.
        arrived_s: when it was submitted.
        deadline_s: when its first token is due, on the clock of `arrived_s`.
        prompt_tokens: tokens of its prompt.
        position: prompt tokens computed so far.
        generated: tokens of its answer so far.
    """

    id: int
    tenant: str
    arrived_s: float
    deadline_s: float
    prompt_tokens: int
    position: int = 0
    generated: int = 0


class Costs(Protocol):
    """Predicts how long steps take."""

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Return the seconds of a step.

        Args:
            prefill: (first position, rows) of each part of a prompt that the step computes.
            decode: number of keys of each row that decodes a token.
        """


@dataclass(frozen=True, kw_only=True)
class LinearCosts:
    """Costs that are linear in the work of a step. All coefficients are seconds, at least 0.

        seconds = base + row * rows + pair * pairs + answer * decoding rows + key * keys of the decoding rows

    Attributes:
        base: per step.
        row: per prefilled row.
        pair: per pair of a prefilled row and a key that it sees.
        answer: per decoding row.
        key: per key of a decoding row.
    """

    base: float
    row: float
    pair: float
    answer: float
    key: float

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Return the predicted seconds of a step."""
        rows, pairs, answers, keys = _amounts(prefill, decode)
        return self.base + self.row * rows + self.pair * pairs + self.answer * answers + self.key * keys

    @classmethod
    def fit(cls, samples: Iterable[tuple[Sequence[tuple[int, int]], Sequence[int], float]]) -> Self:
        """Fit measured steps (prefill, decode, seconds): least squares of the relative error, no negative coefficient.

        Raises:
            ValueError: there is no sample, or one took no time.
        """
        import numpy as np
        from scipy.optimize import nnls

        samples = list(samples)
        if not samples or any(seconds <= 0 for *_, seconds in samples):
            raise ValueError(f"{len(samples)} samples: pass at least one measured step, each with positive seconds")
        table = np.array([(1.0, *_amounts(prefill, decode)) for prefill, decode, _ in samples])
        table /= np.array([seconds for *_, seconds in samples])[:, None]
        scale = np.maximum(table.max(axis=0), 1e-300)  # columns of one size: pairs are 1e9 where the base is 1
        found, _ = nnls(table / scale, np.ones(len(samples)))
        return cls(**dict(zip((each.name for each in fields(cls)), (found / scale).tolist())))

    def observed(
        self, prefill: Sequence[tuple[int, int]], decode: Sequence[int], seconds: float, *, weight: float = 0.02
    ) -> Self:
        """Return costs that follow a measured step: each coefficient times (measured / predicted) ** (weight * share).

        The share is the coefficient's part of the prediction, so a step without prefill leaves the costs of prefill as
        they are. The ratio is kept within 1/4 and 4, so that one stalled step changes little.
        """
        names = [each.name for each in fields(self)]
        costs = [getattr(self, name) for name in names]
        parts = [cost * amount for cost, amount in zip(costs, (1, *_amounts(prefill, decode)))]
        whole = max(sum(parts), 1e-9)
        ratio = min(4.0, max(0.25, seconds / whole))
        changed = [cost * ratio ** (weight * part / whole) for cost, part in zip(costs, parts)]
        return type(self)(**dict(zip(names, changed)))


def _amounts(prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> tuple[float, float, float, float]:
    rows = sum(count for _, count in prefill)
    pairs = sum(count * (first + (count + 1) / 2) for first, count in prefill)
    return rows, pairs, len(decode), sum(decode)


class Scheduler:
    """Decides the order and the amounts of an engine's work. Equal calls in equal order give equal results.

    Args:
        costs: predicted times; may be replaced at any time.
        unit: positions of a segment.
        sizes: numbers of segments that the compiled prefill programs take, ascending.
        step_s: seconds that a step with decoding rows should take at most.
        policy: "edf" is the module's rule. "fcfs" is for comparison: first come, first served, in the largest chunks.
        ageing: every so many decisions, the oldest late request goes first.
        patience: maximum decode steps in a row without prefill while a prompt waits.
        burst: tokens by which a tenant may be ahead of its share before it goes after the others. A smaller one delays
            a tenant that sends two long documents even if no tenant sends too much.

    Raises:
        ValueError: a parameter is out of range.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        unit: int,
        sizes: Sequence[int],
        step_s: float,
        policy: Policy = "edf",
        ageing: int = 16,
        patience: int = 4,
        burst: int = 1 << 20,
    ):
        if policy not in get_args(Policy):
            raise ValueError(f"{policy=} must be one of {', '.join(get_args(Policy))}")
        if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"{sizes=} must be ascending numbers of segments, each at least 1")
        for name, value, least in (("unit", unit, 1), ("ageing", ageing, 2), ("patience", patience, 0)):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if not step_s > 0 or burst < 1:
            raise ValueError(f"{step_s=} must be positive and {burst=} at least 1")
        self.costs, self.unit, self.sizes, self.step_s, self.policy = costs, unit, tuple(sizes), step_s, policy
        self.ageing, self.patience, self.burst = ageing, patience, burst
        self._served: dict[str, float] = {}  # virtual times
        self._share = 0.0  # the virtual time of a tenant that gets its equal part
        self._active: dict[str, set[str]] = {"admit": set(), "chunk": set()}
        self._turns = {"admit": 0, "chunk": 0}  # decisions since the oldest late request went first
        self._without = 0  # steps in a row without prefill while a prompt waits

    def chunk(self, now_s: float, prefill: Sequence[Work], decode: Sequence[Work]) -> list[tuple[Work, int]]:
        """Return the prompts to compute in this step, each with its number of segments, the most urgent first.

        All segments together are one of `sizes`, or fewer if less is left to compute. Without decoding rows, they are
        as many as possible. With them, they are as many as `step_s` allows: possibly none, but at most `patience` times
        in a row.
        """
        self._see("chunk", (*prefill, *decode))
        if not prefill:
            self._without = 0
            return []
        left, shares = self.sizes[-1], []
        for work in self._order("chunk", now_s, prefill):
            count = min(left, self._segments(work))
            shares.append((work, count))
            left -= count
            if not left:
                break
        if decode and self.policy == "edf":
            shares = self._within(shares, [work.prompt_tokens + work.generated for work in decode])
        self._without = 0 if shares else self._without + 1
        return shares

    def admit(self, now_s: float, waiting: Sequence[Work], prefill: Sequence[Work] = ()) -> list[Work]:
        """Return the waiting requests in the order in which they should get rows.

        If `prefill`, the prompts that have rows, is given too, return only requests that `chunk` would compute within
        HORIZON of its largest steps, so that no request holds a row and pages long before its turn.
        """
        if not waiting:
            return []
        both = (*waiting, *prefill)
        self._see("admit", both)
        ordered = self._order("admit", now_s, both)
        if not prefill:
            return list(ordered)
        inside, left = {id(work) for work in prefill}, HORIZON * self.sizes[-1]
        found = []
        for work in ordered:
            if left <= 0:
                break
            left -= self._segments(work)
            if id(work) not in inside:
                found.append(work)
        return found

    def victim(self, running: Sequence[Work]) -> Work:
        """Return the request that gives way when pages run out: the one with the latest deadline.

        The oldest request gives way only if it is alone.

        Raises:
            ValueError: nothing runs.
        """
        if not running:
            raise ValueError("nothing runs, so nothing can give way")
        oldest = min(running, key=lambda work: (work.arrived_s, work.id))
        others = [work for work in running if work is not oldest] or [oldest]
        return max(others, key=lambda work: (work.deadline_s, work.id))

    def displaced(self, entrant: Work, running: Sequence[Work]) -> Work | None:
        """Return the running request that gives way so that a waiting one can start, or None.

        Its tenant has the highest level, above the waiting one's. Among these, unfinished prompts go before answers,
        whose keys must be copied to the host, and later arrivals before earlier ones.
        """
        level = self._level(entrant.tenant)
        return max(
            (work for work in running if self._level(work.tenant) > level),
            key=lambda work: (
                self._level(work.tenant),
                work.position < work.prompt_tokens,
                work.arrived_s,
                work.id,
            ),
            default=None,
        )

    def served(self, work: Work, tokens: int) -> None:
        """Charge a request's tenant for tokens computed, of a prompt or of an answer."""
        ahead = max(self._served.get(work.tenant, 0.0), self._share) + tokens
        self._share += tokens / max(1, len(self._served))
        self._served[work.tenant] = min(ahead, self._share + MOST * self.burst)

    def _level(self, tenant: str) -> int:
        return int(max(0.0, self._served.get(tenant, 0.0) - self._share) // self.burst)

    def _segments(self, work: Work) -> int:
        return ceil_div(max(work.prompt_tokens - work.position, 1), self.unit)

    def _within(self, shares: list[tuple[Work, int]], keys: Sequence[int]) -> list[tuple[Work, int]]:
        """Cut the shares to the largest size whose step takes at most step_s."""
        for size in reversed(self.sizes):
            cut = _first(shares, size)
            rows = [(work.position, count * self.unit) for work, count in cut]
            if self.costs.step_s(rows, keys) <= self.step_s:
                return cut
        return _first(shares, self.sizes[0]) if self._without >= self.patience else []

    def _order(self, name: str, now_s: float, works: Sequence[Work]) -> Iterator[Work]:
        """Yield requests by level; within a level the timely ones, then the late ones."""
        if self.policy == "fcfs":
            yield from sorted(works, key=lambda work: (work.arrived_s, work.id))
            return
        ahead = {tenant: self._level(tenant) for tenant in {work.tenant for work in works}}
        levels: dict[int, list[Work]] = {}
        for work in works:
            levels.setdefault(ahead[work.tenant], []).append(work)
        aged = False
        for level in sorted(levels):
            timely, late, now_s = self._timely(now_s, levels[level])
            if late and not aged:
                aged = True
                self._turns[name] += 1
                if self._turns[name] >= self.ageing:
                    self._turns[name] = 0
                    yield late.pop(0)
            yield from timely
            yield from late

    def _timely(self, ends_s: float, works: Sequence[Work]) -> tuple[list[Work], list[Work], float]:
        """Split requests into those that can be in time, by deadline, and late ones, by arrival (Moore and Hodgson).

        Returns:
            both lists, and the time at which the prompts of the first list end if they start at `ends_s`.
        """
        chosen: list[tuple[float, int, Work]] = []  # the longest first
        late: list[Work] = []
        for work in sorted(works, key=lambda work: (work.deadline_s, work.id)):
            left_s = self.costs.step_s([(work.position, max(work.prompt_tokens - work.position, 1))], ())
            heapq.heappush(chosen, (-left_s, -work.id, work))
            ends_s += left_s
            if ends_s > work.deadline_s:
                longest_s, _, longest = heapq.heappop(chosen)
                ends_s += longest_s
                late.append(longest)
        timely = sorted((work for *_, work in chosen), key=lambda work: (work.deadline_s, work.id))
        return timely, sorted(late, key=lambda work: (work.arrived_s, work.id)), ends_s

    def _see(self, name: str, works: Iterable[Work]) -> None:
        """Note the active tenants, and forget idle ones that are no longer ahead of the share."""
        self._active[name] = {work.tenant for work in works}
        active = self._active["admit"] | self._active["chunk"]
        self._served = {t: v for t, v in self._served.items() if t in active or v > self._share}
        for tenant in active:
            self._served.setdefault(tenant, self._share)


def _first(shares: Sequence[tuple[Work, int]], size: int) -> list[tuple[Work, int]]:
    """Return the first `size` segments of the shares."""
    found = []
    for work, count in shares:
        if size <= 0:
            break
        found.append((work, min(count, size)))
        size -= count
    return found
