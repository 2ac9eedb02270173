"""Measure a call's device time with a cold L2 cache: CUPTI reports how long each kernel of the call runs."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lab.gpu.session import Session, on_gpu
from tessera.measure.errors import plain
from tessera.measure.evidence import What

PROBE = What(op="gpu clock", kernel="CUPTI", workload="a sum that is known to run")
ABSENT = (ImportError, AttributeError, TypeError, ValueError, RuntimeError)
"""Errors raised if CUPTI is absent, another tool uses it, or the process lacks permission."""


class Samples(NamedTuple):
    """Seconds of one contender per round: `device` adds up its kernels' durations, `host` is wall time."""

    device: list[float]
    host: list[float]


class Clock:
    """Clock that times calls with CUPTI, or with the host's clock if CUPTI is missing, forbidden or already in use."""

    def __init__(self, session: Session):
        self._flush_bytes = session.scale.flush_bytes
        self._dirty = jnp.zeros(session.scale.flush_bytes // 4, jnp.float32)
        self._write = jax.jit(lambda x: x + 1, donate_argnums=0)
        self._cupti = None
        self.method = "the host's clock, until the result is ready: dispatch and launches are included"
        if on_gpu() and not session.is_done(PROBE):  # the probe has a record only if it failed or hung
            with session.guard(PROBE):
                self._try_cupti()

    def _try_cupti(self) -> None:
        """Run a small kernel as a probe, and use CUPTI only if it reports a time for that kernel."""
        probe = waiting(lambda x: x + 1, jax.block_until_ready(jnp.ones(1 << 20)))
        probe()
        try:
            from jax._src.lib import mosaic_gpu

            self._cupti = mosaic_gpu._mosaic_gpu_ext
            self.sample(probe)
        except ABSENT as error:
            self._cupti = None
            self.method += f" (CUPTI: {plain(error, whole=True)})"
        else:
            self.method = "durations of the call's kernels by CUPTI, added up"

    def sample(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return (device, host) seconds of one call on a cold cache; the call must wait for its own result."""
        self._dirty = jax.block_until_ready(self._write(self._dirty))
        if self._cupti is None:
            seconds = self._host(call)
            return seconds, seconds
        self._cupti._cupti_init()
        try:
            host = self._host(call)
        finally:
            kernels = self._cupti._cupti_get_timings(False)
        if not kernels:
            raise RuntimeError("CUPTI saw no kernel in this call, so the call has no device time")
        return sum(milliseconds for _, milliseconds in kernels) / 1e3, host

    def _host(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    @property
    def cold(self) -> str:
        """State of the L2 cache before a sample, in the words that records use."""
        return f"L2 cold: {self._flush_bytes >> 20} MiB written before each sample"


def waiting(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return a function without arguments that calls a jax function and waits for the result."""
    return lambda: jax.block_until_ready(function(*args))


def interleave(
    clock: Clock,
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    guard: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> dict[str, Samples]:
    """Sample each contender once per round. Each round reverses the order of the previous round.

    `guard(name)` wraps each sample. A contender whose error the guard catches drops out; the others continue.
    """
    taken = {name: Samples([], []) for name in contenders}
    for number in range(rounds):
        for name in list(taken)[:: 1 if number % 2 == 0 else -1]:
            with guard(name):
                device, host = clock.sample(contenders[name])
                taken[name].device.append(device)
                taken[name].host.append(host)
        taken = {name: samples for name, samples in taken.items() if len(samples.device) > number}
    return taken
