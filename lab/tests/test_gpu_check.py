"""The GPU script, end to end without a GPU: every piece writes valid records, and a second run resumes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lab.gpu import __main__ as program
from lab.gpu import calls, check, clock, correct, environment, peers, supervisor, timing, tuning, worker
from lab.gpu.session import CUT, Scale, Session
from tessera.core import files
from tessera.deviceless.gpu.compiler import TARGETS
from tessera.measure import evidence
from tessera.measure.evidence import What

ROOT = Path(__file__).parents[2]
SMALL = calls.Setting(1, 64, 64, 2, 1, 64)


def session(path: Path, **kwargs) -> Session:
    return Session(path, **{"dry": True, "limit_s": 60.0, **kwargs})


def test_the_script_runs_dry_from_end_to_end_and_resumes(tmp_path):
    """Run one kernel per role and phase in the interpreter, with jaxtyping's stand-in and without other packages."""
    out = tmp_path / "dry.jsonl"
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    names = "jaxtyping rich tyro optax safetensors tokenizers jinja2 huggingface_hub matplotlib"
    (hidden / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        stands_in = name == 'jaxtyping' and 'stand_in' in ''.join(sys.path)\n"
        f"        if name in {names.split()!r} and not stands_in:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(hidden), "JAX_PLATFORMS": "cpu"}
    command = [str(ROOT / "lab" / "gpu" / "check.sh"), "--dry", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr == ""
    found = evidence.read(out)
    assert {"environment", "correctness", "gpu attention", "gpu tuning"} == {record.what.op for record in found}
    assert all("dry run" in record.how.check for record in found)
    assert all(record.error is None or record.error.startswith("not installed") for record in found)
    ours = [record for record in found if record.what.kernel.startswith("gpu_")]
    assert {(r.what.op, r.what.kernel) for r in ours} >= {
        (op, kernel.name)
        for kernel in calls.kernels_here(session(out))
        for op in ("correctness", "gpu attention", "gpu tuning")
    }
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 0
    assert evidence.read(out) == found


def test_an_error_is_a_record_and_is_tried_again_last(tmp_path):
    run, what = session(tmp_path / "x.jsonl"), What(op="o", kernel="k", workload="w")

    def fail():
        raise ValueError(f"in {os.getcwd()} it broke")

    assert run.attempt(what, fail)
    [record] = evidence.read(tmp_path / "x.jsonl")
    assert record.error == "ValueError: in ... it broke"
    run.retry = True
    assert not run.attempt(what, fail)  # an item runs once per run
    rerun = session(tmp_path / "x.jsonl")
    assert not rerun.attempt(what, fail)
    rerun.retry = True
    assert rerun.attempt(what, lambda: {"samples": [1.0]})
    last = session(tmp_path / "x.jsonl")
    last.retry = True
    assert not last.attempt(what, fail)
    assert session(tmp_path / "x.jsonl", again=True).attempt(what, fail)


def test_what_other_sources_made_is_done_again(tmp_path, monkeypatch):
    """Two states of a tree may have the same commit, so records also name a hash of the sources."""
    what = What(op="o", kernel="k", workload="w")
    assert session(tmp_path / "x.jsonl").attempt(what, lambda: {"samples": [1.0]})
    assert session(tmp_path / "x.jsonl").is_done(what)
    monkeypatch.setattr(files, "sources", lambda: "another state")
    assert not session(tmp_path / "x.jsonl", dry=False).is_done(what)
    assert session(tmp_path / "x.jsonl", since=0, again=True).is_done(what)  # made by this very run


def test_sources_are_what_runs(tmp_path):
    """The hash covers contents and names of code and tables, committed or not, and nothing else."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "a.py").write_text("one = 1\n")
    (tmp_path / "tables" / "t.jsonl").write_text("{}\n")
    found = [files.sources(tmp_path)]
    (tmp_path / "notes.txt").write_text("no code\n")
    assert files.sources(tmp_path) == found[0]
    for name, text in (("a.py", "one = 2\n"), ("tables/t.jsonl", "[]\n"), ("new.py", "")):
        (tmp_path / name).write_text(text)
        found.append(files.sources(tmp_path))
    (tmp_path / "new.py").rename(tmp_path / "newer.py")
    found.append(files.sources(tmp_path))
    assert len(set(found)) == len(found)


def test_what_does_not_fit_is_said_to_and_leaves_a_fresh_process(tmp_path):
    run, what = session(tmp_path / "x.jsonl"), What(op="o", kernel="k", workload="w")
    with pytest.raises(SystemExit) as ended:
        run.attempt(what, lambda: jax.block_until_ready(jnp.zeros(1 << 50, jnp.int8)))
    assert ended.value.code == supervisor.RESTART
    [record] = evidence.read(run.out)
    assert record.error.startswith("does not fit: JaxRuntimeError: RESOURCE_EXHAUSTED")
    rerun = session(run.out, since=0)  # the fresh process
    assert rerun.is_done(what)
    rerun.retry = True
    assert not rerun.is_done(what)


def test_an_item_in_which_everything_ends_is_tried_last_and_given_up_if_that_repeats(tmp_path):
    """One end may be the machine's, as when it is taken away; an item that ends it again is given up."""
    what = What(op="o", kernel="k", workload="w")
    for times in range(3):
        run = session(tmp_path / "x.jsonl")
        assert len(evidence.read(run.out)) == times if times else not run.out.exists()
        assert run.is_done(what) == (times > 0)
        run.retry = True
        assert not run.is_done(what)
        run.begin(what, 10.0)
    run = session(tmp_path / "x.jsonl")
    run.retry = True
    assert run.is_done(what)
    assert all(record.error.startswith(CUT) for record in evidence.read(run.out))


def test_no_piece_begins_what_it_cannot_end(tmp_path, capsys):
    from lab.gpu.session import until_late

    assert list(until_late(session(tmp_path / "x", limit_s=10.0), "abc", 60)) == []
    assert "3 left for the next run" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys):
    assert program.main(["env"]) == 2
    assert "--dry runs everything in the interpreter" in capsys.readouterr().err


def test_an_item_that_the_same_run_mends_did_not_fail(tmp_path, monkeypatch, capsys):
    run = session(tmp_path / "x.jsonl")

    def records(request, limit_s):
        for workload, error in (("a", "crashed: once"), ("b", "no"), ("a", None)):
            run.add(What(op="o", kernel="k", workload=workload), () if error else (1.0,), error=error)
        return True

    monkeypatch.setattr(program, "supervise", records)
    assert program.main(["--dry", "--out", str(run.out)]) == 1
    assert "items that failed: 1; records are in" in capsys.readouterr().out


def test_cudnn_is_not_installed_where_jax_does_not_find_it(monkeypatch):
    """JAX is installed, but the cuDNN libraries may be missing, which the version check reports by an error."""

    def absent():
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(peers, "on_gpu", lambda: True)
    monkeypatch.setattr(peers, "check_cudnn_version", lambda: 91000)
    assert peers.installed("cudnn by jax")
    monkeypatch.setattr(peers, "check_cudnn_version", absent)
    assert not peers.installed("cudnn by jax")
    monkeypatch.setattr(peers, "on_gpu", lambda: False)
    assert not any(map(peers.installed, peers.PEERS))


def test_dry_figures_stay_out_of_evidence(capsys):
    with pytest.raises(SystemExit):
        program.main(["--dry", "--out", "evidence/gpu.jsonl"])
    assert "outside of evidence/" in capsys.readouterr().err


def test_contenders_take_turns_on_a_cold_cache(tmp_path):
    watch, order = clock.Clock(session(tmp_path / "x")), []
    taken = clock.interleave(watch, {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert "".join(order) == "abbaab"
    assert len(taken["a"].device) == 3
    assert "L2 cold" in watch.cold


def test_a_contender_whose_sample_fails_is_out_alone(tmp_path):
    run = session(tmp_path / "x.jsonl")

    def fail():
        raise ValueError("no")

    what = {name: What(op="o", kernel=name, workload="w") for name in "ab"}
    guard = lambda name: run.guard(what[name])  # noqa: E731
    taken = clock.interleave(clock.Clock(run), {"a": fail, "b": lambda: None}, 3, guard)
    assert list(taken) == ["b"]
    assert len(taken["b"].device) == 3
    assert [record.what.kernel for record in evidence.read(run.out)] == ["a"]


def dense_by_jax(factor: float):
    """Return a peer that computes attention in float32, times a factor."""

    def ready(setting, q, k, v):
        attend = jax.jit(lambda q, k, v: factor * jax.nn.dot_product_attention(q, k, v, is_causal=setting.causal))
        return clock.waiting(lambda *x: attend(*(y.astype(jnp.float32) for y in x)).astype(q.dtype), q, k, v)

    return ready


def test_a_contender_that_doubles_its_output_is_recorded_as_wrong_and_the_others_as_right(tmp_path, monkeypatch):
    planted = {"double": dense_by_jax(2.0), "right": dense_by_jax(1.0), "also right": dense_by_jax(1.0)}
    monkeypatch.setattr(peers, "PEERS", planted)
    monkeypatch.setattr(calls, "kernels_here", lambda session, phase=None: iter(()))
    run = session(tmp_path / "x.jsonl")
    timing.time_setting(run, clock.Clock(run), SMALL)
    errors = {record.what.kernel: record.error for record in evidence.read(run.out)}
    assert set(errors) == set(planted)
    assert errors["double"].startswith("ValueError: wrong: out in sequence 0")
    assert errors["right"] is errors["also right"] is None


def test_a_compiler_that_hangs_among_others_gives_way_to_one_at_a_time_later(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"right": dense_by_jax(1.0)})
    monkeypatch.setattr(calls, "kernels_here", lambda session, phase=None: iter(()))
    run = session(tmp_path / "x.jsonl")
    run.begin(What(op="gpu compile", kernel="", workload=SMALL.words(), dtype=SMALL.dtype), 1.0)
    run = session(tmp_path / "x.jsonl")  # as after a kill
    timing.time_setting(run, clock.Clock(run), SMALL)
    assert [record.what.op for record in evidence.read(run.out)] == ["gpu compile"]
    run.retry = True
    timing.time_setting(run, clock.Clock(run), SMALL)
    assert [record.what.kernel for record in evidence.read(run.out)] == ["", "right"]


def test_a_tuned_candidate_that_is_wrong_has_no_time(tmp_path, monkeypatch):
    from dataclasses import replace

    from tessera.attention.contract import AttentionOut
    from tessera.attention.dispatch import KERNELS

    portable = next(k for k in KERNELS if k.name == "xla_prefill_score")

    def halved(*arguments):
        found = portable.launch(*arguments)
        return AttentionOut(found.out, found.lse, found.mass / 2)

    run, numbers = session(tmp_path / "x.jsonl"), timing.Numbers.fresh(SMALL)
    watch = clock.Clock(run)
    assert tuning.candidate(run, watch, portable, numbers, None)["samples"]
    with pytest.raises(ValueError, match="wrong: mass"):
        tuning.candidate(run, watch, replace(portable, launch=halved), numbers, None)


def test_a_wrong_row_of_a_sparse_answer_is_seen(tmp_path):
    from tessera.attention.dispatch import KERNELS

    portable = next(k for k in KERNELS if k.name == "xla_prefill_sparse")
    numbers = timing.Numbers.fresh(calls.Setting(2, 96, 96, 2, 1, 64))
    contender = timing.ours(portable, numbers)
    found = contender.call()
    about = contender.spec, numbers.inputs, numbers.positions, contender.selection
    assert check.fault(*about, found) is None
    for row in (0, 50, 95):
        off = found._replace(out=found.out.at[1, row, 1].multiply(1.05))
        assert "wrong: out in sequence 1" in check.fault(*about, off)
        assert "wrong: lse" in check.fault(*about, found._replace(lse=found.lse.at[0, row, 0].add(0.01)))
    assert "wrong: out" in check.fault(*about, found._replace(out=found.out.at[0, 95].set(jnp.nan)))


def test_a_call_that_does_not_fit_is_left_out_and_says_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "most_bytes", lambda: 9e10)
    large = calls.Setting(128, 1, 131072, *calls.LLAMA_8B)
    run = session(tmp_path / "x.jsonl")
    timing.time_setting(run, clock.Clock(run), large)
    found = evidence.read(run.out)
    assert found
    assert all(record.error.endswith("take 137.4 GB, more than the limit of 90.0 GB") for record in found)


def test_every_call_fits_an_h200():
    """JAX may use three quarters of memory, which must also hold another copy of K and V in the kernel's layout."""
    share = 0.75 * float(environment.facts(TARGETS["h200"].read_text())["device_memory_size"])
    largest = max(timing.SETTINGS + tuning.SETTINGS, key=lambda setting: setting.bytes)
    assert (largest.batch, largest.keys) == (64, 131072)
    assert largest.bytes <= timing.MOST_OF_JAX * share
    keys_and_values = 2 * 64 * 131072 * 8 * 128 * 2
    assert largest.bytes + keys_and_values < share


def test_the_layout_is_the_first_thing_that_correct_does(tmp_path):
    run = session(tmp_path / "x.jsonl")
    seen = []
    run.attempt = lambda what, act, limit_s=0.0: seen.append(what)
    correct.run(run)
    assert "layout" in seen[0].workload
    assert not any("layout" in what.workload for what in seen[1:])
    assert "gradient" in seen[-1].workload


def test_a_little_of_everything_comes_before_the_rest_of_anything(tmp_path, monkeypatch):
    """A run may end during `correct`; by then its first pass has checked every kernel and timed something."""
    run, seen = session(tmp_path / "x.jsonl", dry=False, limit_s=600.0), []
    run.attempt = lambda what, act, limit_s=0.0: seen.append((what.workload, what.kernel))
    monkeypatch.setattr(timing, "time_setting", lambda session, watch, setting: seen.append(setting))
    monkeypatch.setattr(timing.clock, "Clock", lambda session: None)
    monkeypatch.setattr(tuning, "candidates", lambda session, setting: seen.append("tune") or ())
    parts = []
    for run.first, run.retry in worker.PASSES:
        for piece in (correct, timing, tuning):
            seen.clear()
            piece.run(run)
            parts.append(list(seen))
    checked, timed, tuned, everything, all_timed, all_tuned, *_ = parts
    kernels = {kernel.name for kernel in calls.kernels_here(run)}
    assert "layout" in checked[0][0]
    assert {name for _, name in checked} == kernels
    assert len(checked) < len(everything) / 4
    assert checked[-1] in everything
    assert {setting.phase for setting in timed} == {"prefill", "decode"}
    assert timed == all_timed[: len(timed)]
    assert all_timed == list(timing.SETTINGS)
    assert tuned == []
    assert all_tuned


def test_cases_hold_what_breaks_kernels():
    """Windows with a cap, heads of 256, rows before the first key, sequences without keys, every tile."""
    kernels = {kernel.name: list(correct.cases(kernel, dry=False)) for kernel in correct.trials.kernels("dense")}
    dense = kernels["gpu_prefill_dense"]
    assert {case.workload.head_dim for case in dense} >= {64, 128, 256}
    assert any(case.workload.spec.window and case.workload.spec.softcap for case in dense)
    assert any(min(case.workload.q_start or (0,)) < 0 for case in dense)
    assert any(0 in (case.workload.kv_len or ()) for case in dense)
    assert {case.numbers for case in dense} == set(correct.verify.NUMBERS)
    assert {case.dtype for case in dense} == set(correct.DTYPES)
    [ours] = [k for k in calls.KERNELS if k.name == "gpu_prefill_dense"]
    assert {w.head_dim for w in correct.gradient_workloads(ours, dry=False)} >= {64, 128, 256}
    [score] = [k for k in calls.KERNELS if k.name == "gpu_prefill_score"]
    assert {case.workload.spec.tile for case in correct.cases(score, dry=False)} >= {16, 32, 64, 128}
    for kernel in (k for k in calls.KERNELS if k.platform == "gpu"):
        words = [(case.words(), case.dtype) for case in correct.cases(kernel, dry=False)]
        assert len(words) == len(set(words)), kernel.name
    [sparse] = [k for k in calls.KERNELS if k.name == "gpu_prefill_sparse"]
    made = [correct.trials.make(case.workload, "sparse") for case in correct.cases(sparse, dry=False)]
    assert any((call.count == 0).any() for call in made)


def test_the_shapes_are_those_that_were_promised():
    prefill = {s.keys for s in timing.SETTINGS if s.phase == "prefill" and (s.heads, s.kv_heads) == calls.LLAMA_8B}
    assert prefill == {512 << n for n in range(9)}
    decode = {(s.batch, s.keys, s.heads) for s in timing.SETTINGS if s.phase == "decode"}
    assert decode == {(b, n, h) for b in (1, 4, 16, 64) for n in (8192, 32768, 131072) for h in (32, 64)}
    assert timing.SETTINGS[0] == calls.Setting(1, 512, 512, 8, 8, 64, causal=False)


def test_kascade_is_added_up_layer_by_layer(tmp_path):
    run = session(tmp_path / "x.jsonl")
    run.piece = "time"
    run.scale = Scale(rounds=2, flush_bytes=1 << 16)
    samples = {"gpu_prefill_score": 3.0, "gpu_prefill_sparse": 0.5, "cudnn by jax": 2.0}
    taken = {name: clock.Samples([s, s], [s, s]) for name, s in samples.items()}
    timing.kascade(run, clock.Clock(run), SMALL, taken, "cudnn by jax")
    [record] = evidence.read(tmp_path / "x.jsonl")
    assert record.median == pytest.approx(5 * 3.0 + 27 * 0.5, rel=0.1)  # selection takes little time
    assert record.comparison.ratio == pytest.approx(32 * 2.0 / record.median)


def test_target_facts_are_read_by_name():
    text = "gpu_device_info {\n  core_count: 132\n  clock_rate_ghz: 1.98\n}\n"
    assert environment.facts(text) == {"core_count": "132", "clock_rate_ghz": "1.98"}


def test_a_target_configuration_that_cannot_be_read_is_an_error():
    text = "gpu_device_info {\n  core_count: 132\n}\n"
    assert environment.differences(text, text)["samples"] == [0.0]
    assert environment.differences(text.replace("132", "114"), text)["facts"]["differs_from_shipped"] == {
        "core_count": ["132", "114"]
    }
    with pytest.raises(ValueError, match="could not be read"):
        environment.differences("no such thing", text)
