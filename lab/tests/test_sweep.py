"""The sweep of the TPU kernels: one short call per kernel compiles, and the plan of cases is complete."""

import itertools

import pytest

from lab.studies import sweep
from lab.studies.programs import ROOT, kernels_of
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import predict


@pytest.fixture(scope="module")
def compiler():
    """Start one compiling process for the file's tests, because starting takes longer than most compilations."""
    with tpu.Compiler(paths=[ROOT]) as found:
        yield found


NAMES = [*sorted(kernel.name for kernel in kernels_of("tpu")), sweep.GRADIENT]
ONCE = list(zip(itertools.cycle(tpu.TOPOLOGIES), NAMES))
"""(chip, kernel) for every kernel, with the chips in turn: two have narrow matrix units, two have wide ones."""
MORE = dict.fromkeys(case for case in itertools.product(("v5e", "v7x"), NAMES) if case not in ONCE)
FAST = [*ONCE, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)]


@pytest.mark.parametrize(("chip", "kernel"), FAST)
def test_kernels_compile_with_their_own_blocks(chip, kernel, compiler):
    """Compile one short call per kernel: a fast part of `python -m lab study compiles --platform tpu`."""
    case = {
        "chip": chip,
        "kernel": kernel,
        "head_dim": 128,
        "dtype": "bfloat16",
        "tile": 128,
        "length": 1024,
    }
    result = sweep.run(case, compiler, limit_s=300)
    assert result["error"] is None


def test_the_sweep_covers_every_kernel_chip_and_head_dim():
    found = list(sweep.cases(tuple(tpu.TOPOLOGIES)))
    seen = {(c["chip"], c["kernel"], c["head_dim"], c["dtype"]) for c in found}
    wanted = {(chip, k.name, dim, dtype) for k in kernels_of("tpu") for chip in tpu.TOPOLOGIES
              for dim in sweep.HEAD_DIMS for dtype in k.dtypes}  # fmt: skip
    gradient = itertools.product(tpu.TOPOLOGIES, [sweep.GRADIENT], sweep.HEAD_DIMS, ("bfloat16", "float32"))
    assert seen == wanted | set(gradient)
    assert len({sweep.identity(case) for case in found}) == len(found)


@pytest.mark.parametrize(
    ("chip", "length", "dim", "dtype"),
    [
        ("v5e", 16384, 64, "float32"),
        pytest.param("v5p", 32768, 128, "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("v6e", 16384, 128, "bfloat16", marks=pytest.mark.exhaustive),
        ("v7x", 32768, 256, "bfloat16"),
    ],
)
def test_the_gradient_keeps_the_matrix_unit_busy(chip, length, dim, dtype):
    """On the oldest and the newest chip, every scope of the schedule has a count, and the matrix unit is over 85 %
    busy.

    Slow: the chip's own compiler runs.
    """
    program = factory_program("lab.studies.programs:tpu_gradient_call", length=length, head_dim=dim, dtype=dtype)
    found = tpu.compile_for(chip, program, paths=[ROOT], limit_s=200)
    assert found.error is None
    assert not predict.predict(found, found.executions).assumed
    [kernel] = found.schedules
    whole = kernel.region("whole_chunk")
    assert whole.slots["MXU"] / kernel.capacity["MXU"] / whole.bundles > 0.85
