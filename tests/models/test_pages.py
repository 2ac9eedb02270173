"""The pool of pages: a state machine compares it with a model; and writing through a page table."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tessera.models.pages import NULL, OutOfPages, Pages, page_table

SIZE = 9


class Sequences(RuleBasedStateMachine):
    """Sequences that start on shared pages, add pages of their own, seal a part of these, and end.

    `rows` lists each sequence's pages, and `done` the sealed ones with what was written into them. Every page's
    contents are modelled as the number of the write that filled it, so that a page that is handed out while it is still
    in use or cached shows as changed contents.
    """

    def __init__(self):
        super().__init__()
        self.pool, self.rows, self.done = Pages(SIZE, 16), [], {}
        self.contents, self.written = {}, 0

    def write(self, pages):
        for page in pages:
            assert self.pool.writable(page)
            assert sum(page in row for row in self.rows) <= 1
            self.written += 1
            self.contents[page] = self.written

    @rule(count=st.integers(0, 4), data=st.data())
    def start(self, count, data):
        shared = data.draw(st.lists(st.sampled_from(sorted(self.done)), unique=True)) if self.done else []
        self.pool.share(shared)
        try:
            new = self.pool.allocate(count)
        except OutOfPages:
            assert len(self.pool.free) < count
            self.pool.release(shared)
            return
        assert not set(new) & (self.done.keys() | {page for row in self.rows for page in row})
        self.rows.append(shared + new)
        self.write(new)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def seal(self, data):
        row = data.draw(st.sampled_from(self.rows))
        pages = row[: data.draw(st.integers(0, len(row)))]
        self.pool.seal(pages)
        self.done |= {page: self.contents[page] for page in pages}

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def rewrite(self, data):
        row = data.draw(st.sampled_from(self.rows))
        self.write([page for page in row if self.pool.writable(page)])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data):
        self.pool.release(self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1))))

    @precondition(lambda self: self.pool.cached)
    @rule(data=st.data())
    def evict(self, data):
        cached = self.pool.cached
        gone = cached[: data.draw(st.integers(1, len(cached)))]
        self.pool.evict(gone)
        self.done = {page: what for page, what in self.done.items() if page not in gone}

    @rule(page=st.integers(-1, SIZE), verb=st.sampled_from(["share", "seal", "release", "evict"]))
    def refuse(self, page, verb):
        """What does not fit a page's state raises and changes nothing."""
        used = Counter(page for row in self.rows for page in row)
        allowed = {"share": page in self.done, "evict": page in self.pool.cached}.get(verb, page in used)
        if not allowed:
            before = self.state()
            with pytest.raises(ValueError, match=f"page={page}"):
                getattr(self.pool, verb)([page])
            assert self.state() == before

    def state(self):
        pages = range(1, SIZE)
        return self.pool.free, self.pool.cached, [(self.pool.references(p), self.pool.writable(p)) for p in pages]

    @invariant()
    def every_page_is_in_one_place(self):
        pool, used = self.pool, Counter(page for row in self.rows for page in row)
        assert sorted(pool.free + pool.active + pool.cached) == list(range(1, SIZE))
        assert set(pool.active) == set(used)
        assert set(pool.cached) == self.done.keys() - used.keys()
        for page in range(1, SIZE):
            assert pool.references(page) == used[page] >= 0
            assert pool.writable(page) == (used[page] == 1 and page not in self.done)

    @invariant()
    def sealed_pages_keep_their_contents(self):
        assert all(self.contents[page] == what for page, what in self.done.items())


Sequences.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, database=None, derandomize=True
)
TestHistories = Sequences.TestCase


def test_bad_sizes_and_tables_are_refused_by_name():
    with pytest.raises(ValueError, match="size=1, page=16"):
        Pages(1, 16)
    with pytest.raises(ValueError, match="count=-1 must not be negative"):
        Pages(2, 16).allocate(-1)
    with pytest.raises(OutOfPages, match="3 pages of 16 positions are needed, 2 of 2 are free and 0 cached"):
        Pages(3, 16).allocate(3)
    pool = Pages(3, 16)
    pages = pool.allocate(2)
    with pytest.raises(ValueError, match="a sequence uses a page only once"):
        pool.release([pages[0], pages[0]])
    assert pool.references(pages[0]) == 1
    with pytest.raises(ValueError, match="3 pages does not fit into a table of num_pages=2"):
        page_table([[1], [1, 2, 3]], 2)
    assert np.array_equal(page_table([[2, 1], []], 3), [[2, 1, NULL], [NULL] * 3])
