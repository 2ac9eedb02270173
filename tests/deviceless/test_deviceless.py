"""The deviceless TPU compiler: schedules are read, errors explained, and times predicted by the documented formula."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.attention.contract import AttentionSpec
from tessera.cli import inspect as flags
from tessera.deviceless import hlo, inspection, steps
from tessera.deviceless.compiler import Process, attention_program, factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import inspection as tpu_inspection
from tessera.deviceless.tpu import predict, schedule
from tessera.measure import evidence

HERE = Path(__file__).parents[1]
KIB = 1024


@pytest.fixture(scope="module")
def compiler():
    """Start one compiling process for the file's tests, because starting takes longer than most compilations."""
    with tpu.Compiler(paths=[str(HERE)]) as found:
        yield found


@pytest.fixture
def compiled(compiler):
    """Return a function that compiles a subject for a chip."""
    return lambda chip, subject, **kwargs: compiler.compile(
        chip, factory_program(f"deviceless_subjects:{subject}", **kwargs), limit_s=120
    )


def little() -> schedule.Schedule:
    """Read the committed schedule of `deviceless_subjects.little`, compiled for v6e."""
    [found] = schedule.read(HERE / "golden" / "schedule")
    return found


def test_bundles_belong_to_the_innermost_scope():
    found = little()
    assert found.name == "little"
    counts = {region.name: region.bundles for region in found.regions}
    # The dump has 109 bundle lines; 6 of them hold only a marker of the traced build.
    assert counts == {"launch": 11, "step": 85, "double": 3, "turn": 4}
    assert sum(counts.values()) == 103


def test_slots_are_counted_per_scope_against_the_units_capacity():
    found = little()
    assert found.capacity["VALU"] == 4
    assert found.region("double").slots["VSTORE"] == 1
    assert found.region("turn").slots == {**dict.fromkeys(found.capacity, 0), "VALU": 1, "VLOAD": 2, "VSTORE": 1}
    assert found.region("turn").depth == 2


def test_memory_and_turns_come_from_the_allocations():
    found = little()
    assert found.turns == 4  # two steps, plus one turn each to fill and drain the pipeline
    assert found.smem_bytes == 512
    assert found.vmem_bytes == 72 * KIB + 2 * 2 * 4 * KIB  # the compiler's scratch, and two double-buffered windows


def test_files_that_do_not_belong_together_are_refused():
    bundles = "     0   :  { %1 = vst [vmem:[#a]] %v }\n"
    utilization = "x\nMXU, VALU\n 1 1\nx\n0 1\n0 1\n"
    with pytest.raises(ValueError, match="1 bundles but 2 rows"):
        schedule.parse("k.1", bundles, utilization)


def test_prediction_is_executions_times_bundles_over_the_clock():
    found = tpu.Compiled(chip="v5p", error=None, compile_s=0.0, memory={}, schedules=(little(),), operations=())
    counts = {"step": 4, "double": 1000, "turn": 50_000, "hbm_bytes": 2765e3}
    got = predict.predict(found, counts)
    cycles = 11 + 4 * 85 + 1000 * 3 + 50_000 * 4
    assert got.compute_ms == pytest.approx(1e3 * cycles / 1.75e9 / 2)  # 4 steps, 2 on each of v5p's two cores
    assert got.dma_ms == pytest.approx(1e-3)
    assert got.ms == pytest.approx(max(got.compute_ms, got.dma_ms))
    assert got.steps == 4
    assert got.bundles_per_step == got.cycles_per_step == pytest.approx(cycles / 4)
    assert not got.assumed
    full = [replace(region, product_cycles=5 * region.bundles) for region in little().regions]
    slow = predict.predict(replace(found, schedules=(replace(little(), regions=tuple(full)),)), counts)
    assert slow.bundles_per_step == pytest.approx(cycles / 4)
    assert slow.cycles_per_step == pytest.approx(5 * cycles / 4)
    alone = predict.predict(found, counts | {"step": 2})  # 2 steps are one core's loop: nothing is shared
    assert alone.compute_ms == pytest.approx(1e3 * (cycles - 2 * 85) / 1.75e9)


def test_scopes_nobody_counted_run_once_per_step_and_are_named():
    found = tpu.Compiled(chip="v6e", error=None, compile_s=0.0, memory={}, schedules=(little(),), operations=())
    got = predict.predict(found, {"little/step": 10, "little/double": 10})
    assert got.assumed == ("little/turn",)
    assert got.compute_ms == pytest.approx(1e3 * (11 + 10 * (85 + 3 + 4)) / 1.75e9)


def test_physical_bytes_pad_tiles_and_leave_out_memory_on_the_chip():
    assert hlo.physical_bytes("bf16[4,100,64]{2,1,0:T(8,128)(2,1)}") == 4 * 104 * 128 * 2
    assert hlo.physical_bytes("bf16[4,100,64]{2,1,0:T(8,128)(2,1)S(1)}") == 0
    assert hlo.physical_bytes("(f32[8,128]{1,0:T(8,128)}, u8[3]{0})") == 4096 + 3


def test_operations_are_the_entrys_copies_not_the_kernels():
    text = """HloModule jit_f
%inner (p: f32[8,128]) -> f32[8,128] {
  ROOT %copy.9 = f32[8,128]{1,0:T(8,128)} copy(%p)
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %copy.1 = f32[8,128]{0,1:T(8,128)} copy(%x), backend_config={"estimated_cycles":"70"}
  %k.1 = f32[8,128]{1,0:T(8,128)} custom-call(%copy.1), custom_call_target="tpu_custom_call", metadata={"a":
}}, sharding={}
  ROOT %copy.2 = f32[8,128]{1,0:T(8,128)} copy(%k.1)
}
"""
    found = hlo.operations(text)
    assert [(o.name, o.bytes, o.cycles) for o in found] == [
        ("copy.1", 128 * 128 * 4 + 4096, 70),
        ("copy.2", 8192, None),
    ]
    assert hlo.kernel_names(text) == ("k.1",)


@pytest.mark.parametrize(("chip", "columns"), [("v5e", 128), ("v5p", 128), ("v6e", 256), ("v7x", 256)])
def test_every_chip_compiles_and_tells_the_kernel_which_it_is(chip, columns):
    """`compile_for` uses a process per program; a shared process leaves no schedule."""
    found = tpu.compile_for(chip, factory_program("deviceless_subjects:scopes"), paths=[str(HERE)])
    assert found.error is None
    assert found.settings == f"{columns} columns"
    [kernel] = found.schedules
    assert {"first", "full", "last", "step", "launch"} == {region.name for region in kernel.regions}
    products = 16 * 256 // columns * (1 if columns == 256 else 2)  # of 16 rows each
    assert kernel.region("full").product_cycles == 4 * products
    got = predict.predict(found, found.executions)
    assert not got.assumed
    assert 0 < got.ms < 1


def test_a_list_too_long_for_smem_is_an_explained_result(compiled):
    found = compiled("v6e", "long_list")
    assert found.error.kind == "SMEM"
    assert "stream the list" in str(found.error)
    assert "RESOURCE_EXHAUSTED" in found.error.text


def test_a_block_too_large_for_vmem_is_an_explained_result(compiled):
    found = compiled("v6e", "large_block")
    assert found.error.kind == "VMEM"
    assert "smaller blocks" in found.error.way_out


def test_an_error_of_the_program_is_a_result_too(compiled):
    assert compiled("v6e", "scopes", blocks="many").error.kind == "program"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NotImplementedError: Unimplemented primitive in Pallas TPU lowering: sort", "unsupported"),
        (
            "ValueError: The Pallas TPU lowering currently requires that rank >= 1 blocks are divisible by 8 and 128",
            "layout",
        ),
        ("Ran out of memory in memory space hbm. Used 40.0G of 31.2G hbm", "HBM"),
        ("TypeError: add got incompatible shapes", "program"),
    ],
)
def test_messages_are_sorted_by_meaning(text, kind):
    assert tpu.explain(text).kind == kind


def test_a_missing_compiler_says_what_to_install():
    said = tpu.explain("RuntimeError: JAX TPU support not installed; cannot generate TPU topology.")
    assert "tessera-attention[deviceless]" in said.way_out


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="must be one of v5e, v5p, v6e, v7x"):
        tpu.compile_for("v3", {})


INT8 = (("dense", "decode"), ("score", "decode"), ("dense", "prefill"), ("score", "prefill"), ("sparse", "prefill"))


@pytest.mark.parametrize(
    ("role", "phase", "tile"),
    [("sparse", "decode", 32), *(pytest.param(*x, 128, marks=pytest.mark.exhaustive) for x in INT8)],
)
def test_kernels_compile_on_int8_keys(role, phase, tile, compiler):
    spec, shapes = inspection.call(
        role=role, phase=phase, batch=1, length=1024, heads=4, kv_heads=2, head_dim=64, dtype="bfloat16",
        spec=AttentionSpec(tile=tile), fraction=0.5,
    )  # fmt: skip
    program = attention_program(f"tpu_{phase}_{role}", spec, shapes._replace(scaled=True))
    found = compiler.compile("v5e", program)
    assert found.error is None
    cache = 2 * 2 * 1024 * (64 + 2)
    assert cache <= found.memory["argument"] < 1.5 * cache


def test_a_compiler_goes_on_after_a_program_that_takes_too_long_and_one_that_is_wrong(compiler):
    good = attention_program("tpu_decode_dense", *inspection.call(
        role="dense", phase="decode", batch=1, length=512, heads=2, kv_heads=1, head_dim=128, dtype="bfloat16",
        spec=AttentionSpec(), fraction=1.0,
    ))  # fmt: skip
    late = compiler.compile("v6e", factory_program("deviceless_subjects:slow"), limit_s=1.0)
    wrong = compiler.compile("v5e", factory_program("json:nothing"))
    found = compiler.compile("v5p", good)
    again = compiler.compile("v6e", good)
    assert (late.error.kind, wrong.error.kind) == ("time", "program")
    assert "json" in wrong.error.text
    assert found.error is again.error is None
    assert found.memory["argument"] > 0
    assert found.schedules == ()


KEYS = (
    "chip kernel config refused compiled error vmem_bytes smem_bytes hbm_bytes steps bundles_per_step cycles_per_step "
    "slots spill_slots flops predicted_ms predicted_tflops percent_of_peak bound_by compile_s"
).split()


@pytest.mark.parametrize(
    "kernel", ["tpu_prefill_score", pytest.param("xla_prefill_dense", marks=pytest.mark.exhaustive)]
)
def test_inspect_prints_one_json_object(kernel, capsys):
    from tessera.cli import main as cli

    role = kernel.rpartition("_")[2]
    flags = f"--chip v6e --role {role} --length 512 --heads 2 --kv-heads 1 --head-dim 128 --kernel {kernel} --json"
    assert cli.main(["inspect", *flags.split()]) == 0
    out = json.loads(capsys.readouterr().out)
    assert list(out) == KEYS
    assert out["compiled"] is True
    assert out["refused"] == {}  # the TPU's own kernel accepts this call in either case
    predicted = [out[name] for name in ("predicted_ms", "predicted_tflops", "percent_of_peak")]
    assert predicted == [None] * 3 if kernel.startswith("xla") else min(predicted) > 0


def test_what_xla_alone_computes_is_not_predicted_and_says_why(capsys, tmp_path):
    call = {"role": "score", "phase": "prefill", "batch": 1, "length": 256, "heads": 2, "kv_heads": 1, "head_dim": 128}
    spec, shapes = inspection.call(**call, dtype="float16", spec=AttentionSpec(), fraction=1.0)
    result = tpu_inspection.inspect_call("v6e", spec, shapes)
    reason = "dtype float16 is not one of float32, bfloat16"
    out = result.json()
    assert out["refused"] == {"tpu_prefill_score": reason}
    assert out["predicted_ms"] is out["predicted_tflops"] is out["percent_of_peak"] is None
    assert out["bound_by"] == "not predicted: the call has no Pallas kernel"
    result.print_table()
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert reason in shown
    assert f"roofline at least {result.least_ms:.3g} ms" in shown
    pytest.importorskip("matplotlib")
    result.picture(tmp_path / "roofline.svg")
    flags.Inspect(evidence=tmp_path / "found.jsonl").record("call", result.kernel, "a call", result)
    [record] = evidence.read(tmp_path / "found.jsonl")
    assert (record.samples, record.error, record.facts["refused"]) == ((), out["bound_by"], out["refused"])


def test_the_table_has_the_roofline_without_a_picture(capsys):
    work = {"flops": 918e12, "moved_bytes": 1638e9, "predicted_ms": 2000.0, "percent_of_peak": 50.0}  # 1 s of each
    sizes = dict.fromkeys(("steps", "bundles_per_step", "cycles_per_step", "spill_slots", "hbm_bytes", "vmem_bytes"), 1)
    found = tpu.Compiled(chip="v6e", error=None, compile_s=0.0, memory={}, schedules=(little(),), operations=())
    result = tpu_inspection.Inspection(
        compiled=True, chip="v6e", **work, **sizes, smem_bytes=1, predicted_tflops=459.0, bound_by="MXU", compile_s=1.0,
        prediction=predict.predict(found, {}),
    )  # fmt: skip
    assert (*result.intensities(), result.least_ms) == pytest.approx((560.4, 560.4, 1000.0), rel=1e-3)
    result.print_table()
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "roofline 50.0 % of peak; 560 flops per byte; from 560 on, the peak rate is the limit" in shown


@pytest.mark.parametrize("mesh", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_whole_decode_step_compiles_for_a_mesh(mesh, capsys):
    """The shipped model under Kascade uses a kernel per role, and two sums over the mesh per layer."""
    from tessera.cli import main as cli

    folder = Path(steps.__file__).parents[1] / "shipped" / "model"
    flags = f"--chip v6e --model {folder} --mesh {mesh} --phase decode --length 2048 --json"
    assert cli.main(["inspect", *flags.split()]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["compiled"] is True
    assert {role: figures["kernel"] for role, figures in out["attention"].items()} == {
        role: f"tpu_decode_{role}" for role in ("score", "sparse")
    }
    in_layers = [c for c in out["collectives"] if c[2] == "layer"]
    assert len(in_layers) == (2 if mesh == 2 else 0)
    assert out["hbm_bytes"] > 0
    assert out["predicted_ms"] > 0


WORKERS = {
    "dies before it answers": "import sys; print('no compiler here', file=sys.stderr); sys.exit(1)",
    "answers once": "import sys; sys.stdin.readline(); print('{\"compiled\": true}', flush=True)",
    "dies of every second": "import sys\nfor n, line in enumerate(sys.stdin):\n"
    "    if n: sys.exit(3)\n    print('{\"compiled\": true}', flush=True)",
}


def process(name: str) -> Process:
    return Process([sys.executable, "-c", WORKERS[name]], {})


def test_a_worker_that_cannot_start_is_no_result():
    with (
        process("dies before it answers") as worker,
        pytest.raises(ValueError, match="did not start: no compiler"),
    ):
        worker.ask({}, 60)


def test_a_death_between_requests_is_not_the_next_ones_fault():
    with process("answers once") as worker:
        for _ in range(3):
            assert worker.ask({}, 60) == {"compiled": True}
            while worker._process.poll() is None:
                time.sleep(0.01)


def test_a_death_of_a_request_is_its_result_and_a_new_worker_goes_on():
    with process("dies of every second") as worker:
        said = [worker.ask({}, 60) for _ in range(4)]
    assert [reply["compiled"] for reply in said] == [True, False, True, False]
    assert said[1]["stage"] == "compile"
    assert "status 3" in said[1]["error"]
