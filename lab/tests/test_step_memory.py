"""`python -m lab study memory` with a tiny model: what each form of a step holds, and the table of the records."""

import jax
import pytest
from tiny import CONFIG

from lab import commands as cli
from lab.report.planned import step_memory
from lab.studies import memory
from tessera.core import files
from tessera.measure import evidence

KEYS, ROWS = 128, 64


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(memory, "_config", lambda: CONFIG)
    monkeypatch.setattr(memory, "KEYS", KEYS)
    monkeypatch.setattr(memory, "ROWS", ROWS)
    monkeypatch.setattr(memory, "ROUNDS", {"decode": 2, "training": 1})


def test_a_donated_cache_is_held_once(tiny, tmp_path, monkeypatch, capsys):
    """The cache of 128 keys takes one array more if the step does not donate it; the table and the list follow."""
    monkeypatch.setattr(memory, "EVIDENCE", tmp_path / "evidence.jsonl")
    monkeypatch.setattr(memory, "CASES", memory.CASES[:2])
    out = tmp_path / "lines.jsonl"
    assert cli.main(["study", "memory", "--out", str(out)]) == 0
    donated, kept = files.read_lines(out)
    cache_bytes = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * KEYS * CONFIG.head_dim * 4
    assert (donated["memory"]["alias"], kept["memory"]["alias"]) == (cache_bytes, 0)
    assert len(donated["ms"]) == len(kept["ms"]) == 2
    capsys.readouterr()
    assert cli.main(["study", "memory", "--out", str(out), "--list"]) == 0
    assert not capsys.readouterr().out.strip()
    assert cli.main(["study", "memory", "--out", str(out), "--report"]) == 0
    one, two = evidence.read(memory.EVIDENCE)
    assert two.median - one.median == pytest.approx(cache_bytes, rel=0.05)
    rows = step_memory([one, two]).splitlines()
    assert rows[2].startswith("| smollm2 decode, 128 keys, cpu | cache donated, float32 |")
    assert f"({two.median / one.median:.2f})" in rows[3]


def test_each_form_of_training_is_another_program(tiny):
    """Traced only: the form recomputes layers, computes in bfloat16, or does neither."""

    def traits(form):
        function, arguments = memory.training(jax.devices()[:1], **memory.FORMS["training"][form])
        program = str(function.trace(*arguments).jaxpr)
        return "remat" in program or "checkpoint" in program, "bf16" in program

    found = {form: traits(form) for form in memory.FORMS["training"]}
    assert found == {"as stored": (False, False), "recomputed": (True, False), "bfloat16": (False, True)}
