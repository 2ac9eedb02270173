"""Policies in a running decoder: which keys each layer and head reads, and that nothing else changes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import random_params

from tessera.attention import dispatch
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection, call_shapes
from tessera.models.cache import init_cache, quantise
from tessera.models.decoder import forward, logits
from tessera.models.layers import Params
from tessera.sparse.baselines import Dense, Oracle, Window
from tessera.sparse.contract import Reads
from tessera.sparse.kascade import Kascade
from tessera.sparse.reads import count_read, count_visible

CONFIG = tiny.config(vocab_size=32, intermediate_size=32, num_layers=4, head_dim=8)
KASCADE = Kascade(
    anchors=(0, 1), head_map=((0, 1), (0, 1), (1, 0), (1, 1)), tile=16, query_tile=8, fraction=0.1, minimum=32
)
OWN = replace(KASCADE, own=(2,), head_map=((0, 1), (0, 1), (0, 1), (1, 0)), local=16, sinks=16, score_keys=4)
"""Layer 2 chooses its own tiles from means of 4 keys, and layer 3 reuses its choice."""
BUDGETS = replace(OWN, budgets=((0, 0), (0, 0), (0.0, 0.3), (1.0, 0.1)))
"""OWN with a budget per layer and head, the share of keys read: none, a third, all, a tenth."""
WINDOW = Window(window=32, sinks=8, tile=16, query_tile=1)
LENGTH = 160
"""Tokens in each of a call's two rows. Most calls share this shape, as each shape compiles a program per policy."""


@pytest.fixture(scope="module")
def stacked():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def unrolled(stacked):
    layers = tuple(jax.tree.map(lambda a, i=i: a[i], stacked.layers) for i in range(CONFIG.num_layers))
    return Params(embed=stacked.embed, layers=layers, final_norm=stacked.final_norm, head=stacked.head)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, LENGTH)).astype(np.int32)


@partial(jax.jit, static_argnames=("config", "policy"))
def step(params, rows, cache, start, lengths, *, config, policy):
    positions = Positions(start, jnp.where(lengths > 0, start + lengths, 0), lengths)
    hidden, cache, state = forward(params, rows, cache, positions, config=config, policy=policy)
    return logits(params, hidden), cache, state


def run(params, rows, policy, *, config=CONFIG, start=None, lengths=None, cache=None):
    """Run one call on a cache of 256 keys; return (logits, reads, cache, state)."""
    batch, width = rows.shape
    start = np.zeros(batch, np.int32) if start is None else np.asarray(start, np.int32)
    lengths = np.full(batch, width, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    stack = not isinstance(params.layers, tuple)
    cache = init_cache(config, batch, 256, dtype=jnp.float32, stacked=stack) if cache is None else cache
    out, cache, state = step(params, rows, cache, start, lengths, config=config, policy=policy)
    return np.asarray(out), policy.reads(state), cache, state


def density(reads: Reads):
    return np.asarray(reads.read) / np.asarray(reads.visible)


def attend_by_hand(q, k, v, allowed_BNTS):
    """Compute softmax attention over the allowed keys in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, groups, axis=2) for a in (k, v))
    z = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    z = np.where(allowed_BNTS, z, -np.inf)
    w = np.exp(z - z.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", w / w.sum(-1, keepdims=True), v)


def allowed_by(selection, spec, batch, heads, width, num_keys, start=0):
    """Return the mask [B,K,T,S] of a selection: keys of listed tiles, up to the row's own position."""
    allowed = np.zeros((batch, heads, width, num_keys), bool)
    tiles, count = np.asarray(selection.tiles), np.asarray(selection.count)
    for b, h, t in np.ndindex(batch, heads, width):
        i = t // spec.query_tile
        for tile in tiles[b, h, i, : count[b, h, i]]:
            allowed[b, h, t, tile * spec.tile : (tile + 1) * spec.tile] = True
        allowed[b, h, t, start + t + 1 :] = False
    return allowed


def qkv(seed, width=96, num_keys=96, batch=1):
    rng = np.random.default_rng(seed)
    shapes = [(batch, width, 4, 8), (batch, num_keys, 2, 8), (batch, num_keys, 2, 8)]
    return tuple(2 * rng.normal(size=shape).astype(np.float32) for shape in shapes)


def whole(width):
    return Positions(*(np.array([x], np.int32) for x in (0, width, width)))


def start_state(policy, q, k):
    return policy.init_state(len(policy.head_map), call_shapes(q, k), AttentionSpec())


def after_anchor(policy, seed=0):
    """Return the state after anchor layer 0 attended to q, k and v drawn from `seed`."""
    q, k, v = qkv(seed)
    return attend(policy, 0, q, k, v, start_state(policy, q, k))[1]


@partial(jax.jit, static_argnums=(0, 1), static_argnames="window")
def attend(policy, layer, q, k, v, state, *, window=None):
    """Run one layer of a policy over a whole sequence."""
    return policy.attend(layer, q, KeyValues.of(k, v), AttentionSpec(window=window), whole(q.shape[1]), state)


@pytest.mark.parametrize(
    ("policy", "layer"),
    [
        (OWN, 2),
        (replace(BUDGETS, own=(3,), head_map=((0, 1),) * 4, budgets=((0, 0), (0, 0), (0.3, 0.3), (1.0, 0.1))), 3),
    ],
    ids=["reused", "budgets"],
)
def test_a_layer_chooses_from_int8_keys_as_from_the_numbers_they_mean(policy, layer):
    q, k, v = qkv(5)
    k = (
        k * np.exp(2 * np.sin(np.arange(96)))[None, :, None, None]
    )  # scales of many sizes: without them, other tiles win
    (k8, k_scale), (v8, v_scale) = quantise(k), quantise(v)
    scales = jnp.moveaxis(jnp.stack([k_scale, v_scale], 3), 1, 3)
    int8, q = KeyValues.of(k8, v8)._replace(scales=scales), jnp.asarray(q)
    meant = KeyValues.of(*(x * s[..., None].astype(jnp.float32) for x, s in ((k8, k_scale), (v8, v_scale))))
    state = after_anchor(policy)
    run = jax.jit(lambda kv: policy.attend(layer, q, kv, AttentionSpec(), whole(96), state))
    (out, after), (expected, wanted) = run(int8), run(meant)
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_array_equal(after.reads.read, wanted.reads.read)


@pytest.mark.parametrize(
    "policy",
    [
        replace(KASCADE, fraction=1.0),
        # hand-made masks below check these
        pytest.param(Oracle(tile=16, query_tile=8, fraction=1.0), marks=pytest.mark.exhaustive),
        pytest.param(Window(window=512, tile=16), marks=pytest.mark.exhaustive),
    ],
)
def test_reading_every_tile_is_dense(stacked, tokens, policy):
    dense, dense_reads, _, _ = run(stacked, tokens, Dense())
    out, reads, _, _ = run(stacked, tokens, policy)
    np.testing.assert_allclose(out, dense, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(reads.read, dense_reads.read)
    np.testing.assert_array_equal(reads.visible, dense_reads.visible)
    assert np.asarray(dense_reads.read)[0, 0] == CONFIG.num_kv_heads * LENGTH * (LENGTH + 1) // 2


@pytest.mark.parametrize(
    "policy",
    [
        KASCADE,
        BUDGETS,
        # identity and pooled change only the head map and the budgets
        pytest.param(replace(KASCADE, heads="identity"), marks=pytest.mark.exhaustive),
        pytest.param(replace(KASCADE, heads="pooled"), marks=pytest.mark.exhaustive),
    ],
)
def test_scanned_layers_equal_unrolled_ones(stacked, unrolled, tokens, policy):
    scanned, scanned_reads, _, _ = run(stacked, tokens, policy)
    plain, plain_reads, _, _ = run(unrolled, tokens, policy)
    np.testing.assert_allclose(scanned, plain, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(scanned_reads.read, plain_reads.read)


def test_anchors_are_dense_and_reuse_layers_sparse(stacked, tokens):
    out, reads, _, _ = run(stacked, tokens, KASCADE)
    dense, _, _, _ = run(stacked, tokens, Dense())
    found = density(reads)
    np.testing.assert_array_equal(found[:2], 1.0)
    assert np.all(found[2:] < 0.5)
    assert np.all(found[2:] > 0.1)
    assert np.abs(out - dense).max() > 1e-3  # the approximation shows, so this did not run dense


def test_each_layer_calls_the_kernel_of_its_role(unrolled, tokens, monkeypatch):
    """Anchor 0 has no reuse layer and anchor 3 is the last layer, so both run plain dense; only anchor 1 scores."""
    policy = replace(KASCADE, anchors=(0, 1, 3))
    called = []

    attend = dispatch.attend

    def spy(q, kv, spec, *, selection=None, **where):
        called.append(dispatch.choose(spec, kv.shapes(q, selection)).role)
        return attend(q, kv, spec, selection=selection, **where)

    monkeypatch.setattr(dispatch, "attend", spy)
    zeros = np.zeros(1, np.int32)
    cache = init_cache(CONFIG, 1, 256, dtype=jnp.float32, stacked=False)
    positions = Positions(zeros, zeros + 64, zeros + 64)
    trace = partial(forward, config=CONFIG)
    jax.eval_shape(lambda c: trace(unrolled, tokens[:1, :64], c, positions, policy=policy)[0], cache)
    assert called == ["dense", "score", "sparse", "dense"]
    assert called == list(policy.roles())
    called.clear()
    jax.eval_shape(lambda c: trace(unrolled, tokens[:1, :64], c, positions, policy=Dense())[0], cache)
    assert called == ["dense"]  # dense layers are alike, so that they share one trace


@pytest.mark.parametrize(("heads", "order"), [("remap", (1, 0)), ("identity", (0, 1))])
def test_reuse_layers_attend_to_their_own_keys_and_values_under_the_head_map(heads, order):
    policy = replace(KASCADE, anchors=(0,), head_map=((0, 1), (1, 0)), heads=heads)
    state = after_anchor(replace(policy, heads="remap"))  # both cases use the anchor's choice under remap
    q, k, v = qkv(1)
    out, after = attend(policy, 1, q, k, v, state)
    spec = AttentionSpec(tile=16, query_tile=8)
    allowed = allowed_by(state.choice, spec, 1, 2, 96, 96)
    assert (allowed[:, 0] != allowed[:, 1]).any()  # the two heads of the anchor chose differently
    expected = attend_by_hand(q, k, v, np.repeat(allowed[:, order], 2, axis=1))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    assert after.reads.read[1, 0] == allowed.sum()
    assert after.reads.visible[1, 0] == 2 * 96 * 97 // 2


def test_pooled_heads_share_one_selection():
    policy = replace(KASCADE, anchors=(0,), head_map=((0, 1), (1, 0)), heads="pooled")
    selection = after_anchor(policy).choice
    np.testing.assert_array_equal(selection.tiles[:, 0], selection.tiles[:, 1])
    apart = after_anchor(replace(policy, heads="remap")).choice
    assert (np.asarray(apart.tiles[:, 0]) != np.asarray(apart.tiles[:, 1])).any()


def test_what_is_not_selected_is_not_read():
    """Changing keys and values of unselected tiles leaves a reuse layer's output bit for bit the same."""
    policy = replace(KASCADE, anchors=(0,), head_map=((0, 1), (0, 1)), heads="pooled", query_tile=96)
    q, k, v = qkv(1)
    listed = Selection(np.full((1, 2, 1, 2), [1, 4], np.int32), np.full((1, 2, 1), 2, np.int32))
    state = start_state(policy, q, k)._replace(choice=listed)
    tile = np.arange(96) // 16
    spoil = ~np.isin(tile, [1, 4])[None, :, None, None]
    far = np.float32(1e4)
    clean, _ = attend(policy, 1, q, k, v, state)
    spoilt, _ = attend(policy, 1, q, np.where(spoil, far, k), np.where(spoil, -far, v), state)
    np.testing.assert_array_equal(clean, spoilt)
    v[0, 70] += 1  # key 70 lies in tile 4, which is listed
    changed, _ = attend(policy, 1, q, k, v, state)
    assert (np.asarray(changed) != np.asarray(clean)).any()


# OWN adds no case: it reads like BUDGETS and leaves a choice like KASCADE.
ALSO_OWN = pytest.param(OWN, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("policy", [KASCADE, ALSO_OWN, BUDGETS, WINDOW])
def test_a_ragged_batch_equals_each_sequence_alone(stacked, tokens, policy):
    """Each sequence runs alone next to a copy of itself, which needs no second program."""
    lengths = [LENGTH, 93]
    together, reads, cache, _ = run(stacked, tokens, policy, lengths=lengths)
    next_rows = tokens[:, :1]
    after, after_reads, _, _ = run(stacked, next_rows, policy, start=lengths, cache=cache)
    for b, length in enumerate(lengths):
        alone, alone_reads, cache, _ = run(stacked, tokens[[b, b]], policy, lengths=[length, length])
        np.testing.assert_allclose(together[b, :length], alone[0, :length], rtol=0, atol=2e-5)
        np.testing.assert_array_equal(np.asarray(reads.read)[:, b], np.asarray(alone_reads.read)[:, 0])
        np.testing.assert_array_equal(np.asarray(reads.visible)[:, b], np.asarray(alone_reads.visible)[:, 0])
        decoded, decoded_reads, _, _ = run(stacked, next_rows[[b, b]], policy, start=[length, length], cache=cache)
        np.testing.assert_allclose(after[b], decoded[0], rtol=0, atol=2e-5)
        np.testing.assert_array_equal(np.asarray(after_reads.read)[:, b], np.asarray(decoded_reads.read)[:, 0])


def test_each_head_reads_its_own_budget():
    """A head with budget 1 is dense; a head with budget 0 reads only the keys that are always read."""
    spec, where = AttentionSpec(tile=16, query_tile=8), whole(96)
    q, k, v = qkv(1)
    shapes = call_shapes(q, k)
    state = attend(BUDGETS, 2, q, k, v, start_state(BUDGETS, q, k))[1]

    @partial(jax.jit, static_argnums=(0, 1))
    def select(layer, heads, state):
        masses = BUDGETS.map_heads(layer, state.choice)
        ones = [replace(BUDGETS, budgets=(), fraction=fraction) for fraction in heads]
        return BUDGETS.chosen(layer, spec, where, shapes, state), [
            one.select(layer, masses, spec, where, shapes) for one in ones
        ]

    for layer, heads in ((2, (0.0, 0.3)), (3, (1.0, 0.1))):
        listed, each = jax.device_get(select(layer, heads, state))
        for head, alone in enumerate(each):
            np.testing.assert_array_equal(listed.count[:, head], alone.count[:, head])
            for i, count in enumerate(listed.count[0, head]):
                np.testing.assert_array_equal(listed.tiles[0, head, i, :count], alone.tiles[0, head, i, :count])
    dense = attend_by_hand(q, k, v, np.tril(np.ones((96, 96), bool))[None, None])
    out, after = attend(BUDGETS, 3, q, k, v, state)
    np.testing.assert_allclose(out[:, :, :2], dense[:, :, :2], rtol=0, atol=1e-5)
    assert float(after.reads.read[3, 0]) < 2 * 96 * 97 / 2


def test_layers_that_choose_for_themselves_read_the_best_tiles_of_their_own_scores(stacked, tokens):
    """With exact scores of every row, a policy whose layers all choose for themselves equals the oracle."""
    policy = replace(KASCADE, anchors=(), own=(0, 1, 2, 3), head_map=((0, 1),) * 4, score_keys=1, local=16, sinks=16)
    oracle = Oracle(tile=16, query_tile=8, fraction=0.1, minimum=32, local=16, sinks=16)
    ours, reads, _, _ = run(stacked, tokens, policy)
    theirs, oracle_reads, _, _ = run(stacked, tokens, oracle)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(reads.read, oracle_reads.read)
    assert np.all(density(reads) < 0.75)
    assert policy.roles() == ("own",) * 4


@pytest.mark.parametrize("policy", [replace(KASCADE, query_tile=1), WINDOW])
def test_decode_after_prefill_is_a_longer_prefill(stacked, tokens, policy):
    """With one row per query tile, prefill and decode select by the same masses; new tokens are selectable at once."""
    longer, longer_reads, _, _ = run(stacked, tokens, policy, lengths=[130, 130])
    out, reads, cache, _ = run(stacked, tokens, policy, lengths=[126, 126])
    read = np.asarray(reads.read)
    for position in range(126, 130):
        row = tokens[:, position : position + 1]
        out, reads, cache, _ = run(stacked, row, policy, start=[position, position], cache=cache)
        read = read + np.asarray(reads.read)
        np.testing.assert_allclose(out[:, 0], longer[:, position], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(read, longer_reads.read)


@pytest.mark.parametrize("policy", [KASCADE, ALSO_OWN, BUDGETS])
def test_chunked_prefill_is_the_whole_prefill(stacked, tokens, policy):
    out, reads, _, _ = run(stacked, tokens, policy)
    first, first_reads, cache, _ = run(stacked, tokens[:, :80], policy)
    second, second_reads, _, _ = run(stacked, tokens[:, 80:], policy, start=[80, 80], cache=cache)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), out, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(first_reads.read) + np.asarray(second_reads.read), reads.read)


def test_kascade_under_a_sliding_window():
    """With fraction 1, an anchor and a reuse layer read exactly the keys in the window."""
    policy = replace(KASCADE, anchors=(0,), head_map=((0, 1), (0, 1)), fraction=1.0)
    q, k, v = qkv(2)
    shown = np.tril(np.ones((96, 96), bool)) & ~np.tril(np.ones((96, 96), bool), -48)
    state = start_state(policy, q, k)
    for layer in (0, 1):
        out, state = attend(policy, layer, q, k, v, state, window=48)
        np.testing.assert_allclose(out, attend_by_hand(q, k, v, shown[None, None]), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.stack(state.reads)[:, :, 0], 2 * shown.sum())


@pytest.mark.parametrize("window", [None, 40])
def test_reads_are_counted_exactly(window):
    """Compare with a mask built key by key: ragged batch, padding rows, a start inside a tile, varying counts."""
    rng = np.random.default_rng(3)
    spec = AttentionSpec(tile=16, query_tile=8, window=window)
    positions = Positions(*(np.array(x, np.int32) for x in ([37, 5], [57, 18], [20, 13])))
    q, k, _ = qkv(0, 20, 80, batch=2)
    tiles = np.sort(np.argsort(rng.random((2, 2, 3, 5)), -1)[..., :4], -1).astype(np.int32)
    count = rng.integers(0, 5, (2, 2, 3)).astype(np.int32)
    selection = Selection(tiles, count)
    read, visible = np.zeros((2, 2)), np.zeros((2, 2))
    start, kv_len, q_len = (np.asarray(x).tolist() for x in positions)
    for b, h, t, s in np.ndindex(2, 2, 20, 80):
        p = start[b] + t
        seen = t < q_len[b] and s < kv_len[b] and s <= p and (window is None or s > p - window)
        visible[b, h] += seen
        read[b, h] += seen and s // 16 in tiles[b, h, t // 8, : count[b, h, t // 8]]
    shapes = call_shapes(q, k)
    found = jax.jit(lambda *args: (count_read(args[0], spec, args[1], shapes), count_visible(spec, args[1], shapes)))
    np.testing.assert_array_equal(found(selection, positions), (read, visible))


def test_the_window_reads_sinks_and_newest_keys_rounded_to_tiles():
    policy = Window(window=32, sinks=8, tile=16, query_tile=8)
    q, k, v = qkv(0, 96, 96)
    out, reads = attend(policy, 0, q, k, v, policy.init_state(1, call_shapes(q, k), AttentionSpec()))
    t, s = np.arange(96)[:, None], np.arange(96)
    oldest = (t // 8) * 8 - 31  # the oldest local key of the query tile's first row
    allowed = ((s < 16) | (s // 16 >= np.maximum(oldest, 0) // 16)) & (s <= t)
    expected = attend_by_hand(q, k, v, np.broadcast_to(allowed, (1, 4, 96, 96)))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    assert reads.read[0, 0] == 2 * allowed.sum()
    asked = ((s < 8) | (s > t - 32)) & (s <= t)
    assert not (asked & ~allowed).any()
    assert (allowed.sum(1) - asked.sum(1)).max() <= 8 + 2 * 16


def test_the_oracle_keeps_the_heaviest_tiles():
    policy = Oracle(tile=16, query_tile=8, minimum=32)
    q, k, v = qkv(5)
    out = attend(policy, 0, q, k, v, policy.init_state(1, call_shapes(q, k), AttentionSpec()))
    spec = AttentionSpec(tile=16, query_tile=8, mass=True)
    mass = np.asarray(jax.jit(lambda *qkv: dispatch.attention(*qkv, spec).mass)(q, k, v))
    allowed = np.zeros((1, 4, 96, 96), bool)
    for h, i in np.ndindex(2, 12):
        order = mass[0, h, i].copy()
        order[i // 2] = np.inf  # the row's own tile
        visible = (i + 1) * 8
        far = -(-max(0.1 * visible, 32) // 16)
        for tile in np.argsort(-order, kind="stable")[: 1 + int(far)]:
            allowed[0, 2 * h : 2 * h + 2, i * 8 : i * 8 + 8, tile * 16 : tile * 16 + 16] = True
    allowed &= np.arange(96) <= np.arange(96)[:, None]
    np.testing.assert_allclose(out[0], attend_by_hand(q, k, v, allowed), rtol=0, atol=1e-5)
    assert out[1].read[0, 0] == allowed[:, ::2].sum()


@pytest.mark.exhaustive  # other tests cover the ends: few keys change the output, all keys give dense
def test_more_keys_bring_the_output_nearer_to_dense(stacked, tokens):
    dense, _, _, _ = run(stacked, tokens, Dense())
    errors, reads = [], []
    for policy in (KASCADE, replace(KASCADE, minimum=96)):
        out, read, _, _ = run(stacked, tokens, policy)
        errors.append(np.abs(out - dense).mean())
        reads.append(density(read)[2:].mean())
    assert errors[0] > errors[1] > 0
    assert reads[0] < reads[1] < 1


def test_a_plan_of_another_depth_is_refused(stacked, tokens):
    with pytest.raises(ValueError, match=r"num_layers=4 must be 3"):
        run(stacked, tokens, replace(KASCADE, head_map=((0, 1),) * 3))
    with pytest.raises(ValueError, match=r"num_kv_heads=2 must be 1"):
        run(stacked, tokens, replace(KASCADE, head_map=((0,),) * 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors": (1, 2)}, "must ascend from 0"),
        ({"fraction": -0.1}, "fraction=-0.1"),
        ({"minimum": -1}, "minimum=-1"),
        ({"local": -1}, "local=-1"),
        ({"sinks": -1}, "sinks=-1"),
        ({"own": (1,)}, r"own=\[1\] must ascend"),
        ({"own": (3,)}, r"head_map\[3\]=\[1, 1\] must be \[0, 1, "),
        ({"budgets": ((0.5, 0.5),)}, r"budgets have shape \[1, 2\] instead of \[4, 2\]"),
        ({"budgets": ((0.5, 1.5),) * 4}, r"budgets\[0\]"),
        ({"score_keys": 3, "own": (2,), "head_map": ((0, 1),) * 4}, "keys=3 must divide tile=16"),
        ({"heads": "none"}, "heads='none'"),
        ({"tile": 20}, "tile=20"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(KASCADE, **changes)
