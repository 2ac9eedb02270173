"""Web pages of this machine may use the server, others only if `--cors` names them, and a keyless server no others."""

import asyncio

import httpx2 as httpx
import pytest

from tessera.serve.api.schema import Refusal
from tessera.serve.edge.cors import Cors, origins
from tessera.serve.edge.front import Front
from tessera.serve.site import refusal_response

HERE, THERE = "http://localhost:3000", "https://chat.example.org"
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


async def app(scope, receive, send):
    """Answer /events by a stream, and refuse all else."""
    if scope["path"] != "/events":
        await refusal_response(Refusal(429, "busy", retry_s=1))(scope, receive, send)
        return
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"data: 2\n\n"})


def send(method, path, origin, keys=(), allowed=(), **headers):
    allowed = origins(allowed)
    headers |= {} if origin is None else {"Origin": origin}

    async def sent():
        served = Cors(Front(app, keys, origins=allowed), allowed)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=served), base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(sent())


@pytest.mark.parametrize(
    ("origin", "allowed", "told"),
    [
        (HERE, (), HERE),
        ("http://127.0.0.1:5173", (), "http://127.0.0.1:5173"),
        ("https://[::1]:8443", (), "https://[::1]:8443"),
        ("http://app.localhost:3000", (), "http://app.localhost:3000"),
        ("http://notlocalhost:3000", (), None),
        (THERE, (THERE + ":443",), THERE),
        ("http://[fd00::1]", ("http://[FD00::1]:80/",), "http://[fd00::1]"),
        ("https://xn--exmple-cua.org", ("https://exämple.org",), "https://xn--exmple-cua.org"),
        (THERE, (), None),
        ("http://localhost.example.org", (), None),
        ("http://localhost:80@example.org", (), None),
        ("null", (), None),
        (THERE, (THERE + "/",), THERE),
        ("https://chat.example.org:8443", (THERE,), None),
        ("http://localhost:3000", (THERE,), HERE),
        ("app://obsidian.md", ("app://obsidian.md",), "app://obsidian.md"),
        ("https://any.example", ("*",), "*"),
        ("null", ("*",), "*"),
    ],
)
@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["no key", "key"])
def test_a_page_may_use_the_server_if_its_origin_is_allowed(origin, allowed, told, keys):
    asked = send("OPTIONS", "/v1/chat/completions", origin, keys, allowed, **ASKED)
    assert (asked.status_code == 200) == (told is not None)
    assert asked.headers.get("access-control-allow-origin") == told
    assert "Origin" in asked.headers["vary"]
    if told is not None:
        assert asked.headers["access-control-allow-headers"] == ASKED["Access-Control-Request-Headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
    answers = {
        200: send("GET", "/events", origin, keys, allowed, **{"Authorization": "Bearer secret"} if keys else {}),
        429: send("GET", "/", origin, keys, allowed),
        401: send("GET", "/events", origin, ("secret",), allowed),
    }
    for status, answer in answers.items():
        if told is None and not keys and status != 401:
            status = 403  # a page of another site must not even start work on a server without keys
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == told
        assert "Origin" in answer.headers["vary"]
    if told is not None:
        assert {"retry-after", "x-request-id"} <= {*answers[429].headers["access-control-expose-headers"].split(", ")}
        assert answers[200].text == "data: 1\n\ndata: 2\n\n"


def test_a_domain_that_resolves_to_this_machine_is_refused_whatever_cors_allows():
    found = send("GET", "/events", None, allowed=("*",), Host="rebound.example")
    assert found.status_code == 403
    assert "the header host names another machine" in found.json()["error"]["message"]


def test_a_program_that_is_no_browser_is_served():
    assert send("GET", "/events", None).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        "chat.example.org",
        "https://",
        "https://a/path",
        "https://a, https://b",
        "null",
        "**",
        "https://straße.de",
        "https://ä..b",
    ],
)
def test_what_is_no_origin_is_refused(given):
    with pytest.raises(ValueError, match="--cors"):
        origins([given])
