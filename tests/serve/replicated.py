"""Several replicas behind a front, each a real server on a thread of the test's process."""

import asyncio
import json
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

from tessera.serve import warm
from tessera.serve.app import create
from tessera.serve.edge import server
from tessera.serve.edge.bodies import Bodies
from tessera.serve.replicas import supervisor
from tessera.serve.replicas.relay import Relay
from tessera.serve.site import Site

CONTEXT, KEY, LIMIT_S = 256, "a-secret", 300.0
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Threads:
    """The `Launcher` of these tests: each replica is a real server, on a thread. `kill` cuts all its connections."""

    keys, key = (KEY, "another"), "between-us"

    def __init__(self, model):
        self.model, self.running, self.starts = model, {}, 0
        self.gate = threading.Event()
        self.gate.set()

    @contextmanager
    def held(self):
        """Hold up all starts in the block."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    async def start(self, index):
        self.starts += 1
        return await asyncio.to_thread(self._start, index)

    def _start(self, index):
        assert self.gate.wait(LIMIT_S)
        paging = warm.paging_for(self.model, slots=1, context=CONTEXT, exact=True)
        service = warm.start(self.model, context=CONTEXT, slots=1, queue=16, paging=paging)
        site = Site(model=self.model, name="tiny", service=service, context=CONTEXT, bodies=Bodies(CONTEXT))
        bound = server.listen("127.0.0.1", 0)
        bound.listen()
        own = server.Server(server.configured(create(site), (*self.keys, self.key)), service)
        threading.Thread(target=own.run, kwargs={"sockets": [bound]}, daemon=True).start()
        self.running[index] = SimpleNamespace(service=service, server=own, bound=bound)
        return server.address(bound)

    def kill(self, index):
        """Cut all connections of a replica, as the end of its process does."""
        found = self.running.pop(index)
        found.server.force_exit = found.server.should_exit = True
        found.server._loop.call_soon_threadsafe(self._cut, found)
        threading.Thread(target=found.service.stop, daemon=True).start()

    def _cut(self, found):
        for each in found.server.servers:
            each.close()
        for connection in list(found.server.server_state.connections):
            connection.transport.abort()
        found.bound.close()

    async def stop(self, index, *, lost):
        if index in self.running:
            self.kill(index)

    def close(self):
        for index in list(self.running):
            self.kill(index)


class Front:
    """Two replicas and their front, on a thread of this process."""

    def __init__(self, model):
        self.launcher, self.bound = Threads(model), server.listen("127.0.0.1", 0)
        self.url = server.address(self.bound)
        self.begun = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(model)), daemon=True)
        self.thread.start()
        assert self.begun.wait(LIMIT_S)
        self.until(lambda: len(self.replicas.ready) == 2)

    async def _serve(self, model):
        self.loop, self.replicas = asyncio.get_running_loop(), supervisor.Replicas(self.launcher, 2)
        self.server = server.Server(
            server.configured(Relay(self.replicas, margin=8), self.launcher.keys), self.replicas
        )
        self.replicas.begin()
        self.begun.set()
        await self.server.serve([self.bound])
        await self.replicas.end()

    def close(self):
        self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()

    def until(self, condition):
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, "the front did not get there"
            assert self.thread.is_alive()
            time.sleep(0.01)

    def ask(self, prompt, key=KEY, **options):
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0} | options
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S)

    def slow(self, monkeypatch, seconds=0.05):
        for found in self.launcher.running.values():
            engine = found.service._engine
            monkeypatch.setattr(engine, "step", lambda step=engine.step: time.sleep(seconds) or step())

    def metric(self, name):
        lines = httpx.get(f"{self.url}/metrics", headers=HEADERS).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def counters(self):
        return counters_of(httpx.get(f"{self.url}/metrics", headers=HEADERS).text)

    def call(self, function, *given):
        """Call a function in the front's event loop, and wait for its end."""

        async def called():
            return function(*given)

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(LIMIT_S)

    def refuses(self, index):
        try:
            httpx.get(self.replicas.all[index].url + "/health")
        except httpx.TransportError:
            return True
        return False


def counters_of(text):
    """Return sample -> value of the counters and histograms in Prometheus' text."""
    families = [family for family in text_string_to_metric_families(text) if family.type in ("counter", "histogram")]
    return {(s.name, *s.labels.items()): s.value for family in families for s in family.samples}


def fallen(before, after):
    return {key: (value, after.get(key)) for key, value in before.items() if after.get(key, 0) < value}


def stops_of(launcher, several, monkeypatch):
    """Return a list to which each stop of a process adds the replica's number and that of the other ready replicas."""
    stops, stop = [], launcher.stop

    async def noted(index, *, lost):
        stops.append((index, sum(replica.index != index for replica in several.ready)))
        await stop(index, lost=lost)

    monkeypatch.setattr(launcher, "stop", noted)
    return stops


def streamed(url, number, headers=()):
    """Ask for a streamed chat; return its events."""
    body = {"messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 60, "stream": True, "temperature": 0}
    asked = httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=dict(headers), timeout=LIMIT_S)
    with asked as stream:
        return stream.status_code, [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]


def assert_whole_or_failed(answers):
    """Each stream is whole, or ends with an error event after its first piece. Return how many failed."""
    assert {status for status, _ in answers} == {200}
    failed = [events for _, events in answers if events[-1] != "[DONE]"]
    for events in failed:
        assert len(events) > 1
        assert "was lost" in json.loads(events[-1])["error"]["message"]
    return len(failed)
