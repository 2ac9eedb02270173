"""Measure a policy's closeness to dense on plain text: perplexity, KL divergence, attention mass per layer and head.

    KL = mean over tokens of sum_v p(v) (ln p(v) - ln p'(v)),  p under dense, p' under the policy

Dense and the policy run the same text in the same chunks, each with its own cache, so the divergence includes the
effect of earlier sparse layers and chunks on later ones.

    recall[layer, KV head] = share of attention mass on the keys that the policy lets that layer and head read

The attention mass is the softmax over all visible keys, computed from q and k of the policy's own run and averaged over
rows and the KV head's query heads. Layers that read every key, such as Kascade's anchors, have recall 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.calibration.similarity import attention_mass
from tessera.generate import Model
from tessera.runtime.score import compare_rows, predicting, run_whole
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy
from tessera.sparse.recording import RecallRecorder


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Closeness of a policy to dense attention. Losses and divergences are in nats per token.

    Attributes:
        loss_dense, loss: mean -ln p of the text's tokens, under dense and under the policy.
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


def fidelity(
    model: Model, policy: Policy, windows: Sequence[np.ndarray], dense: Sequence[np.ndarray] | None = None
) -> Fidelity:
    """Run every window under dense and under the policy and compare their predictions.

    Args:
        windows: pieces of text, token ids.
        dense: hidden states of the windows under dense (`run_whole`), to share between policies; computed if None.
    """
    sums, kl = np.zeros(4), []
    for index, window in enumerate(windows):
        reference = run_whole(model, window, Dense())[0] if dense is None else dense[index]
        ours = run_whole(model, window, policy)[0]
        rows = compare_rows(model, reference, ours, window, predicting(window))
        found = np.array([x.sum(dtype=np.float64) for x in (rows.kl, rows.loss_dense, rows.loss, rows.same)])
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
        per_head: share per window, layer and KV head, [windows, L, K].
        sparse_layers: layers that read only chosen keys; the share of every other layer is 1.
    """

    per_head: np.ndarray
    sparse_layers: tuple[int, ...]

    @property
    def per_window(self) -> list[float]:
        """Share of attention mass kept per window, averaged over sparse layers and their heads; 1 if none is sparse."""
        layers = list(self.sparse_layers)
        return self.per_head[:, layers].mean((1, 2)).tolist() if layers else [1.0] * len(self.per_head)


def recall(model: Model, policy: Policy, windows: Sequence[np.ndarray]) -> Recall:
    """Run every window under the policy and measure the share of attention mass on the keys that the policy reads.

    Args:
        windows: pieces of text, token ids.
    """
    recorder, longest = RecallRecorder(policy=policy), max(map(len, windows))
    runs = (run_whole(model, window, recorder, num_keys=longest) for window in windows)
    mass = np.stack([attention_mass(notes) for _, notes in runs])
    return Recall(per_head=mass[:, 0] / mass[:, 1], sparse_layers=recorder.sparse_layers(model.config.num_layers))
