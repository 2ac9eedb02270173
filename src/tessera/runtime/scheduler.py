"""Decide which request gets a row, which prompt is prefilled next and which request gives way.

The scheduler is pure Python and reads no clock. The engine and the simulator (`python -m lab simulate`) both use it.

A running request has a row: it is first prefilled and then answers. Each step decodes one token of every answering row
and prefills some segments (`unit` positions of one prompt each): the largest compiled number whose predicted step takes
at most step_s, or LONE_S seconds for a prompt that no other request waits for.

Requests are ordered by the rule of Moore and Hodgson, which makes the fewest requests late on one machine: sort by
deadline, and wherever the predicted end of a prompt is after its deadline, move the longest prompt so far to the late
requests. Late requests go last, and those that are brief (one step can prefill the rest of the prompt) before the
others. Two exceptions limit how long a request waits:

- After a decision in which a longer request went first, the brief ones go first. A brief request thus waits for at most
  one step of a longer one.
- Otherwise, the oldest late request goes first in every `ageing`-th decision, so that none waits for ever.

All predictions are multiplied by the pace, the median of measured / predicted seconds in the last few steps. Deadlines
and step_s follow it too, so a machine that has become slow makes no request late and no step too long by itself.

Each tenant has a virtual time: the number of tokens computed for it. The share is the virtual time of an imaginary
tenant that always gets an equal part. A tenant's level is the number of whole bursts (`burst` tokens) by which its
virtual time is ahead of the share. Requests of tenants at lower levels go first, and may take rows and pages from those
at higher levels. Virtual time never falls behind the share, so idling gains nothing, and is never more than MOST bursts
ahead of it, so a tenant that had the machine to itself is not made to wait long.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from tessera.core.shapes import ceil_div
from tessera.runtime.costs import Costs, LinearCosts

Order = Literal["edf", "fcfs"]

GRACE_S, SLACK = 1.0, 2.0
"""A first token is due after GRACE_S seconds plus SLACK times the predicted seconds that the request needs alone."""
LONE_S = 0.5
"""Maximum predicted seconds of a step of a prompt that no other request waits for.

A request that arrives during the step waits for its end. Larger programs prefill a prompt faster."""
RECENT = 4
"""Number of measured steps whose median sets the pace: one stalled step changes nothing, and two slow steps do."""
SWING = 2.0
"""The pace is 1 while the median is at most this factor from 1: then the coefficients of the costs follow the steps."""
HORIZON = 4
"""A waiting request gets a row only if its prompt's turn comes within this many prefill steps of the largest size."""
MOST = 4
"""Maximum number of bursts by which a tenant can be ahead of the share."""


@dataclass(eq=False, kw_only=True)
class Work:
    """A request as the scheduler sees it; the caller updates `position` and `generated`. The engine's is a `Sequence`.

    Attributes:
        tenant: name of the tenant that is charged for the request.
        arrived_s, deadline_s: time of submission, and time when the first token is due (None: `Scheduler.due_s`), both
            on the clock of `now_s`.
        position, generated: numbers of prompt tokens computed and of answer tokens so far.
    """

    id: int
    tenant: str
    arrived_s: float
    deadline_s: float | None
    prompt_tokens: int
    position: int = 0
    generated: int = 0


class Scheduler:
    """Decides what an engine computes next, and how much. The same calls in the same order give the same results.

    Args:
        sizes: numbers of segments that the compiled prefill programs take, ascending.
        step_s: maximum predicted seconds of a step, by `costs`, before the pace.
        order: "edf" (earliest deadline first) is the rule that the module describes. "fcfs" is for comparison: first
            come, first served, always with the largest size.
        patience: maximum number of consecutive steps without prefill while a prompt waits for prefill.
        burst: tokens. If it is too small, a tenant that sends two long documents is delayed even when no tenant sends
            too much.

    Attributes:
        pace: measured seconds / seconds by `costs` of recent steps; 1 until `observe` has seen steps that differ much.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        unit: int,
        sizes: Sequence[int],
        step_s: float,
        order: Order = "edf",
        ageing: int = 16,
        patience: int = 4,
        burst: int = 1 << 20,
    ):
        if order not in get_args(Order):
            raise ValueError(f"{order=} must be one of {', '.join(get_args(Order))}")
        if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"{sizes=} must be ascending numbers of segments, each at least 1")
        for name, value, least in (("unit", unit, 1), ("ageing", ageing, 2), ("patience", patience, 0)):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if not step_s > 0 or burst < 1:
            raise ValueError(f"{step_s=} must be positive and {burst=} at least 1")
        self.costs, self.unit, self.sizes, self.step_s, self.order = costs, unit, tuple(sizes), step_s, order
        self.ageing, self.patience, self.burst = ageing, patience, burst
        self._served: dict[str, float] = {}  # virtual times
        self._share = 0.0  # the virtual time of a tenant that gets its equal part
        self._active: dict[str, set[str]] = {"admit": set(), "chunk": set()}
        self._turns = {"admit": 0, "chunk": 0}  # decisions since the oldest late request went first
        self._long = {"admit": False, "chunk": False}  # whether the last decision began with one that is not brief
        self.pace = 1.0
        self._recent: deque[float] = deque(maxlen=RECENT)  # measured seconds / seconds by the costs
        self._without = 0  # steps in a row without prefill while a prompt waits

    def calibrate(self, costs: Costs, step_s: float) -> None:
        self.costs, self.step_s, self.pace = costs, step_s, 1.0
        self._recent.clear()

    def observe(
        self, prefill: Sequence[tuple[int, int]], decode: Sequence[int], seconds: float, *, at_most: bool = False
    ) -> None:
        """Adjust the pace and the costs to one measured step, given as in `Costs.step_s`.

        `at_most` says that the step may have taken less: it then counts only if it was predicted to take more.
        """
        expected_s = self.costs.step_s(prefill, decode)
        if expected_s <= 0 or (at_most and seconds >= expected_s * self.pace):
            return
        self._recent.append(seconds / expected_s)
        middle = median(self._recent)
        self.pace = 1.0 if 1 / SWING <= middle <= SWING else middle
        if isinstance(self.costs, LinearCosts):
            self.costs = self.costs.observed(prefill, decode, seconds / self.pace)

    def due_s(self, work: Work) -> float:
        """Return when a request's first token is due, by the present costs and pace.

        Without a deadline, that is GRACE_S seconds plus SLACK times what the request needs alone: the steps of its
        prompt, and one step that the machine has begun when the request arrives.
        """
        if work.deadline_s is not None:
            return work.deadline_s
        steps = ceil_div(work.prompt_tokens, self.unit * self.sizes[-1])
        alone_s = self.costs.step_s([(0, work.prompt_tokens)], ()) + (steps - 1) * self.costs.step_s((), ())
        return work.arrived_s + GRACE_S + SLACK * self.pace * (alone_s + self.step_s)

    def chunk(
        self, now_s: float, prefill: Sequence[Work], decode: Sequence[Work], waiting: int = 0
    ) -> list[tuple[Work, int]]:
        """Return the prompts to prefill in this step, the most urgent first, each with its number of segments.

        The total is one of `sizes`, or less if the prompts end before. If rows decode, it can be 0, but not in more
        than `patience` consecutive steps. `waiting` counts the requests that have no rows.
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
        if self.order == "edf":
            lone_s = LONE_S / self.pace if len(prefill) + len(decode) + waiting == 1 else 0.0
            keys = [work.prompt_tokens + work.generated for work in decode]
            shares = self._within(shares, keys, max(self.step_s, lone_s))
        self._without = 0 if shares else self._without + 1
        return shares

    def admit(self, now_s: float, waiting: Sequence[Work], prefill: Sequence[Work] = ()) -> list[Work]:
        """Return the waiting requests that should get rows, in this order.

        These are the requests whose prefill would begin within HORIZON steps of the largest size, so that no request
        occupies a row and pages long before its turn. `prefill` has the requests that have rows.
        """
        if not waiting:
            return []
        both = (*waiting, *prefill)
        self._see("admit", both)
        inside, left = {id(work) for work in prefill}, HORIZON * self.sizes[-1]
        found = []
        for work in self._order("admit", now_s, both):
            if left <= 0 and self.order == "edf":
                break
            left -= self._segments(work)
            if id(work) not in inside:
                found.append(work)
        return found

    def victim(self, running: Sequence[Work]) -> Work:
        """Return the request that gives way when pages run out: the latest deadline, but the oldest only if alone."""
        if not running:
            raise ValueError("running=[] has no request that could give way: pass at least one")
        oldest = min(running, key=lambda work: (work.arrived_s, work.id))
        others = [work for work in running if work is not oldest] or [oldest]
        return max(others, key=lambda work: (self.due_s(work), work.id))

    def displaced(self, entrant: Work, running: Sequence[Work]) -> Work | None:
        """Return the running request that gives way so that `entrant` can start; None if no request gives way.

        A request gives way only to an entrant whose tenant is at a lower level, the highest level first. At the same
        level, requests in prefill give way before answering ones, whose keys would have to be copied to the host.
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
        """Charge the request's tenant for computed tokens."""
        ahead = max(self._served.get(work.tenant, 0.0), self._share) + tokens
        self._share += tokens / max(1, len(self._served))
        self._served[work.tenant] = min(ahead, self._share + MOST * self.burst)

    def _level(self, tenant: str) -> int:
        return int(max(0.0, self._served.get(tenant, 0.0) - self._share) // self.burst)

    def _segments(self, work: Work) -> int:
        return ceil_div(max(work.prompt_tokens - work.position, 1), self.unit)

    def _left_s(self, work: Work) -> float:
        return self.costs.step_s([(work.position, max(work.prompt_tokens - work.position, 1))], ())

    def _brief(self, work: Work) -> bool:
        segments = self._segments(work)
        return segments == 1 or (segments <= self.sizes[-1] and self._left_s(work) <= self.step_s)

    def _within(self, shares: list[tuple[Work, int]], keys: Sequence[int], most_s: float) -> list[tuple[Work, int]]:
        """Cut the segments in `shares` to the largest size whose step takes at most `most_s`, by the costs.

        If even the smallest size takes longer, return the smallest; but if rows decode (`keys`) and the first prompt
        has more than one segment left, return nothing until `patience` is used up.
        """
        for size in reversed(self.sizes):
            cut = _first(shares, size)
            rows = [(work.position, count * self.unit) for work, count in cut]
            if self.costs.step_s(rows, keys) <= most_s:
                return cut
        now = not keys or self._without >= self.patience or self._segments(shares[0][0]) == 1
        return _first(shares, self.sizes[0]) if now else []

    def _order(self, name: str, now_s: float, works: Sequence[Work]) -> list[Work]:
        """Order requests by the level of their tenants, lowest first; within a level, the late ones go last.

        The module's two exceptions go first in their level; `admit` and `chunk` (`name`) count decisions separately.
        """
        if self.order == "fcfs":
            return sorted(works, key=lambda work: (work.arrived_s, work.id))
        ahead = {tenant: self._level(tenant) for tenant in {work.tenant for work in works}}
        levels: dict[int, list[Work]] = {}
        for work in works:
            levels.setdefault(ahead[work.tenant], []).append(work)
        found: list[Work] = []
        aged = False
        for level in sorted(levels):
            timely, late, now_s = self._timely(now_s, levels[level])
            both = [*timely, *late]
            first = [work for work in both if self._brief(work)] if self._long[name] and not found else []
            if late and not aged:
                aged = True
                self._turns[name] += 1
                if not first and self._turns[name] >= self.ageing:
                    self._turns[name] = 0
                    first = [min(late, key=lambda work: (work.arrived_s, work.id))]
            known = set(map(id, first))
            found += first + [work for work in both if id(work) not in known]
        self._long[name] = not self._brief(found[0])
        return found

    def _timely(self, ends_s: float, works: Sequence[Work]) -> tuple[list[Work], list[Work], float]:
        """Split requests by the rule of Moore and Hodgson, if prefill starts at `ends_s`.

        Return the timely requests by deadline, the late ones by arrival but the brief first, and the time at which the
        prefill of the timely ones ends.
        """
        chosen: list[tuple[float, int, Work]] = []  # the longest first
        late: list[Work] = []
        due_s = {id(work): self.due_s(work) for work in works}
        for work in sorted(works, key=lambda work: (due_s[id(work)], work.id)):
            left_s = self.pace * self._left_s(work)
            heapq.heappush(chosen, (-left_s, -work.id, work))
            ends_s += left_s
            if ends_s > due_s[id(work)]:
                longest_s, _, longest = heapq.heappop(chosen)
                ends_s += longest_s
                late.append(longest)
        timely = sorted((work for *_, work in chosen), key=lambda work: (due_s[id(work)], work.id))
        return timely, sorted(late, key=lambda work: (not self._brief(work), work.arrived_s, work.id)), ends_s

    def _see(self, name: str, works: Iterable[Work]) -> None:
        self._active[name] = {work.tenant for work in works}
        active = self._active["admit"] | self._active["chunk"]
        self._served = {t: v for t, v in self._served.items() if t in active or v > self._share}
        for tenant in active:
            self._served.setdefault(tenant, self._share)


def _first(shares: Sequence[tuple[Work, int]], size: int) -> list[tuple[Work, int]]:
    """Return the first `size` segments of `shares`."""
    found = []
    for work, count in shares:
        if size <= 0:
            break
        found.append((work, min(count, size)))
        size -= count
    return found
