"""Budgets per head: each measurement of the search, against plain NumPy or a policy with a known result."""

import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import CONFIG, load_stacked, random_params, save_tiny

from tessera.attention.contract import AttentionSpec, Positions
from tessera.calibration.calibrate import calibrate
from tessera.calibration.report import Report
from tessera.calibration.retrieval import CUE, PASSAGE, plant
from tessera.calibration.search import (
    PROBE_WEIGHT,
    Judge,
    Kept,
    Localised,
    Target,
    WithBudgets,
    choose_budgets,
    measure_damage,
    measure_missed,
    policy_of,
    probes_of,
)
from tessera.core.files import DEMO_MODEL, Notebook, read_lines
from tessera.measure.judge.library import library_calibration
from tessera.models.layers import Params
from tessera.runtime import score
from tessera.runtime.score import run_whole
from tessera.sparse.ablation import GRID, MassRecorder, Tiling, missed_mass
from tessera.sparse.baselines import Dense
from tessera.sparse.plan import Plan
from tessera.sparse.promise import promise_line, summary

TILING = Tiling(tile=16, query_tile=32, local=32, sinks=16)


@pytest.fixture(scope="module")
def model():
    return load_stacked(DEMO_MODEL)


@pytest.fixture(scope="module")
def windows():
    text = library_calibration()
    return [text[start : start + 1024].astype(np.int32) for start in (2048, 65536, 131072)]


@pytest.fixture(scope="module")
def probes(model, windows):
    return probes_of(model, windows[:1], 512, 0)


def test_a_probe_asks_for_what_it_hides(model, windows):
    probe = plant(model, windows[0], (1, 2))
    again = plant(model, windows[0], (1, 2))
    np.testing.assert_array_equal(probe.tokens, again.tokens)
    assert len(probe.tokens) <= len(windows[0])
    text = bytes(probe.tokens.astype(np.uint8)).decode(errors="replace")
    for first, end in probe.answers[:-1]:
        answer = text[first:end]
        assert answer.strip().isdigit()
        question = text[:first].rpartition("\n")[2]
        assert text.index(question + answer) < probe.text_end  # planted earlier, word for word
    first, end = probe.answers[-1]
    assert end - first == PASSAGE - CUE
    passage = probe.tokens[first - CUE : end].tolist()
    hidden = probe.tokens[: probe.text_end].tolist()
    assert any(hidden[i : i + PASSAGE] == passage for i in range(len(hidden)))


def test_without_a_tokenizer_facts_are_tokens_of_the_text(model, windows):
    probe = plant(replace(model, tokenizer=None), windows[0], (3,))
    assert set(probe.tokens.tolist()) <= set(windows[0].tolist())
    for first, end in probe.answers[:-1]:
        sentence = probe.tokens[first - 8 : end].tolist()
        hidden = probe.tokens[: probe.text_end].tolist()
        assert any(hidden[i : i + len(sentence)] == sentence for i in range(len(hidden)))


def test_a_window_that_holds_no_probe_is_named(model, windows):
    with pytest.raises(ValueError, match="window of 100 tokens is too short"):
        plant(model, windows[0][:100], (0,))


def test_missed_mass_is_that_of_the_best_tiles_within_the_budget(model, windows):
    """With random masses, sort each query tile's far tiles by mass and sum those beyond the budget."""
    mass = np.random.default_rng(0).random((2, 1, 3, 8, 16)).astype(np.float32)
    mass *= np.arange(16) * 16 < (np.arange(8)[:, None] + 1) * 32
    positions = Positions(*(np.array([x], np.int32) for x in (0, 256, 256)))
    found = missed_mass(mass, AttentionSpec(), positions, TILING)
    expected = np.zeros((2, 3, len(GRID)))
    for layer, head, i in np.ndindex(2, 3, 8):
        visible = (i + 1) * 32
        far = [j for j in range(visible // 16) if j >= 1 and (j + 1) * 16 <= max(i * 32 - 32, 0)]
        heaviest = np.sort(mass[layer, 0, head, i, far].astype(float))[::-1]
        for f, fraction in enumerate(GRID):
            count = len(far) if fraction >= 1 else int(np.ceil(fraction * visible / 16 - 1e-3))
            expected[layer, head, f] += heaviest[count:].sum()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_recorded_masses_are_those_of_the_score_kernel(model, windows):
    _, notes = run_whole(model, windows[0][:512], MassRecorder(tiling=TILING))
    for mass in notes:  # each row of each query head has probability 1
        np.testing.assert_allclose(mass.sum((3, 4)), mass.shape[3] * 32 * model.config.groups, rtol=1e-4)


def test_localising_no_head_is_dense_and_all_heads_is_budget_zero(model, windows):
    tokens, shape = windows[0][:512], (model.config.num_layers, model.config.num_kv_heads)
    dense, _ = run_whole(model, tokens, Dense())
    none, _ = run_whole(model, tokens, Localised(TILING), np.zeros(shape, bool))
    np.testing.assert_allclose(none, dense, atol=1e-4)
    every, _ = run_whole(model, tokens, Localised(TILING), np.ones(shape, bool))
    nothing, _ = run_whole(model, tokens, WithBudgets(TILING), np.zeros(shape, np.float32))
    np.testing.assert_allclose(every, nothing, atol=2e-3)
    assert np.abs(every - dense).max() > 0.1


def test_the_plan_runs_as_the_search_tried_it(windows, monkeypatch):
    """In every chunk, the plan's static policy (dense layers, unscored heads) matches the search's traced policy."""
    monkeypatch.setattr(score, "CHUNK", 128)
    config = replace(CONFIG, num_layers=4)
    stack = random_params(config)
    layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stack.layers) for i in range(4))
    params = Params(embed=stack.embed, layers=layers, final_norm=stack.final_norm, head=stack.head)
    model = SimpleNamespace(config=config, params=params)
    budgets = np.array([[1, 1], [0, 0.1], [0.1, 1], [0, 0]], np.float32)
    tokens = windows[1][:200]
    traced, notes = run_whole(model, tokens, WithBudgets(TILING), budgets)
    policy = policy_of(budgets, TILING)
    assert policy.anchors == (0,)
    static, fixed_notes = run_whole(model, tokens, policy)
    np.testing.assert_allclose(static, traced, atol=2e-3)
    for ours, theirs in zip(notes, fixed_notes):
        np.testing.assert_array_equal(ours.read, policy.reads(theirs).read)


def test_budgets_are_the_best_of_all_by_the_model_at_their_price():
    """Among all budgets of two heads with no larger mean, none has a smaller modelled loss."""
    rng = np.random.default_rng(0)
    damage = rng.random((1, 2))
    missed = np.sort(rng.random((1, 2, len(GRID))), axis=-1)[..., ::-1].copy()
    missed[..., -1] = 0
    share = (missed / missed[..., :1]) ** 2
    for mean in (0.05, 0.1, 0.3, 0.6):
        found = choose_budgets(damage, missed, mean)
        assert found.mean() <= mean + 1e-9
        place = [GRID.index(value) for value in found[0]]
        loss = sum(damage[0, k] * share[0, k, i] for k, i in enumerate(place))
        for other in itertools.product(range(len(GRID)), repeat=2):
            if np.mean([GRID[i] for i in other]) <= found.mean():
                assert loss <= sum(damage[0, k] * share[0, k, i] for k, i in enumerate(other)) + 1e-12


def test_a_head_that_does_nothing_gets_nothing_and_all_get_all_at_one():
    missed = np.broadcast_to(np.linspace(1, 0, len(GRID)), (2, 2, len(GRID)))
    damage = np.array([[0.0, 1.0], [1.0, 1.0]])
    found = choose_budgets(damage, missed, 0.3)
    assert found[0, 0] == 0
    assert (found.ravel()[1:] > 0).all()
    np.testing.assert_array_equal(choose_budgets(damage + 1, missed, 1.0), 1.0)


def test_damage_finds_the_layers_that_matter(model, probes):
    """Ablating the shipped model's most damaging head by hand gives the measured figure; most heads damage far less."""
    each = Report(shown=False).each
    damage = measure_damage(model, probes, TILING, each)
    assert damage.min() >= 0
    assert damage.max() > 20 * np.median(damage)
    layer, head = np.unravel_index(damage.argmax(), damage.shape)
    budgets = np.ones(damage.shape, np.float32)
    budgets[layer, head] = 0
    kept = Judge(model, probes)(WithBudgets(TILING), budgets)
    by_hand = kept.text_kl - PROBE_WEIGHT * np.log(kept.probes_kept)
    assert damage[layer, head] == pytest.approx(by_hand, rel=0.02)


def test_reading_all_keeps_all(model, probes):
    kept = Judge(model, probes)(WithBudgets(TILING), np.ones((8, 2), np.float32))
    assert kept.text_kl < 1e-5
    assert kept.text_kept == pytest.approx(1, abs=1e-3)
    assert (kept.found, kept.density) == (kept.found_dense, 1.0)


def test_a_plan_holds_what_it_promises_on_windows_that_chose_nothing(model, windows, tmp_path, monkeypatch):
    """An interrupted calibration resumes without repeating a measurement.

    Takes 15 s, because each plan tried on the held-out text compiles a program.
    """
    options = {"keep": 0.9, "max_kl": 0.1}
    rows, notes, asked, judge = [window[:512].tolist() for window in windows], tmp_path / "notes", [], Judge.__call__
    limit = 5

    def counted(self, *what):
        if len(asked) == limit:
            raise KeyboardInterrupt
        asked.append(what)
        return judge(self, *what)

    monkeypatch.setattr(Judge, "__call__", counted)
    quick = {"crossover": 0, "progress": False, "notes": notes}
    calibrated = partial(calibrate, model, rows, **options, **TILING.always(), **quick)
    with pytest.raises(KeyboardInterrupt, match="stopped during ablation.*the same command resumes from here"):
        calibrated()
    with notes.open("a") as file:
        file.write('{"name": "a line that a kill cut sho')
    limit = math.inf
    plan = calibrated()
    names = [line.get("name") for line in read_lines(notes)]
    assert len(names) == len(set(names)) == len(asked) + 2  # plus the subject and the missed mass
    assert calibrated() == plan
    assert len(asked) == len(names) - 2
    found = plan.promise["measured"]
    assert plan.promise.items() >= options.items()
    assert Target(**options).holds(type("Found", (), found))
    assert found["density"] < 1
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    said = "\n".join(summary(plan))
    assert "keys read" in said
    assert "planted answers" in said
    model.with_attention("kascade", plan)


@pytest.mark.parametrize(("num_windows", "grown_on", "judged_on"), [(8, 6, 7), (4, 3, 3)])
def test_the_promise_is_of_text_that_chose_nothing(tmp_path, monkeypatch, num_windows, grown_on, judged_on):
    """Each window starts with distinct tokens, which tell what each judge saw; the last judge measures the promise."""
    model = replace(load_stacked(save_tiny(tmp_path)), tokenizer=None)
    rows = [np.random.default_rng(i).integers(0, 256, 512 - 8 * i).tolist() for i in range(num_windows)]
    seen, judge = [], Judge.__call__

    def recorded(self, *what):
        kept = judge(self, *what)
        starts = [probe.tokens[:8].tolist() for probe in self.probes]
        seen.append(([next(i for i, row in enumerate(rows) if row[:8] == start) for start in starts], kept))
        return kept

    monkeypatch.setattr(Judge, "__call__", recorded)
    plan = calibrate(model, rows, max_kl=9.0, crossover=0, progress=False, minimum=0, local=0, sinks=0)
    order = [windows for i, (windows, _) in enumerate(seen) if i == 0 or windows != seen[i - 1][0]]
    chose = [[0, math.ceil((num_windows - num_windows // 4) / 2)], [0]]
    assert order == [*chose, [grown_on], *([[judged_on]] if judged_on != grown_on else [])]
    assert plan.promise["measured"] == seen[-1][1].metrics()
    assert plan.promise["judged_tokens"] == [512 - 8 * judged_on]
    assert plan.promise["fresh"] == (judged_on != grown_on)
    assert plan.promise["held"] == Target(max_kl=9.0).holds(seen[-1][1])
    said = promise_line(plan)
    assert f"{512 - 8 * judged_on} tokens" in said
    assert ("new text" if judged_on != grown_on else "the text that set its budget") in said
    run_on = {0, chose[0][1], grown_on, judged_on}
    assert plan.provenance["corpus_tokens"] == sum(512 - 8 * i for i in run_on)
    assert plan.provenance["corpus_tokens"] < sum(map(len, rows))


def test_a_search_with_a_query_tile_that_does_not_divide_a_chunk(model, windows):
    """A budget of 1 misses no mass, though query tiles of 48 rows do not divide a chunk."""
    tiling, probes = replace(TILING, query_tile=48), probes_of(model, windows[:1], 1024, 1)
    missed = measure_missed(model, probes, tiling, Report(shown=False).each)
    np.testing.assert_allclose(missed[..., -1], 0, atol=1e-6)
    assert missed[..., 0].min() > 0


def test_missed_mass_does_not_depend_on_the_chunks(model, windows, monkeypatch):
    """Each chunk's rows have positions of the window: a chunk taken for the first would see too few keys."""
    probes = probes_of(model, windows[:1], 1024, 1)
    found = []
    for chunk in (score.CHUNK, 2 * score.CHUNK):
        monkeypatch.setattr(score, "CHUNK", chunk)
        found.append(measure_missed(model, probes, TILING, Report(shown=False).each))
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-5)


KEPT = Kept(
    text_kl=0.01, text_loss=2.0, text_loss_dense=1.99, text_kept=0.99, probes_kl=0.01, probes_kept=0.99, asked=9,
    found_dense=9, found=9, density=0.3, tokens=100,
)  # fmt: skip


@pytest.mark.parametrize(
    ("target", "changes", "holds"),
    [
        ({"keep": 0.98}, {}, True),
        ({"keep": 0.99}, {}, True),
        ({"keep": 0.98}, {"text_kept": 0.97}, False),
        ({"keep": 0.98}, {"probes_kept": 0.97}, False),
        ({"keep": 0.98}, {"text_kl": 9.0, "probes_kl": 9.0}, True),
        ({"max_kl": 0.02}, {}, True),
        ({"max_kl": 0.01}, {}, True),
        ({"max_kl": 0.02}, {"text_kl": 0.03}, False),
        ({"max_kl": 0.02}, {"probes_kl": 0.03}, False),
        ({"max_kl": 0.02}, {"text_kept": 0.1, "probes_kept": 0.1}, True),
        ({"keep": 0.98, "max_kl": 0.02}, {}, True),
        ({"keep": 0.98, "max_kl": 0.02}, {"text_kept": 0.97}, False),
        ({"keep": 0.98, "max_kl": 0.02}, {"probes_kl": 0.03}, False),
        ({"keep": 0.98}, {"text_kept": math.nan}, False),
        ({"keep": 0.98}, {"probes_kept": math.nan}, False),
        ({"max_kl": 0.02}, {"text_kl": math.nan}, False),
        ({"max_kl": 0.02}, {"probes_kl": math.nan}, False),
    ],
)
def test_a_target_holds_on_text_and_on_answers(target, changes, holds):
    assert Target(**target).holds(replace(KEPT, **changes)) == holds


def test_a_held_out_window_too_short_for_its_facts_is_named_before_the_search(tmp_path, monkeypatch):
    model = replace(load_stacked(save_tiny(tmp_path)), tokenizer=None)
    rows = [np.arange(size) % 256 for size in (512, 512, 512, 160)]
    monkeypatch.setattr(Judge, "__call__", lambda *_: pytest.fail("a judge ran before the windows were checked"))
    with pytest.raises(ValueError, match="window of 160 tokens is too short"):
        calibrate(model, rows, keep=0.9, crossover=0, progress=False)


def test_a_notebook_of_something_else_is_written_afresh(tmp_path):
    path = tmp_path / "notes"
    assert Notebook(path, {"a": 1}).keep("x", lambda: 0.1) == 0.1
    assert Notebook(path, {"a": 1}).keep("x", lambda: 0.2) == 0.1
    assert Notebook(path, {"a": 2}).keep("x", lambda: 0.3) == 0.3
    nowhere = Notebook()
    assert [nowhere.keep("x", lambda value=value: value) for value in (1, 2)] == [1, 2]  # no file: nothing is kept
    path.write_text("not ours\nat all\n")
    assert Notebook(path, {"a": 2}).keep("x", lambda: 0.4) == 0.4
    assert Notebook(path, {"a": 2}).keep("x", lambda: 0.5) == 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 1.0}, "keep=1.0 must be above 0 and below 1"),
        ({"max_kl": 0.0}, "max_kl=0.0 must be above 0"),
        ({"max_kl": math.inf}, "max_kl=inf must be above 0 and finite"),
        (
            {"keep": 0.9, "anchors": 3},
            "anchors=3 cannot be combined with keep or max_kl: drop it, or drop keep and max_kl",
        ),
        (
            {"max_kl": 1.0, "fraction": 0.7, "heads": "pooled"},
            "fraction=0.7, heads='pooled' cannot be combined with keep",
        ),
    ],
)
def test_targets_that_make_no_sense_are_named(model, windows, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(model, windows, progress=False, **options)
