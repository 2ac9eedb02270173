"""A short request beside long ones on machines of any speed: how much of the others it waits for.

A real engine runs on a device whose programs take the seconds of given costs (slow_device.py).
"""

from dataclasses import replace
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_device import COSTS, Device
from tiny import CONFIG, random_params

from tessera.runtime.engine import Engine
from tessera.runtime.pool import Paging
from tessera.runtime.requests import End, Event, Request
from tessera.runtime.scheduler import LONE_S, RECENT
from tessera.sparse.baselines import Dense

CONFIG = replace(CONFIG, num_layers=1, max_positions=1024, eos_ids=())
PAGING = Paging(num_pages=400, page=16, unit=16, sizes=(64, 32, 16), batches=(4,))
POLICY = Dense()
DOCUMENT, SHORT = 1000, 10
STEP_S = 0.04
"""By the costs, programs of 16 and 32 rows take less, and programs of 64 rows take more."""
OWN_S = COSTS.step_s([(0, 16)], [])


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, random_params(CONFIG))


@pytest.fixture
def device(monkeypatch):
    made = Device()
    made.install(monkeypatch)
    return made


class Client:
    """Submits requests to an engine, steps it, and keeps its events."""

    def __init__(self, params, slots: int = 3):
        self.engine = Engine(params, CONFIG, POLICY, slots=slots, num_keys=1024, paging=PAGING, lag=0)
        self.lane = self.engine.lane = self.engine._make_lane(slots, 1024, 1024)
        self.lane.scheduler.calibrate(COSTS, STEP_S)
        self.events: list[Event] = []
        self.seeds = count()

    def submit(self, length: int, new: int = 1, **more) -> int:
        prompt = np.random.default_rng(next(self.seeds)).integers(0, 256, length).tolist()
        return self.engine.submit(Request(prompt=prompt, max_new_tokens=new, **more))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.events += self.engine.step()

    def until(self, id: int, kind: type | tuple = object) -> None:
        """Step until a request has an event of a kind."""
        while not any(event.id == id and isinstance(event, kind) for event in self.events):
            self.step()

    def finish(self) -> None:
        while self.engine.busy:
            self.step()

    @property
    def tokens(self) -> dict[int, list[int]]:
        return {event.id: event.generation.tokens for event in self.events if isinstance(event, End)}


@pytest.mark.parametrize("factor", [1.0, 50.0, 0.02])
@pytest.mark.parametrize("others", ["one", "answering", "two", "late", "waiting"])
def test_a_short_request_waits_for_one_bounded_chunk(device, params, factor, others):
    """Its first text comes after what the device computes already, and at most two steps like its own."""
    device.factor = lambda now_s: factor
    client = Client(params)
    if others == "answering":
        client.until(client.submit(100, 200))
    late = {"deadline_s": 0.0} if others == "late" else {}
    documents = [client.submit(DOCUMENT, **late) for _ in range(2 if others in ("two", "waiting") else 1)]
    if others == "waiting":
        documents += [client.submit(DOCUMENT) for _ in range(3)]
    client.step(3 * RECENT)
    asked_s = device.now_s = device.now_s + 0.5 * (device.free_s - device.now_s)
    short = client.submit(SHORT)
    client.until(short)
    started = [due.prefill for _, start, end, due in device.programs if asked_s <= start and end <= device.now_s]
    assert [prefill for prefill in started if prefill] == [[(0, 16)]], "another prompt goes first"
    assert device.now_s - asked_s <= factor * 2 * OWN_S + max(factor * STEP_S, LONE_S)
    assert not set(documents) & client.tokens.keys(), "the documents should still be computed"


def test_a_late_document_and_endless_short_requests_share_the_steps(device, params):
    """All are late. Each short request waits for at most one chunk of the document, and the document ends."""
    client = Client(params)
    document = client.submit(DOCUMENT, deadline_s=0.0)
    client.step(2)
    waits = []
    while document not in client.tokens:
        before = len(device.programs)
        client.until(client.submit(SHORT, deadline_s=0.0))
        done = [due.prefill for _, _, end, due in device.programs[before:] if end <= device.now_s]
        waits.append(sum(prefill != [(0, 16)] for prefill in done))
    assert max(waits) == 1
    assert len(waits) < 10 * DOCUMENT / 32


@pytest.mark.parametrize(
    ("factor", "crowd", "largest"), [(0.1, 0, 64), (1.0, 0, 64), (50.0, 0, 32), (0.1, 1, 32), (50.0, 1, 32)]
)
def test_a_chunk_is_bounded_by_time(device, params, factor, crowd, largest):
    """A prompt alone takes the largest program, but not on a slow machine: a request that arrives would wait for it."""
    device.factor = lambda now_s: factor
    client = Client(params)
    if crowd:
        client.until(client.submit(20, 500))
    client.submit(DOCUMENT)
    client.step(3 * RECENT)
    device.programs.clear()
    client.step(2 * RECENT)
    found = [due.prefill[0] for *_, due in device.programs if due.prefill]
    assert max(size for _, size in found) == largest
    for start, size in found:
        assert size == 16 or factor * COSTS.step_s([(start, size)], []) <= max(factor * STEP_S, 0 if crowd else LONE_S)


def test_a_request_is_not_late_for_ever_after_the_costs_change(device, params):
    """Costs of a quiet machine make a document late at once; they are learned, and then it is in time."""
    device.factor = lambda now_s: 50.0
    client = Client(params)
    document = client.submit(DOCUMENT)
    client.step(2)
    work = client.lane._known[document]
    scheduler = client.lane.scheduler
    alone_s = COSTS.step_s([(0, DOCUMENT)], [])
    assert scheduler.due_s(work) < work.arrived_s + 5 + 4 * alone_s or scheduler.pace > 10
    client.step(RECENT)
    assert scheduler.pace == pytest.approx(50, rel=0.1)
    assert scheduler.due_s(work) > work.arrived_s + 2 * 50 * alone_s
    assert scheduler._timely(device.now_s, [work])[0] == [work]


def test_the_pace_follows_the_machine_and_no_single_stall(device, params):
    client = Client(params)
    client.submit(20, 500)
    scheduler, paces = client.lane.scheduler, []
    speed = iter([1.0] * 20 + [50.0] + [1.0] * 9 + [50.0] * 10 + [1.0] * 10)
    device.factor = lambda now_s: next(speed)
    for _ in range(49):
        client.step()
        paces.append(scheduler.pace)
    assert paces[:30] == [1.0] * 30
    assert paces[31] > 10
    assert paces[33] == pytest.approx(50, rel=0.1)
    assert paces[-5:] == [1.0] * 5


def test_a_host_that_looks_late_learns_nothing_wrong(device, params):
    """The device ends long before the host looks: the time that the host took is not the device's."""
    client = Client(params)
    client.submit(100, 300)
    for _ in range(60):
        client.step()
        client.submit(SHORT)
        client.step()
        device.now_s += 10.0
    assert client.lane.scheduler.pace == 1.0
    assert client.lane.scheduler.costs.step_s([], [500]) == pytest.approx(COSTS.step_s([], [500]), rel=0.2)


@pytest.mark.parametrize("beside", [False, True])
def test_a_request_that_is_dropped_in_its_prefill_is_gone_after_one_step(device, params, beside):
    client = Client(params)
    if beside:
        client.until(client.submit(20, 100))
    document = client.submit(DOCUMENT)
    client.step(3)
    rows, pages = sum(map(bool, client.lane.slots)), len(client.lane.prefix.pages.active)
    client.engine.cancel(document)
    sent = len(device.programs)
    client.step()
    assert sum(map(bool, client.lane.slots)) == rows - 1
    assert document not in client.lane._known
    assert len(client.lane.prefix.pages.active) <= (2 if beside else 0) < pages
    client.step(3)
    assert not any(due.prefill for *_, due in device.programs[sent:])


def test_answers_do_not_depend_on_the_sizes_of_chunks(device, params):
    """Slow, fast, alone or in a crowd: a request's prompt may be cut in other places, but its tokens are the same."""
    found = []
    for factor, crowd in ((0.05, 0), (50.0, 0), (1.0, 3)):
        device.factor = lambda now_s, factor=factor: factor
        client = Client(params)
        id = client.submit(300, 12)
        for _ in range(crowd):
            client.step(2)
            client.submit(SHORT, 30)
        client.finish()
        found.append(client.tokens[id])
    assert found[0] == found[1] == found[2]
