"""Everything that serving composes: each cell's answer is that of contiguous keys and of the request alone.

The cells cover every combination of values of three dimensions. A sample runs by default, all with `--exhaustive`.
"""

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch import Batch
from tiny import CONFIG as TINY
from tiny import PLAN, random_params

from tessera.generate import Model
from tessera.runtime.pool import Paging
from tessera.runtime.requests import End, Request
from tessera.runtime.step import read_head
from tessera.sparse.baselines import Dense
from tessera.sparse.kascade import Kascade

UNIT, LENGTH, NEW = 128, 300, 12
SMALL = replace(PLAN, num_layers=2, head_map=((0, 1), (1, 0)), tile=16, query_tile=32, crossover_tokens=100)
DIMENSIONS = {
    "policy": ("dense", "remap", "pooled", "budgets"),
    "order": ("identity", "shuffled"),
    "prefill": ("whole", "chunked", "packed"),
    "prefix": ("cold", "hit", "refilled"),
    "company": ("alone", "crowd"),
    "preempted": ("never", "every step"),
    "cache": (None, "int8"),
    "page": (64, 128),
    "groups": (1, 3, 4),
}
"""Which keys attention reads; the order of a sequence's pages; prefills of 384 rows, of 128, or of two prompts in
turns; a prefix that nobody computed, that the cache holds, or that was evicted; other requests beside; requests that
give way; dtype of keys; positions per page; query heads per KV head."""


def cover(dimensions: dict[str, tuple], strength: int = 3) -> list[dict]:
    """Return cells that cover every combination of values of `strength` dimensions, found greedily."""
    names, cells = list(dimensions), list(product(*dimensions.values()))
    np.random.default_rng(0).shuffle(cells)
    groups = list(combinations(range(len(names)), strength))

    def covers(cell: tuple) -> set[tuple]:
        return {(group, tuple(cell[i] for i in group)) for group in groups}

    left, found = set().union(*map(covers, cells)), []
    while left:
        best = max(
            cells[len(found) * 20 % len(cells) :][:200] if len(left) > 50 else cells,
            key=lambda c: len(covers(c) & left),
        )
        left -= covers(best)
        found.append(dict(zip(names, best)))
    return found


CELLS = cover(DIMENSIONS)
SAMPLE = 3
"""Cells that run by default."""


@cache
def model_of(groups: int, cache: str | None, policy: str) -> Model:
    config = replace(TINY, num_layers=2, num_heads=2 * groups, max_positions=512, eos_ids=())
    params = jax.tree.map(jnp.asarray, random_params(config))
    kascade = Kascade.from_plan(SMALL)
    policies = {
        "dense": Dense(),
        "remap": kascade,
        "pooled": replace(kascade, heads="pooled", head_map=((0, 1), (0, 1))),
        "budgets": replace(
            kascade,
            anchors=(),
            own=(0, 1),
            heads="identity",
            head_map=((0, 1), (0, 1)),
            budgets=((0.2, 1.0), (0.3, 0.1)),
        ),
    }
    return Model(config=config, params=params, tokenizer=None, policy=policies[policy], kv_dtype=cache)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng((length, seed)).integers(0, 256, length).tolist()


@cache
def expected(groups: int, dtype: str | None, policy: str) -> tuple[int, ...]:
    """Answer greedily from contiguous keys, alone, one unit of the prompt at a time."""
    model, tokens = model_of(groups, dtype, policy), prompt(LENGTH, 0)
    batch = Batch(model.params, model.config, model.policy, rows=1, num_keys=512, size=UNIT, kv_dtype=dtype)
    for start in range(0, LENGTH, UNIT):
        batch.policy = model.policy.at_position(start, UNIT)
        hidden, _ = batch.chunk([tokens[start : start + UNIT]], start)
    scores, found = read_head(model.params, hidden.last), []
    for position in range(LENGTH, LENGTH + NEW):
        token = jnp.argmax(scores, -1).astype(jnp.int32)
        found.append(int(token[0]))
        batch.policy = model.policy.decode_at(position, UNIT)
        scores, _ = batch.decode(token, np.array([position], np.int32), np.array([True]))
    return tuple(found)


def name(cell: dict) -> str:
    return "-".join(str(value).replace(" ", "_") for value in cell.values())


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=name(c), marks=() if n < SAMPLE else pytest.mark.exhaustive) for n, c in enumerate(CELLS)],
)
def test_every_composition_gives_the_tokens_of_contiguous_keys_alone(cell):
    model = model_of(cell["groups"], cell["cache"], cell["policy"])
    paging = Paging(
        num_pages=12 * UNIT // cell["page"] + 1,
        page=cell["page"],
        unit=UNIT,
        sizes=(3 * UNIT, UNIT) if cell["prefill"] == "whole" else (UNIT,),
        batches=(1, 3),
    )
    engine = model.engine(slots=3, num_keys=512, paging=paging)
    wanted = Request(prompt=prompt(LENGTH, 0), max_new_tokens=NEW)
    other = Request(prompt=prompt(LENGTH, 1), max_new_tokens=NEW)
    rng = np.random.default_rng(1)

    def shuffle() -> None:
        if cell["order"] == "shuffled":
            rng.shuffle(engine.lane.prefix.pages._free)

    if cell["prefix"] != "cold":
        engine.submit(replace(wanted, prompt=wanted.prompt[:-30] + prompt(30, 9), max_new_tokens=1))
        list(engine.drain())
    if cell["prefix"] == "refilled":
        for seed in range(2, 8):
            engine.submit(replace(other, prompt=prompt(400, seed), max_new_tokens=1))
            list(engine.drain())
    ids = [engine.submit(wanted)]
    if cell["prefill"] == "packed" or cell["company"] == "crowd":
        ids.append(engine.submit(other))
    if cell["company"] == "crowd":
        ids.append(engine.submit(replace(wanted, prompt=prompt(40, 3))))
    ends = {}
    while engine.busy:
        for event in engine.step():
            assert not isinstance(event, Exception)
            if isinstance(event, End):
                ends[event.id] = event
        shuffle()
        lane = engine.lane
        rows = [row for row in lane._running if row.open]
        if cell["preempted"] == "every step" and rows and not any(row.prefilling for row in rows):
            lane._give_way(rows[int(rng.integers(len(rows)))])
    assert set(ends) == set(ids)
    assert tuple(ends[ids[0]].generation.tokens) == expected(cell["groups"], cell["cache"], cell["policy"])
    reused = {"cold": 0, "hit": 256, "refilled": 0}[cell["prefix"]]
    assert ends[ids[0]].reused_tokens == reused
