"""The programs of `step` over a paged cache: the same logits and tokens as over a contiguous one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch import Batch
from tiny import CONFIG as TINY
from tiny import PLAN, random_params

from tessera.models.cache import init_cache
from tessera.models.pages import Pages, page_table
from tessera.sparse.baselines import Dense
from tessera.sparse.kascade import Kascade

CONFIG = replace(TINY, num_layers=2, max_positions=512)
KASCADE = Kascade.from_plan(replace(PLAN, num_layers=2, head_map=((0, 1), (1, 0))))
OWN = replace(KASCADE, anchors=(), own=(0, 1), head_map=((0, 1), (0, 1)), heads="identity")
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (150, 70)]


def contiguous(policy) -> Batch:
    params = jax.tree.map(jnp.asarray, random_params(CONFIG))
    return Batch(params, CONFIG, policy, rows=2, num_keys=256, size=64)


def paged(policy, page: int) -> Batch:
    """Return a batch whose sequences hold pages in a shuffled order, in a pool of NaN."""
    one = contiguous(policy)
    pool, count = Pages(4 * one.num_keys // page, page), one.num_keys // page
    order = np.random.default_rng(0).permutation(pool.allocate(pool.size - 1))
    used = [order[: len(prompt) // page + 1] for prompt in PROMPTS]  # room for the answers, and no page more
    used[1] = order[-len(used[1]) :]
    cache = init_cache(CONFIG, pool.size, page, dtype=jnp.float32, stacked=True)
    one.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)._replace(
        pages=jnp.asarray(page_table(used, count))
    )
    return one


def answer(one: Batch) -> list[np.ndarray]:
    """Prefill both prompts, then decode five tokens; the second sequence ends after two."""
    scores, _ = one.prefill(PROMPTS)
    steps = [np.asarray(scores)]
    for step in range(5):
        alive = np.array([True, step < 2])
        position = np.where(alive, [len(prompt) + step for prompt in PROMPTS], one.num_keys - 1).astype(np.int32)
        scores, _ = one.decode(jnp.argmax(scores, -1).astype(jnp.int32), position, alive)
        steps.append(np.asarray(scores)[alive])
    return steps


@pytest.mark.parametrize(
    "policy", [pytest.param(Dense(), marks=pytest.mark.exhaustive), KASCADE, OWN], ids=["dense", "kascade", "own"]
)
def test_a_paged_cache_gives_the_same_logits(policy):
    whole, parts = answer(contiguous(policy)), answer(paged(policy, 64))
    assert all(np.isfinite(x).all() for x in whole)
    for x, y in zip(whole, parts, strict=True):
        assert np.array_equal(x.argmax(-1), y.argmax(-1))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
