"""On a mesh, a cache dealt over the axis "context" and rows spread over "heads" give the results of one device."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emitters import fast_child

from tessera.models.catalogue import MODELS as KNOWN
from tessera.runtime.spread import Sharing

LLAMA_8B = KNOWN["llama-3.1-8b"]
SUBJECTS = Path(__file__).parents[1] / "context_subjects.py"
exhaustive = pytest.mark.exhaustive
"""Other meshes, head counts and policies repeat what the first of each table covers."""
MESHES = {
    "2x4": dict(heads=2, parts=4, kv_heads=2, groups=2, softcap=20.0),
    "4x2": dict(heads=4, parts=2, kv_heads=4, groups=1, softcap=None),
    "1x8": dict(heads=1, parts=8, kv_heads=1, groups=3, softcap=None),
}
MODELS = {
    "K=2": dict(kv_heads=2, mesh="8", attention="budgets"),
    "K=1": dict(kv_heads=1, mesh="8", attention="budgets"),
    "K=3": dict(kv_heads=3, mesh="8", attention="remap"),
    "K=8": dict(kv_heads=8, mesh="2x4", attention="pooled"),
    "K=8 dense": dict(kv_heads=8, mesh="4x2", attention="dense"),
}


def first_of(table: dict) -> list:
    return [name if not index else pytest.param(name, marks=exhaustive) for index, name in enumerate(table)]


def run_subjects(folder: Path, work: dict[str, tuple[str, dict]]) -> dict[str, Any]:
    """Run subjects in one child process with eight devices; return what each found, or how it failed."""
    given = [[name, subject, arguments] for name, (subject, arguments) in work.items()]
    command = [sys.executable, "-W", "error", SUBJECTS, folder, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, env=fast_child(8))
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[str, Any]:
    work = {"2x4": ("study", MESHES["2x4"]), "K=2": ("generation", MODELS["K=2"])}
    work |= {"traffic": ("traffic", {"heads": 2, "parts": 4}), "spread": ("spread", {}), "refusals": ("refusals", {})}
    return run_subjects(tmp_path_factory.mktemp("models"), work)


@pytest.fixture(scope="module")
def more_findings(tmp_path_factory) -> dict[str, Any]:
    work = {name: ("study", sizes) for name, sizes in MESHES.items()}
    work |= {name: ("generation", model) for name, model in MODELS.items()}
    return run_subjects(tmp_path_factory.mktemp("models"), work)


@pytest.fixture
def found(request):
    """Return a function that gives a subject's findings, or fails with its traceback."""

    def look_up(name: str) -> dict:
        again = request.node.get_closest_marker("exhaustive")
        line = request.getfixturevalue("more_findings" if again else "findings")[name]
        assert "found" in line, line["failed"][-3000:]
        return line["found"]

    return look_up


@pytest.mark.parametrize("mesh", first_of(MESHES))
def test_attention_equals_one_device(found, mesh):
    """Every role, chunk by chunk and in decode, with a sequence that ends within a stripe and NaN in free slots."""
    study = found(mesh)
    assert study["share"] == 1 / 8
    for phase in ("prefill", "decode"):
        errors = study["errors"][phase]
        assert errors.pop("selection") == 0
        assert len(errors) == 7
        assert errors.pop("score mass") <= 1e-5  # a sum of probabilities over a query tile's rows and heads
        assert max(errors.values()) <= 2e-6, errors


def test_what_a_call_sends_does_not_depend_on_the_number_of_keys(found):
    sent = found("traffic")
    assert sent["chunk 2"] == sent["chunk 32"]
    assert sorted({opcode for opcode, _ in sent["chunk 2"]}) == ["all-gather", "all-reduce", "reduce-scatter"]
    assert [opcode for opcode, _ in sent["decode 32"]] == ["all-reduce", "all-reduce"]  # a maximum and a sum


@pytest.mark.parametrize("name", first_of(MODELS))
def test_a_model_generates_what_one_device_does(found, name):
    """Two prompts in chunks of 256 rows, a cache that grows, then greedy decoding."""
    run = found(name)
    assert run["parts"] == {"K=2": 4, "K=8": 4, "K=8 dense": 2}.get(name, 8)
    assert run["share"] == 1 / 8
    assert run["finite"] == 1
    assert (run["tokens"], run["reads"]) == (0, 0)
    assert run["logits"] <= 1e-5


def test_rows_spread_over_devices_give_the_same_logits_and_send_the_predicted_bytes(found):
    spread = found("spread")
    assert (spread["one by default"], spread["heads by default"]) == (False, True)  # 1,024 rows, beyond break-even
    for how, predicted in zip(("heads", "rows"), spread["predicted"]):
        assert spread[f"{how} logits"] <= 1e-5
        assert spread[f"{how} tokens"] == 0
        sent = spread[f"{how} sent"]
        assert sum(sent.values()) == pytest.approx(predicted, rel=0.01), sent
    assert "all-to-all" in spread["rows sent"]


def test_long_chunks_of_a_large_model_are_shared_by_rows():
    """Llama-3.1-8B in bfloat16 on eight devices: bytes per device and layer at 131,072 rows."""
    eight = Sharing(config=LLAMA_8B, devices=8, itemsize=2, layer_bytes=2 * 218_112_000)
    by_heads, by_rows = eight.sent(131_072)
    assert by_heads == 4 * 7 / 8 * 131_072 * 4096 * 2
    assert 5 * by_rows < by_heads
    least = eight.break_even
    assert eight.sent(least).by_rows < eight.sent(least).by_heads
    assert eight.sent(least - 1).by_rows >= eight.sent(least - 1).by_heads
    assert eight.chunk(num_keys=140_000, unit=1024, rows_per_device=16_384) == 131_072
    assert eight.chunk(num_keys=least - 1, unit=1024, rows_per_device=16_384) is None
    assert "131,072 rows is shared by rows" in eight.explain(131_072)
    assert "1,024 rows is shared by heads" in eight.explain(1024)
    assert "8 devices do not divide 131,071 rows" in eight.explain(131_071)
    assert "for any chunk length" in Sharing(config=LLAMA_8B, devices=1, itemsize=2, layer_bytes=1).explain(8)
    assert Sharing(config=LLAMA_8B, devices=1, itemsize=2, layer_bytes=1).break_even is None


def test_calls_that_a_dealt_cache_cannot_serve_are_refused(found):
    errors = found("refusals")
    assert "window=32 on a mesh with context=4 is not supported" in errors["window"]
    assert "num_queries=32 must be 1 or 64" in errors["rows"]
    assert "num_keys=96 must be a multiple of 64" in errors["keys"]
    assert "tile=32 must divide the stripe of 16 positions" in errors["tile"]
    assert "query_tile=32 must divide the stripe of 16 rows" in errors["query_tile"]
