"""Record, on the host, which sequences use which pages of the pool that holds all sequences' keys and values.

A page is free, active (a sequence uses it) or cached (no sequence uses it, but its contents are kept). A page that was
just allocated has one owner, which may write to it. `seal` ends the writing; only a sealed page can be shared. When the
last user of a sealed page releases it, the page is cached until `share` or `evict`. `discard` removes the seal from a
page whose contents are bad. Page 0 is the null page: it is in no list, batch rows without a sequence write to it, and
page tables are padded with it.

    free --allocate--> active --seal--> active, sealed <--share/release--> cached --evict--> free
                       active --release--> free
                       active <--discard-- active, sealed
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

NULL = 0
"""Pool index of the null page."""


class OutOfPages(MemoryError):
    """Error: the pool has too few free pages. Evicting cached pages or releasing active ones frees some."""


class Pages:
    """Free list and reference counts of a pool of `size` pages, the null page included, of `page` positions each."""

    def __init__(self, size: int, page: int):
        if size < 2 or page < 1:
            raise ValueError(
                f"a pool needs at least 2 pages (one is the null page) of at least 1 position, got {size=}, {page=}"
            )
        self.size, self.page = size, page
        self._free = deque(range(1, size))
        self._count = [0] * size
        self._sealed = [False] * size
        self._cached: dict[int, None] = {}  # in order of release

    @property
    def free(self) -> tuple[int, ...]:
        """Free pages, in the order in which `allocate` hands them out."""
        return tuple(self._free)

    @property
    def cached(self) -> tuple[int, ...]:
        """Sealed pages without a user, in the order in which they were released."""
        return tuple(self._cached)

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(page for page, count in enumerate(self._count) if count)

    def references(self, page: int) -> int:
        return self._count[self._known(page)]

    def writable(self, page: int) -> bool:
        """Return whether a page has only one user and is not sealed, so that its user may write to it."""
        return self._count[self._known(page)] == 1 and not self._sealed[page]

    def allocate(self, count: int) -> list[int]:
        """Take free pages, which the caller then owns and may write to; raise OutOfPages if too few are free."""
        if count < 0:
            raise ValueError(f"{count=} must not be negative")
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages of {self.page} positions are needed, but only {len(self._free)} of {self.size - 1} are "
                f"free ({len(self._cached)} are cached): evict cached pages or wait for a request to end"
            )
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._count[page] = 1
        return taken

    def seal(self, pages: Iterable[int]) -> None:
        """Make active pages read-only, so that they can be shared and cached. Sealed pages stay sealed."""
        for page in self._all(pages, lambda page: self._count[page], "seal", "it is not in use"):
            self._sealed[page] = True

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to sealed pages, active or cached; nothing is copied."""
        for page in self._all(pages, lambda page: self._sealed[page], "share", "it is not sealed"):
            self._count[page] += 1
            self._cached.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """Remove one user from each page. A page with no users left becomes cached if it is sealed, else free."""
        pages = list(pages)
        if len(set(pages)) < len(pages):
            raise ValueError(f"cannot release {pages}: a sequence uses a page only once")
        for page in self._all(pages, lambda page: self._count[page], "release", "it is not in use"):
            self._count[page] -= 1
            if self._count[page]:
                continue
            if self._sealed[page]:
                self._cached[page] = None
            else:
                self._free.append(page)

    def evict(self, pages: Iterable[int]) -> None:
        """Make cached pages free; their contents are lost."""
        pages = list(dict.fromkeys(pages))
        for page in self._all(pages, lambda page: page in self._cached, "evict", "it is not cached"):
            del self._cached[page]
            self._sealed[page] = False
            self._free.append(page)

    def discard(self, pages: Iterable[int]) -> None:
        """Unseal pages: they can no longer be shared, and each becomes free as soon as it has no user."""
        pages = self._all(pages, lambda page: self._sealed[page], "discard", "it is not sealed")
        self.evict(page for page in pages if page in self._cached)
        for page in pages:
            self._sealed[page] = False

    def _known(self, page: int) -> int:
        if not 0 < page < self.size:
            raise ValueError(f"{page=} must be from 1 to {self.size - 1}; page {NULL} is the null page")
        return page

    def _all(self, pages: Iterable[int], fits, verb: str, reason: str) -> list[int]:
        """Return the pages as a list; raise ValueError, before anything changes, if fits(page) is false for one."""
        pages = list(pages)
        for page in pages:
            if not fits(self._known(page)):
                raise ValueError(f"cannot {verb} {page=}: {reason}")
        return pages


def page_table(rows: Sequence[Sequence[int]], num_pages: int) -> Int32[np.ndarray, "B J"]:
    """Return the page table of a batch from each sequence's pages; pad each row with the null page to num_pages."""
    table = np.full((len(rows), num_pages), NULL, np.int32)
    for row, pages in zip(table, rows):
        if len(pages) > num_pages:
            raise ValueError(f"a sequence of {len(pages)} pages does not fit into a table of {num_pages=}")
        row[: len(pages)] = pages
    return table
