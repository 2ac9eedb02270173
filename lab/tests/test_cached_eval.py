"""The suite that judges an int8 cache: its control is worse than int8, and its table shows what the records say."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_params

from lab.eval import cached
from lab.report import documents as report
from tessera.generate import Model
from tessera.measure import evidence
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.sparse.baselines import Dense

TEXT = "The key is under the mat, and the mat is in front of the door. " * 400


def test_a_run_records_each_cache_and_the_control_is_worse(tmp_path, capsys):
    params = jax.tree.map(jnp.asarray, random_params(CONFIG))
    model = Model(config=CONFIG, params=params, tokenizer=byte_tokenizer(), policy=Dense())
    sizes, out = cached.Sizes(length=512, windows=1, documents=1), tmp_path / "records.jsonl"
    assert cached.run(model, None, label="tiny", shipped=True, text=TEXT, out=out, sizes=sizes) == 0
    records = {(r.what.kernel, r.facts["question"]): r for r in evidence.read(out)}
    assert set(records) == {(name, "questions") for name in ("dense", "dense int8", "control")} | {
        (name, "text") for name in ("dense int8", "control")
    }
    int8, control = (records[name, "text"].facts["mean"] for name in ("dense int8", "control"))
    assert 0 < 30 * int8 < control
    assert "tiny, text: dense, int8 cache" in capsys.readouterr().out


def test_the_control_rounds_to_fifteen_levels():
    x = np.random.default_rng(0).standard_normal((3, 5, 16)).astype(np.float32)
    x[0, 0] = 0
    found = np.asarray(cached.coarse(jnp.asarray(x)))
    top = np.abs(x).max(-1, keepdims=True)
    assert np.all(np.abs(found - x) <= top / 14 * (1 + 1e-5))
    assert max(len(np.unique(row)) for row in found.reshape(-1, 16)) <= 15
    assert np.all(found[0, 0] == 0)


@pytest.mark.parametrize(("lack", "reason"), [("tokenizer", "has no tokenizer"), ("context", "context of 512 tokens")])
def test_what_cannot_be_judged_is_refused(lack, reason, tmp_path):
    model = Model(config=CONFIG, params=random_params(CONFIG), tokenizer=byte_tokenizer(), policy=Dense())
    model = replace(model, tokenizer=None) if lack == "tokenizer" else model
    with pytest.raises(ValueError, match=reason):
        cached.run(model, None, label="tiny", shipped=True, out=tmp_path / "records.jsonl")


def test_the_table_shows_the_newest_record_and_the_goal():
    def record(name, cache, question, mean, **facts):
        facts |= {"mean": mean, "low": mean / 2, "high": 2 * mean, "model": "the shipped model", "question": question}
        facts |= {"attention": "dense", "cache": cache}
        what = evidence.What(op="eval cache", kernel=name, workload=f"{question}: {cache}", dtype="float32")
        made = evidence.make(what, [mean], command="python -m lab eval --suite cache", unit="nats", facts=facts)
        return replace(made, code=evidence.Code(commit="0123456789abcdef", dirty=False))

    records = [
        record("dense", "float32", "questions", 1.0, scores=[1.0, 1.0]),
        record("dense int8", "int8", "text", 3e-3, agreement=0.9),
        record("dense int8", "int8", "text", 3e-4, agreement=0.99),
        record("dense int8", "int8", "questions", 0.5, scores=[1.0, 0.0]),
    ]
    lines = report.render("int8-cache", records).splitlines()
    assert lines[2] == "| the shipped model | dense | float32 | reference |  | 2 of 2 |"
    shown = "3.0e-04 (1.5e-04 to 6.0e-04), goal 1e-04: **missed**"
    assert lines[3] == f"|  | dense | int8 | {shown} | 99.0 % | 1 of 2 |"
