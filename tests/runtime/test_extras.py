"""Bias, reported tokens and guides: what an engine's request may add to sampling."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import save_tiny

from tessera.generate import load
from tessera.runtime.pool import Paging
from tessera.runtime.requests import End, Failure, Request, Token
from tessera.runtime.sampling import GREEDY, Sampling

PROMPT, END = list(range(40, 60)), 257


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(save_tiny(tmp_path_factory.mktemp("extras")))


def run(engine, *requests):
    ids, events = [engine.submit(request) for request in requests], []
    while engine.busy:
        events += engine.step()
    return [[event for event in events if event.id == id] for id in ids]


def request(**options):
    return Request(prompt=PROMPT, **{"max_new_tokens": 6} | options)


class Alternating:
    """Allows even tokens, then odd ones, and so on."""

    def __init__(self):
        self.next, self.taken = 0, []

    def allowed(self):
        return np.arange(264) % 2 == self.next

    def push(self, token):
        assert token % 2 == self.next
        self.taken.append(token)
        self.next = 1 - self.next


class Refusing(Alternating):
    def push(self, token):
        raise ValueError("the grammar has had enough")


def test_reported_tokens_are_the_best_of_the_models_distribution(model):
    [events] = run(model.engine(), request(top_logprobs=5))
    tokens = [event for event in events if isinstance(event, Token)]
    answer = [token.token for token in tokens]
    logits = np.asarray(model.logits([PROMPT + answer])[0], np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for step, token in enumerate(tokens):
        row = logp[len(PROMPT) - 1 + step]
        best = np.argsort(-row)[:5]
        assert [id for id, _ in token.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in token.top], row[best], rtol=1e-4)
        assert token.top[0] == (token.token, pytest.approx(token.logprob, abs=1e-6))


def test_a_bias_moves_the_choice_and_not_the_logprob(model):
    [plain] = run(model.engine(), request(max_new_tokens=1))
    first = plain[0].token
    [banned] = run(model.engine(), request(max_new_tokens=1, bias={first: -np.inf}))
    assert banned[0].token != first
    [forced] = run(model.engine(), request(max_new_tokens=1, bias={77: 100.0}, top_logprobs=1))
    assert forced[0].token == 77
    assert forced[0].top == ((first, pytest.approx(plain[0].logprob, abs=1e-6)),)
    assert forced[0].logprob < plain[0].logprob


def test_penalties_are_the_same_in_generate_and_with_pages_and_spare_the_prompt(model):
    """Every token of a greedy answer is the best one of the penalised scores."""
    penalties = {"frequency_penalty": 0.4, "presence_penalty": 0.3}
    plain, [found] = (
        model.generate([PROMPT], max_new_tokens=20, **GREEDY),
        model.generate([PROMPT], max_new_tokens=20, **GREEDY, **penalties),
    )
    assert found.tokens != plain[0].tokens
    engine = model.engine(slots=1, num_keys=256, paging=Paging(num_pages=20, unit=32, page=16, sizes=(32,)))
    *_, end = run(engine, request(max_new_tokens=20, sampling=Sampling(**penalties)))[0]
    assert end.generation.tokens == found.tokens
    rows = np.asarray(model.logits([PROMPT + found.tokens])[0], np.float64)[len(PROMPT) - 1 :]
    for step, token in enumerate(found.tokens):
        count = np.bincount(found.tokens[:step], minlength=264)
        scores = rows[step] - 0.4 * count - 0.3 * (count > 0)
        assert scores[token] >= scores.max() - 1e-5
        assert found.logprobs[step] == pytest.approx(rows[step, token] - np.log(np.exp(rows[step]).sum()), abs=1e-4)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_guide_restricts_its_own_row_alone(model, lag, temperature):
    """The other requests of the batch give what they give alone, whether the device runs ahead or not."""
    sampling = Sampling(temperature=temperature)
    alone = [run(model.engine(lag=lag), request(seed=seed, sampling=sampling))[0] for seed in (1, 2)]
    free = [request(seed=seed, sampling=sampling) for seed in (1, 2)]
    together = run(model.engine(lag=lag), free[0], request(guide=Alternating, sampling=sampling), free[1])
    assert [[e[1] for e in events[:-1]] for events in (together[0], together[2])] == [
        [e[1] for e in events[:-1]] for events in alone
    ]
    tokens = [event.token for event in together[1] if isinstance(event, Token)]
    assert [token % 2 for token in tokens] == [0, 1, 0, 1, 0, 1][: len(tokens)]
    assert len(tokens) > 2


@pytest.mark.parametrize("paging", [None, Paging(num_pages=20, unit=32, page=16, sizes=(32,))])
@pytest.mark.parametrize("lag", [0, 2])
def test_no_end_token_comes_before_the_minimum_length(model, lag, paging):
    """The end token is the best one at every step; the other requests of the batch end as they do alone."""
    options = {"slots": 3, "num_keys": 128, "paging": paging, "lag": lag}
    ending = request(bias={END: 1e4}, max_new_tokens=9)
    requests = (replace(ending, min_tokens=4), ending, replace(ending, min_tokens=9))
    found = [events[-1].generation for events in run(model.engine(**options), *requests)]
    assert [one.tokens.index(END) if END in one.tokens else None for one in found] == [4, 0, None]
    assert [one.finish_reason for one in found] == ["stop", "stop", "length"]


def test_an_answer_has_the_allowed_tokens_alone(model):
    """The tokens are the model's best among them; the end token is one of them only if it is named."""
    allowed = (5, 90, 200, 263)
    *_, end = run(model.engine(), request(allowed=allowed))[0]
    tokens = end.generation.tokens
    rows = np.asarray(model.logits([PROMPT + tokens])[0])[len(PROMPT) - 1 :]
    assert tokens == [max(allowed, key=row.__getitem__) for row in rows[:6]]
    *_, end = run(model.engine(), request(allowed=(*allowed, END), bias={END: 1e4}, min_tokens=2))[0]
    assert end.generation.tokens[2:] == [END]
    assert set(end.generation.tokens[:2]) <= set(allowed)


class Ending(Alternating):
    """Allows even tokens, then odd ones, then only the end token."""

    def allowed(self):
        if len(self.taken) == 2:
            return np.arange(264) == END
        return super().allowed() & ~np.isin(np.arange(264), (END, 261))  # both end an answer


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"allowed": (4, 7, 11)}, [{4}, {7, 11}, {END}]),  # the end of a guide needs no leave
        ({"min_tokens": 5}, [set(range(0, 264, 2)), set(range(1, 264, 2)), {END}]),
        ({"min_tokens": 2, "allowed": (4, 6, END, 9), "bias": {4: -np.inf}}, [{6}, {9}, {END}]),
        ({"allowed": (4, 6)}, [{4, 6}]),  # no odd token is allowed
        ({"bias": {token: -np.inf for token in range(1, 264, 2)}}, [set(range(0, 264, 2))]),
    ],
)
def test_a_guide_and_the_requests_own_limits_hold_together(model, options, tokens):
    [events] = run(model.engine(), request(guide=Ending, **options))
    found = [event.token for event in events if isinstance(event, Token)]
    assert len(found) == len(tokens)
    assert all(token in allowed for token, allowed in zip(found, tokens))
    if len(tokens) == 3:
        assert events[-1].generation.finish_reason == "stop"
    else:
        assert "leave no token" in str(events[-1].error)


def test_a_guide_that_fails_fails_its_request_alone(model):
    refused, fine = run(model.engine(), request(guide=Refusing), request())
    assert isinstance(refused[-1], Failure)
    assert "had enough" in str(refused[-1].error)
    assert isinstance(fine[-1], End)


def test_a_request_says_which_special_tokens_show(model):
    *_, end = run(model.engine(), request(max_new_tokens=2, bias={259: 1e4}, shown=frozenset({259})))[0]
    assert end.generation.text == "<|user|>" * 2


def test_wrong_extras_are_refused(model):
    with pytest.raises(ValueError, match="bias has token 264"):
        model.engine().submit(request(bias={264: 1.0}))
    with pytest.raises(ValueError, match="allowed has token 264"):
        model.engine().submit(request(allowed=(264,)))
    for options in ({"allowed": (END,), "min_tokens": 1}, {"allowed": (3,), "bias": {3: -np.inf}}):
        with pytest.raises(ValueError, match="leave no token"):
            model.engine().submit(request(**options))
    for options, words in (
        ({"top_logprobs": 21}, "top_logprobs=21"),
        ({"min_tokens": 7}, "min_tokens=7 must be from 0 to max_new_tokens=6"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"allowed": ()}, "allowed is empty"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
    ):
        with pytest.raises(ValueError, match=words):
            request(**options)
