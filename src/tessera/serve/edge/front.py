"""ASGI middleware for all routes: checks API keys, limits bodies, and gives each request an id and a log line."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from tessera.serve.api.schema import Refusal
from tessera.serve.edge.cors import LOCAL

logger = logging.getLogger(__name__)

BODY_S, BODY_BYTES_PER_S = 8.0, 1 << 20
"""A body must arrive within `BODY_S` seconds, plus one second per `BODY_BYTES_PER_S` bytes that have arrived."""
MAX_BODY = 16 << 20
"""Maximum bytes of a request's body."""
MAX_BODIES, SMALL_BODY = 256 << 20, 64 << 10
"""`MAX_BODIES` is the maximum bytes of all bodies that are being read or answered. Beyond it, the server still accepts
a body of at most `SMALL_BODY` bytes. If there are several API keys, each has at most half of it."""
DISCARD_S = 1.0
"""Maximum seconds for which the server reads on after it has refused a request."""
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/openapi.json", "/ready"})
"""Paths that need no API key: health probes, the pages, of which the chat asks its user for the key, and the API's
description. Their responses reveal nothing about requests."""

HERE = re.compile(rf"(https?://)?{LOCAL}".encode())
"""Values of the headers Host and Origin that name this machine."""

TENANT = "tessera.tenant"
"""Key in a request's ASGI scope under which the name of its tenant is stored."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Front:
    """ASGI middleware that checks the API key and the body of every request, and logs one line per request.

    Args:
        keys: accepted API keys. If there are none, requests need no key, but their headers Host and Origin, if present,
            must name this machine.
        origins: other origins that may be in the header Origin (see `cors.origins`).
        own: another accepted key, that of the front of several replicas; its tenant is "".
    """

    def __init__(
        self,
        app: Callable[[Message, Receive, Send], Awaitable[None]],
        keys: Sequence[str] = (),
        own: str = "",
        origins: Sequence[str] = (),
    ):
        accepted = (*keys, own) if own else keys
        self.app, self.keys, self._front = app, tuple(key.encode() for key in accepted), own.encode()
        self._origins = frozenset(each.encode() for each in origins)
        self.held = 0  # bytes of all bodies that are being read or answered
        self._own: Counter[str] = Counter()  # of each tenant

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request with its whole body to the application, or refuse it (400, 401, 403, 408, 413 or 429)."""
        headers, began = dict(scope["headers"]), time.monotonic()
        id, status = headers.get(b"x-request-id", b"")[:64].strip() or uuid4().hex.encode(), 499
        held, tenant, failed = 0, "", True

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id)]
            await send(message)

        try:
            if not self.keys:
                _check_local(headers, self._origins)
            if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
                raise Refusal(400, "the request has several headers 'Authorization': send one")
            scope[TENANT] = tenant = self._tenant(scope["path"], headers.get(b"authorization", b""))
            if scope["path"] in OPEN_PATHS and (
                b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
            ):
                raise Refusal(413, f"{scope['path']} takes no body: leave it out")
            if b"content-length" in headers and b"transfer-encoding" in headers:
                # a proxy may obey one and this server the other: the bytes that follow could be another request
                raise Refusal(400, "the headers content-length and transfer-encoding cannot be combined: send one")
            body = bytearray()
            async for piece in _body(headers, receive):
                body += piece
                held, self.held = held + len(piece), self.held + len(piece)
                self._own[tenant] += len(piece)
                most = MAX_BODIES // 2 if len(self.keys) > 1 else MAX_BODIES
                if held > SMALL_BODY and (self.held > MAX_BODIES or self._own[tenant] > most):
                    raise Refusal(429, "the server holds too many large bodies: try again later", retry_s=5)
            given = [{"type": "http.request", "body": bytes(body), "more_body": False}]
            del body

            async def replay() -> Message:
                return given.pop() if given else await receive()

            # uvicorn answers HEAD with the headers of a GET, and without its body
            await self.app(scope | {"method": "GET"} if scope["method"] == "HEAD" else scope, replay, answer)
            failed = False
        except Refusal as refusal:
            self._release(tenant, held)
            held, failed = 0, False
            await _refuse(answer, receive, refusal)
        except ConnectionError:
            failed = False  # the client closed the connection before its body was complete
        finally:
            self._release(tenant, held)
            line = {"id": id.decode("latin-1"), "method": scope["method"], "path": scope["path"][:200]}
            line |= {"status": 500 if failed else status, "seconds": round(time.monotonic() - began, 3)}
            logger.info("%s", json.dumps(line))

    def _release(self, tenant: str, held: int) -> None:
        self.held -= held
        self._own[tenant] -= held

    def _tenant(self, path: str, given: bytes) -> str:
        """Check the API key and return its tenant; "" if the path or the server needs no key."""
        if not self.keys or path in OPEN_PATHS:
            return ""
        kind, _, own = given.partition(b" ")
        # compare with every key, each in constant time, so that response times reveal nothing about the keys
        same = [hmac.compare_digest(own.strip(), key) for key in self.keys]
        if kind.lower() != b"bearer" or not any(same):
            raise Refusal(401, "this server needs an API key: send the header 'Authorization: Bearer KEY'")
        return "" if own.strip() == self._front else tenant_of(own.strip().decode())


def _check_local(headers: dict[bytes, bytes], origins: frozenset[bytes]) -> None:
    """Refuse a request that another site's web page sends from a browser on this machine.

    Otherwise the page could send requests to this server and, once the page's domain name resolves to this machine (DNS
    rebinding), read the answers. Only browsers send the header Origin.
    """
    for name in (b"host", b"origin"):
        if (given := headers.get(name, b"").strip()) and not HERE.fullmatch(given):
            if name == b"origin" and (given in origins or b"*" in origins):
                continue
            raise Refusal(
                403,
                f"the header {name.decode()} names another machine, but a server without API keys accepts only its own "
                "name: start it with --api-key-file, or send the request to localhost; --cors allows other origins",
            )


def tenant_of(key: str) -> str:
    """Return the tenant of an API key: a name that does not reveal the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


async def _body(headers: dict[bytes, bytes], receive: Receive) -> AsyncIterator[bytes]:
    """Yield the pieces of a body; refuse one that is too large or slow. Raise ConnectionError if the client leaves."""
    too_large = Refusal(413, f"the body is larger than {MAX_BODY >> 20} MiB: send fewer or shorter prompts")
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit() or len(declared) > 12 or int(declared) > MAX_BODY:
        raise too_large
    size, deadline, message = 0, time.monotonic() + BODY_S, {"more_body": True}
    while message.get("more_body"):
        try:
            message = await asyncio.wait_for(receive(), deadline + size / BODY_BYTES_PER_S - time.monotonic())
        except TimeoutError:
            raise Refusal(408, "the body arrives too slowly: send the request again") from None
        if message["type"] != "http.request":
            raise ConnectionError
        piece = message.get("body", b"")
        size += len(piece)
        if size > MAX_BODY:
            raise too_large
        yield piece


async def _refuse(send: Send, receive: Receive, refusal: Refusal) -> None:
    """Send the refusal, and read on for a short time: if the connection closed while the client was still sending, the
    client would get a TCP reset and lose the response."""
    body = json.dumps(refusal.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [] if refusal.retry_s is None else [(b"retry-after", str(refusal.retry_s).encode())]
    headers += [(b"connection", b"close")]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b""})
