"""Files that long compilations append to: what a kill leaves in them, and which compilation a line describes."""

import itertools
import json
from dataclasses import asdict

import pytest

from lab import campaign
from lab import commands as cli
from lab.report import documents as report
from lab.studies import blocks, figures, gpu_gates, sweep, validation
from lab.studies.programs import kernels_of
from tessera.attention import tuned
from tessera.core import files
from tessera.deviceless.compiler import out_of_time
from tessera.deviceless.tpu import compiler as tpu
from tessera.measure import evidence

LINES = [{"a": 1}, {"b": "é", "c": [1, 2]}]
CODE = {"commit": "0" * 40, "dirty": False, "landed": None}
OTHER = {"commit": "1" * 40, "dirty": False, "landed": None}


NAMES = {
    sweep: "compiles --platform tpu",
    figures: "tpu-figures",
    blocks: "tpu-blocks",
    validation: "tpu-validation",
    gpu_gates: "compiles --platform gpu",
}


def study(module, *flags):
    """Run `python -m lab study NAME` in this process; return its exit code."""
    return cli.main(["study", *NAMES[module].split(), *map(str, flags)])


def written(path) -> bytes:
    for line in LINES:
        files.append_line(path, line)
    return path.read_bytes()


def test_no_cut_of_the_last_line_costs_another(tmp_path):
    path = tmp_path / "made" / "lines.jsonl"
    assert files.read_lines(path) == []
    whole = written(path)
    assert files.read_lines(path) == LINES
    first = whole.index(b"\n") + 1
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        left = LINES[: (cut >= first - 1) + (cut >= len(whole) - 1)]  # a line is complete without its line end
        assert files.read_lines(path) == left
        files.append_line(path, {"d": 4})
        assert files.read_lines(path) == [*left, {"d": 4}]
        assert path.read_bytes().count(b"\n") == len(left) + 1


def test_a_broken_line_that_no_kill_explains_is_named(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"b": \n{"c": 3}\n')
    with pytest.raises(ValueError, match="lines.jsonl line 2 is not JSON"):
        files.read_lines(path)


@pytest.mark.parametrize("command", [sweep, gpu_gates])
def test_a_list_of_what_is_to_do_survives_a_cut_line(command, tmp_path, monkeypatch, capsys):
    path = tmp_path / "out.jsonl"
    monkeypatch.setattr(evidence, "code", lambda: evidence.Code(**CODE))
    case = next(iter(sweep.cases(("v5e",)) if command is sweep else gpu_gates.cases()))
    path.write_text(json.dumps(case | CODE) + "\n" + json.dumps(case)[:40])
    assert study(command, "--list", "--out", path, "--only", case["kernel"]) == 0
    todo = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert todo
    assert case not in todo


@pytest.mark.parametrize("command", [sweep, gpu_gates])
def test_what_other_code_made_and_what_ran_out_of_time_is_to_do_again(command, tmp_path, monkeypatch, capsys):
    path = tmp_path / "out.jsonl"
    monkeypatch.setattr(evidence, "code", lambda: evidence.Code(**CODE))
    made = list(itertools.islice(sweep.cases(("v5e",)) if command is sweep else gpu_gates.cases(), 6))
    late = str(out_of_time(300.0))
    ends = [CODE, {}, OTHER, {**CODE, "dirty": True}, {**CODE, "error": late}, {**CODE, "error": "VMEM: full"}]
    path.write_text("".join(json.dumps(case | end) + "\n" for case, end in zip(made, ends)))
    assert study(command, "--list", "--out", path) == 0
    todo = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [case in todo for case in made] == [False, True, True, True, True, False]


def test_a_report_holds_the_last_code_alone_and_says_what_was_planned_and_ran_out_of_time():
    first, second, third, *_ = (case | {"compiled": True, "error": None} for case in sweep.cases(("v5e",)))
    late = {"compiled": False, "error": str(out_of_time(300.0))}
    lines = [first | OTHER, second | OTHER, third | OTHER, first | CODE | late, second | CODE | late, first | CODE]
    made = sweep.records(campaign.of_last_code(lines, sweep.identity), "command")[0]
    assert made.code == evidence.Code(**CODE)
    planned = sum(case["kernel"] == first["kernel"] for case in sweep.cases(tuple(tpu.TOPOLOGIES)))
    assert made.what.workload.startswith(first["kernel"])
    assert [made.facts[name] for name in ("cases", "planned", "ended_by_time")] == [2, planned, 1]
    assert made.median == 0.5
    case = next(gpu_gates.cases())
    gates = case | {"settings": "one", "broken": [], "kernels": []} | CODE
    [made] = gpu_gates.records([gates], "command")
    assert (made.code, made.facts["tried"]) == (evidence.Code(**CODE), 1)
    kind = case["kernel"], gpu_gates.kind_of(case)
    assert made.facts["planned"] == sum((c["kernel"], gpu_gates.kind_of(c)) == kind for c in gpu_gates.cases())


def test_a_sweep_says_of_each_line_what_was_checked_out(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    monkeypatch.setattr(sweep, "run", lambda case, *limits: {**case, "compiled": True, "error": None})
    monkeypatch.setattr(evidence, "code", lambda: evidence.Code(**CODE))
    kernel = kernels_of("tpu")[0].name
    assert study(sweep, "--only", "v5e", kernel, "--out", path) == 0
    assert all(line.items() >= CODE.items() for line in files.read_lines(path))
    made = len(files.read_lines(path))
    assert study(sweep, "--only", "v5e", kernel, "--out", path) == 0
    assert len(files.read_lines(path)) == made > 0


def test_blocks_read_a_cut_file(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"chip": "v5e", "ca')
    assert study(blocks, "--report", "--out", path) == 0


def test_a_search_of_one_case_keeps_the_rows_of_the_others(tmp_path, monkeypatch):
    """The table holds the newest record of each case, whether or not this run searched the case."""
    monkeypatch.setattr(blocks, "RECORDS", tmp_path / "records.jsonl")
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    first, second = "dense", "dense, head dim 64"

    def line(name, ms):
        kernel = blocks.kernel_of(blocks.CASES[name])
        with blocks.on_chip("v6e"):
            config = asdict(kernel.default_config(*blocks.CASES[name].call()))
        return {"chip": "v6e", "case": name, "default": True, "config": config, "ms": ms, **CODE}

    blocks.report([line(first, 2.0)], ["v5e", "v6e"])
    blocks.report([line(second, 3.0)], ["v5e", "v6e"])
    rows = tuned.read(tmp_path / "v6e.jsonl")
    assert [row.record["workload"] for row in rows] == [f"{first}, v6e", f"{second}, v6e"]
    assert not (tmp_path / "v5e.jsonl").exists()


def test_figures_compile_again_what_failed_and_what_another_commit_made(tmp_path, monkeypatch):
    path = tmp_path / "made" / "figures.json"
    now, other = CODE, OTHER
    names = ("peer", "selection", "selection 32", *figures.CALLS)
    held = dict.fromkeys(names, {"ms": 1.0, **now}) | {names[0]: {"ms": 1.0}}
    held |= {names[3]: {"error": "time", **now}, names[4]: {"ms": 1.0, **other}}
    files.replace_text(path, json.dumps({"v6e": held}))
    asked = []
    monkeypatch.setattr(evidence, "code", lambda: evidence.Code(**CODE))
    monkeypatch.setattr(figures, "inspect_one", lambda chip, name, limit_s: asked.append(name) or {"ms": 2.0})
    assert study(figures, "--chip", "v6e", "--out", path) == 0
    assert asked == list(names[3:5])
    found = json.loads(path.read_text())["v6e"]
    assert found == held | dict.fromkeys(asked, {"ms": 2.0, **now})
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("command", [sweep, gpu_gates, validation])
def test_a_report_of_nothing_is_refused_in_a_sentence(command, tmp_path, capsys):
    assert study(command, "--report", "--out", tmp_path / "none.jsonl") == 2
    assert "none.jsonl has no lines" in capsys.readouterr().err


@pytest.mark.parametrize("command", [figures, blocks])
def test_a_case_that_does_not_exist_is_refused(command, tmp_path, capsys):
    assert study(command, "--case", "dreams", "--out", tmp_path / "none.jsonl") == 2
    assert "--case dreams must be one of" in capsys.readouterr().err


def test_a_validation_counts_what_was_planned_beside_what_was_compiled():
    region = {"name": "step", "bundles": 100, "slots": {"MXU": 0}, "product_cycles": 0, "depth": 1, "loops": 0}
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), 1)

    def point(block):
        sizes = dict.fromkeys(("q", "k", "v"), [1, 8192, 8, 128])
        config = {"block_q": block, "block_kv": block, "block_kv_compute": 512, **layouts}
        return {"chip": "v7x", **sizes, "is_causal": True, "return_residuals": False, "config": config,
                "measured_ms": 1.0, "error": None, "operations": [], "regions": {"step": region}}  # fmt: skip

    planned = [point(512), point(1024), point(4096)]
    [chip] = validation.records(planned[:2], "command", {"v7x": planned})
    others = [p | {"chip": chip} for p in planned[:2] for chip in validation.CALIBRATION]
    *_, fitted, every = validation.records([*planned[:2], *others], "command", {"v7x": planned})
    assert set(fitted.facts["fitted_again"]) == set(fitted.facts["constants"])
    assert "Constants, used and fitted again: cycles per bundle 1.020 and" in report.prediction([chip, fitted, every])
    assert (chip.facts["points"], chip.facts["planned"]) == (2, 3)
    assert chip.facts["big_blocks"] == {"compiled": 0, "planned": 1}
    assert "planned" not in every.facts  # the other chips' timings are missing


def test_a_missing_peer_is_named_with_what_installs_it(tmp_path, monkeypatch, capsys):
    collect = ("--chip", "v6e", "--out", tmp_path / "out.jsonl")
    monkeypatch.setattr(validation, "PEER_PYTHON", tmp_path / "bin" / "python")
    assert study(validation, *collect) == 2
    assert "`make peers-tpu` installs it" in capsys.readouterr().err
    assert "make peers-tpu" in figures.inspect_peer("v6e", validation.installed(), 1.0)["error"]

    validation.PEER_PYTHON.parent.mkdir()
    validation.PEER_PYTHON.touch()
    assert study(validation, *collect, "--timings", tmp_path / "nowhere") == 2
    assert "pass --timings with a folder" in capsys.readouterr().err
    assert study(validation, *collect, "--timings", tmp_path) == 1  # has timings, but none of this chip
