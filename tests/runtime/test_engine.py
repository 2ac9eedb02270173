"""The engine: a request's answer does not change when other requests join, leave, are cancelled or fail."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG as TINY
from tiny import PLAN, random_params

from tessera.core import memory
from tessera.generate import Model
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.runtime.answers import Generation
from tessera.runtime.engine import Engine
from tessera.runtime.requests import End, Event, Failure, Request, Token, explain_not_finite
from tessera.runtime.sampling import Sampling
from tessera.runtime.step import needed
from tessera.sparse.baselines import Dense
from tessera.sparse.kascade import Kascade

CONFIG = replace(TINY, tie_embeddings=False, max_positions=256)
POLICIES = {"dense": Dense(), "kascade": Kascade.from_plan(PLAN)}
SIZES, NUM_KEYS = (64,), 256  # one size each, so that tests share programs


@pytest.fixture(scope="module")
def model():
    return Model(
        config=CONFIG,
        params=jax.tree.map(jnp.asarray, random_params(CONFIG)),
        tokenizer=byte_tokenizer(),
        policy=Dense(),
    )


def engine_of(model: Model, attention: str = "dense", **options) -> Engine:
    options = {"slots": 2, "num_keys": NUM_KEYS, "sizes": SIZES} | options
    return replace(model, policy=POLICIES[attention]).engine(**options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((length, seed)).integers(0, 256, length).tolist()


def alone(model: Model, request: Request, attention: str = "dense") -> Generation:
    engine = engine_of(model, attention)
    engine.submit(request)
    [end] = engine.drain()
    return end.generation


def check_same(found: Generation, expected: Generation) -> None:
    assert (found.tokens, found.text, found.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
    assert found.layer_density == pytest.approx(expected.layer_density, abs=1e-6)


def steps(engine: Engine, count: int) -> list[Event]:
    return [event for _ in range(count) for event in engine.step()]


def ends(events: Sequence[Event]) -> dict[int, Generation]:
    return {event.id: event.generation for event in events if isinstance(event, End)}


MIXTURE = (
    Request(prompt=prompt(150), max_new_tokens=12),
    Request(prompt=prompt(130), max_new_tokens=4, sampling=Sampling(temperature=0.9, top_k=40), seed=3),
    Request(prompt=prompt(20), max_new_tokens=9, sampling=Sampling(temperature=1.0), seed=4),
    Request(prompt=prompt(140), max_new_tokens=3, sampling=Sampling(repetition_penalty=1.7)),
    Request(prompt=prompt(9), max_new_tokens=6, sampling=Sampling(temperature=0.7, repetition_penalty=1.3), seed=-5),
    Request(prompt=prompt(11), max_new_tokens=12, sampling=Sampling(frequency_penalty=1.5, presence_penalty=0.5)),
)
"""Requests with every sampling method, some below the plan's cross-over and some above."""


@pytest.mark.parametrize(
    ("attention", "lag"),
    # under kascade the short requests run dense
    [pytest.param("dense", 0, marks=pytest.mark.exhaustive), ("kascade", 0), ("kascade", 2)],
)
def test_requests_that_join_and_leave_midway_get_the_tokens_that_they_get_alone(model, attention, lag):
    engine = engine_of(model, attention, lag=lag)
    events: list[Event] = []
    for request in MIXTURE:
        engine.submit(request)
        events += steps(engine, 2)
    while engine.busy:
        events += engine.step()
    found = ends(events)
    assert sorted(found) == list(range(len(MIXTURE)))
    for id, request in enumerate(MIXTURE):
        check_same(found[id], alone(model, request, attention))
        mine = [event for event in events if event.id == id]
        assert isinstance(mine[-1], End)
        assert [event.token for event in mine[:-1]] == found[id].tokens
        assert "".join(event.text for event in mine[:-1]) == found[id].text
    order = [event.id for event in events if isinstance(event, End)]
    assert order != sorted(order)  # a later request ended first: it did not wait for the earlier batch


def test_dense_and_sparse_requests_answer_in_turns(model):
    engine = engine_of(model, "kascade")
    short, long = Request(prompt=prompt(20), max_new_tokens=9), Request(prompt=prompt(150), max_new_tokens=5)
    engine.submit(short)
    engine.submit(long)
    events = []
    while 0 not in ends(events):
        events += engine.step()
    order = [event.id for event in events if isinstance(event, Token)]
    assert order[-4:] == [0, 1, 0, 0] or order[-4:-1] == [1, 0, 1], order
    assert [engine.lane.pool.decode_policy_at(n) for n in (20, 150)] == [Dense(), POLICIES["kascade"]]
    found = ends(events) | {end.id: end.generation for end in engine.drain()}
    assert found[0].density == 1.0
    assert found[1].density < 1.0
    check_same(found[0], alone(model, short, "kascade"))
    check_same(found[1], alone(model, long, "kascade"))


def test_an_answer_names_the_policies_of_its_first_and_last_token(model):
    policy = replace(POLICIES["kascade"], decode_crossover=1000)
    engine = replace(model, policy=policy).engine(slots=1, num_keys=NUM_KEYS, sizes=SIZES)
    engine.submit(Request(prompt=prompt(150), max_new_tokens=2))
    engine.step()
    assert engine.policies_of(150, 1) == {policy}
    assert engine.policies_of(150, 2) == {policy, Dense()}
    assert engine.policies_of(20, 2) == {Dense()}


@pytest.mark.parametrize("after", [0, 1, 3, 5], ids=["waiting", "joining", "joined", "decoding"])
def test_a_cancelled_request_frees_its_row(model, after):
    engine = engine_of(model, slots=1)
    first, second = MIXTURE[0], MIXTURE[1]
    gone, kept = engine.submit(first), engine.submit(second)
    steps(engine, after)
    partial = engine.cancel(gone)
    assert partial.finish_reason == "interrupted"
    assert partial.tokens == alone(model, first).tokens[: max(after - 2, 0)]
    events = steps(engine, 4)
    assert [event.id for event in events] == [kept, kept]  # three steps of prefill, then one token
    found = ends(events) | {end.id: end.generation for end in engine.drain()}
    check_same(found[kept], alone(model, second))
    assert not engine.busy
    with pytest.raises(KeyError):
        engine.cancel(gone)


def test_cancelling_one_of_a_joint_prefill_leaves_the_other(model):
    engine = engine_of(model)
    first, second = engine.submit(MIXTURE[0]), engine.submit(MIXTURE[1])
    engine.step()
    engine.cancel(first)
    [end] = engine.drain()
    assert end.id == second
    check_same(end.generation, alone(model, MIXTURE[1]))


def test_scores_that_are_not_finite_fail_one_request(model):
    """Token 7's embedding is NaN, so a prompt that ends with it fails; its row then serves another request."""
    broken = replace(model, params=replace(model.params, embed=model.params.embed.at[7].set(jnp.nan)))
    good = [replace(r, prompt=[token if token != 7 else 8 for token in r.prompt]) for r in MIXTURE]
    bad = replace(good[1], prompt=[*good[1].prompt[:-1], 7])
    engine = engine_of(broken)
    kept, failed = engine.submit(good[0]), engine.submit(bad)  # one prefill for both
    later = engine.submit(good[2])
    events = []
    while engine.busy:
        events += engine.step()
    [failure] = [event for event in events if isinstance(event, Failure)]
    assert failure.id == failed
    assert isinstance(failure.error, ValueError)
    assert "not finite: its weights params.embed hold NaN or inf" in str(failure.error)
    check_same(ends(events)[kept], alone(broken, good[0]))
    check_same(ends(events)[later], alone(broken, good[2]))
    engine.submit(bad)
    with pytest.raises(ValueError, match="not finite"):
        list(engine.drain())


def test_a_request_without_memory_fails_alone(model, monkeypatch):
    """Memory may be short when the lane opens, or later, when a row is copied for the prefill."""
    engine = engine_of(model)
    large = replace(MIXTURE[0], prompt=prompt(250))
    for midway in (False, True):
        kept = engine.submit(MIXTURE[2])
        events = steps(engine, 2) if midway else []
        failed = engine.submit(large)
        rows = 1 if midway else 2
        sizes = {"batch": rows, "num_keys": NUM_KEYS, "num_tokens": len(large.prompt)}
        size = needed(CONFIG, dtype="float32", host=True, **sizes).beyond_weights
        with monkeypatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda device, size=size: size - 1)
            while engine.busy:
                events += engine.step()
        [failure] = [event for event in events if isinstance(event, Failure)]
        assert failure.id == failed
        assert isinstance(failure.error, MemoryError)
        check_same(ends(events)[kept], alone(model, MIXTURE[2]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "the prompt is an empty token list"),
        ({"prompt": [1] * 257}, "the prompt has 257 tokens but the model's context is 256"),
        ({"prompt": [1, 264]}, "the prompt holds token 264, outside the model's vocabulary of 264"),
        ({"prompt": [-1]}, "the prompt holds token -1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"stop": ("",)}, "must hold texts that are not empty"),
    ],
)
def test_what_cannot_run_is_refused_and_the_engine_goes_on(model, change, words):
    engine = engine_of(model)
    with pytest.raises(ValueError, match=words):
        engine.submit(replace(MIXTURE[2], **change))
    assert not engine.busy
    assert engine.step() == []


def test_a_stop_text_needs_a_tokenizer(model):
    with pytest.raises(ValueError, match="stop=.* needs a tokenizer"):
        engine_of(replace(model, tokenizer=None)).submit(replace(MIXTURE[2], stop=("x",)))


def test_the_shortest_and_the_longest_prompts(model):
    """A prompt of one token, a full context, and an answer that fills the context; its last token is not fed back."""
    engine = engine_of(model)
    lengths = {1: 4, 256: 1, 254: 3}
    for length in lengths:
        engine.submit(Request(prompt=prompt(length), max_new_tokens=4))
    found = {end.generation.prompt_tokens: len(end.generation.tokens) for end in engine.drain()}
    assert found == lengths


def test_a_longer_request_grows_the_cache_of_running_ones(model):
    engine = engine_of(model, num_keys=1)
    short, long = replace(MIXTURE[2], max_new_tokens=20), MIXTURE[0]
    engine.submit(short)
    events = steps(engine, 4)
    before = engine.lane.pool.page
    engine.submit(long)
    while engine.busy:
        events += engine.step()
    assert before == 128 < engine.lane.pool.page
    for id, request in enumerate((short, long)):
        check_same(ends(events)[id], alone(model, request))


@pytest.mark.parametrize("attention", ["dense", "kascade"])
def test_a_free_row_keeps_its_prompt_for_the_next_with_the_same_prefix(model, attention):
    """Decode steps of the other row write into every row, yet the free row keeps its prompt; only that is reused."""
    engine = engine_of(model, attention)
    engine.submit(Request(prompt=prompt(160, seed=9), max_new_tokens=60))
    first = Request(prompt=prompt(150), max_new_tokens=5)
    engine.submit(first)
    events = []
    while 1 not in ends(events):
        events += engine.step()
    events += steps(engine, 5)
    longer = Request(prompt=first.prompt + ends(events)[1].tokens + prompt(30, seed=2), max_new_tokens=5)
    id = engine.submit(longer)
    while engine.busy:
        events += engine.step()
    [end] = [event for event in events if isinstance(event, End) and event.id == id]
    assert end.reused_tokens == 128
    expected = alone(model, longer, attention)
    assert end.generation.tokens == expected.tokens
    np.testing.assert_allclose(end.generation.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)


def test_nothing_compiles_after_warm_up(model, nothing_compiles):
    """A context and a slot count that no other test has: their programs would hide what warm-up leaves out."""
    model = replace(model, config=replace(CONFIG, max_positions=NUM_KEYS - 1))
    engine = engine_of(model, "kascade", slots=3)
    engine.warm([request.sampling for request in MIXTURE])
    with nothing_compiles():
        for number, request in enumerate(MIXTURE * 2):
            engine.submit(replace(request, seed=number))
            steps(engine, 1 + number % 3)
        engine.cancel(number)
        list(engine.drain())


def test_progress_counts_the_prompt_tokens_that_the_device_has_computed(model):
    """Prompt tokens whose keys are in the cache do not count."""
    engine, seen = engine_of(model, slots=1), []
    for expected in ([64, 128, 192, 200], [8]):  # the second time, 192 tokens are in the cache
        engine.submit(Request(prompt=prompt(200), max_new_tokens=3))
        list(engine.drain(progress=lambda *counts: seen.append(counts)))
        assert seen == [(done, expected[-1]) for done in expected]
        seen.clear()


@pytest.mark.parametrize(("dtype", "advice"), [("bfloat16", "load it with dtype='float32'"), ("float32", "download")])
def test_scores_that_are_not_finite_get_advice_that_can_help(model, dtype, advice):
    assert advice in explain_not_finite(jax.tree.map(lambda leaf: leaf.astype(dtype), model.params))


def test_chunks_are_cut_at_multiples_of_the_query_tile(model):
    tiled = replace(POLICIES["kascade"], query_tile=48)
    sizes = [model.pool(policy, num_keys=1).sizes for policy in (Dense(), tiled)]
    assert sizes == [(1024, 256, 64), (768, 192)]
