"""Search a finite space with a small genetic algorithm that tries nothing twice and knows nothing about kernels.

Genomes are dicts of a Config's fields. The search first tries the given proposals, then breeds: it picks two parents by
tournament, takes each field of the child from one of them at random, and moves one field to a neighbouring value or
leaves it. It discards a child that is outside the space or already known. The random seed and the results of the
evaluations decide the search, so a killed search resumes by replaying the saved results.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Genome = Mapping[str, Any]
TRIES = 200
"""Consecutive discarded children after which the space near the population counts as exhausted."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A candidate and its origin: "default", "seed" (the cost model's choice), "bred" (from two parents) or
    "random"."""

    genome: Genome
    origin: str
    parents: tuple[int, ...] = ()


def evolve(
    space: Sequence[Genome],
    seeds: Sequence[Proposal],
    fitness: Callable[[Proposal], float | None],
    *,
    budget: int,
    population: int = 8,
    seed: int = 0,
) -> Iterator[tuple[Proposal, float | None]]:
    """Evaluate up to `budget` different members of the space and yield each with its fitness.

    Args:
        space: every genome that may be tried.
        seeds: proposals to try first, in this order.
        fitness: function that evaluates a proposal. A lower result is better. None means that the proposal failed, so
            it breeds no children.
        budget: maximum number of evaluations.
        population: number of the best candidates that may become parents.
        seed: seed of the random choices.
    """
    rng = random.Random(seed)
    members = {key(genome): genome for genome in space}
    values = values_of(space)
    done: list[tuple[Proposal, float | None]] = []
    known: set = set()

    def evaluate(proposal: Proposal) -> tuple[Proposal, float | None]:
        known.add(key(proposal.genome))
        done.append((proposal, fitness(proposal)))
        return done[-1]

    for proposal in seeds:
        if len(done) < budget and key(proposal.genome) in members and key(proposal.genome) not in known:
            yield evaluate(proposal)
    while len(done) < min(budget, len(members)):
        ranked = sorted((f, i) for i, (_, f) in enumerate(done) if f is not None)[:population]
        child = _breed([i for _, i in ranked], [p.genome for p, _ in done], values, members, known, rng)
        if child is None:  # nothing new near the best: take anything untried
            rest = [genome for name, genome in members.items() if name not in known]
            child = Proposal(genome=rng.choice(rest), origin="random")
        yield evaluate(child)


def _breed(parents, genomes, values, members, known, rng: random.Random) -> Proposal | None:
    if not parents:
        return None
    for _ in range(TRIES):
        pair = tuple(min(rng.sample(range(len(parents)), min(2, len(parents)))) for _ in range(2))
        mother, father = (parents[i] for i in pair)
        child = {name: genomes[rng.choice((mother, father))][name] for name in values}
        name = rng.choice(list(values))
        at = values[name].index(child[name]) + rng.choice((-1, 0, 1))
        child[name] = values[name][min(max(at, 0), len(values[name]) - 1)]
        if key(child) in members and key(child) not in known:
            return Proposal(genome=child, origin="bred", parents=tuple(sorted({mother, father})))
    return None


def values_of(space: Sequence[Genome]) -> dict[str, list[Any]]:
    """Return the values that each field takes anywhere in the space, sorted."""
    return {name: sorted({g[name] for g in space}, key=_order) for name in space[0]}


def key(genome: Genome) -> tuple:
    """Return a hashable key, the same for equal genomes."""
    return tuple(sorted((name, repr(value)) for name, value in genome.items()))


def _order(value) -> tuple:
    return (value is not None, value if isinstance(value, int | float) else str(value))
