"""The suite real-weights judges every form against float weights, and its control is far worse."""

from dataclasses import replace

import pytest
from tiny import CONFIG, save_tiny

from lab.eval import weights
from lab.eval.weights import CONTROL, FLOAT, TASK_OP, TEXT_OP
from lab.report import weights as report_weights
from tessera import generate
from tessera.measure import evidence
from tessera.measure.judge.real import Sizes

TEXT = "".join(f"line {i} of some filler, which says nothing that matters.\n" for i in range(200))
SIZES = Sizes(lengths=(1024,), documents=(("single", 1024, 1),), windows=1, brief=())


def test_every_form_is_judged_and_the_control_is_worse(tmp_path, monkeypatch):
    config = replace(CONFIG, num_layers=1, max_positions=1024)
    model = generate.load(save_tiny(tmp_path / "model", config, plan=False))
    monkeypatch.setattr(weights, "ORDER", (FLOAT, "int8", CONTROL, "int4-g32"))
    path = tmp_path / "records.jsonl"
    weights.run(model, None, text=TEXT, out=path, sizes=SIZES)
    records = {(r.what.op, r.facts["weights"]): r for r in evidence.read(path)}
    assert {name for _, name in records} == {FLOAT, "int8", CONTROL}  # 48 inputs are not in groups of 32
    text = {name: record for (op, name), record in records.items() if op == TEXT_OP}
    assert max(text[FLOAT].samples) <= 1e-6
    assert 0 < text["int8"].facts["mean"] <= 0.02
    assert text[CONTROL].facts["mean"] >= 10 * text["int8"].facts["mean"]
    assert text["int8"].what.dtype == "float32, int8 weights"
    assert text["int8"].facts["weight_bytes"] < 0.4 * text[FLOAT].facts["weight_bytes"]
    assert all(len(records[TASK_OP, name].facts["found"]) == 1 for name in text)
    table = report_weights.weights(list(records.values())) if records[TEXT_OP, FLOAT].code.commit else ""
    assert not table or "| int8 |" in table


def test_a_model_without_tokenizer_is_refused(tmp_path):
    model = generate.load(save_tiny(tmp_path, CONFIG, tokenizer=False, plan=False))
    with pytest.raises(ValueError, match="has no tokenizer"):
        weights.run(model, None)
