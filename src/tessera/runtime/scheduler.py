"""Decide which request gets a row, which prompt is prefilled next and which request gives way.

The scheduler is pure Python and reads no clock. The engine and the simulator (`tessera simulate`) both use it.

A running request has a row: it is first prefilled and then answers. Each step decodes one token of every answering row
and prefills some segments, where a segment is `unit` positions of one prompt. If any row is answering,

    number of segments = the largest compiled size whose predicted step takes at most step_s

Requests are ordered by the rule of Moore and Hodgson, which makes the fewest requests late on one machine. It sorts
requests by deadline; wherever the predicted end of a prompt is after its deadline, it moves the longest prompt so far
to the late requests. Late requests go last. So that none of them waits for ever, the oldest late request goes first in
every `ageing`-th decision.

Each tenant has a virtual time: the number of tokens computed for it. The share is the virtual time of an imaginary
tenant that always gets an equal part: each computed token adds 1 / (number of tenants) to the share. A burst is `burst`
tokens, and a tenant's level is the number of whole bursts by which its virtual time is ahead of the share. Requests of
tenants at lower levels go first, and may take rows and pages from requests of tenants at higher levels. A tenant gains
nothing by being idle, because its virtual time never falls behind the share. It is also never ahead of the share by
more than MOST bursts, so that a tenant that had the machine to itself is not made to wait long.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, Self, get_args

from tessera.core.shapes import ceil_div

Policy = Literal["edf", "fcfs"]

HORIZON = 4
"""A waiting request gets a row only if its prompt's turn comes within this many prefill steps of the largest size."""
MOST = 4
"""Maximum number of bursts by which a tenant can be ahead of the share."""


@dataclass(eq=False, kw_only=True)
class Work:
    """A request as the scheduler sees it; the caller updates `position` and `generated`.

    Attributes:
        id: unique number, which breaks ties.
        tenant: name of the tenant that is charged for the request.
        arrived_s: time when the request was submitted, on the caller's clock (`now_s`).
        deadline_s: time when the first token is due, on the same clock.
        prompt_tokens: number of tokens in the prompt.
        position: number of prompt tokens computed so far.
        generated: number of answer tokens so far.
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
        """Return the predicted seconds of a step.

        Args:
            prefill: (first position, number of positions) of each prompt part that the step computes.
            decode: number of keys of each row that decodes a token.
        """


@dataclass(frozen=True, kw_only=True)
class LinearCosts:
    """Costs that are linear in the work of a step. All coefficients are in seconds and at least 0.

        seconds = base + row * positions + pair * pairs + answer * decoding rows + key * keys of the decoding rows

    Attributes:
        base: seconds per step.
        row: seconds per prefilled position.
        pair: seconds per pair of a prefilled position and a key at or before it.
        answer: seconds per decoding row.
        key: seconds per key of a decoding row.
    """

    base: float
    row: float
    pair: float
    answer: float
    key: float

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Return the predicted seconds of a step; see `Costs.step_s`."""
        rows, pairs, answers, keys = _amounts(prefill, decode)
        return self.base + self.row * rows + self.pair * pairs + self.answer * answers + self.key * keys

    @classmethod
    def fit(cls, samples: Iterable[tuple[Sequence[tuple[int, int]], Sequence[int], float]]) -> Self:
        """Fit the coefficients to measured steps (prefill, decode, seconds).

        The fit minimises the sum of the squared relative errors; no coefficient is negative.

        Raises:
            ValueError: there is no sample, or a sample's seconds are not positive.
        """
        import numpy as np
        from scipy.optimize import nnls

        samples = list(samples)
        if not samples or any(seconds <= 0 for *_, seconds in samples):
            raise ValueError(
                f"cannot fit costs to {len(samples)} samples with seconds {[seconds for *_, seconds in samples]}: "
                "pass at least one measured step, and only steps of more than 0 seconds"
            )
        table = np.array([(1.0, *_amounts(prefill, decode)) for prefill, decode, _ in samples])
        table /= np.array([seconds for *_, seconds in samples])[:, None]
        scale = np.maximum(table.max(axis=0), 1e-300)  # columns of one size: pairs are 1e9 where the base is 1
        found, _ = nnls(table / scale, np.ones(len(samples)))
        return cls(**dict(zip((each.name for each in fields(cls)), (found / scale).tolist())))

    def observed(
        self, prefill: Sequence[tuple[int, int]], decode: Sequence[int], seconds: float, *, weight: float = 0.02
    ) -> Self:
        """Return these costs, adjusted to one measured step.

            new coefficient = coefficient * ratio ** (weight * part)

        The ratio is measured seconds / predicted seconds, clipped to [1/4, 4] so that one stalled step changes little.
        The part is the fraction of the predicted seconds that is due to the coefficient: a step without prefill does
        not change the costs of prefill.
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
    """Decides what an engine computes next, and how much. The same calls in the same order give the same results.

    Args:
        costs: predicts the seconds of a step; may be replaced at any time.
        unit: number of positions in a segment.
        sizes: numbers of segments that the compiled prefill programs take, ascending.
        step_s: maximum predicted seconds of a step in which rows decode.
        policy: "edf" (earliest deadline first) is the rule that the module describes. "fcfs" is for comparison: first
            come, first served, always with the largest size.
        ageing: in every `ageing`-th decision with a late request, the oldest late request goes first; at least 2.
        patience: maximum number of consecutive steps without prefill while a prompt waits for prefill.
        burst: number of tokens in a burst. If it is too small, a tenant that sends two long documents is delayed even
            when no tenant sends too much.

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
        """Return the prompts to prefill in this step, the most urgent first, each with its number of segments.

        The total number of segments is one of `sizes`, or smaller if the prompts have fewer segments left. If no row
        decodes, or under "fcfs", the total is as large as possible. Otherwise it is the largest total whose step is
        predicted to take at most `step_s`. It can then be 0, but not in more than `patience` consecutive steps.

        Args:
            now_s: current time, on the clock of `Work.arrived_s`.
            prefill: requests that have rows and are not prefilled yet.
            decode: requests whose rows decode in this step.
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

        `prefill` has the requests that have rows and are not prefilled yet. If there are any, return only those waiting
        requests whose prefill would begin within HORIZON steps of the largest size, so that no request occupies a row
        and pages long before its turn.
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

        The oldest request gives way only if no other request runs.

        Raises:
            ValueError: no request runs.
        """
        if not running:
            raise ValueError("running=[] has no request that could give way: pass at least one")
        oldest = min(running, key=lambda work: (work.arrived_s, work.id))
        others = [work for work in running if work is not oldest] or [oldest]
        return max(others, key=lambda work: (work.deadline_s, work.id))

    def displaced(self, entrant: Work, running: Sequence[Work]) -> Work | None:
        """Return the running request that gives way so that `entrant` can start; None if no request gives way.

        A request gives way only to an entrant whose tenant is at a lower level. Requests of tenants at the highest
        level give way first. At the same level, requests in prefill give way before answering ones, whose keys would
        have to be copied to the host; after that, the latest arrival gives way first.
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
        """Charge the request's tenant for `tokens` computed tokens of its prompt or answer."""
        ahead = max(self._served.get(work.tenant, 0.0), self._share) + tokens
        self._share += tokens / max(1, len(self._served))
        self._served[work.tenant] = min(ahead, self._share + MOST * self.burst)

    def _level(self, tenant: str) -> int:
        return int(max(0.0, self._served.get(tenant, 0.0) - self._share) // self.burst)

    def _segments(self, work: Work) -> int:
        return ceil_div(max(work.prompt_tokens - work.position, 1), self.unit)

    def _within(self, shares: list[tuple[Work, int]], keys: Sequence[int]) -> list[tuple[Work, int]]:
        """Cut the segments in `shares` to the largest size whose predicted step takes at most step_s.

        If even the smallest size takes longer, return no segments, or the smallest size once `patience` is used up.
        """
        for size in reversed(self.sizes):
            cut = _first(shares, size)
            rows = [(work.position, count * self.unit) for work, count in cut]
            if self.costs.step_s(rows, keys) <= self.step_s:
                return cut
        return _first(shares, self.sizes[0]) if self._without >= self.patience else []

    def _order(self, name: str, now_s: float, works: Sequence[Work]) -> Iterator[Work]:
        """Yield requests by the level of their tenants, lowest first; within a level, yield the late ones last.

        `ageing` counts the decisions of `admit` and of `chunk` separately; `name` says which of the two this one is.
        """
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
        """Split requests into timely and late ones by the rule of Moore and Hodgson, if prefill starts at `ends_s`.

        Returns:
            the timely requests by deadline, the late requests by arrival, and the time at which the prefill of the
            timely requests ends.
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
        """Record which tenants are active, and forget idle tenants that are no longer ahead of the share."""
        self._active[name] = {work.tenant for work in works}
        active = self._active["admit"] | self._active["chunk"]
        self._served = {t: v for t, v in self._served.items() if t in active or v > self._share}
        for tenant in active:
            self._served.setdefault(tenant, self._share)


def _first(shares: Sequence[tuple[Work, int]], size: int) -> list[tuple[Work, int]]:
    """Return the first `size` segments of `shares`, which pairs each request with its number of segments."""
    found = []
    for work, count in shares:
        if size <= 0:
            break
        found.append((work, min(count, size)))
        size -= count
    return found
