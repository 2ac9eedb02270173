"""Build rivals of a plan: policies that read as many keys at every position, but choose them by another rule.

The comparison shows what the plan's choice of keys adds. All run dense below the plan's cross-over, as the plan does.
`profile` runs one text under the plan and returns the number of keys read at each position, as a mean over layers and
heads. That number is a rival's budget. A query tile's own tiles, which hold its own positions, count toward the budget,
and so does the first tile if the rival keeps sinks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from tessera.attention import dispatch
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection
from tessera.attention.selection import find_marks, keep_largest
from tessera.core.shapes import ceil_div
from tessera.generate import Model
from tessera.measure.judge.answers import Runner
from tessera.sparse.baselines import Counted, Dense, DenseBefore
from tessera.sparse.contract import Policy
from tessera.sparse.estimate import Estimate, estimate_mass
from tessera.sparse.plan import Plan
from tessera.sparse.policies import policy_for
from tessera.sparse.reads import count_read, count_visible, record_reads

ALWAYS = 2**31 - 2
"""Rank of a query tile's own tiles: one below the largest int32, since `keep_largest` adds one to a rank."""

CONTROL, PLAN, NEAR = "control: nothing far", "the plan", "the plan's whole heads + window"
WINDOW = "window + sink"
EXACT = "own choice, tile 16"
"""Rival in which every layer chooses tiles by its own exact attention; no plan is expected to beat it with as many
keys."""
OTHER = "other plan: "
"""Prefix of the title of another plan of the same model; the plan file's name follows."""
FRONTIER = (WINDOW, EXACT, "mean keys of 4")
"""Rivals that also run at budgets other than the plan's (the frontier)."""
MAIN = (EXACT, NEAR, WINDOW, "mean keys of 4")
"""Rivals that run first, in this order."""
SHARED = ("query_tile", "crossover_tokens", "decode_crossover")
"""Fields that a rival takes from the plan."""
LEAST = 128
"""Minimum keys that a rival reads if its budget is a share of the visible keys."""

Knots = tuple[tuple[int, float], ...]
"""A budget: ascending points (position, number of keys read), with linear interpolation between them."""


def profile(model: Model, policy: Policy, tokens: Sequence[int], start: int = 0) -> Knots:
    """Run a text under a policy; return the number of keys that it reads at each position, as a budget.

    The budget has a point in the middle of every chunk from `start` on, whose value is the mean over the chunk's rows,
    all layers and all KV heads. It also has a point at `start` (one key at position 0, else extrapolated) and a point
    at the text's end (extrapolated).

    Raises:
        ValueError: the text ends at `start` or before.
    """
    if len(tokens) <= start:
        raise ValueError(f"the text of {len(tokens)} tokens must be longer than start={start}")
    runner = Runner(model, policy, len(tokens))
    starts = [chunk.start for chunk in runner.fill(tokens)]
    ends = [*starts[1:], len(tokens)]
    read = np.array([np.asarray(reads.read, float).sum() for reads in runner.pending])
    heads = model.config.num_layers * model.config.num_kv_heads
    keys = (read / heads / [end - first for first, end in zip(starts, ends)]).tolist()
    points = [((first + end) // 2, n) for first, end, n in zip(starts, ends, keys) if first >= start]
    low = (0, 1.0) if start == 0 else (start, _extrapolate(points[1::-1], start))
    return tuple((at, round(n, 1)) for at, n in (low, *points, (len(tokens), _extrapolate(points[-2:], len(tokens)))))


def _extrapolate(points: Sequence[tuple[int, float]], position: int) -> float:
    """Extend the line through two points, the nearer one last, to a position; one key more per position from one."""
    slope = 1.0 if len(points) == 1 else (points[1][1] - points[0][1]) / (points[1][0] - points[0][0])
    return points[-1][1] + slope * (position - points[-1][0])


def whole_heads(plan: Plan) -> tuple[tuple[bool, ...], ...]:
    """Return whether each head reads every key under the plan, by layer and KV head."""
    budgets = plan.budgets or ((plan.fraction,) * plan.num_kv_heads,) * plan.num_layers
    return tuple(tuple(layer in plan.anchors or budget >= 1 for budget in row) for layer, row in enumerate(budgets))


def left_for_others(keys: Knots, whole: Sequence[Sequence[bool]]) -> Knots:
    """Return the budget of the heads that do not read every key, such that all heads read `keys` on average.

    `whole` says which heads read every key, by layer and KV head.
    """
    share = np.mean(whole)
    return keys if share == 1 else tuple((at, round((k - share * (at + 1)) / (1 - share), 1)) for at, k in keys)


def flat(share: float, minimum: int, longest: int) -> Knots:
    """Return a budget of max(share * visible, minimum) keys, and at most all visible keys."""
    turn = min(int(minimum / share), longest - 1)
    return (
        (0, 1.0),
        (minimum, float(minimum)),
        (turn, float(minimum)),
        (longest, max(share * longest, float(minimum))),
    )


def scores_newest(q, kv, layer, spec, positions):
    """Score later tiles higher."""
    shape = _grid(q, kv, spec)
    return jnp.broadcast_to(jnp.arange(1, shape[-1] + 1, dtype=jnp.float32), shape)


def scores_random(q, kv, layer, spec, positions):
    """Score tiles by a hash of layer, head, tile and the query tile's position."""
    batch, heads, num_query_tiles, num_tiles = shape = _grid(q, kv, spec)
    row = positions.q_start[:, None] + jnp.arange(num_query_tiles, dtype=jnp.int32) * spec.query_tile
    parts = (row[:, None, :, None], jnp.arange(heads)[:, None, None], jnp.arange(num_tiles), jnp.asarray(layer))
    mixed = jnp.zeros(shape, jnp.uint32)
    for part in parts:  # one step of splitmix32 per part
        mixed = mixed + jnp.asarray(part, jnp.uint32) + jnp.uint32(0x9E3779B9)
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x21F0AAAD)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x735A2D97)
        mixed = mixed ^ (mixed >> 15)
    return (mixed >> 8).astype(jnp.float32)


def scores_mass(q, kv, layer, spec, positions):
    """Score each tile by its exact attention probability, summed over the query tile's rows."""
    return dispatch.attend(q, kv, replace(spec, mass=True), **positions._asdict()).mass


def scores_estimate(q, kv, layer, spec, positions, summary: str, keys: int | None = None):
    """Score tiles by attention probability, estimated from one summary per `keys` keys (None: per tile).

    Decode calls score every key by itself, without summaries.
    """
    keys = spec.tile if keys is None else min(keys, spec.tile)
    return estimate_mass(q, kv, spec, positions, Estimate(keys=keys, summary=summary))


def _grid(q: Array, kv: KeyValues, spec: AttentionSpec) -> tuple[int, int, int, int]:
    """Return the shape [B,K,I,J] of a call's scores: sequences, KV heads, query tiles, tiles."""
    batch, heads, num_keys = kv.k.shape[:3]
    return batch, heads, ceil_div(q.shape[1], spec.query_tile), ceil_div(num_keys, spec.tile)


SCORES: Final[Mapping[str, Callable[..., Array]]] = MappingProxyType(
    {
        "newest": scores_newest,
        "random": scores_random,
        "mass": scores_mass,
        "mean": partial(scores_estimate, summary="mean"),
        "mean of 4": partial(scores_estimate, summary="mean", keys=4),
        "min and max": partial(scores_estimate, summary="minmax"),
    }
)
"""Rules that score tiles: (q, kv, layer, spec, positions) -> a score per sequence, KV head, query tile and tile. Scores
are non-negative, and higher is better."""


@dataclass(frozen=True, kw_only=True)
class Matched(DenseBefore, Counted):
    """Policy in which every layer chooses tiles for itself by one rule, within a budget that depends on position.

    Attributes:
        scores: a rule of SCORES.
        keys: the budget. A query tile's own tiles are read even if they exceed it.
        whole: whether a head reads every key, whatever the budget, by layer and KV head; empty if no head does.
        tile, query_tile: as in Kascade.
        sinks: number of first tiles that are always read.
        crossover_tokens, decode_crossover: the plan's; below them every key is read.
    """

    scores: str
    keys: Knots
    whole: tuple[tuple[bool, ...], ...] = ()
    tile: int = 16
    query_tile: int = 32
    sinks: int = 1
    crossover_tokens: int = 0
    decode_crossover: int | None = None

    def __post_init__(self):
        if self.scores not in SCORES:
            raise ValueError(f"scores={self.scores!r} must be one of {', '.join(SCORES)}")
        AttentionSpec(tile=self.tile, query_tile=self.query_tile)

    @property
    def name(self) -> str:
        return "matched"

    def attend(self, layer, q, kv, spec, positions, state):
        if spec.window is not None:
            raise ValueError("rivals cannot run on this model: its configuration has a sliding window")
        spec = replace(spec, tile=self.tile, query_tile=self.query_tile)
        where, shapes = positions._asdict(), kv.shapes(q)
        visible = count_visible(spec, positions, shapes)

        def dense(q, kv):
            return dispatch.attend(q, kv, spec, **where).out, visible

        def sparse(q, kv):
            scores = SCORES[self.scores](q, kv, layer, spec, positions)
            selection = self.select(scores, positions, jnp.asarray(self.whole)[layer] if self.whole else None)
            out = dispatch.attend(q, kv, spec, **where, selection=selection).out
            return out, count_read(selection, spec, positions, shapes)

        full = [all(row) for row in self.whole]
        if isinstance(layer, int):
            out, read = (dense if full and full[layer] else sparse)(q, kv)
        elif any(full):
            out, read = jax.lax.cond(jnp.asarray(full)[layer], dense, sparse, q, kv)
        else:
            out, read = sparse(q, kv)
        return out, record_reads(state, layer, read, visible)

    def select(self, scores_BKIJ: Array, positions: Positions, whole_K: Bool[Array, " K"] | None = None) -> Selection:
        """Select each query tile's own tiles, the sinks, then the tiles with the best scores, up to the budget.

        Whole heads get every visible tile.
        """
        num_query_tiles, num_tiles = scores_BKIJ.shape[2:]
        first, last, count = self.budget(num_query_tiles, positions)
        id_J = jnp.arange(num_tiles, dtype=jnp.int32)
        seen = (id_J <= (last // self.tile)[..., None]) & (count > 0)[..., None]
        own = seen & (id_J >= (first // self.tile)[..., None])
        bits = jax.lax.bitcast_convert_type(jnp.maximum(scores_BKIJ, 0).astype(jnp.float32), jnp.int32)
        rank = jnp.where(seen[:, None], bits, -1)
        rank = jnp.where((seen & (id_J < self.sinks))[:, None], ALWAYS - 1, rank)
        rank = jnp.where(own[:, None], ALWAYS, rank)
        most = max(keys for _, keys in self.keys) + self.query_tile + 2 * self.tile
        capacity = min(ceil_div(int(most), self.tile) + 1, num_tiles)
        count = jnp.broadcast_to(count[:, None], rank.shape[:3])
        if whole_K is not None:
            count = jnp.where(whole_K[:, None], seen.sum(-1)[:, None], count)
            capacity = num_tiles
        count = jnp.minimum(count, capacity)
        nth = jnp.minimum(jnp.arange(1, capacity + 1, dtype=jnp.int32), count[..., None])
        return Selection(jnp.maximum(find_marks(keep_largest(rank, count), nth), 0), count)

    def budget(self, num_query_tiles: int, positions: Positions) -> tuple[Int32[Array, "B I"], ...]:
        """Return the first and last position of every query tile, and the number of tiles that it may read."""
        row = jnp.arange(num_query_tiles, dtype=jnp.int32) * self.query_tile
        first = positions.q_start[:, None] + row
        last = positions.q_start[:, None] + jnp.minimum(row + self.query_tile, positions.q_len[:, None]) - 1
        own_first, own_last = first // self.tile, last // self.tile
        middle = (first + last) / 2 + 1  # visible keys, mean over the query tile's rows
        at, keys = (jnp.asarray(column, jnp.float32) for column in zip(*self.keys))
        others = jnp.round((jnp.interp(middle, at, keys) - (middle - own_first * self.tile)) / self.tile)
        sinks = jnp.minimum(self.sinks, own_first)
        others = jnp.clip(others.astype(jnp.int32), sinks, own_first)
        return first, last, jnp.where(last >= first, others + own_last - own_first + 1, 0)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy and its description in records.

    Attributes:
        name: family of contenders; a picture draws each family as one line.
        title: unique description.
        policy: the policy, with the plan's cross-over to dense.
        brief: whether the contender runs only the short list of questions. Dense, the control, the plan, and EXACT at
            the plan's budget run the full list.
    """

    name: str
    title: str
    policy: Policy
    brief: bool = False


def contenders(
    model: Model,
    plan: Plan | None,
    keys: Knots,
    longest: int,
    *,
    only: Sequence[str] = (),
    shares: Sequence[float] = (),
    scales: Sequence[float] = (),
    others: Mapping[str, Plan] = MappingProxyType({}),
) -> Iterator[Contender]:
    """Yield dense, control, plan, other plans, rivals with the plan's budget, then rivals and plan at other budgets.

    The other budgets, `shares` and `scales`, are the frontier. Without a plan, rivals run only at `shares`, or at a
    quarter of the keys if `shares` is empty.

    Args:
        plan: the plan to judge.
        keys: the plan's budget, from `profile`; empty without a plan.
        longest: tokens of the longest text.
        only: names of the rivals that run; empty for all.
        shares: budgets at which rivals run in the frontier, as shares of the visible keys.
        scales: budgets at which the plan runs in the frontier, as multiples of its own budget.
        others: other plans of the model by name, each with its own budget.
    """
    yield Contender(name="dense", title="dense", policy=Dense())
    own = {} if plan is None else {name: getattr(plan, name) for name in SHARED}
    if plan is not None:
        yield Contender(name="control", title=CONTROL, policy=plan_policy(model, without_choice(plan)))
        yield Contender(name="plan", title=PLAN, policy=plan_policy(model, plan))
        for name, other in others.items():
            yield Contender(name="other plan", title=OTHER + name, policy=plan_policy(model, other), brief=True)
        whole = whole_heads(plan)
        near = Matched(scores="newest", keys=left_for_others(keys, whole), whole=whole, tile=plan.tile, **own)
        rivals = [*rules(keys, **own)]
        if np.any(whole):  # without whole heads it equals the window
            rivals.append(Contender(name=NEAR, title=NEAR, policy=near))
        rivals.sort(key=lambda rival: MAIN.index(rival.name) if rival.name in MAIN else len(MAIN))
        for rival in rivals:
            if not only or rival.name in only:
                yield replace(rival, brief=rival.name != EXACT)
    wanted = only or (FRONTIER if shares else ())
    for share in shares or (() if plan else (0.25,)):
        for rival in rules(flat(share, LEAST, longest), **own):
            if not wanted or rival.name in wanted:
                yield replace(rival, title=f"{rival.name}, {share:.0%} of keys", brief=True)
    for scale in scales if plan is not None else ():
        scaled = with_budget(plan, scale)
        title = f"{PLAN}, budget x {scale:g}"
        yield Contender(name="plan", title=title, policy=plan_policy(model, scaled), brief=True)


def rules(keys: Knots, **own: Any) -> Iterator[Contender]:
    """Yield a contender for each rule that chooses tiles, all with the same budget; `own` are other fields."""
    for name, scores, tile in (
        (WINDOW, "newest", 16),
        ("own choice, tile 1", "mass", 1),
        (EXACT, "mass", 16),
        ("own choice, tile 32", "mass", 32),
        ("own choice, tile 64", "mass", 64),
        ("mean keys of 4", "mean of 4", 16),
        ("mean keys", "mean", 16),
        ("min and max", "min and max", 16),
        ("random tiles", "random", 16),
    ):
        policy = Matched(scores=scores, keys=keys, tile=tile, sinks=ceil_div(16, tile), **own)
        yield Contender(name=name, title=name, policy=policy)


def plan_policy(model: Model, plan: Plan) -> Policy:
    """Build the plan's policy as `load` does, with its cross-overs."""
    return policy_for("kascade", model.config, plan)


def with_budget(plan: Plan, scale: float) -> Plan:
    """Return a copy of the plan with its fraction, minimum and budgets multiplied by `scale`.

    Heads that read every key keep their budget. Fraction and budgets are capped at 1.
    """
    budgets = tuple(tuple(b if b >= 1 else min(scale * b, 1.0) for b in row) for row in plan.budgets)
    return replace(plan, fraction=min(plan.fraction * scale, 1.0), minimum=int(plan.minimum * scale), budgets=budgets)


def without_choice(plan: Plan) -> Plan:
    """Return a copy of the plan that chooses no keys, as a control.

    A head with budget 1 still reads all keys. Every other head reads only the tiles that are always read, which hold
    the query tile's own keys, the local keys before them, or the sinks (the sequence's first keys).
    """
    budgets = tuple(tuple(float(budget >= 1) for budget in row) for row in plan.budgets)
    return replace(plan, fraction=0.0, minimum=0, budgets=budgets, promise={})
