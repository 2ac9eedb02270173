"""Prometheus metrics. A metric that vLLM also has keeps the name that vLLM gives it."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tessera.runtime.costs import LinearCosts
from tessera.runtime.requests import End, Event, PoolState
from tessera.runtime.scheduler import Scheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
"""Upper bounds of the buckets of the latency histograms, in seconds."""


class Metrics:
    """Metrics of one engine's server."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self._gave_way = 0
        with_registry = {"registry": self.registry}
        self._running = Gauge("vllm:num_requests_running", "Running requests.", **with_registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests waiting to run.", **with_registry)
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens of complete requests.", **with_registry)
        self._cached = Counter("vllm:prefix_cache_hits", "Prompt tokens with cached keys.", **with_registry)
        self._new = Counter("vllm:generation_tokens", "Tokens generated.", **with_registry)
        self._ended = Counter("vllm:request_success", "Complete requests.", ["finished_reason"], **with_registry)
        self._failed = Counter("tessera:requests_failed", "Requests that failed.", **with_registry)
        self._cancelled = Counter("tessera:requests_cancelled", "Cancelled requests.", **with_registry)
        self._restarts = Counter("tessera:engine_restarts", "Engines replaced after an error.", **with_registry)
        self._compiles = Counter("tessera:recompiles", "Programs compiled after the warm-up.", **with_registry)
        self._usage = Gauge("vllm:kv_cache_usage_perc", "Share of the pages that requests use.", **with_registry)
        self._kept = Gauge(
            "tessera:kv_cache_cached_perc", "Share of the pages that only the cache uses.", **with_registry
        )
        self._queries = Counter("vllm:prefix_cache_queries", "Prompt tokens of complete requests.", **with_registry)
        self._preempted = Counter("vllm:num_preemptions", "Requests that gave their pages to others.", **with_registry)
        self._costs = Gauge(
            "tessera:step_cost_seconds", "Coefficients of a step's predicted seconds.", ["of"], **with_registry
        )
        self._limit = Gauge(
            "tessera:step_limit_seconds", "Maximum predicted seconds of a step that decodes.", **with_registry
        )
        self._density = Histogram(
            "tessera:keys_read_ratio", "Keys that a request read / visible keys.", buckets=_tenths(), **with_registry
        )
        self._first = _seconds("vllm:time_to_first_token_seconds", "Seconds to the first token.", self.registry)
        self._next = _seconds("vllm:inter_token_latency_seconds", "Seconds from one token to the next.", self.registry)
        self._whole = _seconds("vllm:e2e_request_latency_seconds", "Seconds from request to last token.", self.registry)

    def gauge(self, *, running: int, waiting: int) -> None:
        """Set the numbers of running and of waiting requests."""
        self._running.set(running)
        self._waiting.set(waiting)

    def pool(self, state: PoolState) -> None:
        """Set how full the pool of pages is, and count the requests that lost their pages since the last call."""
        self._usage.set(state.usage)
        self._kept.set(state.cached)
        self._preempted.inc(max(0, state.preempted - self._gave_way))  # a new engine counts from 0
        self._gave_way = state.preempted

    def scheduler(self, find: Callable[[], Scheduler | None]) -> None:
        """Report the scheduler's step costs and step limit, at the present pace (`Scheduler.pace`).

        `find` is called whenever the metrics are read. It returns the scheduler; if it returns None, the metrics are 0.
        """

        def value(name: str) -> float:
            found = find()
            return 0.0 if found is None else found.pace * getattr(found.costs, name)

        for each in fields(LinearCosts):
            self._costs.labels(each.name).set_function(partial(value, each.name))
        self._limit.set_function(lambda: 0.0 if (found := find()) is None else found.pace * found.step_s)

    def token(self, *, first: bool, seconds: float) -> None:
        """Count one new token, which came `seconds` after the request if `first`, else after the token before it."""
        self._new.inc()
        (self._first if first else self._next).observe(seconds)

    def ended(self, event: Event, seconds: float) -> None:
        """Count a request that is complete or has failed, `seconds` after it was queued."""
        if not isinstance(event, End):
            self._failed.inc()
            return
        self._ended.labels(event.generation.finish_reason).inc()
        self._prompt.inc(event.generation.prompt_tokens)
        self._queries.inc(event.generation.prompt_tokens)
        self._cached.inc(event.reused_tokens)
        self._density.observe(event.generation.density)
        self._whole.observe(seconds)

    def cancelled(self) -> None:
        """Count a cancelled request: its client disconnected, or another choice of the same response failed."""
        self._cancelled.inc()

    def restarted(self) -> None:
        """Count an engine that was replaced after an error."""
        self._restarts.inc()

    def compiled(self) -> None:
        """Count a program that was compiled after the warm-up."""
        self._compiles.inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _seconds(name: str, about: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, about, buckets=SECONDS, registry=registry)


def _tenths() -> tuple[float, ...]:
    return tuple(tenth / 10 for tenth in range(1, 11))
