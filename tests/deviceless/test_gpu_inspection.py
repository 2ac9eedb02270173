"""`tessera inspect --chip h200` reports on a compiled call: gates, launches, times, and a GPU's own choice."""

import json
from dataclasses import replace

import pytest

from tessera.attention import dispatch
from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.kernel import Capability
from tessera.cli import main as cli
from tessera.deviceless import hlo, inspection, programs
from tessera.deviceless.compiler import CompileError
from tessera.deviceless.gpu import compiler as gpu
from tessera.deviceless.gpu import inspection as gpu_inspection
from tessera.deviceless.gpu import sass

REPORT = sass.Report(
    kernel="k", registers=168, spill_bytes=(0, 0), stack_bytes=0, shared_bytes=1024, barriers=2, instructions={},
    local=(), report="", blocks=1216, threads=384,
)  # fmt: skip
FOUND = gpu_inspection.Inspection(
    compiled=True, chip="h200", kernel="gpu_prefill_dense", dispatched="gpu_prefill_dense", gates=(), flops=1e12,
    roofline_ms=1.5, roofline_tflops=1.0, percent_of_peak=1.0, bound_by="main memory", hbm_bytes=1, temp_bytes=1,
    moved_bytes=1e9, compile_s=1.0, registers=168, spill_bytes=0, shared_bytes=1024, launches={"k": 1},
    found=gpu.Compiled(chip="h200", error=None, compile_s=1.0, kernels=(REPORT,)),
)  # fmt: skip


@pytest.mark.parametrize("flags", ["", " --json"])
def test_a_broken_gate_is_the_exit_status(flags, capsys, monkeypatch):
    for broken, status in (((), 0), (None, 0), (("k: registers are spilled",), 1)):
        monkeypatch.setattr(gpu_inspection, "inspect_call", lambda *_, it=broken, **__: replace(FOUND, gates=it))
        assert cli.main(f"inspect --chip h200{flags}".split()) == status
        out = capsys.readouterr().out
        assert ("registers are spilled" in out) == (status == 1)
        assert not flags or json.loads(out)["gates"] == (broken if broken is None else list(broken))


PROGRAM = """HloModule jit_call
%fused (p: f32[1]) -> f32[1] {
  ROOT %a = f32[1] custom-call(%p), KERNEL, metadata={op_name="jit(call)/while/body/one/mpmd_map"}
}

%body (arg: f32[1]) -> f32[1] {
  %b = f32[1] custom-call(%arg), KERNEL, metadata={op_name="jit(call)/while/body/one/mpmd_map"}
  ROOT %c = f32[1] fusion(%b), kind=kCustom, calls=%fused
}

%other (arg.1: f32[1]) -> f32[1] {
  ROOT %d = f32[1] custom-call(%arg.1), KERNEL, metadata={op_name="jit(call)/lost/mpmd_map"}
}

ENTRY %main (q: f32[1]) -> f32[1] {
  %e = f32[1] custom-call(%q), KERNEL, metadata={op_name="jit(call)/two/mpmd_map"}
  %f = f32[1] while(%e), condition=%fused, body=%body, backend_config={"known_trip_count":{"n":"21"}}
  %g = f32[1] while(%e), condition=%fused, body=%other
  ROOT %h = f32[1] conditional(%g), true_computation=%other
}
""".replace("KERNEL", 'custom_call_target="mosaic_gpu_v2"')


def test_loops_launch_their_kernels_once_a_turn():
    """XLA may call a kernel inside a fusion or outside; a loop of unknown length gives no count of launches."""
    launches = hlo.kernel_launches(PROGRAM)
    assert launches == {"one": 42, "two": 1}
    reports = [replace(REPORT, kernel=name) for name in ("one", "two")]
    assert gpu_inspection.blocks_launched(reports, launches) == 43 * 1216
    assert gpu_inspection.blocks_launched([*reports, replace(REPORT, kernel="lost")], launches) is None
    assert gpu_inspection.describe(reports[0], 42).startswith("one: launched 42 times: 1,216 blocks")
    assert gpu_inspection.describe(reports[1], 1).startswith("two: 1,216 blocks")


def test_a_score_in_chunks_counts_the_blocks_of_every_chunk():
    call = {"role": "score", "phase": "prefill", "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128}
    spec, shapes = inspection.call(length=40000, dtype="bfloat16", fraction=0.1, spec=AttentionSpec(), **call)
    found = gpu_inspection.inspect_call("h200", spec, shapes)
    [scores, _] = found.found.kernels
    assert scores.kernel == "gpu_prefill_score"
    assert scores.blocks * found.launches[scores.kernel] >= 32 * 40000 / 128  # 128 rows per block
    assert found.steps > scores.blocks * found.launches[scores.kernel]


@pytest.mark.parametrize(
    ("ms", "words"), [(4.8e-6, "0.00480 us"), (0.012, "12.0 us"), (1.5, "1.50 ms"), (2e3, "2.00 s")]
)
def test_the_roofline_is_told_in_a_unit_that_shows_it(ms, words, capsys):
    replace(FOUND, roofline_ms=ms).print_table()
    assert f"{words}, bound by main memory" in capsys.readouterr().out


@pytest.mark.parametrize(("head_dim", "window", "name"), [
    (128, None, "gpu_cudnn_dense"), (96, None, "gpu_cudnn_dense"), (128, 100, "gpu_prefill_dense"),
])  # fmt: skip
def test_what_the_dispatcher_takes_on_a_gpu_is_said(head_dim, window, name, capsys, monkeypatch):
    """cuDNN's kernel compiles only on a GPU, so the next kernel in the table is inspected instead."""
    refused = CompileError("program", "not today", "nothing", "nothing")
    monkeypatch.setattr(gpu, "compile_for", lambda *_, **__: gpu.Compiled(chip="h200", error=refused, compile_s=0.0))
    flags = f"inspect --chip h200 --length 1024 --head-dim {head_dim} --json"
    assert cli.main(flags.split() + ([] if window is None else ["--window", str(window)])) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["dispatched"] == name
    replace(FOUND, dispatched=name).print_table()
    assert ("dispatch chooses gpu_cudnn_dense" in capsys.readouterr().out) == (name == "gpu_cudnn_dense")


def test_a_kernel_of_another_generation_is_neither_inspected_nor_gated(monkeypatch):
    """The other generation's kernel comes first in the table; the named chip decides, since no GPU is present."""
    plain = next(k for k in dispatch.KERNELS if k.name == "gpu_prefill_dense")
    later = replace(plain, name="gpu_later_dense", capability=Capability(name="10.0 (Blackwell)", least=10.0))
    for module in (dispatch, inspection, programs):
        monkeypatch.setattr(module, "KERNELS", (later, *dispatch.KERNELS))
    spec, shapes = AttentionSpec(window=100), Shapes(1, 1024, 1024, 8, 2, 128, None, "bfloat16")
    assert inspection.kernel_for("gpu", "h200", spec, shapes, None, None) is plain
    refused = CompileError("program", "not today", "nothing", "nothing")
    monkeypatch.setattr(gpu, "compile_for", lambda *_, **__: gpu.Compiled(chip="h200", error=refused, compile_s=0.0))
    assert gpu_inspection.inspect_call("h200", spec, shapes).dispatched == plain.name
    assert dispatch.choose(spec, shapes, platform="gpu", capability="10.0") is later
    with pytest.raises(ValueError, match=r"needs compute capability 10.0 \(Blackwell\), but this GPU has 9.0"):
        inspection.kernel_for("gpu", "h200", spec, shapes, later.name, None)
    alone = replace(plain, supports=lambda spec, shapes: "not today")
    monkeypatch.setattr(inspection, "KERNELS", (later, alone))
    assert inspection.refusals("gpu", "h200", spec, shapes).keys() == {later.name, plain.name}
