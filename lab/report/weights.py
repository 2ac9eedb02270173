"""Render the table of `python -m lab eval --suite real-weights`: what fewer bits per weight cost, a row per format."""

from collections.abc import Sequence

import numpy as np

from lab.eval.weights import ORDER, TASK_OP, TEXT_OP
from lab.report.markdown import interval, markdown, provenance
from lab.report.real import kept
from tessera.core.units import quantity, three
from tessera.measure.evidence import Record
from tessera.measure.judge import paired
from tessera.measure.judge.contenders import PLAN

POLICIES = ("dense", PLAN)


def weights(records: Sequence[Record]) -> str:
    """Show each format's bytes, its KL divergence from the reference, and the needles that it keeps.

    The reference is dense attention with float weights.
    """
    held = [r for r in records if r.what.op in (TEXT_OP, TASK_OP) and not r.error]
    if not held:
        return ""
    machines = sorted({r.where.machine for r in held}, key=lambda name: -sum(r.where.machine == name for r in held))
    held = [r for r in held if r.where.machine == machines[0]]
    rows = []
    for form in (name for name in ORDER if any(r.facts["weights"] == name for r in held)):
        own = [r for r in held if r.facts["weights"] == form]
        size = quantity(own[0].facts["weight_bytes"], "bytes")
        rows.append([form, size, *(cell(own, policy) for cell in (divergence, needles) for policy in POLICIES)])
    titles = [
        f"{what}, {policy}" for what in ("KL per token, nats (95 %)", "needles kept (95 %)") for policy in POLICIES
    ]
    return markdown(["weights", "in memory", *titles], rows) + provenance(held)


def divergence(records: Sequence[Record], policy: str) -> str:
    """Format the mean KL over the blocks of text of all domains; name the domains unless there are three."""
    own = [r for r in records if r.what.op == TEXT_OP and r.facts["policy"] == policy]
    if not own:
        return ""
    found = paired.mean(np.concatenate([r.samples for r in own]))
    count = sum(len(r.samples) for r in own)
    shown = three(found.value) + interval(three(found.low), three(found.high), count)
    return shown if len(own) == 3 else f"{shown}; {', '.join(r.facts['domain'] for r in own)} only"


def needles(records: Sequence[Record], policy: str) -> str:
    """Format the share of the reference's right answers that are kept. The reference is dense, on float weights."""
    found = [r for r in records if r.what.op == TASK_OP and r.facts["policy"] == policy]
    return "; ".join(kept(r) if "kept" in r.facts else "reference" for r in found)
