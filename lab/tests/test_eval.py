"""`tessera eval`: tasks fit their length and can be answered from their text; fidelity and recall match definitions."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import PLAN, load_stacked, save_tiny

from lab import eval as evaluation
from lab.eval import tasks
from lab.eval.fidelity import fidelity, recall
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, call_shapes
from tessera.measure import evidence
from tessera.runtime import score, step
from tessera.runtime.score import run_whole
from tessera.sparse.baselines import Dense, Oracle, Window
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade
from tessera.sparse.recording import RecallRecorder, SimilarityRecorder

TEXT = "".join(f"line {i} of some filler, which says nothing that matters.\n" for i in range(400))
BYTES = tasks.Hay(text=TEXT, count=lambda text: len(text.encode()) + 1)
WORDS = tasks.Hay(text=TEXT, count=lambda text: len(text.split()))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_stacked(save_tiny(tmp_path_factory.mktemp("eval")))


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Use one small chunk size, so that tests share programs and run several chunks, the last one cut short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CHUNK", 64)
        patch.setattr(step, "CHUNK", 64)
        yield


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


NARROW = Window(window=16, sinks=16, tile=16, query_tile=16)


def test_dense_is_at_no_distance_from_itself_and_a_window_is(model):
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 256, n).astype(np.int32) for n in (200, 250)]
    same = fidelity(model, Dense(), windows)
    assert max(map(abs, same.kl)) < 1e-6
    assert same.agreement == 1
    assert same.loss == pytest.approx(same.loss_dense)
    found = fidelity(model, NARROW, windows)
    assert min(found.kl) > 1e-6
    assert found.num_tokens == 199 + 249
    assert found.loss_dense == pytest.approx(same.loss_dense)


def test_fidelity_is_the_divergence_of_the_models_logits(model, monkeypatch):
    monkeypatch.setattr(score, "ROWS", 128)  # two blocks of rows, the second cut short
    window = np.random.default_rng(1).integers(0, 256, 200).astype(np.int32)
    models = (model.with_attention("dense"), dataclasses.replace(model, policy=NARROW))
    scores = [np.asarray(m.logits(window[None]), np.float64)[0, :-1] for m in models]
    pair = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in scores]
    found = fidelity(model, NARROW, [window])
    wanted = (np.exp(pair[0]) * (pair[0] - pair[1])).sum(-1).mean()
    assert found.kl[0] == pytest.approx(float(wanted), rel=1e-3)
    picked = [-np.asarray(x)[np.arange(199), window[1:]].mean() for x in pair]
    assert found.loss_dense == pytest.approx(float(picked[0]), rel=1e-4)
    assert found.loss == pytest.approx(float(picked[1]), rel=1e-4)
    assert found.agreement == pytest.approx(float((pair[0].argmax(-1) == pair[1].argmax(-1)).mean()))


class TapState(NamedTuple):
    inner: Any
    q: jax.Array
    k: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tap(Policy):
    """Run a policy unchanged and keep every layer's q and k."""

    policy: Policy

    @property
    def query_tile(self):
        return self.policy.query_tile

    def init_state(self, num_layers, shapes, spec):
        q = (num_layers, shapes.num_queries, shapes.num_heads, shapes.head_dim)
        k = (num_layers, shapes.num_kv_heads, shapes.num_keys, shapes.head_dim)
        return TapState(self.policy.init_state(num_layers, shapes, spec), jnp.zeros(q), jnp.zeros(k))

    def attend(self, layer, q, kv, spec, positions, state):
        out, inner = self.policy.attend(layer, q, kv, spec, positions, state.inner)
        return out, TapState(inner, state.q.at[layer].set(q[0]), state.k.at[layer].set(kv.k[0]))


def brute_force(q, k, allowed):
    """Compute the share of softmax on allowed keys: q [T,N,H], k [S,K,H], allowed [T,K,S] -> mean per KV head [K]."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("tnh,snh->tns", q, k.repeat(group, 1)) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(q), len(k), dtype=bool)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    kept = (weights * allowed.repeat(group, 1)).sum(-1) / weights.sum(-1)
    return kept.reshape(len(q), -1, group).mean((0, 2))


def window_keys(policy, length):
    """Return the keys read [T,K,S]: tiles with a sink, or with a key in the window of any row of the query tile."""
    allowed = np.zeros((length, 2, length), bool)
    for row in range(length):
        first = row // policy.query_tile * policy.query_tile
        rows = range(first, min(first + policy.query_tile, length))
        wanted = {*range(policy.sinks)} | {s for r in rows for s in range(max(r - policy.window + 1, 0), r + 1)}
        tiles = sorted({s // policy.tile for s in wanted})
        allowed[row] = np.isin(np.arange(length) // policy.tile, tiles)
    return allowed


def listed_keys(selections, heads, length):
    """Return the keys read [T,K,S] by a layer whose head i uses anchor head heads[i]; one selection per chunk."""
    allowed, tile, row = np.zeros((length, 2, length), bool), PLAN.tile, 0
    for selection in selections:
        for i in range(selection.count.shape[-1]):
            rows, row = slice(row, row + PLAN.query_tile), row + PLAN.query_tile
            for head, used in enumerate(heads):
                tiles = selection.tiles[0, used, i, : selection.count[0, used, i]]
                allowed[rows, head] = np.isin(np.arange(length) // tile, tiles)
    return allowed


@pytest.mark.parametrize("name", ["window", "kascade"])
def test_recall_is_the_softmax_on_the_keys_read_per_head(model, name):
    length = 201
    window = np.random.default_rng(2).integers(0, 256, length).astype(np.int32)
    kascade = Kascade.from_plan(dataclasses.replace(PLAN, crossover_tokens=0))
    policy = Window(window=20, sinks=5, tile=16, query_tile=16) if name == "window" else kascade
    plain, states = run_whole(model, window, Tap(policy=policy))
    recorded, _ = run_whole(model, window, RecallRecorder(policy=policy))
    np.testing.assert_allclose(recorded, plain, atol=1e-5, err_msg="the recorder changes nothing in the run")
    q = np.concatenate([state.q for state in states], 1)[:, :length].astype(float)
    k = np.swapaxes(states[-1].k, 1, 2)[:, :length].astype(float)
    if name == "window":
        allowed = [window_keys(policy, length)] * 3
    else:
        anchor = [state.inner.choice for state in states]
        allowed = [np.ones((length, 2, length)), *(listed_keys(anchor, heads, length) for heads in PLAN.head_map[1:])]
    wanted = [brute_force(*layer) for layer in zip(q, k, allowed)]
    found = recall(model, policy, [window])
    np.testing.assert_allclose(found.per_head, [wanted], rtol=1e-4)
    sparse = [1, 2] if name == "kascade" else [0, 1, 2]
    assert found.sparse_layers == tuple(sparse)
    assert found.per_window == pytest.approx([np.mean(np.asarray(wanted)[sparse])], rel=1e-4)
    assert np.ptp(np.asarray(wanted)[1:]) > 0.01, "layers and heads must differ to test their order"
    assert 0.1 < np.min(wanted) < 0.95


@pytest.mark.parametrize(
    "policy",
    [
        Dense(),
        Oracle(tile=16, query_tile=16, fraction=1.0),
        pytest.param(Window(window=512, sinks=0, tile=16, query_tile=16), marks=pytest.mark.exhaustive),
        pytest.param(
            Kascade(anchors=(0,), head_map=((0, 1),) * 3, tile=16, query_tile=16, fraction=1.0),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda policy: policy.name,
)
def test_reading_everything_keeps_all_attention_mass(model, policy):
    windows = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in (201, 250)]
    found = recall(model, policy, windows)
    assert found.per_head.shape == (2, 3, 2)
    np.testing.assert_allclose(found.per_head, 1.0, atol=1e-6)
    np.testing.assert_allclose(found.per_window, 1.0, atol=1e-6)


HALF = {"tile": 16, "query_tile": 1}


@pytest.mark.parametrize(
    "policy",
    [
        Window(window=32, sinks=0, **HALF),
        Window(window=16, sinks=16, **HALF),
        Oracle(fraction=0.25, minimum=1, **HALF),  # the row's own tile is one quarter, the budget another
        Kascade(anchors=(0,), head_map=((0, 1), (1, 0)), fraction=0.25, minimum=1, **HALF),
    ],
    ids=["window", "sinks", "oracle", "kascade"],
)
def test_half_the_keys_of_uniform_attention_hold_half_its_mass(policy):
    recorder, spec = RecallRecorder(policy=policy), AttentionSpec()
    q, keys = np.zeros((1, 1, 4, 16), np.float32), np.ones((1, 64, 2, 16), np.float32)
    positions = Positions(*(np.array([n], np.int32) for n in (63, 64, 1)))  # the last of 64 rows
    state = recorder.init_state(2, call_shapes(q, keys), spec)
    attend = jax.jit(
        lambda layer, q, keys, state: recorder.attend(layer, q, KeyValues.of(keys, keys), spec, positions, state)[1]
    )
    for layer in range(2):
        state = attend(np.int32(layer), q, keys, state)
    kept = np.asarray(state.held / state.total)
    np.testing.assert_allclose(kept[1], 0.5, rtol=1e-6)
    np.testing.assert_allclose(kept[0], 1.0 if policy.name == "kascade" else 0.5, rtol=1e-6)


def test_a_policy_whose_reads_are_unknown_has_no_recall(model):
    with pytest.raises(TypeError, match="use a Kascade, Window, Oracle or Dense policy"):
        recall(model, SimilarityRecorder(query_tile=16), [np.zeros(32, np.int32)])


def model_plan(model):
    from tessera.sparse.plan import Plan

    return Plan.load(f"{model.source}/plan.json")


def test_the_sides_are_the_plan_at_three_budgets_and_what_it_is_compared_with(model):
    plan = model_plan(model)
    sides = [(c.name, c.title, c.model.policy) for c in evaluation.side_by_side(model, plan, 400)]
    assert [name for name, *_ in sides] == ["dense", *["kascade"] * 3, "control", "window", "oracle"]
    assert len({title for _, title, _ in sides}) == len(sides)
    budgets = [(policy.fraction, policy.minimum) for name, _, policy in sides if name == "kascade"]
    assert budgets == [(plan.fraction * scale, plan.minimum * scale) for scale in (0.5, 1.0, 2.0)]
    for (name, title, policy), kind in zip(sides, (Dense, *[Kascade] * 4, Window, Oracle), strict=True):
        assert type(policy) is kind, (name, title)


@pytest.mark.parametrize(
    "only",
    [("dense", "the plan", "window 108 + sinks"), pytest.param((), marks=pytest.mark.exhaustive)],
    ids=["three sides", "all sides"],
)
def test_a_suite_records_every_side_and_resumes(model, tmp_path, monkeypatch, only):
    """Each side compiles four programs: for fidelity, recall, prefill and decode."""
    sides = [c for c in evaluation.side_by_side(model, model_plan(model), 400) if not only or c.title in only]
    sizes = evaluation.Sizes(kinds=("single", "tracking"), lengths=(400,), samples=2, windows=2, window_tokens=250)
    monkeypatch.setattr(evaluation, "SUITES", {"smoke": sizes})
    monkeypatch.setattr(evaluation, "side_by_side", lambda *_: iter(sides))
    monkeypatch.setattr(evidence, "code", lambda: evidence.Code(commit="c", dirty=False))
    out = tmp_path / "eval.jsonl"
    assert evaluation.run(model, model_plan(model), suite="smoke", out=out, text=TEXT) == 0
    records = evidence.read(out)
    every = {(c.name, c.title) for c in sides}
    named = [(r.what.op, r.what.kernel, r.facts["policy"]) for r in records]
    asked = [r for r in records if r.what.op == "eval task"]
    kept = [r for r in records if r.what.op == "eval recall"]
    assert {(name, title) for op, name, title in named if op == "eval task"} == every
    for op in ("eval fidelity", "eval recall"):
        assert {(name, title) for found, name, title in named if found == op} == every - {("dense", "dense")}
    assert len(kept) == len(sides) - 1
    for record in kept:
        facts, layers = record.facts, [1, 2] if record.what.kernel in ("kascade", "control") else [0, 1, 2]
        assert facts["sparse_layers"] == layers
        assert facts["low"] <= facts["mean"] <= facts["high"] < 1
        assert facts["tokens"] == 2 * 250
        assert (len(record.samples), record.unit, facts["policy"]) == (2, "fraction", record.what.title)
        assert np.asarray(facts["per_head"])[layers].mean() == pytest.approx(np.mean(record.samples), abs=1e-5)
        assert np.asarray(facts["per_head"]).shape == (3, 2)
    assert len(asked) == len(sides) * 2
    assert all(len(r.facts["scores"]) == 2 and r.facts["low"] <= r.median <= r.facts["high"] for r in asked)
    assert {r.density for r in asked if r.what.kernel == "dense"} == {(1.0, 1.0, 1.0)}
    assert all(r.density[0] == 1 and max(r.density[1:]) < 1 for r in asked if r.what.kernel == "kascade")
    assert all(max(r.density) < 1 for r in asked if r.what.kernel == "window")
    for kind in sizes.kinds:
        read = {r.facts["policy"]: r.mean_density for r in asked if r.facts["kind"] == kind}
        [window] = [read[c.title] for c in sides if c.name == "window"]
        assert read["the plan"] <= window <= read["the plan"] + (16 + 2 * 16) / 200, "as many keys, rounded to tiles"

    whole, again = out.read_text().splitlines(keepends=True), tmp_path / "again.jsonl"
    kept = len(whole) - 6
    again.write_text("".join(whole[:kept]) + whole[kept][:40])  # as after a kill
    evaluation.run(model, model_plan(model), suite="smoke", out=again, text=TEXT, resume=True)
    assert [r.key for r in evidence.read(again)] == [r.key for r in records]


def test_a_context_that_is_too_short_is_refused(model):
    with pytest.raises(ValueError, match="context of 512 tokens is too short: 4096 are needed"):
        evaluation.run(model, model_plan(model), suite="demo")
    with pytest.raises(ValueError, match="suite='nosuch' must be one of"):
        evaluation.run(model, model_plan(model), suite="nosuch")
