"""select_tiles against a brute-force reading of its rules, over positions, tiles, windows and budgets."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention.contract import AttentionSpec
from tessera.attention.selection import WORD, capacity_for, find_marks, keep_largest, select_tiles


def brute_force(mass, spec, fraction, minimum, q_start, kv_len, q_len, capacity):
    """One list per (b, k, i), by walking rows and keys one by one."""
    lists = {}
    for b, k, i in np.ndindex(*mass.shape[:3]):
        rows = [q_start[b] + r for r in range(i * spec.query_tile, min((i + 1) * spec.query_tile, q_len[b]))]
        seen = [
            [
                s
                for s in range(kv_len[b])
                if (not spec.causal or s <= p) and (spec.window is None or s > p - spec.window)
            ]
            for p in rows
        ]
        lists[b, k, i] = []
        if not rows or not seen[-1]:
            continue
        visible = sorted({s // spec.tile for keys in seen for s in keys})
        own = {p // spec.tile for p in rows if p >= 0} & set(visible)
        budget = min(max(fraction * len(seen[-1]), minimum), len(seen[-1]))
        tiles = len(visible) if budget == len(seen[-1]) else math.ceil(budget / spec.tile - 1e-3)
        tiles = min(max(tiles, len(own)), len(visible), capacity)
        best = sorted(visible, key=lambda j: (j not in own, -mass[b, k, i, j], j))
        lists[b, k, i] = sorted(best[:tiles])
    return lists


CASES = {
    "paper": (AttentionSpec(tile=1, query_tile=32), 64, 200, 0.1, 16, None),
    "tiles": (AttentionSpec(tile=16, query_tile=32), 96, 400, 0.3, 16, None),
    "short_minimum": (AttentionSpec(tile=16, query_tile=8), 40, 100, 0.1, 128, None),
    "window": (AttentionSpec(tile=16, query_tile=12, window=70), 50, 300, 0.2, 20, None),
    "both_ways": (AttentionSpec(tile=32, query_tile=16, causal=False), 33, 310, 0.25, 1, None),
    "everything": (AttentionSpec(tile=16, query_tile=8, window=33), 40, 120, 1.0, 1, None),
    "too_small": (AttentionSpec(tile=16, query_tile=32), 64, 300, 0.5, 1, 3),
    "wide_rows": (AttentionSpec(tile=16, query_tile=64), 128, 300, 0.05, 1, None),
}


@functools.cache
def selector(spec, fraction, minimum, capacity, pooled):
    return jax.jit(
        lambda mass, q_start, kv_len, q_len: select_tiles(
            mass,
            spec,
            fraction=fraction,
            minimum=minimum,
            q_start=q_start,
            kv_len=kv_len,
            q_len=q_len,
            capacity=capacity,
            pooled=pooled,
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_matches_brute_force(name):
    """Random masses with ties, ragged and negative starts, padding rows and empty sequences; ids ascend."""
    spec, num_queries, num_keys, fraction, minimum, capacity = CASES[name]
    rng = np.random.default_rng(len(name))
    shape = (3, 2, -(-num_queries // spec.query_tile), -(-num_keys // spec.tile))
    select = selector(spec, fraction, minimum, capacity, False)
    for trial in range(6):
        mass = (8 * rng.random(shape) ** 3).astype(np.float32)
        if trial % 2:
            mass = np.round(mass)
        kv_len = rng.integers(0, num_keys + 1, 3)
        q_len = rng.integers(0, num_queries + 1, 3)
        q_start = kv_len - q_len + rng.integers(-3, 3, 3)
        if trial == 0:
            q_len[:], q_start[:], kv_len[:] = num_queries, (num_keys - num_queries, 0, -5), (num_keys, num_keys, 0)
        result = select(jnp.asarray(mass), *(jnp.asarray(x, jnp.int32) for x in (q_start, kv_len, q_len)))
        tiles, count = np.asarray(result.tiles), np.asarray(result.count)
        assert tiles.min() >= 0
        assert tiles.max() < shape[3]
        if capacity is None:
            assert tiles.shape[3] == capacity_for(
                spec, shape[3] * spec.tile, shape[2] * spec.query_tile, fraction=fraction, minimum=minimum
            )
        expected = brute_force(mass, spec, fraction, minimum, q_start, kv_len, q_len, capacity or shape[3])
        for index, wanted in expected.items():
            assert tiles[index][: count[index]].tolist() == wanted, (trial, index)


def test_capacity_is_never_exceeded_and_is_reached():
    """Over every start position the largest budget equals the static capacity, so no list is cut and none wasted."""
    spec = AttentionSpec(tile=16, query_tile=32)
    num_keys = 512
    capacity = capacity_for(spec, num_keys, 32, fraction=0.25, minimum=32)
    select = selector(spec, 0.25, 32, None, False)
    start = jnp.arange(0, num_keys - 31, dtype=jnp.int32)
    mass = jnp.ones((len(start), 1, 1, num_keys // 16))
    count = select(mass, start, start + 32, jnp.full_like(start, 32)).count
    assert int(count.max()) == capacity


def test_budget_rolls_with_what_is_visible():
    """10 % with a minimum of 128 keys: everything up to 128, 128 up to 1,280, then a tenth; decode as prefill."""
    spec = AttentionSpec(tile=16, query_tile=32)
    visible = np.array([1, 17, 128, 129, 1280, 1281, 2000, 4096])
    kv_len = jnp.asarray(visible, jnp.int32)
    mass = jnp.ones((len(visible), 1, 1, 256))
    select = selector(spec, 0.1, 128, None, False)
    count = select(mass, kv_len - 1, kv_len, jnp.ones_like(kv_len)).count[:, 0, 0]
    assert count.tolist() == [1, 2, 8, 8, 8, 9, 13, 26]


def test_pooled_is_one_set_by_summed_mass():
    spec = AttentionSpec(tile=16, query_tile=16)
    mass = np.zeros((1, 2, 1, 16), np.float32)
    mass[0, 0, 0, [2, 5]] = 3, 1
    mass[0, 1, 0, [7, 5]] = 3, 2.5
    at = (jnp.array([240], jnp.int32), jnp.array([256], jnp.int32), jnp.array([16], jnp.int32))
    apart = selector(spec, 0.125, 1, None, False)(jnp.asarray(mass), *at)
    together = selector(spec, 0.125, 1, None, True)(jnp.asarray(mass), *at)
    assert apart.tiles[0, :, 0, :2].tolist() == [[2, 15], [7, 15]]
    assert together.tiles[0, :, 0, :2].tolist() == [[5, 15], [5, 15]]
    assert together.tiles.shape == apart.tiles.shape
    assert together.count.tolist() == [[[2], [2]]]


def test_nan_and_negative_zero_mass_count_as_none():
    spec = AttentionSpec(tile=16, query_tile=16)
    mass = jnp.zeros((1, 1, 1, 16)).at[0, 0, 0, 3].set(jnp.nan).at[0, 0, 0, 0].set(-0.0).at[0, 0, 0, 9].set(2e-38)
    at = (jnp.array([240], jnp.int32), jnp.array([256], jnp.int32), jnp.array([16], jnp.int32))
    chosen = selector(spec, 0.25, 1, None, False)(mass, *at)
    assert chosen.tiles[0, 0, 0].tolist() == [0, 1, 9, 15]


@pytest.mark.parametrize("num_tiles", [1, 31, 32, 33, 1000])
def test_keep_largest_and_find_marks_equal_a_sort(num_tiles):
    rng = np.random.default_rng(num_tiles)
    rank = rng.integers(-1, 40, (2, 2, 3, num_tiles)).astype(np.int32)
    count = np.minimum(rng.integers(0, num_tiles + 1, rank.shape[:3]), (rank >= 0).sum(-1)).astype(np.int32)
    kept = np.asarray(jax.jit(keep_largest)(jnp.asarray(rank), jnp.asarray(count)))
    nth = np.broadcast_to(np.arange(1, num_tiles + 1, dtype=np.int32), rank.shape)
    found = np.asarray(jax.jit(find_marks)(jnp.asarray(kept), jnp.asarray(nth)))
    for index in np.ndindex(*count.shape):
        order = np.lexsort((np.arange(num_tiles), -rank[index]))[: count[index]]
        assert np.flatnonzero(kept[index]).tolist() == sorted(order)
        assert found[index][: count[index]].tolist() == sorted(order)


def drawn_marks(kind, shape, rng):
    share = {"empty": 0.0, "few": 0.02, "half": 0.5, "all": 1.0}.get(kind)
    if share is not None:
        return rng.random(shape) < share
    mark = np.zeros(shape, bool)  # the first and the last bit of words, and of the row
    mark[..., ::WORD], mark[..., WORD - 1 :: WORD], mark[..., -1] = True, True, True
    return mark


@pytest.mark.parametrize("kind", ["empty", "few", "half", "all", "edges"])
@pytest.mark.parametrize("num_tiles", [1, 32, 33, 200])
def test_the_nth_mark_is_found_where_there_is_one(num_tiles, kind):
    """nth in any order, repeated, 0 and beyond the marks, one as well as many for a row."""
    rng = np.random.default_rng(num_tiles)
    mark = drawn_marks(kind, (2, 2, 3, num_tiles), rng)
    for places in (1, 50):
        nth = rng.integers(0, num_tiles + 3, (*mark.shape[:3], places)).astype(np.int32)
        found = np.asarray(find_marks(jnp.asarray(mark), jnp.asarray(nth)))
        for index in np.ndindex(*mark.shape[:3]):
            marked = np.flatnonzero(mark[index]).tolist()
            wanted = [-1 if n == 0 else marked[n - 1] if n <= len(marked) else num_tiles - 1 for n in nth[index]]
            assert found[index].tolist() == wanted


MASSES = {
    "random": lambda rng, shape: rng.random(shape),
    "tied": lambda rng, shape: rng.integers(0, 3, shape),
    "all equal": lambda rng, shape: np.full(shape, 0.25),
    "none": lambda rng, shape: np.zeros(shape),
    "one": lambda rng, shape: np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])],
}


@pytest.mark.parametrize("kind", MASSES)
@pytest.mark.parametrize("capacity", [1, 7, 33, 99, None])
def test_lists_equal_a_sort_at_every_capacity(kind, capacity):
    """Not causal and unpadded, so that every tile competes; entries past count repeat the last id."""
    spec = AttentionSpec(tile=16, query_tile=16, causal=False)
    rng = np.random.default_rng(3)
    mass = MASSES[kind](rng, (2, 2, 3, 99)).astype(np.float32)
    at = [jnp.full(2, n, jnp.int32) for n in (0, 99 * 16, 3 * 16)]
    for fraction in (0.02, 0.4, 1.0):
        tiles, count = selector(spec, fraction, 16, capacity, False)(jnp.asarray(mass), *at)
        tiles, count = np.asarray(tiles), np.asarray(count)
        wanted_count = min(math.ceil(fraction * 99 - 1e-3), capacity or 99)
        assert (count == wanted_count).all()
        for b, k, i in np.ndindex(*mass.shape[:3]):
            order = sorted(range(99), key=lambda j: (j != i, -mass[b, k, i, j], j))
            wanted = sorted(order[:wanted_count])
            assert tiles[b, k, i].tolist() == wanted + [wanted[-1]] * (tiles.shape[-1] - wanted_count)


@pytest.mark.parametrize("shape", [(1, 8, 64, 512), (4, 8, 1, 512)])
def test_nothing_is_looked_up_by_element(shape):
    """A TPU does a gather of single elements, a scatter and a sort one element at a time: 50 ms a call where 1 do."""
    text = jax.jit(lambda m: select_tiles(m, AttentionSpec())).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).as_text()
    assert re.search(r"stablehlo\.reduce\b", text)
    assert not re.findall(r"stablehlo\.\w*(?:gather|scatter|sort)\w*", text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": 0.0}, "fraction=0.0 must be above 0"),
        ({"fraction": 1.5}, "at most 1"),
        ({"minimum": 0}, "minimum=0 must be at least 1"),
        ({"capacity": 0}, "capacity=0 must be at least 1"),
    ],
)
def test_bad_budgets_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        select_tiles(jnp.ones((1, 1, 1, 4)), AttentionSpec(), **options)


def test_bad_mass_is_named():
    with pytest.raises(ValueError, match=r"mass\.shape=\(1, 4\) must have four sizes"):
        select_tiles(jnp.ones((1, 4)), AttentionSpec())
