"""Predict step times and page pools of machines from the roofline, without a compiler or a device.

    step = decode program + prefill program
    program = max(weights, products) + (attention or cache) + links

All terms are seconds: to read the weights, for the matrix products, for a prompt's attention or to read a decoding
row's keys from the cache, and for exchanges between devices. The roofline leaves out the host, tile selection and the
latency of exchanges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np

from tessera.core.hardware import USABLE_BYTES
from tessera.models.catalogue import MODELS
from tessera.models.footprint import Load, Types, divide, footprint
from tessera.runtime.planner import SLACK
from tessera.runtime.roofline import Question, recipe, speed

MODEL = "llama-3.1-8b"
TYPES = Types(weights="bfloat16", cache="bfloat16")
UNIT = 256
"""Positions of a segment and of a page: a multiple of the tile and of the query tile on accelerators."""
LONGEST = 131072
GRID = 4096
"""Positions between two predictions of attention and cache times. Times at other lengths are interpolated."""

Attention = Literal["dense", "kascade"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Replicas of one model, each on its own devices.

    Attributes:
        chip: short name of the chip.
        devices: devices of a replica.
        replicas: number of replicas.
    """

    chip: str
    devices: int
    replicas: int


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "v6e-8": Machine(chip="v6e", devices=4, replicas=2),
        "h200-8": Machine(chip="h200", devices=2, replicas=4),
    }
)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Predicted step times, from tables, in the form that `runtime.scheduler` takes (`Costs`).

    Attributes:
        weights: seconds to read the weights once.
        row: seconds of a prefilled row's matrix products.
        row_links: seconds of a prefilled row's exchanges between devices.
        answer, answer_links: seconds of a decoding row's matrix products and exchanges.
        attention: element i is the seconds of attention in the first i segments of a prompt.
        cache: element i is the seconds in which a decoding row reads i * UNIT keys.
    """

    weights: float
    row: float
    row_links: float
    answer: float
    answer_links: float
    attention: tuple[float, ...]
    cache: tuple[float, ...]

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Return the predicted seconds of a step."""
        seconds = 0.0
        if decode:
            count, cache = len(decode), self.cache
            seconds += max(self.weights, count * self.answer) + count * self.answer_links
            seconds += sum([cache[keys // UNIT] for keys in decode])
        if prefill:
            rows, attention = 0, self.attention
            for first, count in prefill:
                rows += count
                seconds += attention[-(-(first + count) // UNIT)] - attention[first // UNIT]
            seconds += max(self.weights, rows * self.row) + rows * self.row_links
        return seconds


@lru_cache
def step_times(machine: Machine, attention: Attention) -> StepTimes:
    """Predict the step times of a machine.

    Kascade follows the paper's plan and reads a tenth of the keys. Segments below the cross-over run dense. The
    cross-over is the shortest predicted length from which Kascade stays faster.
    """
    config = MODELS[MODEL]
    policy = recipe(config, MODEL)
    lengths = range(GRID, LONGEST + GRID + 1, GRID)

    def tables(kind: Attention) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for length in lengths:
            q = Question(
                config=config, chip=machine.chip, devices=machine.devices, batch=1, length=length, policy=policy
            )
            found.append(speed(q, TYPES, policy if kind == "kascade" else None))
        prefill = np.array([0.0, *(each.prefill_parts_s["attention"] for each in found)])
        return np.diff(prefill), np.array([1e-3 * each.decode_parts_ms["cache"] for each in found])

    parts, cache = tables("dense")
    if attention == "kascade":
        sparse_parts, sparse_cache = tables("kascade")
        worse = np.flatnonzero(sparse_parts >= parts)
        first = worse[-1] + 1 if worse.size else 0
        parts = np.concatenate([parts[:first], sparse_parts[first:]])
        cache = np.concatenate([cache[:first], sparse_cache[first:]])
    at = np.arange(0, LONGEST + GRID + 1, UNIT)
    q = Question(config=config, chip=machine.chip, devices=machine.devices, batch=1, length=GRID, policy=policy)
    one = speed(q, TYPES, None)
    return StepTimes(
        weights=1e-3 * one.decode_parts_ms["weights"],
        row=one.prefill_parts_s["products"] / GRID,
        row_links=one.prefill_parts_s["links"] / GRID,
        answer=1e-3 * one.decode_parts_ms["products"],
        answer_links=1e-3 * one.decode_parts_ms["links"],
        attention=tuple(np.interp(at, [0, *lengths], [0.0, *np.cumsum(parts)]).tolist()),
        cache=tuple(np.interp(at, [0, *lengths], [0.0, *cache]).tolist()),
    )


def pool_pages(machine: Machine) -> int:
    """Return how many pages of UNIT positions a replica has room for, next to its weights and a prefill chunk."""
    config = MODELS[MODEL]
    load = Load(batch=1, num_keys=LONGEST, rows=4096)
    found = footprint(config, load, types=TYPES, division=divide(config, machine.devices))
    room = USABLE_BYTES[machine.chip] / (1 + SLACK) - (found.total - found.cache)
    return int(room / (found.cache / LONGEST)) // UNIT
