"""Parts that the cases share: models with their sizes, a running server, and statistics of the figures."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from lab.served.child import Server
from lab.served.load_client import Outcome

SLOTS = 16
"""Number of requests that a server answers at a time."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one model's requests, in tokens, and the pages of its server.

    Attributes:
        name: the model in words, for tables.
        model: arguments of `tessera serve` that select the model.
        context: maximum length of a request, answer included.
        pages: pages of the server's pool.
        prompt, new: lengths of the usual prompt and answer.
        document: length of the document that several questions share.
        long: length of the prompt that joins running streams.
    """

    name: str
    model: tuple[str, ...]
    context: int
    pages: int
    prompt: int
    new: int
    document: int
    long: int


MODELS = {
    "demo": Sizes(
        name="the shipped model", model=(), context=4096, pages=700, prompt=256, new=64, document=3840, long=3840
    ),
    "smollm2": Sizes(
        name="SmolLM2", model=("smollm2",), context=8192, pages=600, prompt=256, new=64, document=6144, long=4096
    ),
}
"""Name -> model to measure. The shipped model's document is shorter because its context ends at 4,096 tokens."""


@dataclass(eq=False, kw_only=True)
class Stand:
    """Owner of the one running server. A new server starts only if a case needs other flags or the old one has ended.

    Attributes:
        sizes: the model, with the sizes of its requests.
        share: share of the requests to send; below 1 for a quick look.
    """

    sizes: Sizes
    share: float = 1.0
    _held: tuple[tuple[str, ...], Server, tempfile.TemporaryDirectory] | None = field(default=None, init=False)

    def scaled(self, count: int) -> int:
        """Return `count` times `share`, rounded, at least 2."""
        return max(2, round(self.share * count))

    def flags(self, *more: str) -> tuple[str, ...]:
        """Return the flags of `tessera serve` for this model."""
        sizes = self.sizes
        return (
            *(*sizes.model, "--slots", str(SLOTS)),
            *("--context", str(sizes.context), "--pages", str(sizes.pages), "--queue", "256", *more),
        )

    def server(self, *more: str) -> Server:
        """Return a running server with these additional flags. If none runs, kill any other server and start one."""
        flags = self.flags(*more)
        if self._held is None or self._held[0] != flags or self._held[1].process.poll() is not None:
            self.close()
            folder = tempfile.TemporaryDirectory(prefix="tessera-served-")
            self._held = flags, Server(flags, Path(folder.name)), folder
            self._held[1].started()
        return self._held[1]

    def close(self) -> None:
        """Kill the server, if one runs."""
        if self._held is not None:
            _, server, folder = self._held
            self._held = None
            server.kill()
            folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def rate(outcomes: Sequence[Outcome], seconds: float) -> float:
    """Return the generated tokens per second of all requests."""
    return sum(found.usage["completion_tokens"] for found in outcomes) / seconds


def first_s(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the seconds to the first text of each request that had any."""
    return [found.pieces_s[0] for found in outcomes if found.pieces_s]


def gaps_s(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the seconds between consecutive pieces of text, for all requests."""
    return [gap for found in outcomes for gap in np.diff(found.pieces_s).tolist()]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile; raise ValueError if there are no values."""
    if not values:
        raise ValueError("no request received the text that this figure is computed from")
    return float(np.percentile(values, percent))


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of n shares x, (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one share is everything.

    Raises:
        ValueError: there are no shares, or all are 0.
    """
    total = sum(share * share for share in shares)
    if not total:
        raise ValueError(f"{shares=} must hold at least one positive number")
    return sum(shares) ** 2 / (len(shares) * total)
