"""Schedules of XLA's own operations, and what whole decode programs for a TPU copy."""

from pathlib import Path

import pytest

from tessera.deviceless import hlo
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import fusions, predict, schedule
from tessera.deviceless.tpu.schedule import LAUNCH, STEP, Region, Schedule

TESTS = Path(__file__).parents[1]


def region(name: str, bundles: int, products: int = 0) -> Region:
    return Region(name=name, bundles=bundles, slots={}, product_cycles=products, depth=1, loops=0)


def made(turns: int | None, *regions: Region) -> Schedule:
    return Schedule(kernel="fusion.1", capacity={}, regions=regions, vmem_bytes=0, smem_bytes=0, turns=turns)


@pytest.mark.parametrize(
    ("turns", "blocks", "cores", "cycles"),
    [
        (22, 20, 1, 10 + 20 * 100),
        (24, 20, 1, 10 + 20 * 100),  # a longer pipeline has more turns
        (22, 20, 2, 10 + 20 * 100),  # a second core that this operation does not use
        (12, 20, 2, 10 + 10 * 100),
        (13, 21, 2, 10 + 11 * 100),
        (22, None, 1, 10 + 20 * 100),
        (None, None, 1, 10 + 100),
    ],
)
def test_cycles_of_a_loop_over_blocks(turns, blocks, cores, cycles):
    found = fusions.of_schedule(made(turns, region(LAUNCH, 10), region(STEP, 80, 100)), blocks, cores)
    assert found.cycles == cycles


def test_straight_line_code_runs_once():
    assert fusions.of_schedule(made(None, region(LAUNCH, 312)), 4, 1).cycles == 312


def test_a_loop_inside_a_scope_is_not_the_grids():
    """Two grid steps on two cores need no loop. The kernel's first loop then belongs to a scope."""
    folder = TESTS / "golden" / "schedule"
    bundles, slots = (next(folder.glob(f"*-{name}.txt")).read_text() for name in ("final_bundles", "utilization"))
    loop = "loop: start=0, step=1, limit=4\n"
    scoped = "%1 = vtrace 7 /* TraceMeStart(copy) [ */\n"
    assert schedule.parse("little.1", bundles, slots, loop + scoped).turns == 4
    alone = schedule.parse("little.1", bundles, slots, scoped + loop)
    assert alone.turns is None
    assert predict.cores_at_work(alone, 2.0, 2) == 2


def test_the_longer_of_cycles_and_bytes_counts_and_copies_run_meanwhile():
    def operation(name, opcode, count):
        return hlo.Operation(name=name, opcode=opcode, bytes=count, cycles=None)

    def cycles(**counts):
        return {name: fusions.Fusion(name=name, blocks=1, cycles=n, loops=0) for name, n in counts.items()}

    run = [operation("a", "fusion", 1000), operation("b", "fusion", 200), operation("c", "copy-start", 500)]
    assert fusions.seconds(run, cycles(a=100, b=900), 1.0, 1.0) == (1700.0, 1900.0)
    assert fusions.seconds(run, cycles(a=100), 1.0, 1.0) == (1700.0, 1700.0)


def test_schedules_of_a_compiled_product():
    """The product takes the matrix units at least 2 M N K / (flops per cycle), and little more."""
    program = factory_program("quant_subjects:weight_product", rows=512, inputs=1024, outputs=2048)
    found = tpu.compile_for("v5e", program, paths=[str(TESTS)], with_fusions=True)
    least = 512 * 1024 * 2048 / (4 * 128 * 128)
    assert least <= sum(fusion.cycles for fusion in found.fusions.values()) <= 1.25 * least


@pytest.mark.parametrize(("attention", "cache", "width"), [("dense", "bfloat16", 2), ("kascade", "int8", 1)])
def test_a_decode_step_copies_no_cache_bytes(attention, cache, width):
    """The engine's program with layers as `load` makes them; stacked layers copy one layer's keys and values."""
    program = factory_program("deviceless_subjects:decode_token", attention=attention, cache=cache)
    found = tpu.compile_for("v6e", program, paths=[str(TESTS)])
    assert found.error is None, found.error
    one_array = 2 * 2 * 131072 * 128 * width
    assert found.memory["temp"] < one_array / 8
    assert found.memory["alias"] >= 4 * one_array
    large = [operation for operation in found.operations if operation.bytes > one_array / 8]
    assert not large, large
