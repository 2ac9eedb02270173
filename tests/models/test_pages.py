"""The pool of pages: a state machine compares it with a model; and writing through a page table."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiny import CONFIG

from tessera.attention.reference import contiguous
from tessera.models.cache import Cache, extend, init_cache
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

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def discard(self, data):
        bad = data.draw(st.lists(st.sampled_from(sorted(self.done)), unique=True))
        self.pool.discard(bad)
        self.done = {page: what for page, what in self.done.items() if page not in bad}

    @rule(page=st.integers(-1, SIZE), verb=st.sampled_from(["share", "seal", "release", "evict", "discard"]))
    def refuse(self, page, verb):
        """What does not fit a page's state raises and changes nothing."""
        used = Counter(page for row in self.rows for page in row)
        sealed = page in self.done
        allowed = {"share": sealed, "discard": sealed, "evict": page in self.pool.cached}.get(verb, page in used)
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
    with pytest.raises(OutOfPages, match="3 pages of 16 positions are needed, but only 2 of 2 are free"):
        Pages(3, 16).allocate(3)
    pool = Pages(3, 16)
    pages = pool.allocate(2)
    with pytest.raises(ValueError, match="a sequence uses a page only once"):
        pool.release([pages[0], pages[0]])
    assert pool.references(pages[0]) == 1
    with pytest.raises(ValueError, match="3 pages does not fit into a table of num_pages=2"):
        page_table([[1], [1, 2, 3]], 2)
    assert np.array_equal(page_table([[2, 1], []], 3), [[2, 1, NULL], [NULL] * 3])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_cache_written_through_its_table_holds_what_a_contiguous_one_holds(dtype):
    """Chunks of 8 rows, which are runs of half a page, then single tokens, which cross the end of a page.

    Sequence 2 is dead: its table lists live pages of sequence 0 on purpose, and it must not write them.
    """
    page, rng = 16, np.random.default_rng(0)
    table = np.array([[5, 2, 7], [3, 8, 0], [5, 2, 7]], np.int32)
    whole = init_cache(CONFIG, 3, 3 * page, dtype=dtype, stacked=True)
    pool = init_cache(CONFIG, 9, page, dtype=dtype, stacked=True)
    pool = jax.tree.map(lambda x: jnp.full_like(x, 77 if x.dtype == jnp.int8 else jnp.nan), pool)
    pool = pool._replace(pages=jnp.asarray(table))
    layer = (jnp.int32(1),)
    step = jax.jit(lambda cache, k, v, start, count: extend(cache, k, v, start, layer, q_len=count), donate_argnums=0)
    chunks = [
        (8, (0, 0, 0), (8, 8, 0)),
        (8, (8, 8, 40), (8, 8, 0)),
        (8, (16, 16, 0), (8, 3, 0)),
        (8, (24, 40, 0), (7, 0, 0)),
    ]
    tokens = [(1, (31, 19, 47), (1, 1, 0)), (1, (32, 20, 3), (1, 1, 0))]
    lengths = np.zeros(3, int)
    for num_rows, start, count in chunks + tokens:
        k, v = (rng.standard_normal((3, num_rows, 2, 16)).astype(np.float32) for _ in "kv")
        where = np.array(start, np.int32), np.array(count, np.int32)
        whole, pool = (step(cache, k, v, *where) for cache in (whole, pool))
        lengths = np.where(where[1] > 0, where[0] + where[1], lengths)
    assert lengths.tolist() == [33, 21, 0]
    held, meant = contiguous(pool.key_values(layer)), whole.key_values(layer)
    for b, length in enumerate(lengths):
        for x, y, axis in zip(held, meant, (1, 1, None, 2)):
            if x is not None:
                x, y = (np.moveaxis(np.asarray(z[b]), axis, 0)[:length] for z in (x, y))
                assert x.tobytes() == y.tobytes()
    rest = [1, 4, 6]  # in no table
    for x in jax.tree.leaves(pool._replace(pages=None)):
        other, mine = np.asarray(x[0]), np.asarray(x[1])[rest]
        assert all(
            (z == 77).all() if z.dtype == np.int8 else np.isnan(z.astype(np.float32)).all() for z in (other, mine)
        )


def test_writing_pages_copies_no_pool():
    shape = jax.ShapeDtypeStruct
    pool = shape((2, 4096, 2, 64, 16), jnp.float32)
    cache = Cache(pool, pool, pages=shape((4, 512), jnp.int32))
    for num_rows in (1, 128):
        new, where = shape((4, num_rows, 2, 16), jnp.float32), shape((4,), jnp.int32)
        step = jax.jit(lambda cache, k, v, at, n: extend(cache, k, v, at, (at[0],), q_len=n), donate_argnums=0)
        used = step.lower(cache, new, new, where, where).compile().memory_analysis()
        assert used.temp_size_in_bytes < 1 << 20
