"""Tables and pictures of `tessera eval --suite real`, from the stored records."""

import dataclasses
import json
from itertools import product
from pathlib import Path

import pytest

from lab.plans import REAL_PLAN
from lab.report import real, real_pictures
from tessera.measure import evidence
from tessera.measure.judge import contenders
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import THROUGHOUT, Plan

EVIDENCE = Path(__file__).parents[2] / "evidence"


@pytest.fixture(scope="module")
def records():
    return [record for path in sorted(EVIDENCE.glob("real-*.jsonl")) for record in evidence.read(path)]


def test_tables_and_pictures_are_drawn_from_the_records(records):
    table = real.text(records)
    assert table.count("\n|") >= 3
    assert "window + sink" in table.splitlines()[0]
    for draw in real_pictures.PICTURES.values():
        assert draw([]) is None
    assert real_pictures.real_text(records).svg.startswith("<svg")


def test_a_task_that_the_control_does_as_well_is_marked(records):
    [plan, *_] = [r for r in real.answered(records, real.TASK) if r.facts["policy"] == contenders.PLAN]
    for says_nothing in (True, False):
        marked = dataclasses.replace(plan, facts=plan.facts | {"against_control": {"says_nothing": says_nothing}})
        assert ("says nothing about the choice of keys" in real.tasks([marked])) == says_nothing


def test_gaps_are_ratios_to_the_exact_choice(records):
    plans = [r for r in real.answered(records, real.TEXT, alone=True) if r.facts["policy"] == contenders.PLAN]
    plans = [dataclasses.replace(r, samples=list(r.samples) * 5) for r in plans]  # an interval needs five samples
    exact = [
        dataclasses.replace(
            record,
            what=dataclasses.replace(record.what, workload=record.what.workload.replace("the plan", real.EXACT)),
            samples=[sample / 2 for sample in record.samples],
            facts=record.facts | {"policy": real.EXACT},
        )
        for record in plans
    ]
    assert real.gaps([*plans, *exact]).count("2.00x (2.00 to 2.00)") == len(plans) > 0
    assert real.gaps(plans) == ""


def test_other_plans_have_a_column_each(records):
    plans = [r for r in real.answered(records, real.TEXT) if r.facts["policy"] == contenders.PLAN]
    other = [dataclasses.replace(r, facts=r.facts | {"policy": f"{contenders.OTHER}same"}) for r in plans]
    assert "| the plan | other plan: same |" in real.others([*plans, *other]).splitlines()[0]
    assert real.others(plans) == ""


def test_the_published_tables_judge_the_shipped_plan(records):
    """The choice alone was judged without cross-overs; its records are older than the field `decode_crossover`."""
    shipped = json.loads(json.dumps(dataclasses.asdict(Kascade.from_plan(Plan.load(REAL_PLAN)))))
    for op, alone in product((real.TEXT, real.TASK), (False, True)):
        judged = [r for r in real.answered(records, op, alone) if r.facts["policy"] == contenders.PLAN]
        assert len(judged) >= (12 if alone else 6)
        for record in judged:
            assert THROUGHOUT | record.what.config == (shipped | THROUGHOUT if alone else shipped)
