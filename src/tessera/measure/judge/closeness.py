"""Compare a policy's predictions with dense attention's, token by token: KL divergence, loss, top-1 tokens.

    KL[t] = sum_v p(v) (ln p(v) - ln p'(v)),  p under dense, p' under the policy, v over the vocabulary

A text runs once under each policy. Results are means per block of tokens, so one pass serves every range of positions.
"""

from typing import NamedTuple

import numpy as np

from tessera.generate import Model
from tessera.measure.judge.answers import Runner
from tessera.runtime.score import compare_rows, predicting
from tessera.sparse.contract import Policy

BLOCK = 256
"""Tokens per block. A block is one sample of the divergence, since neighbouring tokens share context and are not
independent."""


class Pass(NamedTuple):
    """Result of running a text under a policy: the last layer's output, [tokens, D], and the keys read and keys visible
    per chunk (`runtime.score.CHUNK` tokens) and layer, [2, chunks, L]."""

    hidden: np.ndarray
    counts: np.ndarray


def run_text(model: Model, policy: Policy, window: np.ndarray) -> Pass:
    runner = Runner(model, policy, len(window))
    hidden = np.concatenate([np.asarray(chunk.hidden)[: chunk.count] for chunk in runner.fill(window)])
    counts = np.stack([[np.asarray(reads[i], float)[:, 0] for reads in runner.pending] for i in (0, 1)])
    return Pass(hidden, counts)


def closeness(
    model: Model, dense: np.ndarray, ours: np.ndarray, window: np.ndarray, *, other: Model | None = None
) -> np.ndarray:
    """Return four means per block of tokens, [blocks, 4]: KL, dense's loss, the policy's loss, top-1 agreement.

    `dense` and `ours` are the hidden states of `window` under dense and under the policy. `other` is the model that
    made `ours`, if it is not `model`. The last token is left out, since no token follows it.
    """
    found = compare_rows(model, dense, ours, window, predicting(window), other=other)
    rows = np.array([found.kl, found.loss_dense, found.loss, found.same], float)
    return np.array([rows[:, start : start + BLOCK].mean(1) for start in range(0, rows.shape[1], BLOCK)])
