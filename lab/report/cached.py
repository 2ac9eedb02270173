"""Render the table of `python -m lab eval --suite cache`: a row per model, attention and cache."""

from collections.abc import Sequence

from lab.report.markdown import markdown, provenance
from tessera.core.units import three
from tessera.measure.evidence import Record

OP = "eval cache"
GOAL = 1e-4
"""Nats per token: the largest divergence that an int8 cache may cause on the shipped model."""


def cached(records: Sequence[Record]) -> str:
    """Show, for each cache, the KL divergence from dense attention with a float cache and the number of right answers.

    Each cell shows the newest record of any machine, since divergences hardly differ between machines.
    """
    newest: dict[tuple[str, str, str, str], Record] = {}
    for record in sorted((r for r in records if r.what.op == OP and not r.error), key=lambda r: r.date):
        facts = record.facts
        newest[facts["model"], facts["attention"], facts["cache"], facts["question"]] = record
    rows = []
    for model, attention, cache in dict.fromkeys(key[:3] for key in newest):
        text, asked = (newest.get((model, attention, cache, question)) for question in ("text", "questions"))
        rows.append([model, attention, cache, *_text_cells(text, model), _answers(asked)])
    header = ["model", "attention", "cache", "KL per token, nats (95 %)", "same best token", "questions answered"]
    return markdown(header, rows) + provenance(list(newest.values())) if rows else ""


def _text_cells(record: Record | None, model: str) -> tuple[str, str]:
    if record is None:  # the reference itself
        return "reference", ""
    facts = record.facts
    shown = f"{facts['mean']:.1e} ({facts['low']:.1e} to {facts['high']:.1e})"
    if record.what.kernel == "dense int8" and model == "the shipped model":
        met = facts["mean"] <= GOAL
        shown += f", goal {GOAL:.0e}: {'met' if met else '**missed**'}"
    return shown, f"{three(100 * facts['agreement'])} %"


def _answers(record: Record | None) -> str:
    if record is None:
        return ""
    return f"{sum(record.facts['scores']):g} of {len(record.facts['scores'])}"
