"""Keep N replicas running: start them, watch their health, replace lost ones, restart them one after another.

A replica is a whole server, as `tessera serve` runs it, in another process, perhaps on another machine. A `Launcher`
starts and ends these processes; `cluster.Cluster` is the launcher that uses Ray. One task per replica runs this cycle:

    start -> warm (/ready) -> watched (/health each second) -> lost or retired -> stop -> start
"""

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Protocol

import httpx2
from prometheus_client.metrics_core import Metric

from tessera.serve.edge.server import DRAIN_S, HEADER_S
from tessera.serve.replicas.summed import Totals, counted, parsed

logger = logging.getLogger(__name__)

HEALTH_S = 1.0
ANSWER_S = 10.0
"""Maximum seconds of a health check. This is generous, because all cores of the replica's machine may be busy."""
METRICS_S = 5.0
"""Maximum seconds to fetch a replica's metrics. Prometheus waits 10 s for those of all replicas together."""
MISSES = 3
"""Number of failed health checks in a row after which a replica is lost. It is lost at once if the connection fails or
the answer has status 500."""
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of this machine, which has no descriptor, memory or port for a connection. The replica may be well."""
PAUSES_S = (1.0, 60.0)
"""Minimum and maximum seconds until a lost replica is restarted; each failure doubles the pause."""


class Launcher(Protocol):
    """Starts and ends the processes of replicas, which accept the clients' `keys` and the front's own `key`."""

    keys: tuple[str, ...]
    key: str

    async def start(self, index: int) -> str:
        """Start replica `index` and return its server's URL. Errors but Lost and Ended say why no model is served."""

    async def stop(self, index: int, *, lost: bool) -> None:
        """End the process of replica `index`, if it has one. If it is not `lost`, let it write its pages first."""

    def close(self) -> None:
        """End all processes; let them write their pages first. Open requests fail. Any thread may call this."""


class Lost(Exception):
    """A replica has ended or does not answer."""


class Ended(Exception):
    """The launcher cannot start processes any more. The server ends, for a supervisor to start it again."""


class Counting:
    open = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


class Replica(Counting):
    """A replica, which outlives its process: a new process replaces one that is lost or retired.

    Attributes:
        url: address of its server; "" while it has none.
        starts, retired: number of times that it has become ready, and that it has been stopped to restart it.
        rolls: number of calls of `Replicas.roll` before its process was started.
        misses: number of health checks in a row that failed.
        retiring: event that is set while the replica is to be restarted once the open requests have ended.
    """

    def __init__(self, index: int):
        self.index, self.url, self.ready = index, "", False
        self.starts = self.retired = self.rolls = self.misses = 0
        self.metrics: list[Metric] = []
        self.retiring = asyncio.Event()
        self._limits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the block when the replica is lost: a machine without power closes no connection."""
        async with asyncio.timeout(None) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def retire(self) -> None:
        """Accept no more requests, and restart once the open ones have ended."""
        self.ready = False
        self.retiring.set()

    def lose(self) -> None:
        """Accept no more requests, and abort the open ones."""
        self.ready = False
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)


class Replicas(Counting):
    """N replicas behind one front: the `server.Work` of the front's server."""

    def __init__(self, launcher: Launcher, count: int):
        self.launcher, self.all = launcher, [Replica(index) for index in range(count)]
        self.retried = self.lost = self.rolls = 0
        self.draining = False
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=HEADER_S / 2)
        self.client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {launcher.key}"},
            timeout=httpx2.Timeout(None, connect=ANSWER_S),
            limits=limits,
            trust_env=False,  # a proxy for the internet cannot reach the cluster
        )
        self._totals = Totals()
        self._tasks: list[asyncio.Task] = []
        self._rolling: asyncio.Task | None = None

    @property
    def alive(self) -> bool:
        """Whether every replica is kept running; False once a first start has failed or the launcher has ended."""
        return not any(task.done() and not task.cancelled() and task.exception() for task in self._tasks)

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.all if replica.ready]

    def begin(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(replica)) for replica in self.all]

    async def end(self) -> None:
        """Stop watching the replicas; if a first start has failed or the launcher has ended, raise that error."""
        for task in self._tasks:
            task.cancel()
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.aclose()
        for error in found:
            if isinstance(error, Exception):
                raise error

    def drain(self) -> None:
        self.draining = True

    def stop(self) -> None:
        self.draining = True
        self.launcher.close()

    def roll(self) -> None:
        """Restart all processes that run or start now, one after another, each after its open requests have ended."""
        self.rolls += 1
        if self._rolling is None or self._rolling.done():
            logger.info("restarting %d replicas one after another, each while all others are ready", len(self.all))
            self._rolling = asyncio.create_task(self._roll())

    async def _roll(self) -> None:
        while not self.draining:
            if await self._all_answer():
                # A process that was starting when `roll` was called may have read the old plan: it is replaced too.
                old = [replica for replica in self.all if replica.rolls < self.rolls]
                if not old:
                    logger.info("all %d replicas have been restarted", len(self.all))
                    return
                old[0].retire()  # if it does not start again, the later ones keep running
            await asyncio.sleep(HEALTH_S / 10)

    async def _all_answer(self) -> bool:
        """Return whether all replicas are ready. Check their health, because one may have been lost a moment ago."""
        if len(self.ready) < len(self.all):
            return False
        asked = (self._status(replica, "/health") for replica in self.all)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return len(self.ready) == len(self.all) and all(answer == 200 for answer in answers)

    async def metrics(self) -> bytes:
        """Return the merged metrics, in Prometheus' text format; of replicas that are not ready, only counters."""
        await asyncio.gather(*(self._measure(replica) for replica in self.ready))
        latest = [replica.metrics if replica.ready else counted(replica.metrics) for replica in self.all]
        return self._totals.text(latest, ready=len(self.ready), lost=self.lost, retried=self.retried)

    async def _measure(self, replica: Replica) -> None:
        """Fetch the metrics of a replica; if it does not answer, keep the last ones."""
        url = replica.url
        with suppress(httpx2.TransportError):
            answer = await self.client.get(f"{url}/metrics", timeout=METRICS_S)
            if answer.status_code == 200 and replica.url == url:  # else its process has ended, and has been counted
                replica.metrics = parsed(answer.text)

    def _forget(self, replica: Replica) -> None:
        """Abort the open requests of a replica's process, and keep only its counters."""
        replica.lose()
        self._totals.end(replica.metrics)
        replica.url, replica.metrics = "", []

    async def _keep(self, replica: Replica) -> None:
        """Run one replica's cycle. If the first start fails or the launcher has ended, raise that error."""
        pause = PAUSES_S[0]
        while True:
            replica.retiring.clear()
            replica.rolls, replica.misses = self.rolls, 0
            try:
                replica.url = await self.launcher.start(replica.index)
                await self._warmed(replica)
                replica.ready, replica.starts, replica.misses, pause = True, replica.starts + 1, 0, PAUSES_S[0]
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
            replica.retired += retired
            self._forget(replica)
            await self.launcher.stop(replica.index, lost=not retired)
            if not retired:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES_S[1])

    async def _warmed(self, replica: Replica) -> None:
        while await self._status(replica, "/ready") != 200:
            await self._check(replica)
            await asyncio.sleep(HEALTH_S / 5)

    async def _retired(self, replica: Replica) -> None:
        """Watch a replica until it is asked to retire; then wait for its open requests, at most `DRAIN_S` seconds."""
        while not replica.retiring.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.retiring.wait(), HEALTH_S)
            await self._check(replica)
        deadline = time.monotonic() + DRAIN_S
        while replica.open and time.monotonic() < deadline:
            await asyncio.sleep(HEALTH_S / 20)
        await self._measure(replica)

    async def _check(self, replica: Replica) -> None:
        """Ask for a replica's health; raise Lost if its engine has ended, or MISSES checks in a row have failed."""
        status = await self._status(replica, "/health")
        replica.misses = 0 if status == 200 else replica.misses + 1
        if status == 500 or replica.misses == MISSES:
            raise Lost(f"no answer to {MISSES} health checks" if status is None else f"its /health answers {status}")

    async def _status(self, replica: Replica, path: str) -> int | None:
        """GET a path and return the answer's status, or None after a timeout; raise Lost if the connection fails."""
        while True:
            try:
                return (await self.client.get(replica.url + path, timeout=ANSWER_S)).status_code
            except httpx2.TimeoutException:
                return None
            except httpx2.TransportError as error:
                if not full(error):
                    raise Lost(str(error) or type(error).__name__) from error
            await asyncio.sleep(HEALTH_S)


def full(error: BaseException | None) -> bool:
    """Return whether this machine could not open a connection (`FULL`), whatever the replica's health."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False
