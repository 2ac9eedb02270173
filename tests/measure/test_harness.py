"""The interface that lm_eval calls: likelihoods equal the logits', long prompts are cut, stop strings end answers."""

import jax
import numpy as np
import pytest
from tiny import save_tiny

from tessera import generate
from tessera.measure.judge import harness


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return generate.load(save_tiny(tmp_path_factory.mktemp("harness")))


@pytest.mark.parametrize(("length", "num_scored"), [(12, 3), (12, 11), (400, 1), (512, 300)])
def test_a_likelihood_is_that_of_the_logits(model, length, num_scored):
    tokens = np.random.default_rng(length).integers(0, 256, length).tolist()
    logp = np.asarray(jax.nn.log_softmax(model.logits([tokens])[0]))
    wanted = sum(float(logp[i - 1, tokens[i]]) for i in range(length - num_scored, length))
    found, greedy = harness.log_likelihood(model, tokens, num_scored)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert not greedy


def test_the_best_guesses_are_greedy(model):
    tokens = [5, 6, 7]
    for _ in range(3):
        tokens.append(int(np.asarray(model.logits([tokens]))[0, -1].argmax()))
    assert harness.log_likelihood(model, tokens, 3)[1]
    assert not harness.log_likelihood(model, tokens, 4)[1] or int(tokens[2]) == 7


def test_the_continuation_is_what_is_scored(model):
    whole, scored = harness.split(model, "The key is ", "48213")
    assert scored == 6  # the space counts to the continuation
    assert whole == model.tokenizer.encode("The key is 48213")
    long, scored = harness.split(model, "x" * 600, "48213")
    assert len(long) == 512
    assert scored == 5
    assert harness.split(model, "", "ab")[1] == len(model.tokenizer.encode("ab")) - 1


def test_a_text_longer_than_the_context_is_scored_in_pieces(model):
    text = "abc " * 200
    ids = model.tokenizer.encode(text)
    wanted = sum(harness.log_likelihood(model, p, len(p) - 1)[0] for p in (ids[:512], ids[511:]))
    assert harness.rolling(model, text) == pytest.approx(wanted)


def test_answers_end_at_a_stop_string(model):
    plain = harness.generate_until(model, "hello", {"max_gen_toks": 12})
    assert plain
    stop = plain[4]
    assert (
        harness.generate_until(model, "hello", {"max_gen_toks": 12, "until": [stop, ""]}) == plain[: plain.index(stop)]
    )
    assert len(harness.generate_until(model, "y" * 700, {"until": "never", "max_gen_toks": 4})) <= 8


def test_what_cannot_be_scored_is_refused(model):
    with pytest.raises(ValueError, match="num_scored=3 must be at least 1 and less than the number of tokens, 3"):
        harness.log_likelihood(model, [1, 2, 3], 3)
    with pytest.raises(ValueError, match="513 tokens are more than the context of 512"):
        harness.log_likelihood(model, [1] * 513, 3)
