"""ASGI middleware before every route: check the API key, limit the body, set a request id, log one line."""

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from tessera.serve.protocol import Refusal

logger = logging.getLogger(__name__)

BODY_S = 30.0
"""Maximum seconds from a request's headers to the end of its body."""
MAX_BODY = 32 << 20
"""Maximum bytes of a request's body."""
DISCARD_S = 1.0
"""Maximum seconds for which the server goes on reading a body that it has refused as too large."""
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Paths that need no API key: health probes, and the page, which asks its user for the key. Their responses reveal
nothing about requests."""

TENANT = "tessera.tenant"
"""Key of a request's ASGI scope that holds the tenant."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Front:
    """ASGI middleware that checks the API key and the body of every request, and logs one line.

    Args:
        app: application that gets the requests that pass.
        keys: accepted API keys; if there are none, every request is accepted.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], keys: Sequence[str] = ()):
        self.app, self.keys = app, tuple(key.encode() for key in keys)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request and its whole body to the application, or refuse it with status 401, 408 or 413."""
        headers, began = dict(scope["headers"]), time.monotonic()
        id, status = headers.get(b"x-request-id", b"")[:64] or uuid4().hex.encode(), 499

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id)]
            await send(message)

        try:
            scope[TENANT] = self._tenant(scope["path"], headers.get(b"authorization", b""))
            given = [await _read_body(headers, receive)]

            async def replay() -> Message:
                return given.pop() if given else await receive()

            await self.app(scope, replay, answer)
        except Refusal as refusal:
            await _refuse(answer, refusal)
            if refusal.status == 413:
                await _discard(receive)
        except ConnectionError:
            pass  # the client closed the connection before its body was complete
        line = {"id": id.decode("latin-1"), "method": scope["method"], "path": scope["path"][:200], "status": status}
        logger.info("%s", json.dumps(line | {"seconds": round(time.monotonic() - began, 3)}))

    def _tenant(self, path: str, given: bytes) -> str:
        """Check the API key and return its tenant."""
        if not self.keys or path in OPEN_PATHS:
            return ""
        kind, _, own = given.partition(b" ")
        # compare with every key, each in constant time, so that response times reveal nothing about the keys
        same = [hmac.compare_digest(own.strip(), key) for key in self.keys]
        if kind.lower() != b"bearer" or not any(same):
            raise Refusal(401, "this server needs an API key: send the header 'Authorization: Bearer KEY'")
        return tenant_of(own.strip().decode())


def tenant_of(key: str) -> str:
    """Return the tenant of an API key: a name that does not reveal the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


async def _read_body(headers: dict[bytes, bytes], receive: Receive) -> Message:
    """Return the whole body as one message; raise Refusal if it is too large or too slow."""
    too_large = Refusal(413, f"the body is larger than {MAX_BODY >> 20} MiB: send fewer or shorter prompts")
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit() or len(declared) > 12 or int(declared) > MAX_BODY:
        raise too_large
    body, deadline = bytearray(), time.monotonic() + BODY_S
    while True:
        try:
            message = await asyncio.wait_for(receive(), deadline - time.monotonic())
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {BODY_S:g} s: send the request again") from None
        if message["type"] != "http.request":
            raise ConnectionError
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise too_large
        if not message.get("more_body"):
            return {"type": "http.request", "body": bytes(body), "more_body": False}


async def _discard(receive: Receive) -> None:
    """Read the rest of a body for at most DISCARD_S seconds.

    If the server closed while the client still sends, TCP would reset the connection and the client would lose the
    response.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (await receive()).get("more_body"):
                pass


async def _refuse(send: Send, refusal: Refusal) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(refusal.body()).encode()})
