"""`tessera inspect` refuses what no compile can mend before it compiles: one sentence, status 2."""

import pytest

from tessera import cli
from tessera.deviceless import gpu, tpu

REFUSED = [
    ("--length 1024 --queries 20000", "--queries 20000 must be at most --length 1024"),
    *((f"--{name} 0", f"--{name} 0 must be at least 1")
      for name in ("batch", "length", "queries", "heads", "kv-heads", "head-dim")),
    ("--limit-s 0", "--limit-s 0.0 must be above 0"),
    ("--limit-s nan", "--limit-s nan must be above 0"),
]  # fmt: skip


def refusal(flags: str, capsys, monkeypatch) -> str:
    """The sentence on standard error; compiling fails the test."""
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
    assert "--head-dim, --window, --picture must not stand beside --model" in said


CONFIGS = [
    ("--kernel tpu_prefill", "kernel='tpu_prefill' must be one of tpu_decode_dense"),
    ("--kernel gpu_prefill_dense", "kernel gpu_prefill_dense runs on gpu, this chip is a tpu"),
    ("--kernel tpu_decode_dense", "kernel tpu_decode_dense does not support this call"),
    ("--chip h200 --kernel gpu_cudnn_dense", "is compiled by cuDNN, on a GPU alone: take gpu_prefill_dense"),
    ("--config {block_t:1}", "--config {block_t:1} is not JSON"),
    ("--config [1]", "config [1] must be a JSON object"),
    ('--config {"blocks":1}', "config blocks: tpu_prefill_dense has no such size; it has "),
    ('--config {"block_s":512}', "config lacks block_t"),
]


@pytest.mark.parametrize(("flags", "words"), CONFIGS)
def test_kernels_and_sizes_that_do_not_fit_are_refused(flags, words, capsys, monkeypatch):
    assert words in refusal(flags, capsys, monkeypatch)


def test_a_picture_that_cannot_be_written_is_refused(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    assert "for --picture does not exist" in refusal(f"--picture {tmp_path}/none/a.svg", capsys, monkeypatch)
    assert "must end in one of" in refusal(f"--picture {tmp_path}/a.nothing", capsys, monkeypatch)
