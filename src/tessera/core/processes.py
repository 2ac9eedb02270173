"""Run one model in several processes: they connect to one address, compare their arguments, and end together.

Process 0 listens at HOST:PORT. The others connect, send digests of their arguments (`facts`), and receive a verdict:
whether all agree. Only then does JAX start its own service at PORT + 1, because that service aborts a process that
waits too long, and needs seconds to notice that a process died. The connections stay open. When a process is killed,
the system closes its connections; the others notice at once, print one sentence and exit.

Each message is one line of JSON: a process's greeting, the verdict, then how a process ended: "done", "interrupted" or
"failed". If a connection closes without the last message, the process was killed.
"""

import atexit
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import NamedTuple

from tessera.core.interrupt import STATUS as INTERRUPTED

FAILED = 2
"""Exit code of a process that ends because another process failed or was killed."""
LEAVE_S = 10.0
"""Maximum seconds that a finished process waits for the others before it exits."""
GREETING_S = 5.0
"""Maximum seconds that process 0 waits for the greeting of a process that has connected."""
MAX_LINE_BYTES = 1 << 14
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Place(NamedTuple):
    """Where process 0 listens, how many processes there are, and this process's number, from 0 to count - 1."""

    host: str
    port: int
    count: int
    index: int


def place(coordinator: str, count: int, index: int) -> Place:
    """Return the `Place` that the flags --coordinator, --processes and --process describe."""
    found = re.fullmatch(r"\[?([^\s\[\]/]+?)\]?:(\d{1,5})", coordinator)
    if not found or not 1 <= int(found[2]) < 65535:
        raise ValueError(
            f"--coordinator {coordinator!r:.80} must be HOST:PORT, like 10.0.0.1:7000, with PORT below 65535"
        )
    if count < 2:
        raise ValueError(f"--processes {count} must be at least 2; drop --coordinator to run one process")
    if not 0 <= index < count:
        raise ValueError(f"--process {index} must be between 0 and {count - 1}, because there are {count} processes")
    return Place(found[1], int(found[2]), count, index)


class Lifeline:
    """Connections to the other processes: process 0 has one to each, every other process one to process 0."""

    def __init__(self, place: Place, peers: Mapping[int, socket.socket]):
        self._place, self._peers = place, dict(peers)
        self._done, self._gone, self._change = set[int](), set[int](), threading.Condition()
        self._status: int | None = None

    def watch(self) -> None:
        """Watch the connections from now on; end this process as soon as another one fails or is interrupted."""
        for index, peer in self._peers.items():
            threading.Thread(target=self._listen, args=(index, peer), daemon=True, name=f"process-{index}").start()

    def leave(self, status: int) -> None:
        """Tell the other processes how this one ended, and make Python skip JAX's shutdown when it exits.

        If the exit code `status` is 0, wait up to LEAVE_S seconds until the other processes are done, too. Process 0
        runs JAX's service and waits until they have exited, because JAX aborts a process that outlives the service.
        """
        self._status = status
        atexit.register(self._exit)  # runs before JAX's exit handler, which may wait for minutes
        self._tell({0: "done", INTERRUPTED: "interrupted"}.get(status, "failed"))
        deadline = time.monotonic() + (LEAVE_S if status == 0 else 0)
        ended = self._gone if self._place.index == 0 else self._done
        with self._change:
            while len(ended) < len(self._peers) and (left := deadline - time.monotonic()) > 0:
                self._change.wait(left)

    def settle(self) -> None:
        """Sleep 2 s after a failed collective. If a process that ended caused the failure, `watch` ends this one."""
        time.sleep(2)

    def _tell(self, how: str, index: int | None = None) -> None:
        line = json.dumps({"ended": self._place.index if index is None else index, "how": how}).encode() + b"\n"
        for peer in self._peers.values():
            with suppress(OSError):
                peer.sendall(line)

    def _listen(self, index: int, peer: socket.socket) -> None:
        with suppress(OSError), peer.makefile("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                news = json.loads(line)
                if news["how"] != "done":
                    self._end(news["ended"], news["how"])
                self._note(self._done, index)
        if index not in self._done:
            self._end(index, "killed")
        self._note(self._gone, index)

    def _note(self, where: set[int], index: int) -> None:
        with self._change:
            where.add(index)
            self._change.notify_all()

    def _end(self, index: int, how: str) -> None:
        """End this process because process `index` ended; process 0 first tells the other processes."""
        if self._status is not None:  # this process is ending already
            return
        if self._place.index == 0:
            self._tell(how, index)
        words = {"interrupted": "was interrupted", "failed": "failed", "killed": "was killed or lost its connection"}
        os.write(2, f"process {self._place.index} ends, because process {index} {words[how]}\n".encode())
        os._exit(INTERRUPTED if how == "interrupted" else FAILED)

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)


def join(place: Place, facts: Mapping[str, str], wait_s: float) -> Lifeline:
    """Connect to the other processes, waiting for them up to `wait_s` seconds, and start JAX across all of them.

    `facts` holds digests, by name, of everything that must be the same in all processes.
    """
    deadline = time.monotonic() + wait_s
    peers = _gather(place, facts, deadline, wait_s) if place.index == 0 else _greet(place, facts, deadline, wait_s)
    lifeline = Lifeline(place, peers)
    lifeline.watch()
    with ExitStack() as stack:
        stack.callback(lifeline.leave, FAILED)  # after an error: the others wait for this process in JAX's start
        start_jax(place)
        stack.pop_all()
    return lifeline


def start_jax(place: Place) -> None:
    """Start JAX's own service, so that jax.devices() lists the devices of all processes."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # that service would catch SIGTERM
    host = f"[{place.host}]" if ":" in place.host else place.host
    address = f"{host}:{place.port + 1}"
    bind = {"coordinator_bind_address": address} if place.host in LOOPBACK else {}
    jax.distributed.initialize(address, place.count, place.index, cluster_detection_method="deactivate", **bind)


def _gather(place: Place, facts: Mapping[str, str], deadline: float, wait_s: float) -> dict[int, socket.socket]:
    """In process 0: wait for every other process, compare its facts with ours, and send all of them the verdict."""
    peers: dict[int, socket.socket] = {}
    errors = []
    _listener(place._replace(port=place.port + 1)).close()  # fail now if JAX's port is taken; JAX would report it late
    with _listener(place) as listener:
        while len(peers) < place.count - 1:
            if (peer := _accept(listener, deadline)) is None:
                missing = ", ".join(str(i) for i in range(1, place.count) if i not in peers)
                errors.append(
                    f"process(es) {missing} of {place.count} did not connect within {wait_s:g} s: start every process"
                )
                break
            greeting = _receive(peer, min(deadline, time.monotonic() + GREETING_S))
            if not _is_greeting(greeting):
                peer.close()
                continue
            index = greeting["process"]
            errors += _differences(place, facts, greeting, peers)
            peers[index if index not in peers else -len(peers)] = peer
            if errors:
                break
    verdict = json.dumps({"error": errors[0] if errors else None}).encode() + b"\n"
    for peer in peers.values():
        peer.settimeout(None)
        with suppress(OSError):
            peer.sendall(verdict)
    if errors:
        for peer in peers.values():
            peer.close()
        raise ValueError(errors[0])
    return peers


def _greet(place: Place, facts: Mapping[str, str], deadline: float, wait_s: float) -> dict[int, socket.socket]:
    """In every other process: connect to process 0, send this process's facts, and wait for the verdict."""
    greeting = {"tessera": 1, "process": place.index, "processes": place.count, "facts": dict(facts)}
    where = f"{place.host}:{place.port}"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ValueError(
                f"process 0 did not answer at --coordinator {where} within {wait_s:g} s: start process 0 there, with "
                f"the same --coordinator, or correct the address"
            )
        try:
            peer = socket.create_connection((place.host, place.port), timeout=min(left, 5))
            break
        except socket.gaierror as error:
            raise ValueError(
                f"--coordinator {where} has an unknown host ({error.strerror}): correct the address"
            ) from error
        except OSError:  # process 0 is not there yet
            time.sleep(0.1)
    with suppress(OSError):
        peer.sendall(json.dumps(greeting).encode() + b"\n")
    verdict = _receive(peer, deadline + GREETING_S)  # process 0 waits for the others until the deadline
    if verdict is None or not isinstance(verdict.get("error", ...), str | None):
        peer.close()
        raise ValueError(
            f"the program at --coordinator {where} is not process 0 of a tessera command: correct the address"
        )
    if verdict["error"]:
        peer.close()
        raise ValueError(verdict["error"])
    peer.settimeout(None)
    return {0: peer}


def _differences(place: Place, facts: Mapping[str, str], greeting: Mapping, peers: Mapping[int, object]) -> list[str]:
    index, count = greeting["process"], greeting["processes"]
    if count != place.count:
        return [
            f"process {index} has --processes {count}, but process 0 has {place.count}: "
            "give every process the same number"
        ]
    if not 0 < index < place.count or index in peers:
        return [f"two processes were given --process {index}: number them 0 to {place.count - 1}"]
    other = greeting["facts"]
    return [
        f"process {index} has a different {name} from process 0: give all processes the same {name}"
        for name, value in facts.items()
        if other.get(name) != value
    ]


def _accept(listener: socket.socket, deadline: float) -> socket.socket | None:
    if (left := deadline - time.monotonic()) <= 0:
        return None
    listener.settimeout(left)
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None


def _receive(peer: socket.socket, deadline: float) -> dict | None:
    """Receive one line with a JSON object; None if the peer sends anything else, or nothing before the deadline.

    If the peer closes the connection without sending anything, return an error that says that process 0 ended.
    """
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
            if (left := deadline - time.monotonic()) <= 0:
                return None
            peer.settimeout(left)
            if not (byte := peer.recv(1)):  # one by one, because the next line is for the lifeline
                break
            line += byte
        found = json.loads(line or b'{"error": "process 0 ended"}')
    except (OSError, ValueError, RecursionError):  # RecursionError: deep nesting
        return None
    return found if isinstance(found, dict) else None


def _is_greeting(found: Mapping | None) -> bool:
    if found is None or found.get("tessera") != 1 or not isinstance(found.get("facts"), dict):
        return False
    return all(type(found.get(name)) is int for name in ("process", "processes"))


def _listener(place: Place) -> socket.socket:
    """Open a listening socket: at `place.host` if that is a loopback address, else at every address of this host."""
    host = place.host if place.host in LOOPBACK else ""
    family = socket.AF_INET6 if place.host == "::1" else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, place.port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"process 0 cannot listen at {place.host}:{place.port} ({error.strerror}): choose a --coordinator "
            "port such that it and the next port are free"
        ) from error
    listener.listen(place.count)
    return listener
