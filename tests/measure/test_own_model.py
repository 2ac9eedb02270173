"""`tessera bench --model`: any model, dense and with its plan, in turns."""

import dataclasses

import pytest
from tiny import load_stacked

from tessera.cli.main import main
from tessera.core.files import DEMO_MODEL
from tessera.measure import evidence, own_model
from tessera.sparse.plan import Plan


def test_two_records_a_length_from_one_interleaved_run(tmp_path, monkeypatch):
    monkeypatch.setattr(own_model, "ROUNDS", 1)
    monkeypatch.setattr(own_model, "load", load_stacked)
    out, plan = tmp_path / "records.jsonl", tmp_path / "plan.json"
    dataclasses.replace(Plan.load(DEMO_MODEL / "plan.json"), crossover_tokens=0).save(plan)
    command = "tessera bench --model demo"
    assert own_model.run(DEMO_MODEL, plan, lengths=(256, 512, 10**6), out=out, command=command) == 0
    records = evidence.read(out)
    assert [(r.what.kernel, r.what.workload) for r in records] == [
        (name, f"own_model_{length}") for length in (256, 512) for name in ("dense", "kascade")
    ]
    for dense, ours in zip(records[::2], records[1::2]):
        assert set(dense.density) == {1.0}
        assert min(ours.density) < 0.9  # dense work labelled sparse would have density 1
        assert ours.comparison.ratio == pytest.approx(dense.median / ours.median)
        assert ours.how.interleaved


def test_the_plan_is_timed_with_its_cross_over(tmp_path, monkeypatch):
    monkeypatch.setattr(own_model, "ROUNDS", 1)
    monkeypatch.setattr(own_model, "load", load_stacked)
    out, plan = tmp_path / "records.jsonl", tmp_path / "plan.json"
    dataclasses.replace(Plan.load(DEMO_MODEL / "plan.json"), crossover_tokens=256).save(plan)
    own_model.run(DEMO_MODEL, plan, lengths=(256, 512), out=out)
    short, long = (r for r in evidence.read(out) if r.what.kernel == "kascade")
    assert set(short.density) == {1.0}
    assert min(long.density) < 0.95


def test_what_does_not_fit_is_named(tmp_path, capsys):
    with pytest.raises(ValueError, match="must include one within the model's context of 4096"):
        own_model.run(DEMO_MODEL, lengths=(8192,), out=tmp_path / "records.jsonl")
    assert main(["bench", "--plan", "plan.json"]) == 2
    assert "--plan plan.json needs --model" in capsys.readouterr().err
