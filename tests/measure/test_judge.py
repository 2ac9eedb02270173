"""`tessera eval --suite real`: trials match generation, rivals read as many keys as the plan, statistics are right."""

import dataclasses
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, PLAN, load_stacked, optimized, save_tiny

from tessera import generate
from tessera.attention.contract import AttentionSpec, KeyValues, Positions
from tessera.cli.measure import Eval
from tessera.core.files import SHIPPED
from tessera.measure import evidence
from tessera.measure.judge import contenders, paired, probes, real, texts
from tessera.measure.judge.answers import Runner, run_trials
from tessera.measure.judge.contenders import Matched
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.sparse.baselines import Dense, Window
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import Plan

TEXT = "".join(f"line {i} of some filler, which says nothing that matters.\n" for i in range(400))
FILLER = probes.Filler.of(byte_tokenizer(), TEXT)
LENGTH = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return generate.load(save_tiny(tmp_path_factory.mktemp("real"), dataclasses.replace(CONFIG, max_positions=2048)))


def everywhere(model):
    """The model's plan without a cross-over."""
    return dataclasses.replace(Plan.load(f"{model.source}/plan.json"), crossover_tokens=0, decode_crossover=None)


# --- documents and questions


@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("kind", probes.KINDS)
def test_a_document_fills_its_length_and_holds_what_is_asked(kind, length):
    document = probes.make_document(kind, FILLER, length, (1, 2))
    body = FILLER.tokenizer.decode(document.prefix)
    assert len(document.prefix) == length - probes.ROOM
    assert len({q.suffix for q in document.questions}) == len(document.questions) >= 4
    for question in document.questions:
        asked = FILLER.tokenizer.decode(question.suffix)
        answer = FILLER.tokenizer.decode(question.answer)
        assert asked.startswith("\n\n")
        assert len(question.suffix) + len(question.answer) <= probes.ROOM
        if kind == "count":
            thing, last = asked.strip().removesuffix(" number"), int(answer) - 1
            assert f"{thing} number {last} is done." in body
            assert f"{thing} number {last + 1}" not in body
        elif kind == "chain":
            value, after = answer.split(".\n\n")
            assert f"{after.split()[0]} {after.split()[1]}\n" in body
            assert value.strip() == after.split()[0]
            assert FILLER.tokenizer.decode([t for t, told in zip(question.answer, question.given) if not told]) == (
                f"{value} {after.split()[1]}"
            )
        else:
            line = asked.strip().split("? ")[-1]
            assert body.count(f"{line}{answer}") == 1
        assert 0 <= question.depth <= 1


def test_a_fact_lies_at_its_depth():
    for seed in range(3):
        document = probes.make_document("single", FILLER, 4096, (seed,))
        body = FILLER.tokenizer.decode(document.prefix)
        for question in document.questions:
            line = FILLER.tokenizer.decode(question.suffix).split("? ")[1]
            assert abs(body.index(line) / len(body) - question.depth) < 0.1


def test_the_same_seed_makes_the_same_document():
    one, again, other = (probes.make_document("keys", FILLER, LENGTH, (s,)) for s in (3, 3, 4))
    assert one.questions == again.questions != other.questions
    np.testing.assert_array_equal(one.prefix, again.prefix)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="length=256 must be larger: the facts of copy alone do not fit"):
        probes.make_document("copy", FILLER, 256, (0,))
    with pytest.raises(ValueError, match="length=1000 must be a multiple of 128"):
        probes.make_document("single", FILLER, 1000, (0,))
    with pytest.raises(ValueError, match="kind='nosuch' must be one of single, alike"):
        probes.make_document("nosuch", FILLER, LENGTH, (0,))
    with pytest.raises(ValueError, match="no line ends"):
        probes.Filler.of(byte_tokenizer(), "one line")


def test_the_three_domains_share_no_text_with_each_other_or_with_calibration():
    from tessera.measure.judge.library import library_calibration

    found = {name: get() for name, get in texts.DOMAINS.items()}
    found["calibration"] = bytes(library_calibration().astype(np.uint8)).decode("utf-8", "replace")
    for name, text in found.items():
        assert len(text) > 8 * 8192, name
        pieces = [text[i : i + 200] for i in range(1000, 60_000, 3000)]
        for other, body in found.items():
            if other != name:
                assert sum(piece in body for piece in pieces) <= 1, (name, other)  # two texts may share a licence


# --- trials


def greedy(model, policy, prompt, count):
    [answer] = dataclasses.replace(model, policy=policy).generate([prompt], max_new_tokens=count)
    return answer.tokens


POLICIES = (
    Window(window=40, sinks=16, tile=16, query_tile=16),
    dataclasses.replace(Kascade.from_plan(PLAN), crossover_tokens=0),
    Matched(scores="random", keys=((0, 60.0), (1024, 120.0)), tile=16, query_tile=32),
)


@pytest.mark.parametrize(  # the tests of rivals cover how `Matched` chooses
    "policy", [*POLICIES[:2], pytest.param(POLICIES[2], marks=pytest.mark.exhaustive)], ids=lambda policy: policy.name
)
def test_an_answer_is_found_if_generation_gives_it(model, policy):
    rng = np.random.default_rng(5)
    prefix = rng.integers(32, 127, 512 - probes.ROOM).astype(np.int32)
    suffixes = [tuple(rng.integers(32, 127, n).tolist()) for n in (20, 33, 64)]
    answers = [tuple(greedy(model, policy, [*prefix, *suffix], 5)) for suffix in suffixes]
    right = [probes.Question(s, a, (), 0.5) for s, a in zip(suffixes, answers)]
    wrong = probes.Question(suffixes[0], (*answers[0][:2], (answers[0][2] + 1) % 256, *answers[0][3:]), (), 0.5)
    told = wrong._replace(given=(False, False, True, False, False))
    document = probes.Document("single", 512, prefix, (*right, wrong, told, right[0]))
    [found] = run_trials(model, policy, [document])
    assert [o.found for o in found.outcomes[:4]] == [True, True, True, False]
    assert found.outcomes[0].tokens == 5
    assert 2 <= found.outcomes[3].tokens < 5
    assert found.outcomes[4].logprob > found.outcomes[3].logprob  # a given token is not scored
    assert found.outcomes[5] == found.outcomes[0], "an earlier question must leave no trace"
    [again] = run_trials(model, policy, [document._replace(questions=document.questions[::-1])])
    assert again.outcomes[::-1] == found.outcomes


def test_the_log_probability_is_that_of_the_models_logits(model):
    rng = np.random.default_rng(6)
    prefix, suffix, answer = (rng.integers(32, 127, n).astype(np.int32) for n in (512 - probes.ROOM, 20, 4))
    question = probes.Question(tuple(suffix.tolist()), tuple(answer.tolist()), (), 0.5)
    [found] = run_trials(model, Dense(), [probes.Document("single", 512, prefix, (question,))])
    scores = np.asarray(model.logits(np.concatenate([prefix, suffix, answer])[None])[0], np.float64)
    logp = (
        scores
        - np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - scores.max(-1, keepdims=True)
    )
    at = len(prefix) + len(suffix) - 1 + np.arange(4)
    assert found.outcomes[0].logprob == pytest.approx(logp[at, answer].sum(), rel=1e-4)
    assert found.density == (1.0, 1.0, 1.0)


def test_a_query_tile_that_a_question_cannot_start_at_is_refused(model):
    with pytest.raises(ValueError, match="query_tile=256 must divide 128"):
        Runner(model, Window(query_tile=256), LENGTH)


# --- rivals


def select(policy, scores, position, rows=1, head=0, whole=None):
    positions = Positions(*(np.array([n], np.int32) for n in (position, position + rows, rows)))
    found = policy.select(jnp.asarray(scores, jnp.float32), positions, whole)
    return found.tiles[0, head, 0, : found.count[0, head, 0]].tolist()


def test_a_budget_buys_the_best_tiles():
    policy = Matched(scores="mass", keys=((0, 64.0), (512, 64.0)), tile=16, query_tile=16, sinks=1)
    scores = np.zeros((1, 2, 1, 32))
    scores[..., [5, 9, 11, 31]] = [0.1, 0.3, 0.2, 0.9]
    assert select(policy, scores, 320, rows=16) == [
        0,
        9,
        11,
        20,
    ]  # the own tile, and 3 more: 64 keys less 8.5 own ones, rounded
    assert select(policy, scores, 32, rows=16) == [0, 1, 2]  # fewer tiles are visible than the budget buys
    assert select(dataclasses.replace(policy, sinks=0), scores, 320, rows=16) == [5, 9, 11, 20]
    none = dataclasses.replace(policy, keys=((0, 0.0), (512, 0.0)), sinks=0)
    assert select(none, scores, 320, rows=16) == [20]
    whole = jnp.array([False, True])
    assert select(policy, scores, 320, rows=16, whole=whole) == [0, 9, 11, 20]
    assert select(policy, scores, 320, rows=16, head=1, whole=whole) == [*range(21)]


def test_the_newest_tiles_are_a_window():
    policy = Matched(scores="newest", keys=((0, 64.0), (512, 64.0)), tile=16, query_tile=16, sinks=1)
    spec = AttentionSpec(tile=16, query_tile=16)
    q, k = jnp.zeros((1, 16, 2, 16)), jnp.zeros((1, 2, 512, 16))
    scores = contenders.SCORES["newest"](q, KeyValues(k, k), 0, spec, None)
    assert select(policy, scores, 320, rows=16) == [0, 18, 19, 20]


def test_random_tiles_depend_on_position_not_on_the_cut(model):
    tokens = np.random.default_rng(1).integers(32, 127, 512)
    policy = Matched(scores="random", keys=((0, 60.0), (512, 90.0)), tile=16, query_tile=32)
    whole, parts = Runner(model, policy, 512), Runner(model, policy, 512)
    one = np.asarray(whole.run(tokens, 0, 512))
    two = np.concatenate([np.asarray(parts.run(tokens[s : s + 128], s, 128)) for s in range(0, 512, 128)])
    np.testing.assert_allclose(one, two, atol=1e-4)
    other = np.asarray(Runner(model, Dense(), 512).run(tokens, 0, 512))
    assert np.abs(one - other).max() > 1e-2


@pytest.mark.parametrize("scores", contenders.SCORES)
def test_with_all_keys_every_rule_is_dense(model, scores):
    tokens = np.random.default_rng(2).integers(32, 127, 300)
    policy = Matched(scores=scores, keys=((0, 1e6), (1, 1e6)), tile=16, query_tile=32)
    runner = Runner(model, policy, 512)
    ours = np.asarray(runner.run(tokens, 0, 512))[:300]
    dense = np.asarray(Runner(model, Dense(), 512).run(tokens, 0, 512))[:300]
    np.testing.assert_allclose(ours, dense, atol=1e-4)
    assert runner.density() == (1.0, 1.0, 1.0)


def by_chunk(model, policy, tokens):
    """Return keys read over keys visible, over all layers and heads, per chunk."""
    runner = Runner(model, policy, len(tokens))
    for _ in runner.fill(tokens):
        pass
    read, visible = (np.array([np.asarray(reads[i], float).sum() for reads in runner.pending]) for i in (0, 1))
    return read / visible


@pytest.mark.parametrize(
    "budgets",  # with a cross-over, a test below covers a fraction
    [pytest.param((), marks=pytest.mark.exhaustive), ((1.0, 1.0), (1.0, 0.1), (0.2, 0.3))],
    ids=["fraction", "per head"],
)
def test_rivals_read_as_many_keys_as_the_plan(model, budgets):
    plan = dataclasses.replace(everywhere(model), fraction=0.15, minimum=64, budgets=budgets)
    tokens = np.random.default_rng(3).integers(32, 127, 2048).astype(np.int32)
    keys = contenders.profile(model, contenders.plan_policy(model, plan), tokens)
    shares = {}
    for contender in contenders.contenders(model, plan, keys, 2048):
        if contender.title in ("the plan", "window + sink", "random tiles", contenders.NEAR):
            shares[contender.title] = by_chunk(model, contender.policy, tokens)
    assert len(shares) == 4
    for title, share in shares.items():
        np.testing.assert_allclose(share[1:], shares["the plan"][1:], atol=0.01, err_msg=title)
        np.testing.assert_allclose(share[0], shares["the plan"][0], atol=0.06, err_msg=title)


def test_without_whole_heads_no_rival_is_the_window_under_another_name(model):
    plan = Plan.load(f"{model.source}/plan.json")
    layers = tuple(range(plan.num_layers))
    bare = dataclasses.replace(plan, anchors=(), own=layers, head_map=((0, 1),) * len(layers))
    for one, expected in ((plan, True), (bare, False)):
        titles = [c.title for c in contenders.contenders(model, one, ((0, 1.0), (2048, 500.0)), 2048)]
        assert (contenders.NEAR in titles) == expected
        assert len(set(titles)) == len(titles)


def test_the_control_reads_what_the_plan_reads_without_choosing(model):
    plan = dataclasses.replace(everywhere(model), local=32, sinks=16)
    rows = np.arange(512)
    own = rows % plan.query_tile + 1 + np.minimum(rows // plan.query_tile * plan.query_tile, 32 + 16)
    for budgets in ((), ((1.0, 1.0), (1.0, 0.1), (0.2, 0.3))):
        control = contenders.without_choice(dataclasses.replace(plan, budgets=budgets))
        runner = Runner(model, contenders.plan_policy(model, control), 512)
        runner.run(rows + 32, 0, 512)
        read, visible = (np.asarray(count)[:, 0] for count in runner.pending[0])
        head, all_keys = own.sum(), visible[0] / CONFIG.num_kv_heads
        np.testing.assert_allclose(read, [2 * all_keys, head + (all_keys if budgets else head), 2 * head])


# --- statistics


def test_mcnemar_is_the_binomial_tail():
    assert paired.mcnemar(5, 0) == 2 / 32
    assert paired.mcnemar(10, 2) == pytest.approx(2 * (1 + 12 + 66) / 4096)
    assert paired.mcnemar(2, 10) == paired.mcnemar(10, 2)
    assert paired.mcnemar(3, 3) == 1
    assert paired.mcnemar(0, 0) == 1


def test_kept_counts_only_what_dense_finds():
    dense, policy = [[1, 1, 0], [1, 0, 0]], [[1, 0, 1], [1, 1, 0]]
    assert paired.kept(dense, policy).value == pytest.approx(2 / 3)
    assert paired.discordant(dense, policy) == (1, 2)
    assert paired.gain(dense, policy).value == pytest.approx(1 / 6)
    everything = paired.kept(dense, dense)
    assert everything.value == 1
    assert everything.low == pytest.approx(1 / (1 + 1.96**2 / 3))  # Wilson's lower bound for 3 of 3
    assert np.isnan(paired.kept([[0, 0]], [[1, 0]]).value)


def test_an_interval_redraws_documents_not_questions():
    """Twenty documents whose ten questions always agree say as much as twenty questions."""
    rng = np.random.default_rng(0)
    outcome = rng.random(20) < 0.5
    together = paired.ratio(10.0 * outcome, [10] * 20)
    alone = paired.ratio(rng.permutation(np.repeat(outcome, 10)).reshape(20, 10).sum(1), [10] * 20)
    share = outcome.mean()
    width = 2 * 1.96 * np.sqrt(share * (1 - share) / 20)
    assert together.high - together.low == pytest.approx(width, rel=0.15)
    assert alone.high - alone.low < 0.5 * (together.high - together.low)


def test_a_mean_has_the_interval_of_its_standard_error():
    values = np.random.default_rng(1).normal(3, 2, 400)
    found = paired.mean(values)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)


# --- the suite

SMALL = real.Sizes(
    lengths=(512, 1024),
    documents=(("single", 512, 2), ("single", 1024, 2), ("count", 1024, 1)),
    windows=1,
    brief=(("single", 1024, 1),),
    rivals=("window + sink",),
)


@pytest.fixture(scope="module")
def small_suite():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "SUITES", MappingProxyType({"real": SMALL}))
        patch.setattr(evidence, "code", lambda: evidence.Code(commit="c" * 40, dirty=False))
        yield


@pytest.fixture(scope="module")
def records(model, small_suite, tmp_path_factory):
    out = tmp_path_factory.mktemp("records") / "real.jsonl"
    plan = everywhere(model)
    assert real.run(model, plan, text=TEXT, out=out) == 0
    return out


def test_the_suite_records_every_contender(records):
    found = evidence.read(records)
    assert {r.facts["policy"] for r in found} == {"dense", contenders.CONTROL, "the plan", "window + sink"}
    text = [r for r in found if r.what.op == "eval real text"]
    assert len(text) == 4 * 2
    assert {(r.facts["from"], r.facts["to"]) for r in text} == {(0, 512), (512, 1024)}
    for record in text:
        facts = record.facts
        assert len(record.samples) == 2
        assert facts["low"] <= facts["mean"] <= facts["high"]
        assert facts["mean"] == pytest.approx(np.mean(record.samples), abs=1e-6)
        same = facts["policy"] == "dense"
        assert (facts["mean"] == pytest.approx(0, abs=1e-6)) == same
        assert (facts["loss"] == facts["loss_dense"]) == same
        assert (record.mean_density == 1) == same
    tasks = [r for r in found if r.what.op == "eval real task"]
    assert {(r.facts["kind"], r.facts["length"]) for r in tasks} == {("single", 512), ("single", 1024), ("count", 1024)}
    for record in tasks:
        asked = {(kind, length): count for kind, length, count in SMALL.documents}
        documents = 1 if record.facts["brief"] else asked[record.facts["kind"], record.facts["length"]]
        questions = {"single": 8, "count": 4}[record.facts["kind"]]
        assert [len(own) for own in record.facts["found"]] == [questions] * documents
        assert np.shape(record.facts["logprob"]) == np.shape(record.facts["found"]) == np.shape(record.facts["depths"])
        assert record.facts["of_dense"] == np.sum(record.facts["found"]) or record.facts["policy"] != "dense"


def test_a_task_that_the_control_does_as_well_is_marked(records):
    """A random model answers nothing, so each task is marked; text is not, as the plan reads more than the control."""
    plans = [r for r in evidence.read(records) if r.facts["policy"] == "the plan"]
    marks = {r.what.workload: r.facts["against_control"]["says_nothing"] for r in plans}
    assert {name.partition(" at ")[0] for name, mark in marks.items() if mark} >= {"single", "count"}
    assert not marks["text, tokens 512 to 1,024: the plan"]


def test_a_difference_of_rounding_is_marked():
    """KL is rounded in records, so that a difference of 1e-8 between two policies means nothing."""
    assert real.verdict(paired.mean([3e-8, 4e-8]), resolution=real.RESOLUTION)["says_nothing"]
    assert not real.verdict(paired.mean([3e-5, 4e-5]), resolution=real.RESOLUTION)["says_nothing"]


def test_a_difference_that_is_sure_is_not_marked():
    none, all_, half = [[0] * 5] * 12, [[1] * 5] * 12, [[1, 0, 1, 0, 0], [0, 0, 0, 0, 0]] * 6
    assert not real.verdict(paired.gain(none, all_))["says_nothing"]
    assert real.verdict(paired.gain(none, none))["says_nothing"]
    assert real.verdict(paired.gain(half, none))["says_nothing"]
    assert real.verdict(paired.gain(half, half[::-1]))["says_nothing"]
    assert real.verdict(paired.gain(half, all_))["better_by"] == pytest.approx(0.8)
    lucky = paired.gain([[0, 0]], [[1, 1]])  # one document has no interval
    assert lucky.low == lucky.high == 1
    assert real.verdict(lucky, paired.mcnemar(0, 2))["says_nothing"]


def test_a_run_that_was_cut_off_goes_on(model, records, tmp_path, small_suite):
    whole = records.read_text().splitlines(keepends=True)
    again = tmp_path / "again.jsonl"
    again.write_text("".join(whole[:8]) + whole[8][:40])  # as after a kill
    plan = everywhere(model)
    real.run(model, plan, text=TEXT, out=again, resume=True)
    assert [r.key for r in evidence.read(again)] == [r.key for r in evidence.read(records)]
    facts = [[r.facts for r in evidence.read(path)] for path in (again, records)]
    assert facts[0] == facts[1]


def test_another_plan_is_asked_again_and_dense_is_not(model, records, tmp_path, small_suite):
    """The other plan selects nothing, so the control does as well everywhere, text included."""
    again = tmp_path / "again.jsonl"
    again.write_bytes(records.read_bytes())
    before = len(evidence.read(again))
    useless = dataclasses.replace(everywhere(model), fraction=0.0, minimum=0)
    real.run(model, useless, text=TEXT, out=again, resume=True)
    new = evidence.read(again)[before:]
    assert {r.facts["policy"] for r in new} == {"the plan", "window + sink"}
    plans = [r for r in new if r.facts["policy"] == "the plan"]
    assert all(r.what.config["fraction"] == 0 for r in plans)
    assert all(r.facts["against_control"]["says_nothing"] for r in plans)


def test_other_plans_are_compared_with_the_plan(records, small_suite, model, tmp_path):
    """The same plan as a rival repeats the plan's figures; a plan that reads all keys is dense."""
    both = tmp_path / "both.jsonl"
    both.write_bytes(records.read_bytes())
    before, plan = len(evidence.read(both)), everywhere(model)
    others = {"same": plan, "all": dataclasses.replace(plan, fraction=1.0)}
    real.run(model, plan, text=TEXT, out=both, resume=True, others=others)
    found = evidence.read(both)
    new = {(r.facts["policy"], r.what.workload.partition(":")[0]): r for r in found[before:]}
    asked = ("text, tokens 0 to 512", "text, tokens 512 to 1,024", "single at 1024")
    assert set(new) == {(contenders.OTHER + name, question) for name in others for question in asked}
    for record in found[:before]:
        question = record.what.workload.partition(":")[0]
        if record.facts["policy"] == "the plan" and question in asked[:2]:
            assert new["other plan: same", question].samples == record.samples
            assert max(new["other plan: all", question].samples) < 1e-5 < max(record.samples)


def test_rivals_need_a_plan(tmp_path):
    bare = save_tiny(tmp_path / "bare", plan=False)
    with pytest.raises(ValueError, match="--rival needs a plan to compare with"):
        Eval(suite="real", model=str(bare), rival=(tmp_path / "x.json",)).run()


def test_a_run_cut_short_has_whole_comparisons(records):
    asked = [r.facts["policy"] for r in evidence.read(records)]
    everyone = ["dense", contenders.CONTROL, "the plan", contenders.WINDOW]
    assert (
        asked
        == [
            *(who for who in everyone for _ in range(2)),  # one text, two ranges
            *everyone[:3],  # single at 512
            *everyone,  # single at 1,024, which the rivals answer too
            *everyone[:3],  # count
        ]
    )


def test_what_runs_dense_is_not_judged(model):
    whole = real.fitting(SMALL, 2048, 0)
    assert whole == SMALL
    late = real.fitting(SMALL, 2048, 300)
    assert real.ranges(late) == [(512, 1024)]
    assert {length for _, length, _ in (*late.documents, *late.brief)} == {1024}
    with pytest.raises(ValueError, match='crossover_tokens=1025 leaves nothing to judge: up to 1024 tokens .* "cross'):
        real.fitting(SMALL, 2048, 1025)


def test_the_rule_of_position_is_the_plans_and_its_rivals_alike(model):
    """A rival that decoded sparse where the plan decodes dense would be judged by another rule."""
    plan = dataclasses.replace(everywhere(model), crossover_tokens=512, decode_crossover=700)
    found = list(contenders.contenders(model, plan, ((512, 256.0), (2048, 500.0)), 2048, scales=(0.5,)))
    assert len(found) > 12
    for contender in found[1:]:
        policy = contender.policy
        assert [policy.at_position(n, 128) == Dense() for n in (0, 511, 512, 2000)] == [True, True, False, False]
        assert [policy.decode_at(n, 128) == Dense() for n in (512, 699, 700)] == [True, True, False]


def test_rivals_read_as_many_keys_after_the_cross_over(model):
    plan = dataclasses.replace(everywhere(model), fraction=0.15, minimum=64, crossover_tokens=1024)
    tokens = np.random.default_rng(3).integers(32, 127, 2048).astype(np.int32)
    keys = contenders.profile(model, contenders.plan_policy(model, plan), tokens, 1024)
    shares = {c.title: by_chunk(model, c.policy, tokens) for c in contenders.contenders(model, plan, keys, 2048)
              if c.title in (contenders.PLAN, contenders.WINDOW)}  # fmt: skip
    assert shares[contenders.PLAN][:2].tolist() == shares[contenders.WINDOW][:2].tolist() == [1, 1]
    assert max(shares[contenders.PLAN][2:]) < 0.5
    np.testing.assert_allclose(shares[contenders.WINDOW], shares[contenders.PLAN], atol=0.02)


def test_what_cannot_run_is_refused(model):
    with pytest.raises(ValueError, match="suite='nosuch' must be one of"):
        real.run(model, None, suite="nosuch")
    short = dataclasses.replace(model, config=dataclasses.replace(model.config, max_positions=256))
    with pytest.raises(ValueError, match="context of 256 tokens is too short"):
        real.run(short, None)
    with pytest.raises(ValueError, match="has no tokenizer"):
        real.run(dataclasses.replace(model, tokenizer=None), None)


def test_on_the_real_model_a_window_loses_needles_that_dense_finds(smollm2):
    """No window of a quarter of the keys holds the numbers. Layers run under scan, which compiles in seconds."""
    model = load_stacked(smollm2)
    filler = probes.Filler.of(model.tokenizer, texts.reference())
    document = probes.make_document("single", filler, LENGTH, (0,))
    document = document._replace(questions=document.questions[:4])
    window = Matched(scores="newest", keys=contenders.flat(0.25, 128, LENGTH))
    found = {}
    for policy in (Dense(), window):
        with optimized():
            [answers] = run_trials(model, policy, [document])
        found[policy.name] = [outcome.found for outcome in answers.outcomes]
        # All of 128 keys, then 128, then a quarter.
        budget = (128**2 / 2 + 128 * 384 + (1024**2 - 512**2) / 8) / (1024**2 / 2)
        assert np.mean(answers.density) == pytest.approx(1.0 if policy == Dense() else budget, abs=0.01)
    assert sum(found["dense"]) >= 3
    assert sum(found["matched"]) <= sum(found["dense"]) - 2


def test_the_judge_finds_the_plan_that_a_fetched_model_ships_with(smollm2, monkeypatch):
    """The plan is found with and without --model; otherwise a run would judge no plan and not say so."""
    judged = []
    monkeypatch.setattr(real, "run", lambda model, plan, **rest: judged.append(plan) or 0)
    for model in (None, "smollm2"):
        assert Eval(suite="real", model=model).run() == 0
    assert judged == [Plan.load(SHIPPED / "smollm2.plan.json")] * 2
