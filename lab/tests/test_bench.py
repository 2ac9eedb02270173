"""The benchmark harness catches what benchmarks hide: skipped work, wrong outputs, and dense runs labelled sparse."""

import math
import sys
import textwrap
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import load_stacked, random_params

from lab import bench
from lab.bench import amdahl, model
from lab.bench import attention as cases
from lab.bench.stand import SMOKE, Sizes, Stand, utilisation
from lab.peers.process import Peer
from tessera.attention.contract import AttentionSpec, Selection
from tessera.calibration.crossover import find_crossover
from tessera.core import files, hardware
from tessera.measure import evidence, timing
from tessera.measure.evidence import INTERVAL_ROUNDS, How, What
from tessera.measure.judge import paired
from tessera.measure.model_work import causal_pairs, model_work, versus
from tessera.runtime import step
from tessera.runtime.row_pool import RowPool
from tessera.sparse.baselines import Dense
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import Plan

# A worker in NumPy speaks the peer's protocol, as this environment has no torch; it computes real attention.
WORKER = """
import json, sys, time
import numpy as np
for line in sys.stdin:
    request = json.loads(line)
    if request.pop("call") == "hello":
        print(json.dumps({"torch": "numpy in its place", "transformers": None, "threads": 1}), flush=True)
        continue
    shape = (request["length"], request["heads"], request["head_dim"])
    q, k, v = (np.random.default_rng([request["seed"], i]).standard_normal((1, *shape), dtype=np.float32)[0]
               for i in range(3))
    start = time.perf_counter()
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(request["head_dim"])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("nts,snh->nth", weights / weights.sum(-1, keepdims=True), v)
    answer = {"seconds": time.perf_counter() - start, "rows": (out[:, request["rows"]] + SHIFT).tolist()}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def stand(monkeypatch):
    """Return a stand without rests between sides, with one chunk size for prompts and stacked layers in models."""
    for module in (cases, model):
        monkeypatch.setattr(module, "REST_S", 0.0)
    monkeypatch.setattr(step, "CHUNK", 64)
    monkeypatch.setattr(model.generate, "load", load_stacked)
    made = Stand("smoke", replace(SMOKE, sparse_tokens=1280), sys.executable)
    made.case = "planted"
    # Set high: measured on a busy machine, ceilings could be lower than the rates that the calls then reach.
    made.ceilings = timing.Ceilings(flops_per_s={"float32": 1e15, "bfloat16": 1e15}, bytes_per_s=1e15)
    yield made
    made.close()


def with_worker(stand, tmp_path, shift):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER).replace("SHIFT", shift))
    stand._peer = Peer(sys.executable, script)
    stand.peer_versions = stand._peer.ask("hello")
    return stand


def test_dense_prefill_compares_all_sides_on_the_same_inputs(stand, tmp_path):
    peer, ours, jaxs, again = cases.dense_prefill(with_worker(stand, tmp_path, "0"), "float32")
    assert (peer.what.kernel, jaxs.what.kernel) == ("torch sdpa", "jax dot_product_attention")
    assert len(peer.samples) == len(ours.samples) == len(jaxs.samples) == SMOKE.rounds
    assert ours.comparison.ratio == pytest.approx(timing.ratio(peer.samples, ours.samples))
    assert ours.comparison.target == ">= 1.5"
    assert ours.flops == 4 * 8 * 128 * causal_pairs(SMOKE.attention_tokens)
    assert ours.how.interleaved
    assert ours.how.compile_s > 0
    assert ours.command == "python -m lab bench --suite smoke --only planted"
    assert again.samples == ours.samples
    assert again.comparison.ratio == pytest.approx(timing.ratio(jaxs.samples, ours.samples))
    assert len({r.key for r in (peer, ours, jaxs, again)}) == 4
    # Tables and --gate find the other side by this key.
    assert jaxs.key == again.key._replace(kernel=again.comparison.against)
    assert not {peer.what.kernel, jaxs.what.kernel} & set(ours.facts["skipped"])


def test_a_peer_in_this_process_with_wrong_outputs_is_caught(stand, tmp_path, monkeypatch):
    right = jax.nn.dot_product_attention

    def all_keys(*arrays, is_causal, implementation):
        return right(*arrays, implementation=implementation)

    monkeypatch.setattr(jax.nn, "dot_product_attention", all_keys)
    with pytest.raises(ValueError, match="jax dot_product_attention is wrong on a timed call"):
        list(cases.dense_prefill(with_worker(stand, tmp_path, "0"), "float32"))


def test_a_peer_with_wrong_outputs_is_caught(stand, tmp_path):
    with pytest.raises(ValueError, match="torch is wrong on a timed call"):
        list(cases.dense_prefill(with_worker(stand, tmp_path, "0.01"), "float32"))


def test_sparse_prefill_records_its_realised_density(stand):
    dense, score, sparse = cases.sparse_prefill(stand)
    assert [r.what.title.split()[0] for r in (dense, score, sparse)] == ["dense", "score", "sparse"]
    assert dense.density == (1.0,)
    assert 0.05 < sparse.density[0] < 0.3
    assert sparse.flops == pytest.approx(dense.flops * sparse.density[0])
    assert score.comparison.target == ">= 0.8"
    assert sparse.comparison.against == dense.what.kernel


def test_a_kernel_that_drops_a_tile_is_caught(stand, monkeypatch):
    """The planted kernel leaves out the last listed tile; from 1,280 keys on, 10 % is two tiles."""

    def drop_tile(q, k, v, spec, *, selection=None, **rest):
        if selection is not None:
            selection = Selection(selection.tiles, jnp.maximum(selection.count - 1, 1))
        return attention(q, k, v, spec, selection=selection, **rest)

    attention = cases.attention
    monkeypatch.setattr(cases, "attention", drop_tile)
    with pytest.raises(ValueError, match="sparse is wrong on a timed call"):
        list(cases.sparse_prefill(stand))


def test_a_dense_run_in_disguise_is_caught(stand, monkeypatch):
    select = cases.select_tiles
    monkeypatch.setattr(cases, "select_tiles", lambda mass, spec, fraction: select(mass, spec, fraction=1.0))
    with pytest.raises(ValueError, match="does not do sparse work"):
        list(cases.sparse_prefill(stand))


def test_a_time_below_the_floor_becomes_an_error(stand):
    what = What(op="attention", kernel="too good", workload="w", dtype="float32")
    stand.ceilings = timing.Ceilings(flops_per_s={"float32": 1e9, "bfloat16": 1e9}, bytes_per_s=1e9)
    fast = stand.record(what, [0.5], How(), work={"flops": 1e9, "bytes": 1.0})
    assert "below the roofline floor" in fast.error
    once = stand.record(what, [2.0, 0.5, 2.0], How(), work={"flops": 1e9, "bytes": 1.0})
    assert "0.5 s of one sample is below the roofline floor" in once.error  # one skipped call of three fails the record
    honest = stand.record(what, [2.0], How(), work={"flops": 1e9, "bytes": 1.0})
    assert honest.error is None
    assert honest.peak_fraction == pytest.approx(0.5)


def test_a_timer_that_skips_the_work_is_caught(tmp_path, monkeypatch):
    """The fault is in time_call itself, and the run measures its own ceilings."""

    def skip(function, *args):  # only not waiting would be no fault: a busy machine may finish the call first
        start = time.perf_counter()
        out = jax.block_until_ready(function(*args))
        return 1e-3 * (time.perf_counter() - start), out

    measured = timing.ceilings
    monkeypatch.setattr(timing, "time_call", skip)
    monkeypatch.setattr(timing, "ceilings", lambda: measured(size=512, read_bytes=1 << 24, rounds=2))
    out = tmp_path / "records.jsonl"
    assert bench.run("smoke", out=out, only=["sparse_prefill"]) == 1
    assert all("work was skipped" in record.error for record in evidence.read(out))


def test_realised_density_counts_visible_keys_once():
    spec = AttentionSpec(tile=16, query_tile=16)
    tiles = jnp.asarray([[[[0, 0], [0, 1], [1, 2]]]], jnp.int32)
    count = jnp.asarray([[[1, 2, 2]]], jnp.int32)
    rows = np.arange(48)
    allowed = {0: {0}, 1: {0, 1}, 2: {1, 2}}
    read = sum(key <= row and key // 16 in allowed[row // 16] for row in rows for key in range(48))
    found = cases.realised_density(Selection(tiles, count), spec, 48)
    assert found == pytest.approx(read / causal_pairs(48))


def test_model_work_is_the_sum_of_its_tokens():
    config = SMOKE.config
    whole = model_work(config, 8)["flops"]
    steps = sum(model_work(config, 1, past=past)["flops"] for past in range(8))
    head = 2.0 * config.vocab_size * config.hidden_size
    assert steps - 7 * head == pytest.approx(whole)


def test_utilisation_is_work_over_time_and_ceiling(stand):
    ceilings = timing.Ceilings(flops_per_s={"float32": 4e9, "bfloat16": 8e9}, bytes_per_s=1e9)
    found = utilisation(2e9, 1e8, 2.0, "float32", ceilings)
    assert (found["mfu"], found["bandwidth_share"]) == pytest.approx((0.25, 0.05))
    assert not {"mfu_nominal", "bandwidth_share_nominal"} & set(found)
    chip = hardware.chip("v7x")  # has two devices per chip
    found = utilisation(2e12, 1e9, 0.1, "bfloat16", ceilings, chip)
    assert found["mfu_nominal"] == pytest.approx(2e13 / (chip.bf16_flops_per_s / 2))
    assert found["bandwidth_share_nominal"] == pytest.approx(1e10 / (chip.bytes_per_s / 2))
    assert "mfu_nominal" not in utilisation(2e12, 1e9, 0.1, "float32", ceilings, chip)


def test_records_of_the_whole_model_hold_their_utilisation(stand):
    stand.ceilings = timing.Ceilings(flops_per_s={"float32": 1e9, "bfloat16": 1e9}, bytes_per_s=1e8)
    work = {"flops": 1e9, "bytes": 4e8}
    whole, part = (
        stand.record(What(op=op, kernel="k", workload="w", dtype="float32"), [8.0], How(), work=work, facts={"a": 1})
        for op in ("model", "attention")
    )
    assert whole.facts["a"] == 1
    assert (whole.facts["mfu"], whole.facts["bandwidth_share"]) == pytest.approx((1 / 8, 1 / 2))
    assert whole.peak_fraction == pytest.approx(1 / 2)  # the larger of the two: memory bounds this call
    assert part.facts == {"a": 1}


def test_amdahls_law():
    assert amdahl.amdahl_gain(0.5, 2.0) == pytest.approx(4 / 3)
    assert amdahl.amdahl_gain(0.0, 9.0) == 1
    assert amdahl.amdahl_gain(1.0, 9.0) == 9
    for share, gain in ((1.1, 2.0), (-0.1, 2.0), (0.5, 0.0)):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            amdahl.amdahl_gain(share, gain)
    found = amdahl.predict([10.0, 10.0], {"dense": [6.0, 6.0], "kascade": [2.0, 2.0]})
    assert (found["attention_share"], found["attention_gain"]) == pytest.approx((0.6, 3.0))
    assert found["amdahl_gain"] == pytest.approx(10 / (4 + 2))
    too_small = amdahl.predict([1.0], {"dense": [1.5], "kascade": [1.0]})
    assert too_small["attention_share"] == 1.5
    assert "amdahl_gain" not in too_small


def test_attention_alone_does_the_whole_prefills_attention():
    """150 tokens make three chunks, the last one padded; AttentionAlone itself checks dense rows against float64."""
    config = replace(SMOKE.config, num_layers=2)
    params = random_params(config)
    plan = replace(model.synthetic_plan(params, config), anchors=(0,), tile=16, minimum=16)
    for policy in (Dense(), Kascade.from_plan(plan)):
        pool = RowPool(params, config, policy, rows=1, num_keys=150)
        alone = amdahl.AttentionAlone(pool, 150)
        assert alone.sample(0) > 0
        _, reads = pool.fill(np.arange(150) % config.vocab_size)
        assert alone.density == pytest.approx(np.mean(amdahl.layer_densities(reads)))
        visible = sum(float(np.sum(r.visible)) for r in alone.reads)
        assert visible == 2 * config.num_kv_heads * causal_pairs(150)
    assert amdahl.layer_densities(alone.reads)[0] == 1.0
    assert amdahl.layer_densities(alone.reads)[1] < 0.6


def test_attention_alone_that_skips_keys_is_caught():
    class Skipping(Dense):
        def attend(self, layer, q, kv, spec, positions, state):
            return super().attend(layer, q, kv, replace(spec, window=64), positions, state)

    config = replace(SMOKE.config, num_layers=2)
    pool = RowPool(random_params(config), config, Skipping(), rows=1, num_keys=128)
    with pytest.raises(ValueError, match="dense attention alone is wrong on a timed call"):
        amdahl.AttentionAlone(pool, 128).sample(0)


def test_the_kascade_case_holds_amdahls_prediction_beside_its_gain(stand):
    stand.sizes = replace(stand.sizes, config=replace(stand.sizes.config, num_layers=3))
    dense, kascade = bench.CASES["kascade_prefill"].run(stand)
    facts = kascade.facts
    alone = {name: facts[f"attention_{name}_s"] for name in ("dense", "kascade")}
    assert {name: len(samples) for name, samples in alone.items()} == dict.fromkeys(alone, 1)
    parts = amdahl.predict(dense.samples, alone)
    assert parts == {name: facts[name] for name in parts}
    assert facts["attention_gain"] == pytest.approx(timing.ratio(alone["dense"], alone["kascade"]))
    assert kascade.comparison.ratio == pytest.approx(timing.ratio(dense.samples, kascade.samples))
    assert "mfu" in dense.facts
    assert "attention_share" not in dense.facts


def test_the_crossover_is_the_rule_of_calibrate_on_the_records_own_medians(stand):
    stand.sizes = replace(stand.sizes, crossover_tokens=(384, 512))
    records = list(bench.CASES["crossover"].run(stand))
    assert [(r.what.workload, r.what.kernel) for r in records] == [
        (f"crossover_{n}", side) for n in (384, 512) for side in ("dense", "kascade")
    ]
    medians = {side: [r.median for r in records if r.what.kernel == side] for side in ("dense", "kascade")}
    facts = records[-1].facts
    assert facts["crossover_tokens"] == find_crossover((384, 512), medians["dense"], medians["kascade"])
    assert (facts["lengths"], facts["dense_s"], facts["kascade_s"]) == ([384, 512], *medians.values())
    assert [len(r.samples) for r in records] == [SMOKE.rounds] * 4
    assert records[-1].mean_density < 0.9
    anchors = [n for n, share in enumerate(records[-1].density) if share == 1]
    assert anchors == list(Plan.load(files.DEMO_MODEL / "plan.json").anchors)
    assert records[-1].comparison.ratio == pytest.approx(medians["dense"][1] / medians["kascade"][1])
    assert not any("crossover_tokens" in r.facts for r in records[:-1])


def test_a_crossover_of_dense_runs_in_disguise_is_caught(stand, monkeypatch):
    stand.sizes = replace(stand.sizes, crossover_tokens=(512,), rounds=1)

    def load_all(folder, attention):
        return load_stacked(folder, attention=attention).with_attention(attention, fraction=1.0, budgets=())

    monkeypatch.setattr(model.generate, "load", load_all)
    with pytest.raises(ValueError, match="reads about as many"):
        list(model.crossover(stand))


def test_few_rounds_have_a_ratio_and_no_interval():
    assert versus("peer", [2.0, 2.2], [1.0, 1.1], None).interval is None
    low, high = versus("peer", [2.0] * 5, [1.0] * 5, None).interval
    assert (low, high) == (2.0, 2.0)


def test_rounds_end_in_time_and_are_never_less_than_the_least(stand, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])

    def minute(number: int) -> float:
        now[0] += 60.0
        return 60.0

    stand.sizes = replace(SMOKE, rounds=5, least_rounds=3)
    assert stand.interleave({"a": minute}, warmup=1)["a"] == [60.0] * 5  # no end is set: 6 minutes
    stand.ends = 360.0 + 310.0
    # After a minute of warm-up, a fifth round would end at 720 s.
    assert stand.interleave({"a": minute}, warmup=1)["a"] == [60.0] * 4
    assert stand.interleave({"a": minute, "b": minute}, warmup=0) == {"a": [60.0] * 3, "b": [60.0] * 3}
    assert stand.interleave({"a": minute}, least=1, warmup=0)["a"] == [60.0]


def test_what_a_case_leaves_of_its_share_is_the_next_ones_and_one_named_has_no_end(tmp_path, monkeypatch):
    now, ends = [100.0], []
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])

    def run_case(stand, name):
        ends.append(stand.ends)
        now[0] += 10.0
        return []

    monkeypatch.setattr(bench, "_run_case", run_case)
    bench.run("cpu", out=tmp_path / "out.jsonl")
    cases = bench.SUITES["cpu"].cases
    assert ends == pytest.approx([100.0 + Sizes().suite_s * (n + 1) / len(cases) for n in range(len(cases))])
    assert cases[-1] == "kascade_prefill"  # the longest case takes the time that is left
    ends.clear()
    bench.run("cpu", out=tmp_path / "out.jsonl", only=("start_up",))
    assert ends == [math.inf]


def test_a_real_suite_asks_for_samples_enough_and_weighs_memory_once(stand, monkeypatch):
    assert Sizes().rounds >= INTERVAL_ROUNDS
    monkeypatch.setattr(model, "_weigh", lambda folder, length: length + 1000)
    monkeypatch.setattr(stand, "write_model", lambda config, name: name)
    stand.sizes = replace(stand.sizes, rounds=2, memory_tokens=(256, 512))
    short, long = model.prefill_memory(stand)
    # Each length runs in one process, less the memory of a tiny prompt.
    assert (short.samples, long.samples) == ((192.0,), (448.0,))
    assert long.facts["slope_bytes_per_token"] == pytest.approx(1.0)


def test_wilson_interval_of_a_share():
    low, high = paired.wilson(95, 100)
    assert low == pytest.approx(0.888, abs=1e-3)
    assert high == pytest.approx(0.978, abs=1e-3)
    assert paired.wilson(10, 10)[1] == 1.0
    assert paired.wilson(0, 10)[0] == 0.0


def test_target_is_met_or_missed():
    assert versus("x", [2.0, 2.0], [1.0, 1.0], 1.5).met
    assert not versus("x", [1.0, 1.0], [1.0, 1.0], 1.5).met
    assert versus("x", [1.0, 1.0], [1.0, 1.0], None).met is None


def test_runs_append_resume_and_report_failures(tmp_path, monkeypatch, capsys):
    sizes = replace(SMOKE, config=replace(SMOKE.config, num_layers=2))
    monkeypatch.setattr(bench, "SUITES", {**bench.SUITES, "smoke": bench.SUITES["smoke"]._replace(sizes=sizes)})
    out = tmp_path / "records.jsonl"
    assert bench.run("smoke", out=out, only=["compilation"]) == 0
    records = evidence.read(out)
    assert {r.what.kernel for r in records} == {"scan", "unrolled"}
    assert all(r.median > 0 and r.facts["step_s"] > 0 for r in records)
    assert all(len(r.samples) == SMOKE.rounds for r in records)
    monkeypatch.setattr(evidence, "code", lambda: evidence.Code(commit=records[0].code.commit or "0" * 40, dirty=False))
    stamped = [replace(r, code=evidence.code()) for r in records]
    evidence.append(out, stamped)
    assert bench.run("smoke", out=out, only=["compilation"], resume=True) == 0
    assert len(evidence.read(out)) == 4
    assert bench._done(out, "smoke") == {"compilation"}
    assert bench._done(out, "cpu") == set()  # the smoke suite's sizes are no record of the cpu suite's
    other = [replace(r, where=replace(r.where, cpu="Other 9000")) for r in stamped]
    evidence.append(tmp_path / "other.jsonl", other)
    assert bench._done(tmp_path / "other.jsonl", "smoke") == set()
    assert bench.run("smoke", out=out, only=["peer_model"], peer_python=tmp_path / "missing") == 1
    *_, before, failure = evidence.read(out)
    assert before.error is None  # the failure adds one record
    assert "make peers" in failure.error
    assert str(tmp_path) not in failure.error
    assert "peer_model: peer_model: error: " in capsys.readouterr().err


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="suite"):
        bench.run("gpu", out=tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="only"):
        bench.run("smoke", out=tmp_path / "x.jsonl", only=["everything"])
