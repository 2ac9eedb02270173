"""The GPU script, end to end without a GPU: valid records of every piece, resumed where it stopped."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from tessera import evidence
from tessera.evidence import What
from tessera.gpu_check import __main__ as program
from tessera.gpu_check import calls, clock, environment, timing
from tessera.gpu_check.session import Session

ROOT = Path(__file__).parents[1]
SMALL = calls.Setting(1, 64, 64, 2, 1, 64)


def session(path: Path, **kwargs) -> Session:
    return Session(path, **{"dry": True, "limit_s": 60.0, **kwargs})


def test_the_script_runs_dry_from_end_to_end_and_resumes(tmp_path):
    """One kernel per role, in the interpreter; jaxtyping stands in, as on a machine without it."""
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
    command = [str(ROOT / "scripts" / "gpu_check.sh"), "--dry", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert done.stderr == ""
    found = evidence.read(out)
    assert {"environment", "correctness", "gpu attention", "gpu tuning"} == {record.what.op for record in found}
    assert all("dry run" in record.how.check for record in found)
    for record in found:
        assert record.error is None or not record.what.kernel.startswith("gpu_"), record
    ours = [record for record in found if record.what.kernel.startswith("gpu_")]
    assert {(r.what.op, r.what.kernel) for r in ours} >= {
        (op, kernel.name)
        for kernel in calls.gpu_kernels(session(out))
        for op in ("correctness", "gpu attention", "gpu tuning")
    }
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 0
    assert len(evidence.read(out)) == len(found)


def test_a_failed_candidate_is_a_record_and_nothing_is_done_twice(tmp_path):
    run, what = session(tmp_path / "x.jsonl"), What(op="o", kernel="k", workload="w")

    def fail():
        raise RuntimeError(f"in {os.getcwd()} it broke")

    run.attempt(what, fail)
    [record] = evidence.read(tmp_path / "x.jsonl")
    assert record.error == "RuntimeError: in ... it broke"
    assert run.attempt(what, fail) is None
    assert session(tmp_path / "x.jsonl").attempt(what, fail) is None
    assert session(tmp_path / "x.jsonl", again=True).attempt(what, fail) is not None


def test_no_piece_begins_what_it_cannot_end(tmp_path, capsys):
    from tessera.gpu_check.session import until_late

    assert list(until_late(session(tmp_path / "x", limit_s=10.0), "abc", 60)) == []
    assert "3 left for the next run" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys):
    assert program.main(["env"]) == 2
    assert "--dry runs everything in the interpreter" in capsys.readouterr().err


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


def test_a_contender_far_from_the_first_is_refused():
    x = jnp.ones((4, 4))
    assert calls.relative_error(x * 1.5, x) == pytest.approx(0.5)
    assert not calls.relative_error(x * jnp.nan, x) <= timing.WRONG


def test_the_shapes_are_those_that_were_promised():
    prefill = {s.keys for s in timing.SETTINGS if s.phase == "prefill" and (s.heads, s.kv_heads) == calls.LLAMA_8B}
    assert prefill == {512 << n for n in range(9)}
    decode = {(s.batch, s.keys, s.heads) for s in timing.SETTINGS if s.phase == "decode"}
    assert decode == {(b, n, h) for b in (1, 4, 16, 64) for n in (8192, 32768, 131072) for h in (32, 64)}
    assert timing.SETTINGS[0] == calls.Setting(1, 512, 512, 8, 8, 64, causal=False)


def test_kascade_is_added_up_layer_by_layer(tmp_path):
    run = session(tmp_path / "x.jsonl")
    run.piece = "time"
    samples = {"gpu_prefill_score": 3.0, "gpu_prefill_sparse": 0.5, "cudnn by jax": 2.0}
    taken = {name: clock.Samples([s, s], [s, s]) for name, s in samples.items()}
    timing.kascade(run, SMALL, taken, "cudnn by jax", timing.How())
    [record] = evidence.read(tmp_path / "x.jsonl")
    assert record.median == pytest.approx(5 * 3.0 + 27 * 0.5, rel=0.1)  # and five selections
    assert record.comparison.ratio == pytest.approx(32 * 2.0 / record.median)


def test_target_facts_are_read_by_name():
    text = "gpu_device_info {\n  core_count: 132\n  clock_rate_ghz: 1.98\n}\n"
    assert environment.facts(text) == {"core_count": "132", "clock_rate_ghz": "1.98"}
