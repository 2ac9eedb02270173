"""`tessera eval`: tasks fit their length and can be answered from their text, fidelity is what it says."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import save_tiny

from tessera import eval as evaluation
from tessera import evidence, generate
from tessera.eval import tasks
from tessera.eval.fidelity import fidelity
from tessera.sparse.baselines import Dense, Window

TEXT = "".join(f"line {i} of some filler, which says nothing that matters.\n" for i in range(400))
BYTES = tasks.Hay(text=TEXT, count=lambda text: len(text.encode()) + 1)
WORDS = tasks.Hay(text=TEXT, count=lambda text: len(text.split()))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return generate.load(save_tiny(tmp_path_factory.mktemp("eval")))


@pytest.mark.parametrize("length", [700, 4096])
@pytest.mark.parametrize("hay", [BYTES, WORDS], ids=["bytes", "words"])
@pytest.mark.parametrize("kind", tasks.KINDS)
def test_a_sample_fills_its_length_and_holds_its_answer(kind, hay, length):
    sample = tasks.make(kind, hay, length, seed=(1, 2))
    total = hay.count(sample.prompt) + sample.answer_tokens
    assert 0.95 * length - 2 * tasks.MARGIN <= total <= length
    assert all(sample.prompt.count(word) >= 1 for word in sample.expected)
    assert sample.score(", ".join(sample.expected)) == 1
    assert sample.score("none of it") == 0
    assert hay.count(", ".join(sample.expected)) <= sample.answer_tokens


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_the_same_seed_makes_the_same_sample(kind):
    one, again, other = (tasks.make(kind, BYTES, 800, seed=(s, 0)) for s in (3, 3, 4))
    assert one == again
    assert one.prompt != other.prompt


def test_the_note_stands_at_its_depth():
    for depth in (0.0, 0.25, 0.5, 0.9):
        sample = tasks.make("single", BYTES, 4096, seed=(0,), depth=depth)
        at = sample.prompt.index("The pass key is") / len(sample.prompt)
        assert abs(at - depth) < 0.05
        assert sample.depth == depth


def test_only_one_name_has_the_key_that_is_asked_for():
    sample = tasks.make("multi_key", BYTES, 3000, seed=(5,))
    name = sample.prompt.rsplit("pass key of ", 1)[1].split(" is")[0]
    [line] = [x for x in sample.prompt.splitlines() if f"pass key of {name} is" in x and "What" not in x]
    assert sample.expected[0] in line


def test_a_chain_leads_from_the_last_name_to_the_number():
    sample = tasks.make("tracking", BYTES, 3000, seed=(5,))
    known = dict(line.split(" = ") for line in sample.prompt.splitlines() if line.count(" = ") == 1)
    name, steps = sample.prompt.rsplit("\n", 1)[1].split("What is ")[1].split("?")[0], 0
    while not name.isdigit():
        name, steps = known[name], steps + 1
    assert name == sample.expected[0]
    assert steps == 4
    order = [sample.prompt.index(f"{a} = {b}\n") for a, b in known.items() if f"{a} = {b}\n" in sample.prompt]
    assert len(order) == len(set(order)) == 16


@pytest.mark.parametrize("kind", ["common_words", "frequent_words"])
def test_the_words_asked_for_are_the_most_frequent(kind):
    sample = tasks.make(kind, BYTES, 8000, seed=(6,))
    body = sample.prompt.rsplit("\n\n", 1)[0].split()
    counts = {word: body.count(word) for word in set(body) if word.isalpha()}
    top = sorted(counts, key=counts.get, reverse=True)[: len(sample.expected)]
    assert set(top) == set(sample.expected)


def test_a_part_of_the_answer_is_a_part_of_the_score():
    sample = tasks.make("multi_value", BYTES, 2000, seed=(7,))
    assert len(sample.expected) == 4
    assert sample.score(f"{sample.expected[0]} and {sample.expected[2]}") == 0.5


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="length=40 must be larger"):
        tasks.make("single", BYTES, 40, seed=(0,))
    with pytest.raises(ValueError, match="kind='nosuch' must be one of single"):
        tasks.make("nosuch", BYTES, 800, seed=(0,))


def test_dense_is_at_no_distance_from_itself_and_a_window_is(model):
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 256, n).astype(np.int32) for n in (300, 411)]
    same = fidelity(model, Dense(), windows)
    assert max(map(abs, same.kl)) < 1e-6
    assert same.agreement == 1
    assert same.loss == pytest.approx(same.loss_dense)
    found = fidelity(model, Window(window=16, sinks=16, tile=16, query_tile=16), windows)
    assert min(found.kl) > 1e-6
    assert found.num_tokens == 299 + 410
    assert found.loss_dense == pytest.approx(same.loss_dense)


def test_fidelity_is_the_divergence_of_the_models_logits(model):
    window = np.random.default_rng(1).integers(0, 256, 200).astype(np.int32)
    policy = Window(window=16, sinks=16, tile=16, query_tile=16)
    pair = [
        jax.nn.log_softmax(np.asarray(m.logits(window[None]), np.float64)[0, :-1])
        for m in (model.with_attention("dense"), dataclasses.replace(model, policy=policy))
    ]
    found = fidelity(model, policy, [window])
    wanted = (np.exp(pair[0]) * (pair[0] - pair[1])).sum(-1).mean()
    assert found.kl[0] == pytest.approx(float(wanted), rel=1e-3)
    picked = [-np.asarray(x)[np.arange(199), window[1:]].mean() for x in pair]
    assert found.loss_dense == pytest.approx(float(picked[0]), rel=1e-4)
    assert found.loss == pytest.approx(float(picked[1]), rel=1e-4)
    assert found.agreement == pytest.approx(float((pair[0].argmax(-1) == pair[1].argmax(-1)).mean()))


def test_a_suite_records_every_policy_and_resumes(model, tmp_path, monkeypatch):
    sizes = evaluation.Sizes(kinds=("single", "tracking"), lengths=(400,), samples=2, windows=2, window_tokens=300)
    monkeypatch.setattr(evaluation, "SUITES", {"smoke": sizes})
    out = tmp_path / "eval.jsonl"
    assert evaluation.run(model, model_plan(model), suite="smoke", out=out, text=TEXT) == 0
    records = evidence.read(out)
    names = {(r.what.op, r.what.kernel) for r in records}
    assert names == {("eval task", n) for n in ("dense", "kascade", "window", "oracle")} | {
        ("eval fidelity", n) for n in ("kascade", "window", "oracle")
    }
    asked = [r for r in records if r.what.op == "eval task"]
    assert len(asked) == 6 * 2
    assert all(len(r.facts["scores"]) == 2 and r.facts["low"] <= r.median <= r.facts["high"] for r in asked)
    dense = {r.density[0] for r in asked if r.what.kernel == "dense"}
    assert dense == {1.0}
    assert all(r.density[0] < 1 for r in asked if r.what.kernel in ("kascade", "window"))

    clean = evidence.Code(commit="c", dirty=False)
    monkeypatch.setattr(evidence, "code", lambda: clean)
    again = tmp_path / "again.jsonl"
    evaluation.run(model, model_plan(model), suite="smoke", out=again, text=TEXT)
    whole = again.read_text().splitlines(keepends=True)
    again.write_text("".join(whole[:7]) + whole[7][:40])  # a kill
    evaluation.run(model, model_plan(model), suite="smoke", out=again, text=TEXT, resume=True)
    assert [r.key for r in evidence.read(again)] == [r.key for r in records]


def model_plan(model):
    from tessera.sparse.plan import Plan

    return Plan.load(f"{model.source}/plan.json")


def test_a_context_that_is_too_short_is_refused(model):
    with pytest.raises(ValueError, match="context of 512 tokens is shorter than 4096"):
        evaluation.run(model, model_plan(model), suite="demo")
    with pytest.raises(ValueError, match="suite='nosuch' must be one of"):
        evaluation.run(model, model_plan(model), suite="nosuch")
