"""What the server refuses, and what a client may cost it: each error names its cause, and nothing is left behind."""

import json
import socket
import threading
import time
from contextlib import suppress

import httpx2 as httpx
import openai
import pytest
from live_server import KEY, Running, ask

from tessera.runtime.requests import Failure, Request
from tessera.serve.api.schema import Refusal
from tessera.serve.edge import front, server
from tessera.serve.metrics import Metrics
from tessera.serve.service import Service

WIZARD = {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "", "add_special_tokens": False}, 400, "prompt 0 is an empty token list"),
        ({"prompt": []}, 400, "prompt=[]"),
        ({}, 400, "prompt"),
        ({"prompt": "x", "foo": 1}, 400, "unknown field foo"),
        ({"prompt": "x", "max-tokens": 1}, 400, "unknown field max-tokens"),
        ({"prompt": "x", "Temperature" * 1000: 1}, 400, "unknown field TemperatureTemp"),
        ({"prompt": "x", "best_of": 2}, 400, "best_of is not supported"),
        ({"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty=3"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "needs stream=true"),
        ({"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}}, 400, "include_usage"),
        ({"prompt": "x", "logit_bias": {"999": 1}, "stream": True}, 400, "token 999"),
        ({"prompt": "x", "ignore_eos": True, "response_format": {"type": "json_object"}}, 400, "ignore_eos=true"),
        ({"prompt": ["x"] * 10, "n": 8}, 400, "or start the server with a larger --queue or --slots"),
        ({"prompt": "x", "n": 10**9}, 400, "n=1000000000"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens=0"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature='hot'"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature=-1"),
        ({"prompt": "x", "seed": 2**64}, 400, "seed=18446744073709551616"),
        ({"prompt": "x", "stop": ["a"] * 1_000_000}, 413, "300,000 commas"),
        ({"prompt": "x", "stream_options": {"x": 1}}, 400, "unknown field stream_options.x"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs=21"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, 400, "logit_bias has token -1"),
        ({"prompt": "x", "logit_bias": {"": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"999": 1}}, 400, "token 999"),
        ({"prompt": "x", "logit_bias": {"1": 1000}}, 400, "logit_bias.1=1000"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "takes json_schema or schema"),
        ({"prompt": "x", "response_format": WIZARD}, 400, "Invalid type: wizard"),
        ({"prompt": [1, 10**6]}, 400, "token 1000000"),
        ({"prompt": [1, -1]}, 400, "prompt.1=-1"),
        ({"prompt": "x" * 300}, 400, "301 tokens"),
        ({"prompt": "x" * 10_000}, 400, "prompt has over 256 tokens"),
        ({"prompt": "x" * 255}, 400, "256 tokens"),
        ({"prompt": "x", "model": "gpt-4"}, 404, "'gpt-4' is not served"),
        ("[" * 100_000, 400, "JSON"),
        ("nonsense", 400, "JSON"),
        ('{"prompt": "\\ud800"}', 400, "JSON"),
    ],
)
def test_a_bad_request_is_refused_by_name(running, body, status, said):
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"Authorization": f"Bearer {KEY}"}
    found = httpx.post(f"{running.url}/v1/completions", content=content, headers=headers)
    error = found.json()["error"]
    assert (found.status_code, said in error["message"]) == (status, True), error
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages.0.role='wizard'"),
        ([{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], "messages.0.content.0.type"),
        ([{"role": "system", "content": "x"}], "role system must be user or assistant"),
    ],
)
def test_a_bad_conversation_is_refused(running, messages, said):
    with pytest.raises(openai.BadRequestError, match=said):
        running.client.chat.completions.create(model="tiny", messages=messages)


def test_only_holders_of_a_key_are_served(running):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        for path in ("/v1/models", "/metrics", "/version"):
            found = httpx.get(running.url + path, headers=headers)
            assert found.status_code == 401
            assert found.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert running.client.with_options(api_key="another").models.list().data[0].id == "tiny"


def test_unknown_routes_and_methods_are_refused_in_the_apis_form(running):
    headers = {"Authorization": f"Bearer {KEY}", "x-request-id": "my-id"}
    for method, path, status in (("GET", "/v1/nothing", 404), ("DELETE", "/v1/completions", 405)):
        found = httpx.request(method, running.url + path, headers=headers)
        assert (found.status_code, found.headers["x-request-id"]) == (status, "my-id")
        assert path in found.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_frees_its_row(running, stream, monkeypatch):
    before, engine = running.metric("tessera:requests_cancelled_total"), running.service._engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
    body = {"prompt": [65] * 20, "stream": stream, "max_tokens": 200, "temperature": 0}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + content)
        running.until(lambda: running.service.open)
        if stream:
            client.recv(100)
    running.until(lambda: not running.service.open)
    running.until(lambda: running.metric("tessera:requests_cancelled_total") == before + 1)


def test_a_body_may_be_neither_large_nor_slow(running, monkeypatch):
    monkeypatch.setattr(front, "MAX_BODY", 1000)
    headers = {"Authorization": f"Bearer {KEY}"}
    found = httpx.post(f"{running.url}/v1/completions", content=b"x" * 1001, headers=headers)
    assert (found.status_code, "larger than" in found.text) == (413, True)
    pieces = (b"x" * 400 for _ in range(5))  # without a declared length
    assert httpx.post(f"{running.url}/v1/completions", content=pieces, headers=headers).status_code == 413
    monkeypatch.setattr(front, "BODY_S", 0.3)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 10\r\n\r\n12"
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_slow_headers_end_the_connection(running, monkeypatch):
    monkeypatch.setattr(server, "HEADER_S", 0.3)
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost")
        assert client.recv(100) == b""


def test_a_full_queue_says_when_to_try_again(running, monkeypatch):
    monkeypatch.setattr(running.service, "room", 3)
    held = running.service.submit((Request(prompt=[65], max_new_tokens=200), lambda event: None))
    with pytest.raises(openai.RateLimitError) as refused:
        ask(running, "x", n=3)
    assert refused.value.response.headers["retry-after"] == "1"
    running.service.cancel(held[0])
    running.until(lambda: not running.service.open)
    assert len(ask(running, "x", n=3, max_tokens=1).choices) == 3


def test_one_tenant_cannot_keep_the_others_out(running, monkeypatch):
    def submit(tenant, count=1):
        asked = [(Request(prompt=[65], max_new_tokens=200, tenant=tenant), lambda event: None)] * count
        with suppress(Refusal):
            held.extend(running.service.submit(*asked))
        return len(held)

    held = []
    monkeypatch.setattr(running.service, "shared", True)
    monkeypatch.setattr(running.service, "room", 10)
    assert [submit("greedy") for _ in range(20)][-1] == 5
    assert submit("other") == 6
    assert [submit("third") for _ in range(20)][-1] == 8
    for job in held:
        running.service.cancel(job)
    running.until(lambda: not running.service.open)


def test_a_step_that_fails_ends_its_requests_and_not_the_server(running, monkeypatch):
    engine = running.service._engine

    def broken():
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(engine, "step", broken)
    failed = running.metric("tessera:requests_failed_total")
    with pytest.raises(openai.InternalServerError, match="on fire"):
        ask(running, "x", max_tokens=4)
    running.until(lambda: running.service._engine is not engine)  # the answer does not wait for the new engine
    assert running.metric("tessera:requests_failed_total") == failed + 1
    assert running.metric("tessera:engine_restarts_total") == 1
    assert ask(running, "x", max_tokens=4).usage.completion_tokens == 4
    assert not running.service.open


def test_a_bug_in_a_step_ends_the_server_by_name(model, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda found: seen.append(found.exc_value))
    service = Service(lambda: model.engine(slots=1), queue=1, metrics=Metrics())
    service.start(lambda engine: None)
    running = Running(model, service)
    monkeypatch.setattr(running.service._engine, "step", lambda: {}["no such key"])
    with pytest.raises(openai.APIStatusError, match="stopped before the answer"):
        ask(running, "x")
    running.close()
    assert isinstance(seen[0], KeyError)
    assert not running.service.ended


def test_a_request_that_fails_inside_a_stream_says_so(running, monkeypatch):
    engine, step = running.service._engine, running.service._engine.step

    def failing():
        return [Failure(event.id, ValueError("not finite")) for event in step()]

    monkeypatch.setattr(engine, "step", failing)
    with pytest.raises(openai.APIError, match="not finite"):
        list(ask(running, "x", max_tokens=4, stream=True))
    monkeypatch.undo()
    running.until(lambda: not running.service.open)
