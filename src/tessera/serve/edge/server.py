"""Run the application under uvicorn, with a deadline for a request's headers and a graceful shutdown.

uvicorn limits neither the size of a body nor the time that headers and body take. A client that sends one byte a second
could hold a connection indefinitely. This module therefore sets a deadline for headers, and `front` one for bodies.
"""

import asyncio
import errno
import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from tessera.core import interrupt
from tessera.serve.api.schema import Refusal
from tessera.serve.edge.cors import Cors
from tessera.serve.edge.front import Front

logger = logging.getLogger(__name__)

HEADER_S = 8.0
"""Maximum seconds from a connection's start, or from its last response, until a request's headers are complete."""
WRITE_S = 10.0
"""Maximum seconds for which a connection's send buffer may stay full because the client does not read."""
PIECE = 2048
"""Number of bytes to parse at a time, except in a body with Content-Length. A chunk with one byte of body is six bytes
long and takes long to parse, while other requests wait."""
CHUNK = re.compile(rb"\r\n[0-9A-Fa-f]+(;[^\r\n]*)?\r\n")
"""Header of a chunk that follows another chunk."""
TINY, TINY_S = 32, 0.05
"""If chunks have fewer than `TINY` bytes on average, the server parses one such piece every `TINY_S` seconds."""
AHEAD = 1 << 16
"""Maximum bytes that a connection may send ahead of the answer to its request. Reading them shows when a client closes
the connection."""
MAX_CONNECTIONS = 1000
"""Maximum number of connections. Beyond it, the connection that has waited longest for a request is closed."""
ACCEPTED = 32
"""Maximum number of connections to accept at a time. Meanwhile, other requests wait."""
UNACCEPTED = 2048
DRAIN_S = 30.0
"""Maximum seconds for which the server waits for open requests after SIGTERM."""


class Work(Protocol):
    """The part of a server that computes answers: the service of one engine, or the replicas behind a front.

    `open` counts the requests that wait or run. The server stops as soon as the work is not `alive`.
    """

    draining: bool

    @property
    def open(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def drain(self) -> None:
        """Refuse new requests; open requests continue."""

    def stop(self) -> None:
        """End all work and fail the open requests."""


class Flow(FlowControl):
    """uvicorn's flow control, which also calls `resumed` whenever it lets the connection read again."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]):
        super().__init__(transport)
        self._resumed = resumed

    def resume_reading(self) -> None:
        paused = self.read_paused
        super().resume_reading()
        if paused:
            self._resumed()


class Deadlines(H11Protocol):
    """HTTP/1.1 with two deadlines: one for a request's headers, one for a client that does not read its answer.

    Attributes:
        tiny_s: time on the loop's clock until which pieces of tiny chunks are planned, of all connections.
        idle: all connections without the whole headers of a request, the one that has waited longest first.
    """

    tiny_s = 0.0
    idle: ClassVar[dict["Deadlines", None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.flow = Flow(transport, self._parse_soon)
        self._rest = bytearray()  # received, but not parsed
        self._soon: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._await_headers()
        most, self.limit_concurrency = self.config.limit_concurrency, None  # uvicorn would refuse this request instead
        if len(self.connections) > most:
            longest = next(one for one in self.idle if one in self.connections)
            del self.idle[longest]
            longest._cut()

    def data_received(self, data: bytes) -> None:
        """Parse a piece at a time, so that others get their turn. What follows a whole request waits for its answer."""
        waiting = bool(self._rest)
        self._rest += data
        if waiting and (not self._answering() or len(self._rest) > AHEAD):
            self.transport.pause_reading()
        elif not waiting:
            self._parse()

    def _parse(self) -> None:
        self._soon = None
        if self.transport.is_closing():
            self._rest.clear()
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._rest = self._rest.lstrip(b"\r\n")  # some clients send an empty line after a body
        if self.flow.read_paused:
            return
        if not self._rest or (self._answering() and len(self._rest) <= AHEAD):
            self.transport.resume_reading()
        if not self._rest or self._answering():  # h11 would take b"" for the end of the connection
            return
        plain = self.conn.their_state is h11.SEND_BODY and all(name != b"transfer-encoding" for name, _ in self.headers)
        size = len(self._rest) if plain else PIECE
        piece = bytes(self._rest[:size])
        del self._rest[:size]
        super().data_received(piece)
        if self._rest:
            tiny = self.conn.their_state is h11.SEND_BODY and len(CHUNK.findall(piece)) * TINY > len(piece)
            self._parse_soon(self._turn_of_tiny() if tiny else 0.0)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _turn_of_tiny(self) -> float:
        """Return the seconds until this connection may parse its next piece of tiny chunks; all take turns."""
        now_s = asyncio.get_running_loop().time()
        Deadlines.tiny_s = max(Deadlines.tiny_s, now_s) + TINY_S
        return Deadlines.tiny_s - now_s

    def _parse_soon(self, delay_s: float = 0.0) -> None:
        if self._rest and self._soon is None:
            self.transport.pause_reading()
            self._soon = asyncio.get_running_loop().call_later(delay_s, self._parse)

    def handle_events(self) -> None:
        super().handle_events()
        if self._answering() and len(self._rest) <= AHEAD:  # uvicorn stops reading where the next request begins
            self.flow.resume_reading()
        if self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()
            self.idle.pop(self, None)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the API's form; if an answer has begun, only close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._cut()
            return
        refusal = Refusal(400, "the request is not valid HTTP/1.1, or its headers are larger than 16 KiB")
        body = json.dumps(refusal.body())
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        with suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
            for event in (h11.Response(status_code=400, headers=[*headers.items()]), h11.Data(data=body.encode())):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def on_response_complete(self) -> None:
        self._await_headers()
        super().on_response_complete()
        self._parse_soon()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = asyncio.get_running_loop().call_later(WRITE_S, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self.idle.pop(self, None)
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(error)

    def _answering(self) -> bool:
        return self.conn.their_state is h11.DONE

    def _await_headers(self) -> None:
        self.idle.pop(self, None)
        self.idle[self] = None
        self._deadline = asyncio.get_running_loop().call_later(HEADER_S, self._cut)

    def _cut(self) -> None:
        self.transport.abort()  # `close` would wait until the client has read everything


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM or SIGINT refuses new requests (503), finishes open ones, and stops."""

    def __init__(self, config: uvicorn.Config, service: Work):
        super().__init__(config)
        self.service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task | None = None
        self._stopping: threading.Thread | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """At the first signal, refuse new requests and finish open ones; at the second, stop at once.

        This logs nothing: Python may call it in the middle of a write to the log, where a second write raises an
        error that loses the signal.
        """
        if self._ending is not None or self.service.draining:
            if signal.Signals(sig).name == "SIGHUP":  # a terminal that closes sends two, one by its shell
                return
            self.should_exit = self.force_exit = True
            return
        self.service.drain()
        if self._loop is None:  # `serve` has not started yet
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._end, sig)

    async def startup(self, sockets: list[socket.socket]) -> None:
        """Start to listen. asyncio accepts as many connections at a time as may wait, which would be too many."""
        await super().startup(sockets)
        for each in sockets:
            each.listen(UNACCEPTED)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self.service.alive

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve until a signal; stop the service after the last response, unless a second signal has come."""
        self._loop = asyncio.get_running_loop()
        try:
            await super().serve(sockets)
        finally:
            stopping = self._stop()
            while stopping.is_alive() and not self.force_exit:
                await asyncio.sleep(0.05)

    def _end(self, sig: int) -> None:
        logger.info("%s: finishing %d open requests", signal.Signals(sig).name, self.service.open)
        self._ending = asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        # tasks: also requests whose bodies are still read or checked
        while (self.service.open or self.server_state.tasks) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.service.open:
            logger.warning("%d requests did not end within %g s: stopping them", self.service.open, DRAIN_S)
            stopping = self._stop()
            while self.service.open and stopping.is_alive():
                await asyncio.sleep(0.05)
        self.should_exit = True

    def _stop(self) -> threading.Thread:
        """Stop the service, once, on a thread: it may write pages for long, and a second signal does not wait."""
        if self._stopping is None:
            self._stopping = threading.Thread(target=self.service.stop, daemon=True)
            self._stopping.start()
        return self._stopping


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`; clients that connect before the server runs wait for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(UNACCEPTED)  # else Linux would let another program with SO_REUSEADDR bind the port, too
    except OSError as error:
        found.close()
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise OSError(f"cannot listen on {host} port {port} ({error.strerror}): use another {flag}") from error
    return found


def configured(
    app: Callable[..., Awaitable[None]], keys: Sequence[str] = (), own: str = "", origins: Sequence[str] = ()
) -> uvicorn.Config:
    """Return uvicorn's configuration; see `Front` for the accepted API keys and for the origins of web pages."""
    return uvicorn.Config(
        Cors(Front(app, keys, own, origins), origins),
        http=Deadlines,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        backlog=ACCEPTED,
        timeout_keep_alive=int(HEADER_S),
        timeout_graceful_shutdown=5,
        server_header=False,
    )


def take_signals(server: Server) -> None:
    """Make SIGINT and SIGTERM end the server, even before it runs."""
    interrupt.release()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
