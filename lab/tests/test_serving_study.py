"""The arithmetic of `python -m lab study serving`: statistics, goals, resuming, records and their table."""

from types import SimpleNamespace

import numpy as np
import pytest

from lab.report.figures_served import figures
from lab.served import abuse, faults, load_client, simulated, stand
from lab.served.load_client import Outcome
from lab.studies import serving
from lab.studies.serving import CASES, Case, Goal, grouped, record, study
from tessera.core import files
from tessera.runtime.costs import LinearCosts
from tessera.runtime.spill import Spill


def test_jain_is_1_for_equal_shares_and_1_of_n_for_one_taker():
    assert stand.jain([5, 5, 5]) == pytest.approx(1)
    assert stand.jain([7, 0, 0, 0]) == pytest.approx(0.25)
    assert stand.jain([1, 2]) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="at least one positive"):
        stand.jain([0, 0])


def test_times_are_of_texts_and_tokens_of_usage():
    outcomes = [
        Outcome(text="abc", pieces_s=[1.0, 1.5, 3.0], usage={"completion_tokens": 3}),
        Outcome(usage={"completion_tokens": 1}),
    ]
    assert stand.rate(outcomes, 2.0) == 2.0
    assert stand.first_s(outcomes) == [1.0]
    assert stand.gaps_s(outcomes) == [0.5, 1.5]
    with pytest.raises(ValueError, match="no request received the text"):
        stand.percentile([], 50)


def test_prompts_share_their_beginning_and_no_more():
    drawn = load_client.prompts(range(500), 20, 30, seed=0, shared=10)
    assert {len(prompt) for prompt in drawn} == {30}
    assert len({tuple(prompt[:10]) for prompt in drawn}) == 1
    assert len({tuple(prompt[10:]) for prompt in drawn}) == 20


def test_a_simulated_request_takes_its_prefill_and_waits_for_those_before_it():
    costs = LinearCosts(base=1e-3, row=1e-4, pair=0.0, answer=1e-3, key=0.0)
    alone, apart = simulated.first_of(costs, 0.1, stand.MODELS["demo"], [0.0, 10.0])
    assert [alone, apart] == pytest.approx([1e-3 + 256e-4] * 2)
    first, second = simulated.first_of(costs, 0.1, stand.MODELS["demo"], [0.0, 0.001])
    assert first == pytest.approx(alone)
    assert second == pytest.approx(2 * alone + 1e-3 - 0.001)  # its own step also decodes the first one's row
    five = simulated.Padded(costs=costs, batches=(1, 4, 16)).step_s([], [100] * 5)
    assert five == pytest.approx(costs.step_s([], [100] * 16))


def test_a_goal_is_met_at_its_bound():
    assert Goal("", "<=", 1.5).met(1.5)
    assert not Goal("", "<=", 1.5).met(1.51)
    assert Goal("", ">=", 3.0).met(3.0)
    assert not Goal("", ">=", 3.0).met(2.99)
    assert CASES["crowd"].goal("speedup", "demo").bound == 3.0
    assert CASES["crowd"].goal("speedup", "smollm2").bound == 2.0


def test_attacks_are_judged_by_how_they_end():
    ends = {name: [(413, 0.02), (400, 0.04), (400, 9.0)] for name in abuse.BODIES}
    ends |= {name: [(200, 0.5), (400, 2.0)] for name in abuse.COSTLY} | {"slow": [(0, 8.0), (408, 8.5)]}
    assert abuse.judged(ends) == {"refused_s": 0.04, "cut_s": 8.5, "wrong": 0}
    name, other = next(iter(abuse.BODIES)), next(iter(abuse.COSTLY))
    ends |= {name: [(200, 0.3)], other: [(500, 0.1), (abuse.HANGS, 60.0)], "slow": [(200, 1.0)]}
    assert abuse.judged(ends) == {"refused_s": 0.3, "cut_s": 60.0, "wrong": 4}


def test_every_figure_of_a_record_is_judged_by_its_median_and_shown():
    lines = [
        {"case": "document", "model": "demo", "seed": seed, "share": 1.0, "facts": {}}
        | {"figures": {"later_of_first": later, "control": 1.0, "differing": 0}}
        for seed, later in enumerate((0.1, 0.2, 0.5))
    ]
    [group] = grouped([lines[0] | {"figures": {}}, *lines])
    made = record(*group)
    assert made.samples == (0.1, 0.2, 0.5)
    assert {name: found["met"] for name, found in made.facts["figures"].items()} == {
        "later_of_first": False,
        "control": True,
        "differing": True,
    }
    table = figures([made])
    assert "0.200 (0.100 to 0.500) | <= 0.15 | **missed**" in table
    assert "| 0 | <= 0 | met" in table
    failed = record("document", "demo", [{"share": 1.0, "error": "ValueError: no"}])
    assert "ValueError: no |  | **failed**" in figures([failed])


def test_a_resumed_study_measures_only_what_is_missing(tmp_path, monkeypatch):
    asked = []

    def measure(stand, seed):
        asked.append(seed)
        if len(asked) == 2:
            raise ValueError("the server ended")
        return {"speedup": 4.0}, {}

    monkeypatch.setattr(
        serving, "CASES", {"crowd": Case(measure=measure, title="", goals={"speedup": Goal("", ">=", 3.0)})}
    )
    flags = SimpleNamespace(case=(), model="demo", seeds=3, share=1.0, out=tmp_path / "a", resume=True, report=False)
    assert study(flags) == 1
    assert study(flags) == 0
    assert len(asked) == 4
    assert asked[1] == asked[3]  # the seed that failed
    assert ["error" in line for line in files.read_lines(flags.out)] == [False, True, False, False]
    flags.resume = False
    study(flags)
    assert len(asked) == 7


def test_an_audit_counts_whole_and_damaged_pages_of_all_models(tmp_path):
    keys = [bytes([i]) * 32 for i in range(8)]
    for salt in (b"salt", b"another model"):
        spill = Spill(tmp_path, salt, 1 << 20)
        assert all(spill.save(key, [np.arange(9)]) for key in keys)
    assert faults.audit(tmp_path) == (16, 0)
    [one, _], [moved, _] = (sorted(tmp_path.rglob(keys[i].hex())) for i in (3, 4))
    one.write_bytes(one.read_bytes()[:-1])
    moved.rename(moved.with_name("ab" * 32))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / keys[0].hex()).write_text("no page")
    assert faults.audit(tmp_path) == (14, 2)
