"""Find the prompt length from which a policy is faster than dense on this device, by timing both."""

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

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
"""Timed runs per policy and length."""

TIMED_KEYS = 8192
"""Minimum cache capacity of a timed prefill, in keys; the model's context if that is shorter. Prefills of up to this
length share the capacity, so that their programs compile only once."""


def measure_crossover(model: Any, policy: Kascade, report: Any) -> tuple[int, dict[str, Any]]:
    """Measure the length from which prefill under the policy is faster than dense; return (length, times).

    Compares medians of interleaved runs over doubling lengths, until the context ends or the next length would exceed
    the time budget. If Kascade is not faster at the longest length, returns the context plus one, so that every request
    runs dense, and logs a warning.
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
    """Return, for each policy, the median milliseconds of a prefill of `length` tokens, without compilation.

    The runs of the policies are interleaved.
    """
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
