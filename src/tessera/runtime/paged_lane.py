"""Run the requests of an engine in one pool of pages. Prompts with a common prefix share the pages of that prefix.

The scheduler decides which request gets a row, which prompt is prefilled next and which request gives way: when rows or
pages run out, a request may have to give up its row and pages, and wait again. This module ensures two things:

- The prefix cache contains only pages that a prefill wrote, and only whole units (`Paging.unit` positions). The keys of
  a partial unit are not shared, because they depend on the tokens that are in the same query tile. Under a sparse
  policy, decode and prefill write different keys. An answer that is part of a later prompt is therefore prefilled.
- A request that gives way after its first token loses nothing: the pages after its last shared page are copied to the
  host. Its shared pages stay in the prefix cache; if they are evicted, a prefill writes the same keys again.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from tessera.core.mesh import put
from tessera.core.shapes import ceil_div
from tessera.models.pages import OutOfPages
from tessera.runtime.choosing import Pending, counts_of, fail, hand_out, pick, warm_choices
from tessera.runtime.costs import LinearCosts
from tessera.runtime.dispatched import Dispatched, Due
from tessera.runtime.last_tokens import LastTokens
from tessera.runtime.paged_row import Row
from tessera.runtime.pool import Pool
from tessera.runtime.prompt_scores import following
from tessera.runtime.requests import Event, Held, PoolState, Ticket
from tessera.runtime.sampling import Method
from tessera.runtime.scheduler import Scheduler, Work
from tessera.runtime.stored import StoredPrefix
from tessera.sparse.contract import Policy

GUESS = LinearCosts(base=5e-3, row=5e-4, pair=1e-7, answer=5e-3, key=1e-6)
"""Predicted costs of a step, until `warm` measures them."""
STEP_S = 0.1
"""Maximum predicted seconds of a step (`Scheduler.step_s`), until `warm` derives it from measured costs."""
STRETCH = 3.0
"""Maximum predicted seconds of a step (`Scheduler.step_s`), as a multiple of the seconds of a pure decode step.

The pure decode step is one of all rows, each with keys for half the context."""
BURSTS = 8
"""Number of bursts (`Scheduler.burst`) in the longest possible request.

With fewer, one tenant could run dozens of usual requests before the next tenant's turn."""
NO_ROOM = "the pool, without its pinned pages, is too small"


class PagedLane:
    """All requests of an engine, with their keys in one pool of pages.

    Args:
        pool: the pool, empty at first.
        slots: number of rows: how many requests can run at the same time.
        lag: number of steps that the device runs ahead of the host.

    Attributes:
        prefix: the prefix cache, which finds the pages of prompts by hash.
        preempted: number of times that a request has given way so far.
    """

    def __init__(self, pool: Pool, *, slots: int, lag: int):
        self.pool, self.lag, self.prefix = pool, lag, StoredPrefix(pool)
        unit, sizes = pool.paging.unit, tuple(size // pool.paging.unit for size in reversed(pool.paging.sizes))
        burst = max(1, pool.width * pool.paging.page // BURSTS)
        self.scheduler = Scheduler(GUESS, unit=unit, sizes=sizes, step_s=STEP_S, burst=burst)
        self._step = 0
        self.slots: list[Row | None] = [None] * slots
        self.waiting: deque[Ticket] = deque()
        self.preempted = 0
        self._rows: dict[int, Row] = {}  # of waiting and running requests, by the ticket's id
        self._sent = Dispatched(self.scheduler.observe)
        self._events: list[Event] = []
        self._last = LastTokens(slots, pool.config.vocab_size, pool.mesh)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return any(row.ticket.open for row in self._running) or any(ticket.open for ticket in self.waiting)

    def state(self) -> PoolState:
        """Free the pages of requests that have ended, and return how full the pool is."""
        self._release()
        count = self.prefix.pages.size - 1
        return PoolState(1 - self.prefix.available / count, self.prefix.num_cached / count, self.preempted)

    def advance(self) -> None:
        """Dispatch one decode step of the rows that are answering, and as much prefill as the scheduler allows.

        Without lag, dispatch nothing while the host has not taken all results: a request that arrives in the meantime
        then waits only for what the device computes already.
        """
        self._step += 1
        self._release()
        if self.lag == 0 and self._sent:
            return
        self._admit()
        self._decode()
        self._prefill()

    def collect(self) -> list[Event]:
        """Wait for all that is due in this step, and return the new events.

        Without lag, wait only until there is an event, and take the other results in the next steps: no token waits for
        a prompt that the device computes after it.
        """
        if self.lag == 0:
            while self._sent and not self._events:
                self._take()
        else:
            guided = any(row.ticket.guide is not None for row in self._running)
            self._drain(self._step + (self.lag if guided else 0))
        events, self._events = self._events, []
        return events

    def hold(self, tokens: Sequence[int]) -> Held:
        """Raise ValueError: the prefix cache keeps every prompt's keys, so there is nothing to hold."""
        raise ValueError("an engine with pages caches every prefix: do not call hold; submit requests without `held`")

    def pin(self, tokens: Sequence[int], tenant: str) -> int:
        """Pin the pages of a prompt that has just been computed, cut to whole units (`Paging.unit`).

        Return the number of pinned positions.
        """
        hashes = self.prefix.hashes(tokens[: len(tokens) - len(tokens) % self.pool.paging.unit], tenant)
        self.prefix.pin(hashes)
        return len(hashes) * self.pool.paging.page

    def close(self) -> None:
        """Write the prefix cache to disk, if it has a folder (`Paging.spill`)."""
        self.prefix.close()

    def warm(self, methods: Iterable[Method], *, joins: bool) -> int:
        """Run every program of the empty lane once, and measure the scheduler's costs; return the number of programs.

        `joins` is ignored: requests that join need no other programs.
        """
        methods, count = tuple(methods), self.pool.warm()
        self._measure()
        batches = tuple(dict.fromkeys((1, *self.pool.paging.batches)))
        count += sum(warm_choices(methods, batch, self.pool.config.vocab_size, self.pool.mesh) for batch in batches)
        return count + self._last.warm(methods, self.pool.paging.batches)

    def _measure(self) -> None:
        """Time every program with few and with many keys; fit the scheduler's costs to the times and set its step_s."""
        samples = [
            (prefill, decode, min(self.pool.time(prefill, decode) for _ in range(2)))
            for prefill, decode in self.pool.examples()
        ]
        costs, keys = LinearCosts.fit(samples), self.pool.width * self.pool.paging.page // 2
        self.scheduler.calibrate(costs, STRETCH * costs.step_s([], [keys] * len(self.slots)))

    @property
    def _running(self) -> list[Row]:
        return [row for row in self.slots if row is not None]

    def _release(self) -> None:
        """Free the rows and pages of requests that have ended."""
        for index, row in enumerate(self.slots):
            if row is not None and not row.ticket.open:
                self.slots[index] = None
        for id in [id for id, row in self._rows.items() if not row.ticket.open]:
            self.prefix.pages.release(self._rows.pop(id).pages)

    def _admit(self) -> None:
        """Give rows to waiting requests in the scheduler's order, as long as the pool has pages for them.

        Running requests may have to give way.
        """
        self.waiting = deque(ticket for ticket in self.waiting if ticket.open)
        if not self.waiting:
            return
        known = {(row := self._row(ticket)).work.id: row for ticket in self.waiting}
        if None not in self.slots and len({row.work.tenant for row in (*known.values(), *self._running)}) == 1:
            return
        prefill = [row.work for row in self._running if row.prefilling]
        for work in self.scheduler.admit(time.perf_counter(), [row.work for row in known.values()], prefill):
            row = known[work.id]
            if not self._fits(row):
                continue
            if None not in self.slots and self._displaced(work) is None:
                return
            matched = self.prefix.match(row.matchable(self.pool.paging.page, self.pool.paging.unit))
            need = row.need(self.pool.paging.page) - len(matched)
            while None not in self.slots or (self._running and need > self.prefix.available):
                victim = self._displaced(work)
                if victim is None:
                    self.prefix.pages.release(matched)
                    return  # nobody overtakes: the pages that come free next are this request's
                self._give_way(victim)
            self._enter(row, self.slots.index(None), matched)

    def _displaced(self, work: Work) -> Row | None:
        """Return the running request that gives way to a waiting one; None if the waiting one must go on waiting."""
        running = {row.work.id: row for row in self._running}
        victim = self.scheduler.displaced(work, [row.work for row in running.values()])
        return None if victim is None else running[victim.id]

    def _row(self, ticket: Ticket) -> Row:
        """Return the lane's record of a waiting request; make it when the request is new."""
        if ticket.id not in self._rows:
            request, tokens = ticket.request, ticket.answer.prompt_tokens
            work = Work(
                id=ticket.id,
                tenant=request.tenant,
                arrived_s=ticket.started_s,
                deadline_s=None if request.deadline_s is None else ticket.started_s + request.deadline_s,
                prompt_tokens=tokens,
                position=0,
                generated=0,
            )
            hashes = self.prefix.hashes(request.prompt, request.tenant)
            self._rows[ticket.id] = Row(ticket=ticket, work=work, hashes=hashes, goal=tokens)
        return self._rows[ticket.id]

    def _fits(self, row: Row) -> bool:
        """Return whether an empty pool could hold a request; if not, fail the request."""
        page, size = self.pool.paging.page, self.prefix.pages.size - 1
        need = ceil_div(row.ticket.answer.num_keys, page)
        if need <= size and need <= self.pool.width:
            return True
        room = min(size, self.pool.width) * page
        error = f"prompt and answer need {row.ticket.answer.num_keys} keys, but a request may have {room}"
        cause = "pages" if size < self.pool.width else "keys per request"
        self.waiting.remove(row.ticket)
        self._events.append(fail(row.ticket, MemoryError(f"{error}: shorten one of them, or allow more {cause}")))
        return False

    def _enter(self, row: Row, index: int, matched: list[int]) -> None:
        self.waiting.remove(row.ticket)
        self.slots[index], row.ticket.row = row, index
        unit, page = self.pool.paging.unit, self.pool.paging.page
        usable = len(matched) * page // unit * unit
        self.prefix.pages.release(matched[usable // page :])
        row.enter(matched[: usable // page], usable)
        if row.saved is not None and not row.prefilling:
            self._return(row)

    def _decode(self) -> None:
        """Dispatch one decode step of every row that is answering, with one program call per policy and batch."""
        rows = [row for row in self._running if not row.prefilling and 0 < row.ticket.chosen < row.ticket.answer.limit]
        for row in rows:
            if self._runs(row):
                self._grow(row, row.num_keys)
        groups: dict[Policy, list[Row]] = {}
        for row in filter(self._runs, rows):  # some may have given way to others
            groups.setdefault(self.pool.policy_at(row.num_keys - 1), []).append(row)
        largest = self.pool.paging.batches[-1]
        for policy, group in groups.items():
            for first in range(0, len(group), largest):
                self._decode_batch(policy, group[first : first + largest])

    def _runs(self, row: Row) -> bool:
        return row.ticket.open and self.slots[row.ticket.row] is row

    def _decode_batch(self, policy: Policy, rows: Sequence[Row]) -> None:
        batch = next(size for size in self.pool.paging.batches if size >= len(rows))
        index = np.full(batch, len(self.slots), np.int32)  # padding
        index[: len(rows)] = [row.ticket.row for row in rows]
        tickets = [*(row.ticket for row in rows), *[None] * (batch - len(rows))]
        token, counts = self._last.take(index, counts=any(row.ticket.request.method.penalised for row in rows))
        keys, began_s = [row.num_keys for row in rows], time.perf_counter()
        scores, reads = self.pool.decode(policy, token, [n - 1 for n in keys], [row.pages for row in rows])
        choice = pick(scores, counts, tickets)
        self._last.update(index, choice)
        found = Pending(choice, reads, [(place, row.ticket) for place, row in enumerate(rows)])
        self._note(Due(self._step + self.lag, found, began_s, decode=keys))
        for row in rows:
            row.work.generated = row.ticket.chosen
            self.scheduler.served(row.work, 1)

    def _prefill(self) -> None:
        """Prefill as many prompt tokens as the scheduler allows in this step."""
        waiting = {row.work.id: row for row in self._running if row.ticket.open and row.prefilling}
        decoding = [row.work for row in self._running if row.ticket.open and not row.prefilling]
        works = [row.work for row in waiting.values()]
        if not works:
            return
        others = sum(ticket.open for ticket in self.waiting)
        for work, segments in self.scheduler.chunk(time.perf_counter(), works, decoding, others):
            row = waiting[work.id]
            if self._runs(row):
                self._run(row, segments * self.pool.paging.unit)

    def _run(self, row: Row, room: int) -> None:
        """Prefill up to `room` positions of one request, at most up to its `goal`.

        When the goal is reached, choose the first token, or resume the answer if the request gave way during it.
        """
        page, prompt = self.pool.paging.page, row.ticket.request.prompt
        while room > 0 and row.prefilling:
            self._skip(row)
            start = row.work.position
            left = self.pool.boundary(start, min(start + room, row.goal)) - start
            size = next((s for s in self.pool.paging.sizes if s <= room and s < 2 * left), self.pool.paging.unit)
            end = start + min(size, left)
            if not self._grow(row, end):
                return
            began_s = time.perf_counter()
            rows, reads = self.pool.prefill(prompt[start:end], start, row.pages, size)
            if row.ticket.request.prompt_logprobs is not None and row.saved is None:
                row.ticket.scored[start] = self.pool.score(rows, following(prompt, start, size))
            self._sent.add(Due(self._step + max(1, self.lag), rows.last, began_s, prefill=[(start, size)]))
            row.move(end)
            room -= size
            for index in range(start // page, (end - end % self.pool.paging.unit) // page):
                self._publish(row, index)
            if reads is not None and row.saved is None:
                row.reads[start] = reads
            self.scheduler.served(row.work, end - start)
            if row.prefilling:
                continue
            if row.saved is None:
                self._begin(row, rows.last)
            else:
                self._return(row)

    def _skip(self, row: Row) -> None:
        """Take over the next pages of the prompt if another request has computed them in the meantime."""
        page, unit, start = self.pool.paging.page, self.pool.paging.unit, row.work.position
        wanted = row.matchable(page, unit)[len(row.pages) :]
        if row.saved is not None or start != len(row.pages) * page or not wanted or wanted[0] not in self.prefix:
            return
        found = self.prefix.match(wanted)
        usable = len(found) - len(found) % (unit // page)
        self.prefix.pages.release(found[usable:])
        if usable:
            row.take_over(found[:usable], start + usable * page)

    def _publish(self, row: Row, index: int) -> None:
        """Offer page `index` of the prompt, which is part of a whole unit, to later requests."""
        parent = row.hashes[index - 1] if index else None
        row.pages[index] = self.prefix.publish(row.hashes[index], parent, row.pages[index])
        if row.shared == index and not self.prefix.pages.writable(row.pages[index]):
            row.shared += 1

    def _begin(self, row: Row, last: jax.Array) -> None:
        """Choose the first token of an answer from `last`, the hidden state [1,D] of the prompt's last token."""
        ticket = row.ticket
        counts = counts_of([ticket], self.pool.config.vocab_size, self.pool.mesh)
        choice = pick(self.pool.scores(last), counts, [ticket])
        self._last.place(ticket.row, choice.token, choice.counts)
        found = Pending(choice, list(row.reads.values()), [(0, ticket)])
        self._note(Due(self._step + max(1, self.lag), found, time.perf_counter()))
        row.reads = {}

    def _grow(self, row: Row, num_keys: int) -> bool:
        """Allocate the pages that a request still needs for `num_keys` keys; other requests may have to give way.

        Return False if the request itself had to give way, or failed.
        """
        while row.ticket.open and (count := ceil_div(num_keys, self.pool.paging.page) - len(row.pages)) > 0:
            try:
                row.pages += self.prefix.allocate(count)
            except OutOfPages:
                rows = {row.work.id: row for row in self._running if row.ticket.open}
                victim = rows[self.scheduler.victim([row.work for row in rows.values()]).id]
                if len(self._running) == 1:
                    self._events.append(
                        fail(row.ticket, MemoryError(f"{NO_ROOM} for {num_keys} keys: allow more pages, or pin fewer"))
                    )
                    return False
                self._give_way(victim)
                if victim is row:
                    return False
        return True

    def _give_way(self, row: Row) -> None:
        """Take the row and the pages away from a request, which then waits again.

        If the request has begun to answer, copy its unshared pages to the host.
        """
        self._drain(self._step + self.lag + 1)
        if row.ticket.open:
            self.preempted += 1
            if row.ticket.chosen and row.saved is None:  # else nothing is written that no prefill can write again
                row.saved = self.pool.save(row.pages[row.shared :])
                row.goal = row.shared * self.pool.paging.page
            self.waiting.appendleft(row.ticket)
        self.slots[row.ticket.row] = None
        self.prefix.pages.release(row.pages)
        row.leave()

    def _return(self, row: Row) -> None:
        """Resume the answer of a request that gave way: copy its saved pages back to the device."""
        ticket, tokens = row.ticket, row.ticket.answer.tokens
        if not self._grow(row, (row.shared + len(row.saved)) * self.pool.paging.page):
            return
        self.pool.restore(row.pages[row.shared :], row.saved)
        row.saved = None
        row.goal = 0
        counts = counts_of([ticket], self.pool.config.vocab_size, self.pool.mesh)
        self._last.place(ticket.row, put(np.array(tokens[-1:], np.int32), self.pool.mesh), counts)

    def _note(self, due: Due) -> None:
        for _, ticket in due.found.rows:
            ticket.chosen += 1
        self._sent.add(due)

    def _drain(self, step: int) -> None:
        """Take all results that are due at a step or before."""
        while (due := self._sent.next) is not None and due.step <= step:
            self._take()

    def _take(self) -> None:
        """Wait for the oldest result; if it has tokens, add them to their answers."""
        found = self._sent.take().found
        if not isinstance(found, Pending):
            return
        events, broken = hand_out(found, self.pool.params)
        self._events += events
        for ticket in broken:
            self.prefix.forget(self._rows[ticket.id].pages)
