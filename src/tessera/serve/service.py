"""The thread that owns the engine: it takes requests from HTTP handlers and passes the engine's events to callbacks.

An engine is not thread-safe and its steps block, so only this thread touches it. If a step fails with an error from the
device, all open requests fail. The thread then continues with a new engine, because the failed step may have donated
the old engine's cache. Any other error is a bug: it ends the thread and the server.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from tessera.runtime.engine import Engine
from tessera.runtime.requests import End, Event, Failure, Request
from tessera.serve.api.schema import Refusal
from tessera.serve.metrics import Metrics

logger = logging.getLogger(__name__)

COMPILED = "/jax/core/compile/backend_compile_duration"
"""Name of the event that JAX records for each compilation."""
STOP_S = 10.0
"""Maximum seconds for which `Service.stop` waits for the current step to end."""
RETRY_S = 1
"""Seconds after which a client may try again when the queue is full."""


@dataclass(eq=False)
class Job:
    """One request inside the service.

    Attributes:
        deliver: called on the service's thread with each event, and must return at once; the last is an End or Failure.
        id: the engine's number for the request; None until the engine has the request.
        queued_s, last_s: times of its arrival and of its newest token, by time.perf_counter.
    """

    request: Request
    deliver: Callable[[Event], None]
    queued_s: float
    id: int | None = None
    last_s: float | None = None
    cancelled: bool = False


class Service:
    """An engine and the thread that runs it.

    Attributes:
        room: maximum number of open requests (waiting or running).
        ended: whether `stop` has ended the thread; False if a bug has ended it.
        error: the error that ended the warm-up.

    Args:
        queue: maximum number of requests that wait for a row of the engine's batch.
        shared: whether there are several tenants. If so, `submit` refuses a request after which the tenant would have
            more open requests than the service has places left, so that no tenant locks out the others.
    """

    def __init__(self, build: Callable[[], Engine], *, queue: int, metrics: Metrics, shared: bool = False):
        self._build, self._engine, self.metrics = build, build(), metrics
        metrics.scheduler(lambda: self._engine.scheduler)
        least = 2 if shared else 1  # places: otherwise the one that is kept for the others would be the only one
        self.room, self.shared = max((self._engine.slots or 1) + queue, least), shared
        self.error: Exception | None = None
        self._changed = threading.Condition()
        self._new: list[Job] = []
        self._cancelled: list[Job] = []
        self._jobs: dict[int, Job] = {}
        self._stop = self.draining = self.ready = self.ended = self._saving = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, warm: Callable[[Engine], None], prepare: Callable[[Engine], None] = lambda engine: None) -> None:
        """Start the thread, which calls `warm` and then `prepare` on the engine, and sets `ready`.

        For an engine that replaces a failed one, the thread calls only `prepare`.
        """
        self._warm, self._prepare = warm, prepare
        self._thread.start()

    @property
    def open(self) -> int:
        return len(self._new) + len(self._jobs)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, *requests: tuple[Request, Callable[[Event], None]]) -> list[Job]:
        """Queue each request with its callback for events, or raise Refusal and queue none."""
        with self._changed:
            if self.draining or not self.alive:
                raise Refusal(503, "the server is shutting down: try again later", retry_s=30)
            if not self.ready:
                raise Refusal(503, "the server is warming up: try again in a few seconds", retry_s=5)
            most = self.room // 2 if self.shared else self.room
            if len(requests) > most:
                raise Refusal(
                    400,
                    f"{len(requests)} answers are more than the {most} that one request may have here: send fewer "
                    "prompts or a smaller n, or start the server with a larger --queue or --slots",
                )
            kept = 0  # places for other tenants
            if self.shared:
                own = (job.request.tenant == requests[0][0].tenant for job in (*self._new, *list(self._jobs.values())))
                kept = len(requests) + sum(own)
            if self.open + len(requests) + kept > self.room:
                room = " and the rest is kept for other API keys" if self.shared else ""
                raise Refusal(
                    429, f"{self.open} of at most {self.room} requests are open{room}: try again later", retry_s=RETRY_S
                )
            now_s = time.perf_counter()
            jobs = [Job(request, deliver, now_s) for request, deliver in requests]
            self._new += jobs
            self._changed.notify()
        return jobs

    def policies_of(self, request: Request, new_tokens: int) -> set[str]:
        """Return the names of the policies that chose the first and the last of an answer's `new_tokens` tokens."""
        return {policy.name for policy in self._engine.policies_of(len(request.prompt), new_tokens)}

    def cancel(self, job: Job) -> None:
        """Drop a request and deliver no more of its events; do nothing if the request has ended."""
        with self._changed:
            job.cancelled = True
            self._cancelled.append(job)
            self._changed.notify()

    def drain(self) -> None:
        with self._changed:
            self.draining = True

    def stop(self) -> None:
        """End the thread after its current step, and fail the open requests.

        Wait at most `STOP_S` seconds for the thread, and not at all during the warm-up; but once the thread writes the
        prefix cache to disk, wait until it has.
        """
        with self._changed:
            self.draining = self._stop = True
            self._changed.notify()
        self._thread.join(STOP_S if self.ready else 0)
        while self._saving and self.alive:
            self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._warm(self._engine)
            self._prepare(self._engine)
        except (ValueError, MemoryError, OSError) as error:
            self.error = error
            return
        self.ready = True
        jax.monitoring.register_event_duration_secs_listener(self._count_compile)
        try:
            self._serve()
            self.ended = True
        finally:
            jax.monitoring.unregister_event_duration_listener(self._count_compile)
            self._fail_all(Refusal(503, "the server stopped before the answer was complete: try again later"))
        self._saving = True
        self._engine.close()

    def _count_compile(self, name: str, seconds: float, **_: object) -> None:
        if name == COMPILED and threading.current_thread() is self._thread:
            self.metrics.compiles.inc()

    def _serve(self) -> None:
        while self._wait():
            try:
                self._take_new()
                events = self._engine.step() if self._engine.busy else []
            except (RuntimeError, ValueError, MemoryError, OSError) as error:  # from the device
                self._recover(error)
                continue
            for event in events:
                self._deliver(event)
            waiting = self._engine.num_waiting
            self.metrics.gauge(running=len(self._jobs) - waiting, waiting=waiting + len(self._new))
            if (state := self._engine.pool_state) is not None:
                self.metrics.pool(state)

    def _wait(self) -> bool:
        """Wait until there is work, and return True; return False if the service is to stop."""
        with self._changed:
            while not (self._stop or self._new or self._cancelled or self._engine.busy):
                self._changed.wait()
            return not self._stop

    def _take_new(self) -> None:
        with self._changed:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
        for job in new:
            if job.cancelled:
                self.metrics.cancelled.inc()
                continue
            try:
                job.id = self._engine.submit(job.request, started_s=job.queued_s)
            except ValueError as error:
                self._fail(job, error)
                continue
            self._jobs[job.id] = job
        for job in cancelled:
            if job.id is not None and self._jobs.pop(job.id, None) is not None:
                self._engine.cancel(job.id)
                self.metrics.cancelled.inc()

    def _deliver(self, event: Event) -> None:
        job = self._jobs.get(event.id)
        if job is None:
            return
        now_s = time.perf_counter()
        if isinstance(event, End | Failure):
            del self._jobs[event.id]
            self.metrics.ended(event, now_s - job.queued_s)
        else:
            self.metrics.token(first=job.last_s is None, seconds=now_s - (job.last_s or job.queued_s))
            job.last_s = now_s
        if not job.cancelled:
            job.deliver(event)

    def _recover(self, error: Exception) -> None:
        logger.exception("a step failed: all open requests fail, and a new engine serves later requests")
        self._fail_all(error)
        self.metrics.restarts.inc()
        self._engine = self._build()
        self._prepare(self._engine)

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            jobs, self._jobs, self._new = [*self._jobs.values(), *self._new], {}, []
        for job in jobs:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        failure = Failure(-1, error)
        self.metrics.ended(failure, time.perf_counter() - job.queued_s)
        if not job.cancelled:
            job.deliver(failure)
