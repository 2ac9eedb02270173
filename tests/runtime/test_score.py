"""Running a window in chunks equals running it at once; rows are judged as their logits say."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_params

from tessera.attention.contract import Positions
from tessera.models.decoder import forward, logits
from tessera.runtime import score
from tessera.sparse.baselines import Dense, Window

MODEL = SimpleNamespace(params=random_params(CONFIG), config=CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 256, 300).astype(np.int32)
WINDOW = Window(window=40, sinks=16, tile=16, query_tile=16)


def at_once(policy) -> np.ndarray:
    where = Positions(*(np.full(1, n, np.int32) for n in (0, 300, 300)))
    program = jax.jit(lambda *call: forward(*call, config=CONFIG, policy=policy)[0])
    return np.asarray(program(MODEL.params, TOKENS[None], None, where)[0])


@pytest.fixture(scope="module")
def pair():
    return at_once(Dense()), at_once(WINDOW)


def test_chunks_make_the_window(pair, monkeypatch):
    """The last chunk is cut short, and each chunk's state counts only that chunk's keys."""
    monkeypatch.setattr(score, "CHUNK", 128)
    chunks = list(score.run_window(MODEL, TOKENS, WINDOW))
    assert [(chunk.start, chunk.count, len(chunk.hidden)) for chunk in chunks] == [
        (0, 128, 128),
        (128, 128, 128),
        (256, 44, 128),
    ]
    hidden, notes = score.run_whole(MODEL, TOKENS, WINDOW)
    np.testing.assert_allclose(hidden, pair[1], atol=1e-4)
    np.testing.assert_array_equal(hidden, np.concatenate([c.hidden[: c.count] for c in chunks]))
    assert np.abs(hidden - pair[0]).max() > 1e-2
    visible = sum(WINDOW.reads(own).visible.sum() for own in notes)
    assert visible == CONFIG.num_layers * CONFIG.num_kv_heads * 300 * 301 / 2


@pytest.mark.parametrize(
    ("query_tile", "num_keys", "rows", "size"),
    [(16, 300, 320, 320), (16, 512, 512, 512), (16, 700, 512, 1024), (48, 700, 528, 1056), (1024, 700, 1024, 1024)],
)
def test_chunks_are_whole_query_tiles(query_tile, num_keys, rows, size):
    run = score.Run(MODEL, Window(query_tile=query_tile), num_keys)
    assert run.rows == rows
    assert jax.tree.leaves(run.cache)[0].shape[-2] == size


def test_one_program_serves_every_array(pair):
    """A policy built from a traced array runs as one built from a constant, and another array compiles nothing."""

    class Scaled(Window):
        """Attention output multiplied by a traced factor."""

        def __init__(self, factor):
            super().__init__(window=40, sinks=16, tile=16, query_tile=16)
            object.__setattr__(self, "factor", factor)

        def attend(self, *call):
            out, state = super().attend(*call)
            return self.factor * out, state

    same, _ = score.run_whole(MODEL, TOKENS, Scaled, np.float32(1))
    compiled = score.run_chunk._compiled._cache_size()
    np.testing.assert_allclose(same, pair[1], atol=1e-4)
    half, _ = score.run_whole(MODEL, TOKENS, Scaled, np.float32(0.5))
    assert score.run_chunk._compiled._cache_size() == compiled
    assert np.abs(half - same).max() > 1e-2


def test_rows_are_judged_as_the_logits_say(pair, monkeypatch):
    """Compare with float64 NumPy, for unordered rows in blocks, the last of which is cut short."""
    monkeypatch.setattr(score, "ROWS", 32)
    rows = np.r_[score.predicting(TOKENS)[::-3], 5, 5]
    scores = [np.asarray(logits(MODEL.params, jnp.asarray(x)), np.float64)[rows] for x in pair]
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in scores)
    wanted, each = TOKENS[rows + 1], np.arange(len(rows))
    found = score.compare_rows(MODEL, *pair, TOKENS, rows)
    np.testing.assert_allclose(found.kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.loss_dense, -p[each, wanted], rtol=1e-5)
    np.testing.assert_allclose(found.loss, -q[each, wanted], rtol=1e-5)
    np.testing.assert_array_equal(found.right_dense, p.argmax(-1) == wanted)
    np.testing.assert_array_equal(found.right, q.argmax(-1) == wanted)
    np.testing.assert_array_equal(found.same, p.argmax(-1) == q.argmax(-1))
    assert 0 < found.same.mean() < 1
    alone = score.score_rows(MODEL, pair[1], TOKENS, rows)
    np.testing.assert_array_equal(alone.loss, found.loss)
    np.testing.assert_array_equal(alone.right, found.right)
