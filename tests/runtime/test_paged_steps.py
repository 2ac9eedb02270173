"""Steps of an engine with pages: which tokens the host waits for, and what the scheduler learns from a step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_params

from tessera.generate import Model
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.runtime.engine import Engine
from tessera.runtime.pool import Paging
from tessera.runtime.requests import End, Request
from tessera.sparse.baselines import Dense

PAGING = Paging(num_pages=33, page=32, unit=64, sizes=(128, 64), batches=(1, 2))


@pytest.fixture(scope="module")
def model():
    params = jax.tree.map(jnp.asarray, random_params(CONFIG))
    return Model(config=CONFIG, params=params, tokenizer=byte_tokenizer(), policy=Dense())


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


def engine_of(model: Model, lag: int, sizes: tuple[int, ...] = (128, 64)) -> Engine:
    return model.engine(slots=2, num_keys=CONFIG.max_positions, paging=replace(PAGING, sizes=sizes), lag=lag)


def answering(model: Model, **options) -> Engine:
    """Return an engine in which request 0 is answering."""
    engine = engine_of(model, 0, **options)
    engine.submit(Request(prompt=prompt(20), max_new_tokens=40))
    while not engine.step():
        pass
    return engine


def test_no_token_waits_for_the_prefill_of_another_prompt(model):
    engine = answering(model)
    engine.submit(Request(prompt=prompt(64), max_new_tokens=4))
    assert [[event.id for event in engine.step()] for _ in range(3)] == [[0], [1], [0, 1]]


@pytest.mark.parametrize(("lag", "expected"), [(0, [0] * 5), (1, [1, 1, 1, 1, 2, 0])])
def test_without_lag_no_prefill_runs_ahead_of_the_host(model, lag, expected):
    engine = engine_of(model, lag, sizes=(64,))
    engine.submit(Request(prompt=prompt(300), max_new_tokens=1))
    pending = []
    while engine.busy:
        engine.step()
        pending.append(len(engine.lane._sent))
    assert pending == expected


class Counting:
    """Guide that allows one token at each step: 65, 66, ... It sees each token before the next one is chosen."""

    def __init__(self):
        self.next = 65

    def allowed(self):
        return np.arange(CONFIG.vocab_size) == self.next

    def push(self, token):
        assert token == self.next
        self.next += 1


@pytest.mark.parametrize("lag", [0, 2])
def test_a_guide_beside_other_requests_sees_every_token_in_time(model, lag):
    free = Request(prompt=prompt(130), max_new_tokens=20)
    engine = engine_of(model, lag)
    [expected] = ends(engine_of(model, lag), free)
    found = ends(engine, free, Request(prompt=prompt(70), max_new_tokens=9, guide=Counting), free)
    assert found[1] == [*range(65, 74)]
    assert found[0] == found[2] == expected


def ends(engine: Engine, *requests: Request) -> list[list[int]]:
    """Run requests to their ends and return the tokens of each."""
    ids, found = [engine.submit(request) for request in requests], {}
    while engine.busy:
        found |= {event.id: event.generation.tokens for event in engine.step() if isinstance(event, End)}
    return [found[id] for id in ids]
