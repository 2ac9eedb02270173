"""The record of one request, from its submission to its last token."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from tessera.core.shapes import ceil_div
from tessera.models.cache import Cache
from tessera.runtime.answers import Answer
from tessera.runtime.requests import Guide, Request
from tessera.runtime.scheduler import Work
from tessera.sparse.contract import Reads


@dataclass(kw_only=True, eq=False)
class Sequence(Work):
    """A request inside an engine: what the scheduler sees of it (`Work`), its answer, and where its keys are.

    Attributes:
        guide: the answer's Guide, in its state after the tokens that the host has read.
        guided: bias of the next token's logits (`bias.guided_bias`), if there is a guide.
        scored, reads: scores of the prompt's tokens and key counts, by the first position of each prefill call.
        reused: number of prompt tokens whose keys were in the cache.
        pages: pages that hold the sequence's keys, in order of position; none while it waits.
        shared: number of leading pages that are in the prefix cache; this sequence writes only later pages.
        goal: number of positions to prefill: the whole prompt, or only the shared pages if the sequence gave way (to
            another) during its answer.
        saved: host copies of the pages after the shared ones, if the sequence gave way during its answer.
        computed: (start, end) of the positions that the sequence itself had computed when it last gave way.
    """

    request: Request
    answer: Answer
    guide: Guide | None = None
    guided: Float[np.ndarray, "V"] | None = None
    scored: dict[int, Any] = field(default_factory=dict)
    slot: int = 0
    reused: int = 0
    dropped: bool = False
    hashes: abc.Sequence[bytes] = ()
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    goal: int = 0
    saved: list[Cache] | None = None
    reads: dict[int, Reads] = field(default_factory=dict)
    computed: tuple[int, int] = (0, 0)

    @property
    def open(self) -> bool:
        return not (self.dropped or self.answer.done)

    @property
    def prefilled(self) -> tuple[int, int]:
        """Numbers of prompt tokens prefilled so far and to prefill in total. Reused tokens count in neither."""
        total = self.prompt_tokens - self.reused
        done = total if self.answer.tokens or not self.open else self.position - self.reused
        return min(max(done, 0), total), total

    @property
    def prefilling(self) -> bool:
        return self.position < self.goal

    @property
    def decoding(self) -> bool:
        return not self.prefilling and 0 < self.generated < self.answer.limit

    @property
    def num_keys(self) -> int:
        """Number of keys after the next decode step."""
        return self.prompt_tokens + self.generated

    def need(self, page: int) -> int:
        """Return how many pages should be available before the sequence runs: one more than its keys fill."""
        return ceil_div(self.num_keys, page) + 1

    def matchable(self, block: int, unit: int) -> abc.Sequence[bytes]:
        """Return the hashes of the blocks to look up in the prefix cache: those of whole units before the prompt's last
        token, or the shared pages of an answer that gave way.
        """
        if self.saved is not None:
            return self.hashes[: self.shared]
        if self.request.prompt_logprobs is not None:
            return []  # every row is needed for its scores
        return self.hashes[: (self.prompt_tokens - 1) // unit * unit // block]

    def enter(self, pages: list[int], position: int) -> None:
        """Start with cached pages that hold the keys of all positions before `position`."""
        self.pages, self.position = pages, position
        if self.saved is None:
            self.shared, self.goal = len(pages), self.prompt_tokens
            first, last = self.computed  # positions that the sequence itself computed are not reused
            self.reused = position - max(0, min(position, last) - first)
            self.reads = {start: reads for start, reads in self.reads.items() if start < position}
            self.scored.clear()  # all rows are computed again, perhaps in other prefills

    def take_over(self, pages: list[int], position: int) -> None:
        """Add cached pages that another sequence has computed; they hold the keys up to `position`."""
        self.reused += position - self.position
        self.pages = [*self.pages, *pages]
        self.shared, self.position = len(self.pages), position

    def leave(self) -> None:
        self.computed = self.reused, self.position
        self.pages, self.position = [], 0
