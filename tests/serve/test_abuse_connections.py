"""Hostile connections: wrong HTTP, slow and silent sockets, clients that leave. None gets a 5xx or stops the server."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx2 as httpx
import pytest
from hostile import COMPLETION, HEAD, OTHER, attacked, check_served, connect, idle, post, raw
from live_server import KEY

from tessera.serve.edge import front, server


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    yield from attacked(tmp_path_factory.mktemp("abuse"))


@pytest.fixture(autouse=True)
def honest(running):
    """After each attack, an honest client is served."""
    yield
    check_served(running)


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
        (f"GET /v1/models HTTP/1.1\r\n{HEAD}Authorization: Bearer x\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\nx", 413),
        (f"\r\n\nGET /health HTTP/1.1\r\n{HEAD}\r\n", 200),
        (f"HEAD /v1/completions HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\nZZZ\r\n", 400),
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
        (f"HEAD /v1/models HTTP/1.1\r\n{HEAD}\r\n", 200),
        (f"HEAD /v1/completions HTTP/1.1\r\n{HEAD}\r\n", 405),
        ("HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    ],
    ids=lambda value: str(value)[:60].encode("unicode_escape").decode(),
)
def test_wrong_http_gets_one_answer(running, sent, status):
    found = raw(running, sent.encode("latin-1") + b"\r\n")
    assert found.startswith(f"HTTP/1.1 {status}".encode()), found[:300]
    assert found.count(b"HTTP/1.1 ") <= 2
    if status != 200 and not sent.startswith("HEAD"):
        assert b'{"error": {"message": "' in found


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
    monkeypatch.setattr(running.server.config.app.app, "keys", ())  # inside the middleware for CORS
    sent = f"GET /v1/models HTTP/1.1\r\n{header}\r\n\r\n"
    assert raw(running, sent.encode()).startswith(f"HTTP/1.1 {status}".encode())


def test_a_body_of_tiny_chunks_leaves_turns_to_others(running):
    head = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
    with ThreadPoolExecutor(1) as pool, connect(running) as client:
        client.sendall(head + b"1\r\nx\r\n" * 6000 + b"0\r\n\r\n")
        asked, served = pool.submit(client.recv, 12), 0
        while not asked.done():
            assert httpx.get(running.url + "/health").status_code == 200
            served += 1
    assert asked.result() == b"HTTP/1.1 400"
    assert served > 3  # parsed at once, these chunks would let one through


def test_one_key_cannot_take_the_room_for_all_bodies(running, monkeypatch):
    monkeypatch.setattr(front, "MAX_BODIES", 400_000)
    head = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: 190000\r\n\r\n".encode()
    with connect(running) as first, connect(running) as second:
        first.sendall(head + b"x" * 180_000)
        second.sendall(head + b"x" * 180_000)
        assert second.recv(12) == b"HTTP/1.1 429"
        body = {"prompt": "x", "max_tokens": 1, "user": "u" * 100_000}
        assert post(running, COMPLETION, body, {"Authorization": f"Bearer {OTHER}"}).status_code == 200


def test_requests_that_follow_a_body_get_their_own_answers(running):
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 600_000})
    head = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}"
    plain = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    health = f"GET /health HTTP/1.1\r\n{HEAD}\r\n"
    found = raw(running, (plain + health + chunked + plain + health).encode())
    assert found.count(b"HTTP/1.1 200") == 5


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


def test_silent_connections_make_room_for_others(running, monkeypatch):
    monkeypatch.setattr(running.server.config, "limit_concurrency", 20)
    silent = [connect(running) for _ in range(30)]
    for _ in range(5):
        assert httpx.get(running.url + "/health").status_code == 200
    assert post(running, COMPLETION, {"prompt": "x", "max_tokens": 2}).status_code == 200
    with suppress(ConnectionError):
        assert silent[0].recv(1) == b""  # the first was closed
    for client in silent:
        client.close()


def test_a_client_that_does_not_read_is_cut(running, monkeypatch):
    monkeypatch.setattr(server, "WRITE_S", 0.5)
    with connect(running) as client:
        client.settimeout(20)
        asked = f"GET / HTTP/1.1\r\n{HEAD}\r\n".encode() * 1_000_000
        with pytest.raises(ConnectionError):
            client.sendall(asked)


def test_an_empty_line_alone_waits_for_a_request(running):
    for lines in (b"\r\n", b"\n\n", b"\r"):
        with connect(running) as client:
            client.sendall(lines)
            assert httpx.get(running.url + "/health").status_code == 200
            client.sendall(f"\r\nGET /health HTTP/1.1\r\n{HEAD}\r\n".encode())
            assert client.recv(12) == b"HTTP/1.1 200"
            client.sendall(lines)
            assert httpx.get(running.url + "/health").status_code == 200


NEXT = f"GET /health HTTP/1.1\r\n{HEAD}\r\n"


@pytest.mark.parametrize("pause_s", [0, 0.3])
@pytest.mark.parametrize("ahead", ["\r\n", "GET /hea", NEXT * 100, NEXT[:-2] + "X: " + "x" * 9000 + "\r\n\r\n"])
def test_a_client_that_has_begun_another_request_may_leave(running, ahead, pause_s):
    before = running.metric("tessera:requests_cancelled_total")
    body = json.dumps({"prompt": "x", "max_tokens": 250, "n": 8, "logit_bias": {"257": -100}})
    with connect(running) as client:
        head = f"POST {COMPLETION} HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body + (ahead if not pause_s else "")).encode())
        running.until(lambda: running.service.open)
        time.sleep(pause_s)
        client.sendall(ahead.encode() if pause_s else b"")
    running.until(lambda: running.metric("tessera:requests_cancelled_total") > before)


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
