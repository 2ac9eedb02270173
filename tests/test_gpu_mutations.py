"""The gates bite: a kernel without one of its waits, fences, arrivals or turns, or without the last listed tile, fails.

The interpreter must notice by a race, an error, a wrong value or a wait that never ends. Each kernel is broken in every
way it can be, at the last place of that kind first; `tests/mutants.py` tries every place, `docs/gpu.md` lists those
that go unseen.
"""

import pytest
from mutants import GRADIENTS, KINDS, Mutants

from tessera.deviceless import gpu_gates

KERNELS = [*(kernel.name for kernel in gpu_gates.gpu_kernels()), *GRADIENTS]


@pytest.fixture(scope="module")
def mutants():
    found = Mutants()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("kernel", "kind"), [(k, kind) for k in KERNELS for kind in KINDS if kind != "list" or k.endswith("sparse")]
)
def test_a_broken_kernel_is_caught(mutants, kernel, kind):
    tried = []
    for site in reversed(range(mutants.sites(kernel)[kind])):
        if mutants.caught(kernel, kind, site):
            return
        tried.append(site)
    assert not tried, f"{kernel} lacks its {kind} at any of {tried}, and passes"
    assert kind in ("arrival", "fence"), f"{kernel} has no {kind}"  # one warpgroup alone hands nothing back
