"""Replicas that are lost or restarted: requests move to others, one replica stays ready, and no counter falls."""

import asyncio
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from replicated import CONTEXT, HEADERS, Front, Threads, assert_whole_or_failed, fallen, stops_of, streamed
from tiny import CONFIG, save_tiny

from tessera.generate import load
from tessera.serve.api.schema import Refusal
from tessera.serve.replicas import supervisor
from tessera.serve.replicas.relay import Relay


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("replicas"), replace(CONFIG, max_positions=CONTEXT))


@pytest.fixture(scope="module")
def front(folder):
    found = Front(load(folder))
    yield found
    found.close()


def test_a_lost_replica_fails_only_started_streams_and_comes_back(front, monkeypatch):
    """Each replica has one row: of eight streams, two are started, and the others wait."""
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.05, 1.0))
    front.slow(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(streamed, front.url, number, HEADERS.items()) for number in range(8)]
        front.until(lambda: all(replica.open >= 3 for replica in front.replicas.all))
        front.until(lambda: all(found.service._engine.num_waiting for found in front.launcher.running.values()))
        time.sleep(0.5)  # the first tokens reach their clients
        front.loop.call_soon_threadsafe(front.launcher.kill, 0)
        failed = assert_whole_or_failed([one.result() for one in asked])
    assert failed <= 1
    assert front.replicas.retried >= 3
    front.until(lambda: len(front.replicas.ready) == 2)
    assert front.metric("tessera:replicas_lost_total") == 1


def test_a_rolling_restart_replaces_each_replica_and_fails_nothing(front, monkeypatch):
    before, answers = [replica.starts for replica in front.replicas.all], []
    stops = stops_of(front.launcher, front.replicas, monkeypatch)
    front.call(front.replicas.roll)
    while not front.replicas._rolling.done():
        answers.append(front.ask("x").status_code)
    assert set(answers) == {200}
    assert [replica.starts for replica in front.replicas.all] == [count + 1 for count in before]
    assert stops == [(0, 1), (1, 1)]


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_a_roll_leaves_the_last_ready_replica_alone(front, monkeypatch, index, noticed):
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.05, 1.0))
    stops, before = stops_of(front.launcher, front.replicas, monkeypatch), front.launcher.starts
    with front.launcher.held():
        front.call(front.launcher.kill, index)
        front.until(lambda: front.launcher.starts > before if noticed else front.refuses(index))
        front.call(front.replicas.roll)
        front.until(lambda: front.launcher.starts > before)
        assert {front.ask("x").status_code for _ in range(20)} == {200}
    front.until(front.replicas._rolling.done)
    assert {others for _, others in stops} == {1}
    # A process that started after the roll is not replaced.
    assert [number for number, _ in stops] in ([index, 0, 1], [index, 1 - index])


def test_a_second_roll_replaces_the_process_that_is_starting(front, monkeypatch):
    stops, before = stops_of(front.launcher, front.replicas, monkeypatch), front.launcher.starts
    with front.launcher.held():
        front.call(front.replicas.roll)
        front.until(lambda: front.launcher.starts > before)
        front.call(front.replicas.roll)
    front.until(front.replicas._rolling.done)
    assert stops == [(0, 1), (0, 1), (1, 1)]


def test_a_roll_stops_at_a_replica_that_does_not_start(front, monkeypatch):
    async def broken(index):
        raise OSError("the plan is wrong")

    monkeypatch.setattr(supervisor, "PAUSES_S", (0.05, 0.1))
    stops = stops_of(front.launcher, front.replicas, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(front.launcher, "start", broken)
        front.call(front.replicas.roll)
        front.until(lambda: len(stops) == 4)
        assert {front.ask("x").status_code for _ in range(5)} == {200}
    front.until(front.replicas._rolling.done)
    assert stops == [(0, 1)] * (len(stops) - 1) + [(1, 1)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_roll_during_the_first_start_waits_until_all_are_ready(folder, monkeypatch, count):
    async def run():
        several.append(supervisor.Replicas(launcher, count))
        stops = stops_of(launcher, several[0], monkeypatch)
        several[0].begin()
        while launcher.starts < count:
            await asyncio.sleep(0.01)
        several[0].roll()
        await several[0]._rolling
        await several[0].end()
        return stops

    launcher, several = Threads(load(folder)), []
    assert asyncio.run(run()) == [(index, count - 1) for index in range(count)]
    launcher.close()
    assert [replica.starts for replica in several[0].all] == [2] * count


def test_requests_outlive_several_planned_restarts(front, monkeypatch):
    """The old processes are slow, so that the request of replica 0 ends only after it has lost both of them."""
    monkeypatch.setattr(supervisor, "DRAIN_S", 0.1)
    front.slow(monkeypatch, seconds=1.0)
    retried = front.replicas.retried
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(front.ask, "x", max_tokens=200) for _ in range(2)]
        front.until(lambda: [replica.open for replica in front.replicas.all] == [1, 1])
        front.call(front.replicas.roll)
        assert [one.result().status_code for one in asked] == [200, 200]
    front.until(front.replicas._rolling.done)
    assert front.replicas.retried == retried + 3


@contextmanager
def no_descriptors():
    """Let this process open no file and no connection in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_front_without_free_descriptors_takes_no_replica_for_lost(front):
    async def run():
        several = supervisor.Replicas(front.launcher, 1)
        several.all[0].url = front.replicas.all[0].url
        scope = {"method": "GET", "path": "/v1/models", "raw_path": b"/v1/models", "query_string": b"", "headers": []}
        with no_descriptors():
            checking = asyncio.create_task(several._status(several.all[0], "/health"))
            with pytest.raises(Refusal, match="too many connections"):
                await Relay(several, margin=8)._ask(several.all[0], scope, b"", None)
        assert await checking == 200
        await several.client.aclose()

    asyncio.run(run())


# --- the front's metrics


def test_no_counter_falls_while_replicas_are_lost_and_restarted(front, monkeypatch):
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.05, 1.0))
    begun = front.metric("vllm:request_success_total")
    assert {front.ask("x").status_code for _ in range(8)} == {200}
    seen = [front.counters()]
    with front.launcher.held():
        front.call(front.launcher.kill, 0)
        front.until(lambda: len(front.replicas.ready) == 1)
        seen.append(front.counters())
    front.until(lambda: seen.append(front.counters()) or len(front.replicas.ready) == 2)
    front.call(front.replicas.roll)
    asked = 8
    while not front.replicas._rolling.done():
        assert front.ask("x").status_code == 200
        asked += 1
        if asked % 8 == 0:
            seen.append(front.counters())
    monkeypatch.setattr(supervisor, "METRICS_S", 1e-9)  # from now on no replica answers in time
    seen.append(front.counters())
    assert [fallen(*pair) for pair in pairwise(seen)] == [{}] * (len(seen) - 1)
    monkeypatch.undo()
    assert front.metric("vllm:request_success_total") == begun + asked  # a retired process reports its last requests


def test_a_replica_that_freezes_while_it_warms_up_is_lost(monkeypatch):
    monkeypatch.setattr(supervisor, "ANSWER_S", 0.05)

    async def warm(url):
        found = supervisor.Replicas(SimpleNamespace(key="x"), 1)
        found.all[0].url = url
        try:
            await found._warmed(found.all[0])
        finally:
            await found.client.aclose()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(supervisor.Lost, match="no answer to 3 health checks"):
            asyncio.run(warm(f"http://127.0.0.1:{silent.getsockname()[1]}"))
