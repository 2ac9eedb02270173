"""One road, one rule: `generate`, `chat`, `logits` and the serving engine give the same answers and read as many keys.

What a token reads depends on its position. `roads.reference` states the rule in its own words.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import roads
from emitters import fast_child
from roads import LENGTHS, NEW, POLICIES, prompt
from tiny import CONFIG, save_tiny

import tessera
from tessera.generate import Model
from tessera.runtime.pool import Pool
from tessera.runtime.score import run_whole
from tessera.sparse.baselines import Dense


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Model:
    config = replace(CONFIG, num_layers=2, eos_ids=())
    return tessera.load(save_tiny(tmp_path_factory.mktemp("roads"), config, plan=False))


def planned(model: Model, name: str) -> Model:
    policy = POLICIES[name]
    head_map = getattr(policy, "head_map", ())[:2]
    return replace(model, policy=replace(policy, head_map=head_map) if head_map else policy)


@pytest.mark.parametrize(
    "name", ["dense", "plan", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in list(POLICIES)[2:])]
)
def test_engines_follow_the_position(tiny, name):
    """Contiguous and paged, alone and in a crowd, on both sides of the cross-over and across it."""
    roads.check_engines(planned(tiny, name))


@pytest.mark.parametrize("name", POLICIES)
def test_generate_follows_the_position(tiny, name):
    model, lengths = planned(tiny, name), list(LENGTHS.values())
    for found, length in zip(roads.by_generate(model, lengths), lengths):
        expected = roads.reference(model, prompt(length))
        roads.check(found, expected)
        positions = [(n, False) for n in range(length)] + [(length + n, True) for n in range(NEW - 1)]
        sparse = any(roads.policy_of(model.policy, n, decode=decode) != Dense() for n, decode in positions)
        assert (expected.density < 1) == sparse


def test_usage_says_what_decode_read(tiny):
    """The plan's prefill is sparse and its decode dense: the answer's own share is named."""
    [found] = planned(tiny, "decode never").generate([prompt(300)], max_new_tokens=NEW)
    assert found.density < 1 == found.decode_density
    assert found.usage().endswith(f"{found.density:.0%} of keys read, all by the answer")
    [found] = planned(tiny, "dense").generate([prompt(300)], max_new_tokens=NEW)
    assert found.usage().endswith("100% of keys read")


@pytest.mark.parametrize("name", ["dense", "plan"])
def test_a_conversation_is_generate_on_its_text(tiny, name):
    """The first turn runs the same programs: the same bits. Later turns reuse keys, so they read fewer."""
    model = planned(tiny, name)
    pairs = list(roads.by_chat(model, "tell me more " * 7, 3))
    assert pairs[0][0] == pairs[0][1]
    for found, expected in pairs:
        assert found.tokens == expected.tokens
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["dense", "plan", "decode never"])
@pytest.mark.parametrize("length", [LENGTHS["below"], LENGTHS["above"]])
def test_logits_and_scores_are_those_of_a_prefill(tiny, name, length):
    """`logits`, the scores of a prompt and the chunks of `runtime.score` agree at every position."""
    model, tokens = planned(tiny, name), prompt(length)
    logp = np.asarray(jax.nn.log_softmax(model.logits([tokens])[0]))
    rows, own = np.arange(length - 1), np.array(tokens[1:])
    [end] = _scored(model, tokens)
    np.testing.assert_allclose([token.logprob for token in end.prompt[1:]], logp[rows, own], rtol=0, atol=1e-5)
    hidden, _ = run_whole(model, tokens, model.policy)
    scores = jax.nn.log_softmax(np.asarray(hidden) @ np.asarray(model.params.embed).T)
    np.testing.assert_allclose(scores[rows, own], logp[rows, own], rtol=0, atol=1e-4)
    [answer] = model.generate([tokens], max_new_tokens=1)
    assert answer.logprobs[0] == pytest.approx(logp[-1, answer.tokens[0]], abs=1e-5)


def _scored(model: Model, tokens: list[int]) -> list:
    engine = model.engine()
    engine.submit(roads.Request(prompt=tokens, max_new_tokens=1, prompt_logprobs=0))
    return list(engine.drain())


def test_a_rule_by_length_does_not_pass(tiny, monkeypatch):
    """The planted fault gives all tokens of a pool the policy of its last position, as the rule by length did."""
    by_position = Pool.policy_at
    monkeypatch.setattr(Pool, "policy_at", lambda pool, position: by_position(pool, pool.context - 1))
    with pytest.raises(AssertionError):
        test_generate_follows_the_position(tiny, "plan")
    with pytest.raises(AssertionError):
        roads.check_engines(planned(tiny, "plan"))


def test_on_two_devices(tmp_path):
    """Devices that split heads, contiguous and paged, and devices that split each sequence, contiguous."""
    environment = fast_child(2) | {
        "PYTHONPATH": os.pathsep.join([str(Path(roads.__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    code = f"""if True:
        from dataclasses import replace
        from pathlib import Path
        import roads
        from tiny import CONFIG, save_tiny
        from tessera.generate import load
        folder = save_tiny(Path({str(tmp_path)!r}) / "model", replace(CONFIG, num_layers=2, eos_ids=()), plan=False)
        for mesh in ("2x1", "1x2"):
            for name in ("dense", "decode later"):
                policy = roads.POLICIES[name]
                if name != "dense":
                    policy = replace(policy, head_map=policy.head_map[:2])
                roads.check_engines(replace(load(folder, mesh=mesh), policy=policy))
        print("equal")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["equal"], done.stderr[-4000:]
