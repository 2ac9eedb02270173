"""The prefix cache: a state machine compares it with a model that knows what every page contains."""

import inspect
from collections import Counter
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tessera.models.pages import OutOfPages, Pages
from tessera.runtime.prefix import Prefix, salt

SIZE, PAGE = 7, 2
PARTS = {
    "weights": "w1",
    "plan": "p1",
    "dtype": "float32",
    "unit": 64,
    "crossover": 4096,
    "kernels": {"dense": "xla.prefill block=512"},
    "code": "c1",
}
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


class Row:
    """One request: what each full page should contain, its hashes and pages, and how many of these are published."""

    def __init__(self, tenant, tokens, hashes, pages, published):
        self.keys = [(tenant, *tokens[: (i + 1) * PAGE]) for i in range(len(tokens) // PAGE)]
        self.hashes, self.pages, self.published = hashes, pages, published


class Requests(RuleBasedStateMachine):
    """Requests that match, allocate, publish and end, with pins and bad pages among them.

    The model: `contents` is what was written into each page (None: computed from bad keys), `held` the page that should
    hold each key, `pins` the pinned chains, and `bad` the withdrawn pages in use with their keys. A key is a tenant and
    all tokens up to the page's end.
    """

    def __init__(self):
        super().__init__()
        self.pool = Pages(SIZE, PAGE)
        self.prefix = Prefix(self.pool, salt(**PARTS))
        self.rows, self.contents, self.held, self.pins, self.bad = [], {}, {}, [], {}

    def children(self, key):
        return [other for other in self.held if len(other) == len(key) + PAGE and other[: len(key)] == key]

    def users(self):
        used = Counter(page for row in self.rows for page in row.pages)
        used.update(self.held[key] for chain in self.pins for key in chain if key in self.held)
        return used

    def evictions(self, count):
        """Evict one page after another, each time the longest unused one without a held child; None if that fails."""
        held, gone, before = dict(self.held), [], list(self.pool.cached)
        try:
            while len(gone) < count:
                key = next(k for page in before for k in self.held if held.get(k) == page and not self.children(k))
                gone.append(self.held[key])
                del self.held[key]
        except StopIteration:
            gone = None
        left, self.held = self.held, held
        return gone, left

    @rule(tenant=st.sampled_from(["", "b"]), tokens=TOKENS, data=st.data())
    def serve(self, tenant, tokens, data):
        """A whole request. Without this rule, a history seldom caches anything."""
        if row := self.admit(tenant, tokens):
            self.publish_up_to(row, len(row.keys))
            self.release(row, data)

    @precondition(lambda self: len(self.rows) < 2)
    @rule(tenant=st.sampled_from(["", "b"]), tokens=TOKENS)
    def start(self, tenant, tokens):
        self.admit(tenant, tokens)

    def admit(self, tenant, tokens):
        """Match and allocate; return the new row, or None if the pool is full."""
        hashes = self.prefix.hashes(tokens, tenant)
        row = Row(tenant, tokens, hashes, self.prefix.match(hashes), 0)
        assert row.pages == [self.held[key] for key in takewhile(lambda key: key in self.held, row.keys)]
        assert [self.contents[page] for page in row.pages] == row.keys[: len(row.pages)]
        row.published = len(row.pages)
        count = -(-len(tokens) // PAGE) - len(row.pages)
        before, free = self.state(), len(self.pool.free)
        gone, left = self.evictions(count - free)
        try:
            new = self.prefix.allocate(count)
        except OutOfPages:
            assert gone is None
            assert self.state() == before
            self.pool.release(row.pages)
            return None
        assert gone is not None
        assert new[free:] == gone[: max(0, count - free)]
        self.held = left
        assert all(self.pool.writable(page) for page in new)
        assert not set(new) & {page for other in self.rows for page in other.pages}
        row.pages += new
        self.rows.append(row)
        self.contents |= dict(zip(new, row.keys[row.published :] + [None]))
        return row

    @precondition(lambda self: any(row.published < len(row.keys) for row in self.rows))
    @rule(data=st.data())
    def publish(self, data):
        row = data.draw(st.sampled_from([row for row in self.rows if row.published < len(row.keys)]))
        self.publish_up_to(row, data.draw(st.integers(row.published + 1, len(row.keys))))

    def publish_up_to(self, row, end):
        for i in range(row.published, end):
            key, page = row.keys[i], row.pages[i]
            row.pages[i] = self.prefix.publish(row.hashes[i], row.hashes[i - 1] if i else None, page)
            row.published = i + 1
            if key not in self.bad.values() and (i == 0 or row.keys[i - 1] in self.held):
                assert row.pages[i] == self.held.setdefault(key, page)
            else:
                assert row.pages[i] == page

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data):
        self.release(data.draw(st.sampled_from(self.rows)), data)

    def release(self, row, data):
        self.rows.remove(row)
        self.bad = {page: key for page, key in self.bad.items() if any(page in other.pages for other in self.rows)}
        self.pool.release(data.draw(st.permutations(row.pages)))

    @precondition(lambda self: len(self.pins) < 2)
    @rule(tenant=st.sampled_from(["", "b"]), tokens=TOKENS)
    def pin(self, tenant, tokens):
        self.prefix.pin(self.prefix.hashes(tokens, tenant))
        chain = Row(tenant, tokens, [], [], 0).keys
        self.pins.append(chain)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        chain = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.prefix.unpin(self.prefix.hashes(chain[-1][1:], chain[-1][0]) if chain else [])

    @precondition(lambda self: self.rows or self.held)
    @rule(data=st.data())
    def forget(self, data):
        """A bad page also spoils what its users compute after it."""
        pages = data.draw(st.sampled_from([*(row.pages for row in self.rows), sorted(self.held.values())]))
        bad = pages[data.draw(st.integers(0, len(pages))) :][:2]
        gone = self.prefix.forget(bad)
        assert len(gone) == len(set(gone))
        before = len(self.held)
        for key in [key for key, page in self.held.items() if page in bad]:
            for other in [other for other in self.held if other[: len(key)] == key]:
                page = self.held.pop(other)
                self.contents[page] = None
                if any(page in row.pages for row in self.rows):
                    self.bad[page] = other
        assert len(gone) == before - len(self.held)
        for row in self.rows:
            spoilt = [i for i, page in enumerate(row.pages) if self.contents.get(page, 0) is None]
            self.contents |= dict.fromkeys(row.pages[spoilt[0] :] if spoilt else [], None)

    def state(self):
        counts = [(self.pool.references(page), self.pool.writable(page)) for page in range(1, SIZE)]
        return self.pool.free, self.pool.cached, counts

    @invariant()
    def every_page_is_in_one_place(self):
        pool, used = self.pool, self.users()
        assert sorted(pool.free + pool.active + pool.cached) == list(range(1, SIZE))
        assert self.prefix.available + len(used) == SIZE - 1
        assert set(pool.cached) == set(self.held.values()) - used.keys()
        for page in range(1, SIZE):
            assert pool.references(page) == used[page]
            assert pool.writable(page) == (used[page] == 1 and page not in self.held.values())

    @invariant()
    def held_pages_contain_what_their_hash_says(self):
        assert all(self.contents[page] == key for key, page in self.held.items())


Requests.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, database=None, derandomize=True
)
TestRequests = Requests.TestCase


def published(prefix, tokens, tenant=""):
    """Prefill the full pages of a request, which stays active; return its hashes and pages."""
    hashes = prefix.hashes(tokens, tenant)
    pages = prefix.match(hashes)
    pages += prefix.allocate(len(hashes) - len(pages))
    parents = [None, *hashes]
    return hashes, [prefix.publish(name, parent, page) for name, parent, page in zip(hashes, parents, pages)]


def test_every_part_of_the_salt_changes_it_and_none_has_a_default():
    other = {"weights": "w2", "plan": None, "dtype": "int8", "unit": 128, "crossover": 0, "kernels": {"dense": "b=64"}}
    other |= {"code": "c2"}
    found = {salt(**PARTS), *(salt(**PARTS | {name: value}) for name, value in other.items())}
    assert len(found) == 1 + len(PARTS)
    for name, part in inspect.signature(salt).parameters.items():
        assert (part.kind, part.default) == (part.KEYWORD_ONLY, part.empty)
        with pytest.raises(TypeError, match=name):
            salt(**{key: value for key, value in PARTS.items() if key != name})
    for name, value in {"weights": "", "plan": "", "kernels": {}, "code": None}.items():
        with pytest.raises(ValueError, match=f"{name}={value!r} names nothing"):
            salt(**PARTS | {name: value})


def test_a_hash_names_the_salt_the_tenant_and_every_token_so_far():
    pool, one = Pages(5, 3), salt(**PARTS)
    tokens = [5, 6, 7, 8, 9, 10, 11]
    hashes = Prefix(pool, one).hashes(tokens)
    assert [len(name) for name in hashes] == [32, 32]
    assert Prefix(pool, one).hashes(np.array(tokens[:6], np.int64)) == hashes
    assert Prefix(pool, one).hashes([*tokens[:5], 99])[0] == hashes[0]
    others = [Prefix(pool, one).hashes([*tokens[:i], 99, *tokens[i + 1 :]])[1] for i in range(6)]
    others += [Prefix(pool, one).hashes(tokens, tenant)[i] for tenant in "ab" for i in (0, 1)]
    others += Prefix(pool, salt(**PARTS | {"plan": "p2"})).hashes(tokens)
    assert len({*hashes, *others}) == 14
    assert Prefix(pool, one).hashes([]) == Prefix(pool, one).hashes([1, 2]) == []


def test_a_child_goes_before_its_parent_and_an_active_or_pinned_page_stays():
    prefix = Prefix(Pages(7, 1), b"s")
    a, chain = published(prefix, [1, 2, 3])
    b, other = published(prefix, [4])
    prefix.pages.release(other)
    prefix.pages.release(chain)  # the parent first, so it is longer unused than its children
    prefix.pages.release(prefix.match(a[2:]))  # touches the grandchild alone
    new = prefix.allocate(5)
    assert new[2:] == [other[0], chain[2], chain[1]]
    assert prefix.match(a) == chain[:1]
    with pytest.raises(OutOfPages, match="1 pages of 1 positions are needed, 0 are free and 0 can be evicted"):
        prefix.allocate(1)
    prefix.pin(a[:1])
    prefix.pages.release(chain[:1])
    with pytest.raises(OutOfPages, match="0 can be evicted"):
        prefix.allocate(1)
    prefix.unpin(a[:1])
    assert prefix.allocate(1) == chain[:1]
    assert prefix.match(a) == []


def test_two_requests_that_prefill_the_same_page_end_up_with_one():
    prefix = Prefix(Pages(5, 1), b"s")
    first, second = prefix.allocate(2)
    (name,) = prefix.hashes([1])
    assert [prefix.publish(name, None, page) for page in (first, second)] == [first, first]
    assert prefix.pages.references(first) == 2
    assert second in prefix.pages.free


def test_what_is_computed_from_a_bad_page_is_never_held():
    prefix = Prefix(Pages(9, 1), b"s")
    hashes, pages = published(prefix, [1, 2, 3])
    late, last = prefix.hashes([1, 2, 3, 4])[3], prefix.allocate(1)[0]
    prefix.pin(hashes)
    prefix.forget([pages[1]])
    assert prefix.match(hashes) == pages[:1]
    again = published(prefix, [1, 2, 3])[1]  # stays private, else `last` had a parent that is held
    assert not set(again) & set(pages[1:])
    assert prefix.publish(late, hashes[2], last) == last
    assert prefix.match([*hashes, late]) == pages[:1]
    with pytest.raises(ValueError, match=f"cannot share page={last}"):
        prefix.pages.share([last])
    prefix.pages.release([*pages, last])
    assert set(pages[1:]) <= set(prefix.pages.free)
    good = published(prefix, [1, 2, 3])[1]  # the bad pages are gone, and the pins are still there
    assert prefix.match(hashes) == good
    assert [prefix.pages.references(page) for page in good[1:]] == [3, 3]
    prefix.unpin(hashes)
    assert [prefix.pages.references(page) for page in good[1:]] == [2, 2]


def test_bad_calls_are_refused_and_change_nothing():
    with pytest.raises(ValueError, match="salt=b'' is empty"):
        Prefix(Pages(5, 1), b"")
    prefix = Prefix(Pages(5, 1), b"s")
    for tokens in ([[1]], [1.0], [-1], [1 << 32]):
        with pytest.raises(ValueError, match="token"):
            prefix.hashes(tokens)
    hashes, pages = published(prefix, [1])
    other = prefix.hashes([2])
    with pytest.raises(ValueError, match=f"cannot publish page={pages[0]}"):
        prefix.publish(other[0], None, pages[0])
    with pytest.raises(ValueError, match="cannot unpin page 0 of 1"):
        prefix.unpin(hashes)
    prefix.pin(hashes)
    prefix.unpin(hashes)
    with pytest.raises(ValueError, match="cannot unpin page 0 of 1"):  # would release the page under its user
        prefix.unpin(hashes)
    assert prefix.publish(hashes[0], None, pages[0]) == pages[0]
    assert prefix.pages.references(pages[0]) == 1
