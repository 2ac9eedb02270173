"""Probabilities of a prompt's own tokens, from the hidden states of its prefill, in which row t predicts token t + 1.

The output head takes up to BLOCK rows at a time, so its memory is BLOCK x vocabulary, whatever the size of the prefill.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from tessera.core.mesh import keep, program
from tessera.models.decoder import logits
from tessera.models.layers import Params
from tessera.runtime.limits import RANKS
from tessera.runtime.requests import Token

BLOCK = 64
"""Maximum number of rows whose logits are computed at a time."""


class RowScores(NamedTuple):
    """Scores of the tokens that follow the rows of one prefill: the ln of their probability, and the R most probable
    tokens after each row, best first, with the ln of theirs.
    """

    logprob: Float32[Array, "rows"]
    ids: Int32[Array, "rows R"]
    best: Float32[Array, "rows R"]


@program()
def score_prompt_rows(params: Params, hidden_1TD: Float[Array, "1 T D"], next_T: Int32[Array, "rows"]) -> RowScores:

    def score(block: tuple[Array, Array]) -> RowScores:
        hidden, following = block
        scores = keep(logits(params, hidden).astype(jnp.float32))
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        own = jnp.take_along_axis(scores, following[:, None], axis=-1) - total
        best, ids = jax.lax.top_k(scores, min(RANKS, scores.shape[-1]))
        return RowScores(own[:, 0], ids.astype(jnp.int32), best - total)

    size = gcd(BLOCK, len(next_T))
    blocks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (hidden_1TD[0], next_T))
    return keep(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(score, blocks)))


def following(prompt: Sequence[int], start: int, size: int) -> Int32[np.ndarray, "rows"]:
    """Return the token after each of `size` rows from position `start` on; 0 where the prompt has none."""
    found = np.zeros(size, np.int32)
    tokens = prompt[start + 1 : start + 1 + size]
    found[: len(tokens)] = tokens
    return found


def prompt_tokens(id: int, prompt: Sequence[int], scored: Mapping[int, RowScores], ranks: int) -> tuple[Token, ...]:
    """Return the prompt's tokens; `scored` has the scores of each prefill, by the position of its first row."""
    found = [Token(id, int(prompt[0]), None, "")]
    for start, end in pairwise([*sorted(scored), len(prompt)]):  # rows past `end` are padding
        scores = RowScores(*(np.asarray(part) for part in scored[start]))
        for row, token in enumerate(prompt[start + 1 : end + 1]):
            top = tuple(zip(scores.ids[row, :ranks].tolist(), scores.best[row, :ranks].tolist()))
            found.append(Token(id, int(token), float(scores.logprob[row]), "", top))
    return tuple(found)
