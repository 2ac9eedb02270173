"""All roads from a prompt to a token, and a reference that states the rule of positions in its own words."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from batch import Batch
from tiny import PLAN

from tessera.chat import Chat
from tessera.core.mesh import mesh_of, num_stripes
from tessera.generate import Model
from tessera.runtime.answers import Generation
from tessera.runtime.pool import Paging
from tessera.runtime.requests import Request
from tessera.runtime.sampling import Sampling
from tessera.runtime.step import read_head
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade

UNIT, NEW = 128, 12
"""Length of every prefill chunk, and of every answer."""
PLANNED = Kascade.from_plan(replace(PLAN, crossover_tokens=UNIT))
POLICIES = {
    "dense": Dense(),
    "plan": PLANNED,
    "decode later": replace(PLANNED, decode_crossover=200),
    "decode never": replace(PLANNED, decode_crossover=10_000),
    "decode always": replace(PLANNED, decode_crossover=0),
}
LENGTHS = {"below": 60, "up to the boundary": UNIT - 1, "across in decode": UNIT - 5, "across": 195, "above": 300}
"""Prompt lengths on each side of the cross-over. All prompts begin alike, so some find keys of others."""
PAGING = Paging(num_pages=30, page=64, unit=UNIT, sizes=(UNIT,), batches=(3,))


class Answer(NamedTuple):
    """What a road gives for one prompt."""

    tokens: list[int]
    logprobs: list[float]
    density: float


def prompt(length: int) -> list[int]:
    return np.random.default_rng(5).integers(33, 120, length).tolist()


def answer_of(generation: Generation) -> Answer:
    return Answer(generation.tokens, generation.logprobs, generation.density)


def policy_of(policy: Policy, position: int, *, decode: bool) -> Policy:
    """Return the policy of a position: the rule that every road must follow."""
    if isinstance(policy, Dense):
        return policy
    own = policy.decode_crossover if decode else None
    return policy if position >= (policy.crossover_tokens if own is None else own) else Dense()


def reference(model: Model, tokens: list[int]) -> Answer:
    """Answer greedily, one sequence alone, each chunk and token under the policy of its position."""
    batch = Batch(model.params, model.config, model.policy, rows=1, num_keys=512, size=UNIT)
    counted, found, logprobs = [], [], []
    for start in range(0, len(tokens), UNIT):
        batch.policy = policy_of(model.policy, start, decode=False)
        hidden, reads = batch.chunk([tokens[start : start + UNIT]], start)
        counted.append(reads)
    scores = read_head(model.params, hidden.last)
    for position in range(len(tokens), len(tokens) + NEW):
        found.append(int(np.asarray(scores).argmax()))
        logprobs.append(float(np.asarray(jax.nn.log_softmax(scores[0]))[found[-1]]))
        if len(found) < NEW:
            batch.policy = policy_of(model.policy, position, decode=True)
            scores, [reads] = batch.decode(np.array(found[-1:], np.int32), np.array([position], np.int32))
            counted.append(reads)
    read, visible = (sum(float(np.asarray(part).sum()) for part in parts) for parts in zip(*counted))
    return Answer(found, logprobs, read / visible)


def by_engine(model: Model, lengths: list[int], *, crowd: bool, paged: bool) -> list[Answer]:
    """Ask an engine, each prompt alone in a new engine, or all in one, where each joins while others answer."""
    options = {"slots": 3, "num_keys": 512, **({"paging": PAGING} if paged else {"sizes": (UNIT,)})}
    requests = [Request(prompt=prompt(length), max_new_tokens=NEW, ignore_eos=True) for length in lengths]
    engines = [model.engine(**options)] * len(requests) if crowd else [model.engine(**options) for _ in requests]
    ends = {}
    for engine, request in zip(engines, requests):
        engine.submit(replace(request, prompt_logprobs=0))  # which reuses no keys, so that it counts all
        if crowd:
            ends |= {event.id: event for event in engine.step() if hasattr(event, "generation")}
            continue
        [end] = engine.drain()
        ends[len(ends)] = end
    ends |= {end.id: end for end in engines[-1].drain()}
    return [answer_of(ends[number].generation) for number in range(len(requests))]


def by_generate(model: Model, lengths: list[int]) -> list[Answer]:
    return [answer_of(each) for each in model.generate([prompt(n) for n in lengths], max_new_tokens=NEW)]


def by_chat(model: Model, text: str, turns: int) -> Iterator[tuple[Answer, Answer]]:
    """Yield what each turn of a conversation gives, and what `generate` gives for the same tokens."""
    chat = Chat(model, Sampling(), max_new_tokens=NEW)
    for _ in range(turns):
        messages = [*chat.messages, {"role": "user", "content": text}]
        reply = chat.ask(text)
        [expected] = model.generate([model.tokenizer.encode_chat(messages)], max_new_tokens=NEW)
        yield answer_of(reply.generation), answer_of(expected)


def check(found: Answer, expected: Answer, atol: float = 1e-5) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=atol)
    assert abs(found.density - expected.density) < 1e-6, (found.density, expected.density)


def check_engines(model: Model) -> None:
    """Compare every engine that the mesh allows with the reference, and an engine alone and in a crowd bit by bit."""
    lengths = list(LENGTHS.values())
    expected = [reference(model, prompt(length)) for length in lengths]
    for paged in (False, True) if num_stripes(mesh_of(model.params)) == 1 else (False,):
        alone, crowd = (by_engine(model, lengths, crowd=crowd, paged=paged) for crowd in (False, True))
        assert alone == crowd  # the programs are the same, and so are the bits
        for one, other in zip(alone, expected):
            check(one, other)
