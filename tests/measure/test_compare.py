"""Comparing two sets of records: a loss of 20 % is found, noise is not, and a slow day cancels out."""

from dataclasses import replace

import numpy as np
import pytest

from tessera.cli import main as cli
from tessera.measure import compare, evidence

COMMAND = "python -m lab bench --suite {} --only sparse_prefill"


def run(ours: float, peer: float | None = 1.0, *, noise: float = 0.03, seed: int = 0, unit: str = "s", **asked) -> list:
    """Return records of one interleaved run, or of one side if `peer` is None; `asked` holds `suite` and `config`."""
    rng = np.random.default_rng(seed)
    draw = lambda centre: list(centre * (1 + noise * rng.standard_normal(9)))  # noqa: E731
    how = evidence.How(iterations=9, interleaved=peer is not None)

    command, config = COMMAND.format(asked.pop("suite", "smoke")), asked.pop("config", {"length": 256})

    def record(kernel, samples, **fields):
        what = evidence.What(op="attention", kernel=kernel, workload="case", dtype="float32", config=config)
        return evidence.make(what, samples, command=command, how=how, unit=unit, **fields)

    if peer is None:
        return [record("ours", draw(ours))]
    versus = evidence.Comparison(against="peer", ratio=peer / ours)
    return [record("peer", draw(peer)), record("ours", draw(ours), comparison=versus)]


def only(before, after) -> compare.Change:
    return next(c for c in compare.changes(before, after) if c.key.kernel == "ours")


@pytest.mark.parametrize("peer", [1.0, None])
def test_twenty_percent_slower_is_a_regression(peer):
    found = only(run(1.0, peer), run(1.25, peer, seed=1))
    assert found.regressed
    assert found.factor == pytest.approx(0.8, abs=0.05)
    assert found.interval[0] < found.factor < found.interval[1]


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_none(seed):
    assert not only(run(1.0, noise=0.1, seed=seed), run(1.0, noise=0.1, seed=100 + seed)).regressed
    assert not only(run(1.0, None, noise=0.1, seed=seed), run(1.0, None, noise=0.1, seed=100 + seed)).regressed


def test_what_is_too_noisy_to_tell_is_named(capsys):
    """Either a loss of 20 % is reported, or the figure is reported as too noisy to judge, with its interval."""
    quiet, noisy = only(run(1.0), run(1.0, seed=1)), only(run(1.0, noise=0.3), run(1.0, noise=0.3, seed=1))
    assert not quiet.blind
    assert noisy.blind
    for seed in range(20):
        lost = only(run(1.0, noise=0.15, seed=seed), run(1.25, noise=0.15, seed=100 + seed))
        assert lost.regressed or lost.blind or lost.interval[0] >= 0.8  # here noise made the loss smaller than 20 %
    faster = only(run(2.0, noise=0.1), run(1.0, noise=0.1, seed=1))
    assert not faster.blind, "noise does not matter where no loss is possible"
    compare.print_changes([quiet, noisy], [])
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 figures cannot be judged (a loss of 20% or more is possible)" in said
    low, high = noisy.interval
    assert f"case: ours against peer: {noisy.factor:.3f}, 95 % interval {low:.3f} to {high:.3f}" in said


def few(ours: float, count: int) -> list:
    """Return records as `run` does, with only `count` samples."""
    made = run(ours)
    return [replace(r, samples=r.samples[:count], median=float(np.median(r.samples[:count]))) for r in made]


def test_few_samples_judge_nothing(capsys):
    """Intervals need five samples: two redrawn samples give an interval that may be narrow by chance."""
    for sides in ((few(1.0, 2), run(1.5)), (run(1.0), few(1.5, 4)), (few(1.0, 1), few(1.5, 1))):
        found = only(*sides)
        assert found.interval is None
        assert found.blind
        assert not found.regressed
    assert only(few(1.0, 5), few(1.5, 5)).regressed
    compare.print_changes([found], [])
    assert "95 % interval too few samples" in capsys.readouterr().out


def test_shares_of_trials_are_judged_by_the_trials_and_predictions_by_themselves():
    def one(value, **fields):
        what = evidence.What(op=fields.pop("op", "quality"), kernel="ours", workload="case")
        return [evidence.make(what, [value], command=COMMAND.format("demo"), **fields)]

    def share(right):
        return one(right / 100, unit="fraction", facts={"trials": 100, "right": right})

    assert only(share(95), share(60)).regressed
    assert not only(share(95), share(92)).regressed
    assert not only(share(95), share(92)).blind
    assert only(share(0), share(0)).factor == 1.0
    how = evidence.How(check="predicted from the compiler's schedule, not measured")
    assert only(one(1.0, op="predicted figure", how=how), one(1.2, op="predicted figure", how=how)).regressed


def test_a_slow_day_cancels_where_both_sides_ran_together():
    found = only(run(1.0), run(2.0, 2.0, seed=1))
    assert found.against == "peer"
    assert found.unit == "x"
    assert not found.regressed
    assert only(run(1.0, None), run(2.0, None, seed=1)).regressed


def test_more_is_better_for_a_share():
    assert only(run(0.99, None, unit="fraction"), run(0.6, None, unit="fraction", seed=1)).regressed
    assert not only(run(0.6, None, unit="fraction"), run(0.99, None, unit="fraction", seed=1)).regressed


def test_peak_memory_weighed_once_is_not_judged():
    """One process per length varies too much: four runs of the same kernels gave 98, 13, 39 and 36 MB."""
    what = evidence.What(op="memory", kernel="peak above a 64-token prompt", workload="prefill_memory_4096")
    few, many = ([evidence.make(what, [value], command=COMMAND.format("cpu"), unit="bytes")] for value in (13e6, 98e6))
    for before, after in ((few, many), (many, few)):
        [found] = compare.changes(before, after)
        assert found.blind
        assert not found.regressed


def test_what_no_longer_runs_is_said():
    what = evidence.What(op="attention", kernel="", workload="case")
    crash = evidence.make(what, (), command=COMMAND.format("smoke"), error="ValueError: no")
    assert compare.broken(run(1.0), [crash]) == [crash]
    assert compare.broken(run(1.0), run(1.0)) == []


def test_suites_and_sizes_are_never_held_against_each_other(capsys):
    """The cases of a suite with tiny sizes have the same names as the real ones."""
    real, tiny = run(1.0, suite="cpu", config={"length": 8192}), run(0.01, seed=1)
    assert not list(compare.changes(real, tiny))
    [theirs, ours] = compare.changes([*real, *tiny], run(1.0, seed=2, suite="cpu", config={"length": 8192}))
    assert (theirs.before, ours.factor) == pytest.approx((1.0, 1.0), abs=0.05)
    assert ours.against == "peer"
    assert not list(compare.changes(real, run(1.0, suite="cpu", config={"length": 4096})))
    pair = [run(1.0, config={"anchors": anchors}) for anchors in ((0, 1), [0, 1])]
    assert len(list(compare.changes(*pair))) == 2  # tuples as made, lists as read from JSON


def test_figures_that_the_second_set_lacks_are_named(capsys):
    both, alone = run(1.0), run(1.0, None)
    assert [r.what.kernel for r in compare.vanished(both, alone)] == ["peer"]
    assert compare.vanished(alone, both) == []
    assert len(compare.vanished(both, run(1.0, config={"length": 512}))) == 2
    assert compare.vanished(run(1.0, suite="cpu"), both) == [], "a suite that was not run lost nothing"
    renamed = [replace(r, code=evidence.Code(commit="f" * 40, dirty=False), date="2030") for r in both[1:]]
    assert compare.vanished([*both, *renamed], alone) == [], "what an earlier commit measured is not missed"
    short = [replace(r, samples=r.samples[:3], code=renamed[0].code, date="2030") for r in both]
    assert compare.vanished([*both, *short], alone) == both[:1], "the last run has it too, without an interval"
    compare.print_changes(list(compare.changes(both, alone)), [], compare.vanished(both, alone))
    assert "case: peer float32: in the first set, but not in the second" in capsys.readouterr().out


def test_the_table_names_the_worst_first(capsys):
    found = list(compare.changes(run(1.0), run(1.5, seed=1)))
    compare.print_changes(found, [])
    text = capsys.readouterr().out
    assert text.index("ours against peer") < text.index("case: peer")
    assert "REGRESSED" in text


def test_the_command_compares_files_and_says_regression_by_its_status(tmp_path, capsys):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    evidence.append(old, run(1.0))
    evidence.append(new, run(1.25, seed=1))
    assert cli.main(["bench", "--compare", str(old), str(old)]) == 0
    assert cli.main(["bench", "--compare", str(old), str(new)]) == 1
    assert cli.main(["bench", "--compare", str(old), str(tmp_path / "none.jsonl")]) == 2
    for name, records in {"noisy": run(1.25, noise=0.3, seed=1), "alone": run(1.0, seed=1)[1:]}.items():
        evidence.append(tmp_path / name, records)
        assert cli.main(["bench", "--compare", str(old), str(tmp_path / name)]) == compare.UNJUDGED
    evidence.append(tmp_path / "both", [run(1.25, seed=1)[1]])
    assert cli.main(["bench", "--compare", str(old), str(tmp_path / "both")]) == 1
    other = tmp_path / "other.jsonl"
    evidence.append(other, run(1.0, unit="bytes")[:0] or [])
    assert cli.main(["bench", "--compare", str(old), str(other)]) == 2
    assert "share no figure" in capsys.readouterr().err
