"""Measure a plan again: its promise on a given text, its cross-overs on this device."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tessera.calibration.crossover import measure_crossovers
from tessera.calibration.report import Report
from tessera.calibration.search import Judge, Target, probes_of, promise_of
from tessera.models.files.checkpoint import fingerprint
from tessera.runtime.corpus import MAX_WINDOW, read_corpus
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import THROUGHOUT, Plan

SEED = 3
"""Seed of the planted facts; `calibrate` uses the seeds 0, 1 and 2."""


def measure_again(
    model: Any,
    plan: Plan,
    texts: str | os.PathLike | Sequence[str | Sequence[int]],
    *,
    crossover: int | None = None,
    decode_crossover: int | None = None,
    max_tokens: int = 65536,
    progress: bool = True,
) -> Plan:
    """Measure a plan's loss against dense on every window of a text; the plan's layers and budgets do not change.

    Return the plan with a new promise and cross-overs; the promise is `fresh` if the plan was made from another text.
    Arguments as in `calibrate`. A plan without a target is refused.
    """
    plan.check(model.config, fingerprint(model.params, model.config))
    if not plan.promise:
        raise ValueError("the plan has no target to measure: make a plan with keep or max_kl")
    target = Target(**{name: plan.promise[name] for name in ("keep", "max_kl") if name in plan.promise})
    corpus = read_corpus(model, texts, max_tokens)
    probes = probes_of(model, [*corpus.windows, *corpus.held_out], MAX_WINDOW, SEED)
    policy = replace(Kascade.from_plan(plan), **THROUGHOUT)
    with Report(progress) as report:
        kept = Judge(model, probes, report.each)(policy)
        crossovers, times = measure_crossovers(model, policy, report, crossover, decode_crossover)
    fresh = corpus.sha256 != plan.provenance.get("corpus_sha256")
    return replace(
        plan,
        promise=promise_of(target, probes, kept, fresh=fresh),
        **crossovers,
        metrics={**plan.metrics, **times},
    )
