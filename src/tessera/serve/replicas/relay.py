"""The front of several replicas: an ASGI application that sends each request to a replica and returns the answer.

If the replica is lost, full or still warming up, the front sends the request to another one. But if a stream has begun,
it ends with an error event, because the client already has part of the answer.
"""

import json
from contextlib import suppress

import httpx2
from fastapi import Response

from tessera.serve.api.protocol import ChatBody, CompletionBody
from tessera.serve.api.schema import Refusal
from tessera.serve.edge.bodies import Bodies
from tessera.serve.edge.front import TENANT, Message, Receive, Send
from tessera.serve.edge.turns import unless_gone
from tessera.serve.metrics import METRICS_TYPE
from tessera.serve.replicas.routing import choose, first_page
from tessera.serve.replicas.supervisor import Lost, Replica, Replicas, full
from tessera.serve.site import refusal_response

PROMPTS = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
"""Route -> schema of its body, for the routes whose prompt decides which replica answers. Any replica can answer other
routes."""
OWN = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "date", "vary", "x-request-id"})
"""Headers of a replica's answer that the front sets itself."""
BUSY = (429, 503)
"""Statuses with which a replica declines a request; another replica may have room."""
MAX_LOST = 2
"""Number of lost replicas after which a request fails: the request may have crashed them, and must not crash others."""


class Relay:
    """ASGI application in front of replicas.

    `margin` is the number of open requests by which a request's preferred replica may exceed another
    (`routing.choose`); `context` is the maximum tokens of a request, None if only the replicas know it.
    """

    def __init__(self, replicas: Replicas, margin: int, context: int | None = None):
        self.replicas, self.margin, self._bodies = replicas, margin, Bodies(context)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        with suppress(Refusal):  # of a client that is gone
            await unless_gone(receive, self._respond(scope, body, send))

    async def _respond(self, scope: Message, body: bytes, send: Send) -> None:
        own = scope["method"] == "GET" and scope["path"] in ("/health", "/ready", "/metrics")
        try:
            response = await (self._own(scope["path"]) if own else self._forward(scope, body, send))
        except Refusal as refusal:
            response = refusal_response(refusal)
        if response is not None:
            await response(scope, None, send)

    async def _own(self, path: str) -> Response:
        if path == "/metrics":
            return Response(await self.replicas.metrics(), media_type=METRICS_TYPE)
        if path == "/health":
            return Response(status_code=200 if self.replicas.alive else 500)
        return Response(status_code=200 if self.replicas.ready and not self.replicas.draining else 503)

    async def _forward(self, scope: Message, body: bytes, send: Send) -> Response | None:
        """Ask one replica after another until one has room. Return its answer, or None if the answer was streamed."""
        if self.replicas.draining and scope["method"] == "POST":
            raise Refusal(503, "the server is shutting down: try again later", retry_s=30)
        key = await self._key(scope, body)
        tried, lost, response = set(), 0, refusal_response(Refusal(503, "no replica is ready: try again", retry_s=5))
        with self.replicas.counted():
            while left := [each for each in self.replicas.ready if (each, each.starts) not in tried]:
                replica = choose(key, left, self.margin)
                tried.add((replica, replica.starts))  # once it has restarted, it may be asked again
                retired = replica.retired
                try:
                    with replica.counted():
                        response = await self._ask(replica, scope, body, send)
                except Lost as error:
                    lost += replica.retired == retired  # a planned restart is no crash
                    if lost == MAX_LOST:
                        raise Refusal(500, "the replicas that took the request were lost: send it again") from error
                    self.replicas.retried += 1
                    continue
                if response is None or response.status_code not in BUSY:
                    return response
        return response

    async def _key(self, scope: Message, body: bytes) -> bytes | None:
        """Return the request's routing key, or None if any replica may answer; raise Refusal if the body is wrong."""
        schema = PROMPTS.get(scope["path"])
        if schema is None or scope["method"] != "POST":
            return None
        return first_page(await self._bodies.parse(scope[TENANT], schema, body), scope[TENANT])

    async def _ask(self, replica: Replica, scope: Message, body: bytes, send: Send) -> Response | None:
        """Send a request to a replica. Return the whole answer, or stream it to the client and return None.

        Raise Lost if the replica was lost before the client got a byte.
        """
        begun, key = False, dict(scope["headers"]).get(b"authorization")
        own = {b"Authorization": key} if self.replicas.launcher.keys and key else {}  # it tells the replica the tenant
        asked = {"method": scope["method"], "url": _url(replica, scope), "content": body, "headers": own}
        try:
            async with replica.bounded(), self.replicas.client.stream(**asked) as found:
                headers = {name: value for name, value in found.headers.items() if name.lower() not in OWN}
                if not headers.get("content-type", "").startswith("text/event-stream"):
                    return Response(await found.aread(), found.status_code, headers)
                async for piece in found.aiter_raw():
                    if not begun:
                        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                        await send({"type": "http.response.start", "status": found.status_code, "headers": pairs})
                    begun = True
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (httpx2.TransportError, TimeoutError) as error:
            if full(error) and not begun:
                raise Refusal(503, "the server has too many connections: try again", retry_s=5) from error
            if not begun:
                raise Lost(str(error) or type(error).__name__) from error
            said = Refusal(500, "the replica that answered was lost: send the request again").body()
            await send({"type": "http.response.body", "body": f"data: {json.dumps(said)}\n\n".encode()})
            return None
        if not begun:
            raise Lost("the stream ended before its first piece")
        await send({"type": "http.response.body", "body": b""})
        return None


def _url(replica: Replica, scope: Message) -> httpx2.URL:
    """Return the address of a request at a replica.

    Refuse a request that the client would send otherwise than the front got it: one without a path, like CONNECT, or
    with an invalid query, dots in its path, or a method in small letters.
    """
    query, unknown = scope["query_string"], f"no route {scope['method']} {scope['path']:.200}: see /docs"
    if scope["method"] != scope["method"].upper():
        raise Refusal(405, unknown)
    try:
        url = httpx2.URL(replica.url).copy_with(raw_path=scope["raw_path"] + (b"?" + query if query else b""))
    except httpx2.InvalidURL:
        raise Refusal(404, unknown) from None
    if url.raw_path.partition(b"?")[0] != scope["raw_path"]:
        raise Refusal(404, unknown)
    return url
