"""Compare two policies on the same questions: the share of answers kept, and whether a difference is more than chance.

Questions about one document share its cache and are not independent, so intervals redraw whole documents.
"""

from collections.abc import Sequence
from math import comb, sqrt
from typing import NamedTuple

import numpy as np

DRAWS = 4000
TAILS = (0.025, 0.975)


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(right: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of the share p = right / n, where n = trials; z = 1.96 gives 95 %.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    share, square = right / trials, z * z / trials
    middle, half = share + square / 2, z * sqrt(share * (1 - share) / trials + square / (4 * trials))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def mcnemar(lost: int, gained: int) -> float:
    """Return McNemar's exact two-sided p: min(1, 2 P[Binomial(lost + gained, 1/2) <= min(lost, gained)]).

    `lost` and `gained` count the questions that only the first or only the second policy answered correctly.
    """
    total = lost + gained
    tail = sum(comb(total, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**total)


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """Compute sum(parts) / sum(wholes); both lists hold one number per document. The interval redraws documents.

    If the value is 0 or 1, redrawn values would all be equal, so the interval is Wilson's instead. Draws in which the
    wholes sum to 0 are skipped. If all wholes are 0, the value is NaN and its interval is 0 to 1.
    """
    parts, wholes = np.asarray(parts, float), np.asarray(wholes, float)
    part, whole = parts.sum(), wholes.sum()
    if whole == 0:
        return Estimate(float("nan"), 0.0, 1.0)
    if part in (0, whole):
        return Estimate(part / whole, *wilson(int(part), int(whole)))
    pick = _draws(len(parts))
    drawn = wholes[pick].sum(1)
    found = parts[pick].sum(1)[drawn > 0] / drawn[drawn > 0]
    return Estimate(part / whole, *map(float, np.quantile(found, TAILS)))


def mean(values: Sequence[float]) -> Estimate:
    """Compute the mean of values that are nearly independent; the interval redraws the values."""
    values = np.asarray(values, float)
    found = values[_draws(len(values))].mean(1)
    return Estimate(float(values.mean()), *map(float, np.quantile(found, TAILS)))


def kept(dense: Sequence[Sequence[int]], policy: Sequence[Sequence[int]]) -> Estimate:
    """Return the share of dense's right answers that a policy gets right, too; each list has 1 (right) or 0 per
    question of a document."""
    both = [sum(a and b for a, b in zip(*pair, strict=True)) for pair in zip(dense, policy, strict=True)]
    return ratio(both, [sum(found) for found in dense])


def discordant(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return (number of questions that only `first` answers correctly, number that only `second` answers correctly)."""
    pairs = [pair for both in zip(first, second, strict=True) for pair in zip(*both, strict=True)]
    return sum(a > b for a, b in pairs), sum(b > a for a, b in pairs)


def gain(control: Sequence[Sequence[int]], policy: Sequence[Sequence[int]]) -> Estimate:
    """Return the policy's share of right answers minus the control's share; the interval redraws documents."""
    more = np.array([sum(b) - sum(a) for a, b in zip(control, policy, strict=True)], float)
    sizes = np.array([len(found) for found in control], float)
    pick = _draws(len(more))
    found = more[pick].sum(1) / sizes[pick].sum(1)
    return Estimate(float(more.sum() / sizes.sum()), *map(float, np.quantile(found, TAILS)))


def _draws(size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, size, (DRAWS, size))
