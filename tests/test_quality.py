"""The demo model's shipped plan: pass keys are found because of what it chooses."""

import numpy as np
import pytest

import tessera
from tessera.generate import find_plan
from tessera.quality import SHIPPED, passkey_accuracy, passkey_tasks, without_choice


@pytest.fixture(scope="module")
def models():
    """Dense, the shipped plan at every length, and the same plan reading only what it always reads."""
    kascade = tessera.load(SHIPPED, attention="kascade")
    return {
        "dense": kascade.with_attention("dense"),
        "kascade": kascade.with_attention("kascade", crossover_tokens=0),
        "control": kascade.with_attention("kascade", without_choice(kascade.plan), crossover_tokens=0),
    }


@pytest.mark.parametrize("length", [768, 2048])
def test_pass_keys_need_what_the_shipped_plan_chooses(models, length):
    """All or nearly all under dense and the plan, none or nearly none without its choice."""
    tasks = passkey_tasks(6, length)
    found = {name: passkey_accuracy(model, tasks, batch=1) for name, model in models.items()}
    assert found["dense"].num_right >= 5
    assert found["kascade"].num_right == found["dense"].num_right
    assert found["control"].num_right <= 1
    assert np.mean(found["control"].layer_density) < np.mean(found["kascade"].layer_density) < 0.5


def test_the_shipped_plan_is_the_one_that_kascade_finds_and_says_what_it_promised():
    plan = find_plan("kascade", None, str(SHIPPED))
    assert plan.budgets
    assert plan.own == tuple(range(plan.num_layers))
    measured, asked = plan.promise["measured"], plan.promise["max_kl"]
    assert max(measured["text_kl"], measured["probes_kl"]) <= asked
