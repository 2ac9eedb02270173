"""A tiny recipe of a few seconds, on examples that need no file: random bytes that repeat."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np

from tessera.train.data import Data, Split, text
from tessera.train.recipes import SMALL_CONFIG, VOCAB_SIZE, Recipe, Stage


def copy(rng, source, size):
    """Repeat random bytes with one period; the first period is noise and has no weight."""
    period = int(rng.integers(3, 13))
    ids = np.resize(rng.integers(0, 256, period), size).astype(np.int32)
    return ids, (np.arange(size) > period).astype(np.float32)


class Copies(Data):
    """Copies, and slices of random bytes as a text."""

    name = "copies"
    kinds = MappingProxyType({"copy": copy, "text": text})
    vocab_size = VOCAB_SIZE

    def read(self, path, tokenizer):
        """Return the user's text, or 4,096 random bytes."""
        if path is not None:
            return super().read(path, tokenizer)
        ids = np.random.default_rng(0).integers(0, 256, 4096).astype(np.int32)
        return Split(ids[:-256], ids[-256:])


COPIES = Copies()
COPYING = (("copy", 1.0),)
TINY = Recipe(
    name="tiny",
    config=replace(
        SMALL_CONFIG, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        max_positions=128,
    ),
    data=COPIES,
    stages=(
        Stage(length=24, batch=8, steps=12, mixture=COPYING),
        Stage(length=48, batch=4, steps=8, mixture=(("copy", 0.5), ("text", 0.5)), accumulate=2, last_rate=1e-3),
    ),
    warmup=5,
)  # fmt: skip
"""Two stages, accumulation and a falling learning rate."""
