"""Find the positions from which prefill and decode under a policy are faster than dense on this device, by timing."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
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
    times: dict[str, list[float]] = {"tokens": [], "dense_ms": [], "kascade_ms": []}
    left_ms = 1e3 * CROSSOVER_BUDGET_S
    for length in report.each("cross-over", sorted({min(1024 << i, context) for i in range(11)})):
        if times["tokens"] and GROWTH * REPEATS * (times["dense_ms"][-1] + times["kascade_ms"][-1]) > left_ms:
            break
        pair_ms = time_prefill(model, (Dense(), policy), length)
        left_ms -= REPEATS * sum(pair_ms)
        _note(times, length, pair_ms)
    found = find_crossover(*times.values())
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
    If Kascade is not faster at the last one, the position is the context plus one: decode always runs dense.
    """
    context = model.config.max_positions
    lengths = sorted({min(1024 << i, context, TIMED_KEYS) for i in range(11)})
    times: dict[str, list[float]] = {"tokens": [], "dense_ms": [], "kascade_ms": []}
    policies = Dense(), policy
    pools = [RowPool(model.params, model.config, each, rows=1, num_keys=lengths[-1]) for each in policies]
    token = put(np.zeros(1, np.int32), pools[0].mesh)
    for length in report.each("decode cross-over", lengths):  # all keys are zeros, which take as long as a text's
        steps = [partial(pool.decode, pool.policy, token, [length - 1], [[1]]) for pool in pools]
        _note(times, length, _medians_ms(steps, DECODE_REPEATS))
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
    return _medians_ms([partial(pool.fill, prompt) for pool in pools], REPEATS)


def _medians_ms(calls: Sequence[Callable[[], tuple[jax.Array, Any]]], repeats: int) -> list[float]:
    """Return the median milliseconds of each call, in interleaved runs, without the first ones, which compile."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(1 + repeats):
        for call, sample in zip(calls, samples):
            started_s = time.perf_counter()
            jax.block_until_ready(call()[0])
            sample.append(1e3 * (time.perf_counter() - started_s))
    return [statistics.median(sample[1:]) for sample in samples]


def _note(times: dict[str, list[float]], length: int, pair_ms: Sequence[float]) -> None:
    for name, value in zip(times, (length, *(float(f"{each:.4g}") for each in pair_ms))):
        times[name].append(value)
