"""The benchmark harness catches what benchmarks hide: skipped work, wrong outputs, dense runs in disguise."""

import sys
import textwrap
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tessera import bench, evidence, measure
from tessera.attention.contract import AttentionSpec, Selection
from tessera.bench import attention as cases
from tessera.bench.stand import SMOKE, Stand, causal_pairs, model_work, versus
from tessera.evidence import How, What

# The peer's protocol served by NumPy, as torch is not in this environment: it computes what it is asked for.
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
def stand():
    made = Stand("smoke", replace(SMOKE, sparse_tokens=1536), sys.executable)
    made.case = "planted"
    # Measured on a busy machine they would be lower than what the calls then reach.
    made.ceilings = measure.Ceilings(flops_per_s={"float32": 1e15, "bfloat16": 1e15}, bytes_per_s=1e15)
    yield made
    made.close()


def with_worker(stand, tmp_path, shift):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER).replace("SHIFT", shift))
    stand._peer = measure.Peer(sys.executable, script)
    stand.peer_versions = stand._peer.ask("hello")
    return stand


def test_dense_prefill_compares_both_sides_on_the_same_inputs(stand, tmp_path):
    peer, ours = cases.dense_prefill(with_worker(stand, tmp_path, "0"), "float32")
    assert peer.what.kernel == "torch sdpa"
    assert len(peer.samples) == len(ours.samples) == SMOKE.rounds + 2
    assert ours.comparison.ratio == pytest.approx(measure.ratio(peer.samples, ours.samples))
    assert ours.comparison.target == ">= 1.5"
    assert ours.flops == 4 * 8 * 128 * causal_pairs(SMOKE.attention_tokens)
    assert ours.how.interleaved
    assert ours.how.compile_s > 0
    assert ours.command == "tessera bench --suite smoke --only planted"


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
    """It reads only its first listed tile; from 1,280 keys on, 10 % is two."""

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
    with pytest.raises(ValueError, match="dense work in disguise"):
        list(cases.sparse_prefill(stand))


def test_a_time_below_the_floor_becomes_an_error(stand):
    what = What(op="attention", kernel="too good", workload="w", dtype="float32")
    stand.ceilings = measure.Ceilings(flops_per_s={"float32": 1e9, "bfloat16": 1e9}, bytes_per_s=1e9)
    fast = stand.record(what, [0.5], How(), work={"flops": 1e9, "bytes": 1.0})
    assert "below the roofline floor" in fast.error
    honest = stand.record(what, [2.0], How(), work={"flops": 1e9, "bytes": 1.0})
    assert honest.error is None
    assert honest.peak_fraction == pytest.approx(0.5)


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


def test_wilson_interval_of_a_share():
    low, high = evidence.wilson(95, 100)
    assert low == pytest.approx(0.888, abs=1e-3)
    assert high == pytest.approx(0.978, abs=1e-3)
    assert evidence.wilson(10, 10)[1] == 1.0
    assert evidence.wilson(0, 10)[0] == 0.0


def test_target_is_met_or_missed():
    assert versus("x", [2.0, 2.0], [1.0, 1.0], 1.5).met
    assert not versus("x", [1.0, 1.0], [1.0, 1.0], 1.5).met
    assert versus("x", [1.0, 1.0], [1.0, 1.0], None).met is None


def test_runs_append_resume_and_report_failures(tmp_path, monkeypatch, capsys):
    out = tmp_path / "records.jsonl"
    assert bench.run("smoke", out=out, only=["compilation"]) == 0
    records = evidence.read(out)
    assert {r.what.kernel for r in records} == {"scan", "unrolled"}
    assert all(r.median > 0 and r.facts["step_s"] > 0 for r in records)
    monkeypatch.setattr(evidence, "code", lambda: evidence.Code(commit=records[0].code.commit or "0" * 40, dirty=False))
    stamped = [replace(r, code=evidence.code()) for r in records]
    evidence.append(out, stamped)
    assert bench.run("smoke", out=out, only=["compilation"], resume=True) == 0
    assert len(evidence.read(out)) == 4
    assert bench.run("smoke", out=out, only=["dense_prefill_f32"], peer_python=tmp_path / "missing") == 1
    failure = evidence.read(out)[-1]
    assert "make peers" in failure.error
    assert str(tmp_path) not in failure.error
    assert "dense_prefill_f32" in capsys.readouterr().err


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="suite"):
        bench.run("gpu", out=tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="only"):
        bench.run("smoke", out=tmp_path / "x.jsonl", only=["everything"])
