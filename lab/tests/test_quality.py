"""The demo model's shipped plan: pass keys are found because of the tiles that it selects."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import optimized

import tessera
from lab.demo.reading import Reader, policies
from lab.passkeys import passkey_tasks
from tessera.core.files import DEMO_MODEL
from tessera.generate import find_plan
from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import open_source

LENGTHS = (768, 2048)


@pytest.fixture(scope="module")
def readers():
    """Return readers: dense, the shipped plan at every length, and the plan without the tiles that it selects.

    The layers are stacked and all prefill calls have one size, so that a side compiles two programs.
    """
    dense = tessera.load(DEMO_MODEL)
    dense = replace(dense, params=load_params(open_source(DEMO_MODEL), stacked=True))
    return {name: Reader(model, num_keys=max(LENGTHS)) for name, model in policies(dense).items()}


@optimized()
@pytest.mark.parametrize("length", [LENGTHS[0], pytest.param(LENGTHS[1], marks=pytest.mark.exhaustive)])
def test_pass_keys_need_what_the_shipped_plan_chooses(readers, length):
    """Dense and the plan find at least 5 of 6 keys; the plan without its selection finds at most one."""
    found, density = dict.fromkeys(readers, 0), {name: [] for name in readers}
    for task in passkey_tasks(6, length):
        for name, reader in readers.items():
            answer = reader.answer(task.prompt.tolist(), len(task.answer))
            found[name] += answer.tokens == task.answer.tolist()
            density[name].append(answer.density)
    assert found["dense"] >= 5
    assert found["kascade"] == found["dense"]
    assert found["control"] <= 1
    assert np.mean(density["control"]) < np.mean(density["kascade"]) < 0.5


def test_the_shipped_plan_is_the_one_that_kascade_finds_and_says_what_it_promised():
    plan = find_plan("kascade", None, str(DEMO_MODEL))
    assert plan.budgets
    assert plan.own == tuple(range(plan.num_layers))
    measured, asked = plan.promise["measured"], plan.promise["max_kl"]
    assert measured["text_kl"] <= asked
    assert plan.promise["fresh"]
    assert plan.promise["held"] == (max(measured["text_kl"], measured["probes_kl"]) <= asked)
