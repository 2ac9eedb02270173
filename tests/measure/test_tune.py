"""The tuner: no configuration is tried twice, children may die, gains are confirmed, and rows can be read back."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tune_subjects

from tessera.attention import oracle, tuned
from tessera.attention.contract import AttentionSpec, KeyValues, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.cli import main as cli
from tessera.measure import evidence, tune
from tessera.measure.tune import calls, search, seeding, ship
from tessera.measure.tune.child import Child

SUBJECTS = str(Path(tune_subjects.__file__).parent)
SPACE = [{"x": x, "y": y} for x in range(12) for y in range(12)]
SMALL = Shapes(1, 128, 128, 4, 2, 16, None, "float32")
BUDGET = tune.Budget(candidates=6, quick=1, finalists=2, rounds=3, limit_s=200.0)


def bowl(proposal: search.Proposal) -> float | None:
    x, y = proposal.genome["x"], proposal.genome["y"]
    return None if x == y else (x - 9) ** 2 + (y - 4) ** 2 + 1.0


def traps(**changes) -> tune.Task:
    task = tune.Task(
        kernel=tune_subjects.TRAPS, name="traps, dense", spec=AttentionSpec(), shapes=SMALL, named="tune_subjects:TRAPS"
    )
    return dataclasses.replace(task, **changes)


class Impatient(Child):
    """Wait a hundredth of the limit for the candidate that hangs, and the whole limit for those that answer."""

    def ask(self, request):
        limit_s, hangs = self.limit_s, request["config"]["block_s"] == tune_subjects.HANGS
        self.limit_s = limit_s / 100 if hangs else limit_s
        try:
            return super().ask(request)
        finally:
            self.limit_s = limit_s


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(tune, "Child", Impatient)


def run(path: Path, task: tune.Task | None = None, **kwargs) -> dict:
    return tune.tune(task or traps(), BUDGET, path, paths=[SUBJECTS], **kwargs)


def test_the_search_finds_the_bottom_and_never_asks_twice():
    seeds = [search.Proposal(genome={"x": 0, "y": 11}, origin="default")]
    found = list(search.evolve(SPACE, seeds, bowl, budget=60, seed=1))
    asked = [search.key(p.genome) for p, _ in found]
    assert len(asked) == len(set(asked)) == 60
    assert min(f for _, f in found if f is not None) <= 3  # of 144; chance reaches this one time in three
    assert found[0][0].origin == "default"
    assert all(p.origin in ("default", "bred", "random") for p, _ in found)
    assert all(max(p.parents) < i for i, (p, _) in enumerate(found) if p.parents)


def test_the_same_seed_makes_the_same_search():
    once, again, other = (list(search.evolve(SPACE, [], bowl, budget=30, seed=s)) for s in (4, 4, 5))
    assert once == again
    assert once != other


def test_a_small_space_is_tried_whole():
    found = list(search.evolve(SPACE[:5], [], bowl, budget=50))
    assert sorted(search.key(p.genome) for p, _ in found) == sorted(search.key(g) for g in SPACE[:5])


def test_a_space_with_holes_and_names_is_searched_from_its_seeds():
    """Words and None have no distances; most combinations, and the last seed, are not in the space."""
    words = ("copy", "ring", None)
    space = [{"n": n, "way": way} for n in (8, 64, 512) for way in words if (n == 64) == (way == "ring")]
    seeds = [*space[1:3], {"n": 8, "way": "ring"}]
    proposals = [search.Proposal(genome=g, origin="seed") for g in seeds]
    found = [p for p, _ in search.evolve(space, proposals, lambda p: float(p.genome["n"]), budget=len(space))]
    assert [p.genome for p in found[:2]] == space[1:3]
    assert [p.origin == "seed" for p in found] == [True, True, *[False] * (len(space) - 2)]
    assert sorted(map(repr, (p.genome for p in found))) == sorted(map(repr, space))


def test_drawn_calls_list_visible_tiles_and_are_right_by_the_check():
    kernel = next(k for k in KERNELS if k.name == "xla_prefill_sparse")
    spec, shapes = AttentionSpec(tile=16, query_tile=32), Shapes(2, 96, 160, 4, 2, 16, 4, "float32")
    call = calls.draw(spec, shapes, 3)
    last = (64 + 32 * (np.arange(3) + 1) - 1) // 16
    assert np.array_equal(np.max(np.asarray(call.selection.tiles), -1), np.broadcast_to(last, (2, 2, 3)))
    assert np.all(np.asarray(call.selection.count) == 4)
    config = kernel.default_config(spec, shapes)
    out = kernel.launch(call.q, KeyValues.of(call.k, call.v), spec, call.positions, call.selection, config)
    assert calls.fault(spec, call, out, "sparse") is None
    assert "lse of row" in calls.fault(spec, call, out._replace(lse=out.lse + 1e-3), "sparse")
    fewer = call.selection._replace(count=call.selection.count - 1)
    wrong = kernel.launch(call.q, KeyValues.of(call.k, call.v), spec, call.positions, fewer, config)
    assert "out of row" in calls.fault(spec, call, wrong, "sparse")


def test_masses_are_checked():
    kernel = next(k for k in KERNELS if k.name == "xla_prefill_score")
    spec, shapes = AttentionSpec(tile=16, query_tile=32, mass=True), Shapes(1, 80, 80, 2, 1, 16, None, "float32")
    call = calls.draw(spec, shapes, 3)
    config = kernel.default_config(spec, shapes)
    out = kernel.launch(call.q, KeyValues.of(call.k, call.v), spec, call.positions, None, config)
    assert calls.fault(spec, call, out, "score") is None
    assert "differs from its number of rows" in calls.fault(spec, call, out._replace(mass=out.mass * 1.1), "score")
    assert "last query tile" in calls.fault(spec, call, out._replace(mass=jnp.roll(out.mass, 1, -1)), "score")


def test_a_row_of_a_call_is_that_row():
    spec, shapes = AttentionSpec(), Shapes(1, 5, 9, 2, 1, 16, None, "float32")
    one = calls.row_call(spec, calls.draw(spec, shapes, 0), 2)
    assert oracle.sees(one, 0, 0, 0).sum() == 4 + 2 + 1


def test_candidates_that_hang_die_lie_or_raise_are_results_and_the_search_goes_on(tmp_path, impatient):
    """The wrong candidate is the fastest, so correctness must come before speed."""
    found = run(tmp_path / "journal.jsonl")
    errors = {t["config"]["block_s"]: t["error"] for t in found["candidates"]}
    assert "killed after 2 s" in errors[tune_subjects.HANGS]
    assert "died with status 9" in errors[tune_subjects.DIES]
    assert "wrong: " in errors[tune_subjects.WRONG]
    assert "NotImplementedError: no such layout" in errors[tune_subjects.RAISES]
    assert errors[tune_subjects.SLOW] is errors[tune_subjects.FAST] is None
    assert found["winner"] == {"block_s": tune_subjects.FAST}
    assert found["confirmed"]
    assert found["gain"] > 1.5
    assert found["interval"][0] > 1
    assert set(found["elsewhere"]) == {"64 x 64", "192 x 192"}

    asked = []
    again = run(tmp_path / "journal.jsonl", on_step=asked.append)  # nothing is left to ask
    assert again == {**found, "replayed": again["replayed"]}
    assert again["replayed"] > 6

    task, made = traps(), ship.record(traps(), BUDGET, found, "tessera tune --workload traps")
    assert made.median == found["gain"]
    table = tmp_path / "cpu.jsonl"
    tuned.write(table, [ship.row(task, found, made, Path("evidence/tune.jsonl"))])
    [row] = tuned.read(table)
    assert row.holds("traps_dense", task.spec, SMALL)
    assert not row.holds("traps_dense", task.spec, SMALL._replace(num_keys=1024))
    assert tuned.built(row, tune_subjects.TRAPS) == tune_subjects.Config(block_s=tune_subjects.FAST)
    evidence.append(tmp_path / "evidence.jsonl", made)
    assert evidence.read(tmp_path / "evidence.jsonl")[0].facts["candidates"] == json.loads(
        json.dumps(found["candidates"])
    )


@pytest.mark.parametrize(("platform", "origin"), [("xla", "random"), ("gpu", "seed"), ("tpu", "seed")])
def test_the_cost_model_seeds_only_where_its_ranks_hold(platform, origin):
    space = [{"block_s": n} for n in range(100)]
    estimates = {search.key(g): -g["block_s"] for g in space}
    kernel = dataclasses.replace(tune_subjects.TRAPS, name=f"{platform}_traps_dense")
    found = tune._first(kernel, space, estimates, tune.Budget(candidates=6))
    assert [p.origin for p in found] == [origin] * 3
    assert ([p.genome["block_s"] for p in found] == [99, 98, 97]) == (origin == "seed")


def test_a_killed_search_goes_on_where_it_stopped(tmp_path):
    """The journal is cut after two answers, in the middle of its next line."""
    whole = tmp_path / "whole.jsonl"
    few = tune.Budget(candidates=2, quick=1, finalists=1, rounds=1, limit_s=200.0)
    space = [tune_subjects.Config(block_s=n) for n in (tune_subjects.SLOW, tune_subjects.FAST)]
    kernel = dataclasses.replace(tune_subjects.TRAPS, search_space=lambda spec, shapes: iter(space))
    task = traps(kernel=kernel)
    tune.tune(task, few, whole, paths=[SUBJECTS])
    lines = whole.read_text().splitlines()
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join(lines[:3]) + "\n" + lines[3][: len(lines[3]) // 2])
    found = tune.tune(task, few, cut, paths=[SUBJECTS])
    assert found["replayed"] == 2
    assert cut.read_text().splitlines()[:3] == lines[:3]
    assert [t["config"]["block_s"] for t in found["candidates"]] == [tune_subjects.SLOW, tune_subjects.FAST]
    with pytest.raises(ValueError, match="belongs to another search"):
        tune.tune(task, dataclasses.replace(few, seed=1), cut, paths=[SUBJECTS])


def test_a_default_that_fails_ends_the_search_with_its_reason(tmp_path, impatient):
    broken = dataclasses.replace(
        tune_subjects.TRAPS, default_config=lambda spec, shapes: tune_subjects.Config(block_s=tune_subjects.RAISES)
    )
    asked = []
    with pytest.raises(tune.Failed, match="no such layout"):
        run(tmp_path / "journal.jsonl", traps(kernel=broken), on_step=asked.append)
    assert len(asked) == 1  # nothing is measured that no default could be compared with


def test_a_finished_search_is_measured_again_and_a_failed_one_is_a_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ends = iter([tune.Failed("the default fails"), None])
    found = {"default": {"block_s": 1}, "winner": {"block_s": 1}, "gain": 1.0, "replayed": 0, "rank_correlation": {}}
    seen = []

    def search(task, budget, journal, on_step):
        seen.append(journal.exists())
        tune.Journal(journal, {"task": "this"})
        if end := next(ends):
            raise end
        return found

    monkeypatch.setattr(tune, "tune", search)
    options = {"out": tmp_path / "out.jsonl", "table": tmp_path / "table.jsonl"}
    with pytest.raises(tune.Failed):
        ship.run("prefill_8k", "dense", BUDGET, **options)
    assert ship.run("prefill_8k", "dense", BUDGET, **options) == 0
    assert seen == [False, False]
    assert not list((tmp_path / "build/tune").iterdir())
    assert [r.error for r in evidence.read(options["out"])] == ["the default fails", None]


def test_answers_of_other_kernels_are_not_taken(tmp_path):
    tune.Journal(tmp_path / "journal.jsonl", {"task": "this", "code": "a"})
    with pytest.raises(ValueError, match="code differs"):
        tune.Journal(tmp_path / "journal.jsonl", {"task": "this", "code": "b"})


def test_a_child_over_its_memory_is_a_result():
    with Child(limit_s=60.0, memory_bytes=1 << 28, paths=[SUBJECTS]) as child:
        answer = child.ask(traps().request({"block_s": tune_subjects.FAST}, rounds=1, seed=0))
    assert answer["error"]
    assert not answer["samples"]


def test_the_cost_model_sees_waste_and_steps():
    kernel = next(k for k in KERNELS if k.name == "xla_prefill_dense")
    shapes = Shapes(1, 4096, 4096, 8, 8, 128, None, "float32")

    def cost(block_t, block_s):
        return seeding.estimate(kernel, AttentionSpec(), shapes, kernel.Config(block_t=block_t, block_s=block_s))

    assert cost(256, 256) < cost(2048, 2048)  # large blocks compute more above the diagonal
    assert cost(256, 256) < cost(16, 16)  # small blocks take more steps


def test_an_unknown_workload_is_refused_by_name():
    with pytest.raises(ValueError, match="--workload nosuch must be one of prefill_8k"):
        tune.task_of("nosuch", "dense")


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "1e30"])
@pytest.mark.parametrize("flag", ["--memory-gib", "--limit-s"])
def test_limits_that_no_system_can_keep_are_refused(flag, value, capsys):
    assert cli.main(["tune", "--workload", "prefill_8k", flag, value]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert f"{flag} {float(value)} must be" in line


def test_the_command_of_a_record_repeats_the_search():
    """The command holds every option that is not the default."""
    plain = ship.command("w", "dense", tune.Budget(candidates=9))
    assert plain == "tessera tune --workload w --role dense --candidates 9 --seed 0"
    found = ship.command("w", "dense", tune.Budget(quick=5, rounds=21, limit_s=60.0))
    assert found.endswith("--seed 0 --quick 5 --rounds 21 --limit-s 60.0")
