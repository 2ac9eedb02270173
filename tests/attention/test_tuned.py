"""Tuned block sizes: which calls a row applies to and that every shipped row matches its record."""

import json
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path

import jax
import pytest
from chips import KINDS, on_chip

from tessera.attention import contract, dispatch, tuned
from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.kernel import Kernel
from tessera.core import hardware
from tessera.deviceless import programs
from tessera.measure import evidence

EVIDENCE = Path(__file__).parents[2] / "evidence"
SPEC = AttentionSpec()
SHAPES = Shapes(1, 8192, 8192, 8, 2, 128, None, "bfloat16")
RECORD = {"file": "some.jsonl", "workload": "w", "date": "2026-01-01T00:00:00+00:00"}
DENSE = programs.kernel_named("tpu_prefill_dense")
CONFIG = {"block_t": 256, "block_s": 1024, "chunk": 512}


def row(**changes) -> tuned.Row:
    bucket = {"dtype": "bfloat16", "groups": 4, "num_keys": (4096, 16384)}
    base = {"kernel": DENSE.name, "bucket": bucket, "config": CONFIG, "gain": 1.5, "record": RECORD}
    return tuned.Row(**(base | changes))


def shipped() -> list[tuple[str, tuned.Row]]:
    return [(path.stem, row) for path in sorted(tuned.TABLES.glob("*.jsonl")) for row in tuned.read(path)]


def named(found: tuple[str, tuned.Row]) -> str:
    device, row = found
    return f"{device}-{row.record['workload']}".replace(" ", "_")


def record_of(row: tuned.Row) -> evidence.Record:
    """Return the one record that a row names."""
    [found] = [
        record
        for record in evidence.read(EVIDENCE / row.record["file"])
        if (record.what.kernel, record.what.workload, record.date)
        == (row.kernel, row.record["workload"], row.record["date"])
    ]
    return found


@pytest.mark.parametrize("found", shipped(), ids=named)
def test_a_shipped_row_stands_on_its_record_and_answers_its_call(found, monkeypatch):
    device, row = found
    kernel, record = programs.kernel_named(row.kernel), record_of(row)
    assert dict(record.what.config) == dict(row.config)
    assert row.config.items() <= asdict(tuned.built(row, kernel)).items()  # fields added later have defaults
    assert row.gain is None or row.gain == pytest.approx(record.comparison.ratio, abs=1e-4)
    spec, shapes = AttentionSpec(**record.facts["spec"]), Shapes(**record.facts["shapes"])
    if device.startswith("cpu-"):  # a CPU's row is tested on any CPU
        monkeypatch.setattr(tuned, "device", lambda: device)
    with nullcontext() if device.startswith("cpu-") else on_chip(device):
        assert kernel.refusal(spec, shapes) is None
        assert dispatch.choose(spec, shapes).name == row.kernel
        assert tuned.config(kernel, spec, shapes) == kernel.Config(**row.config)


def test_every_chip_has_a_table():
    assert {device for device, _ in shipped()} >= set(KINDS)


def test_a_row_holds_inside_its_bucket_alone():
    assert row().holds(DENSE.name, SPEC, SHAPES)
    for edge, inside in ((4095, False), (4096, True), (16384, True), (16385, False)):
        assert row().holds(DENSE.name, SPEC, SHAPES._replace(num_keys=edge)) == inside
    assert not row().holds("tpu_prefill_score", SPEC, SHAPES)
    assert not row().holds(DENSE.name, SPEC, SHAPES._replace(dtype="float32"))
    assert not row().holds(DENSE.name, SPEC, SHAPES._replace(num_heads=16))
    assert row().holds(DENSE.name, SPEC, SHAPES._replace(batch=7))  # the bucket does not name the batch
    for spec in (AttentionSpec(causal=False), AttentionSpec(window=128), AttentionSpec(softcap=30.0)):
        assert not row().holds(DENSE.name, spec, SHAPES)
    listed = row(bucket={"listed": (1, 4096)})
    assert not listed.holds(DENSE.name, SPEC, SHAPES)  # the call lists nothing
    assert listed.holds(DENSE.name, SPEC, SHAPES._replace(capacity=32))


def test_lookup_takes_the_row_inside_its_bucket_and_the_default_outside(tmp_path, monkeypatch):
    tuned.write(tmp_path / "v6e.jsonl", [row()])
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    tuned.table.cache_clear()
    try:
        with on_chip("v6e"):
            assert tuned.config(DENSE, SPEC, SHAPES) == DENSE.Config(**CONFIG)
            longer = SHAPES._replace(num_queries=32768, num_keys=32768)
            assert tuned.config(DENSE, SPEC, longer) == DENSE.default_config(SPEC, longer)
            call = programs.attention_call(DENSE.name, asdict(SPEC), SHAPES._asdict())
            assert call[2]["settings"] == str(DENSE.Config(**CONFIG))
        with on_chip("v5e"):  # which has no table
            assert tuned.config(DENSE, SPEC, SHAPES) == DENSE.default_config(SPEC, SHAPES)
    finally:
        tuned.table.cache_clear()


def test_the_attention_call_takes_its_blocks_from_the_table(tmp_path, monkeypatch):
    q = jax.ShapeDtypeStruct((1, 64, 4, 16), "float32")
    kernel = dispatch.choose(SPEC, contract.call_shapes(q, q))
    small = next(c for c in kernel.search_space(SPEC, contract.call_shapes(q, q)))
    taken = []

    def launch(q, kv, spec, positions, selection, config):
        taken.append(config)
        return kernel.launch(q, kv, spec, positions, selection, config)

    watched = Kernel(**{f.name: getattr(kernel, f.name) for f in fields(Kernel)} | {"launch": launch})
    monkeypatch.setattr(dispatch, "KERNELS", (watched,))
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    for rows in ([], [row(kernel=kernel.name, bucket={"num_keys": (1, 64)}, config=asdict(small))]):
        tuned.table.cache_clear()
        tuned.write(tmp_path / f"{tuned.device()}.jsonl", rows)
        jax.eval_shape(lambda *arrays: dispatch.attention(*arrays), q, q, q)  # new, so not traced yet
    tuned.table.cache_clear()
    assert taken == [kernel.default_config(SPEC, contract.call_shapes(q, q)), small]


def test_devices_are_named_as_tables_are():
    for chip in KINDS:
        with on_chip(chip):
            assert tuned.device() == chip
    if jax.default_backend() == "cpu":
        assert tuned.device() == hardware.device_slug()
    h200 = jax.sharding.AbstractDevice("NVIDIA H200", 1, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=h200)):
        assert tuned.device() == "h200"


BAD = {
    "measure": ({"bucket": {"length": 3}}, "bucket names 'length', which must be one of dtype, head_dim"),
    "interval": ({"bucket": {"num_keys": [9, 3]}}, r"bucket\['num_keys'\]=\(9, 3\) must be a value or an interval"),
    "pointer": ({"record": {"file": "x"}}, "must have exactly the keys file, workload and date"),
    "field": ({"speed": 3}, "unexpected keyword argument 'speed'"),
    "missing": ({"config": None}, "missing 1 required keyword-only argument: 'config'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_its_line(name, tmp_path):
    change, message = BAD[name]
    body = {key: value for key, value in (asdict(row()) | change).items() if value is not None}
    path = tmp_path / "v6e.jsonl"
    path.write_text(f"{json.dumps(asdict(row()))}\n{json.dumps(body)}\n")
    with pytest.raises(ValueError, match=f"v6e.jsonl line 2 is not a row of tuned block sizes: .*{message}"):
        tuned.read(path)


def test_a_config_that_the_kernel_does_not_take_is_refused():
    with pytest.raises(ValueError, match="does not fit tpu_prefill_dense: .*'warp'"):
        tuned.built(row(config={"warp": 4}), DENSE)
    with pytest.raises(ValueError, match="does not fit tpu_prefill_dense: block_s=100 must be a power of two"):
        tuned.built(row(config=CONFIG | {"block_s": 100}), DENSE)


def test_writing_replaces_the_row_of_the_same_bucket(tmp_path):
    path = tmp_path / "v6e.jsonl"
    other = row(bucket={"groups": 1}, record=RECORD | {"workload": "another"})
    tuned.write(path, [row(), other])
    tuned.write(path, [row(gain=2.0)])
    assert {r.gain for r in tuned.read(path)} == {2.0, 1.5}
    assert other in tuned.read(path)


def test_writing_drops_the_row_that_the_same_workload_had_for_other_calls(tmp_path):
    path = tmp_path / "v6e.jsonl"
    score = row(kernel="tpu_prefill_score")
    tuned.write(path, [row(), row(bucket={"groups": 1}), score])  # one search may serve two buckets
    assert len(tuned.read(path)) == 3
    longer = row(bucket=row().bucket | {"num_keys": (4096, 32768)}, record=RECORD | {"date": "2026-02-01"})
    tuned.write(path, [longer])
    assert tuned.read(path) == (longer, score)
