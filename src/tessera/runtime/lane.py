"""Run the requests of an engine in one pool. Prompts with a common prefix reuse the keys of that prefix.

When slots or pages run out, a request may have to give up its slot and pages, and wait again. This module ensures two
things:

- The prefix cache contains only keys that a prefill wrote, and only whole units (`Pool.unit` positions). The keys of
  a partial unit are not shared, because they depend on the tokens that are in the same query tile. Under a sparse
  policy, decode and prefill write different keys. An answer that is part of a later prompt is therefore prefilled.
- A request that gives way after its first token loses nothing: the pages after its last shared page are copied to the
  host. Its shared pages stay in the prefix cache; if they are evicted, a prefill writes the same keys again.
"""

import time
from collections import abc, deque

import jax
import numpy as np

from tessera.core.mesh import put
from tessera.core.shapes import ceil_div
from tessera.models.pages import OutOfPages
from tessera.runtime.choosing import Pending, counts_of, fail, hand_out, pick, warm_choices
from tessera.runtime.costs import LinearCosts
from tessera.runtime.dispatched import Dispatched, Due
from tessera.runtime.last_tokens import LastTokens
from tessera.runtime.pool import Pool
from tessera.runtime.prompt_scores import following, score_prompt_rows
from tessera.runtime.requests import Event, PoolState
from tessera.runtime.row_pool import RowPrefix
from tessera.runtime.sampling import Method
from tessera.runtime.scheduler import Scheduler
from tessera.runtime.sequence import Sequence
from tessera.runtime.step import read_head
from tessera.runtime.stored import StoredPrefix
from tessera.sparse.contract import Policy

GUESS = LinearCosts(base=5e-3, row=5e-4, pair=1e-7, answer=5e-3, key=1e-6)
"""Predicted costs of a step, until `warm` measures them."""
STEP_S = 0.1
"""Maximum predicted seconds of a step (`Scheduler.step_s`), until `warm` derives it from measured costs."""
STRETCH = 3.0
"""Maximum predicted seconds of a step (`Scheduler.step_s`), as a multiple of the seconds of a pure decode step.

The pure decode step is one of all slots, each with keys for half the context."""
BURSTS = 8
"""Number of bursts (`Scheduler.burst`) in the longest possible request.

With fewer, one tenant could run dozens of usual requests before the next tenant's turn."""
NO_ROOM = "the pool, without its pinned pages, is too small"


class Lane:
    """All requests of an engine, with their keys in one pool. The device runs `lag` steps ahead of the host."""

    def __init__(self, pool: Pool, prefix: StoredPrefix | RowPrefix, *, slots: int, lag: int):
        self.pool, self.lag, self.prefix = pool, lag, prefix
        sizes = tuple(size // pool.unit for size in reversed(pool.sizes))
        burst = max(1, pool.context // BURSTS)
        self.scheduler = Scheduler(GUESS, unit=pool.unit, sizes=sizes, step_s=STEP_S, order=pool.order, burst=burst)
        self._step = 0
        self.slots: list[Sequence | None] = [None] * slots
        self.waiting: deque[Sequence] = deque()
        self.preempted = 0
        self._known: dict[int, Sequence] = {}  # that wait or run, by id
        self._sent = Dispatched(self.scheduler.observe)
        self._events: list[Event] = []
        self._last = LastTokens(slots, pool.config.vocab_size, pool.mesh)

    def add(self, sequence: Sequence) -> None:
        sequence.hashes = self.prefix.hashes(sequence.request.prompt, sequence.tenant)
        sequence.goal = sequence.prompt_tokens
        self._known[sequence.id] = sequence
        self.waiting.append(sequence)

    def state(self) -> PoolState:
        """Free the pages of requests that have ended, and return how full the pool is."""
        self._release()
        count = self.prefix.pages.size - 1
        return PoolState(1 - self.prefix.available / count, self.prefix.num_cached / count, self.preempted)

    def advance(self) -> None:
        """Dispatch one decode step of the sequences that are answering, and as much prefill as the scheduler allows.

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
            guided = any(sequence.guide is not None for sequence in self._running)
            self._drain(self._step + (self.lag if guided else 0))
        events, self._events = self._events, []
        return events

    def pin(self, tokens: abc.Sequence[int], tenant: str) -> int:
        """Pin the pages of a prompt that has just been computed, cut to whole units; return the number of positions."""
        hashes = self.prefix.hashes(tokens[: len(tokens) - len(tokens) % self.pool.unit], tenant)
        self.prefix.pin(hashes)
        return len(hashes) * self.prefix.block

    def warm(self, methods: abc.Iterable[Method], *, extras: bool) -> int:
        """Run every program of the empty lane once (`extras`: those that score prompts, too), and measure the costs."""
        methods, count = tuple(methods), self.pool.warm(scores=extras)
        self.prefix.warmed()
        if self.pool.order == "edf":
            self._measure()
        batches = tuple(dict.fromkeys((1, *self.pool.batches)))
        count += sum(warm_choices(methods, batch, self.pool.config.vocab_size, self.pool.mesh) for batch in batches)
        return count + self._last.warm(methods, self.pool.batches)

    def _measure(self) -> None:
        """Time every program with few and with many keys; fit the scheduler's costs to the times and set its step_s."""
        samples = [
            (prefill, decode, min(self.pool.time(prefill, decode) for _ in range(2)))
            for prefill, decode in self.pool.examples()
        ]
        costs, keys = LinearCosts.fit(samples), self.pool.context // 2
        self.scheduler.calibrate(costs, STRETCH * costs.step_s([], [keys] * len(self.slots)))

    @property
    def _running(self) -> list[Sequence]:
        return [sequence for sequence in self.slots if sequence is not None]

    def _release(self) -> None:
        for index, sequence in enumerate(self.slots):
            if sequence is not None and not sequence.open:
                self.slots[index] = None
        for id in [id for id, sequence in self._known.items() if not sequence.open]:
            self.prefix.release(self._known.pop(id).pages)

    def _admit(self) -> None:
        """Give slots to waiting requests in the scheduler's order, as long as the pool has pages or others give way."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.open)
        if not self.waiting:
            return
        if None not in self.slots and len({each.tenant for each in (*self.waiting, *self._running)}) == 1:
            return
        prefill = [sequence for sequence in self._running if sequence.prefilling]
        for sequence in self.scheduler.admit(time.perf_counter(), list(self.waiting), prefill):
            if not self._fits(sequence):
                continue
            if None not in self.slots and self.scheduler.displaced(sequence, self._running) is None:
                return
            matched = self.prefix.match(sequence.matchable(self.prefix.block, self.pool.unit))
            need = min(sequence.need(self.pool.page), self.pool.width) - len(matched)
            while None not in self.slots or (self._running and need > self.prefix.available):
                victim = self.scheduler.displaced(sequence, self._running)
                if victim is None:
                    self.prefix.release(matched)
                    return  # nobody overtakes: the pages that come free next are this request's
                self._give_way(victim)
            self._enter(sequence, self.slots.index(None), matched)

    def _fits(self, sequence: Sequence) -> bool:
        """Return whether an empty pool could hold a request; if not, fail the request."""
        try:
            self.pool.require(sequence.answer.num_keys, sequence.prompt_tokens)
        except MemoryError as error:
            self.waiting.remove(sequence)
            self._events.append(fail(sequence, error))
            return False
        return True

    def _enter(self, sequence: Sequence, index: int, matched: list[int]) -> None:
        self.waiting.remove(sequence)
        self.slots[index], sequence.slot = sequence, index
        unit, page = self.pool.unit, self.pool.page
        usable = self.prefix.positions(matched) // unit * unit
        self.prefix.release(matched[ceil_div(usable, page) :])
        sequence.enter(matched[: ceil_div(usable, page)], usable)
        if sequence.saved is None:
            sequence.shared = sum(not self.prefix.pages.writable(each) for each in sequence.pages)
        if sequence.saved is not None and not sequence.prefilling:
            self._return(sequence)

    def _decode(self) -> None:
        """Dispatch one decode step of every sequence that is answering, one program call per policy and batch."""
        answering = [sequence for sequence in self._running if sequence.decoding]
        for sequence in answering:
            if self._runs(sequence):
                self._grow(sequence, sequence.num_keys)
        groups: dict[Policy, list[Sequence]] = {}
        for sequence in filter(self._runs, answering):  # some may have given way to others
            groups.setdefault(self.pool.decode_policy_at(sequence.num_keys - 1), []).append(sequence)
        largest = self.pool.batches[-1]
        for policy, group in groups.items():
            for first in range(0, len(group), largest):
                self._decode_batch(policy, group[first : first + largest])

    def _runs(self, sequence: Sequence) -> bool:
        return sequence.open and self.slots[sequence.slot] is sequence

    def _decode_batch(self, policy: Policy, group: abc.Sequence[Sequence]) -> None:
        batch, seats = self.pool.seats([sequence.pages for sequence in group])
        index = np.full(batch, len(self.slots), np.int32)  # padding
        index[seats] = [sequence.slot for sequence in group]
        seated: list[Sequence | None] = [None] * batch
        for seat, sequence in zip(seats, group):
            seated[seat] = sequence
        token, counts = self._last.take(index, counts=any(each.request.method.penalised for each in group))
        keys, began_s = [sequence.num_keys for sequence in group], time.perf_counter()
        scores, reads = self.pool.decode(policy, token, [n - 1 for n in keys], [each.pages for each in group])
        choice = pick(scores, counts, seated)
        self._last.update(index, choice)
        self._note(Due(self._step + self.lag, Pending(choice, reads, list(zip(seats, group))), began_s, decode=keys))
        for sequence in group:
            self.scheduler.served(sequence, 1)

    def _prefill(self) -> None:
        running = [sequence for sequence in self._running if sequence.open]
        prefill = [sequence for sequence in running if sequence.prefilling]
        if not prefill:
            return
        decode = [sequence for sequence in running if not sequence.prefilling]
        others = sum(sequence.open for sequence in self.waiting)
        for sequence, segments in self.scheduler.chunk(time.perf_counter(), prefill, decode, others):
            if self._runs(sequence):
                self._run(sequence, segments * self.pool.unit)

    def _run(self, sequence: Sequence, room: int) -> None:
        """Prefill up to `room` positions of one request; at its `goal`, choose the first token or resume the answer."""
        prompt, unit = sequence.request.prompt, self.pool.unit
        while room > 0 and sequence.prefilling:
            self._skip(sequence)
            start = sequence.position
            left = self.pool.boundary(start, min(start + room, sequence.goal)) - start
            size = self.pool.size_for(start, left, room)
            end = start + min(size, left)
            if not self._grow(sequence, end):
                return
            began_s = time.perf_counter()
            rows, reads = self.pool.prefill(prompt[start:end], start, sequence.pages, size)
            if sequence.request.prompt_logprobs is not None and sequence.saved is None:
                next_T = following(prompt, start, size)
                sequence.scored[start] = score_prompt_rows(self.pool.params, rows.hidden, next_T)
            self._sent.add(Due(self._step + max(1, self.lag), rows.last, began_s, prefill=[(start, size)]))
            sequence.position = end
            room -= size
            for index in range(start // self.prefix.block, (end - end % unit) // self.prefix.block):
                self._publish(sequence, index)
            if reads is not None and sequence.saved is None:
                sequence.reads[start] = reads
            self.scheduler.served(sequence, end - start)
            if sequence.prefilling:
                continue
            if sequence.saved is None:
                self._begin(sequence, rows.last)
            else:
                self._return(sequence)

    def _skip(self, sequence: Sequence) -> None:
        """Take over the next pages of the prompt if another request has computed them in the meantime."""
        page, unit, start = self.pool.page, self.pool.unit, sequence.position
        wanted = sequence.matchable(self.prefix.block, unit)[len(sequence.pages) :]
        if sequence.saved is not None or start != len(sequence.pages) * page:
            return
        if not wanted or wanted[0] not in self.prefix:
            return
        found = self.prefix.match(wanted)
        usable = len(found) - len(found) % (unit // page)
        self.prefix.release(found[usable:])
        if usable:
            sequence.take_over(found[:usable], start + usable * page)

    def _publish(self, sequence: Sequence, index: int) -> None:
        """Offer block `index` of the prompt, which is part of a whole unit, to later requests."""
        parent, place = sequence.hashes[index - 1] if index else None, index * self.prefix.block // self.pool.page
        sequence.pages[place] = self.prefix.publish(sequence.hashes[index], parent, sequence.pages[place])
        if sequence.shared == place and not self.prefix.pages.writable(sequence.pages[place]):
            sequence.shared += 1

    def _begin(self, sequence: Sequence, last: jax.Array) -> None:
        """Choose the first token of an answer from `last`, the hidden state [1,D] of the prompt's last token."""
        counts = counts_of([sequence], self.pool.config.vocab_size, self.pool.mesh)
        choice = pick(read_head(self.pool.params, last), counts, [sequence])
        self._last.place(sequence.slot, choice.token, choice.counts)
        found = Pending(choice, list(sequence.reads.values()), [(0, sequence)])
        self._note(Due(self._step + max(1, self.lag), found, time.perf_counter()))
        sequence.reads = {}

    def _grow(self, sequence: Sequence, num_keys: int) -> bool:
        """Allocate a request's pages for `num_keys` keys; return False if the request itself gave way, or failed."""
        while sequence.open and (count := ceil_div(num_keys, self.pool.page) - len(sequence.pages)) > 0:
            try:
                sequence.pages += self.prefix.allocate(count)
            except OutOfPages:
                if len(self._running) == 1:
                    error = f"{NO_ROOM} for {num_keys} keys: allow more pages, or pin fewer"
                    self._events.append(fail(sequence, MemoryError(error)))
                    return False
                victim = self.scheduler.victim([each for each in self._running if each.open])
                self._give_way(victim)
                if victim is sequence:
                    return False
        return True

    def _give_way(self, sequence: Sequence) -> None:
        """Take the slot and the pages away from a request, which waits again; copy an answer's unshared pages first."""
        self._drain(self._step + self.lag + 1)
        if sequence.open:
            self.preempted += 1
            if sequence.generated and sequence.saved is None:  # else a prefill can write all keys again
                sequence.saved = self.pool.save(sequence.pages[sequence.shared :])
                sequence.goal = sequence.shared * self.pool.page
            self.waiting.appendleft(sequence)
        self.slots[sequence.slot] = None
        self.prefix.release(sequence.pages)
        sequence.leave()

    def _return(self, sequence: Sequence) -> None:
        """Resume the answer of a request that gave way: copy its saved pages back to the device."""
        if not self._grow(sequence, (sequence.shared + len(sequence.saved)) * self.pool.page):
            return
        self.pool.restore(sequence.pages[sequence.shared :], sequence.saved)
        sequence.saved = None
        sequence.goal = 0
        counts = counts_of([sequence], self.pool.config.vocab_size, self.pool.mesh)
        self._last.place(sequence.slot, put(np.array(sequence.answer.tokens[-1:], np.int32), self.pool.mesh), counts)

    def _note(self, due: Due) -> None:
        for _, sequence in due.found.rows:
            sequence.generated += 1
        self._sent.add(due)

    def _drain(self, step: int) -> None:
        while (due := self._sent.next) is not None and due.step <= step:
            self._take()

    def _take(self) -> None:
        found = self._sent.take().found
        if not isinstance(found, Pending):
            return
        events, broken = hand_out(found, self.pool.params)
        self._events += events
        for sequence in broken:
            self.prefix.forget(self._known[sequence.id].pages)
