"""Ask many questions about one document: prefill the document once per policy, and start each question from that cache.

A question's rows follow the document in the cache and overwrite the previous question's. Then the answer's tokens run
one at a time through the policy's decode calls. Each call is fed the expected token (teacher forcing). As long as the
top-1 token is the expected one, this equals greedy decoding. An answer counts as found only if all its top-1 tokens are
the expected ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float

from tessera.core.shapes import round_up
from tessera.generate import Model
from tessera.measure.judge.probes import ROOM, Document, Question
from tessera.runtime import score
from tessera.runtime.compilation import CHUNK_UNIT
from tessera.runtime.step import read_head
from tessera.sparse.contract import Policy, Reads


class Outcome(NamedTuple):
    """One policy's result on one question: whether every asked token of the answer is the top-1 token, ln of their
    joint probability, and how many of them are the top-1 token, each given the expected tokens before it."""

    found: bool
    logprob: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One policy's outcomes on one document, one per question, in order.

    `density` is keys read / keys visible per layer, [L], over document, questions and answers.
    """

    outcomes: tuple[Outcome, ...]
    density: tuple[float, ...]


class Runner:
    """The cache of one sequence under a policy, and counts of the keys that the policy has read."""

    def __init__(self, model: Model, policy: Policy, num_keys: int):
        self.model, self.policy = model, policy
        self.query_tile = policy.query_tile
        if ROOM % self.query_tile:
            raise ValueError(f"query_tile={self.query_tile} must divide {ROOM}: questions start at multiples of {ROOM}")
        self.held = score.Run(model, policy, num_keys)
        self.pending: list[Reads] = []

    def run(self, tokens: Sequence[int], start: int, rows: int) -> Float[Array, "T D"]:
        """Run tokens, padded to `rows` rows, at position `start`; return the rows' hidden states."""
        return self._count(self.held.call(tokens, start, rows)).hidden

    def fill(self, tokens: Sequence[int]) -> Iterator[score.Chunk]:
        """Prefill from position 0; yield every call's result."""
        return map(self._count, self.held.fill(tokens))

    def _count(self, chunk: score.Chunk) -> score.Chunk:
        reads = chunk.reads
        if reads is not None:
            self.pending.append(reads)
        return chunk

    def ask(self, question: Question, start: int) -> Outcome:
        """Run a question at position `start`, a multiple of the query tile, and decode its answer."""
        suffix, answer = question.suffix, question.answer
        hidden = self.run(suffix, start, round_up(len(suffix), max(self.query_tile, CHUNK_UNIT)))[len(suffix) - 1]
        total, right, wanted = 0.0, 0, 0
        for index, token in enumerate(answer):
            scores = np.asarray(read_head(self.model.params, hidden[None])[0], np.float64)
            if not question.given or not question.given[index]:
                top = scores.max()
                total += float(scores[token] - top - np.log(np.exp(scores - top).sum()))
                right += int(scores.argmax()) == token
                wanted += 1
            if index + 1 < len(answer):
                hidden = self._count(self.held.decode(token, start + len(suffix) + index)).hidden[0]
        return Outcome(right == wanted, total, right)

    def density(self) -> tuple[float, ...]:
        """Return keys read / keys visible per layer since the cache was allocated; () if the policy does not count."""
        if not self.pending:
            return ()
        read, visible = (sum(np.asarray(reads[i], np.float64)[:, 0] for reads in self.pending) for i in (0, 1))
        return tuple((read / visible).tolist())


def run_trials(
    model: Model, policy: Policy, documents: Sequence[Document], *, num_keys: int | None = None
) -> list[Answers]:
    """Ask every question of every document under a policy, with its cross-overs of prefill and decode.

    The cache holds `num_keys` keys, by default as many as the longest document needs. Each size costs a compilation, so
    pass one number for documents of several lengths.
    """
    num_keys = max(document.length for document in documents) if num_keys is None else num_keys
    found = []
    for document in documents:
        runner = Runner(model, policy, num_keys)
        for _ in runner.fill(document.prefix):
            pass
        outcomes = tuple(runner.ask(question, len(document.prefix)) for question in document.questions)
        found.append(Answers(outcomes=outcomes, density=runner.density()))
    return found
