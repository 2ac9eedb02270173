"""`python -m lab bench --gate`: a fresh run is compared with the device's stored records."""

import numpy as np
import pytest

from lab import bench
from tessera.core import hardware
from tessera.measure import evidence


def run(median: float, *, suite: str = "smoke", seed: int = 0) -> list[evidence.Record]:
    """Return records of one interleaved run against a peer that takes a second."""
    rng = np.random.default_rng(seed)
    how = evidence.How(iterations=9, interleaved=True)

    def record(kernel, centre, **fields):
        what = evidence.What(op="attention", kernel=kernel, workload="case", dtype="float32", config={"length": 256})
        samples = list(centre * (1 + 0.03 * rng.standard_normal(9)))
        command = f"python -m lab bench --suite {suite} --only sparse_prefill"
        return evidence.make(what, samples, command=command, how=how, unit="s", **fields)

    versus = evidence.Comparison(against="peer", ratio=1 / median)
    return [record("peer", 1.0), record("ours", median, comparison=versus)]


def test_a_gate_holds_a_fresh_run_against_the_stored_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="nothing to compare with"):
        bench.gate("smoke")
    stored = f"evidence/{hardware.device_slug()}.jsonl"
    evidence.append(stored, run(0.1, suite="cpu"))
    with pytest.raises(ValueError, match="no record of --suite smoke"):
        bench.gate("smoke")
    evidence.append(stored, run(1.0))
    with pytest.raises(ValueError, match="no record of --suite smoke"):
        bench.gate("smoke", only=["start_up"])
    for slower, status in ((1.0, 0), (1.25, 1)):
        monkeypatch.setattr(bench, "run", lambda suite, out, slower=slower: evidence.append(out, run(slower, seed=1)))
        assert bench.gate("smoke") == status
