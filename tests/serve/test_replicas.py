"""Several replicas behind one address: one server's answers, and no request hangs when a replica is lost."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import psutil
import pytest
from replicated import CONTEXT, HEADERS, KEY, LIMIT_S, Front, assert_whole_or_failed, streamed
from tiny import CONFIG, save_tiny

from tessera.core.extras import installed
from tessera.generate import load
from tessera.serve.api.protocol import ChatBody, CompletionBody
from tessera.serve.api.schema import Refusal
from tessera.serve.edge.front import Front as Keys
from tessera.serve.edge.front import tenant_of
from tessera.serve.replicas import cluster, routing, supervisor
from tessera.serve.replicas.relay import Relay


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("replicas"), replace(CONFIG, max_positions=CONTEXT))


@pytest.fixture(scope="module")
def front(folder):
    found = Front(load(folder))
    yield found
    found.close()


# --- the choice of a replica


def test_prompts_with_the_same_first_page_have_one_key():
    long, other = "a" * 300, "b" + "a" * 299
    ids = [[ord(letter) for letter in text] for text in (long, long + "x", other)]
    chats = [[{"role": "user", "content": text}] for text in (long, long + "x", other)]
    for bodies in (
        [CompletionBody(prompt=text) for text in (long + "x", long + "y", other)],
        [CompletionBody(prompt=tokens) for tokens in ids],
        [ChatBody(messages=messages) for messages in chats],
    ):
        keys = [routing.first_page(body) for body in bodies]
        assert keys[0] == keys[1] != keys[2]
        assert routing.first_page(bodies[0], "other") != keys[0]
    assert routing.first_page(CompletionBody(prompt="short")) is None


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


def test_replicas_get_their_chips_or_are_refused():
    nodes = [{"Alive": True, "Resources": {"GPU": 8.0}}, {"Alive": True, "Resources": {"GPU": 4.0}}]
    assert cluster.places(nodes, 3, 4) == {"num_gpus": 4}
    assert cluster.places([{"Alive": True, "Resources": {"CPU": 8.0}}], 3, 4) == {}
    with pytest.raises(
        ValueError, match="--replicas 2 with 8 chips each needs 16 chips, but the machines have 8, 4 GPUs"
    ):
        cluster.places(nodes, 2, 8)  # 12 chips, but only one machine has 8


def test_requests_and_their_replicas_share_the_descriptors():
    assert [cluster.clients(files) for files in (64, 1024, 1 << 20, resource.RLIM_INFINITY)] == [1, 462, 1000, 1000]


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
    for path in ("/v1/models", "/metrics", "/version"):
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
        (b"GET /v1/x/../models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret", 404),
        (b"GET /v1/models?a=/../| HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret", 200),
        (b"post /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret", 405),
        (b"GET /v1/models?[]#| HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret", 404),
    ],
)
def test_an_odd_address_or_key_gets_no_5xx_from_the_front(front, sent, status):
    with socket.create_connection(front.bound.getsockname()[:2], timeout=60) as client:
        client.sendall(sent + b"\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 %d" % status


def test_the_front_leaves_a_conversation_that_no_template_takes_to_a_replica(front):
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "[" * 900 + "]" * 900}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    found = httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=LIMIT_S)
    assert found.status_code == 400, found.text[:300]


def test_a_request_that_ends_replicas_does_not_end_all(front, monkeypatch):
    async def lost(relay, replica, *_):
        asked.append(replica)
        raise supervisor.Lost("poison")

    asked = []
    monkeypatch.setattr(Relay, "_ask", lost)
    monkeypatch.setattr(type(front.replicas), "ready", [supervisor.Replica(index) for index in range(5)])
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


def test_an_address_that_names_no_cluster_is_refused_with_its_variable(folder, tmp_path):
    environment = os.environ | {"HOME": str(tmp_path), "RAY_ADDRESS": "nonsense", "RAY_AUTH_TOKEN": "0" * 32}
    command = [sys.executable, "-m", "tessera", "serve", str(folder), "--port", "0", "--replicas", "2"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert found.returncode == 2
    assert "RAY_ADDRESS=nonsense names no running cluster" in found.stderr


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


def test_the_tenant_of_a_front_without_keys_is_the_same_at_each_start():
    """Pages on disk are found by tenant."""
    for keys in ((), (KEY,)):
        inner = Keys(None, keys, "a-new-secret")
        assert inner._tenant("/v1/models", b"Bearer a-new-secret") == ""
        assert [inner._tenant("/v1/models", b"Bearer " + key.encode()) for key in keys] == [tenant_of(k) for k in keys]
        with pytest.raises(Refusal, match="needs an API key"):
            inner._tenant("/v1/models", b"Bearer ")


ERRORS = """
import asyncio, psutil
from tessera.serve.replicas.cluster import Cluster
from tessera.serve.replicas.supervisor import Ended

def broken(keys):
    raise ImportError("half an upgrade")

async def run():
    launcher = Cluster(broken, (), count=1, chips=1, end_s=10.0)
    try:
        await launcher.start(0)
    except RuntimeError as error:
        print("failed:", error)
    await launcher.stop(0, lost=True)
    next(child for child in psutil.Process().children(recursive=True) if child.name() == "raylet").kill()
    while True:
        try:
            await launcher.start(0)
        except OSError:  # Ray has just noticed the loss
            await launcher.stop(0, lost=True)
        except Ended as error:
            print("ended:", error)
            return

asyncio.run(run())
"""


@pytest.mark.skipif(not installed("ray"), reason="Ray is not installed: pip install 'tessera-attention[cluster]'")
def test_a_failed_start_is_told_from_a_lost_ray(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "RAY_ADDRESS": "local", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", ERRORS]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert "failed: the process of replica 0 failed: ImportError('half an upgrade')" in found.stdout, found.stderr
    assert "ended: Ray has lost all machines" in found.stdout, found.stderr


@pytest.mark.skipif(not installed("ray"), reason="Ray is not installed: pip install 'tessera-attention[cluster]'")
def test_rays_replicas_survive_a_killed_one_and_end_with_exit_code_0(folder, tmp_path):
    flags = ["--port", "0", "--slots", "1", "--exact", "--replicas", "2", "--spill", str(tmp_path / "pages")]
    command = [sys.executable, "-m", "tessera", "serve", str(folder), *flags]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "RAY_ADDRESS": ""}
    environment["HOME"] = str(tmp_path)  # Ray looks for a token there
    environment["RAY_memory_usage_threshold"] = "0.01"  # as if another program filled the memory
    piped = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **piped) as process:
        try:
            said = []
            while sum(line.startswith("ready: replica") for line in said) < 2:
                said.append(process.stderr.readline())
                assert said[-1], said
            assert not (tmp_path / ".ray").exists()  # Ray makes a token's file readable by all users
            url = re.search(r"http://127.0.0.1:\d+", "".join(said))[0]  # the front says its own first
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(streamed, url, number) for number in range(8)]
                children = psutil.Process(process.pid).children(recursive=True)
                for child in children:
                    child.send_signal(signal.SIGHUP)  # as a terminal does that closes
                actors = [child for child in children if "ray::Actor" in child.cmdline()]
                commands = " ".join(" ".join(child.cmdline()) for child in children)
                [store] = {Path(found) for found in re.findall(r"/tmp/tessera-[^/ ]+", commands)}
                assert store.stat().st_mode & 0o077 == 0  # all users may write to Ray's own
                lasting = [actors[1], *(child for child in children if child.name() in ("gcs_server", "raylet"))]
                actors[0].kill()
                assert_whole_or_failed([one.result() for one in asked])
            assert [child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in lasting] == [True] * 3
            body = {"prompt": "x" * 150, "max_tokens": 100, "stream": True, "temperature": 0}  # two whole pages
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            rest = process.stderr.read()
            assert (process.wait(LIMIT_S), "Traceback" in rest) == (0, False), rest
            assert not store.exists()
            assert [path for path in (tmp_path / "pages").rglob("*") if path.is_file()]  # written at the end
        finally:
            process.kill()
