"""What other programs send: lm_eval's scoring of prompts, `tessera chat --url`, and the page in a browser."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from live_server import KEY, start, tiny_model

from tessera.runtime.step import score_tokens
from tessera.sparse.baselines import Dense


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def running(model):
    found = start(model, keys=(KEY,))
    yield found
    found.close()


def logprobs_of(model, tokens):
    """Return ln p of every next token in a window, from one call without a cache."""
    found, _ = score_tokens(
        model.params, jnp.array([tokens]), jnp.array([len(tokens)]), config=model.config, policy=Dense()
    )
    return np.asarray(jax.nn.log_softmax(found[0]))


# --- lm_eval


def test_lm_eval_gets_the_probability_of_every_prompt_token(running, model):
    """Send the body of lm_eval's `local-completions` and read the response as its `parse_logprobs` does."""
    prompts = [model.tokenizer.encode("The door is red, and the key is blue."), list(range(40, 90))]
    compiled = running.metric("tessera:recompiles_total")
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    for limit in (1, 0):
        found = running.client.completions.create(**body | {"max_tokens": limit}, echo=True)
        assert found.usage.completion_tokens == 2 * limit
        for prompt, choice in zip(prompts, sorted(found.choices, key=lambda choice: choice.index), strict=True):
            logp, given = logprobs_of(model, prompt), choice.logprobs
            assert len(given.tokens) == len(given.top_logprobs) == len(prompt) + limit
            assert given.token_logprobs[0] is given.top_logprobs[0] is None
            scored = given.token_logprobs[1 : len(prompt)]
            np.testing.assert_allclose(scored, logp[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)
            greedy = [own == max(top.values()) for own, top in zip(scored, given.top_logprobs[1:])]
            assert greedy == (logp[: len(prompt) - 1].argmax(-1) == prompt[1:]).tolist()
            assert choice.text.startswith(model.tokenizer.decode(prompt, skip_special=False))
            assert "".join(given.tokens) == choice.text
    assert running.metric("tessera:recompiles_total") == compiled


def test_an_echo_without_probabilities_repeats_the_prompt(running):
    plain = running.client.completions.create(model="tiny", prompt="a door", max_tokens=5, temperature=0)
    found = running.client.completions.create(model="tiny", prompt="a door", max_tokens=5, temperature=0, echo=True)
    assert found.choices[0].text == "a door" + plain.choices[0].text
    assert found.choices[0].logprobs is None
    whole = running.client.completions.create(model="tiny", prompt=[65] * 256, max_tokens=0, echo=True)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("A" * 256, "length")
