"""Training examples, of `length + 1` token ids each. A batch is a pure function of (data, seed, step)."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tessera.models.config import ModelConfig
from tessera.models.layers import Params
from tessera.models.text.tokenizer import Tokenizer
from tessera.runtime.corpus import read_text

VALUE_WEIGHT = 3.0
"""Weight of a token of an answer. The log counts the tokens with at least this weight. A batch without any counts those
with at least 1 or, as in plain text, its largest weight."""


class Batch(NamedTuple):
    """Token ids [B,T+1] and the weight of predicting tokens[:, 1:], float32 [B,T]."""

    tokens: np.ndarray
    weights: np.ndarray


class Split(NamedTuple):
    """Token ids to train on, and held-out token ids."""

    train: np.ndarray
    held_out: np.ndarray


Kind = Callable[[np.random.Generator, Split, int], tuple[np.ndarray, np.ndarray]]
"""Function that makes one example of a size: token ids and the weight of each."""


def text(rng: np.random.Generator, source: Split, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a slice of the corpus; every token has the same weight."""
    return excerpt(rng, source.train, size), np.full(size, 0.3, np.float32)


def excerpt(rng: np.random.Generator, ids: np.ndarray, size: int) -> np.ndarray:
    """Draw a random slice of `size` tokens that starts after a line break, if one is near; repeat `ids` if shorter."""
    if len(ids) <= size:
        return np.resize(ids, size).astype(np.int32)
    start = int(rng.integers(0, len(ids) - size))
    near = np.flatnonzero(ids[start : min(start + 80, len(ids) - size)] == 10)
    start += int(near[0]) + 1 if len(near) else 0
    return ids[start : start + size].astype(np.int32)


def read_split(path: str | os.PathLike, tokenizer: Tokenizer | None) -> Split:
    """Read the user's own text, a file or a folder of files, as tokens; hold out the last twentieth."""
    if tokenizer is None:
        raise ValueError("the base model has no tokenizer, so text cannot be read: use a folder with a tokenizer.json")
    body = read_text(Path(path))
    ids = np.asarray(tokenizer.encode(body, add_special=False, parse_special=False), np.int32)
    cut = len(ids) - len(ids) // 20
    return Split(ids[:cut], ids[cut:])


class Data:
    """Where a recipe's examples come from: the user's own text. A subclass adds kinds of example.

    Attributes:
        name: name in the fingerprint of a recipe.
        kinds: functions that make an example, by the name that a stage's mixture uses.
        vocab_size: vocabulary that every kind but "text" needs; None if there is no other kind.
    """

    name = "text"
    kinds: Mapping[str, Kind] = MappingProxyType({"text": text})
    vocab_size: int | None = None

    def read(self, path: str | None, tokenizer: Tokenizer | None) -> Split:
        """Read the text of a recipe."""
        if path is None:
            raise ValueError("the recipe names no text: set its field `text` to a file or a folder")
        return read_split(path, tokenizer)

    def prepare(self, params: Params, config: ModelConfig) -> Params:
        """Return the fresh weights to begin with."""
        return params

    def batch(self, source: Split, mixture: Mapping[str, float], length: int, rows: int, seed: int, step: int) -> Batch:
        """Build the batch of one step. The same arguments always give the same batch, bit for bit."""
        rng = np.random.default_rng((seed, step))
        kinds, shares = list(mixture), np.array(list(mixture.values()), np.float64)
        chosen = rng.choice(len(kinds), size=rows, p=shares / shares.sum())
        made = [self.kinds[kinds[index]](rng, source, length + 1) for index in chosen]
        return Batch(np.stack([ids for ids, _ in made]), np.stack([weights[1:] for _, weights in made]))


OWN_TEXT = Data()
