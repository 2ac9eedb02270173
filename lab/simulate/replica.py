"""One replica: the engine's loop in simulated time, with the real scheduler, page pool and prefix cache.

All tokens of a step appear at its end; the engine hands out those of answering rows before the step's prefill.
Predicted step times advance the clock. The loop is that of the paged engine: admit requests, decode one token of every
answering row, prefill what the scheduler allows, publish the pages that prefill filled. A request gets the pages of its
prompt when it is admitted, and its answer takes more as it grows. When rows or pages run out, the scheduler may choose
a running request, which then gives up its row and pages and waits again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.simulate.traffic import Arrival
from tessera.core.shapes import ceil_div
from tessera.models.pages import OutOfPages, Pages
from tessera.runtime.costs import Costs
from tessera.runtime.prefix import Prefix
from tessera.runtime.scheduler import Scheduler, Work

LEAP = 32
"""Maximum number of decode steps simulated as one while no request waits or prefills. Their times are nearly equal."""


@dataclass(eq=False, kw_only=True)
class Open:
    """A request and its progress.

    Attributes:
        hashes: hashes of the prompt's pages that other requests may share.
        pages: numbers of its pages, in order of position.
        published: number of its pages that it offered to the prefix cache or took from it.
        cached_tokens: prompt tokens that the prefix cache held at the first admission; None until then.
        first_s: time of the first token; None until then.
        ended_s: time of the last token; None until then.
    """

    arrival: Arrival
    work: Work
    hashes: Sequence[bytes]
    pages: list[int] = field(default_factory=list)
    published: int = 0
    cached_tokens: int | None = None
    first_s: float | None = None
    ended_s: float | None = None


class Replica:
    """A server of `slots` rows on a pool of `num_pages` pages, each as long as the scheduler's unit.

    The machine takes the seconds of `costs`. If these are not the costs that the scheduler predicts with, the scheduler
    observes every step.

    Attributes:
        now_s: end of the last step.
        busy_s: seconds of all steps.
        gaps: milliseconds of a step, rounded down -> number of tokens decoded in such steps.
        ended: requests that have ended.
        preempted: number of times that a running request lost its row and pages.
    """

    def __init__(self, scheduler: Scheduler, num_pages: int, *, slots: int = 64, costs: Costs | None = None):
        self.scheduler, self.slots, self.costs = scheduler, slots, costs or scheduler.costs
        self.learns = self.costs is not scheduler.costs
        self.num_pages, self.unit = num_pages, scheduler.unit
        self.now_s = self.busy_s = 0.0
        self.gaps: Counter[int] = Counter()
        self.ended: list[Open] = []
        self.preempted = 0
        self.restart()

    def restart(self) -> list[Open]:
        """Drop all keys and open requests; return those requests, which another replica can serve."""
        lost = [] if not hasattr(self, "waiting") else [*self.waiting.values(), *self.prefilling.values(), *self.rows]
        self.prefix = Prefix(Pages(self.num_pages, self.unit), b"simulated")
        self.waiting: dict[int, Open] = {}
        self.prefilling: dict[int, Open] = {}
        self.rows: list[Open] = []
        return lost

    @property
    def backlog_s(self) -> float:
        """Predicted seconds to prefill the rest of all open prompts."""
        works = [each.work for queue in (self.waiting, self.prefilling) for each in queue.values()]
        return sum(self.scheduler.costs.step_s([(w.position, w.prompt_tokens - w.position)], ()) for w in works)

    def submit(self, request: Open) -> None:
        """Add a request to the queue."""
        self.waiting[request.work.id] = request

    def run_until(self, end_s: float) -> None:
        """Take steps until the clock reaches `end_s` or nothing is left to do."""
        while self.now_s < end_s:
            if not (self.waiting or self.prefilling or self.rows):
                self.now_s = end_s
                return
            self._step(end_s)

    def _step(self, end_s: float) -> None:
        self._admit()
        rows = list(self.rows)
        decode = [each.work for each in rows]
        shares = []
        if self.prefilling:
            works = [each.work for each in self.prefilling.values()]
            shares = self.scheduler.chunk(self.now_s, works, decode, len(self.waiting))
        keys = [work.prompt_tokens + work.generated for work in decode]
        prefill = [(work.position, count * self.unit) for work, count in shares]
        seconds = self.costs.step_s(prefill, keys)
        if self.learns:
            self.scheduler.observe(prefill, keys, seconds)
        steps = 1
        if not (self.prefilling or self.waiting):
            left = min(each.arrival.answer_tokens - each.work.generated for each in rows)
            steps = max(1, min(LEAP, left, int((end_s - self.now_s) / seconds)))
        self.now_s += steps * seconds
        self.busy_s += steps * seconds
        if rows:
            self.gaps[int(1e3 * seconds)] += steps * len(rows)
        for each in rows:
            self._answered(each, steps)
        for work, count in shares:
            if work.id in self.prefilling:  # a row that grew may have pushed it out
                self._prefilled(self.prefilling[work.id], count)

    def _admit(self) -> None:
        if not self.waiting:
            return
        waiting, prefill = ([each.work for each in group.values()] for group in (self.waiting, self.prefilling))
        for work in self.scheduler.admit(self.now_s, waiting, prefill):
            request = self.waiting[work.id]
            pages = self.prefix.match(request.hashes)
            need = ceil_div(work.prompt_tokens + work.generated + 1, self.unit) - len(pages)
            while len(self.rows) + len(self.prefilling) >= self.slots or need > self.prefix.available:
                running = [each.work for each in (*self.rows, *self.prefilling.values())]
                victim = self.scheduler.displaced(work, running)
                if victim is None:
                    self.prefix.pages.release(pages)
                    return  # nobody overtakes: the pages that come free next are this request's
                self._give_way(victim)
            pages += self.prefix.allocate(need)
            request.pages, request.published = pages, len(pages) - need
            work.position = request.published * self.unit
            if request.cached_tokens is None:
                request.cached_tokens = work.position
            self.prefilling[work.id] = self.waiting.pop(work.id)

    def _prefilled(self, request: Open, count: int) -> None:
        work = request.work
        tokens = min(count * self.unit, work.prompt_tokens - work.position)
        work.position += tokens
        self.scheduler.served(work, tokens)
        for index in range(request.published, min(work.position // self.unit, len(request.hashes))):
            parent = request.hashes[index - 1] if index else None
            request.pages[index] = self.prefix.publish(request.hashes[index], parent, request.pages[index])
            request.published = index + 1
        if work.position < work.prompt_tokens:
            return
        del self.prefilling[work.id]
        self.rows.append(request)
        if not work.generated:  # else it gave way before, and its answer's keys come back from the host
            request.first_s = self.now_s
            self._answered(request, 1)

    def _answered(self, request: Open, tokens: int) -> None:
        work = request.work
        if request.work.id in self.waiting:  # gave way to a row before it in this step
            return
        work.generated += tokens
        self.scheduler.served(work, tokens)
        if work.generated >= request.arrival.answer_tokens:
            request.ended_s = self.now_s
            self.rows.remove(request)
            self.prefix.pages.release(request.pages[::-1])
            self.ended.append(request)
            return
        while len(request.pages) * self.unit <= work.prompt_tokens + work.generated:
            try:
                request.pages += self.prefix.allocate(1)
            except OutOfPages:
                running = [each.work for each in (*self.rows, *self.prefilling.values())]
                victim = self.scheduler.victim(running)
                self._give_way(victim)
                if victim is work:
                    return

    def _give_way(self, work: Work) -> None:
        request = self.prefilling.pop(work.id, None) or next(each for each in self.rows if each.work is work)
        if request in self.rows:
            self.rows.remove(request)
        self.prefix.pages.release(request.pages[::-1])
        request.pages, request.published, work.position = [], 0, 0
        self.preempted += 1
        self.waiting[work.id] = request
