"""Predict the seconds of a step from its work, with coefficients that follow measured steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self


class Costs(Protocol):
    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Return the predicted seconds of a step.

        Args:
            prefill: (first position, number of positions) of each prompt part that the step computes.
            decode: number of keys of each row that decodes a token.
        """


@dataclass(frozen=True, kw_only=True)
class LinearCosts:
    """Costs that are linear in the work of a step. All coefficients are in seconds and at least 0.

        seconds = base + row * positions + pair * pairs + answer * decoding rows + key * keys of the decoding rows

    A pair is a prefilled position and a key at or before it.
    """

    base: float
    row: float
    pair: float
    answer: float
    key: float

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        rows, pairs, answers, keys = _amounts(prefill, decode)
        return self.base + self.row * rows + self.pair * pairs + self.answer * answers + self.key * keys

    @classmethod
    def fit(cls, samples: Iterable[tuple[Sequence[tuple[int, int]], Sequence[int], float]]) -> Self:
        """Fit the coefficients to measured steps: minimise the squared relative errors, with no coefficient below 0."""
        import numpy as np
        from scipy.optimize import nnls

        samples = list(samples)
        if not samples or any(seconds <= 0 for *_, seconds in samples):
            raise ValueError(
                f"cannot fit costs to {len(samples)} samples with seconds {[seconds for *_, seconds in samples]}: "
                "pass at least one measured step, and only steps of more than 0 seconds"
            )
        table = np.array([(1.0, *_amounts(prefill, decode)) for prefill, decode, _ in samples])
        table /= np.array([seconds for *_, seconds in samples])[:, None]
        scale = np.maximum(table.max(axis=0), 1e-300)  # columns of one size: pairs are 1e9 where the base is 1
        found, _ = nnls(table / scale, np.ones(len(samples)))
        return cls(**dict(zip((each.name for each in fields(cls)), (found / scale).tolist())))

    def observed(
        self, prefill: Sequence[tuple[int, int]], decode: Sequence[int], seconds: float, *, weight: float = 0.02
    ) -> Self:
        """Return these costs, adjusted to one measured step.

            new coefficient = coefficient * ratio ** (weight * part)

        The ratio is measured seconds / predicted seconds, clipped to [1/4, 4] so that one stalled step changes little.
        The part is the fraction of the predicted seconds that is due to the coefficient: a step without prefill does
        not change the costs of prefill.
        """
        names = [each.name for each in fields(self)]
        costs = [getattr(self, name) for name in names]
        parts = [cost * amount for cost, amount in zip(costs, (1, *_amounts(prefill, decode)))]
        whole = max(sum(parts), 1e-9)
        ratio = min(4.0, max(0.25, seconds / whole))
        changed = [cost * ratio ** (weight * part / whole) for cost, part in zip(costs, parts)]
        return type(self)(**dict(zip(names, changed)))


def _amounts(prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> tuple[float, float, float, float]:
    rows = sum(count for _, count in prefill)
    pairs = sum(count * (first + (count + 1) / 2) for first, count in prefill)
    return rows, pairs, len(decode), sum(decode)
