"""The deviceless CUDA compiler and the gates, on a machine without a GPU.

Reports are read right and errors explained; every Hopper kernel lowers and compiles to machine code.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_subjects import lowering_error

from lab.studies import gpu_figures, gpu_gates
from lab.studies.programs import ROOT, kernels_of
from tessera.attention.contract import AttentionSpec
from tessera.attention.gpu import backward as gpu_backward
from tessera.core import hardware
from tessera.deviceless import hlo, inspection
from tessera.deviceless.compiler import attention_program, factory_program
from tessera.deviceless.gpu import compiler as gpu
from tessera.deviceless.gpu import gates, sass
from tessera.deviceless.gpu import inspection as gpu_inspection

TESTS = Path(__file__).parents[2] / "tests"


@pytest.fixture(scope="module")
def compiler():
    """Start one compiling process for the file's tests, because starting takes longer than most compilations."""
    with gpu.Compiler("h200", paths=[str(TESTS), ROOT]) as found:
        yield found


@pytest.fixture
def compiled(compiler):
    """Return a function that compiles a subject."""
    return lambda subject, **kwargs: compiler.compile(factory_program(f"gpu_subjects:{subject}", **kwargs), limit_s=120)


def text_of(**changes) -> str:
    """Return ptxas's report and a disassembly in the worker's form; each change is a pair (old text, new text)."""
    text = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'two_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for two_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compile time = 68.300 ms

//--------------------- .text.two_mosaic_gpu_kernel --------------------------
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0010*/               @P1 UTMALDG.4D [UR8], [UR4] ;
        /*0020*/              @!P2 LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64] ;
        /*0030*/             @!UP0 UMOV UR4, 0x1 ;
        /*0040*/                   LDGDEPBAR ;
        /*0050*/                   UTMASTG.4D [UR8], [UR4] ;
        /*0060*/                   DEPBAR.LE SB0, 0x1 ;
        /*0070*/                   DEPBAR.LE SB0, 0x0 ;
"""
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    return text


RESOURCES = (
    "Resources(smem_scratch_bytes=65536, barrier_counts=Counter({Barrier(arrival_count=2, num_barriers=2, "
    "orders_tensor_core=False): 3, Barrier(arrival_count=1, num_barriers=4, orders_tensor_core=False): 1}), gmem={})"
)


def write(folder: Path, text: str, *names: str) -> tuple[sass.Report, ...]:
    (folder / sass.COMPILER).write_text(text)
    for name in names:
        (folder / f"{name}.resources.txt").write_text(RESOURCES)
    return sass.read(folder)


def test_a_report_is_read_line_by_line(tmp_path):
    [found] = write(tmp_path, text_of(), "two_0")
    assert (found.kernel, found.registers, found.spill_bytes, found.stack_bytes) == ("two", 168, (0, 0), 0)
    assert found.barriers == 2 * 3 + 4
    assert found.shared_bytes == 65536 + 8 * 10 + 1
    once = ("HGMMA", "UTMALDG", "LDGSTS", "LDGSTS.128", "UMOV", "LDGDEPBAR", "UTMASTG")
    assert found.instructions == dict.fromkeys(once, 1) | {"DEPBAR": 2}
    assert gates.broken_program((found,)) == []


def test_two_kernels_are_told_apart(tmp_path):
    other = text_of().replace("two_", "one_more_").replace("Used 168", "Used 32")
    found = write(tmp_path, other + text_of(), "two_0", "one_more_1")
    assert [(r.kernel, r.registers) for r in found] == [("one_more", 32), ("two", 168)]


def test_identical_kernels_are_compiled_once(tmp_path):
    [found] = write(tmp_path, text_of(), "two_0", "two_1")
    assert found.kernel == "two"


def test_a_kernel_without_its_disassembly_is_refused(tmp_path):
    with pytest.raises(ValueError, match="two was compiled but not disassembled: is nvdisasm"):
        write(tmp_path, text_of().split("//---")[0], "two_0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("0 bytes spill loads", "8 bytes spill loads"), "spilled: '0 bytes stack frame, 0 bytes spill stores, 8"),
        (
            ("UMOV UR4, 0x1", "STL [R1], R10"),
            r"instructions that access local memory: 1, the first '/\*0030\*/ @!UP0 STL",
        ),
        (("1 bytes smem", "170000 bytes smem"), f"235616 bytes of shared memory, but a block has {227 * 1024}"),
        (("HGMMA", "HMMA"), "HGMMA is missing"),
        (("LDGDEPBAR ;", "NOP ;"), "copies by LDGSTS are not waited for"),
        (("DEPBAR.LE SB0, 0x1", "NOP"), "copies by LDGSTS are not waited for"),
        (("ptxas info    : 0 bytes gmem", "ptxas info : (C7512) Potential Performance Loss: wgmma in 'two'"), "C7512"),
    ],
    ids=["spills", "local memory", "shared memory", "tensor cores", "group", "wait", "serialised"],
)
def test_every_gate_bites_and_quotes_the_report(tmp_path, change, said):
    found = write(tmp_path, text_of(change=change), "two_0")
    [text] = gates.broken_program(found)
    assert re.search(said, text), text


def test_loads_must_be_asynchronous(tmp_path):
    text = text_of(tma=("UTMALDG", "LDG"), rows=("BYPASS.128", "64"))
    [said] = gates.broken_program(write(tmp_path, text, "two_0"))
    assert "UTMALDG and LDGSTS.128 are missing" in said


def test_a_program_compiles_to_machine_code_without_a_gpu(compiled):
    found = compiled("product")
    assert found.error is None
    assert found.settings == "2 stages"
    [report] = found.kernels
    assert (report.kernel, report.blocks, report.threads, report.barriers) == ("subject_product", 1, 256, 4)
    assert report.shared_bytes == 2 * (64 * 64 + 64 * 128) * 2 + 64 * 128 * 2 + 8 * 4 + 1
    assert report.instructions["HGMMA"] == 4
    assert gates.broken(report) == []


def test_spills_are_reported_not_hidden(compiled):
    [report] = compiled("spilling").kernels
    assert report.registers == 255
    assert min(report.spill_bytes) > 0
    spilled, local, serial = gates.broken(report)
    assert f"{report.spill_bytes[0]} bytes spill stores" in spilled
    assert "STL" in local
    assert "serialized" in serial


@pytest.mark.parametrize(
    ("subject", "kind"),
    [("large_shared", "shared memory"), ("wide_copy", "TMA"), ("odd_rows", "TMA"), ("sorting", "unsupported"),
     ("two_layouts", "layout"), ("odd_registers", "registers"), ("odd_product", "layout")],
)  # fmt: skip
def test_refusals_are_results_with_a_way_out(compiled, subject, kind):
    error = compiled(subject).error
    assert error.kind == kind, error
    assert error.way_out


def test_an_error_of_the_program_is_a_result_too(compiled):
    assert compiled("product", blocks="many").error.kind == "program"


def test_the_time_limit_ends_the_process_and_another_one_goes_on(compiler, compiled):
    first = compiled("product")
    slow = compiler.compile(factory_program("gpu_subjects:slow"), limit_s=1)
    again = compiled("product")
    assert slow.error.kind == "time"
    assert replace(first.kernels[0], report="") == replace(again.kernels[0], report="")


@pytest.mark.parametrize(
    "text",
    ["NotImplementedError: topology not implemented for cuda", "FileNotFoundError: ptxas and nvdisasm are missing"],
)
def test_a_missing_compiler_says_what_to_install(text):
    said = gpu.explain(text, stage="compiler")
    assert said.way_out == "install the extra: pip install 'tessera-attention[deviceless]'"
    assert str(said).startswith("program: the CUDA compiler (jax's CUDA plug-in, ptxas, nvdisasm) is missing")


def test_what_ptxas_refuses_is_quoted():
    said = gpu.explain("XlaRuntimeError: INTERNAL: failed", said="ptxas error   : Entry function 'f' uses 9999 words")
    assert said.kind == "ptxas"
    assert "uses 9999 words" in said.text


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="must be one of h200"):
        gpu.compile_for("h20", {})


def test_the_target_configuration_is_the_chip_of_the_table():
    text = gpu.TARGETS["h200"].read_text()
    chip = hardware.chip("h200")
    assert f"core_count: {chip.cores}\n" in text
    assert f"memory_bandwidth: {int(chip.bytes_per_s)}\n" in text
    assert f"shared_memory_per_block_optin: {chip.on_chip_bytes}\n" in text
    assert "ACCELERATED_FEATURES" in text  # sm_90a, which wgmma requires


FIRST = {case["kernel"]: case for case in gpu_gates.first_cases()}


def test_the_fast_subset_holds_every_kernel():
    assert set(FIRST) == {kernel.name for kernel in kernels_of("gpu")}


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kernel", FIRST)
def test_kernels_lower_for_cuda_with_the_jax_that_is_here(kernel, part):
    """Lower every head dim of each kernel, and every mask for at least one kernel; this needs no CUDA compiler."""
    found = list(gpu_gates.spread_cases(FIRST[kernel]))
    for case in found[(part + list(FIRST).index(kernel)) % 2 :: 2]:
        error = lowering_error(attention_program(kernel, *gpu_gates.call(case)))
        assert error is None, f"{gpu_gates.identity(case)}: {error}"


@pytest.mark.parametrize("kernel", FIRST)
def test_kernels_pass_the_gates_as_machine_code(compiler, kernel):
    """Compile the default blocks of every kernel: a fast part of `python -m lab study compiles --platform gpu`."""
    result = gpu_gates.run(FIRST[kernel], compiler)
    assert result["broken"] == []


def test_scoring_in_chunks_launches_each_kernel_once_a_chunk(compiler):
    """Two fusions read a chunk's lse; without a barrier XLA clones the call that produces it."""
    spec, shapes = inspection.call(
        role="score", phase="prefill", batch=1, length=32768, heads=32, kv_heads=8, head_dim=64, dtype="bfloat16",
        spec=AttentionSpec(tile=128, query_tile=128), fraction=0.1,
    )  # fmt: skip
    found = compiler.compile(attention_program("gpu_prefill_score", spec, shapes, None))
    launches = hlo.kernel_launches(found.program)
    assert launches["gpu_prefill_score"] == launches["gpu_tile_mass"] > 1


@pytest.mark.parametrize(
    ("head_dim", "mask"), [(64, "causal"), (128, "softcap"), pytest.param(128, "causal", marks=pytest.mark.exhaustive)]
)
def test_the_gradient_passes_the_gates_as_machine_code(compiler, head_dim, mask):
    """Compile both kernels of the gradient, at a length that is no multiple of a block."""
    found = (c | gpu_gates.ODD for c in gpu_gates.gradient_cases() if (c["head_dim"], c["mask"]) == (head_dim, mask))
    result = gpu_gates.run(next(found), compiler)
    assert result["broken"] == []
    assert {report["kernel"] for report in result["kernels"]} == {"gpu_backward_rows", "gpu_backward_keys"}


def test_the_full_run_covers_every_kernel_head_dim_dtype_tile_mask_and_configuration():
    found = list(gpu_gates.cases())
    assert len({gpu_gates.identity(case) for case in found}) == len(found)
    assert not [case for case in found if not gpu_gates.taken(case)]
    for kernel in kernels_of("gpu"):
        mine = [case for case in found if case["kernel"] == kernel.name and not case.get("scaled")]
        assert {case["dtype"] for case in mine} == set(kernel.dtypes)
        assert {case["mask"] for case in mine} == set(gpu_gates.MASKS)
        assert {case["head_dim"] for case in mine} >= {64, 128}
        spec, shapes = gpu_gates.call(FIRST[kernel.name])
        assert sum(case["config"] is None for case in mine) >= 1
        wanted = sum(config != kernel.default_config(spec, shapes) for config in kernel.search_space(spec, shapes))
        names = ("head_dim", "dtype", "tile", "query_tile", "mask", "group", "batch")
        first = [FIRST[kernel.name].get(name) for name in names]
        assert sum(case["config"] is not None and [case.get(n) for n in names] == first for case in mine) == wanted
        alone = (c for c in mine if c["config"] is None and c.get("batch") == 1 and "kv_heads" not in c)
        for case in alone:  # these blocks under every mask, for two sequences
            for mask in gpu_gates.MASKS:
                masked = {**case, "mask": mask, "batch": gpu_gates.BATCH}
                own = map(str, gpu_gates.undefault(masked) if gpu_gates.taken(masked) else [])
                met = {str(c["config"]) for c in mine if (c["head_dim"], c["mask"]) == (case["head_dim"], mask)}
                assert met >= set(own)
        # Other sizes have their own blocks, checked under two masks.
        for sizes in gpu_gates.OTHERS.get((kernel.role, kernel.phase), ()):
            other = FIRST[kernel.name] | sizes
            own = {str(config) for config in (None, *gpu_gates.undefault(other))}
            met = [c for c in mine if all(c[n] == other[n] for n in ("head_dim", "group", "query_tile"))]
            assert {str(c["config"]) for c in met if c["mask"] == gpu_gates.PLAIN} >= own
            assert {str(c["config"]) for c in met if c["dtype"] == "float16" and c["mask"] != gpu_gates.PLAIN} >= own
        assert {c.get("batch", gpu_gates.BATCH) for c in mine if c["config"] is not None} >= {gpu_gates.BATCH} == {2}
        if kernel.phase == "decode":
            batches = [c for c in mine if "kv_heads" in c]
            assert {(c["batch"], c["length"], c["group"]) for c in batches} == set(
                itertools.product((1, 4, 16, 64), (8192, 32768, 131072), (4, 8))
            )
            assert {c["config"] is None for c in batches} == {True, False}  # more and fewer splits than the default
        scaled = [case for case in found if case["kernel"] == kernel.name and case.get("scaled")]
        assert {case["mask"] for case in scaled} == (set(gpu_gates.MASKS) if kernel.scaled else set())
        for case in (c for c in scaled if c["mask"] == gpu_gates.PLAIN and c["config"] is None):
            met = [c["config"] for c in scaled if c["head_dim"] == case["head_dim"]]
            assert gpu_gates.call(case)[1].scaled
            assert all(config in met for config in gpu_gates.undefault({**case, "group": gpu_gates.GROUPS[0]}))
    gradient = [case for case in found if case["kernel"] == gpu_gates.GRADIENT]
    assert {(c["head_dim"], c["dtype"], c["mask"]) for c in gradient} == set(
        itertools.product(gpu_backward.HEAD_DIMS, ("bfloat16", "float16"), gpu_gates.MASKS)
    )


def test_a_record_per_kernel_and_configuration():
    good = {"kernel": "k", "head_dim": 64, "dtype": "bfloat16", "tile": 64, "mask": "causal", "group": 4}
    good |= {"config": None, "settings": "C(stages=2)", "broken": [], "kernels": []}
    bad = {**good, "mask": "window", "broken": ["k C(stages=2): registers are spilled"]}
    other = {**good, "settings": "C(stages=3)"}
    two, one, own = gpu_gates.records([good, bad, other, {**good, "scaled": True, "page": 64}], "command")
    assert (two.median, one.median) == (0.5, 1.0)
    assert own.what.workload == "C(stages=2), h200 with int8 keys in pages"
    assert [record.facts["tried"] for record in (two, one, own)] == [3, 3, 1]
    assert two.facts["broken"] == bad["broken"]
    assert two.what.workload == "C(stages=2), h200"


KEYS = (
    "chip kernel config dispatched refused compiled error registers spill_bytes shared_bytes hbm_bytes temp_bytes "
    "steps instructions gates flops roofline_ms roofline_tflops percent_of_peak bound_by compile_s"
).split()


def test_the_roofline_takes_the_slowest_of_three_bounds():
    on = gpu_inspection.CEILINGS["h200"]
    assert gpu_inspection.roofline(on, on.flops_per_s, 1.0, 128) == (1.0, "tensor cores")
    assert gpu_inspection.roofline(on, 1.0, on.bytes_per_s, 128) == (1.0, "main memory")
    assert gpu_inspection.roofline(on, on.flops_per_s, 1.0, 16)[1] == "exponentials"


@pytest.mark.parametrize("kernel", kernels_of("gpu")[:1], ids=lambda k: k.name)
def test_inspect_prints_one_json_object(kernel, capsys):
    from tessera.cli import main as cli

    flags = f"--chip h200 --role {kernel.role} --phase {kernel.phase} --length 512 --heads 8 --kv-heads 2 --json"
    assert cli.main(["inspect", *flags.split(), "--kernel", kernel.name]) == 0
    out = json.loads(capsys.readouterr().out)
    assert list(out) == KEYS
    assert out["compiled"] is True
    assert out["gates"] == []
    assert out["roofline_ms"] > 0
    assert out["spill_bytes"] == 0


def test_a_call_that_the_chip_cannot_hold_is_an_error():
    assert gpu_inspection.overfull("h200", 10**9) is None
    assert "HBM" in str(gpu_inspection.overfull("h200", 2 * 10**11))


def test_what_cannot_be_held_is_refused_before_a_compiler_starts(capsys):
    from tessera.cli import main as cli

    assert cli.main("inspect --chip h200 --length 1000000000 --limit-s 600 --json".split()) == 1
    out = json.loads(capsys.readouterr().out)
    assert "HBM" in out["error"]
    assert out["compile_s"] == 0


def test_where_no_kernel_of_ours_is_nothing_is_said_to_pass(capsys, tmp_path):
    """If no Hopper kernel takes the call, the reason is given; float32 products have half the rate of bfloat16."""
    from tessera.cli import main as cli

    flags = "--chip h200 --length 256 --heads 2 --kv-heads 1 --head-dim 128 --dtype float32"
    assert cli.main(["inspect", *flags.split(), "--picture", str(tmp_path / "roof.svg")]) == 0
    assert "flops per byte" in (tmp_path / "roof.svg").read_text()
    out = capsys.readouterr().out
    assert "none apply" in out
    assert "passed" not in out
    assert "gpu_prefill_dense cannot take the call: dtype float32" in out
    half, whole = (gpu_inspection.ceilings("h200", dtype).flops_per_s for dtype in ("float32", "bfloat16"))
    assert half == whole / 2


def test_a_whole_model_is_not_inspected_for_a_gpu(capsys):
    from tessera.cli import main as cli

    assert cli.main(["inspect", "--chip", "h200", "--model", "llama-3.1-8b"]) == 2
    assert "drop --model" in capsys.readouterr().err


def test_compilers_for_absent_chips_do_not_complain():
    """libtpu and the CUDA plug-in are installed without their chips; a command prints only its answer."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-W", "error", "-m", "tessera", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    assert {device["platform"] for device in json.loads(done.stdout)["devices"]} <= {"cpu", "gpu", "tpu"}


def inspected(ms: float, flops: float = 1e12, moved: float = 1e9, **code) -> gpu_inspection.Inspection:
    return gpu_inspection.Inspection(compiled=True, roofline_ms=ms, flops=flops, moved_bytes=moved, kernel="k", **code)


def test_the_figures_rooflines_add_up():
    """Rates are those of the named call; Kascade counts five anchors with their selection, and 27 reuse layers."""
    ms = {"dense long": 10.0, "score long": 11.0, "sparse long": 1.0, "decode dense": 4.0, "decode score": 4.0}
    ms |= {"decode sparse": 0.4, "dense": 2.0, "decode dense, 16 sequences": 1.0, "small": 0.001}
    ms |= {"sparse 16/32": 0.5, "sparse 16/128": 1.0, "sparse 32/32": 2.0, "sparse 32/128": 4.0}
    ms |= {"decode sparse 16": 0.3, "decode sparse 32": 0.6}
    assert ms.keys() == gpu_figures.CALLS.keys()
    found = {name: inspected(value) for name, value in ms.items()}
    made = [gpu_figures.record(figure, found) for figure in gpu_figures.all_figures(found)]
    by_name = {record.what.workload.removesuffix(", h200"): record for record in made}
    assert len(by_name) == len(made)
    assert by_name["dense prefill, 16,384 tokens"].median == pytest.approx(1e12 / 2e-3 / 1e12)
    assert by_name["dense decode, 16 x 131,072 keys"].median == pytest.approx(1e9 / 1e-3 / 1e12)
    score = by_name["score / dense, 131,072 tokens"]
    assert (score.median, score.facts["of_roofline"]) == (1.1, round(1.1 / 1.08, 4))
    small = by_name["sparse prefill, 131,072 tokens, a tenth, tile 16, query tile 32"]
    assert (small.median, small.facts["target"]) == (pytest.approx(1e12 / 0.5e-3 / 1e12), None)
    assert by_name["sparse decode, 131,072 keys, a tenth, tile 32"].median == pytest.approx(600)
    selecting = 1e3 * 4 * 8 * 4096 * 2048 / 4.3e12
    prefill = by_name["Kascade prefill against dense, 131,072 tokens"]
    assert prefill.median == pytest.approx(32 * 10.0 / (5 * (11.0 + selecting) + 27 * 1.0))
    assert prefill.facts["of_roofline"] == round(3.4 / prefill.median, 4)
    assert all("not measured" in record.how.check for record in made)


def test_a_target_beyond_its_roofline_is_shown_as_such():
    from lab.report import documents as report

    found = {name: inspected(1.0) for name in gpu_figures.CALLS}
    made = [gpu_figures.record(figure, found) for figure in gpu_figures.all_figures(found)]
    table = report.render("rooflines", made)
    beyond = next(line for line in table.splitlines() if line.startswith("| Kascade decode"))
    assert "**" in beyond
    assert "a peer's time" in table


def test_a_figures_table_names_registers_spills_and_what_breaks_a_gate():
    from lab.report import documents as report

    found = {name: inspected(1.0, registers=168, spill_bytes=0, gates=()) for name in gpu_figures.CALLS}
    found["sparse 16/32"] = inspected(1.0, registers=255, spill_bytes=8, gates=("registers are spilled",))
    made = [gpu_figures.record(figure, found) for figure in gpu_figures.all_figures(found)]
    lines = report.render("rooflines", made).splitlines()
    broken = [line for line in lines if "tile 16, query tile 32" in line]
    assert len(broken) == 1
    assert broken[0].endswith("| 255, 8: **registers are spilled** |")
    assert sum(line.endswith("| 168, 0 |") for line in lines) == len(made) - 1


def test_a_call_that_does_not_compile_names_itself():
    with pytest.raises(RuntimeError, match="dense: time"):
        gpu_figures.inspect("dense", limit_s=0.001)
