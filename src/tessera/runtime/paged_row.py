"""The record of one request in a lane with pages: which pages it has, and how much of it is computed."""

from dataclasses import dataclass, field

from tessera.core.shapes import ceil_div
from tessera.models.cache import Cache
from tessera.runtime.requests import Ticket
from tessera.runtime.scheduler import Work
from tessera.sparse.contract import Reads


@dataclass(eq=False, kw_only=True)
class Row:
    """A lane's record of one request, whether it waits or runs.

    Attributes:
        ticket: the request.
        work: the request as the scheduler sees it.
        hashes: hashes of the prompt's full pages.
        pages: pages that hold the request's keys, in order of position; none while it waits.
        shared: number of leading pages that are in the prefix cache; this request writes only later pages.
        goal: number of positions to prefill: the whole prompt, or only the shared pages if the request gave way (to
            another request) during its answer.
        saved: host copies of the pages after the shared ones, if the request gave way during its answer and waits to
            resume it; else None.
        reads: key counts of the prompt's prefill chunks so far, by the chunk's first position.
        computed: (start, end) of the positions that the request itself had computed when it last gave way.
    """

    ticket: Ticket
    work: Work
    hashes: list[bytes]
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    goal: int = 0
    saved: list[Cache] | None = None
    reads: dict[int, Reads] = field(default_factory=dict)
    computed: tuple[int, int] = (0, 0)

    @property
    def prefilling(self) -> bool:
        """Whether positions must be prefilled before the next token can be decoded."""
        return self.work.position < self.goal

    @property
    def num_keys(self) -> int:
        """Number of keys after the next decode step."""
        return self.ticket.answer.prompt_tokens + self.ticket.chosen

    def need(self, page: int) -> int:
        """Return how many pages should be available before the request gets a row: one more than its keys fill."""
        return ceil_div(self.num_keys, page) + 1

    def matchable(self, page: int, unit: int) -> list[bytes]:
        """Return the hashes of the pages to look up in the prefix cache.

        These are the pages of whole units before the prompt's last token, or the shared pages of an answer that gave
        way. A request with `prompt_logprobs` looks up none.
        """
        if self.saved is not None:
            return self.hashes[: self.shared]
        if self.ticket.request.prompt_logprobs is not None:
            return []  # every row is needed for its scores
        return self.hashes[: (self.ticket.answer.prompt_tokens - 1) // unit * unit // page]

    def move(self, position: int) -> None:
        """Record that the pages hold the keys of all positions before `position`."""
        self.work.position = self.ticket.position = position

    def enter(self, pages: list[int], position: int) -> None:
        """Start with cached pages that hold the keys of all positions before `position`."""
        self.pages = pages
        self.move(position)
        if self.saved is None:
            self.shared, self.goal = len(pages), self.ticket.answer.prompt_tokens
            first, last = self.computed  # positions that the request itself computed are not reused
            self.ticket.reused = position - max(0, min(position, last) - first)
            self.reads = {start: reads for start, reads in self.reads.items() if start < position}
            self.ticket.scored.clear()  # all rows are computed again, perhaps in other prefills

    def take_over(self, pages: list[int], position: int) -> None:
        """Add cached pages that another request has computed; they hold the keys up to `position`."""
        self.ticket.reused += position - self.work.position
        self.pages = [*self.pages, *pages]
        self.shared = len(self.pages)
        self.move(position)

    def leave(self) -> None:
        """Record that the request has lost all pages and waits again."""
        self.computed = self.ticket.reused, self.work.position
        self.pages, self.work.position = [], 0
