"""Every mutant of a Hopper kernel fails: one without a wait, fence, arrival, last loop turn or last listed tile.

The interpreter must report a race, an error, a wrong value or an endless wait.
"""

import pytest
from mutants import ABSENT, EQUIVALENT, GRADIENTS, KINDS, Mutants

from tessera.attention.dispatch import KERNELS as ALL

KERNELS = [*(k.name for k in ALL if k.platform == "gpu" and k.simulable and k.runs_on("9.0")), *GRADIENTS]


@pytest.fixture(scope="module")
def mutants():
    found = Mutants()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("kernel", "kind"), [(k, kind) for k in KERNELS for kind in KINDS if kind != "list" or k.endswith("sparse")]
)
def test_a_broken_kernel_is_caught(mutants, kernel, kind):
    places = mutants.sites(kernel)[kind]
    assert (not places) == ((kernel, kind) in ABSENT), f"{kernel} has {places} of {kind}: update mutants.ABSENT"
    unseen = {place for site, place in enumerate(places) if not mutants.caught(kernel, kind, site)}
    excused = {place for k, some, place in EQUIVALENT if (k, some) == (kernel, kind)}
    assert unseen == excused, f"{kernel} without {kind} at {unseen - excused} passes"
