"""The search for block sizes of absent TPUs: its moves, its budget, its winner and the calls that a row covers."""

from dataclasses import dataclass, fields
from itertools import product

import pytest

from lab.studies import blocks
from tessera.attention import tuned

RECORD = {"file": "some.jsonl", "workload": "w", "date": "2026-01-01T00:00:00+00:00"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    x: int
    y: int
    flag: bool = False


SPACE = [Sizes(x=x, y=y, flag=flag) for x, y, flag in product((1, 2, 4, 8), (16, 32, 64), (False, True))]
NAMES = [f.name for f in fields(Sizes)]


def no_floor(config: Sizes) -> float:
    return 0.0


def test_around_moves_one_field_by_one_value():
    at = Sizes(x=2, y=16)
    assert [c.x for c in blocks.around(at, "x", SPACE)] == [1, 4]
    assert [c.y for c in blocks.around(at, "y", SPACE)] == [32]
    assert [c.flag for c in blocks.around(at, "flag", SPACE)] == [True]
    assert [c.x for c in blocks.around(Sizes(x=3, y=16), "x", SPACE)] == [2, 4]  # 3 lies outside the space


def test_the_search_walks_down_to_the_best_and_keeps_to_its_budget():
    tried = []

    def ms_of(config):
        tried.append(config)
        return None if config.flag else abs(config.x - 8) + abs(config.y - 64) / 8 + 1

    blocks.search([Sizes(x=1, y=16)], SPACE, ms_of, no_floor, NAMES, 20)
    assert Sizes(x=8, y=64) in tried
    assert len(tried) == len(set(tried)) <= 20
    tried.clear()
    blocks.search([Sizes(x=1, y=16), Sizes(x=8, y=64)], SPACE, ms_of, no_floor, NAMES, 3)
    assert tried[:2] == [Sizes(x=1, y=16), Sizes(x=8, y=64)]
    assert len(tried) == 3


def test_a_default_that_does_not_compile_is_left_behind():
    tried = []

    def ms_of(config):
        tried.append(config)
        return None if config.x == 1 else float(config.x)

    blocks.search([Sizes(x=1, y=16)], SPACE, ms_of, no_floor, NAMES, 20)
    assert Sizes(x=2, y=16) in tried


def test_what_cannot_win_by_its_bytes_is_not_tried():
    tried = []

    def ms_of(config):
        tried.append(config)
        return 10.0

    blocks.search([Sizes(x=2, y=16)], SPACE, ms_of, lambda config: 9.95 if config.x == 2 else 9.0, NAMES, 20)
    assert {config.x for config in tried[1:]} == {1, 4}


def test_a_winner_beats_the_default_by_a_hundredth():
    lines = [{"default": True, "ms": 1.0}, {"default": False, "ms": 0.995}, {"default": False, "error": "VMEM"}]
    assert blocks.winner(lines) is lines[0]
    lines[1]["ms"] = 0.98
    assert blocks.winner(lines) is lines[1]
    assert blocks.winner(lines[2:]) is None


def test_a_shipped_row_gains_what_the_prediction_can_resolve():
    rows = [row for chip in blocks.DEVICES for row in tuned.read(tuned.TABLES / f"{chip}.jsonl")]
    assert all(row.gain is None or row.gain == 1 or row.gain >= blocks.LEAST_GAIN for row in rows)


@pytest.mark.parametrize("name", blocks.CASES)
def test_the_rows_of_a_case_speak_for_its_call(name):
    case = blocks.CASES[name]
    spec, shapes = case.call()
    kernel = blocks.kernel_of(case)
    assert tuned.Row(kernel=kernel.name, bucket=case.bucket(), config={}, gain=1, record=RECORD).holds(
        kernel.name, spec, shapes
    )
    with blocks.on_chip("v6e"):
        default, space = kernel.default_config(spec, shapes), list(kernel.search_space(spec, shapes))
    assert default in space
    assert len(set(space)) == len(space)
    assert sum(len(list(blocks.around(default, f.name, space))) for f in fields(default)) >= 4
