"""Several replicas behind one address: one server's answers, and no request hangs when a replica is lost."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny import CONFIG, save_tiny

from tessera.core.extras import installed
from tessera.generate import load
from tessera.models.tokenizer import byte_tokenizer
from tessera.serve import cluster, replicas, routing, server, warm
from tessera.serve.app import Site, create
from tessera.serve.bodies import Bodies
from tessera.serve.protocol import ChatBody, CompletionBody
from tessera.serve.relay import Relay
from tessera.serve.summed import summed

CONTEXT, KEY, LIMIT_S = 256, "a-secret", 300.0
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Threads:
    """The `Launcher` of these tests: each replica is a real server, on a thread. `kill` cuts all its connections."""

    keys, key = (KEY, "another"), "between-us"

    def __init__(self, model):
        self.model, self.running, self.starts = model, {}, 0

    async def start(self, index):
        self.starts += 1
        return await asyncio.to_thread(self._start, index)

    def _start(self, index):
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

    async def stop(self, index):
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
        self.loop, self.replicas = asyncio.get_running_loop(), replicas.Replicas(self.launcher, 2)
        self.server = server.Server(
            server.configured(Relay(self.replicas, model.tokenizer, margin=8), self.launcher.keys), self.replicas
        )
        self.replicas.begin()
        self.begun.set()
        await self.server.serve([self.bound])
        await self.replicas.end()

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("replicas"), replace(CONFIG, max_positions=CONTEXT))


@pytest.fixture(scope="module")
def front(folder):
    found = Front(load(folder))
    yield found
    found.loop.call_soon_threadsafe(found.server.handle_exit, signal.SIGTERM, None)
    found.thread.join(LIMIT_S)
    assert not found.thread.is_alive()


# --- the choice of a replica


def test_prompts_with_the_same_first_page_have_one_key():
    tokenizer = byte_tokenizer()
    long, other = "a" * 100, "b" + "a" * 99
    keys = [routing.first_page(CompletionBody(prompt=text), tokenizer) for text in (long + "x", long + "y", other)]
    assert keys[0] == keys[1] != keys[2]
    assert routing.first_page(CompletionBody(prompt=tokenizer.encode(long)), None) == keys[0]
    assert routing.first_page(CompletionBody(prompt=long), tokenizer, "other") != keys[0]
    assert routing.first_page(CompletionBody(prompt="short"), tokenizer) is None
    assert routing.first_page(CompletionBody(prompt=long), None) is None
    chats = [ChatBody(messages=[{"role": "user", "content": text}]) for text in (long, long + "x", other)]
    keys = [routing.first_page(chat, tokenizer) for chat in chats]
    assert keys[0] == keys[1] != keys[2]


def test_a_lost_replica_moves_only_its_own_prompts_and_a_busy_one_is_passed_by():
    several = [SimpleNamespace(index=index, open=0) for index in range(4)]
    keys = [bytes([number]) for number in range(200)]
    before = {key: routing.choose(key, several, 2).index for key in keys}
    assert set(before.values()) == {0, 1, 2, 3}
    after = {key: routing.choose(key, several[:3], 2).index for key in keys}
    assert all(after[key] == index for key, index in before.items() if index < 3)
    key = next(key for key in keys if before[key] == 1)
    several[1].open = 2
    assert {routing.choose(key, several, 2).index for _ in range(50)} == {1}
    several[1].open = 3
    assert {routing.choose(key, several, 2).index for _ in range(50)} == {0, 2, 3}
    assert {routing.choose(None, several[:2], 2).index for _ in range(20)} == {0}


def test_metrics_of_replicas_add_up_and_shares_are_means():
    text = (
        '# TYPE a_total counter\na_total{{kind="x"}} {0}\n# TYPE a_created gauge\na_created 5e9\n'
        '# TYPE b histogram\nb_bucket{{le="1.0"}} {0}\nb_bucket{{le="+Inf"}} {0}\nb_count {0}\nb_sum 2\n'
        "# TYPE c_perc gauge\nc_perc 0.{0}\n"
    )
    found = summed([text.format(1), text.format(3)], ready=2, lost=1, retried=4).decode()
    samples = {s.name: s.value for f in text_string_to_metric_families(found) for s in f.samples}
    assert samples["a_total"] == samples["b_count"] == samples["b_bucket"] == 4
    assert (samples["b_sum"], samples["c_perc"]) == (4, pytest.approx(0.2))
    assert "a_created" not in samples
    assert (samples["tessera:replicas_ready"], samples["tessera:requests_retried_total"]) == (2, 4)


def test_replicas_get_their_chips_or_are_refused():
    nodes = [{"Alive": True, "Resources": {"GPU": 8.0}}, {"Alive": True, "Resources": {"GPU": 4.0}}]
    assert cluster.places(nodes, 3, 4) == {"num_gpus": 4}
    assert cluster.places([{"Alive": True, "Resources": {"CPU": 8.0}}], 3, 4) == {}
    with pytest.raises(
        ValueError, match="--replicas 2 with 8 chips each needs 16 chips, but the machines have 8, 4 GPUs"
    ):
        cluster.places(nodes, 2, 8)  # 12 chips, but only one machine has 8


# --- the front


def test_answers_are_those_of_one_server_and_a_document_stays_with_its_replica(front):
    prompt = [70 + number % 9 for number in range(150)]
    whole = front.ask(prompt).json()
    again = front.ask(prompt).json()
    direct = [
        httpx.post(
            f"{replica.url}/v1/completions",
            json={"prompt": prompt, "max_tokens": 6, "temperature": 0},
            headers=HEADERS,
            timeout=LIMIT_S,
        ).json()
        for replica in front.replicas.all
    ]
    assert {answer["choices"][0]["text"] for answer in (whole, again, *direct)} == {whole["choices"][0]["text"]}
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    assert sorted(one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in direct) == [0, 128]
    other = front.ask(prompt, key="another").json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # tenants share nothing, behind a front too
    assert front.metric("vllm:request_success_total") == 5


def test_the_front_refuses_as_one_server_does(front):
    for path in ("/v1/models", "/metrics", "/docs"):
        assert httpx.get(front.url + path).status_code == 401
        assert httpx.get(front.url + path, headers=HEADERS).status_code == 200
    refused = front.ask("x", foo=1)
    assert (refused.status_code, "unknown field foo" in refused.text) == (400, True)
    assert front.ask("x" * 300).status_code == 400
    assert front.ask("x", model="gpt").status_code == 404
    missing = httpx.request("DELETE", f"{front.url}/v1/completions", headers=HEADERS)
    assert (missing.status_code, missing.headers["x-request-id"] != "") == (405, True)
    found = httpx.post(f"{front.url}/tokenize", json={"prompt": "hi"}, headers=HEADERS).json()
    assert found["count"] == 3
    assert [httpx.get(front.url + path).status_code for path in ("/health", "/ready")] == [200, 200]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET %2F HTTP/1.1\r\nHost: x", 404),
        (b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff", 200),
        (b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret", 404),
        (b"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret", 404),
        (b"GET /v1/models?[]#| HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret", 404),
    ],
)
def test_an_odd_address_or_key_gets_no_5xx_from_the_front(front, sent, status):
    with socket.create_connection(front.bound.getsockname()[:2], timeout=60) as client:
        client.sendall(sent + b"\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 %d" % status


def test_the_front_reads_only_the_start_of_a_conversation(front):
    many = [{"role": "user", "content": "x" * 1500}, {"role": "assistant", "content": "y" * 1500}] * 2000
    cut = routing._cut(many)
    assert len(cut) == len(many)
    assert sum(len(message["content"]) for message in cut) == routing.CHARACTERS
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "[" * 900 + "]" * 900}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    found = httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=LIMIT_S)
    assert found.status_code == 400, found.text[:300]


def test_a_request_that_ends_replicas_does_not_end_all(front, monkeypatch):
    async def lost(relay, replica, *_):
        asked.append(replica)
        raise replicas.Lost("poison")

    asked = []
    monkeypatch.setattr(Relay, "_ask", lost)
    monkeypatch.setattr(type(front.replicas), "ready", [replicas.Replica(index) for index in range(5)])
    assert front.ask("x").status_code == 500
    assert len(asked) == 2


def test_a_client_that_goes_away_frees_its_row(front, monkeypatch):
    front.slow(monkeypatch)
    before = front.metric("tessera:requests_cancelled_total")
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{front.url}/v1/completions", json=body, headers=HEADERS, timeout=LIMIT_S) as stream:
        next(stream.iter_lines())
    front.until(lambda: front.metric("tessera:requests_cancelled_total") == before + 1)
    front.until(lambda: front.replicas.open == 0)


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


def test_a_lost_replica_fails_only_started_streams_and_comes_back(front, monkeypatch):
    """Each replica has one row: of eight streams, two are started, and the others wait."""
    monkeypatch.setattr(replicas, "PAUSES_S", (0.05, 1.0))
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


def test_a_rolling_restart_replaces_each_replica_and_fails_nothing(front):
    before, answers = [replica.starts for replica in front.replicas.all], []
    front.loop.call_soon_threadsafe(front.replicas.roll)
    front.until(lambda: front.replicas._rolling is not None)
    while not front.replicas._rolling.done():
        answers.append(front.ask("x").status_code)
    assert set(answers) == {200}
    assert [replica.starts for replica in front.replicas.all] == [count + 1 for count in before]


# --- the process


def test_a_replica_without_chips_goes_to_the_running_machine_that_has_the_fewest():
    nodes = [{"NodeID": name, "Alive": name != "b"} for name in "cab"]
    taken = []
    for _ in range(4):
        taken.append(cluster.node_of(taken, nodes))
    assert taken == ["a", "c", "a", "c"]
    assert cluster.node_of(["a", "a", "b"], nodes) == "c"
    assert cluster.node_of([], [{"NodeID": "b", "Alive": False}]) is None


def test_a_machine_without_a_token_cannot_join_a_cluster(folder, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "RAY_ADDRESS": "127.0.0.1:1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tessera", "serve", str(folder), "--port", "0", "--replicas", "2"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert (found.returncode, "no token" in found.stderr) == (2, True), found.stderr
    assert "ray get-auth-token" in found.stderr


def test_a_cluster_that_asks_for_no_token_is_refused(folder, tmp_path):
    """Ray's servers take any token if they ask for none, so the front learns it from the replica's process."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 32)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    ray, port = Path(sys.executable).with_name("ray"), socket_port()
    head = [str(ray), "start", "--head", "--port", str(port), "--include-dashboard", "false", "--num-cpus", "1"]
    short = tempfile.TemporaryDirectory(prefix="ray-")  # a path of a socket has at most 107 bytes
    head += ["--object-store-memory", str(80 << 20), "--temp-dir", short.name, "--block"]
    with (
        short,
        subprocess.Popen(head, env=environment | {"RAY_AUTH_MODE": "disabled"}, stdout=subprocess.DEVNULL) as process,
    ):
        try:
            wait_for_port(port)
            command = [sys.executable, "-m", "tessera", "serve", str(folder), "--port", "0", "--replicas", "1"]
            environment |= {"RAY_ADDRESS": f"127.0.0.1:{port}"}
            found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        finally:
            process.terminate()
            process.wait(60)
    assert (found.returncode, "lacks Ray's token" in found.stderr) == (2, True), found.stderr


def socket_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for_port(port: int) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on port {port}")


def test_replicas_without_ray_are_refused_by_name(folder, monkeypatch, capsys):
    from tessera.cli.main import main
    from tessera.core import extras

    monkeypatch.setattr(extras, "installed", lambda package: package != "ray")
    for flag, said in (("0", "--replicas 0"), ("2", "tessera-attention[cluster]")):
        assert main(["serve", str(folder), "--replicas", flag]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.skipif(not installed("ray"), reason="Ray is not installed: pip install 'tessera-attention[cluster]'")
def test_rays_replicas_survive_a_killed_one_and_end_with_exit_code_0(folder, tmp_path):
    flags = ["--port", "0", "--slots", "1", "--exact", "--replicas", "2"]
    command = [sys.executable, "-m", "tessera", "serve", str(folder), *flags]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "RAY_ADDRESS": "local"}
    environment["HOME"] = str(tmp_path)  # Ray writes its token there
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = []
            while sum(line.startswith("ready: replica") for line in said) < 2:
                said.append(process.stderr.readline())
                assert said[-1], said
            url = re.search(r"http://127.0.0.1:\d+", "".join(said))[0]  # the front says its own first
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(streamed, url, number) for number in range(8)]
                children = psutil.Process(process.pid).children(recursive=True)
                next(child for child in children if "ray::Actor" in child.cmdline()).kill()
                assert_whole_or_failed([one.result() for one in asked])
            body = {"prompt": "x", "max_tokens": 200, "stream": True, "temperature": 0}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            rest = process.stderr.read()
            assert (process.wait(LIMIT_S), "Traceback" in rest) == (0, False), rest
        finally:
            process.kill()
