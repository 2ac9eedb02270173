"""The paper's recipe, for a plan without a target: choose anchor layers by similarity, in three passes over text.

1. *Similarity and importance*: which layers can share a selection, head by head.
2. *Recall*: the attention mass that the plan keeps, on held-out text.
3. *Perplexity*: dense against Kascade, on held-out text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tessera.calibration.report import Report
from tessera.core.units import rounded
from tessera.models.config import ModelConfig
from tessera.runtime.corpus import Corpus
from tessera.runtime.score import predicting, run_whole, run_window, score_rows
from tessera.sparse.anchors import best_heads, choose_anchors, head_table, mapped
from tessera.sparse.kascade import Kascade
from tessera.sparse.recording import NUM_KEYS, RecallRecorder, RecallState, SimilarityRecorder


def find_anchors(
    model: Any, corpus: Corpus, count: int | tuple[int, ...], fixed: dict[str, Any], report: Report
) -> tuple[Kascade, dict[str, Any]]:
    """Choose anchors and the head map by similarity, as the paper does; return the policy, its metrics and tokens run.

    `count` is the number of anchors to choose, or the anchor layers themselves; `fixed` are the policy's other fields.
    """
    always = {name: fixed[name] for name in ("query_tile", "local", "sinks")}
    notes = record_similarity(model, corpus.windows, heads=fixed["heads"], report=report, **always)
    chosen = choose_anchors(notes.score, count) if isinstance(count, int) else count
    policy = Kascade(anchors=chosen, head_map=_head_map(notes.heads, chosen, model.config), **fixed)
    metrics = notes.metrics() | measure_policy(model, policy, corpus.held_out, report)
    return policy, {"metrics": metrics, "tokens": corpus.num_tokens}


def _head_map(heads_LLK: np.ndarray, anchors: tuple[int, ...], config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Build the plan's head map; pooled heads (a last axis of length 1) map to themselves."""
    if heads_LLK.shape[-1] == config.num_kv_heads:
        return head_table(heads_LLK, anchors)
    return (tuple(range(config.num_kv_heads)),) * config.num_layers


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Results of the similarity pass.

    Attributes:
        heads: heads[a, b, k] is the KV head of layer a whose selection head k of layer b would reuse, [L,L,K]; K is 1
            if the heads are pooled.
        similarity: similarity[a, b] is layer b's attention probability on the keys that layer a chooses, divided by its
            probability on its own choice: the minimum over a window's query tiles, averaged over windows and heads.
        importance: mean of 1 - cosine between the residual stream before and after the attention block, [L].
    """

    heads: np.ndarray
    similarity: np.ndarray
    importance: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """Score of each pair of layers, [L,L]: score(a, b) = importance(b) x similarity(a, b)."""
        return self.importance * self.similarity

    def metrics(self) -> dict[str, Any]:
        return {
            "similarity": rounded(np.triu(self.similarity)),
            "importance": rounded(self.importance),
            "similarity_keys": NUM_KEYS,
        }


def record_similarity(
    model: Any,
    windows: Sequence[np.ndarray],
    query_tile: int,
    heads: str,
    report: Report,
    *,
    local: int = 0,
    sinks: int = 0,
) -> Notes:
    """Measure the similarity of all pairs of layers and heads, and each layer's importance, over the windows."""
    recorder = SimilarityRecorder(query_tile=query_tile, local=local, sinks=sinks, pooled=heads == "pooled")
    longest = max(len(window) for window in windows)
    turned, num_tokens, minima = 0.0, 0, []
    for window in report.each("similarity", windows):
        least = None
        for chunk in run_window(model, window, recorder, num_keys=longest):
            state = jax.device_get(chunk.notes)
            turned = turned + np.asarray(state.turned, np.float64)
            num_tokens += int(state.num_tokens)
            if state.num_tiles:
                minimum = np.asarray(state.least, np.float64)
                least = minimum if least is None else np.minimum(least, minimum)
        if least is not None:
            minima.append(least)
    if not np.isfinite(turned).all():
        raise ValueError("the model's activations are not finite on this text: check its weights for NaN or inf")
    if not minima:
        raise ValueError(
            f"the texts are too short: a window needs more than {NUM_KEYS} tokens besides the keys that are always "
            f"read: pass longer texts"
        )
    similarity = np.mean(minima, axis=0)
    own = np.broadcast_to(np.arange(similarity.shape[-1]), similarity.shape[:3])
    table = best_heads(similarity) if heads == "remap" else own
    return Notes(heads=table, similarity=mapped(similarity, table), importance=turned / num_tokens)


def measure_policy(model: Any, policy: Kascade, windows: Sequence[np.ndarray], report: Report) -> dict[str, Any]:
    """Measure recall of attention mass and density per layer, and dense and sparse perplexity, on held-out windows."""
    longest = max(len(window) for window in windows)
    mass, read, visible = 0.0, 0.0, 0.0
    dense_loss = sparse_loss = 0.0
    for window in report.each("recall", windows):
        hidden, notes = run_whole(model, window, RecallRecorder(policy=policy, dense=True), num_keys=longest)
        mass, dense_loss = mass + attention_mass(notes).sum(-1), dense_loss + text_loss(model, hidden, window)
    for window in report.each("perplexity", windows):
        hidden, notes = run_whole(model, window, policy, num_keys=longest)
        sparse_loss += text_loss(model, hidden, window)
        for counted in map(policy.reads, notes):
            read = read + np.asarray(counted.read, np.float64).sum(1)
            visible = visible + np.asarray(counted.visible, np.float64).sum(1)
    num_predicted = sum(len(window) - 1 for window in windows)
    return {
        "recall": rounded(mass[0] / mass[1]),
        "density": rounded(read / visible),
        "held_out_tokens": num_predicted,
        "perplexity_dense": rounded(math.exp(dense_loss / num_predicted)),
        "perplexity_kascade": rounded(math.exp(sparse_loss / num_predicted)),
    }


def attention_mass(notes: Sequence[RecallState]) -> np.ndarray:
    """Sum over a recorder's chunks the mass on the keys that the policy reads, and on all, [2,L,K]."""
    return np.sum([(own.held, own.total) for own in notes], axis=0, dtype=np.float64)


def text_loss(model: Any, hidden: np.ndarray, window: np.ndarray) -> float:
    """Return the sum of -ln p over the predicted tokens of a window, in nats."""
    return float(score_rows(model, hidden, window, predicting(window)).loss.sum(dtype=np.float64))
