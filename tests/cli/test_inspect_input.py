"""`tessera inspect` refuses impossible requests before it compiles: one sentence, exit code 2."""

import pytest

from tessera.cli import main as cli
from tessera.deviceless.compiler import CompileError, out_of_time
from tessera.deviceless.gpu import compiler as gpu
from tessera.deviceless.tpu import compiler as tpu

REFUSED = [
    ("--length 1024 --queries 20000", "--queries 20000 must be at most --length 1024"),
    *((f"--{name} 0", f"--{name} 0 must be at least 1")
      for name in ("batch", "length", "queries", "heads", "kv-heads", "head-dim", "query-tile")),
    *((f"--{name} {2**31}", f"--{name} {2**31} must be below 2,147,483,648")
      for name in ("length", "queries", "heads")),
    *((f"--limit-s {value}", f"--limit-s {float(value)} must be above 0 and at most 9,223,372,036 seconds")
      for value in (0, "nan", "inf", 1e10)),
    *((f"--fraction {value}", f"--fraction {float(value)} must be above 0 and at most 1") for value in (0, 2, "nan")),
    ("--phase decode --queries 5",
     "--queries 5 cannot be used with --phase decode, which has one query row: drop it"),
]  # fmt: skip


def refusal(flags: str, capsys, monkeypatch) -> str:
    """Return the sentence on standard error; the test fails if anything compiles."""
    for module in (tpu, gpu):
        monkeypatch.setattr(module, "compile_for", lambda *_, **__: pytest.fail("it compiled"))
    assert cli.main(["inspect", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("more", ["", " --chip h200", " --model llama-3.1-8b"])
@pytest.mark.parametrize(("flags", "words"), REFUSED)
def test_impossible_sizes_are_refused(flags, words, more, capsys, monkeypatch):
    assert words in refusal(flags + more, capsys, monkeypatch)


def test_flags_of_a_call_are_refused_beside_a_model(capsys, monkeypatch):
    said = refusal("--model llama-3.1-8b --window 5 --head-dim 64 --picture a.svg", capsys, monkeypatch)
    assert "--head-dim, --window, --picture cannot be used with --model" in said


@pytest.mark.parametrize("chip", ["", " --chip h200"])
@pytest.mark.parametrize("flags", ["--mesh 3", "--attention dense", "--mesh 3, --attention dense"])
def test_flags_of_a_model_are_refused_without_one(flags, chip, capsys, monkeypatch):
    said = refusal(flags.replace(",", "") + chip, capsys, monkeypatch)
    assert f"{flags} can be used only with --model: name a model, or leave this out" in said


ENDS = [
    (out_of_time(4.0), 3, "was not compiled in time", "was stopped at --limit-s 4"),
    (CompileError("VMEM", "16 MiB", "it is full", "take less"), 1, "does not compile", "16 MiB"),
]


@pytest.mark.parametrize("more", ["", "--chip h200", "--model llama-3.1-8b"])
@pytest.mark.parametrize(("error", "status", "verdict", "reason"), ENDS)
def test_a_timeout_is_not_a_failure(error, status, verdict, reason, more, capsys, monkeypatch):
    """A timeout exits with 3, a compiler error with 1, and a kernel that refuses the call with 2 (tested below)."""
    for module in (tpu, gpu):
        found = module.Compiled(chip="h200" if module is gpu else "v6e", error=error, compile_s=4.0)
        monkeypatch.setattr(module, "compile_for", lambda *_, found=found, **__: found)
    assert cli.main(["inspect", *more.split()]) == status
    shown = " ".join(capsys.readouterr().out.split())
    assert verdict in shown
    assert reason in shown


CONFIGS = [
    ("--kernel tpu_prefill", "kernel='tpu_prefill' must be one of tpu_decode_dense"),
    ("--kernel gpu_prefill_dense", "kernel gpu_prefill_dense runs on gpu, but this chip is a tpu"),
    ("--kernel tpu_decode_dense", "kernel tpu_decode_dense does not support this call"),
    ("--chip h200 --kernel gpu_cudnn_dense", "is compiled by cuDNN, only on a GPU: use gpu_prefill_dense"),
    ("--config {block_t:1}", "--config {block_t:1} is not JSON"),
    ("--config [1]", "config [1] must be a JSON object"),
    ('--config {"blocks":1}', "config blocks: tpu_prefill_dense has no such size; it has "),
    ('--config {"block_s":512}', "config lacks block_t"),
    ('--config {"block_t":1.5}', "config block_t=1.5: tpu_prefill_dense needs a whole number there"),
    ('--config {"block_t":"a"}', "config block_t='a': tpu_prefill_dense needs a whole number there"),
    ('--config {"block_t":true}', "config block_t=True: tpu_prefill_dense needs a whole number there"),
    ('--config {"block_t":null}', "config block_t=None: tpu_prefill_dense needs a whole number there"),
    ('--config {"matrix_sums":"no"}', "config matrix_sums='no': tpu_prefill_dense needs true or false there"),
    ('--config {"matrix_sums":1}', "config matrix_sums=1: tpu_prefill_dense needs true or false there"),
    ('--kernel xla_prefill_dense --config {"block_heads":"a"}', "needs a whole number or null there"),
    ('--config {"block_t":0,"block_s":512,"chunk":512}', "block_t=0 must be at least 1"),
    ('--chip h200 --config {"block_s":128.0}', "config block_s=128.0: gpu_prefill_dense needs a whole number there"),
]


@pytest.mark.parametrize(("flags", "words"), CONFIGS)
def test_kernels_and_sizes_that_do_not_fit_are_refused(flags, words, capsys, monkeypatch):
    assert words in refusal(flags, capsys, monkeypatch)


def test_a_picture_that_cannot_be_written_is_refused(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    assert "for --picture does not exist" in refusal(f"--picture {tmp_path}/none/a.svg", capsys, monkeypatch)
    assert "must end in one of" in refusal(f"--picture {tmp_path}/a.nothing", capsys, monkeypatch)
