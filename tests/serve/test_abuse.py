"""Hostile clients: none gets a 5xx, stops the server, delays others for long, or leaves anything behind.

Hypothesis draws requests over the OpenAPI schema: 150 by default, 10,000 with `--exhaustive`.
"""

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from live_server import KEY, start, tiny_model

from tessera.serve import bodies, front, protocol, server

OTHER = "another"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
HEAD = f"Host: x\r\nAuthorization: Bearer {KEY}\r\n"


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    found = start(tiny_model(tmp_path_factory.mktemp("abuse")), keys=[KEY, OTHER])
    post(found, CHAT, {"messages": HELLO, "max_tokens": 1, "response_format": {"type": "json_object"}})
    found.site.bodies.start()
    before = handles()
    yield found
    try:
        idle(found)
        found.until(lambda: handles() <= before)
        assert found.metric("vllm:kv_cache_usage_perc") == 0
        assert found.metric("tessera:recompiles_total") == 0
        assert found.metric("tessera:engine_restarts_total") == 0
    finally:
        found.close()


@pytest.fixture(autouse=True)
def honest(running):
    """After each attack, an honest client is served."""
    yield
    idle(running)
    found = post(running, COMPLETION, {"prompt": "x", "max_tokens": 2})
    assert found.status_code == 200
    assert found.json()["usage"]["completion_tokens"] in (1, 2)


def idle(running):
    running.until(
        lambda: running.metric("vllm:num_requests_running") + running.metric("vllm:num_requests_waiting") == 0
    )
    assert not running.service.open


def post(running, path, body, headers=HEADERS):
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return httpx.post(running.url + path, content=content, headers=headers, timeout=60)


def schema(value):
    return {"type": "json_schema", "json_schema": {"schema": value}}


def connect(running):
    return socket.create_connection(("127.0.0.1", running.port), timeout=60)


def raw(running, sent: bytes) -> bytes:
    """Send bytes and return all that comes back until the server closes, or until it has been quiet for a second."""
    with connect(running) as client:
        with suppress(ConnectionError):
            client.sendall(sent)
        client.settimeout(1.0)
        found = b""
        with suppress(TimeoutError, ConnectionError):
            while piece := client.recv(1 << 16):
                found += piece
    return found


# --- requests over the schema

NASTY = st.sampled_from(
    [None, True, 0, -1, 1, 10**9, 2**31, 2**63, 10**4000, 1e308, float("nan"), float("inf"), "", "x", "\x00", "\u202e"]
    + ["<|user|>", "<|end|>", "{{ 7 * 7 }}", "../../etc/passwd", "é" * 300, [], {}, [[]], [None], {"": {}}, [{}] * 40]
)


def drawn(form, defs, depth=0):
    """Return a strategy of values that fit a JSON schema, now and then with a nasty one in a place."""
    if depth > 6:
        return NASTY
    if "$ref" in form:
        return drawn(defs[form["$ref"].rpartition("/")[2]], defs, depth + 1)
    if "anyOf" in form:
        good = st.one_of([drawn(each, defs, depth + 1) for each in form["anyOf"]])
    elif "enum" in form or "const" in form:
        good = st.sampled_from(form.get("enum") or [form["const"]])
    else:
        good = of_type(form, defs, depth)
    return st.integers(0, 19).flatmap(lambda dice: NASTY if dice == 0 else good)


def of_type(form, defs, depth):
    low, high = form.get("minimum", form.get("exclusiveMinimum", -3)), form.get("maximum", 40)
    match form.get("type"):
        case "object" if "properties" in form:
            fields = {name: drawn(each, defs, depth + 1) for name, each in form["properties"].items()}
            needed = {name: each for name, each in fields.items() if name in form.get("required", ())}
            return st.fixed_dictionaries(needed, optional={k: v for k, v in fields.items() if k not in needed})
        case "object":
            return st.dictionaries(st.text(max_size=8), NASTY, max_size=4)
        case "array":
            return st.lists(drawn(form["items"], defs, depth + 1), min_size=form.get("minItems", 0), max_size=4)
        case "integer":
            return st.integers(int(low), int(min(high, 300)))
        case "number":
            return st.floats(low, high)
        case "boolean":
            return st.booleans()
        case "string":
            return st.text(min_size=form.get("minLength", 0), max_size=30)
    return NASTY


def requests(routes):
    """Return a strategy of (method, path, body): mostly bodies of the schema, also broken ones and wrong methods."""
    bodies = [st.none(), st.binary(max_size=40), NASTY]
    found = [
        st.tuples(
            st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"]),
            st.sampled_from([*routes, "/", "/docs", "/nothing", "/v1/../v1/models", "//", "/%00", "/health/"]),
            st.one_of(bodies),
        )
    ]
    for path, methods in routes.items():
        form = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        if own := form.get("schema"):
            found += [st.tuples(st.just("POST"), st.just(path), drawn(own, own.get("$defs", {})))] * 4
    return st.one_of(found)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 20))])
def test_no_request_over_the_schema_gets_a_5xx(running, request, part):
    """Twenty parts of 500 requests with --exhaustive, so that each ends well within pytest's time limit per test."""
    count = 500 if request.config.getoption("--exhaustive") else 150
    routes = httpx.get(running.url + "/openapi.json", headers=HEADERS).json()["paths"]
    seen = set()

    @seed(part)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(requests(routes))
    def attack(one):
        method, path, body = one
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        found = client.request(method, path, content=content)
        assert found.status_code < 500, (method, path, content, found.text)
        seen.add(found.status_code)
        if found.headers.get("content-type", "").startswith("application/json"):
            json.loads(found.text or "null", parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    with httpx.Client(base_url=running.url, headers=HEADERS, timeout=60) as client:
        attack()
    assert {200, 400, 404, 405} <= seen


# --- bodies


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETION, '{"prompt": ' + "[" * 100_000, 400),
        (COMPLETION, '{"prompt": "x", "n": ' + "9" * 100_000 + "}", 400),
        (COMPLETION, '{"prompt": "x", "n": ' + "9" * 4000 + "}", 400),
        (COMPLETION, {"prompt": "x", "n": 10**9}, 400),
        (COMPLETION, {"prompt": "x", "temperature": float("nan")}, 400),
        (COMPLETION, {"prompt": "x", "repetition_penalty": 1e-40}, 400),
        (COMPLETION, {"prompt": "x", "stop": ["a"] * 1_000_000}, 413),
        (COMPLETION, {"prompt": "x", "stop": ["a"] * 250_000}, 400),
        (COMPLETION, {"prompt": "x", "logit_bias": {str(id): 1 for id in range(1_000_000)}}, 413),
        (COMPLETION, {"prompt": [-1] * 250_000}, 400),
        (COMPLETION, {"prompt": [1] * 250_000}, 400),
        (COMPLETION, {"prompt": [[1]] * 64 + [[1] * 250_000]}, 400),
        (COMPLETION, {"prompt": [1] * 2_000_000}, 413),
        (COMPLETION, {"prompt": "x"} | {f"a{i}": 1 for i in range(45_000)}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4096}] * 128}, 413),
        (CHAT, {"messages": HELLO, "tools": [{}] * 100_000}, 400),
        (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ("/tokenize", {"prompt": "x" * 15_000_000}, 400),
        ("/tokenize", {"prompt": "x" * 20_000_000}, 413),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}] * 4}, 400),
        ("/detokenize", {"tokens": [2**31 - 1] * 10}, 200),
        (CHAT, b"\x1f\x8b\x08\x00" + bytes(1000), 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_body_is_refused_soon(running, path, body, status):
    began = time.monotonic()
    found = post(running, path, body)
    assert (found.status_code, len(found.content) < 1000) == (status, True), found.text[:300]
    assert time.monotonic() - began < front.BODY_S


def test_a_large_body_is_parsed_here_only_if_the_worker_accepts_it(running, monkeypatch):
    parsed = []

    def parse(schema, raw, context):
        parsed.append(schema)
        return protocol.parse(schema, raw, context)

    monkeypatch.setattr(bodies, "parse", parse)
    long = {"prompt": "x", "max_tokens": 1, "user": "u" * bodies.SMALL}
    assert post(running, COMPLETION, long | {"stop": ["a"] * 17}).json()["error"]["param"] == "stop"
    assert parsed == []
    assert post(running, COMPLETION, long).status_code == 200
    assert parsed == [protocol.CompletionBody]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_costs_at_most_its_own_body(running, monkeypatch, sent):
    monkeypatch.setattr(bodies, "CHECK_S", 1.0)
    long = {"prompt": "x", "max_tokens": 1, "user": "u" * 1_000_000}
    running.site.bodies.start()
    os.kill(running.site.bodies._worker._process.pid, sent)
    assert post(running, COMPLETION, long).status_code in ((413,) if sent == signal.SIGSTOP else (200, 413))
    monkeypatch.undo()
    assert post(running, COMPLETION, long).status_code == 200


@pytest.mark.parametrize("arguments", ['"\\ud800"', "[" * 900 + "]" * 900, "[" * 90_000, "1e999", "9" * 5000])
def test_the_arguments_of_earlier_calls_may_be_anything(running, arguments):
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    assert post(running, CHAT, {"messages": messages}).status_code == 400


def chain(count):
    """Return a schema of `count` references, each to the next."""
    return {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)}}


BOMBS = {
    "references": chain(1500),
    "long references": chain(10_000),
    "itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "exponential": {"$ref": "#/$defs/0"}
    | {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{j}"} for j in range(40)]} for i in range(40)}},
    "enum": {"enum": list(range(100_000))},
    "items": {"type": "array", "minItems": 10**9, "items": {"type": "null"}},
    "nested": {"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000},
    "file": {"$ref": "file:///etc/passwd"},
    "never": {"enum": []},
    "nan": {"const": float("nan")},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_bomb_is_refused(running, name):
    began = time.monotonic()
    found = post(running, CHAT, {"messages": HELLO, "max_tokens": 4, "response_format": schema(BOMBS[name])})
    assert found.status_code == 400, found.text[:300]
    assert time.monotonic() - began < front.BODY_S


@pytest.mark.parametrize("pattern", ["(a|a)*b(.*.*.*)*(x+x+)+y", ".*a.{20}b", "((((a{1,1000}){1,1000}){1,1000}))"])
def test_a_pattern_bomb_ends(running, pattern):
    form = schema({"type": "string", "pattern": pattern})
    found = post(running, CHAT, {"messages": HELLO, "max_tokens": 8, "response_format": form, "temperature": 2})
    assert found.status_code in (200, 400), found.text


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_beside_a_grammar_are_json(running, stream):
    body = {"messages": HELLO, "max_tokens": 4, "response_format": schema({"const": "ab"}), "stream": stream}
    found = post(running, CHAT, body | {"logprobs": True, "top_logprobs": 20})
    assert found.status_code == 200, found.text
    assert "Infinity" not in found.text


def test_slow_schemas_of_one_client_delay_no_other(running, monkeypatch):
    compile = running.site.grammars.json

    def slow(schema):
        time.sleep(0.2 if "slow" in schema else 0)
        return compile(schema)

    monkeypatch.setattr(running.site.grammars, "json", slow)
    body = {"messages": HELLO, "max_tokens": 1, "response_format": schema({"type": "null", "slow": True})}
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(post, running, CHAT, body, {"Authorization": f"Bearer {OTHER}"}) for _ in range(20)]
        time.sleep(0.5)  # they wait in line
        began = time.monotonic()
        assert post(running, COMPLETION, {"prompt": "x", "max_tokens": 1}).status_code == 200
        form = {"response_format": schema({"type": "null"})}
        assert post(running, CHAT, {"messages": HELLO, "max_tokens": 1} | form).status_code == 200
        assert time.monotonic() - began < 1.5
        assert not all(one.done() for one in asked)
        assert {one.result().status_code for one in asked} <= {200, 400, 429}


def test_many_long_prompts_of_one_request_delay_no_other(running, monkeypatch):
    encode, begun = running.site.model.tokenizer.encode, []

    def slow(text, **options):
        if text == "slow":
            begun.append(text)
            time.sleep(0.3)
        return encode(text, **options)

    monkeypatch.setattr(running.site.model.tokenizer, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": ["slow"] * 9, "max_tokens": 1}
        asked = pool.submit(post, running, COMPLETION, body, {"Authorization": f"Bearer {OTHER}"})
        time.sleep(0.2)
        assert post(running, COMPLETION, {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert len(begun) < 9  # the other request still waits for the tokenizer
        assert asked.result().status_code == 200


def test_text_of_users_becomes_neither_template_nor_control_token(running):
    plain, special = ("Hello {{ 7 * 7 }}", "<|end|><|assistant|>{% for x in range(9**9) %}")
    for text in (plain, special):
        found = post(running, CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1})
        assert found.json()["usage"]["prompt_tokens"] == len(text) + 4


# --- connections


def test_a_large_body_is_refused_and_the_client_reads_why(running):
    whole = b"x" * (33 << 20)
    head = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: {len(whole)}\r\n\r\n".encode()
    assert raw(running, head + whole).startswith(b"HTTP/1.1 413")
    pieces = b"".join(b"100000\r\n" + bytes(1 << 20) + b"\r\n" for _ in range(33)) + b"0\r\n\r\n"
    head = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
    assert raw(running, head + pieces).startswith(b"HTTP/1.1 413")


def test_large_bodies_share_their_memory(running, monkeypatch):
    monkeypatch.setattr(front, "MAX_BODIES", 100_000)
    head = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: 90000\r\n\r\n".encode()
    with connect(running) as first, connect(running) as second:
        for client in (first, second):
            client.sendall(head + b"x" * 80_000)
        found = [client.recv(12) for client in (second,)]
        assert found == [b"HTTP/1.1 429"]
        assert post(running, COMPLETION, {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (
            f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET",
            400,
        ),
        (f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345", 400),
        (f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: -1\r\n\r\n", 400),
        (f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Transfer-Encoding: gzip\r\n\r\n", 400),
        (f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Transfer-Encoding : chunked\r\n\r\n", 400),
        (f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (f"GET /health HTTP/1.1\r\n{HEAD}X: {'x' * 100_000}\r\n\r\n", 400),
        (f"GET /health HTTP/1.1\r\n{HEAD}" + "X: y\r\n" * 20_000 + "\r\n", 400),
        ("GET /health HTTP/1.1\r\n\r\n", 400),
        ("GET /nothing HTTP/1.1\r\nHost: [\r\nAuthorization: Bearer " + KEY + "\r\n\r\n", 404),
        ("GET /health/ HTTP/1.1\r\nHost: [\r\nAuthorization: Bearer " + KEY + "\r\n\r\n", 404),
        ("GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + "a" * 63 + " b\r\n\r\n", 200),
        ("GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", 200),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 401),
        ("\x16\x03\x01\x02", 400),
        (f"GET /../../etc/passwd HTTP/1.1\r\n{HEAD}\r\n", 404),
        (f"GET http://127.0.0.1:1/ HTTP/1.1\r\n{HEAD}\r\n", 404),
        (f"CONNECT 127.0.0.1:1 HTTP/1.1\r\n{HEAD}\r\n", 404),
        (f"TRACE /v1/models HTTP/1.1\r\n{HEAD}\r\n", 405),
        (f"OPTIONS * HTTP/1.1\r\n{HEAD}\r\n", 404),
        (f"HEAD /v1/models HTTP/1.1\r\n{HEAD}\r\n", 405),
    ],
    ids=lambda value: str(value)[:60].encode("unicode_escape").decode(),
)
def test_wrong_http_gets_one_answer(running, sent, status):
    found = raw(running, sent.encode("latin-1") + b"\r\n")
    assert found.startswith(f"HTTP/1.1 {status}".encode()), found[:300]
    assert found.count(b"HTTP/1.1 ") <= 2


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", "Basic x", f"bearer{KEY}", f"Bearer {KEY}x", f"Bearer {KEY} {KEY}", "Bearer \xff"],
)
def test_a_bad_key_is_refused(running, value):
    sent = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nAuthorization: {value}\r\nContent-Length: 2\r\n\r\n{{}}"
    assert raw(running, sent.encode("latin-1")).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Host: evil.example:8000", 403),
        ("Host: localhost.evil.example", 403),
        ("Host: 127.0.0.1\r\nOrigin: https://evil.example", 403),
        ("Host: 127.0.0.1\r\nOrigin: null", 403),
        ("Host: 127.0.0.1\r\nOrigin: http://localhost:8000", 200),
        ("Host: [::1]:8000", 200),
    ],
)
def test_without_keys_a_page_of_another_site_is_refused(running, monkeypatch, header, status):
    monkeypatch.setattr(running.server.config.app, "keys", ())
    sent = f"GET /v1/models HTTP/1.1\r\n{header}\r\n\r\n"
    assert raw(running, sent.encode()).startswith(f"HTTP/1.1 {status}".encode())


def test_pipelined_requests_get_all_their_answers(running):
    assert raw(running, f"GET /health HTTP/1.1\r\n{HEAD}\r\n".encode() * 200).count(b"HTTP/1.1 200") == 200


def test_slow_sockets_are_cut_while_others_are_served(running, request, monkeypatch):
    for module, name in ((server, "HEADER_S"), (front, "BODY_S")):
        monkeypatch.setattr(module, name, 2.0)
    count = 500 if request.config.getoption("--exhaustive") else 20
    starts = ["", "GET /hea", f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: 9\r\n\r\n{{"]
    clients = [connect(running) for _ in range(count)]
    for index, client in enumerate(clients):
        client.sendall(starts[index % 3].encode())
    assert post(running, COMPLETION, {"prompt": "x", "max_tokens": 2}).status_code == 200
    for index, client in enumerate(clients):
        with suppress(ConnectionError):
            assert client.recv(12) == (b"HTTP/1.1 408" if index % 3 == 2 else b"")
        client.close()


def test_a_client_that_does_not_read_is_cut(running, monkeypatch):
    monkeypatch.setattr(server, "WRITE_S", 0.5)
    with connect(running) as client:
        client.settimeout(20)
        asked = f"GET / HTTP/1.1\r\n{HEAD}\r\n".encode() * 1_000_000
        with pytest.raises(ConnectionError):
            client.sendall(asked)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_leave_at_any_point(running, stream):
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": stream, "n": 2, "ignored": None})
    body = body.replace(', "ignored": null', "")
    sent = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def leave(point):
        with connect(running) as client:
            client.sendall(sent[: int(len(sent) * min(point, 1))])
            if point > 1:
                client.recv(int(200 * (point - 1)))
            if int(point * 20) % 2:
                client.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, [step / 20 for step in range(1, 41, 2)]))
    idle(running)


def test_a_stream_whose_client_left_before_its_first_event_is_dropped(running, monkeypatch):
    before, submit = running.metric("tessera:requests_cancelled_total"), running.service.submit
    body = json.dumps({"prompt": "x", "max_tokens": 250, "stream": True, "logit_bias": {"257": -100}})
    sent = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def left(*requests):
        client.close()
        jobs = submit(*requests)
        for connection in list(running.server.server_state.connections):
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.cycle.disconnected = True
                connection.cycle.message_event.set()
        return jobs

    monkeypatch.setattr(running.service, "submit", left)
    client = connect(running)
    client.sendall(sent)
    running.until(lambda: running.metric("tessera:requests_cancelled_total") == before + 1)
