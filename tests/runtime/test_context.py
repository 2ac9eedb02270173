"""A cache dealt over the mesh axis "context" gives the results of one device, and sends no keys."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUBJECTS = Path(__file__).parents[1] / "context_subjects.py"
MESHES = {"2x4": (2, 4, 2, 2, 20.0), "4x2": (4, 2, 4, 1, None), "1x8": (1, 8, 1, 3, None)}
"""Per mesh: heads, context, KV heads, query heads per KV head, softcap."""
MODELS = {"K=1": (1, "8", "own"), "K=2": (2, "8", "pooled"), "K=3": (3, "8", "remap"), "K=8": (8, "2x4", "dense")}
"""Per model: KV heads, mesh, policy."""


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[str, dict]:
    """Run all subjects in one child process; return the line of each."""
    names = "heads", "parts", "kv_heads", "groups", "softcap"
    work = [[f"attention {mesh}", "study", dict(zip(names, sizes))] for mesh, sizes in MESHES.items()]
    work += [["traffic", "traffic", {"heads": 2, "parts": 4}], ["refusals", "refusals", {}]]
    folder = str(tmp_path_factory.mktemp("models"))
    for name, (kv_heads, mesh, attention) in MODELS.items():
        work.append([name, "generation", dict(kv_heads=kv_heads, mesh=mesh, attention=attention, folder=folder)])
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", SUBJECTS, json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def found(findings: dict[str, dict], name: str) -> dict:
    assert "found" in findings[name], findings[name]["failed"][-3000:]
    return findings[name]["found"]


@pytest.mark.parametrize("mesh", MESHES)
def test_attention_equals_one_device(findings, mesh):
    """Every role, chunk by chunk and in decode, with a sequence that ends within a stripe and NaN in free slots."""
    study = found(findings, f"attention {mesh}")
    heads, parts = MESHES[mesh][:2]
    assert study["share"] == 1 / (heads * parts)
    for phase in ("prefill", "decode"):
        errors = study["errors"][phase]
        assert errors.pop("selection") == 0
        assert len(errors) == 7
        assert max(errors.values()) <= 2e-6, errors


def test_what_a_call_sends_does_not_depend_on_the_number_of_keys(findings):
    sent = found(findings, "traffic")
    for call in ("dense", "sparse", "decode"):
        assert sent[f"{call} 2"] == sent[f"{call} 32"] != []
    assert [opcode for opcode, _ in sent["decode 2"]] == ["all-reduce", "all-reduce"]  # a maximum and a sum


@pytest.mark.parametrize("name", MODELS)
def test_a_model_generates_what_one_device_does(findings, name):
    """Two prompts in chunks of 256 rows, a cache that grows, then greedy decoding."""
    run = found(findings, name)
    kv_heads, mesh, _ = MODELS[name]
    assert run["parts"] == (4 if kv_heads in (2, 8) else 8)
    assert run["share"] == 1 / 8
    assert run["finite"] == 1
    assert (run["tokens"], run["reads"]) == (0, 0)
    assert run["logits"] <= 1e-5


def test_calls_that_a_dealt_cache_cannot_serve_are_refused(findings):
    errors = found(findings, "refusals")
    assert "window=32 on a mesh with context=4 is not supported" in errors["window"]
    assert "a call of 32 rows must have 1 or 64" in errors["rows"]
    assert "num_keys=96 must be a multiple of 64" in errors["keys"]
    assert "tile=32 must divide the stripe of 16 positions" in errors["tile"]
    assert "query_tile=32 must divide the stripe of 16 rows" in errors["query_tile"]
