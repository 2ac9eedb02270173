"""Compare a text under a policy with the same text under dense, token by token: KL divergence, loss, top-1 tokens.

    KL[t] = sum_v p(v) (ln p(v) - ln p'(v)),  p under dense, p' under the policy, for the token after t

A text runs once and is judged in blocks of tokens, so one pass serves every range of positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tessera.generate import Model
from tessera.models.decoder import logits
from tessera.sparse.contract import Policy
from tessera.workbench.eval.trials import Runner

BLOCK = 256
"""Tokens per sample of divergence. Neighbouring tokens share their context, so intervals redraw whole blocks."""


@jax.jit
def compare_rows(params, dense, ours, targets):
    """Compute KL(dense || ours), both losses and whether the top-1 tokens agree, per row: [4, rows]."""
    pair = [jax.nn.log_softmax(logits(params, x).astype(jnp.float32)) for x in (dense, ours)]
    kl = jnp.sum(jnp.exp(pair[0]) * (pair[0] - pair[1]), -1)
    losses = [-jnp.take_along_axis(x, targets[:, None], -1)[:, 0] for x in pair]
    return jnp.stack([kl, *losses, (pair[0].argmax(-1) == pair[1].argmax(-1)).astype(jnp.float32)])


class Pass(NamedTuple):
    """Result of running a text under a policy.

    Attributes:
        hidden: the last layer's output, [tokens, D].
        counts: keys read and keys visible per ROWS tokens, [2, chunks, L].
    """

    hidden: np.ndarray
    counts: np.ndarray


def run_text(model: Model, policy: Policy, window: np.ndarray) -> Pass:
    """Run a text under a policy; return hidden states and counts of keys."""
    runner = Runner(model, policy, len(window))
    hidden = np.concatenate([np.asarray(part) for _, part in runner.fill(window)])
    counts = np.stack([[np.asarray(reads[i], float)[:, 0] for reads in runner.pending] for i in (0, 1)])
    return Pass(hidden[: len(window)], counts)


def closeness(model: Model, dense: np.ndarray, ours: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Mean KL, dense loss, our loss, top-1 agreement per BLOCK tokens, [blocks, 4]; the last token predicts nothing."""
    targets, blocks = np.append(window[1:], 0), []
    for start in range(0, len(window), BLOCK):
        part = slice(start, start + BLOCK)
        rows = np.asarray(compare_rows(model.params, dense[part], ours[part], targets[part]), float)
        blocks.append(rows[:, : len(window) - 1 - start].mean(1))
    return np.array(blocks)
