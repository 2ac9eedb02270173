"""Find the positions from which prefill and decode under a policy are faster than dense on this device, by timing."""

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tessera.core.mesh import put
from tessera.runtime.row_pool import RowPool
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade

logger = logging.getLogger(__name__)

CROSSOVER_BUDGET_S = 240.0
"""Seconds for all timed runs, excluding compilation. A length is not timed if its runs would probably exceed the time
left. With a model of 135 M parameters, two slow cores get as far as 4,096 tokens."""

GROWTH = 3
"""Assumed factor by which a prefill's time grows when its length doubles: between 2 (matrix products) and 4
(attention)."""

REPEATS = 3
"""Timed prefills per policy and length."""

DECODE_REPEATS = 15
"""Timed decode steps per policy and position. A step takes milliseconds, and a busy machine disturbs some of them."""

TIMED_KEYS = 8192
"""Minimum cache capacity of a timed prefill, in keys; the model's context if that is shorter. Prefills of up to this
length share the capacity, so that their programs compile only once."""


def measure_crossovers(
    model: Any, policy: Kascade, report: Any, crossover: int | None, decode_crossover: int | None
) -> tuple[dict[str, int | None], dict[str, Any]]:
    """Return a plan's fields of both cross-overs, and the measured times by their names in `Plan.metrics`.

    A given number is not measured; a given `crossover` alone also holds for decode.
    """
    times: dict[str, Any] = {}
    if decode_crossover is None and crossover is None:
        decode_crossover, times["decode_crossover"] = measure_decode_crossover(model, policy, report)
    if crossover is None:
        crossover, times["crossover"] = measure_crossover(model, policy, report)
    return {"crossover_tokens": crossover, "decode_crossover": decode_crossover}, times


def measure_crossover(model: Any, policy: Kascade, report: Any) -> tuple[int, dict[str, Any]]:
    """Measure the length from which prefill under the policy is faster than dense; return (length, times).

    Compares medians of interleaved runs over doubling lengths, until the context ends or the next length would exceed
    the time budget. If Kascade is not faster at the longest length, returns the context plus one, so that every request
    runs dense.
    """
    context = model.config.max_positions
    lengths = sorted({min(1024 << i, context) for i in range(11)})
    times: dict[str, list[float]] = {"tokens": [], "dense_ms": [], "kascade_ms": []}
    left_ms = 1e3 * CROSSOVER_BUDGET_S
    for length in report.each("cross-over", lengths):
        if times["tokens"] and GROWTH * REPEATS * (times["dense_ms"][-1] + times["kascade_ms"][-1]) > left_ms:
            break
        dense_ms, kascade_ms = time_prefill(model, (Dense(), policy), length)
        left_ms -= REPEATS * (dense_ms + kascade_ms)
        for name, value in (
            ("tokens", length),
            ("dense_ms", float(f"{dense_ms:.4g}")),
            ("kascade_ms", float(f"{kascade_ms:.4g}")),
        ):
            times[name].append(value)
    found = find_crossover(times["tokens"], times["dense_ms"], times["kascade_ms"])
    if found is None:
        logger.warning(
            "Kascade was not faster than dense up to %d tokens on this device: the plan runs every request dense; "
            "pass crossover=0 (--crossover 0) to run Kascade anyway",
            times["tokens"][-1],
        )
    return found or context + 1, times


def measure_decode_crossover(model: Any, policy: Kascade, report: Any) -> tuple[int, dict[str, Any]]:
    """Measure the position from which a decode step under the policy is faster than dense; return (position, times).

    As `measure_crossover`, but with the time of single steps, and for positions up to TIMED_KEYS.
    """
    context = model.config.max_positions
    lengths = sorted({min(1024 << i, context, TIMED_KEYS) for i in range(11)})
    times: dict[str, list[float]] = {"tokens": [], "dense_ms": [], "kascade_ms": []}
    time_step = DecodeTimer(model, (Dense(), policy), lengths[-1])
    for length in report.each("decode cross-over", lengths):
        for name, value in zip(times, (length, *time_step(length))):
            times[name].append(value if name == "tokens" else float(f"{value:.4g}"))
    found = find_crossover(*times.values())
    if found is None:
        logger.warning(
            "decoding under Kascade was not faster than dense up to %d tokens on this device: the plan decodes dense; "
            "pass decode_crossover=0 (--decode-crossover 0) to decode under Kascade anyway",
            times["tokens"][-1],
        )
    return found or context + 1, times


def find_crossover(lengths: Sequence[int], dense_ms: Sequence[float], kascade_ms: Sequence[float]) -> int | None:
    """Return the first length from which Kascade is always faster; None if it is not faster at the last length."""
    found = None
    for length, dense, kascade in zip(lengths, dense_ms, kascade_ms, strict=True):
        if kascade >= dense:
            found = None
        elif found is None:
            found = length
    return found


def time_prefill(model: Any, policies: Sequence[Policy], length: int) -> list[float]:
    """Return, for each policy, the median milliseconds of a prefill of `length` tokens, in interleaved runs."""
    prompt = np.arange(length, dtype=np.int32) % model.config.vocab_size
    size = max(length, min(model.config.max_positions, TIMED_KEYS))
    pools = [RowPool(model.params, model.config, policy, rows=1, num_keys=size) for policy in policies]
    samples: list[list[float]] = [[] for _ in pools]
    for _ in range(1 + REPEATS):  # the first compiles
        for pool, sample in zip(pools, samples):
            started_s = time.perf_counter()
            jax.block_until_ready(pool.fill(prompt)[0])
            sample.append(1e3 * (time.perf_counter() - started_s))
    return [statistics.median(sample[1:]) for sample in samples]


class DecodeTimer:
    """Times single decode steps of several policies.

    All keys are zeros: a step takes as long as on keys of a text, because it reads as many.
    """

    def __init__(self, model: Any, policies: Sequence[Policy], num_keys: int):
        self.policies = policies
        self.pools = [RowPool(model.params, model.config, policy, rows=1, num_keys=num_keys) for policy in policies]

    def __call__(self, length: int) -> list[float]:
        """Return, for each policy, the median milliseconds of a step that reads `length` keys, in interleaved steps."""
        samples: list[list[float]] = [[] for _ in self.pools]
        for _ in range(1 + DECODE_REPEATS):  # the first compiles
            for policy, pool, sample in zip(self.policies, self.pools, samples):
                token = put(np.zeros(1, np.int32), pool.mesh)
                started_s = time.perf_counter()
                jax.block_until_ready(pool.decode(policy, token, [length - 1], [[1]])[0])
                sample.append(1e3 * (time.perf_counter() - started_s))
        return [statistics.median(sample[1:]) for sample in samples]
