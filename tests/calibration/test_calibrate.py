"""Calibrate small models whose anchors are known; check the error messages, and that no program holds T x S scores."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from tessera.attention.contract import AttentionSpec, KeyValues, Positions, call_shapes
from tessera.calibration.calibrate import calibrate
from tessera.calibration.crossover import find_crossover, measure_crossover, measure_decode_crossover
from tessera.calibration.report import Report
from tessera.calibration.similarity import Notes, record_similarity, text_loss
from tessera.models.cache import init_cache
from tessera.models.config import ModelConfig
from tessera.models.decoder import forward, logits
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.models.weights import init_params
from tessera.runtime import score
from tessera.runtime.corpus import read_corpus, read_text
from tessera.runtime.score import run_chunk, run_whole
from tessera.sparse.anchors import choose_anchors
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import Plan
from tessera.sparse.recording import NUM_KEYS, RecallRecorder, SimilarityRecorder

CONFIG = tiny.config(intermediate_size=32, num_layers=6, head_dim=8)
GROUPS = ((0, 1), (2, 3, 4), (5,))
QUIET = Report(shown=False)


@dataclass(frozen=True)
class Small:
    """Fields of a model that `calibrate` uses."""

    params: Any
    config: ModelConfig
    tokenizer: Any = None


def planted() -> Small:
    """Build a model whose layer groups share query and key projections; layer 1 has its two KV heads swapped.

    Blocks add little to the residual stream, so layers with equal projections have near-equal attention.
    """
    params = init_params(CONFIG, jax.random.key(0))
    layers = params.layers
    first = jnp.asarray([0, 0, 2, 2, 2, 5])  # each layer's group leader
    q, k = 3.0 * layers.q[first], layers.k[first]  # peaked attention: groups read different keys
    swap_q, swap_k = (jnp.concatenate(jnp.split(w, 2)[::-1]) for w in (q[1], k[1]))
    layers = replace(layers, q=q.at[1].set(swap_q), k=k.at[1].set(swap_k), o=0.3 * layers.o, down=0.01 * layers.down)
    return Small(replace(params, layers=layers), CONFIG, byte_tokenizer())


@pytest.fixture(scope="module")
def model():
    return planted()


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, 384).tolist() for _ in range(4)]


@pytest.fixture(scope="module")
def plan(model, rows):
    return calibrate(
        model,
        rows,
        anchors=3,
        tile=16,
        query_tile=16,
        local=0,
        sinks=0,
        minimum=64,
        fraction=0.25,
        crossover=0,
        progress=False,
    )


def test_planted_anchors_and_heads_are_found(plan):
    assert plan.anchors == tuple(group[0] for group in GROUPS)
    assert plan.head_map == ((0, 1), (1, 0), (0, 1), (0, 1), (0, 1), (0, 1))
    similarity = np.asarray(plan.metrics["similarity"])
    same = np.array([[any(a in g and b in g for g in GROUPS) for b in range(6)] for a in range(6)])
    upper = np.triu(np.ones((6, 6), bool))
    assert similarity[same & upper].min() > similarity[~same & upper].max() + 0.1


def test_the_metrics_say_what_the_plan_keeps(plan, model, rows):
    recall, density = np.asarray(plan.metrics["recall"]), np.asarray(plan.metrics["density"])
    anchors = np.isin(np.arange(6), plan.anchors)
    np.testing.assert_array_equal(recall[anchors], 1.0)
    np.testing.assert_array_equal(density[anchors], 1.0)
    assert np.all(recall[~anchors] > density[~anchors] + 0.1)  # chosen keys hold more mass than average
    assert np.all(density[~anchors] < 0.6)
    bad = replace(Kascade.from_plan(plan), anchors=(0, 1, 3))
    _, [worse] = run_whole(model, np.asarray(rows[3], np.int32), RecallRecorder(policy=bad, dense=True))
    assert np.mean(worse.held / worse.total) < np.mean(recall)
    assert plan.metrics["perplexity_dense"] > 1
    assert plan.metrics["perplexity_kascade"] == pytest.approx(plan.metrics["perplexity_dense"], rel=0.05)
    assert plan.provenance["corpus_tokens"] == 4 * 384


def test_calibration_is_deterministic_and_the_plan_a_file(plan, model, rows, tmp_path):
    again = calibrate(
        model,
        rows,
        anchors=3,
        tile=16,
        query_tile=16,
        local=0,
        sinks=0,
        minimum=64,
        fraction=0.25,
        crossover=0,
        progress=False,
    )
    assert again == plan
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    loaded.check(CONFIG, plan.model)


def test_pooled_heads_share_one_similarity(model, rows):
    """With one set of keys for both heads, the swap in layer 1 does not matter."""
    plan = calibrate(model, rows, tile=16, query_tile=16, minimum=64, heads="pooled", crossover=7, progress=False)
    assert plan.heads == "pooled"
    assert plan.head_map == ((0, 1),) * 6
    assert plan.crossover_tokens == 7
    assert len(plan.anchors) == 2
    assert plan.metrics["similarity"][0][1] > 0.8


def test_identity_heads_suffer_from_the_swap(model, rows):
    windows = [np.asarray(row, np.int32) for row in rows[:3]]
    identity, remap = (record_similarity(model, windows, 16, heads, QUIET) for heads in ("identity", "remap"))
    assert identity.heads.tolist() == [[[0, 1]] * 6] * 6
    assert remap.similarity[0, 1] > 0.8 > 0.7 > identity.similarity[0, 1]
    assert identity.similarity[2, 3] == pytest.approx(remap.similarity[2, 3])


@dataclass(frozen=True, kw_only=True)
class Probabilities(Policy):
    """Store every layer's full attention probabilities, as a direct oracle for the recorder."""

    def init_state(self, num_layers, shapes, spec):
        return jnp.zeros((num_layers, shapes.batch, shapes.num_heads, shapes.num_queries, shapes.num_keys))

    def attend(self, layer, q, kv, spec, positions, state):
        groups = q.shape[2] // kv.k.shape[1]
        k, v = jnp.repeat(kv.k, groups, axis=1), jnp.repeat(kv.v, groups, axis=1)
        z = jnp.einsum("btnh,bnsh->bnts", q, k) * q.shape[-1] ** -0.5
        causal = jnp.arange(k.shape[2]) <= positions.q_start[:, None, None, None] + jnp.arange(q.shape[1])[:, None]
        p = jax.nn.softmax(jnp.where(causal, z, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bnsh->btnh", p, v), state.at[layer].set(p)


def chosen_from(tile: int, local: int, sinks: int) -> slice:
    """Return the keys that a query tile of 16 rows may choose from: all but the sinks, its local keys and its own."""
    return slice(sinks, max(16 * tile - local, sinks))


def test_similarity_is_its_definition(model, rows):
    """Compute sim(a, b) from full probabilities: sum a group's rows and heads, take the 64 best keys that are free."""
    window, local, sinks = np.asarray(rows[0][:320], np.int32), 24, 5
    recorder = SimilarityRecorder(query_tile=16, local=local, sinks=sinks)
    _, [state] = run_whole(model, window, recorder)
    mass = full_mass(model, window)
    counted = [tile for tile in range(20) if len(range(320)[chosen_from(tile, local, sinks)]) > NUM_KEYS]
    assert int(state.num_tiles) == len(counted)
    found = similarity_by_definition(mass, counted, local, sinks)
    upper = np.triu(np.ones((6, 6), bool))
    np.testing.assert_allclose(state.least[upper], found.min(-1)[upper], atol=2e-4)


def full_mass(model, window) -> np.ndarray:
    """Compute the mass [L,K,I,S] of query tiles of 16 rows from full probabilities."""
    size = np.full(1, len(window), np.int32)
    where = Positions(np.zeros(1, np.int32), size, size)
    _, _, p = forward(model.params, window[None], None, where, config=CONFIG, policy=Probabilities())
    return np.asarray(p, np.float64)[:, 0].reshape(6, 2, 2, -1, 16, len(window)).sum((2, 4))


def similarity_by_definition(mass, tiles, local=0, sinks=0) -> np.ndarray:
    """Compute the similarity [L,L,K,K,I] of the given query tiles."""
    found = np.zeros((6, 6, 2, 2, len(tiles)))
    for index, tile in enumerate(tiles):
        free = np.zeros(mass.shape[-1], bool)
        free[chosen_from(tile, local, sinks)] = True
        best = np.argsort(-np.where(free, mass[:, :, tile], -1), -1)[..., :NUM_KEYS]
        for a, b, theirs, mine in np.ndindex(found.shape[:4]):
            row = mass[b, mine, tile]
            always = row[~free].sum()
            found[a, b, theirs, mine, index] = (always + row[best[a, theirs]].sum()) / (
                always + row[best[b, mine]].sum()
            )
    return found


def test_the_similarity_of_a_plan_is_the_least_over_tiles_and_the_mean_over_windows(model, rows):
    windows = [np.asarray(row[:320], np.int32) for row in rows[:2]]
    notes = record_similarity(model, windows, 16, "remap", QUIET)
    ratios = [similarity_by_definition(full_mass(model, window), range(5, 20)) for window in windows]
    least = np.mean([r.min(-1) for r in ratios], 0)
    table = least.argmax(2)
    upper = np.triu(np.ones((6, 6), bool))
    np.testing.assert_array_equal(notes.heads[upper], table[upper])
    assert np.any(table != np.concatenate(ratios, -1).mean(-1).argmax(2))  # the mean over tiles would choose otherwise
    expected = np.take_along_axis(least, table[:, :, None], axis=2)[:, :, 0].mean(-1)
    np.testing.assert_allclose(notes.similarity[upper], expected[upper], atol=2e-4)


def test_a_layer_that_reads_its_own_tile_is_like_every_other():
    """Where all mass lies on keys that are always read, the ranking of far keys does not matter."""
    rng = np.random.default_rng(3)
    k = jnp.asarray(rng.standard_normal((1, 256, 1, 8)), jnp.float32)
    far, near = k[:, :16], jnp.where(jnp.arange(256)[:, None, None] >= 240, 40.0, 0.1 * k)
    recorder, spec = SimilarityRecorder(query_tile=16), AttentionSpec()
    where = Positions(*(jnp.full(1, n, jnp.int32) for n in (240, 256, 16)))
    state = recorder.init_state(2, call_shapes(far, k), spec)
    _, state = recorder.attend(0, far, KeyValues.of(k, k), spec, where, state)
    _, state = recorder.attend(1, jnp.ones_like(far), KeyValues.of(near, k), spec, where, state)
    assert state.least[0, 1, 0, 0] == pytest.approx(1.0, abs=1e-6)


def test_the_score_of_an_anchor_weighs_by_the_layer_that_uses_it():
    """S[a][b] = w_b sim(a, b), with w_b the importance of layer b: important layers get anchors, not similar ones."""
    similarity = np.array([[1.0, 0.9, 0.5, 0.5], [0, 1.0, 0.5, 0.5], [0, 0, 1.0, 0.5], [0, 0, 0, 1.0]])
    importance = np.array([1.0, 4.0, 0.5, 1.0])
    notes = Notes(heads=np.zeros((4, 4, 1), np.int32), similarity=similarity, importance=importance)
    for a, b in np.ndindex(4, 4):
        assert notes.score[a, b] == importance[b] * similarity[a, b]
    # An anchor at layer 3 gains 1.0 * 0.5, at layer 1 4.0 * 0.1, at layer 2 0.5 * 0.5.
    assert choose_anchors(notes.score, 2) == (0, 3)
    assert choose_anchors(importance[:, None] * similarity, 2) == (0, 1)


def test_importance_is_the_turn_of_the_residual_stream(model, rows):
    """A layer whose attention block outputs zeros has importance 0; a larger output gives more importance."""
    scale = jnp.asarray([1.0, 0.0, 2.0, 1.0, 0.5, 1.0])[:, None, None]
    layers = replace(model.params.layers, o=model.params.layers.o * scale)
    muted = Small(replace(model.params, layers=layers), CONFIG)
    windows = [np.asarray(rows[0], np.int32)]
    found = record_similarity(muted, windows, 16, "remap", QUIET).importance
    assert found[1] == 0
    assert np.all(found[[0, 2, 3, 4, 5]] > 0)
    assert found[2] > 2 * found[3]
    assert found[4] < found[5]


def test_perplexity_is_that_of_the_logits(model, rows):
    window = np.asarray(rows[0][:200], np.int32)
    where = Positions(np.zeros(1, np.int32), np.full(1, 200, np.int32), np.full(1, 200, np.int32))
    hidden, _, _ = forward(model.params, window[None], None, where, config=CONFIG, policy=Dense())
    log_p = np.asarray(jax.nn.log_softmax(logits(model.params, hidden)[0, :-1].astype(jnp.float32)), np.float64)
    expected = np.exp(-log_p[np.arange(199), window[1:]].mean())
    hidden, _ = run_whole(model, window, Dense())
    assert np.exp(text_loss(model, hidden, window) / 199) == pytest.approx(expected, rel=1e-4)


def test_the_recorder_streams(model):
    """No array of the recorder's program has T x S elements, for T = 2,048 and S = 8,192."""
    rows, keys = 2048, 8192
    shape = replace(CONFIG, max_positions=keys)
    cache = jax.eval_shape(lambda: init_cache(shape, 1, keys, dtype=jnp.float32, stacked=True))
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((1, rows), jnp.int32)
    trace = jax.make_jaxpr(partial(run_chunk, config=shape, policy=SimilarityRecorder(query_tile=32)))
    largest = max(sizes(trace(model.params, cache, tokens, one, one).jaxpr), default=0)
    cache_size = CONFIG.num_layers * CONFIG.num_kv_heads * keys * CONFIG.head_dim
    assert cache_size <= largest < rows * keys


def sizes(jaxpr):
    """Yield the element count of every value that a program makes, sub-programs included."""
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            yield int(np.prod(getattr(value.aval, "shape", ()), dtype=np.int64))
        for item in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(item, "jaxpr") or hasattr(item, "eqns"):
                yield from sizes(getattr(item, "jaxpr", item))


def test_ctrl_c_says_how_far_it_came_and_writes_nothing(model, rows, monkeypatch, capsys):
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run_chunk(*args, **kwargs)

    monkeypatch.setattr(score, "run_chunk", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped during similarity.*no plan was written"):
        calibrate(model, rows, anchors=3, query_tile=16, tile=16, progress=True)
    assert "similarity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 1024}, "tile=1024 must be one of"),
        ({"anchors": 7}, "anchors=7 must be from 1 to 6"),
        ({"anchors": 0}, "anchors=0"),
        ({"anchors": (1, 2)}, "must ascend from 0"),
        ({"fraction": 2.0}, "fraction=2.0"),
        ({"minimum": -1}, "minimum=-1"),
        ({"heads": "best"}, "heads='best'"),
        ({"query_tile": 0}, "query_tile=0"),
    ],
)
def test_bad_options_are_named(model, rows, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(model, rows, progress=False, **options)


def test_a_tile_that_does_not_fit_is_named(model, rows):
    small = Small(model.params, replace(CONFIG, max_positions=64))
    with pytest.raises(ValueError, match="tile=128 does not fit the context of 64"):
        calibrate(small, rows, tile=128, progress=False)


def test_bad_texts_are_named(model, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere' does not exist"):
        calibrate(model, tmp_path / "nowhere", progress=False)
    with pytest.raises(ValueError, match="holds no text"):
        calibrate(model, tmp_path, progress=False)
    (tmp_path / "image.bin").write_bytes(b"\x00\x01" * 99)
    with pytest.raises(ValueError, match="holds no text"):
        calibrate(model, tmp_path, progress=False)
    with pytest.raises(
        ValueError, match="8 tokens, too few to calibrate and to evaluate: pass one text of at least 256"
    ):
        calibrate(model, [[1, 2, 3, 4, 5, 6, 7, 8]], progress=False)
    with pytest.raises(ValueError, match="integers from 0 to 263"):
        calibrate(model, [[1, 2, 999]], progress=False)
    with pytest.raises(ValueError, match="no tokenizer"):
        calibrate(Small(model.params, CONFIG), ["some text"], progress=False)


def test_a_text_that_is_read_whole_anyway_is_named(model):
    short = [np.arange(150).tolist()] * 2
    with pytest.raises(ValueError, match="more than 64 tokens besides the keys that are always read"):
        calibrate(model, short, local=64, sinks=16, progress=False)


def test_weights_with_nan_are_named(model, rows):
    broken = replace(model.params, layers=replace(model.params.layers, o=model.params.layers.o.at[2].set(jnp.nan)))
    with pytest.raises(ValueError, match="not finite.*NaN"):
        calibrate(Small(broken, CONFIG), rows, query_tile=16, tile=16, progress=False)


def test_a_folder_is_read_in_order_and_all_over(model, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two " * 2000)
    (tmp_path / "a.txt").write_text("one " * 2000)
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "c.bin").write_bytes(b"\x00secret")
    text = read_text(tmp_path)
    assert text == "one " * 2000 + "\n\n" + "two " * 2000
    corpus = read_corpus(model, tmp_path, 2048)
    assert [len(w) for w in (*corpus.windows, *corpus.held_out)] == [512] * 4
    assert model.tokenizer.decode(corpus.windows[0].tolist()).removeprefix("<|bos|>").startswith("one ")
    assert "two" in model.tokenizer.decode(corpus.held_out[-1].tolist())
    assert corpus.sha256 == read_corpus(model, str(tmp_path), 2048).sha256
    assert corpus.sha256 != read_corpus(model, tmp_path, 1024).sha256
    single = read_corpus(model, tmp_path / "a.txt", 2048)
    assert single.source == "a.txt"
    assert single.num_tokens <= 2048


def test_one_text_is_halved_so_that_something_is_held_out(model):
    corpus = read_corpus(model, [list(range(256)) + list(range(44))], 4096)
    assert [w.tolist() for w in corpus.windows] == [list(range(150))]
    assert [w.tolist() for w in corpus.held_out] == [list(range(150, 256)) + list(range(44))]


def test_crossover_is_where_kascade_stays_faster():
    assert find_crossover([1, 2, 3], [5, 5, 5], [4, 4, 4]) == 1
    assert find_crossover([1, 2, 3], [5, 5, 5], [6, 5, 4]) == 3
    assert find_crossover([1, 2, 3], [5, 5, 5], [4, 6, 4]) == 3
    assert find_crossover([1, 2, 3], [5, 5, 5], [4, 4, 6]) is None
    assert find_crossover([], [], []) is None


def test_the_crossover_is_measured_on_this_device(model, plan):
    crossover, times = measure_crossover(model, Kascade.from_plan(plan), QUIET)
    assert times["tokens"] == [512]
    assert crossover == (512 if times["kascade_ms"][0] < times["dense_ms"][0] else 513)
    assert min(times["dense_ms"] + times["kascade_ms"]) > 0


def test_windows_of_any_length_run_in_chunks(model, rows):
    """The chunk size does not change the recorder's result."""
    window = np.asarray(rows[0][:300], np.int32)
    recorder = SimilarityRecorder(query_tile=16)
    _, whole = run_whole(model, window, recorder)
    assert len(whole) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CHUNK", 64)
        _, parts = run_whole(model, window, recorder)
    assert len(parts) == 5
    np.testing.assert_allclose(np.min([p.least for p in parts], axis=0), whole[0].least, rtol=1e-5)
    assert sum(int(p.num_tokens) for p in parts) == 300


def test_the_decode_crossover_is_measured_on_this_device(model, plan):
    crossover, times = measure_decode_crossover(model, Kascade.from_plan(plan), QUIET)
    assert times["tokens"] == [512]
    assert crossover == (512 if times["kascade_ms"][0] < times["dense_ms"][0] else 513)
