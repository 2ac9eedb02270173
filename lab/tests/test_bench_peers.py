"""Peers of dense prefill: each runs where it can, and elsewhere gives the reason why it cannot."""

import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import bench
from lab.bench import attention as cases
from lab.bench import peers
from lab.bench.stand import SMOKE, Stand, compile_step, draw
from tessera.attention.contract import Shapes
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.measure import evidence, timing

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Set high ceilings, as those measured on a busy machine could be exceeded; these tests report no times."""
    high = timing.Ceilings(flops_per_s={"float32": 1e15, "bfloat16": 1e15}, bytes_per_s=1e15)
    monkeypatch.setattr(timing, "ceilings", lambda: high)
    monkeypatch.setattr(cases, "REST_S", 0.0)


@pytest.fixture
def stand(tmp_path):
    """Return a stand whose PyTorch environment is missing."""
    made = Stand("smoke", SMOKE, tmp_path / "missing" / "python")
    made.case = "planted"
    yield made
    made.close()


def square(dtype="bfloat16", length=8192):
    return Shapes(1, length, length, 8, 8, 128, None, dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(2, 2, "float32"), (4, 2, "bfloat16")])
def test_splash_interpreted_is_right(heads, kv_heads, dtype):
    shapes = [(2, 256, n, 128) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (jnp.asarray(draw([3, i], shape)).astype(dtype) for i, shape in enumerate(shapes))
    out = jax.jit(lambda *qkv: peers.splash(*qkv, interpret=True))(q, k, v)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    rows = [0, 1, 127, 128, 200, 255]
    for b in range(2):
        found = np.asarray(out[b, jnp.asarray(rows)], np.float32).swapaxes(0, 1)
        cases.check_output(found, cases.oracle_rows(q[b:], k[b:], v[b:], rows), dtype, "splash")


@pytest.mark.parametrize(("length", "grid"), [(2048, "(1, 4, 4)"), (384, "(1, 3, 3)")])
def test_splash_takes_blocks_of_512_or_what_divides_the_length(length, grid):
    x = jax.ShapeDtypeStruct((1, length, 1, 128), jnp.float32)
    with peers.exact("float32"):
        jaxpr = str(jax.make_jaxpr(peers.splash)(x, x, x))
    assert re.findall(r"grid=(\([\d, ]*\))", jaxpr) == [grid]
    assert jaxpr.count("Precision.HIGHEST") == 4  # both operands of both products


def test_splash_compiles_for_a_tpu_that_is_not_here():
    program = factory_program("peer_subjects:splash", length=512, dtype="float32")
    assert tpu.compile_for("v5e", program, paths=[str(ROOT), str(ROOT / "lab" / "tests")], limit_s=120.0).error is None


@pytest.mark.parametrize(
    ("name", "platform", "shapes", "reason"),
    [
        ("jax", "tpu", square(), ""),
        ("jax", "cpu", square(length=16384), "scores take 16.0 GiB, above the limit of 4.0 GiB"),
        ("splash", "tpu", square(), ""),
        ("splash", "gpu", square(), "needs a TPU, but JAX runs on a GPU"),
        ("splash", "tpu", square(length=200), "needs a multiple of 128 tokens, but the call has 200"),
        ("cudnn", "gpu", square("float16"), ""),
        ("cudnn", "gpu", square("float32"), "takes 16-bit numbers, but the call has float32"),
        ("cudnn", "cpu", square(), "needs an NVIDIA GPU, but JAX runs on a CPU"),
        ("tokamax", "cpu", square(), "needs a TPU or a GPU, but JAX runs on a CPU"),
        ("tokamax", "tpu", square(), "not installed: `pip install tokamax`"),
    ],
)
def test_who_cannot_run_says_why(name, platform, shapes, reason):
    said = peers.PEERS[name].refusal(platform, shapes)
    assert (reason in said) if reason else said == ""


def test_the_limit_is_what_jaxs_own_attention_holds():
    x = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)
    _, step = compile_step(peers.xla, [x, x, x])
    assert step.memory_analysis().temp_size_in_bytes == pytest.approx(8 * 8 * 1024**2, rel=0.3)


def test_without_pytorch_the_others_are_compared_and_it_is_named(stand):
    alone, theirs, ours = cases.dense_prefill(stand, "bfloat16")
    assert (alone.what.workload, alone.comparison) == ("dense_prefill_bf16", None)
    assert alone.samples == ours.samples
    assert theirs.what.workload == ours.what.workload == "dense_prefill_bf16_jax"
    assert ours.comparison.against == theirs.what.kernel == peers.PEERS["jax"].kernel
    skipped = alone.facts["skipped"]
    assert "make peers" in skipped[peers.TORCH]
    assert set(skipped) == {peers.TORCH, *(peers.PEERS[name].kernel for name in ("splash", "cudnn", "tokamax"))}
    assert "skipped" not in ours.facts
    assert evidence.decode(evidence.encode(alone)).facts["skipped"] == skipped


def test_ours_is_recorded_when_no_peer_runs(tmp_path, monkeypatch, capsys):
    """The scores exceed the limit for JAX's own attention, and PyTorch's environment is missing."""
    monkeypatch.setattr(peers, "MOST_SCORE_BYTES", 8 * 8 * SMOKE.attention_tokens**2 - 1)
    out, missing = tmp_path / "records.jsonl", tmp_path / "missing"
    assert bench.run("smoke", out=out, only=["dense_prefill_f32"], peer_python=missing) == 0
    [ours] = evidence.read(out)
    assert ours.error is None
    assert len(ours.samples) == SMOKE.rounds
    assert not ours.how.interleaved
    assert ours.facts["skipped"][peers.PEERS["jax"].kernel].startswith("two arrays of 8 x 256 x 256 scores")
    assert str(tmp_path) not in evidence.encode(ours)
    said = " ".join(capsys.readouterr().err.split())
    assert all(f"dense_prefill_f32: {peer} is skipped: {why}" in said for peer, why in ours.facts["skipped"].items())


def test_a_library_that_fails_is_left_out_with_what_it_said(stand, monkeypatch):
    def fail(q, k, v):
        raise NotImplementedError("not on a day like this\nand more")

    broken = peers.PEERS["jax"]._replace(attend=fail)
    monkeypatch.setattr(peers, "PEERS", {"jax": broken})
    [ours] = cases.dense_prefill(stand, "float32")
    assert ours.facts["skipped"][broken.kernel] == "NotImplementedError: not on a day like this"


def test_any_peer_of_the_table_is_compared_and_caught_when_wrong(stand, monkeypatch):
    """Splash, interpreted, is compared; without its scale it is caught as wrong."""
    right = partial(peers.splash, interpret=True)
    here = peers.PEERS["splash"]._replace(refusal=lambda platform, shapes: "", attend=right)
    monkeypatch.setattr(peers, "PEERS", {"splash": here})
    _, theirs, ours = cases.dense_prefill(stand, "float32")
    assert theirs.what.workload == ours.what.workload == "dense_prefill_f32_splash"
    assert ours.comparison.ratio == pytest.approx(timing.ratio(theirs.samples, ours.samples))
    wrong = here._replace(attend=lambda q, k, v: right(q * q.shape[-1] ** 0.5, k, v))
    monkeypatch.setattr(peers, "PEERS", {"splash": wrong})
    with pytest.raises(ValueError, match="jax splash attention is wrong on a timed call"):
        list(cases.dense_prefill(stand, "float32"))


def test_a_worker_on_the_cpu_is_no_peer_of_an_accelerator(stand, monkeypatch):
    present = Stand("smoke", SMOKE, sys.executable)
    assert present.peer_refusal == ""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert present.peer_refusal == "the PyTorch worker computes on the CPU, Tessera on a TPU"
    with pytest.raises(ValueError, match="cannot compare with transformers: the PyTorch worker"):
        list(bench.CASES["peer_model"].run(present))
    present.close()


def test_every_peer_is_named_in_the_docs():
    text = (ROOT / "docs" / "speed.md").read_text()
    for name in (peers.TORCH, "transformers", *(peer.kernel for peer in peers.PEERS.values())):
        assert f"| `{name}` |" in text
