"""Estimated masses of key tiles against plain NumPy, written from the docstring alone."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tessera.attention.contract import AttentionSpec, KeyValues, Positions
from tessera.attention.dispatch import attention
from tessera.sparse.estimate import Estimate
from tessera.sparse.estimate import estimate_mass as estimate_head_major


def draw(batch=2, queries=64, keys=128, heads=4, kv_heads=2, width=8, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, queries, heads, width)).astype(np.float32)
    return q, rng.normal(size=(batch, keys, kv_heads, width)).astype(np.float32)


@partial(jax.jit, static_argnums=(2, 4))
def estimate_mass(q, k, spec, positions, how):
    """Estimate masses from keys in the layout [B,S,K,H]."""
    kv = KeyValues(k.swapaxes(1, 2), jnp.zeros(0))  # no value is read
    return estimate_head_major(q, kv, spec, positions, how)


def plain(q, k, spec, positions, how):
    """Compute the estimate row by row and block by block, in float64."""
    batch, num_queries, num_heads, width = q.shape
    kv_heads, num_tiles = k.shape[2], -(-k.shape[1] // spec.tile)
    mass = np.zeros((batch, kv_heads, -(-num_queries // spec.query_tile), num_tiles))
    keys, rows = (1, 1) if num_queries == 1 else (how.keys, how.rows)
    for b in range(batch):
        start, kv_len, q_len = (int(x[b]) for x in positions)
        for t in range(min(num_queries, q_len)):
            last = min((t // spec.query_tile + 1) * spec.query_tile, q_len) - 1  # the query tile's last valid row
            if (last - t) % rows:
                continue
            p = start + t
            stop = min(p + 1, kv_len) if spec.causal else kv_len
            first = max(p - spec.window + 1, 0) if spec.window else 0
            whole = [x for x in range(k.shape[1] // keys) if x * keys >= first and (x + 1) * keys <= stop]
            if not whole:
                continue
            for n in range(num_heads):
                head = n // (num_heads // kv_heads)
                block = [k[b, x * keys : (x + 1) * keys, head].astype(np.float64) for x in whole]
                if how.summary == "mean" or keys == 1:
                    z = np.array([q[b, t, n] @ one.mean(0) for one in block])
                else:
                    z = np.array([np.maximum(q[b, t, n] * one.max(0), q[b, t, n] * one.min(0)).sum() for one in block])
                z = z * width**-0.5
                z = z if spec.softcap is None else spec.softcap * np.tanh(z / spec.softcap)
                e = np.exp(z - z.max())
                for x, share in zip(whole, e / e.sum()):
                    mass[b, head, t // spec.query_tile, x * keys // spec.tile] += share
    return mass


SPECS = (
    AttentionSpec(tile=16, query_tile=16),
    AttentionSpec(tile=32, query_tile=32, softcap=2.0),
    AttentionSpec(tile=16, query_tile=16, window=40),
    AttentionSpec(tile=16, query_tile=32, causal=False),
)
HOWS = (Estimate(keys=4), Estimate(keys=1, rows=4), Estimate(keys=2, rows=2), Estimate(keys=8, summary="minmax"))
PAIRED = ((0, 0), (1, 1), (2, 2), (3, 3), (3, 2))
"""(index of HOWS, index of SPECS) run by default: each entry at least once, and a window that cuts blocks of 8 keys."""


@pytest.mark.parametrize(
    ("how", "spec"),
    [
        pytest.param(HOWS[i], SPECS[j], marks=() if (i, j) in PAIRED else pytest.mark.exhaustive, id=f"{i}-{j}")
        for i, j in product(range(4), range(4))
    ],
)
def test_estimates_are_those_of_the_plain_sum(how, spec):
    q, k = draw()
    positions = Positions(*(np.array(x, np.int32) for x in ([64, 37], [128, 90], [64, 53])))
    found = estimate_mass(q, k, spec, positions, how)
    np.testing.assert_allclose(found, plain(q, k, spec, positions, how), atol=2e-5, rtol=2e-5)


def test_many_steps_join_at_one_normaliser():
    """With more blocks than one step takes, sums at different running maxima are merged."""
    q, k = draw(batch=1, queries=8, keys=1536, heads=2, kv_heads=1)
    k *= np.linspace(0.1, 3, 1536)[:, None, None].astype(np.float32)
    spec, positions = (
        AttentionSpec(tile=16, query_tile=32),
        Positions(*(np.array([x], np.int32) for x in (1528, 1536, 8))),
    )
    how = Estimate(keys=1)
    found = estimate_mass(q, k, spec, positions, how)
    np.testing.assert_allclose(found, plain(q, k, spec, positions, how), atol=2e-5, rtol=2e-4)


def test_one_row_is_scored_exactly_whatever_the_average():
    q, k = draw(queries=1)
    spec, positions = (
        AttentionSpec(tile=16, query_tile=32, mass=True),
        Positions(*(np.array([x] * 2, np.int32) for x in (90, 91, 1))),
    )
    exact = jax.jit(lambda q, k: attention(q, k, k, spec, **positions._asdict()).mass)(q, k)
    np.testing.assert_allclose(estimate_mass(q, k, spec, positions, Estimate(keys=4, rows=2)), exact, atol=1e-5)


@pytest.mark.parametrize("length", range(17, 33))
def test_the_last_row_of_a_prompt_is_scored(length):
    """The last row decides the answer's first token, so a key that only this row sees must have mass at any length."""
    q, k = np.zeros((1, 32, 1, 8), np.float32), np.zeros((1, 128, 1, 8), np.float32)
    q[0, :, 0, 1] = k[0, 0, 0, 1] = 20.0
    q[0, length - 1, 0] = k[0, 40, 0] = np.eye(8, dtype=np.float32)[0] * 20
    positions = Positions(*(np.array([x], np.int32) for x in (96, 96 + length, length)))
    mass = estimate_mass(q, k, AttentionSpec(tile=16, query_tile=32), positions, Estimate(keys=1, rows=4))
    assert mass[0, 0, 0, 2] > 0.99


def test_keys_past_the_end_count_for_nothing_nan_or_not():
    q, k = draw()
    spec, how = AttentionSpec(tile=16, query_tile=32), Estimate(keys=4)
    positions = Positions(*(np.array([x] * 2, np.int32) for x in (36, 100, 64)))
    clean = estimate_mass(q, k, spec, positions, how)
    k[:, 100:] = np.nan
    np.testing.assert_array_equal(clean, estimate_mass(q, k, spec, positions, how))


@pytest.mark.parametrize(
    ("queries", "how"), [(1, Estimate()), (64, Estimate(keys=4)), (64, Estimate(keys=4, summary="minmax"))]
)
def test_int8_keys_count_as_the_numbers_they_mean(queries, how):
    """Free places have the scale NaN. The last tile is cut by the cache's end."""
    rng = np.random.default_rng(3)
    q, _ = draw(queries=queries)
    k = rng.integers(-127, 128, (2, 120, 2, 8), dtype=np.int8)
    scales = np.exp(rng.normal(size=(2, 2, 2, 120)) - 4).astype(ml_dtypes.bfloat16)
    meant = k * np.swapaxes(scales[:, :, 0], 1, 2)[..., None].astype(np.float32)
    scales[..., 100:] = np.nan
    spec = AttentionSpec(tile=16, query_tile=32)
    positions = Positions(*(np.array([x] * 2, np.int32) for x in (100 - queries, 100, queries)))
    estimate = jax.jit(estimate_head_major, static_argnums=(2, 4))
    found = estimate(q, KeyValues(k.swapaxes(1, 2), jnp.zeros(0), scales=scales), spec, positions, how)
    np.testing.assert_allclose(found, plain(q, meant, spec, positions, how), atol=1e-5)


def in_pages(kv: KeyValues, page: int, used: np.ndarray) -> KeyValues:
    """Deal sequences to shuffled pages of a pool of NaN; past used[b] keys, the table names the null page."""
    batch, count = kv.k.shape[0], kv.num_keys // page
    table = np.random.default_rng(5).permutation(np.arange(1, batch * count + 1)).reshape(batch, count).astype(np.int32)

    def deal(x: np.ndarray, axis: int) -> np.ndarray:
        parts = np.stack(np.split(np.asarray(x), count, axis), 1)  # [B,J,K,...]
        fill = np.nan if x.dtype != np.int8 else 99
        pool = np.full((batch * count + 1, *parts.shape[2:]), fill, x.dtype)
        pool[table] = parts
        return pool

    k, scales = deal(kv.k, 2), None if kv.scales is None else deal(kv.scales, 3)
    unused = np.arange(count) * page >= used[:, None]
    for pool in (k, scales):
        if pool is not None:
            pool[table[unused]] = np.nan if pool.dtype != np.int8 else 99
    return KeyValues(k, k, np.where(unused, 0, table), scales)


@pytest.mark.parametrize(
    ("queries", "how", "heads", "int8"),
    [
        (1, Estimate(), None, False),
        (1, Estimate(), (1,), True),
        (64, Estimate(keys=1, rows=4), (1,), False),
        (64, Estimate(keys=4), None, True),
    ],
)
def test_keys_in_pages_have_the_same_estimates(queries, how, heads, int8):
    rng = np.random.default_rng(7)
    q, k = draw(queries=queries, keys=192)
    kv = KeyValues(k.swapaxes(1, 2), jnp.zeros(0))
    if int8:
        scales = np.exp(rng.normal(size=(2, 2, 2, 192)) - 4).astype(ml_dtypes.bfloat16)
        kv = KeyValues(rng.integers(-127, 128, (2, 2, 192, 8), dtype=np.int8), jnp.zeros(0), scales=scales)
    kv_len = np.array([150, 70], np.int32)
    positions = Positions(kv_len - queries, kv_len, np.full(2, queries, np.int32))
    spec = AttentionSpec(tile=16, query_tile=32, softcap=5.0)
    estimate = jax.jit(estimate_head_major, static_argnums=(2, 4, 5))
    if heads is not None:
        q = q[:, :, 2:]
    np.testing.assert_array_equal(
        estimate(q, kv, spec, positions, how, heads), estimate(q, in_pages(kv, 64, kv_len), spec, positions, how, heads)
    )


def test_later_keys_do_not_change_an_estimate():
    q, k = draw()
    spec, how = AttentionSpec(tile=16, query_tile=32), Estimate(keys=4)
    positions = Positions(*(np.array([x] * 2, np.int32) for x in (0, 128, 64)))
    before = np.asarray(estimate_mass(q, k, spec, positions, how))
    k[:, 32:] += 1
    np.testing.assert_array_equal(before[:, :, 0], np.asarray(estimate_mass(q, k, spec, positions, how))[:, :, 0])


def test_a_block_that_does_not_divide_the_tile_is_refused():
    q, k = draw()
    with pytest.raises(ValueError, match="keys=3 must divide tile=16"):
        estimate_mass(q, k, AttentionSpec(tile=16), Positions(*(np.zeros(2, np.int32),) * 3), Estimate(keys=3))
