"""Measure reliably: interleaved samples, and medians with intervals.

A contender is a function that does the work once and returns the seconds that it took. Its clock stops after
`block_until_ready`; the clock of another library (a peer) runs in the peer's process. Contenders take turns in rounds.
Each round reverses the order of the previous one, so that a machine whose speed drifts slows all contenders equally.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tessera.core import hardware, interrupt

DRAWS, TAILS = 2000, (0.025, 0.975)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Peak rates that simple programs reach on this device: a large matrix product per dtype, and a memory read."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: float

    def floor_s(self, dtype: str, flops: float, num_bytes: float) -> float:
        """Return the smallest credible time in seconds: max(flops / measured peak, bytes / measured bandwidth)."""
        return max(flops / self.flops_per_s[dtype], num_bytes / self.bytes_per_s)


def time_call(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Wait for the inputs, then time one call until its result is ready; return (seconds, result)."""
    jax.block_until_ready(args)
    start = time.perf_counter()
    out = jax.block_until_ready(function(*args))
    return time.perf_counter() - start, out


def interleave(
    contenders: Mapping[str, Callable[[int], float]],
    *,
    rounds: int,
    warmup: int = 1,
    rest_s: float = 0.0,
    until: float = math.inf,
    least: int = 1,
) -> dict[str, list[float]]:
    """Sample each contender once per round; all contenders' samples at one index come from the same round.

    Args:
        contenders: name -> function that takes the round number, which can seed fresh inputs, and returns seconds.
            Warm-up rounds have negative numbers.
        rounds: samples per contender, if time allows.
        warmup: calls per contender before the first sample; compilation happens there.
        rest_s: seconds to pause before each sample, so that the previous contender's worker threads stop spinning.
        until: deadline on the clock of `time.monotonic`. A round does not start if, at the mean duration of the earlier
            rounds (pauses included), it would end past the deadline.
        least: number of rounds that run even past the deadline; values below 1 count as 1.
    """
    if rounds < 1:
        raise ValueError(f"{rounds=} must be at least 1")
    for number in range(-warmup, 0):
        for sample in contenders.values():
            sample(number)
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.monotonic()
    for number in range(rounds):
        now = time.monotonic()
        if number >= max(1, least) and now + (now - start) / number > until:
            break
        names = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in names:
            interrupt.check()
            time.sleep(rest_s)
            taken[name].append(contenders[name](number))
    return taken


def ratio(baseline: Sequence[float], ours: Sequence[float]) -> float:
    """Return median(baseline) / median(ours); above 1, ours takes less time."""
    return statistics.median(baseline) / statistics.median(ours)


def ratio_interval(baseline: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of `ratio`; rounds are redrawn, both sides of a round together."""
    if len(baseline) != len(ours):
        raise ValueError(f"{len(baseline)=} must equal {len(ours)=}: samples are paired by round")
    pick = np.random.default_rng(0).integers(0, len(ours), (DRAWS, len(ours)))
    ratios = np.median(np.asarray(baseline)[pick], axis=1) / np.median(np.asarray(ours)[pick], axis=1)
    low, high = np.quantile(ratios, TAILS)
    return float(low), float(high)


def ceilings(*, size: int = 2048, read_bytes: int = 1 << 28, rounds: int = 5) -> Ceilings:
    """Measure the ceilings, best of `rounds` runs: a [size,size] matrix product per dtype, and two memory programs.

    The memory programs are a matrix of `read_bytes` times a vector, and x + 1; the one with the higher bandwidth
    counts. On a CPU, x + 1 alone would understate the bandwidth of reads, since half of its traffic is writes. The
    data sheet of a known chip caps the ceilings.
    """
    rates = {}
    product = jax.jit(jnp.matmul)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.ones((size, size), dtype)
        rates[jnp.dtype(dtype).name] = 2.0 * size**3 / _least_s(product, x, x, rounds=rounds)
    matrix = jnp.zeros((read_bytes // 4 // size, size), jnp.float32)
    best = 0.0
    for program, moved in ((jax.jit(lambda x: x @ x[0]), 1.0), (jax.jit(lambda x: x + 1), 2.0)):
        best = max(best, moved * read_bytes / _least_s(program, matrix, rounds=rounds))
    return capped(Ceilings(flops_per_s=rates, bytes_per_s=best), hardware.chip(jax.devices()[0].device_kind))


def capped(found: Ceilings, chip: hardware.Chip | None) -> Ceilings:
    """Cap the ceilings at one device's share of its chip's nominal peaks, if the chip is known. The bfloat16 peak caps
    every dtype, since no other dtype that is measured here has a higher peak."""
    if chip is None:
        return found
    most = chip.bf16_flops_per_s / chip.devices
    rates = {name: min(rate, most) for name, rate in found.flops_per_s.items()}
    return Ceilings(flops_per_s=rates, bytes_per_s=min(found.bytes_per_s, chip.bytes_per_s / chip.devices))


def _least_s(program: Callable[..., jax.Array], *args: jax.Array, rounds: int) -> float:
    """Return the shortest time in seconds, over `rounds` calls, until one element of the result is on the host.

    The ceilings must expose measured times that are too short to be real. `time_call` would hide a clock that stops too
    early; here it cannot, since no element reaches the host before the program ends.
    """
    last = jax.jit(lambda out: out.ravel()[-1])
    taken = []
    for _ in range(rounds + 1):  # the first compiles
        jax.block_until_ready(args)
        start = time.perf_counter()
        float(np.asarray(last(program(*args))))
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
