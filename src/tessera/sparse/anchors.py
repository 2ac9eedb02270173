"""Choose the anchor layers, which score all keys, and map other layers' heads to theirs, as Kascade (arXiv 2512.16391).

This module holds pure mathematics on small arrays. `recording.py` gathers the arrays from a running model;
`calibration/similarity.py` combines both.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from tessera.core.shapes import round_up

PAPER_ANCHORS, PAPER_LAYERS = 5, 32
"""Numbers of anchors and of layers in the paper's plan for Llama-3.1-8B."""


def default_anchors(num_layers: int) -> int:
    """Return the number of anchors in the paper's proportion, 5 of 32 layers, rounded up.

    It is at least 2 in a model of several layers, because the keys that layer 0 selects suit few other layers.
    """
    scaled = round_up(num_layers * PAPER_ANCHORS, PAPER_LAYERS) // PAPER_LAYERS
    return min(max(2, scaled), num_layers)


def captured(mass_KIJ: Float[Array, "K I J"], ids_AKIC: Int32[Array, "A K I C"]) -> Float[Array, "A K K I"]:
    """Sum the probability that each head of this layer puts on the C keys that each head of each layer a chose.

    The result is indexed by layer a, head of a, head of this layer, and query tile.
    """
    heads = [
        jnp.take_along_axis(mass_KIJ[None, None, mine], ids_AKIC, axis=-1).sum(-1) for mine in range(len(mass_KIJ))
    ]
    return jnp.stack(heads, axis=2)


def similarity(
    mass_KIJ: Float[Array, "K I J"],
    ids_AKIC: Int32[Array, "A K I C"],
    own_KIC: Int32[Array, "K I C"],
    always_KI: Float[Array, "K I"] | float = 0.0,
) -> Float[Array, "A K K I"]:
    """Compute how well layer b would do with the keys that each earlier layer a chose, relative to b's own choice.

    For each query tile, sim(a, b) = (P_b[always] + sum(P_b[I_a])) / (P_b[always] + sum(P_b[I_b])). It is 1 if b loses
    nothing, and also if b has no mass at all.

    Args:
        mass_KIJ: P_b, probability in layer b of the keys that a layer may choose from, summed over a query tile's rows.
        ids_AKIC, own_KIC: I_a and I_b, the chosen keys.
        always_KI: P_b of the keys that every layer reads regardless of its choice; mass_KIJ excludes them.
    """
    own = jnp.take_along_axis(mass_KIJ, own_KIC, axis=-1).sum(-1) + always_KI
    found = captured(mass_KIJ, ids_AKIC) + always_KI
    return jnp.where(own > 0, found / jnp.where(own > 0, own, 1.0), 1.0)


def importance(x: Float[Array, "... D"], y: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Return 1 - cos(x, y), how far attention turns the residual stream: |x/|x| - y/|y||^2 / 2, accurate near 0."""

    def unit(z):
        z = z.astype(jnp.float32)
        return z / jnp.maximum(jnp.linalg.norm(z, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)

    return 0.5 * jnp.sum(jnp.square(unit(x) - unit(y)), axis=-1)


def choose_anchors(score_LL: Float[np.ndarray, "L L"], num_anchors: int) -> tuple[int, ...]:
    """Return the M anchors that maximise the sum of score[anchor of l][l] over all layers l; the first is layer 0.

    A dynamic program computes dp[m][j], the best sum over the layers below j with m anchors. With i as the last anchor,

        dp[m][j] = max over i of (dp[m-1][i] + sum over l from i to j-1 of score[i][l])

    Backtracking from dp[M][L] yields the anchors. Ties go to the lower layer. score[a][b] = importance of b times
    similarity(a, b); only a <= b is read.
    """
    score_LL = np.asarray(score_LL, np.float64)
    num_layers = len(score_LL)
    if score_LL.shape != (num_layers, num_layers) or not 1 <= num_anchors <= num_layers:
        raise ValueError(f"{num_anchors=} must be from 1 to the number of layers, and {score_LL.shape=} must be square")
    if not np.isfinite(np.triu(score_LL)).all():
        raise ValueError("score_LL must be finite: the model's attention or residual stream holds NaN or infinity")
    segment = np.concatenate([np.zeros((num_layers, 1)), np.cumsum(np.triu(score_LL), axis=1)], axis=1)
    best = np.full((num_anchors + 1, num_layers + 1), -np.inf)
    last = np.zeros(best.shape, int)
    best[0, 0] = 0.0
    for m in range(1, num_anchors + 1):
        for j in range(m, num_layers + 1):
            total = [best[m - 1, i] + segment[i, j] for i in range(j)]
            last[m, j] = int(np.argmax(total))
            best[m, j] = total[last[m, j]]
    anchors, j = [], num_layers
    for m in range(num_anchors, 0, -1):
        j = last[m, j]
        anchors.append(int(j))
    return tuple(reversed(anchors))


def anchor_of(anchors: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return, for each layer, the anchor whose selection it uses: the last anchor at or before the layer."""
    return tuple(max(a for a in anchors if a <= layer) for layer in range(num_layers))


def best_heads(similarity_LLKK: Float[np.ndarray, "L L K K"]) -> Int32[np.ndarray, "L L K"]:
    """Return, for each pair of layers (a, b) and head of b, the most similar head of a; ties go to the lower head."""
    return np.argmax(np.asarray(similarity_LLKK), axis=2).astype(np.int32)


def mapped(similarity_LLKK: Float[np.ndarray, "L L K K"], heads_LLK: Int32[np.ndarray, "L L K"]) -> np.ndarray:
    """Return layer similarities [a, b]: the mean, over b's heads, of the similarity to the head of a in `heads_LLK`."""
    return np.take_along_axis(np.asarray(similarity_LLKK), heads_LLK[:, :, None, :], axis=2)[:, :, 0].mean(-1)


def head_table(heads_LLK: Int32[np.ndarray, "L L K"], anchors: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return a plan's head_map [L][K]: for each head of a layer, the head of its anchor whose choice it uses."""
    num_layers, _, num_kv_heads = heads_LLK.shape
    return tuple(
        tuple(range(num_kv_heads)) if layer in anchors else tuple(int(h) for h in heads_LLK[anchor, layer])
        for layer, anchor in enumerate(anchor_of(anchors, num_layers))
    )
