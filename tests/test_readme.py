"""The README's examples run unchanged."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from tiny import load_stacked, save_tiny

import tessera

README = Path(__file__).parents[1] / "README.md"


def example(words: str) -> str:
    [code] = [block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if words in block]
    return code


def test_attention_example_is_sparse_and_leans_on_no_default_tile():
    code = example("tessera.select_tiles")
    assert "AttentionSpec()" not in code
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2048, 2, 16)).astype(np.float32)

    @jax.jit  # one program instead of one per operation
    def run(q, k, v):
        names = {"tessera": tessera, "dataclasses": dataclasses, "q": q, "k": k, "v": v}
        exec(code, names)
        return names["scored"], names["sparse"]

    scored, sparse = jax.device_get(run(q, k, v))
    assert scored.mass.shape == (1, 2, 64, 16)
    np.testing.assert_allclose(sparse.out[:, :128], scored.out[:, :128], rtol=1e-5, atol=1e-5)
    assert not np.allclose(sparse.out[:, -128:], scored.out[:, -128:], atol=1e-3)


def test_first_example_calibrates_and_generates_under_its_plan(tmp_path, monkeypatch):
    """A tiny model, little text and a given cross-over keep it short; the example's names and arguments are real."""
    code = example("tessera.calibrate").replace("import tessera\n", "")
    folder = "path/to/llama-3.1-8b"
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / folder)
    text = (README.parent / "LICENSE").read_text()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "licence.txt").write_text(text)
    (tmp_path / "report.txt").write_text(text[:400])
    short = partial(tessera.calibrate, max_tokens=2500, crossover=64, progress=False)
    names = {"tessera": SimpleNamespace(load=load_stacked, calibrate=short)}
    exec(code, names)
    assert names["plan"].crossover_tokens == 64
    assert 0 < names["answer"].density < 1
