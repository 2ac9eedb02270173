"""Render the roadmap: each phase's targets, the recorded results, and whether they meet the targets."""

from collections.abc import Iterator, Sequence

from lab.report import real, tables
from lab.report.markdown import markdown, newest, provenance, title_of
from lab.report.summary import KEPT_GOAL
from lab.studies import figures, gpu_figures, validation
from tessera.core.units import quantity
from tessera.measure.evidence import Record

Row = tuple[list[str], list[Record]]


def roadmap(records: Sequence[Record]) -> str:
    """Show a row per target: phase, target, result, and a verdict. A phase without records has no rows."""
    rows, used = [], []
    for phase in (_correct, _answers, _measured, _compiled, _predictions, _tpu, _hopper):
        for row, own in phase(records):
            rows.append(row)
            used += own
    return markdown(["phase", "target", "record", "met"], rows) + provenance(used) if rows else ""


def _met(good: int, of: int) -> str:
    if of == 1:
        return "yes" if good else "**no**"
    return "yes" if good == of else f"**{good} of {of}**"


def _correct(records: Sequence[Record]) -> Iterator[Row]:
    own = [r for r in records if r.what.op == "verify"]
    if own:
        trials, failed = sum(r.facts.get("trials", 0) for r in own), sum(r.error is not None for r in own)
        found = f"{trials:,} trials; {failed} of {len(own)} rows with a failure"
        yield ["kernels against float64", "no failure", found, _met(not failed, 1)], own


def _answers(records: Sequence[Record]) -> Iterator[Row]:
    """Yield a row per length: the share of dense's needles that the default model's plan keeps."""
    asked = real.answered([r for r in records if "--model" not in r.case], real.TASK)
    for r in sorted((r for r in asked if r.what.kernel == "plan"), key=lambda r: r.facts["length"]):
        if r.facts["kind"] == "single" and r.facts["policy"] == "the plan" and r.facts.get("kept") is not None:
            target = f">= {100 * KEPT_GOAL:.0f} % of the needles at {r.facts['length']:,} tokens"
            yield ["answers kept, SmolLM2-135M", target, real.kept(r), _met(r.facts["kept"] >= KEPT_GOAL, 1)], [r]


def _measured(records: Sequence[Record]) -> Iterator[Row]:
    """Yield a row per timed comparison that has a target: its ratio on every machine."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        if r.what.op in ("attention", "model") and r.comparison and r.comparison.target and not r.error:
            policy = (
                " under its plan, sparse throughout"
                if r.what.op == "model" and r.what.kernel.startswith("kascade ")
                else ""
            )
            title = f"{title_of(r)}{policy}: {r.comparison.target}x {r.comparison.against}"
            groups.setdefault((r.where.device, title), []).append(r)
    for (device, title), own in groups.items():
        ratios = ", ".join(f"{r.comparison.ratio:.2f}x" for r in own)
        good = sum(bool(r.comparison.met) for r in own)
        machines = "" if len(own) == 1 else f" on {len(own)} machines"
        yield [f"speed, measured on {device}", title, ratios + machines, _met(good, len(own))], own


def _compiled(records: Sequence[Record]) -> Iterator[Row]:
    chosen, counts, planned = tables.swept(records)
    if chosen:
        good = sum(compiled for compiled, _ in counts.values())
        row = ["TPU kernels, compiled", "every case on every chip", f"{good:,} of {planned:,}"]
        yield [*row, _met(good == planned, 1)], chosen
    gated = tables.gated(records)
    if gated:
        passed, tried, planned = map(sum, zip(*map(tables.gate_counts, gated.values())))
        most = max(tried, planned)
        row = ["Hopper kernels, machine code", "every case passes every gate", f"{passed:,} of {most:,}"]
        yield [*row, _met(passed == most, 1)], [r for own in gated.values() for r in own]


def _predictions(records: Sequence[Record]) -> Iterator[Row]:
    for r in newest(r for r in records if r.what.op == "prediction"):
        if not title_of(r).startswith("predicted / measured time, all"):
            continue
        facts, phase = r.facts, "predictions, against measured times of a peer"
        for name, key, goal in (
            ("median error", "median_absolute_error", validation.MEDIAN_GOAL),
            ("90th percentile of the error", "p90_absolute_error", validation.P90_GOAL),
        ):
            target = f"{name} <= {100 * goal:g} %"
            yield [phase, target, quantity(facts[key], "fraction"), _met(facts[key] <= goal, 1)], [r]
        rank = facts["spearman"]
        target = f"rank correlation >= {validation.RANK_GOAL}"
        yield [phase, target, f"{rank:.4f}", _met(rank >= validation.RANK_GOAL, 1)], [r]


def _tpu(records: Sequence[Record]) -> Iterator[Row]:
    """Yield a row per predicted figure with targets, with all chips in one cell."""
    found = {r.what.workload: r for r in newest(r for r in records if r.what.op == "predicted figure")}
    for figure, targets in figures.TARGETS.items():
        own = {chip: found[f"{figure}, {chip}"] for chip in targets if f"{figure}, {chip}" in found}
        if not own:
            continue
        goals = ", ".join(dict.fromkeys(r.comparison.target for r in own.values()))
        terms = f" ({figures.TERMS[figure]})" if figure in figures.TERMS else ""
        shown = ", ".join(f"{chip} {r.comparison.ratio:.2f}" for chip, r in own.items())
        good = sum(bool(r.comparison.met) for r in own.values())
        yield ["TPU, predicted", f"{figure}{terms}: {goals}", shown, _met(good, len(targets))], list(own.values())


def _hopper(records: Sequence[Record]) -> Iterator[Row]:
    """Yield a row per speed target on an H200. The records hold only rooflines, so no target counts as met."""
    for r in newest(r for r in records if r.what.op == gpu_figures.OP):
        if r.facts.get("target"):
            roofline = f"none; the roofline is {quantity(r.median, r.unit)}"
            yield ["Hopper, speed", f"{r.what.workload}: {r.facts['target']}", roofline, "**not measured**"], [r]
