"""Choose the next token of every row of a lane, and hand the chosen tokens to the rows' answers."""

import math
import time
from collections.abc import Iterable, Sequence
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
from tessera.runtime.requests import End, Event, Failure, Ticket, Token, explain_not_finite
from tessera.runtime.sampling import Choice, Method, Sampling, Values, choose, fold_seed, token_counts
from tessera.sparse.contract import Reads

NEUTRAL = Sampling()
"""Sampling parameters of a row without a request."""


class Pending(NamedTuple):
    """A step that the device may still be computing. `rows` has one pair (row in the arrays, request) per request."""

    choice: Choice
    reads: Sequence[Reads]
    rows: Sequence[tuple[int, Ticket]]


def pick(scores: Float[Array, "B V"], counts: Array | None, tickets: Sequence[Ticket | None]) -> Choice:
    """Choose one token per row by its request's sampling, seed and step.

    A row without a request gets an arbitrary token.
    """
    samplings = tuple(NEUTRAL if ticket is None else ticket.request.sampling for ticket in tickets)
    method = reduce(or_, {ticket.request.method for ticket in tickets if ticket is not None}, NEUTRAL.method)
    values = values_of(samplings, scores.shape[1])
    seeds = np.array([0 if ticket is None else fold_seed(ticket.request.seed) for ticket in tickets], np.uint32)
    steps = np.array([0 if ticket is None else ticket.chosen for ticket in tickets], np.int32)
    bias = bias_of(tickets, scores.shape) if method.extra else None
    return choose(scores, counts if method.penalised else None, seeds, steps, values, bias, method=method)


def counts_of(tickets: Sequence[Ticket], vocab_size: int, mesh: Mesh | None) -> Int32[Array, "B V"] | None:
    """Return the `token_counts` of prompts and answers as the host knows them; None if no request has a penalty."""
    if not any(ticket.request.method.penalised for ticket in tickets):
        return None
    prompts, answers = zip(*((ticket.request.prompt, ticket.answer.tokens) for ticket in tickets))
    return put(token_counts(prompts, answers, vocab_size), mesh)


@lru_cache(maxsize=64)  # a batch keeps its requests for many steps
def values_of(samplings: tuple[Sampling, ...], vocab_size: int) -> Values:
    """Return the sampling parameters of a batch, one value per row."""
    found = Values(*(np.array(column) for column in zip(*(s.values(vocab_size) for s in samplings))))
    for column in found:
        column.flags.writeable = False  # later batches share it
    return found


def hand_out(pending: Pending, params: Params) -> tuple[list[Event], list[Ticket]]:
    """Wait for one step and add its tokens to the answers of its requests.

    Returns:
        the new events, and the requests that failed because their logits are not finite.
    """
    tokens, logprobs = np.asarray(pending.choice.token), np.asarray(pending.choice.logprob)
    ranks = None if pending.choice.ranks is None else [np.asarray(part) for part in pending.choice.ranks]
    reads = [tuple(np.asarray(part, np.float64) for part in call) for call in pending.reads]
    now_s, reason = time.perf_counter(), ""
    events: list[Event] = []
    broken: list[Ticket] = []
    for row, ticket in pending.rows:
        if not ticket.open:
            continue
        token, logprob = int(tokens[row]), float(logprobs[row])
        if not math.isfinite(logprob):
            broken.append(ticket)
            reason = reason or explain_not_finite(params)
            events.append(fail(ticket, ValueError(reason)))
            continue
        count_reads(ticket, reads, row)
        piece = ticket.answer.push(token, logprob, now_s)
        count = ticket.request.top_logprobs
        top = tuple(zip(*(part[row, :count].tolist() for part in ranks))) if count else ()
        events.append(Token(ticket.id, token, logprob, piece, top))
        if ticket.answer.done:
            events.append(_end(ticket))
        elif ticket.guide is not None:
            try:
                ticket.guide.push(token)
                ticket.guided = guided_bias(ticket)
            except ValueError as error:
                events.append(fail(ticket, error))
    return events, broken


def _end(ticket: Ticket) -> End:
    prompt, ranks = ticket.request.prompt, ticket.request.prompt_logprobs
    scored = () if ranks is None else prompt_tokens(ticket.id, prompt, ticket.scored, ranks)
    return End(ticket.id, ticket.answer.generation(ticket.started_s), ticket.reused, scored)


def count_reads(ticket: Ticket, reads: Sequence[Reads], row: int) -> None:
    """Add the key counts of one row, from one or more calls, to the request's answer."""
    if reads:
        read_L, visible_L = (sum(np.asarray(call[i], np.float64)[:, row] for call in reads) for i in (0, 1))
        ticket.answer.count(read_L, visible_L)


def fail(ticket: Ticket, error: Exception) -> Failure:
    """Mark a request as dropped and return its Failure event."""
    ticket.dropped = True
    return Failure(ticket.id, error)


def warm_choices(methods: Iterable[Method], batch: int, vocab_size: int, mesh: Mesh | None = None) -> int:
    """Run the sampling program of every method once; return the number of programs."""
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
