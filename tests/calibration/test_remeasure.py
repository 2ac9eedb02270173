"""`measure_again` keeps a plan's choice and measures its promise on the given text."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import PLAN, PROMISE, load_stacked, save_tiny

from tessera.calibration import crossover
from tessera.calibration.calibrate import provenance
from tessera.calibration.remeasure import measure_again
from tessera.models.files.checkpoint import fingerprint
from tessera.runtime.corpus import read_corpus


def rows(seed, count=3):
    return [np.random.default_rng((seed, i)).integers(0, 256, 512 - 16 * i).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return replace(load_stacked(save_tiny(tmp_path_factory.mktemp("model"))), tokenizer=None)


@pytest.fixture(scope="module")
def plan(model):
    """Return a plan with the provenance that calibration on these rows would write."""
    return replace(
        PLAN,
        model=fingerprint(model.params, model.config),
        head_map=((0, 1),) * PLAN.num_layers,
        minimum=0,
        crossover_tokens=7,
        promise=PROMISE | {"max_kl": 9.0},
        provenance=provenance(read_corpus(model, rows(0), 65536), 0),
    )


def reading(plan, budget):
    """Return the plan with the same budget for every head."""
    return replace(
        plan, anchors=(), own=tuple(range(plan.num_layers)), budgets=[[budget] * plan.num_kv_heads] * plan.num_layers
    )


def test_the_choice_stays_and_every_window_judges(model, plan):
    found = measure_again(model, plan, rows(1), crossover=9, progress=False)
    assert replace(found, promise=plan.promise, crossover_tokens=7) == plan
    assert found.promise["judged_tokens"] == [512, 496, 480]
    assert found.promise["max_kl"] == 9.0
    assert found.promise["fresh"]
    assert not measure_again(model, plan, rows(0), crossover=0, progress=False).promise["fresh"]


def test_the_promise_is_what_the_plan_keeps(model, plan):
    """With budget 1 the plan keeps everything; with budget 0 it misses its target of max_kl 1e-4."""
    whole, least = (
        measure_again(model, replace(reading(plan, budget), promise=plan.promise | {"max_kl": 1e-4}), rows(1),
                      crossover=0, progress=False).promise
        for budget in (1.0, 0.0)
    )  # fmt: skip
    assert whole["measured"]["density"] == 1
    assert whole["measured"]["text_kl"] < 1e-5
    assert whole["held"]
    assert least["measured"]["density"] < 0.5
    assert least["measured"]["text_kl"] > 1e-4
    assert not least["held"]


def test_the_crossover_is_measured(model, plan, monkeypatch):
    monkeypatch.setattr(crossover, "time_prefill", lambda model, policies, length: [2.0, 1.0])
    found = measure_again(model, plan, rows(1), progress=False)
    assert found.metrics["crossover"]["tokens"] == [512]
    assert found.crossover_tokens == 512
    assert found.metrics["decode_crossover"]["tokens"] == [512]
    assert found.decode_crossover in (512, 513)  # whichever this device takes


def test_refusals(model, plan):
    with pytest.raises(ValueError, match="the plan has no target to measure"):
        measure_again(model, replace(plan, promise={}), rows(1))
    with pytest.raises(ValueError, match="the plan is of another model"):
        measure_again(model, replace(plan, model="0123"), rows(1))
