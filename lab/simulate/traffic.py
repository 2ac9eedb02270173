"""Synthetic requests: chats of several turns, several questions on a document, and single prompts of 128K tokens.

The seed alone decides all requests. Tokens are random, but requests about the same text send the same tokens, so that
the real prefix cache can share them. Arrivals are a Poisson process (open loop). Its rate is constant, or varies over a
day of length `day` and reaches `peak` at the busiest moment:

    rate(t) = peak * (0.55 - 0.45 cos(2 pi (t / day - 1 / 6)))
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from lab.simulate.machine import LONGEST, UNIT
from tessera.runtime.prefix import Prefix

SYSTEM_TOKENS = 1024
"""Tokens of a chat's system prompt, which is one of SYSTEMS different ones."""
SYSTEMS = 8
VOCAB = 128256
BEFORE_S = 1200.0
"""Texts begin to arrive this many seconds before time 0. Otherwise their follow-up requests would be missing at time 0,
and the rate would start too low.
"""

Kind = Literal["chat", "document", "128K"]


def due_s(prompt_tokens: int) -> float:
    """Return the time limit of the first token in seconds: 1, plus 1 per 8,192 prompt tokens."""
    return 1.0 + prompt_tokens / 8192


@dataclass(frozen=True)
class Text:
    """`length` random tokens drawn from `seed`. Unless `system` is 0, it is the seed of the first SYSTEM_TOKENS."""

    seed: int
    length: int
    system: int = 0

    def tokens(self) -> np.ndarray:
        """Return the tokens."""
        own = np.random.default_rng([1, self.seed]).integers(VOCAB, size=self.length, dtype=np.int64)
        if self.system:
            own[:SYSTEM_TOKENS] = np.random.default_rng([2, self.system]).integers(VOCAB, size=SYSTEM_TOKENS)
        return own


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request. Its prompt is the first `prompt_tokens` of `text`.

    If `text` is shorter, the prompt is all of it, followed by tokens that no other request has (the question).
    """

    at_s: float
    kind: Kind
    tenant: str
    text: Text
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of the kinds of texts, and the sizes of documents.

    Attributes:
        weights: shares of chats, documents and 128K prompts among the texts.
        shortest, longest: limits of a document's tokens. The logarithm of their number is drawn uniformly.
        asked: mean number of questions on a document.
    """

    weights: tuple[float, float, float]
    shortest: int = 28_000
    longest: int = 126_000
    asked: float = 3.0


MIXES = {
    "mixed": Mix(weights=(0.7, 0.28, 0.02)),
    "long": Mix(weights=(0.0, 0.9, 0.1), shortest=64_000, asked=1.0),
}
"""Mixes by name. "long" has no chats, and one question per document."""


def requests_per_start(mix: Mix) -> float:
    """Return the mean number of requests about one text."""
    return mix.weights[0] * 3.5 + mix.weights[1] * mix.asked + mix.weights[2]


@dataclass
class Stream:
    """Arrivals in order of time.

    Attributes:
        rate: mean requests per second; if `daily`, at the busiest moment.
        seconds: duration.
        daily: whether the rate varies as over a day that lasts `seconds`.
        tenant: tenant of all requests.
    """

    mix: Mix
    rate: float
    seconds: float
    seed: int = 0
    daily: bool = False
    tenant: str = ""

    def arrivals(self) -> list[Arrival]:
        """Draw all arrivals from time 0 on. Earlier requests are left out, even if later ones continue their texts."""
        rng = np.random.default_rng([3, self.seed])
        starts, at, found, seed = self.rate / requests_per_start(self.mix), -BEFORE_S, [], self.seed * 10_000_000
        while (at := at + rng.exponential(1 / starts)) < self.seconds:
            if self.daily and rng.random() > 0.55 - 0.45 * math.cos(2 * math.pi * (at / self.seconds - 1 / 6)):
                continue
            seed += 1
            kind = ("chat", "document", "128K")[rng.choice(3, p=self.mix.weights)]
            draw = {"chat": _chat, "document": _document, "128K": _longest}[kind]
            found += draw(rng, self.mix, at, self.tenant, seed)
        return sorted((each for each in found if 0 <= each.at_s < self.seconds), key=lambda each: each.at_s)


def _chat(rng: np.random.Generator, mix: Mix, at: float, tenant: str, seed: int) -> Iterator[Arrival]:
    """Yield 1 to 6 turns, about one a minute; each prompt holds all earlier turns."""
    turns = int(rng.integers(1, 7))
    users, answers = rng.integers(50, 800, turns), rng.integers(50, 450, turns)
    text = Text(seed, SYSTEM_TOKENS + int(users.sum() + answers.sum()), 1 + int(rng.integers(SYSTEMS)))
    prompt = SYSTEM_TOKENS
    for user, answer in zip(users.tolist(), answers.tolist()):
        prompt += user
        yield Arrival(at_s=at, kind="chat", tenant=tenant, text=text, prompt_tokens=prompt, answer_tokens=answer)
        prompt += answer
        at += 20.0 + float(rng.exponential(40.0))


def _document(rng: np.random.Generator, mix: Mix, at: float, tenant: str, seed: int) -> Iterator[Arrival]:
    """Yield questions on a document, one every few minutes."""
    length = int(math.exp(rng.uniform(math.log(mix.shortest), math.log(mix.longest))))
    for _ in range(int(rng.geometric(1 / mix.asked))):
        prompt, answer = length + int(rng.integers(32, 256)), int(rng.integers(50, 400))
        yield Arrival(
            at_s=at, kind="document", tenant=tenant, text=Text(seed, length), prompt_tokens=prompt, answer_tokens=answer
        )
        at += 15.0 + float(rng.exponential(120.0))


def _longest(rng: np.random.Generator, mix: Mix, at: float, tenant: str, seed: int) -> Iterator[Arrival]:
    answer = int(rng.integers(50, 400))
    prompt = LONGEST - 512
    yield Arrival(
        at_s=at, kind="128K", tenant=tenant, text=Text(seed, prompt), prompt_tokens=prompt, answer_tokens=answer
    )


class Hashes:
    """Page hashes of texts, from the prefix cache's function. The hashes of the `kept` texts used last stay cached."""

    def __init__(self, prefix: Prefix, kept: int = 8192):
        self._all = lru_cache(kept)(lambda text, tenant: prefix.hashes(text.tokens(), tenant))

    def of(self, arrival: Arrival) -> list[bytes]:
        """Return the hashes of the prompt's full pages that lie in its text, without the page of its last token."""
        return self._all(arrival.text, arrival.tenant)[: (arrival.prompt_tokens - 1) // UNIT]
