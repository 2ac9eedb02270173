"""Choose the next token of every row of a lane, and hand the chosen tokens to the rows' answers."""

import math
import time
from collections import abc
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int32

from tessera.core.mesh import put
from tessera.models.layers import Params
from tessera.runtime.bias import bias_of, guided_bias
from tessera.runtime.prompt_scores import prompt_tokens
from tessera.runtime.requests import End, Event, Failure, Token, explain_not_finite
from tessera.runtime.sampling import Choice, Method, Sampling, Values, choose, fold_seed, token_counts
from tessera.runtime.sequence import Sequence
from tessera.sparse.contract import Reads

NEUTRAL = Sampling()
"""Sampling parameters of a row without a request."""


class Pending(NamedTuple):
    """A step that the device may still be computing. `rows` has one pair (row in the arrays, request) per request."""

    choice: Choice
    reads: abc.Sequence[Reads]
    rows: abc.Sequence[tuple[int, Sequence]]


def pick(scores: Float[Array, "B V"], counts: Array | None, sequences: abc.Sequence[Sequence | None]) -> Choice:
    """Choose one token per row by its request's sampling, seed and step; a row without a request gets any token."""
    samplings = tuple(NEUTRAL if each is None else each.request.sampling for each in sequences)
    method = reduce(or_, {each.request.method for each in sequences if each is not None}, NEUTRAL.method)
    values = values_of(samplings, scores.shape[1])
    seeds = np.array([0 if each is None else fold_seed(each.request.seed) for each in sequences], np.uint32)
    steps = np.array([0 if each is None else each.generated for each in sequences], np.int32)
    bias = bias_of(sequences, scores.shape) if method.extra else None
    return choose(scores, counts if method.penalised else None, seeds, steps, values, bias, method=method)


def counts_of(sequences: abc.Sequence[Sequence], vocab_size: int, mesh: Mesh | None) -> Int32[Array, "B V"] | None:
    """Return the `token_counts` of prompts and answers as the host knows them; None if no request has a penalty."""
    if not any(each.request.method.penalised for each in sequences):
        return None
    prompts, answers = zip(*((each.request.prompt, each.answer.tokens) for each in sequences))
    return put(token_counts(prompts, answers, vocab_size), mesh)


@lru_cache(maxsize=64)  # a batch keeps its requests for many steps
def values_of(samplings: tuple[Sampling, ...], vocab_size: int) -> Values:
    found = Values(*(np.array(column) for column in zip(*(s.values(vocab_size) for s in samplings))))
    for column in found:
        column.flags.writeable = False  # later batches share it
    return found


def hand_out(pending: Pending, params: Params) -> tuple[list[Event], list[Sequence]]:
    """Add one step's tokens to the answers; return the events, and the requests whose logits are not finite."""
    tokens, logprobs = np.asarray(pending.choice.token), np.asarray(pending.choice.logprob)
    ranks = None if pending.choice.ranks is None else [np.asarray(part) for part in pending.choice.ranks]
    reads = [tuple(np.asarray(part, np.float64) for part in call) for call in pending.reads]
    now_s, reason = time.perf_counter(), ""
    events: list[Event] = []
    broken: list[Sequence] = []
    for row, sequence in pending.rows:
        if not sequence.open:
            continue
        token, logprob = int(tokens[row]), float(logprobs[row])
        if not math.isfinite(logprob):
            broken.append(sequence)
            reason = reason or explain_not_finite(params)
            events.append(fail(sequence, ValueError(reason)))
            continue
        count_reads(sequence, reads, row)
        piece = sequence.answer.push(token, logprob, now_s)
        count = sequence.request.top_logprobs
        top = tuple(zip(*(part[row, :count].tolist() for part in ranks))) if count else ()
        events.append(Token(sequence.id, token, logprob, piece, top))
        if sequence.answer.done:
            events.append(_end(sequence))
        elif sequence.guide is not None:
            try:
                sequence.guide.push(token)
                sequence.guided = guided_bias(sequence)
            except ValueError as error:
                events.append(fail(sequence, error))
    return events, broken


def _end(sequence: Sequence) -> End:
    prompt, ranks = sequence.request.prompt, sequence.request.prompt_logprobs
    scored = () if ranks is None else prompt_tokens(sequence.id, prompt, sequence.scored, ranks)
    return End(sequence.id, sequence.answer.generation(sequence.arrived_s), sequence.reused, scored)


def count_reads(sequence: Sequence, reads: abc.Sequence[Reads], row: int) -> None:
    if reads:
        read_L, visible_L = (sum(np.asarray(call[i], np.float64)[:, row] for call in reads) for i in (0, 1))
        sequence.answer.count(read_L, visible_L)


def fail(sequence: Sequence, error: Exception) -> Failure:
    sequence.dropped = True
    return Failure(sequence.id, error)


def warm_choices(methods: abc.Iterable[Method], batch: int, vocab_size: int, mesh: Mesh | None = None) -> int:
    scores = put(np.zeros((batch, vocab_size), np.float32), mesh, None, "vocab")
    counts = put(np.zeros((batch, vocab_size), np.int32), mesh)
    values = Values(*(np.full(batch, value) for value in NEUTRAL.values(vocab_size)))
    seeds, steps = np.zeros(batch, np.uint32), np.zeros(batch, np.int32)
    bias = np.zeros((batch, vocab_size), np.float32)
    done = [
        choose(
            scores,
            counts if m.penalised else None,
            seeds,
            steps,
            values,
            bias if m.extra else None,
            method=m,
        )
        for m in methods
    ]
    return len(jax.block_until_ready(done))
