"""Choices of the TPU prefill kernel undone one by one: each variant is another program and still right."""

import dataclasses

import calls
import jax
import numpy as np
import pytest

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec
from tessera.attention.tpu import prefill as tpu_prefill
from tessera.attention.workloads import Workload
from tessera.deviceless import inspection
from tessera.workbench.studies import ablations, blocks

[DENSE] = (kernel for kernel in tpu_prefill.KERNELS if kernel.role == "dense")
CONFIG = tpu_prefill.Config(block_t=64, block_s=512, chunk=128, step=256, matrix_sums=False)
ROWS = Workload(  # blocks that every row sees whole, four updates each, then the diagonal
    name="ablations",
    num_queries=64,
    num_keys=2080,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    spec=AttentionSpec(),
    q_start=(2010,),
    kv_len=(2074,),
    tags=("test", "prefill"),
)


CORNER = tpu_prefill.Config(block_t=512, block_s=1024, chunk=128, step=512, matrix_sums=False)
TURNS = dataclasses.replace(  # keys before the corner and the corner; and askew: two token blocks a turn
    ROWS, name="corner", batch=2, num_queries=512, num_keys=1120, q_start=(512, 600), kv_len=(1024, 1112)
)


@pytest.fixture
def fresh():
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("choice", ablations.CHOICES)
def test_a_kernel_without_a_choice_is_another_program_with_the_same_answer(choice, fresh):
    call = calls.make(ROWS, "dense", "bfloat16")
    answer = oracle.attend(call)
    allowed = oracle.tolerance(call, answer, "bfloat16", folded=True)
    with ablations.undone(choice):
        result = calls.run(DENSE, call, "bfloat16", CONFIG)
    error = np.abs(result.out - answer.out).max()
    if choice == "float32 accumulation":
        assert error > 2 * np.abs(calls_error(call)).max()  # what summing in bfloat16 costs
        assert error < 0.05 * np.abs(answer.out).max() + 0.02
    else:
        assert error <= allowed.out
    assert np.abs(result.lse - answer.lse).max() <= allowed.lse


@pytest.mark.parametrize("choice", [choice for choice in ablations.CHOICES if choice != ablations.AS_IT_IS])
def test_without_a_choice_the_corner_has_the_same_answer(choice, fresh):
    """As the kernel as it ships, which test_tpu_corner holds against the reference."""
    call = calls.make(TURNS, "dense", "bfloat16")
    shipped = calls.run(DENSE, call, "bfloat16", CORNER)
    jax.clear_caches()
    with ablations.undone(choice):
        result = calls.run(DENSE, call, "bfloat16", CORNER)
    assert np.abs(result.out - shipped.out).max() <= 0.05
    assert np.abs(result.lse - shipped.lse).max() <= 0.01


def calls_error(call: oracle.Call) -> np.ndarray:
    """Of the kernel as it ships."""
    jax.clear_caches()
    return calls.run(DENSE, call, "bfloat16", CONFIG).out - oracle.attend(call).out


@pytest.mark.parametrize("chip", blocks.DEVICES)
def test_every_variant_is_another_program_on_every_chip(chip, fresh):
    spec, shapes = inspection.call(batch=1, head_dim=128, dtype="bfloat16", spec=AttentionSpec(), fraction=1.0,
                                   **{**ablations.CALL, "length": 8192})  # fmt: skip
    programs = set()
    for choice in ablations.CHOICES:
        jax.clear_caches()
        call, arguments, _ = ablations.attention_without(choice, DENSE.name, vars(spec), shapes._asdict())
        with blocks.on_chip(chip):
            lowered = jax.jit(call).trace(*arguments).lower(lowering_platforms=("tpu",))
        programs.add(lowered.as_text())
    assert len(programs) == len(ablations.CHOICES)


def test_undoing_leaves_the_kernel_as_it_was():
    places = [(place, name) for changes in ablations.CHOICES.values() for place, name, _ in changes()]
    held = [getattr(place, name) for place, name in places]
    for choice in ablations.CHOICES:
        with pytest.raises(RuntimeError, match="halfway"), ablations.undone(choice):
            raise RuntimeError("halfway")
    assert [getattr(place, name) for place, name in places] == held
