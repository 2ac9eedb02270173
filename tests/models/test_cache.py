"""An int8 cache: what it stores, that it only appends, and that a model's answers hardly change."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch import Batch
from tiny import CONFIG as TINY
from tiny import PLAN, random_params

from tessera.generate import Model, load
from tessera.models.cache import Cache, extend, init_cache, quantise
from tessera.models.footprint import Types, cache_bytes
from tessera.runtime.requests import End, Request
from tessera.runtime.step import decode_token
from tessera.sparse.baselines import Dense
from tessera.sparse.kascade import Kascade

CONFIG = replace(TINY, num_layers=2, tie_embeddings=False, max_positions=512)
POLICIES = {"dense": Dense(), "kascade": Kascade.from_plan(replace(PLAN, num_layers=2, head_map=((0, 1), (1, 0))))}


@pytest.fixture(scope="module")
def model():
    params = jax.tree.map(jnp.asarray, random_params(CONFIG))
    return Model(config=CONFIG, params=params, tokenizer=None, policy=Dense(), kv_dtype="int8")


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


def meant(cache: Cache, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a layer as the numbers they mean, in float64."""
    kv = cache.layer(layer) if isinstance(cache.k, tuple) else cache.key_values((jnp.int32(layer),))
    scales = np.asarray(kv.scales).astype(np.float64)
    return tuple(np.asarray(x).astype(np.float64) * scales[:, :, i, :, None] for i, x in enumerate(kv[:2]))


def test_an_element_is_off_by_at_most_half_a_step():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 16)) * np.exp(rng.uniform(-30, 30, (64, 1)))  # of every size
    q, scale = (np.asarray(y) for y in jax.jit(quantise)(jnp.asarray(x, jnp.float32)))
    assert q.dtype == np.int8
    scale = scale.astype(np.float64)[:, None]
    assert np.all(np.abs(q * scale - x) <= scale * (0.5 + 1e-5))
    least = np.abs(x).max(-1, keepdims=True) / 127
    assert np.all((scale >= least * (1 - 1e-6)) & (scale <= least * (1 + 2**-7)))  # rounded up to bfloat16


def test_zeros_stay_zeros_and_what_is_not_finite_stays_visible():
    x = np.zeros((5, 16), np.float32)
    x[1, 3], x[2, 3], x[3] = np.nan, np.inf, 1e-42
    x[4] = -np.float32(np.frombuffer(np.uint32(0x7FFFFFFF).tobytes(), np.float32)[0])  # a NaN of all ones
    q, scale = (np.asarray(y) for y in jax.jit(quantise)(jnp.asarray(x)))
    assert np.all(q[0] == 0)
    assert scale[0] == 0
    assert np.isnan(scale[[1, 2, 4]]).all()
    assert np.all(np.abs(q[3] * scale[3].astype(np.float64) - x[3]) <= x[3])


@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
def test_it_only_appends(stacked):
    """Rows written in two calls are the rows of one call; nothing else changes, another layer neither."""
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((2, 6, 2, 16)), jnp.float32) for _ in "kv")
    start = jnp.asarray([3, 9], jnp.int32)
    empty = init_cache(CONFIG, 2, 32, dtype=jnp.int8, stacked=stacked)
    empty = empty._replace(scales=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), empty.scales))
    at = (jnp.int32(1),) if stacked else ()
    mine = empty if stacked else empty.layer(1)
    write = jax.jit(extend)  # one program instead of one per operation
    once = write(mine, k, v, start, at)
    twice = write(write(mine, k[:, :4], v[:, :4], start, at), k[:, 4:], v[:, 4:], start + 4, at)
    for a, b in zip(once, twice):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()  # bytes: NaN equals itself
    joined = once if stacked else Cache.of_layers([empty.layer(0), once])
    for found, new in zip(meant(joined, 1), (k, v)):
        for b, first in enumerate((3, 9)):
            rows = np.swapaxes(np.asarray(new[b]), 0, 1)
            assert np.abs(found[b, :, first : first + 6] - rows).max() <= np.abs(rows).max() / 127 * 0.51
            outside = np.delete(found[b], np.s_[first : first + 6], axis=1)
            assert np.isnan(outside).all()
    assert all(np.isnan(x).all() for x in meant(joined, 0))


def test_it_takes_the_bytes_that_it_says():
    for head_dim, most in ((64, 0.52), (128, 0.51)):
        config = replace(CONFIG, head_dim=head_dim)
        cache = jax.eval_shape(lambda config=config: init_cache(config, 3, 128, dtype=jnp.int8, stacked=False))
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        assert held == cache_bytes(config, 3, 128, types=Types(cache="int8"))
        assert held <= most * cache_bytes(config, 3, 128, types=Types(cache="bfloat16"))


@pytest.mark.parametrize("attention", [pytest.param("dense", marks=pytest.mark.exhaustive), "kascade"])
def test_scores_hardly_change_and_free_places_are_never_seen(model, attention):
    """Prefill in two chunks, then decode; in the int8 cache each free place has the scale NaN."""
    policy, tokens, scores = POLICIES[attention], prompt(130), {}
    if attention == "kascade":  # the same tiles: this test is about numbers
        policy = replace(policy, fraction=1.0)
    for cache in (None, "int8"):
        batch = Batch(model.params, CONFIG, policy, rows=2, num_keys=192, size=64, kv_dtype=cache)
        if cache:
            dirty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), batch.cache.scales)
            batch.cache = batch.cache._replace(scales=dirty)
        first, _ = batch.prefill([tokens, tokens[:70]])
        second, _ = batch.decode(np.array([5, 6], np.int32), np.array([130, 70], np.int32))
        scores[cache] = np.stack([first, second])
    spread = scores[None].std()
    off = np.abs(scores["int8"] - scores[None]).max()
    assert 0 < off < 0.05 * spread  # more than 0: the cache was int8


@pytest.mark.parametrize("attention", [pytest.param("dense", marks=pytest.mark.exhaustive), "kascade"])
def test_an_answer_does_not_depend_on_other_requests(model, attention):
    """A second request joins in the middle (its row is copied out and back) and makes the cache grow."""
    model = replace(model, policy=POLICIES[attention])
    wanted = [Request(prompt=prompt(n), max_new_tokens=8) for n in (70, 200)]
    alone = []
    for request in wanted:
        engine = model.engine(slots=2, sizes=(64,))
        engine.submit(request)
        alone += [end.generation.tokens for end in engine.drain()]
    engine = model.engine(slots=2, sizes=(64,))
    ids = [engine.submit(wanted[0])]
    found = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, End):
                found[event.id] = event.generation.tokens
            elif len(ids) == 1:
                ids.append(engine.submit(wanted[1]))
    assert [found[id] for id in ids] == alone
    assert engine.lane.pool.cache.k[0].dtype == jnp.int8


def test_decode_updates_it_in_place(model):
    batch = Batch(model.params, CONFIG, Dense(), rows=2, num_keys=2048, size=64, kv_dtype="int8")
    zeros = np.zeros(2, np.int32)
    args = (model.params, batch.cache, zeros, zeros, zeros.astype(bool))
    compiled = decode_token.lower(*args, config=CONFIG, policy=Dense()).compile()
    held = cache_bytes(CONFIG, 2, 2048, types=Types(cache="int8"))
    assert compiled.memory_analysis().alias_size_in_bytes >= held


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="kv_dtype='int4' must be 'int8', or None for the weights' dtype"):
        load("smollm2", kv_dtype="int4")
