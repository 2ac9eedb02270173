"""Keep N replicas running: start them, watch their health, replace lost ones, restart them one after another.

A replica is a whole server, as `tessera serve` runs it, in another process, perhaps on another machine. A `Launcher`
starts and ends these processes; `cluster.Cluster` is the launcher that uses Ray. One task per replica runs this cycle:

    start -> warm (/ready) -> watched (/health each second) -> lost or retired -> stop -> start
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Protocol

import httpx2

from tessera.serve.server import DRAIN_S, HEADER_S

logger = logging.getLogger(__name__)

HEALTH_S = 1.0
"""Seconds between two health checks of a replica."""
ANSWER_S = 10.0
"""Maximum seconds of a health check. This is generous, because all cores of the replica's machine may be busy."""
MISSES = 3
"""Number of failed health checks in a row after which a replica is lost. It is lost at once if the connection fails or
the answer has status 500."""
PAUSES_S = (1.0, 60.0)
"""Minimum and maximum seconds until a lost replica is restarted; each failure doubles the pause."""


class Launcher(Protocol):
    """Starts and ends the processes of replicas.

    Attributes:
        keys: API keys of clients; empty if requests need no key. Replicas accept these keys too, one per tenant.
        key: API key that the front sends to replicas.
    """

    keys: tuple[str, ...]
    key: str

    async def start(self, index: int) -> str:
        """Start replica `index`, load its model and return its server's URL.

        Raises:
            Lost: the process ended before its server was running.
            ValueError, MemoryError, OSError: the model cannot be served.
        """

    async def stop(self, index: int) -> None:
        """End the process of replica `index` at once, if it has one."""

    def close(self) -> None:
        """End all processes at once; any thread may call this."""


class Lost(Exception):
    """A replica has ended or does not answer."""


class Replica:
    """A replica, which outlives its process: a new process replaces one that is lost or retired.

    Attributes:
        index: number of the replica, from 0.
        url: address of its server.
        ready: whether it takes requests.
        open: number of requests that it has not answered.
        starts: number of times that the replica has become ready.
        retire: event that asks for a restart once the open requests have ended.
    """

    def __init__(self, index: int):
        self.index, self.url, self.ready, self.open, self.starts = index, "", False, 0, 0
        self.retire = asyncio.Event()
        self._limits: set[asyncio.Timeout] = set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as open."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the block when the replica is lost.

        This is necessary because a machine that loses power does not close its connections.
        """
        async with asyncio.timeout(None) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def lose(self) -> None:
        """Accept no more requests, and abort the open ones."""
        self.ready = False
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)


class Replicas:
    """N replicas behind one front: the `server.Work` of the front's server.

    Args:
        launcher: starts and ends the replicas' processes.
        count: number of replicas.

    Attributes:
        all: the replicas.
        open: number of requests without a complete answer, whether or not a replica has them.
        retried: number of requests that were sent to another replica because the first was lost.
        lost: number of times that a replica crashed or stopped answering.
    """

    def __init__(self, launcher: Launcher, count: int):
        self.launcher, self.all = launcher, [Replica(index) for index in range(count)]
        self.open = self.retried = self.lost = 0
        self.draining = False
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=HEADER_S / 2)
        self.client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {launcher.key}"},
            timeout=httpx2.Timeout(None, connect=ANSWER_S),
            limits=limits,
            trust_env=False,  # a proxy for the internet cannot reach the cluster
        )
        self._tasks: list[asyncio.Task] = []
        self._rolling: asyncio.Task | None = None

    @property
    def alive(self) -> bool:
        """Whether every replica is kept running; False once a replica's first start has failed."""
        return not any(task.done() and not task.cancelled() and task.exception() for task in self._tasks)

    @property
    def ready(self) -> list[Replica]:
        """Replicas that accept requests."""
        return [replica for replica in self.all if replica.ready]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as open."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def begin(self) -> None:
        """Start the replicas, in the running event loop."""
        self._tasks = [asyncio.create_task(self._keep(replica)) for replica in self.all]

    async def end(self) -> None:
        """Stop watching the replicas; if a replica's first start failed, raise that error."""
        for task in self._tasks:
            task.cancel()
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.aclose()
        for error in found:
            if isinstance(error, Exception):
                raise error

    def drain(self) -> None:
        """Refuse new requests; open ones continue."""
        self.draining = True

    def stop(self) -> None:
        """End all processes at once; open requests end with an error."""
        self.draining = True
        self.launcher.close()

    def roll(self) -> None:
        """Restart the replicas one after another, each after its open requests have ended.

        Do nothing if an earlier `roll` is still under way.
        """
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.create_task(self._roll())

    async def _roll(self) -> None:
        for replica in self.all:
            before = replica.starts
            replica.retire.set()
            while replica.starts == before:  # if it does not start again, the later ones keep running
                await asyncio.sleep(HEALTH_S / 10)
        logger.info("all %d replicas have been restarted", len(self.all))

    async def _keep(self, replica: Replica) -> None:
        """Run one replica's cycle until the task is cancelled or the server stops.

        If the first start fails, raise its error.
        """
        pause = PAUSES_S[0]
        while True:
            replica.retire.clear()
            try:
                replica.url = await self.launcher.start(replica.index)
                await self._warmed(replica)
                replica.ready, replica.starts, pause = True, replica.starts + 1, PAUSES_S[0]
                logger.info("ready: replica %d of %d at %s", replica.index, len(self.all), replica.url)
                await self._retired(replica)
                retired = True
            except (Lost, ValueError, MemoryError, OSError, RuntimeError) as error:
                if self.draining:
                    replica.lose()
                    return
                if not replica.starts and not isinstance(error, Lost):
                    raise
                self.lost, retired = self.lost + 1, False
                logger.warning("replica %d is lost (%s): starting another", replica.index, error)
            replica.lose()
            await self.launcher.stop(replica.index)
            if not retired:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES_S[1])

    async def _warmed(self, replica: Replica) -> None:
        while await self._status(replica, "/ready") != 200:
            if await self._status(replica, "/health") == 500:
                raise Lost("its engine has ended")
            await asyncio.sleep(HEALTH_S / 5)

    async def _retired(self, replica: Replica) -> None:
        """Watch a replica until it is asked to retire; then wait for its open requests, at most `DRAIN_S` seconds.

        Raises:
            Lost: the replica ended or stopped answering before it was asked to retire.
        """
        misses = 0
        while not replica.retire.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.retire.wait(), HEALTH_S)
            status = await self._status(replica, "/health")
            misses = 0 if status == 200 else misses + 1
            if misses == MISSES or status == 500:
                raise Lost(
                    f"no answer to {MISSES} health checks" if status is None else f"its /health answers {status}"
                )
        replica.ready = False
        deadline = time.monotonic() + DRAIN_S
        while replica.open and time.monotonic() < deadline:
            await asyncio.sleep(HEALTH_S / 20)

    async def _status(self, replica: Replica, path: str) -> int | None:
        """GET a path and return the answer's status, or None after a timeout; raise Lost if the connection fails."""
        try:
            return (await self.client.get(replica.url + path, timeout=ANSWER_S)).status_code
        except httpx2.TimeoutException:
            return None
        except httpx2.TransportError as error:
            raise Lost(str(error) or type(error).__name__) from error
