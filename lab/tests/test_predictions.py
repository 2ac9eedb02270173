"""Predictions: the peer's step counts, the figures and their targets, and the tables that show them."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from lab.report import documents as report
from lab.studies import figures, validation
from lab.studies.programs import ROOT
from tessera.attention import work
from tessera.attention.contract import AttentionSpec, Shapes
from tessera.deviceless import model_inspection, programs, steps
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import predict
from tessera.measure import evidence
from tessera.models.files.source import find_config
from tessera.models.weights import num_parameters
from tessera.runtime.roofline import recipe


def region(name, bundles):
    """Build a scope in the form that `validation.compile_point` writes."""
    return {"name": name, "bundles": bundles, "slots": {"MXU": 0}, "product_cycles": 0, "depth": 1, "loops": 0}


def point(**changes) -> dict:
    config = {"block_q": 1024, "block_kv": 1024, "block_kv_compute": 512, "q_layout": 1, "k_layout": 1, "v_layout": 1}
    shape = [2, 4096, 8, 128]
    bundles = {"step": 100, "full": 1000, "masked": 2000, "launch": 50}
    base = {
        **{"chip": "v6e", "q": shape, "k": shape, "v": shape, "is_causal": True, "return_residuals": False},
        **{"config": config, "measured_ms": 1.0, "error": None, "operations": [["copy.1", "copy", 16_380_000, None]]},
        "regions": {name: region(name, count) for name, count in bundles.items()},
    }
    return base | changes


def test_the_peer_visits_only_blocks_that_the_mask_leaves():
    counts = validation.executions(point())
    assert counts["step"] == 2 * 8 * 10  # 4 on the diagonal, 6 below it
    assert counts["full"] == 2 * 8 * 6
    assert counts["masked"] == 2 * 8 * 4
    assert counts["init"] == counts["end"] == 2 * 8 * 4
    assert validation.executions(point(is_causal=False))["step"] == 2 * 8 * 16


def test_a_points_time_is_its_cycles_and_its_copies():
    cycles = 50 + 160 * 100 + 96 * 1000 + 64 * 2000
    assert validation.predicted_ms(point(), predict.NOMINAL) == pytest.approx(
        1e3 * (cycles / 1.75e9 + 16.38e6 / 1638e9)
    )


def test_every_beginning_of_the_points_is_spread():
    found = [point(measured_ms=float(i)) for i in range(64)]
    first = sorted(p["measured_ms"] for p in validation.spread(found)[:8])
    assert max(b - a for a, b in zip(first, first[1:])) <= 16


def test_a_perfect_prediction_has_no_error_and_rank_one():
    found = [point(q=[2, 4096, heads, 128]) for heads in (2, 4, 8)]
    exact = [p | {"measured_ms": validation.predicted_ms(p, predict.NOMINAL)} for p in found]
    got = validation.summary(exact, predict.NOMINAL)
    assert got["median_absolute_error"] == 0
    assert got["spearman"] == 1


def test_the_fit_finds_the_constants_that_made_the_times():
    """Some points are bound by compute, some by bytes; every tenth is 1.5 times too slow and must not matter."""
    rng, real = np.random.default_rng(8), predict.Overheads(stall=1.05, step_s=0.3e-6, bandwidth_share=0.7)
    found = []
    for number in range(60):
        bundles = {"step": 100, "full": int(rng.integers(100, 3000)), "masked": 2000, "launch": 50}
        regions = {name: region(name, count) for name, count in bundles.items()}
        copied = [["copy.1", "copy", int(rng.integers(1, 400)) * 1_000_000, None]]
        made = point(regions=regions, operations=copied, q=[2, 4096, int(rng.integers(1, 5)) * 2, 128])
        found.append(made | {"measured_ms": validation.predicted_ms(made, real) * (1 if number % 10 else 1.5)})
    fitted = validation.fit([validation.parts(p) for p in found])
    assert fitted.stall == pytest.approx(real.stall, rel=1e-2)
    assert fitted.step_s == pytest.approx(real.step_s, rel=0.05)
    assert fitted.bandwidth_share == pytest.approx(real.bandwidth_share, rel=1e-2)
    assert validation.describe(found[1])[-1] == pytest.approx(validation.parts(found[1]), rel=1e-5)


def test_figures_meet_their_targets_from_the_right_side():
    cases = {
        "v6e": {
            "peer": {"ms": 4.0, "around_ms": 1.0},
            "dense": {"ms": 2.0, "around_ms": 0.5},
            "dense gqa": {"ms": 10.0},
            "score gqa": {"ms": 11.0},
            "decode dense": {"ms": 1.0, "kernel_bytes": 104.0, "needed_bytes": 100.0},
        }
    }
    made = {r.what.workload: r for r in figures.records(cases, "test")}
    assert made["dense prefill against the peer, v6e"].comparison.met is True
    assert made["score / dense, v6e"].comparison.met is False
    assert made["decode, dense: bytes moved / needed, v6e"].median == pytest.approx(1.04)
    assert made[f"{figures.KERNELS_ALONE}, v6e"].median == pytest.approx(3 / 1.5)
    assert set(figures.TARGETS) >= {workload.rpartition(", ")[0] for workload in made} - {figures.KERNELS_ALONE}
    shown = report.tpu(list(made.values())) if all(r.code.commit for r in made.values()) else ""
    assert not shown or "| score / dense |  | 1.10 (<= 1.05: **missed**) |" in shown
    assert not shown or f"| {figures.TERMS[figures.KERNELS_ALONE]} | 2.00 |" in shown


def test_equal_terms_and_the_default_query_tile_have_figures_with_the_same_targets():
    """The cases can be read back from the stored records, so that a study can add to them."""
    cases = {"peer": {"ms": 4.0, "around_ms": 1.0}, "dense": {"ms": 2.5, "around_ms": 0.5}}
    cases |= {"dense, equal terms": {"ms": 3.2}, "dense long": {"ms": 100.0, "flops": 1.0}}
    cases |= {"score long 32": {"ms": 104.0}, "selection 32": {"ms": 6.0}, "sparse kascade 32": {"ms": 18.0}}
    made = {r.what.workload: r for r in figures.records({"v6e": cases}, "test")}
    equal, narrow = made[f"{figures.EQUAL_TERMS}, v6e"], made[f"{figures.KASCADE_32}, v6e"]
    assert (equal.median, equal.comparison.target, equal.comparison.met) == (pytest.approx(1.25), ">= 1.3", False)
    listed = figures.tiles_listed(131072, 128, 32, 0.1) / figures.tiles_full(131072, 128, 32, 0.05)
    assert narrow.median == pytest.approx(3200 / (5 * 110 + 27 * 18 * listed))
    assert (narrow.comparison.target, narrow.comparison.met) == (">= 3.5", False)
    assert figures.stored(made.values()) == {"v6e": cases}


def test_equal_terms_are_float32_exponentials_and_queries_as_a_user_passes_them():
    spec, shapes = AttentionSpec(), Shapes(1, 4096, 8192, 4, 4, 128, None, "bfloat16")
    call = ("tpu_prefill_dense", asdict(spec), shapes._asdict())
    variant = figures.VARIANTS["dense, equal terms"]
    ours, equal = programs.attention_call(*call), programs.attention_call(*call, **variant)
    assert "half_exp=True" in ours[2]["settings"]
    assert "half_exp=False" in equal[2]["settings"]
    assert [made[1][0].shape for made in (ours, equal)] == [(1, 4, 4096, 128), (1, 4096, 4, 128)]


def test_small_tiles_have_their_figures_by_score_and_by_key():
    """Each figure is (sparse time per flop) / (dense time per flop), such as (10 / 4) / (100 / 50) = 1.25."""
    cases = {"dense long": {"ms": 100.0, "flops": 50.0}, "decode dense": {"ms": 4.0, "flops": 8.0}}
    cases |= {f"sparse 16/{rows}": {"ms": 10.0, "flops": 4.0} for rows in (32, 128)}
    cases["decode sparse 16"] = {"ms": 0.5, "flops": 0.8}
    cases["decode sparse"] = {"ms": 0.44, "flops": 0.8}
    made = {r.what.workload: r for r in figures.records({"v5e": cases}, "test")}
    assert made["sparse per score, tile 16, 128 rows, v5e"].median == pytest.approx(1.25)
    assert made["sparse per score, tile 16, 512 rows, v5e"].median == pytest.approx(1.25)
    assert made["decode, sparse, tile 16: time per key against dense, v5e"].median == pytest.approx(1.25)
    assert made["decode, sparse, tile 128: time per key against dense, v5e"].median == pytest.approx(1.1)
    assert all(record.comparison.met is None for record in made.values())


def test_a_time_that_is_bytes_over_bandwidth_is_marked_where_it_is_shown():
    cases = {"decode dense": {"ms": 4.0, "flops": 8.0, "bound_by": "HBM"}}
    cases["decode sparse"] = {"ms": 0.5, "flops": 0.8, "bound_by": "HBM"}
    cases["decode sparse 16"] = {"ms": 0.5, "flops": 0.8, "bound_by": "scalar"}
    cases = {name: case | {"commit": "0" * 40, "dirty": False} for name, case in cases.items()}
    shown = report.tpu(figures.records({"v5e": cases}, "test"))
    assert "tile 128: time per key against dense |  | 1.25, HBM |" in shown
    assert "tile 16: time per key against dense |  | 1.25 |" in shown


def test_tiles_of_one_family_are_adjacent_rows():
    """A tile size compiled after all others is listed next to them, the largest tile first."""
    cases = {"dense long": {"ms": 100.0, "flops": 50.0}, "score gqa": {"ms": 1.1}, "dense gqa": {"ms": 1.0}}
    cases |= {f"sparse {tile}/{rows}": {"ms": 10.0, "flops": 4.0} for tile in (16, 32, 128) for rows in (32, 128)}
    cases = {name: case | {"commit": "0" * 40, "dirty": False} for name, case in cases.items()}
    made = sorted(figures.records({"v5e": cases}, "test"), key=lambda r: "tile 16" in r.what.workload)
    later = [replace(r, date=f"2026-01-01T00:00:{at:02}+00:00") for at, r in enumerate(made)]
    rows = [line.split("|")[1].strip() for line in report.tpu(later).splitlines()[2:] if line.startswith("|")]
    tiles = [f"sparse per score, tile {tile}, {count} rows" for count in (512, 128) for tile in (128, 32, 16)]
    assert rows == ["score / dense", *tiles]


def test_kascade_counts_anchors_reuse_and_selection():
    cases = {name: {"ms": ms, "flops": 1.0} for name, ms in
             (("dense long", 100.0), ("score long", 104.0), ("selection", 1.5), ("sparse kascade", 6.0))}  # fmt: skip
    ratios = {name: ratio for name, ratio, _ in figures.comparisons(cases, "v6e")}
    listed = figures.tiles_listed(131072, 128, 128, 0.1) / figures.tiles_full(131072, 128, 128, 0.05)
    assert listed == pytest.approx(
        52942 / 51922
    )  # each tile lists a tenth of its keys, in a call with room for a twentieth of all keys
    assert ratios[figures.KASCADE] == pytest.approx(3200 / (5 * (104 + 1.5) + 27 * 6 * listed))
    without = {name: case for name, case in cases.items() if name != "selection"}
    assert figures.KASCADE not in {name for name, _, _ in figures.comparisons(without, "v6e")}


@pytest.mark.parametrize(
    ("sizes", "window"),
    [((1024, 1024), None), ((100, 1000), None), ((1000, 1000), 200), ((1, 777), None), ((300, 200), None)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_work_of_full_lists_counts_tiles_that_are_there(sizes, window, causal):
    """Compare with a count tile by tile; a window looks back, so it needs a causal mask."""
    if window is not None and not causal:
        return
    spec = AttentionSpec(tile=64, query_tile=32, causal=causal, window=window)
    shapes = Shapes(2, *sizes, 8, 2, 64, 5, "bfloat16")
    lists = []
    for begin in range(0, sizes[0], 32):
        rows = np.arange(begin, begin + 32)[:, None] + sizes[1] - sizes[0]
        keys = np.arange(sizes[1])[None]
        seen = (keys <= rows) | (not causal)
        if window is not None:
            seen &= keys > rows - window
        tiles = len(np.unique(np.flatnonzero(seen.any(0)) // 64))
        lists.append(min(min(tiles, 5) * 64, sizes[1]))
    assert work.sparse_prefill(spec, shapes)["flops"] == pytest.approx(4 * 2 * 8 * 64 * sizes[0] * np.mean(lists))


LOOP = """HloModule jit_f, entry_computation_layout={()->f32[1024,1024]}

%body (p.1: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %p.1 = (s32[], f32[1024,1024]{1,0:T(8,128)}) parameter(0)
  %x.1 = f32[1024,1024]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %passed = s32[8,128]{1,0:T(8,128)S(1)} fusion(%x.1), backend_config={"estimated_cycles":"35000"}
}

%condition (p.2: (s32[], f32[1024,1024])) -> pred[] {
  %constant.2 = s32[]{:T(128)} constant(16)
  %p.2 = (s32[], f32[1024,1024]{1,0:T(8,128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %constant.2), direction=LT
}

ENTRY %main (m: f32[1024,1024]) -> f32[1024,1024] {
  %m = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %doubled = f32[1024,1024]{1,0:T(8,128)} fusion(%m), backend_config={"estimated_cycles":"1"}
  %start = (s32[], f32[1024,1024]{1,0:T(8,128)}) tuple(%doubled)
  %loop = (s32[], f32[1024,1024]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
}
"""


def test_a_programs_time_counts_every_turn_of_its_loops():
    """The first operation takes its 8 MiB over the bandwidth; the loop takes XLA's 35,000 cycles, 16 times."""
    wanted = 1e3 * (2 * 4 * 1024 * 1024 / (0.8 * 1638e9) + 16 * 35000 / 1.75e9)
    assert figures.xla_ms(LOOP, "v6e") == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("s32[8,128]{1,0:T(8,128)S(1)} fusion(", "s32[8,128]{1,0:T(8,128)S(1)} gather(", "has a gather"),
        ("%doubled = f32[1024,1024]{1,0:T(8,128)} fusion(", "%doubled = f32[8] call-start(", "of unknown time"),
        ("direction=LT", "direction=NE", "number of iterations"),
        ("constant(16)", "parameter(1)", "number of iterations"),
    ],
)
def test_what_has_no_estimate_is_refused_and_not_free(old, new, words):
    assert old in LOOP
    with pytest.raises(ValueError, match=words):
        figures.xla_ms(LOOP.replace(old, new), "v6e")


def test_choosing_tiles_compiles_for_a_tpu_to_nothing_without_an_estimate():
    sizes = {"length": 16384, "kv_heads": 1, "tile": 128, "query_tile": 128, "fraction": 0.1}
    program = factory_program("lab.studies.programs:selection_call", **sizes)
    found = tpu.compile_for("v6e", program, paths=[ROOT])
    assert found.error is None, found.error
    assert 0.0 < figures.xla_ms(found.program, "v6e") < 1.0


def test_weights_of_llama_split_over_eight_chips():
    config, _ = find_config("llama-3.1-8b")
    assert num_parameters(config) == pytest.approx(8.03e9, rel=1e-3)
    roles = steps.roles(recipe(config, "llama-3.1-8b"), config)
    assert sum(roles.values()) == 32
    assert roles["score"] + roles["dense"] == 5


def test_a_mesh_that_does_not_exist_or_divide_is_refused():
    call = {"phase": "decode", "batch": 1, "length": 1024, "queries": 1, "attention": "dense", "tile": 128,
            "query_tile": 32, "fraction": 0.1, "limit_s": 1.0, "config": find_config("llama-3.1-8b")[0]}  # fmt: skip
    with pytest.raises(ValueError, match="must be one of 1, 2, 4, 8, 16"):
        model_inspection.inspect_step("v6e", "llama-3.1-8b", 5, **call)
    with pytest.raises(ValueError, match="must divide the model's 8 KV heads"):
        model_inspection.inspect_step("v6e", "llama-3.1-8b", 16, **call)


def test_tables_of_predictions_render_what_the_records_say():
    facts = validation.summary([point(measured_ms=0.16)], predict.CALIBRATED)
    facts["no_fitted_constant"] = validation.summary([point(measured_ms=0.16)], predict.NOMINAL)
    what = evidence.What(op="prediction", kernel="k", workload="w", title="predicted / measured time, v6e")
    made = evidence.make(what, [1.0], command="make peers-tpu", unit="fraction", facts=facts)
    if made.code.commit:  # true in a checkout only
        assert "| predicted / measured time, v6e | 1 |" in report.prediction([made])
