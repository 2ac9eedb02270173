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
TENTHS = tuple(tenth / 10 for tenth in range(1, 11))
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self):
        self.registry = CollectorRegistry()
        gauge, counter, histogram = (partial(kind, registry=self.registry) for kind in (Gauge, Counter, Histogram))
        seconds = partial(histogram, buckets=SECONDS)
        self._gave_way = 0
        self._running = gauge("vllm:num_requests_running", "Running requests.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests waiting to run.")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of complete requests.")
        self._cached = counter("vllm:prefix_cache_hits", "Prompt tokens with cached keys.")
        self._new = counter("vllm:generation_tokens", "Tokens generated.")
        self._ended = counter("vllm:request_success", "Complete requests.", ["finished_reason"])
        self._failed = counter("tessera:requests_failed", "Requests that failed.")
        self.cancelled = counter("tessera:requests_cancelled", "Cancelled requests.")
        self.restarts = counter("tessera:engine_restarts", "Engines replaced after an error.")
        self.compiles = counter("tessera:recompiles", "Programs compiled after the warm-up.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of the pages that requests use.")
        self._kept = gauge("tessera:kv_cache_cached_perc", "Share of the pages that only the cache uses.")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens of complete requests.")
        self._preempted = counter("vllm:num_preemptions", "Requests that gave their pages to others.")
        self._costs = gauge("tessera:step_cost_seconds", "Coefficients of a step's predicted seconds.", ["of"])
        self._limit = gauge("tessera:step_limit_seconds", "Maximum predicted seconds of a step that decodes.")
        self._density = histogram("tessera:keys_read_ratio", "Keys that a request read / visible keys.", buckets=TENTHS)
        self._first = seconds("vllm:time_to_first_token_seconds", "Seconds to the first token.")
        self._next = seconds("vllm:inter_token_latency_seconds", "Seconds from one token to the next.")
        self._whole = seconds("vllm:e2e_request_latency_seconds", "Seconds from request to last token.")

    def gauge(self, *, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def pool(self, state: PoolState) -> None:
        """Set how full the pool of pages is, and count the requests that lost their pages since the last call."""
        self._usage.set(state.usage)
        self._kept.set(state.cached)
        self._preempted.inc(max(0, state.preempted - self._gave_way))  # a new engine counts from 0
        self._gave_way = state.preempted

    def scheduler(self, find: Callable[[], Scheduler | None]) -> None:
        """Report the scheduler's step costs and step limit, at the present pace; 0 while `find` returns None."""

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

    def text(self) -> bytes:
        return generate_latest(self.registry)
