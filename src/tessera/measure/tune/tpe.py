"""Search with Optuna's tree-structured Parzen estimator, in place of the genetic algorithm of `search.evolve`.

Every field is a parameter. A numeric field is an index into its sorted values, so that neighbouring values count as
near; any other field is a category. The given proposals come first. A suggestion that is outside the space or already
known never gets a result, and Optuna's constant-liar option makes the sampler avoid these open trials. A failed
candidate counts as pruned, which is worse than every candidate that ran.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from tessera.measure.tune.search import Genome, Proposal, key, values_of

TRIES = 50
"""Consecutive rejected suggestions after which an untried candidate is drawn at random."""


def suggest(
    space: Sequence[Genome],
    seeds: Sequence[Proposal],
    fitness: Callable[[Proposal], float | None],
    *,
    budget: int,
    seed: int = 0,
) -> Iterator[tuple[Proposal, float | None]]:
    """Evaluate up to `budget` different members of the space and yield each with its fitness.

    `seed` and the results of the evaluations decide the search. See `search.evolve` for the arguments.

    Raises:
        ValueError: Optuna is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ValueError("--method tpe needs Optuna: pip install 'tessera-attention[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rng = random.Random(seed)
    members, values, known = {key(genome): genome for genome in space}, values_of(space), set()
    # The cost model's choices replace the sampler's ten random start-up trials.
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=min(10, max(len(seeds), 2)))
    study = optuna.create_study(sampler=sampler)

    def enqueue(genome: Genome, origin: str) -> None:
        study.enqueue_trial({name: at.index(genome[name]) for name, at in values.items()}, {"origin": origin})

    for proposal in seeds:
        if key(proposal.genome) in members:
            enqueue(proposal.genome, proposal.origin)
    misses = 0
    while len(known) < min(budget, len(members)):
        trial = study.ask()
        genome = {name: at[_index(trial, name, at)] for name, at in values.items()}
        if key(genome) not in members or key(genome) in known:
            misses += 1
            if misses % TRIES == 0:
                enqueue(rng.choice([g for name, g in members.items() if name not in known]), "random")
            continue
        misses = 0
        known.add(key(genome))
        proposal = Proposal(genome=genome, origin=trial.user_attrs.get("origin", "tpe"))
        found = fitness(proposal)
        study.tell(trial, found, optuna.trial.TrialState.PRUNED if found is None else None)
        yield proposal, found


def _index(trial, name: str, values: Sequence) -> int:
    if all(isinstance(value, int | float) for value in values):
        return trial.suggest_int(name, 0, len(values) - 1)
    return trial.suggest_categorical(name, range(len(values)))
