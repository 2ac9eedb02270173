"""select_tiles against a brute-force version of its rules, over positions, tiles, windows and budgets."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention.contract import AttentionSpec
from tessera.attention.selection import WORD, capacity_for, find_marks, keep_largest, select_tiles, tile_budget
from tessera.measure.trials import UNOPTIMISED

jit = functools.partial(jax.jit, compiler_options=UNOPTIMISED)  # small programs: compiling dominates


def kinds_of_tiles(spec, rows, kv_len, local, sinks):
    """Return (tiles always listed, far tiles, number of keys that the last row sees), from each row and key in turn."""
    if not rows:
        return set(), set(), 0
    seen = [
        [s for s in range(kv_len) if (not spec.causal or s <= p) and (spec.window is None or s > p - spec.window)]
        for p in rows
    ]
    if not seen[-1]:
        return set(), set(), 0
    visible = {s // spec.tile for keys in seen for s in keys}
    always = {p // spec.tile for p in (*range(rows[0] - local, rows[0]), *rows, *range(sinks)) if p >= 0}
    return visible & always, visible - always, len(seen[-1])


def brute_force(mass, spec, budget, q_start, kv_len, q_len):
    """Return {(b, k, i): listed tiles}: those always listed and the best far tiles. `budget` is select_tiles'."""
    lists, (_, num_kv_heads, *_) = {}, mass.shape
    fractions = np.broadcast_to(budget["fraction"], num_kv_heads).tolist()
    for b, k, i in np.ndindex(*mass.shape[:3]):
        rows = [q_start[b] + r for r in range(i * spec.query_tile, min((i + 1) * spec.query_tile, q_len[b]))]
        always, far, keys = kinds_of_tiles(spec, rows, kv_len[b], budget.get("local", 0), budget.get("sinks", 0))
        fraction = fractions[k]
        room = math.ceil(max(fraction * keys / spec.tile - 1e-3, budget["minimum"] / spec.tile))
        room = len(far) if fraction == 1 else 0 if fraction == 0 else room
        lists[b, k, i] = sorted(always) + sorted(far, key=lambda j: (-mass[b, k, i, j], j))[:room]
        lists[b, k, i].sort()
    return lists


def case(tile, query_tile, num_queries, num_keys, fraction, minimum, local=0, sinks=0, **spec):
    budget = {"fraction": fraction, "minimum": minimum, "local": local, "sinks": sinks}
    return AttentionSpec(tile=tile, query_tile=query_tile, **spec), num_queries, num_keys, budget


CASES = {
    "paper": case(1, 32, 64, 200, 0.1, 16),
    "paper_local": case(1, 32, 64, 200, 0.1, 16, 5, 3),
    "tiles": case(16, 32, 96, 400, 0.3, 16),
    "tiles_local": case(16, 32, 96, 400, 0.3, 16, 64, 16),
    "odd_local": case(16, 12, 60, 300, 0.2, 33, 37, 21),
    "short_minimum": case(16, 8, 40, 100, 0.1, 128),
    "window": case(16, 12, 50, 300, 0.2, 20, window=70),
    "window_local": case(16, 12, 50, 300, 0.2, 20, 40, 50, window=70),
    "local_past_window": case(16, 32, 70, 300, 0.0, 500, 200, 0, window=50),
    "both_ways": case(32, 16, 33, 310, 0.25, 1, causal=False),
    "both_ways_local": case(32, 16, 33, 310, 0.25, 0, 40, 32, causal=False),
    "everything": case(16, 8, 40, 120, 1.0, 1, window=33),
    "wide_rows": case(16, 64, 128, 300, 0.05, 1),
    "local_only": case(16, 32, 64, 300, 0.0, 128, 48, 20),
    "own_only": case(16, 32, 64, 300, 0.0, 128),
    "sinks_meet_local": case(16, 8, 64, 150, 0.1, 16, 64, 64),
    "per_head": case(16, 32, 96, 400, (0.0, 1.0, 0.2), 48, 32, 16),
    "per_head_window": case(32, 20, 50, 300, (0.5, 0.05, 0.0), 32, 32, 64, window=170),
}


@functools.cache
def selector(spec, capacity=None, pooled=False, **budget):
    return jit(
        lambda mass, q_start, kv_len, q_len: select_tiles(
            mass, spec, **budget, q_start=q_start, kv_len=kv_len, q_len=q_len, capacity=capacity, pooled=pooled
        )
    )


def lists_of(selection):
    """Return {(b, k, i): the listed tiles}, after checking that each list ascends without repeats."""
    tiles, count = np.asarray(selection.tiles), np.asarray(selection.count)
    found = {index: tiles[index][: count[index]].tolist() for index in np.ndindex(*count.shape)}
    assert all(tiles == sorted(set(tiles)) for tiles in found.values())
    return found


def draw(rng, num_queries, num_keys):
    """Draw (q_start, kv_len, q_len) of three sequences: ragged, empty, or with rows outside the keys."""
    kv_len = rng.integers(0, num_keys + 1, 3)
    q_len = rng.integers(0, num_queries + 1, 3)
    return kv_len - q_len + rng.integers(-3, 3, 3), kv_len, q_len


def on_device(*positions):
    return tuple(jnp.asarray(x, jnp.int32) for x in positions)


REPEATED = ("paper", "tiles_local", "window", "both_ways", "sinks_meet_local", "per_head")
"""Exhaustive only, because other cases cover their rules: "tiles_local", for example, adds no rule to the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in REPEATED else name for name in CASES]
)
def test_matches_brute_force(name):
    """Masses are random, with ties in every second trial; positions are ragged, negative, padded or empty."""
    spec, num_queries, num_keys, budget = CASES[name]
    rng = np.random.default_rng(len(name))
    heads = np.size(budget["fraction"]) if np.ndim(budget["fraction"]) else 2
    shape = (3, heads, -(-num_queries // spec.query_tile), -(-num_keys // spec.tile))
    select = selector(spec, **budget)
    for trial in range(6):
        mass = (8 * rng.random(shape) ** 3).astype(np.float32)
        if trial % 2:
            mass = np.round(mass)
        positions = draw(rng, num_queries, num_keys)
        if trial == 0:
            positions = np.array([[num_keys - num_queries, 0, -5], [num_keys, num_keys, 0], [num_queries] * 3])
        result = select(jnp.asarray(mass), *on_device(*positions))
        assert result.tiles.min() >= 0
        assert result.tiles.max() < shape[3]
        assert result.tiles.shape[3] == capacity_for(spec, shape[3] * spec.tile, shape[2] * spec.query_tile, **budget)
        assert lists_of(result) == brute_force(mass, spec, budget, *positions), trial


@pytest.mark.parametrize(("tile", "query_tile"), [(64, 32), (64, 128), (16, 128)])
def test_own_tiles_take_nothing_from_the_budget(tile, query_tile):
    """The minimum buys 128 keys beyond the own tiles; if it included them, tile 64 would leave one far tile or none."""
    spec = AttentionSpec(tile=tile, query_tile=query_tile)
    mass = jnp.ones((1, 1, 1, 1024 // tile))
    at = on_device([1024 - query_tile], [1024], [query_tile])
    count = selector(spec, fraction=0.1, minimum=128)(mass, *at).count
    assert count.tolist() == [[[128 // tile + max(1, query_tile // tile)]]]


def test_capacity_is_never_exceeded_and_is_reached():
    """Over all start positions the largest count equals the static capacity: no list is cut, no capacity is unused."""
    spec, num_keys = AttentionSpec(tile=16, query_tile=32), 512
    start = jnp.arange(0, num_keys - 31, dtype=jnp.int32)
    mass = jnp.ones((len(start), 2, 1, num_keys // 16))
    for fraction, local, sinks in ((0.25, 0, 0), (0.0, 40, 20), ((0.1, 0.3), 40, 20)):
        budget = {"fraction": fraction, "minimum": 32, "local": local, "sinks": sinks}
        count = selector(spec, **budget)(mass, start, start + 32, jnp.full_like(start, 32)).count
        assert int(count.max()) == capacity_for(spec, num_keys, 32, **budget), budget


@pytest.mark.parametrize("tile", [1, 16, 64])
def test_capacity_holds_a_budget_rounded_up(tile):
    """fraction x a million keys is not exact in float32, so tile_budget may count one tile too many."""
    spec, num_keys = AttentionSpec(tile=tile, query_tile=32), 2**20
    start = jnp.arange(num_keys - 400, num_keys - 31, dtype=jnp.int32)
    for fraction in (1 / 3, 0.1, 0.7, 0.49999997):
        budget = {"fraction": fraction, "minimum": 0}
        tiles = jit(functools.partial(tile_budget, spec, 1, **budget))(start, start + 32, jnp.full_like(start, 32))
        capacity = capacity_for(spec, num_keys, 32, **budget)
        assert capacity - 2 <= int(tiles.budget.max()) <= capacity


def test_budget_rolls_with_what_is_visible():
    """The budget is 10 % of the visible keys, at least 128 keys, in addition to the row's own tile."""
    spec = AttentionSpec(tile=16, query_tile=32)
    visible = np.array([1, 17, 128, 129, 160, 1280, 1281, 2000, 4096])
    kv_len = jnp.asarray(visible, jnp.int32)
    mass = jnp.ones((len(visible), 1, 1, 256))
    select = selector(spec, fraction=0.1, minimum=128)
    count = select(mass, kv_len - 1, kv_len, jnp.ones_like(kv_len)).count[:, 0, 0]
    assert count.tolist() == [1, 2, 8, 9, 9, 9, 10, 14, 27]


def test_every_far_tile_is_dense():
    """fraction 1, or a minimum of all keys, lists exactly the tiles that some row of the query tile sees."""
    rng = np.random.default_rng(5)
    for spec, num_queries, num_keys, _ in (CASES["tiles_local"], CASES["window_local"], CASES["both_ways_local"]):
        mass = jnp.asarray(
            rng.random((3, 2, -(-num_queries // spec.query_tile), -(-num_keys // spec.tile))), jnp.float32
        )
        for budget in ({"fraction": 1.0, "minimum": 0}, {"fraction": 0.01, "minimum": num_keys}):
            start, kv_len, q_len = draw(rng, num_queries, num_keys)
            found = lists_of(selector(spec, **budget)(mass, *on_device(start, kv_len, q_len)))
            for (b, k, i), listed in found.items():
                rows = range(start[b] + i * spec.query_tile, start[b] + min((i + 1) * spec.query_tile, q_len[b]))
                always, far, _ = kinds_of_tiles(spec, rows, kv_len[b], 0, 0)
                assert listed == sorted(always | far), (b, k, i)


def test_more_budget_lists_a_superset():
    """A larger fraction, minimum, local or sinks drops no tile that was listed before."""
    rng = np.random.default_rng(6)
    spec = AttentionSpec(tile=16, query_tile=24)
    mass = jnp.asarray(np.round(6 * rng.random((3, 2, 4, 30))), jnp.float32)
    at = on_device(*draw(rng, 96, 480))
    steps = {"fraction": (0.0, 0.1, 1.0), "minimum": (0, 100), "local": (0, 50), "sinks": (0, 40)}
    for name, values in steps.items():
        budget = {"fraction": 0.15, "minimum": 20, "local": 10, "sinks": 5}
        lists = [lists_of(selector(spec, **(budget | {name: value}))(mass, *at)) for value in values]
        for less, more in itertools.pairwise(lists):
            assert all(set(less[index]) <= set(more[index]) for index in less)
        assert lists[0] != lists[-1], name


def test_local_and_sinks_leave_the_far_budget_alone():
    """local and sinks do not change the number of far tiles while enough far tiles exist."""
    rng = np.random.default_rng(7)
    spec = AttentionSpec(tile=16, query_tile=24)
    mass = jnp.asarray(rng.random((1, 2, 4, 40)), jnp.float32)
    for local, sinks in ((0, 0), (1, 33), (16, 1), (77, 16)):
        select = selector(spec, fraction=0.2, minimum=0, local=local, sinks=sinks)
        for (_, _, i), listed in lists_of(select(mass, *on_device([504], [600], [96]))).items():
            rows = range(504 + 24 * i, 504 + 24 * (i + 1))
            always, _, keys = kinds_of_tiles(spec, rows, 600, local, sinks)
            assert always <= set(listed)
            assert len(set(listed) - always) == math.ceil(0.2 * keys / 16)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_budget_per_head_is_each_head_with_its_own(pooled):
    """Check static and traced fractions; when pooled, each head's list is a prefix of one ranking."""
    rng = np.random.default_rng(8)
    spec, fractions = AttentionSpec(tile=16, query_tile=24), (0.0, 0.08, 1.0, 0.3)
    mass = jnp.asarray(rng.random((3, 4, 4, 30)), jnp.float32)
    positions = dict(zip(("q_start", "kv_len", "q_len"), on_device([384, 3, -5], [480, 99, 40], [96, 96, 45])))
    rest = {"minimum": 20, "local": 30, "sinks": 5, "pooled": pooled, **positions}
    traced = jit(lambda fraction: select_tiles(mass, spec, fraction=fraction, capacity=30, **rest))
    found = lists_of(jit(lambda: select_tiles(mass, spec, fraction=fractions, **rest))())
    assert found == lists_of(traced(jnp.array(fractions)))
    for head, fraction in enumerate(fractions):
        alone = lists_of(traced(fraction))
        assert all(found[index] == alone[index] for index in found if index[1] == head)
    assert len({len(found[0, head, 0]) for head in range(4)}) == 4
    if pooled:
        by_length = sorted((found[0, head, 0] for head in range(4)), key=len)
        assert all(set(less) < set(more) for less, more in itertools.pairwise(by_length))


def test_lists_follow_from_positions_alone():
    """Changing later keys' masses, adding keys or cutting the rows into calls changes no list; a decode step lists what
    a prefill with one row per query tile lists."""
    rng = np.random.default_rng(9)
    budget = {"fraction": (0.1, 0.4), "minimum": 20, "local": 30, "sinks": 5}
    spec = AttentionSpec(tile=16, query_tile=24)
    select = jit(lambda mass, **at: select_tiles(mass, spec, **budget, capacity=20, **at))
    mass = rng.random((1, 2, 20, 30)).astype(np.float32)
    whole = lists_of(select(mass))
    later = mass.copy()
    later[:, :, :, 15:] = rng.random((1, 2, 20, 15)) * 100
    changed = lists_of(select(later))
    assert all(whole[index] == changed[index] for index in whole if index[2] < 10)  # rows up to 239 see tiles up to 14
    assert whole != changed
    longer = np.concatenate([mass, rng.random((1, 2, 20, 7)).astype(np.float32)], -1)
    for length, start in ((37 * 16, 0), (480, 120)):
        rows = longer[:, :, start // 24 : start // 24 + 4]
        part = lists_of(select(rows, q_start=jnp.array([start], jnp.int32), kv_len=jnp.array([length], jnp.int32)))
        assert all(part[0, k, i] == whole[0, k, i + start // 24] for _, k, i in part)

    one = AttentionSpec(tile=16, query_tile=1)
    mass = rng.random((1, 2, 100, 7)).astype(np.float32)
    prefill = lists_of(jit(lambda mass: select_tiles(mass, one, **budget))(mass))
    for row in (0, 15, 16, 63, 99):
        where = dict(zip(("q_start", "kv_len", "q_len"), on_device([row], [row + 1], [1])))
        decode = lists_of(select(mass[:, :, row : row + 1], **where))
        assert all(decode[0, k, 0] == prefill[0, k, row] for k in range(2))


def test_a_small_capacity_drops_far_tiles_first_and_own_tiles_last():
    spec = AttentionSpec(tile=16, query_tile=32)
    mass = jnp.asarray(np.random.default_rng(1).random((1, 1, 1, 20)), jnp.float32).at[..., 7].set(9).at[..., 3].set(8)
    at = on_device([288], [320], [32])
    wanted = {7: [0, 7, 15, 16, 17, 18, 19], 6: [0, 15, 16, 17, 18, 19], 2: [18, 19]}
    for capacity, tiles in wanted.items():
        chosen = selector(spec, capacity=capacity, fraction=0.1, minimum=32, local=48, sinks=1)(mass, *at)
        assert chosen.tiles[0, 0, 0].tolist() == tiles


def test_pooled_is_one_set_by_summed_mass():
    spec = AttentionSpec(tile=16, query_tile=16)
    mass = np.zeros((1, 2, 1, 16), np.float32)
    mass[0, 0, 0, [2, 5]] = 3, 1
    mass[0, 1, 0, [7, 5]] = 3, 2.5
    at = (jnp.array([240], jnp.int32), jnp.array([256], jnp.int32), jnp.array([16], jnp.int32))
    apart = selector(spec, fraction=0.05, minimum=1)(jnp.asarray(mass), *at)
    together = selector(spec, pooled=True, fraction=0.05, minimum=1)(jnp.asarray(mass), *at)
    assert apart.tiles[0, :, 0, :2].tolist() == [[2, 15], [7, 15]]
    assert together.tiles[0, :, 0, :2].tolist() == [[5, 15], [5, 15]]
    assert together.tiles.shape == apart.tiles.shape
    assert together.count.tolist() == [[[2], [2]]]


def test_nan_and_negative_zero_mass_count_as_none():
    spec = AttentionSpec(tile=16, query_tile=16)
    mass = jnp.zeros((1, 1, 1, 16)).at[0, 0, 0, 3].set(jnp.nan).at[0, 0, 0, 0].set(-0.0).at[0, 0, 0, 9].set(2e-38)
    at = (jnp.array([240], jnp.int32), jnp.array([256], jnp.int32), jnp.array([16], jnp.int32))
    chosen = selector(spec, fraction=0.1875, minimum=1)(mass, *at)
    assert lists_of(chosen)[0, 0, 0] == [0, 1, 9, 15]


jit_find_marks = jit(find_marks)


@pytest.mark.parametrize("num_tiles", [1, 31, 32, 33, 1000])
def test_keep_largest_and_find_marks_equal_a_sort(num_tiles):
    rng = np.random.default_rng(num_tiles)
    rank = rng.integers(-1, 40, (2, 2, 3, num_tiles)).astype(np.int32)
    count = np.minimum(rng.integers(0, num_tiles + 1, rank.shape[:3]), (rank >= 0).sum(-1)).astype(np.int32)
    kept = np.asarray(jit(keep_largest)(rank, count))
    nth = np.broadcast_to(np.arange(1, num_tiles + 1, dtype=np.int32), rank.shape)
    found = np.asarray(jit_find_marks(kept, nth))
    for index in np.ndindex(*count.shape):
        order = np.lexsort((np.arange(num_tiles), -rank[index]))[: count[index]]
        assert np.flatnonzero(kept[index]).tolist() == sorted(order)
        assert found[index][: count[index]].tolist() == sorted(order)


def drawn_marks(kind, shape, rng):
    share = {"empty": 0.0, "few": 0.02, "half": 0.5, "all": 1.0}.get(kind)
    if share is not None:
        return rng.random(shape) < share
    mark = np.zeros(shape, bool)  # the first and last bit of each word, and the row's last bit
    mark[..., ::WORD], mark[..., WORD - 1 :: WORD], mark[..., -1] = True, True, True
    return mark


@pytest.mark.parametrize("kind", ["empty", "few", "half", "all", "edges"])
@pytest.mark.parametrize("num_tiles", [1, 32, 33, 200])
def test_the_nth_mark_is_found_where_there_is_one(num_tiles, kind):
    """nth is unordered and repeated, includes 0 and values past the last mark, and has 1 or 50 entries per row."""
    rng = np.random.default_rng(num_tiles)
    mark = drawn_marks(kind, (2, 2, 3, num_tiles), rng)
    for places in (1, 50):
        nth = rng.integers(0, num_tiles + 3, (*mark.shape[:3], places)).astype(np.int32)
        found = np.asarray(jit_find_marks(mark, nth))
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


FRACTIONS = {1: [0.4], 7: [1.0], 33: [0.02, 0.4], 99: [0.4, 1.0], None: [0.02, 0.4, 1.0]}
"""Capacity -> fractions of 99 tiles, some above the capacity; few, because each pair compiles a program."""


@pytest.mark.parametrize("kind", MASSES)
@pytest.mark.parametrize("capacity", FRACTIONS)
def test_lists_equal_a_sort_at_every_capacity(kind, capacity):
    """Without a causal mask or padding every tile competes; entries past count repeat the last id."""
    spec = AttentionSpec(tile=16, query_tile=16, causal=False)
    rng = np.random.default_rng(3)
    mass = MASSES[kind](rng, (2, 2, 3, 99)).astype(np.float32)
    at = [jnp.full(2, n, jnp.int32) for n in (0, 99 * 16, 3 * 16)]
    for fraction in FRACTIONS[capacity]:
        tiles, count = selector(spec, capacity=capacity, fraction=fraction, minimum=16)(jnp.asarray(mass), *at)
        tiles, count = np.asarray(tiles), np.asarray(count)
        wanted_count = min(1 + math.ceil(fraction * 99 - 1e-3), capacity or 99, 99)
        assert (count == wanted_count).all()
        for b, k, i in np.ndindex(*mass.shape[:3]):
            order = sorted(range(99), key=lambda j: (j != i, -mass[b, k, i, j], j))
            wanted = sorted(order[:wanted_count])
            assert tiles[b, k, i].tolist() == wanted + [wanted[-1]] * (tiles.shape[-1] - wanted_count)


@pytest.mark.parametrize("shape", [(1, 8, 64, 512), (4, 8, 1, 512)])
def test_nothing_is_looked_up_by_element(shape):
    """A TPU gathers, scatters and sorts one element at a time: 50 ms per call in place of 1 ms."""
    text = jax.jit(lambda m: select_tiles(m, AttentionSpec())).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).as_text()
    assert re.search(r"stablehlo\.reduce\b", text)
    assert not re.findall(r"stablehlo\.\w*(?:gather|scatter|sort)\w*", text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": -0.1}, "fraction=-0.1 must be from 0 to 1"),
        ({"fraction": (0.5,) * 2}, r"shape \(2,\) must be one number or num_kv_heads=1 numbers"),
        ({"fraction": (1.5,)}, "must be from 0 to 1"),
        ({"fraction": float("nan")}, "must be from 0 to 1"),
        ({"minimum": -1}, "minimum=-1 must be at least 0 keys"),
        ({"local": -1}, "local=-1 must be at least 0 keys"),
        ({"sinks": -1}, "sinks=-1 must be at least 0 keys"),
        ({"capacity": 0}, "capacity=0 must be at least 1"),
    ],
)
def test_bad_budgets_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        select_tiles(jnp.ones((1, 1, 1, 4)), AttentionSpec(), **options)


def test_a_traced_fraction_needs_a_capacity():
    with pytest.raises(ValueError, match="pass capacity to select_tiles"):
        jit(lambda f: select_tiles(jnp.ones((1, 1, 1, 4)), AttentionSpec(), fraction=f))(0.5)


def test_bad_mass_is_named():
    with pytest.raises(ValueError, match=r"mass\.shape=\(1, 4\) must have four sizes"):
        select_tiles(jnp.ones((1, 4)), AttentionSpec())
