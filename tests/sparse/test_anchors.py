"""Choosing anchors: each formula against brute force or its definition written out."""

from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest

from tessera.sparse.anchors import (
    anchor_of,
    best_heads,
    captured,
    choose_anchors,
    default_anchors,
    head_table,
    importance,
    mapped,
    similarity,
)


def total(score, anchors):
    """Compute the objective: the sum of each layer's score under the last anchor at or before that layer."""
    return sum(score[max(a for a in anchors if a <= layer)][layer] for layer in range(len(score)))


@pytest.mark.parametrize("num_layers", range(1, 8))
def test_dynamic_program_equals_brute_force(num_layers):
    rng = np.random.default_rng(num_layers)
    for num_anchors in range(1, num_layers + 1):
        choices = [(0, *rest) for rest in combinations(range(1, num_layers), num_anchors - 1)]
        for _ in range(12):
            score = rng.random((num_layers, num_layers))
            best = max(choices, key=lambda anchors: total(score, anchors))
            assert choose_anchors(score, num_anchors) == best
        # With many ties, any choice is right that reaches the best value.
        score = rng.integers(0, 3, (num_layers, num_layers)).astype(float)
        found = choose_anchors(score, num_anchors)
        assert found[0] == 0
        assert len(found) == num_anchors
        assert total(score, found) == max(total(score, anchors) for anchors in choices)


def test_dynamic_program_ignores_what_lies_below_the_diagonal():
    score = np.triu(np.random.default_rng(0).random((5, 5)))
    spoiled = score + np.tril(np.full((5, 5), np.nan), -1)
    assert choose_anchors(spoiled, 3) == choose_anchors(score, 3)


def test_dynamic_program_refuses_nonsense():
    with pytest.raises(ValueError, match="num_anchors=0"):
        choose_anchors(np.ones((3, 3)), 0)
    with pytest.raises(ValueError, match="num_anchors=4"):
        choose_anchors(np.ones((3, 3)), 4)
    with pytest.raises(ValueError, match="NaN"):
        choose_anchors(np.full((3, 3), np.nan), 2)


def test_default_number_of_anchors_is_the_papers_proportion():
    assert [default_anchors(n) for n in (1, 2, 8, 12, 32, 36, 64)] == [1, 2, 2, 2, 5, 6, 10]


def test_similarity_is_the_share_of_the_mass_that_ones_own_keys_would_have():
    rng = np.random.default_rng(1)
    mass = rng.random((2, 3, 20)).astype(np.float32)
    ids = np.stack([np.argsort(rng.random((2, 3, 20)), -1)[..., :5] for _ in range(4)]).astype(np.int32)
    own = np.argsort(-mass, -1)[..., :5].astype(np.int32)
    found = np.asarray(similarity(jnp.asarray(mass), jnp.asarray(ids), jnp.asarray(own)))
    assert found.shape == (4, 2, 2, 3)
    for a, theirs, mine, tile in np.ndindex(found.shape):
        expected = mass[mine, tile, ids[a, theirs, tile]].sum() / np.sort(mass[mine, tile])[-5:].sum()
        assert found[a, theirs, mine, tile] == pytest.approx(expected, rel=1e-6)
    assert np.all(found <= 1 + 1e-6)
    itself = np.asarray(similarity(jnp.asarray(mass), jnp.asarray(own)[None], jnp.asarray(own)))
    np.testing.assert_allclose(itself[0, [0, 1], [0, 1]], 1.0, rtol=1e-6)


def test_similarity_of_a_row_without_mass_is_one():
    nothing = jnp.zeros((1, 1, 8))
    ids = jnp.arange(2, dtype=jnp.int32)[None, None, None]
    assert similarity(nothing, ids, ids[0])[0, 0, 0, 0] == 1.0
    assert captured(nothing, ids).sum() == 0


def test_importance_is_one_minus_cosine_down_to_small_angles():
    rng = np.random.default_rng(2)
    x, turn = rng.standard_normal((2, 6, 32))
    for size in (1.0, 1e-2, 1e-4):
        y = x + size * turn
        exact = 1 - (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
        found = importance(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
        # In float32, an angle of 1e-4 is known to about 1e-3 of its size.
        np.testing.assert_allclose(found, exact, rtol=5e-3)


def test_each_head_takes_the_most_similar_head_of_its_anchor_many_to_one():
    table = np.zeros((2, 2, 3, 3))
    table[0, 1] = [[0.2, 0.9, 0.8], [0.7, 0.1, 0.1], [0.6, 0.2, 0.3]]  # [head of layer 0, head of layer 1]
    heads = best_heads(table)
    assert heads[0, 1].tolist() == [1, 0, 0]
    assert mapped(table, heads)[0, 1] == pytest.approx((0.7 + 0.9 + 0.8) / 3)
    assert head_table(heads, (0,)) == ((0, 1, 2), (1, 0, 0))


def test_head_table_follows_each_layers_own_anchor():
    heads = np.zeros((4, 4, 2), np.int32)
    heads[0, 1], heads[2, 3], heads[0, 3] = [1, 1], [1, 0], [0, 0]
    assert anchor_of((0, 2), 4) == (0, 0, 2, 2)
    assert head_table(heads, (0, 2)) == ((0, 1), (1, 1), (0, 1), (1, 0))
