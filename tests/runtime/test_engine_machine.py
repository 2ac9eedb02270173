"""An engine with pages under random histories: every answer is the one that its request gets alone.

A state machine submits, steps, cancels, pins, takes pages away and restarts. After every rule it accounts for every
page. Free pages hold NaN, so that an answer which reads one fails.
"""

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny import CONFIG as TINY
from tiny import PLAN, random_params

from tessera.core.shapes import ceil_div
from tessera.models.pages import NULL
from tessera.runtime import choosing, dispatched, engine
from tessera.runtime import lane as lane_module
from tessera.runtime.engine import Engine
from tessera.runtime.lane import Lane
from tessera.runtime.pool import PagePool, Paging
from tessera.runtime.requests import End, Failure, PoolState, Request, Token
from tessera.runtime.sampling import Sampling
from tessera.sparse.kascade import Kascade

PAGE, UNIT, KEYS, SLOTS = 16, 32, 160, 3
PAGING = Paging(num_pages=14, page=PAGE, unit=UNIT, sizes=(64, 32), batches=(1, 3))
NEW = 20
"""Tokens of the longest answer that a request gets."""
STALLED = 12
"""Steps without progress, at most: a prompt beside answers waits four, and each start of a request takes one."""
BAD = 263
"""The token whose embedding is NaN."""
SAMPLINGS = (Sampling(), Sampling(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4))
POLICY = Kascade.from_plan(
    replace(PLAN, anchors=(), own=(0, 1, 2), head_map=((0, 1),) * 3, heads="identity", minimum=32, query_tile=32)
)
CONFIG = replace(TINY, tie_embeddings=False, max_positions=512, eos_ids=())


@cache
def params():
    found = jax.tree.map(jnp.asarray, random_params(CONFIG))
    return replace(found, embed=found.embed.at[BAD].set(jnp.nan))


@cache
def salt() -> bytes:
    """The salt of all engines here; one takes as long as ten steps."""
    return PagePool(params(), CONFIG, POLICY, context=KEYS, paging=PAGING).salt()


def open_engine(lag: int = 0, spill: Path | None = None) -> tuple[Engine, Lane]:
    """Open an engine and its lane; all have the same shapes, so they share their programs."""
    made = Engine(params(), CONFIG, POLICY, slots=SLOTS, num_keys=KEYS, lag=lag, paging=replace(PAGING, spill=spill))
    known = salt()
    with patch.object(PagePool, "salt", lambda pool: known):
        made.lane = made._make_lane(SLOTS, KEYS, KEYS)
        return made, made.lane


@contextmanager
def own_clock():
    """Let seconds depend only on the history, so that the scheduler's choices repeat."""
    clock = SimpleNamespace(perf_counter=count(0.0, 2e-3).__next__)
    with patch.object(engine, "time", clock), patch.object(lane_module, "time", clock):
        with patch.object(choosing, "time", clock), patch.object(dispatched, "time", clock):
            yield


def words(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng((length, seed)).integers(0, 256, length).tolist())


DOCUMENTS = words(100, 0), words(40, 0) + words(60, 1)


@jax.jit
def set_pages(cache, page_P, value):
    """Fill some pages of a pool; `page_P` tells which."""
    return jax.tree.map(lambda x: jnp.where(page_P[:, None, None, None], value, x), cache)


@dataclass(frozen=True)
class Alone:
    """What a request gets alone, from an engine that has cached nothing; `failed` if its scores are not finite."""

    tokens: list[int]
    logprobs: list[float]
    failed: bool
    prefill_keys: float
    prompt: list[float]


CONTENTS: dict[tuple[int, ...], np.ndarray] = {}
"""Tokens up to the end of a page -> the keys and values that a prefill alone wrote for the page."""


@cache
@own_clock()
def alone(prompt: tuple[int, ...], sampling: Sampling) -> Alone:
    cold, lane = open_engine()
    cold.submit(Request(prompt=prompt, max_new_tokens=NEW, sampling=sampling, prompt_logprobs=0))
    events = []
    while cold.busy:
        events += cold.step()
    chosen = [event for event in events if isinstance(event, Token)]
    whole, last = contents(lane), events[-1]
    names = lane.prefix.hashes(prompt)
    for name, page in lane.prefix.held():
        CONTENTS[prompt[: (names.index(name) + 1) * PAGE]] = whole[page]
    tokens, logprobs = [event.token for event in chosen], [event.logprob for event in chosen]
    if isinstance(last, Failure):
        return Alone(tokens, logprobs, True, 0.0, [])
    return Alone(tokens, logprobs, False, last.generation.prefill_keys, [token.logprob for token in last.prompt[1:]])


def contents(lane: Lane) -> np.ndarray:
    """Copy all keys and values to the host, by page."""
    return np.stack([np.moveaxis(np.array(leaf), -4, 0) for leaf in jax.tree.leaves(lane.pool.cache)], axis=1)


@dataclass(eq=False)
class Asked:
    """A request of the machine, what it has received, and how many prompt tokens it may and must reuse."""

    request: Request
    expected: Alone
    reusable: int
    least: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def prompts():
    """Beginnings of two documents that begin alike, each with a tail; few in all, because each runs alone once."""
    cuts, tails = st.sampled_from((0, 31, 64, 97)), st.sampled_from(((7,), words(20, 3), words(32, 4)))
    good = st.builds(lambda text, cut, tail: text[:cut] + tail, st.sampled_from(DOCUMENTS), cuts, tails)
    bad = st.builds(lambda cut: (BAD, *DOCUMENTS[0][:cut]), st.sampled_from((2, 64, 97)))
    return st.one_of(good, good, good, good, bad)


TENANTS = st.sampled_from(("", "b"))
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": prompts(),
        "max_new_tokens": st.sampled_from((1, 4, NEW, NEW, 2 * KEYS)),
        "sampling": st.sampled_from((*SAMPLINGS, SAMPLINGS[0])),
        "tenant": TENANTS,
        "deadline_s": st.sampled_from((None, 0.0, 5.0)),
        "prompt_logprobs": st.sampled_from((None, None, None, 0)),
    }
)


class Serving(RuleBasedStateMachine):
    """Random histories of an engine.

    The model: `open` is what each request has received, `pins` the pinned chains, `taken` pages that the machine holds,
    `seen` the prompts by tenant, and `names` the tokens of each hash that may be published.
    """

    fault: Callable[[Lane], None] | None = None

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.stack.enter_context(own_clock())
        self.open: dict[int, Asked] = {}
        self.pins: list[list[bytes]] = []
        self.taken: list[int] = []
        self.seen: list[tuple[str, tuple[int, ...]]] = []
        self.names: dict[bytes, tuple[int, ...]] = {}
        self.answered: list[tuple[int, ...]] = []
        self.stalled, self.snapshot = 0, None
        self.sound = True  # else a step failed, and the end would hide why

    @initialize(lag=st.sampled_from((0, 2)), spill=st.booleans(), step_s=st.sampled_from((0.1, 1e-3)))
    def start(self, lag, spill, step_s):
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) if spill else None
        self.options = {"lag": lag, "spill": folder}
        self.step_s = step_s
        self.begin()

    def begin(self):
        self.engine, self.lane = open_engine(**self.options)
        self.lane.scheduler.step_s = self.step_s
        self.prefix = self.lane.prefix
        self.pages = self.prefix.pages
        if self.fault is not None:
            self.fault(self.lane)

    # --- rules

    @rule(options=REQUESTS)
    def submit(self, options):
        self.ask(**options)

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), tenant=TENANTS)
    def go_on(self, data, tenant):
        """A conversation's next turn: an answer's tokens come back in a prompt."""
        self.ask(prompt=data.draw(st.sampled_from(self.answered)), max_new_tokens=4, tenant=tenant)

    def ask(self, prompt, tenant="", **options) -> int:
        request = Request(prompt=prompt, tenant=tenant, **options)
        expected = alone(prompt, request.sampling)
        self.name(prompt, tenant)
        shared = [common(prompt, other) for who, other in self.seen if who == tenant]
        self.seen.append((tenant, prompt))
        limit = max(min(max(shared, default=0), len(prompt) - 1), 0) // UNIT * UNIT
        id = self.engine.submit(request)
        self.open[id] = Asked(request, expected, limit if request.prompt_logprobs is None else 0)
        for other in self.open.values():  # a request may also reuse what a later one computes
            one = other.request
            if other is not self.open[id] and one.tenant == tenant and one.prompt_logprobs is None:
                here = min(common(prompt, one.prompt), len(one.prompt) - 1)
                other.reusable = max(other.reusable, here // UNIT * UNIT)
        return id

    def name(self, prompt, tenant):
        for index, hash in enumerate(self.prefix.hashes(prompt, tenant)):
            self.names[hash] = prompt[: (index + 1) * PAGE]

    @rule(count=st.sampled_from((1, 1, 2, 4, 8)))
    def step(self, count):
        for _ in range(count):
            self.advance()

    def advance(self):
        """Run one step; check its events, and that the published pages are those of a run alone."""
        self.sound, busy = False, self.engine.busy
        for event in self.engine.step():
            self.take(event)
        rows = self.lane._known.values()
        snapshot = (
            [(row.id, row.position, row.generated) for row in rows],
            [len(asked.tokens) for asked in self.open.values()],
        )
        self.stalled = self.stalled + 1 if busy and snapshot == self.snapshot else 0
        self.snapshot = snapshot
        assert self.stalled <= STALLED, "the engine makes no progress"
        whole = contents(self.lane)
        for hash, page in self.prefix.held():
            tokens = self.names.get(hash)
            assert tokens is not None, "a page of no prompt is published"
            if tokens[0] != BAD:
                assert tokens in CONTENTS, "a page is published that its request alone does not publish"
                assert np.allclose(whole[page], CONTENTS[tokens], atol=1e-4), "a published page has other keys"
        self.poison()
        self.sound = True

    def poison(self):
        free = np.zeros(self.pages.size, bool)
        free[[NULL, *self.pages.free]] = True
        self.lane.pool.cache = set_pages(self.lane.pool.cache, free, np.nan)

    def take(self, event):
        """Compare an event with what the request gets alone."""
        asked = self.open[event.id]
        expected, count = asked.expected, len(asked.tokens)
        match event:
            case Token():
                assert event.token == expected.tokens[count]
                assert event.logprob == pytest.approx(expected.logprobs[count], abs=1e-3)
                asked.tokens.append(event.token)
            case End():
                assert event.generation.tokens == asked.tokens
                assert len(asked.tokens) == asked.request.max_new_tokens
                assert event.generation.finish_reason == "length"
                assert event.reused_tokens % UNIT == 0
                assert asked.least <= event.reused_tokens <= asked.reusable
                if event.reused_tokens == 0:
                    assert event.generation.prefill_keys == pytest.approx(expected.prefill_keys)
                if asked.request.prompt_logprobs is not None:
                    found = [token.logprob for token in event.prompt[1:]]
                    assert found == pytest.approx(expected.prompt, abs=1e-3)
                following = (*asked.request.prompt, *asked.tokens, 5)
                if len(following) <= 120 and following not in self.answered:
                    self.answered.append(following)
                del self.open[event.id]
            case Failure(error=MemoryError()):
                need = ceil_div(len(asked.request.prompt) + asked.request.max_new_tokens - 1, PAGE)
                hashes = self.prefix.hashes(asked.request.prompt, asked.request.tenant)
                pinned = {name for chain in self.pins for name in chain} - set(hashes)
                room = self.pages.size - 1 - len(self.taken) - sum(name in self.prefix for name in pinned)
                assert need > min(room, self.lane.pool.width), event.error
                del self.open[event.id]
            case Failure():
                assert expected.failed, event.error
                assert asked.tokens == expected.tokens
                del self.open[event.id]
                if not any(other.expected.failed for other in self.open.values()):
                    hashes = self.prefix.hashes(asked.request.prompt, asked.request.tenant)
                    assert not any(name in self.prefix for name in hashes), "bad pages stay in the cache"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data):
        id = data.draw(st.sampled_from(sorted(self.open)))
        answer = self.engine.cancel(id)
        assert answer.finish_reason == "interrupted"
        assert answer.tokens == self.open.pop(id).tokens

    @precondition(lambda self: not self.open)
    @rule(options=REQUESTS)
    def serve(self, options):
        """A request alone reuses all of its prompt's whole units that are in memory, or on disk."""
        asked = self.open[self.ask(**options)]
        prompt, tenant = asked.request.prompt, asked.request.tenant
        hashes = self.prefix.hashes(prompt, tenant)[: (len(prompt) - 1) // UNIT * UNIT // PAGE]
        held = [name in self.prefix for name in hashes]
        if asked.request.prompt_logprobs is None:
            asked.least = [*held, False].index(False) * PAGE // UNIT * UNIT
        asked.reusable = asked.reusable if self.prefix.spill else asked.least
        self.finish()

    @precondition(lambda self: len(self.pins) < 2)
    @rule(text=st.sampled_from(DOCUMENTS), tenant=TENANTS)
    def pin(self, text, tenant):
        self.name(text[:64], tenant)
        alone(text[:64] + (7,), SAMPLINGS[0])
        self.pins.append(self.prefix.hashes(text[:64], tenant))
        self.lane.pin(text[:64], tenant)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.prefix.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(data=st.data())
    def take_pages(self, data):
        """Evict cached pages, and keep the pages from the requests until `give_back`."""
        count = data.draw(st.integers(0, min(8, self.prefix.available)))
        self.taken += self.prefix.allocate(count)

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self):
        self.pages.release(self.taken)
        self.taken = []

    @precondition(lambda self: self.options["spill"])
    @rule()
    def restart(self):
        for id in list(self.open):
            self.engine.cancel(id)
        self.engine.close()
        self.open, self.pins, self.taken = {}, [], []
        self.begin()

    # --- what always holds

    @invariant()
    def every_page_is_in_one_place(self):
        rows, pages = self.lane._known.values(), self.pages
        used = Counter(page for row in rows for page in row.pages)
        used.update(self.taken)
        held = {name: page for name, page in self.prefix.held()}
        used.update(held[name] for chain in self.pins for name in chain if name in held)
        assert sorted(pages.free + pages.active + pages.cached) == list(range(1, pages.size))
        assert set(pages.cached) == set(held.values()) - used.keys()
        for page in range(1, pages.size):
            assert pages.references(page) == used[page]
            assert not (pages.writable(page) and page in held.values())
        assert len(self.prefix._victims(pages.size)) == len(pages.cached)

    @invariant()
    def no_row_writes_a_page_of_another(self):
        held = {page: name for name, page in self.prefix.held()}
        running = [row for row in self.lane.slots if row is not None]
        for row in self.lane._known.values():
            assert row in running or not row.pages or not row.open
            assert [held.get(page, hash) for page, hash in zip(row.pages, row.hashes)] == row.hashes[: len(row.pages)]
            if row.open:
                next_key = row.position if row.prefilling else row.num_keys - 1
                assert all(self.pages.writable(page) for page in row.pages[next_key // PAGE :])

    @invariant()
    def what_waits_is_counted(self):
        running = sum(row is not None and row.open for row in self.lane.slots)
        assert self.engine.num_waiting + running == len(self.open)
        assert self.engine.busy == bool(self.open)

    # --- the end

    def finish(self):
        """Step until no request is open: within steps that its tokens bound."""
        limit = 20 + sum(
            20 + 4 * (ceil_div(len(asked.request.prompt), UNIT) + asked.request.max_new_tokens)
            for asked in self.open.values()
        )
        for _ in range(limit):
            if not self.open:
                return
            self.advance()
        raise AssertionError(f"{len(self.open)} requests are open after {limit} steps")

    def teardown(self):
        with self.stack:
            if not (hasattr(self, "engine") and self.sound):
                return
            if self.taken:
                self.give_back()
            self.finish()
            while self.pins:
                self.prefix.unpin(self.pins.pop())
            assert self.engine.pool_state == PoolState(0, len(self.pages.cached) / 13, self.lane.preempted)
            assert self.prefix.allocate(self.pages.size - 1)


def common(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


# A shrunk history takes minutes to find, and the history as found is short enough to read.
Serving.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    deadline=None,
    database=None,
    derandomize=True,
)
TestServing = Serving.TestCase


@pytest.mark.exhaustive
def test_long_histories():
    many = settings(Serving.TestCase.settings, max_examples=1000, stateful_step_count=60)
    run_state_machine_as_test(Serving, settings=many)
