"""A lane: the requests of one policy, each in one row of a shared cache. They join and leave between steps.

A request joins with a prefill, which runs chunk by chunk while other rows decode. If all rows join at once, one prefill
of the whole batch fills the cache in place. Otherwise a prefill of batch 1 fills a copy of the row, and the copy then
replaces the row: a prefill in place would compute and write every row. A free row keeps the keys that prefill wrote;
the prefill of a later prompt with the same prefix starts after them. Keys that decode wrote are never reused, because
under a sparse policy they differ from the keys that prefill would write.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tessera.runtime.choosing import Pending, count_reads, counts_of, fail, hand_out, pick, warm_choices
from tessera.runtime.last_tokens import LastTokens
from tessera.runtime.requests import Event, Held, Ticket
from tessera.runtime.sampling import Choice, Method
from tessera.runtime.step import Prefill, Session, require_room
from tessera.sparse.contract import Reads


class Joining(NamedTuple):
    """Requests whose prompts are being prefilled."""

    run: Prefill
    tickets: Sequence[Ticket]


class Lane:
    """One policy's requests and their cache.

    Args:
        session: the lane's cache, empty at first.
        lag: number of steps that the device runs ahead of the host.
        together: whether to prefill prompts in one batch when enough of them wait to fill all rows.
    """

    def __init__(self, session: Session, lag: int, together: bool = True):
        self.session, self.lag, self.together = session, lag, together or session.batch == 1
        self.slots: list[Ticket | None] = [None] * session.batch
        self.waiting: deque[Ticket] = deque()
        self._kept: list[Sequence[int]] = [()] * session.batch  # tokens whose keys prefill wrote, per row
        self._joining: Joining | None = None
        self._pending: deque[Pending] = deque()
        self._due = 0
        self._failed: list[Event] = []
        self._last = LastTokens(session.batch, session.config.vocab_size, session.mesh)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return any(ticket is not None and ticket.open for ticket in (*self.slots, *self.waiting))

    def advance(self) -> None:
        """Dispatch one decode step for the rows that are answering, and one prefill chunk for the rows that join."""
        self._release()
        before = len(self._pending)
        self._decode()
        self._join()
        after = len(self._pending)
        idle = after == before  # nothing was dispatched: drain what is pending, one step at a time
        guided = any(ticket is not None and ticket.guide is not None for ticket in self.slots)
        self._due = max(after - (0 if guided else self.lag), int(idle))  # a guide must see a token before the next

    def collect(self) -> list[Event]:
        """Wait for the oldest pending steps, as many as `advance` found to be due; return all new events."""
        events, self._failed = self._failed, []
        for _ in range(min(self._due, len(self._pending))):
            found, broken = hand_out(self._pending.popleft(), self.session.params)
            events += found
            for ticket in broken:
                self._kept[ticket.row] = ()
        return events

    def hold(self, tokens: Sequence[int]) -> Held:
        """Prefill the whole chunks of a prefix into a free row; see `Engine.hold`."""
        self._release()
        row = next((row for row, ticket in enumerate(self.slots) if ticket is None), None)
        if row is None:
            raise ValueError(
                "every row is in use: hold the prefix before submitting requests, or open an engine with more slots"
            )
        self._kept[row] = ()
        kept = list(tokens[: self.session.align(len(tokens))])
        if not kept:
            return Held(0, ())
        self._make_room(len(kept) + 1, len(kept))
        part = self.session if self.session.batch == 1 else self.session.row(row)
        _, reads = part.prefill([kept])
        if part is not self.session:
            self.session.put(row, part)
        jax.block_until_ready(self.session.cache)
        self._kept[row] = kept
        return Held(len(kept), reads)

    def warm(self, methods: Iterable[Method], *, joins: bool) -> int:
        """Run every program of the empty lane once; return the number of programs.

        With `joins`, include the programs for requests that join while others decode.
        """
        self._kept = [()] * self.session.batch
        methods, vocab_size, mesh = tuple(methods), self.session.config.vocab_size, self.session.mesh
        count = self.session.warm(prefill=self.together)
        count += warm_choices(methods, self.session.batch, vocab_size, mesh)
        if not joins or self.session.batch == 1:
            return count
        part = self.session.row(0)
        count += part.warm(decode=False) + warm_choices(methods, 1, vocab_size, mesh)
        self.session.put(0, part)
        jax.block_until_ready(self.session.cache)
        return count + 2 + self._last.warm(methods)

    def _release(self) -> None:
        """Free the rows of requests that have ended, except rows that a running prefill still writes."""
        if self._joining is not None and not any(ticket.open for ticket in self._joining.tickets):
            self._joining = None
        joining = () if self._joining is None else self._joining.tickets
        self.slots = [t if t is not None and (t.open or t in joining) else None for t in self.slots]

    def _decode(self) -> None:
        alive = [t for t in self.slots if t is not None and t.open and 0 < t.chosen < t.answer.limit]
        if not alive:
            return
        # Rows that are not alive write a key, too: at the last position, which `_kept` never counts.
        position = np.full(self.session.batch, self.session.num_keys - 1, np.int32)
        flags = np.zeros(self.session.batch, bool)
        for ticket in alive:
            position[ticket.row], flags[ticket.row] = ticket.answer.prompt_tokens + ticket.chosen - 1, True
        scores, reads = self.session.decode(self._last.token, position, flags)
        joined = [ticket if ticket is not None and ticket.chosen else None for ticket in self.slots]
        choice = pick(scores, self._last.counts, joined)
        self._last.set(choice)
        self._note(choice, reads, [(ticket.row, ticket) for ticket in alive])

    def _join(self) -> None:
        self._joining = self._start() if self._joining is None else self._joining
        if self._joining is None:
            return
        run, tickets = self._joining
        run.advance()
        for ticket in tickets:
            ticket.position = run.position
        if not run.done:
            return
        self._joining = None
        counts = counts_of(tickets, self.session.config.vocab_size, self.session.mesh)
        choice = pick(run.scores(), counts, tickets)
        if run.session is self.session:
            self._last.set(choice)
        else:
            self.session.put(tickets[0].row, run.session)
            self._last.place(tickets[0].row, choice.token, choice.counts)
        for ticket in tickets:
            self._kept[ticket.row] = ticket.request.prompt[: self.session.num_keys - 1]
        self._note(choice, run.reads, list(enumerate(tickets)))

    def _start(self) -> Joining | None:
        """Start the prefill of one waiting request in a free row, or of a whole batch in all rows.

        A whole batch starts if `together` is set, all rows are free and enough requests wait. Return None if no request
        waits, no row is free or a request fails for lack of memory.
        """
        self.waiting = deque(ticket for ticket in self.waiting if ticket.open)
        rows = [row for row, ticket in enumerate(self.slots) if ticket is None]
        if not (rows and self.waiting):
            return None
        whole = self.together and len(self.waiting) >= self.session.batch == len(rows)
        tickets = [self.waiting.popleft() for _ in range(self.session.batch if whole else 1)]
        answers = [ticket.answer for ticket in tickets]
        try:
            self._make_room(max(a.num_keys for a in answers), max(a.prompt_tokens for a in answers), part=not whole)
        except MemoryError as error:  # only the longest request fails; the others are tried again in the next step
            longest = max(tickets, key=lambda ticket: ticket.answer.num_keys)
            self._failed.append(fail(longest, error))
            self.waiting.extendleft(reversed(tickets))
            return None
        if not whole:
            rows = [max(rows, key=lambda row: self._reusable(row, tickets[0]))]
        start = min(self._reusable(row, ticket) for row, ticket in zip(rows, tickets))
        for row, ticket in zip(rows, tickets):
            self.slots[row], self._kept[row] = ticket, ()
            ticket.row, ticket.reused = row, start
            held = ticket.request.held
            if held is not None and held.reads and start == held.num_tokens:
                count_reads(ticket, held.reads, 0)
        session = self.session if whole else self.session.row(rows[0])
        return Joining(Prefill(session, [ticket.request.prompt for ticket in tickets], start), tickets)

    def _make_room(self, num_keys: int, num_tokens: int, *, part: bool = False) -> None:
        """Grow the cache to `num_keys` keys if it is smaller; raise MemoryError if the grown cache does not fit.

        With `part`, also raise it if a cache that need not grow leaves no room for a copy of one row.
        """
        session = self.session
        batch = session.batch if session.bucket(num_keys) > session.num_keys else int(part)
        if batch:
            room = max(num_keys, session.num_keys)
            require_room(
                session.params,
                session.config,
                batch=batch,
                num_keys=room,
                num_tokens=num_tokens,
                cache=session.cache_dtype,
            )
        session.reserve(num_keys)

    def _reusable(self, row: int, ticket: Ticket) -> int:
        """Return how many tokens at the start of the prompt need no prefill in this row.

        The number is a multiple of the smallest chunk, and never includes the prompt's last token.
        """
        prompt, kept = ticket.request.prompt, self._kept[row]
        limit = min(len(kept), len(prompt) - 1)
        if ticket.request.held is not None:
            limit = min(limit, ticket.request.held.num_tokens)
        return self.session.align(next((i for i in range(limit) if kept[i] != prompt[i]), limit))

    def _note(self, choice: Choice, reads: Sequence[Reads], rows: Sequence[tuple[int, Ticket]]) -> None:
        for _, ticket in rows:
            ticket.chosen += 1
        self._pending.append(Pending(choice, reads, rows))
