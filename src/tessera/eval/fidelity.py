"""How close a policy stays to dense on plain text: perplexity, KL divergence, and attention mass per layer and head.

    KL = mean over tokens of sum_v p(v) (ln p(v) - ln p'(v)),  p under dense, p' under the policy

Both run the same text in the same chunks, each with its own cache, so the divergence includes what earlier sparse
layers and chunks did to later ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tessera.calibrate import CHUNK, run_chunk
from tessera.generate import Model
from tessera.models.cache import init_cache
from tessera.models.decoder import logits
from tessera.shapes import round_up
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy

ROWS = 256
"""Tokens whose two rows of logits are compared at a time: a large vocabulary's would not fit otherwise."""


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Of a policy against dense, in nats per token.

    Attributes:
        loss_dense, loss: mean -ln p of the text.
        kl: mean KL divergence per window, in order.
        agreement: share of tokens whose best guess is dense's.
        num_tokens: predicted tokens.
    """

    loss_dense: float
    loss: float
    kl: tuple[float, ...]
    agreement: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss))

    @property
    def perplexity_dense(self) -> float:
        return float(np.exp(self.loss_dense))


@partial(jax.jit, static_argnames="rows")
def _compare(params, dense, sparse, targets, first, num_valid, *, rows: int):
    """Sums over rows [first, first + rows): KL, both losses, equal best guesses, counted."""
    at = first + jnp.arange(rows)
    pair = [jax.nn.log_softmax(logits(params, x[0, at]).astype(jnp.float32)) for x in (dense, sparse)]
    valid = at < num_valid
    kl = jnp.sum(jnp.exp(pair[0]) * (pair[0] - pair[1]), -1)
    losses = [-jnp.take_along_axis(x, targets[0, at, None], -1)[:, 0] for x in pair]
    same = pair[0].argmax(-1) == pair[1].argmax(-1)
    return jnp.stack([jnp.where(valid, x, 0).sum() for x in (kl, *losses, same.astype(jnp.float32))])


def fidelity(model: Model, policy: Policy, windows: Sequence[np.ndarray]) -> Fidelity:
    """Run every window under dense and under the policy and compare what they predict."""
    longest = max(len(window) for window in windows)
    rows = round_up(min(CHUNK, longest), max(getattr(policy, "query_tile", 1), ROWS))
    sums, kl = np.zeros(4), []
    for window in windows:
        found = np.zeros(4)
        caches = [_cache(model, round_up(longest, rows)) for _ in range(2)]
        for start in range(0, len(window), rows):
            tokens, targets = np.zeros((2, 1, rows), np.int32)
            piece, answer = window[start : start + rows], window[start + 1 : start + 1 + rows]
            tokens[0, : len(piece)], targets[0, : len(answer)] = piece, answer
            where = (np.array([start], np.int32), np.array([len(piece)], np.int32))
            hidden = []
            for index, used in enumerate((Dense(), policy)):
                x, caches[index], _ = run_chunk(
                    model.params, caches[index], tokens, *where, config=model.config, policy=used
                )
                hidden.append(x)
            for first in range(0, len(answer), ROWS):
                found += np.asarray(
                    _compare(model.params, *hidden, targets, np.int32(first), np.int32(len(answer)), rows=ROWS),
                    np.float64,
                )
        kl.append(float(found[0] / (len(window) - 1)))
        sums += found
    count = sum(len(window) - 1 for window in windows)
    return Fidelity(
        loss_dense=sums[1] / count, loss=sums[2] / count, kl=tuple(kl), agreement=sums[3] / count, num_tokens=count
    )


def _cache(model: Model, size: int) -> Any:
    stacked = not isinstance(model.params.layers, tuple)
    return init_cache(model.config, 1, size, dtype=model.params.embed.dtype, stacked=stacked)
