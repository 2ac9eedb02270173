"""Measure a policy's closeness to dense on plain text: perplexity, KL divergence, attention mass per layer and head.

    KL = mean over tokens of sum_v p(v) (ln p(v) - ln p'(v)),  p under dense, p' under the policy

Both run the same text in the same chunks, each with its own cache, so the divergence includes the effect of earlier
sparse layers and chunks on later ones.

    recall[layer, KV head] = share of attention mass on the keys that the policy lets that layer and head read

The mass is that of dense attention, the softmax over all visible keys, with q and k from the policy's own run; mean
over rows and the KV head's query heads. Layers that read every key have recall 1 by definition: Kascade's anchors, and
every layer of dense.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tessera.calibration.calibrate import CHUNK, attention_mass, run_chunk
from tessera.core.shapes import round_up
from tessera.generate import Model
from tessera.models.cache import init_cache
from tessera.models.decoder import logits
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy
from tessera.sparse.recording import RecallRecorder

ROWS = 256
"""Tokens whose logits are compared at a time; with a large vocabulary, the logits of more would not fit in memory."""


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Closeness of a policy to dense, in nats per token.

    Attributes:
        loss_dense, loss: mean -ln p of the text.
        kl: mean KL divergence per window, in order.
        agreement: share of tokens where the policy's top-1 token equals dense's.
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


@jax.jit
def _compare(params, dense, sparse, targets, num_valid):
    """Sum KL, both losses and equal top-1 tokens over the first `num_valid` rows."""
    pair = [jax.nn.log_softmax(logits(params, x).astype(jnp.float32)) for x in (dense, sparse)]
    valid = jnp.arange(len(targets)) < num_valid
    kl = jnp.sum(jnp.exp(pair[0]) * (pair[0] - pair[1]), -1)
    losses = [-jnp.take_along_axis(x, targets[:, None], -1)[:, 0] for x in pair]
    same = pair[0].argmax(-1) == pair[1].argmax(-1)
    return jnp.stack([jnp.where(valid, x, 0).sum() for x in (kl, *losses, same.astype(jnp.float32))])


def fidelity(
    model: Model, policy: Policy, windows: Sequence[np.ndarray], dense: Sequence[np.ndarray] | None = None
) -> Fidelity:
    """Run every window under dense and under the policy and compare their predictions.

    Args:
        windows: pieces of text, token ids.
        dense: `last_hidden` of the windows under dense, to share between policies; computed if None.
    """
    sums, kl = np.zeros(4), []
    for index, window in enumerate(windows):
        reference = last_hidden(model, Dense(), window) if dense is None else dense[index]
        found, ours = np.zeros(4), last_hidden(model, policy, window)
        targets = np.zeros(len(ours), np.int32)
        targets[: len(window) - 1] = window[1:]
        for first in range(0, len(window) - 1, ROWS):
            part = slice(first, first + ROWS)
            valid = np.int32(len(window) - 1 - first)
            found += np.asarray(_compare(model.params, reference[part], ours[part], targets[part], valid), float)
        kl.append(float(found[0] / (len(window) - 1)))
        sums += found
    count = sum(len(window) - 1 for window in windows)
    return Fidelity(
        loss_dense=sums[1] / count, loss=sums[2] / count, kl=tuple(kl), agreement=sums[3] / count, num_tokens=count
    )


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Attention mass that a policy keeps, as a fraction.

    Attributes:
        per_head: [windows, L, K] of every window, layer and KV head.
        sparse_layers: the layers that choose which keys to read; the others keep 1 by definition.
    """

    per_head: np.ndarray
    sparse_layers: tuple[int, ...]

    @property
    def per_window(self) -> list[float]:
        """Mean over sparse layers and their heads; 1 if no layer is sparse."""
        layers = list(self.sparse_layers)
        return self.per_head[:, layers].mean((1, 2)).tolist() if layers else [1.0] * len(self.per_head)


def recall(model: Model, policy: Policy, windows: Sequence[np.ndarray]) -> Recall:
    """Run every window under the policy and measure the share of dense attention's mass that its selections hold.

    Args:
        windows: pieces of text, token ids.
    """
    recorder, longest = RecallRecorder(policy=policy), max(map(len, windows))
    mass = np.stack([attention_mass(model, window, recorder, longest)[0] for window in windows])
    return Recall(per_head=mass[:, 0] / mass[:, 1], sparse_layers=recorder.sparse_layers(model.config.num_layers))


def last_hidden(model: Model, policy: Policy, window: np.ndarray) -> np.ndarray:
    """Last layer's output under a policy, [tokens rounded up, hidden size]; rows past the window are padding."""
    rows = round_up(min(CHUNK, len(window)), max(getattr(policy, "query_tile", 1), ROWS))
    cache, parts = _cache(model, round_up(len(window), rows)), []
    for start in range(0, len(window), rows):
        tokens, piece = np.zeros((1, rows), np.int32), window[start : start + rows]
        tokens[0, : len(piece)] = piece
        where = (np.array([start], np.int32), np.array([len(piece)], np.int32))
        hidden, cache, _ = run_chunk(model.params, cache, tokens, *where, config=model.config, policy=policy)
        parts.append(np.asarray(hidden[0]))
    return np.concatenate(parts)


def _cache(model: Model, size: int) -> Any:
    stacked = not isinstance(model.params.layers, tuple)
    return init_cache(model.config, 1, size, dtype=model.params.embed.dtype, stacked=stacked)
