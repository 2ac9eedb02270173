"""Hostile clients of a small server in this process, and what must hold after them."""

import json
import os
import socket
from contextlib import suppress

import httpx2 as httpx
from live_server import KEY, start, tiny_model

OTHER = "another"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
HEAD = f"Host: x\r\nAuthorization: Bearer {KEY}\r\n"


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


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


def attacked(folder):
    """Yield a running server; at the end, check that the attacks left nothing behind."""
    found = start(tiny_model(folder), keys=[KEY, OTHER])
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


def check_served(running):
    """Check that an honest client is served."""
    idle(running)
    found = post(running, COMPLETION, {"prompt": "x", "max_tokens": 2})
    assert found.status_code == 200
    assert found.json()["usage"]["completion_tokens"] in (1, 2)
