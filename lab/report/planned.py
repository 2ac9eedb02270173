"""Render the tables of three former studies: the planner's steps, parts of a layer, and the memory of a step."""

from collections.abc import Sequence
from types import MappingProxyType

from lab.report.markdown import interval, markdown, newest, provenance, quantity
from tessera.core.units import three
from tessera.measure import timing
from tessera.measure.evidence import Record


def steps(records: Sequence[Record]) -> str:
    """Compare planned memory and time of whole steps with the memory and the schedule that the compiler reports."""
    chosen = newest(r for r in records if r.what.op == "planned step")
    rows = []
    for record in chosen:
        facts = record.facts
        mine = quantity(facts["planned_bytes"], "bytes")
        if facts["hbm_bytes"] is None:
            verdict = "fits: **wrong**" if facts["fits"] else "does not fit"
            rows.append([record.what.workload, record.what.kernel, f"{mine}: {verdict}", "refused", "", ""])
            continue
        held, error = quantity(facts["hbm_bytes"], "bytes"), f"{100 * (record.median - 1):+.2f} %"
        times = ""
        if "planned_ms" in facts:
            ratio = facts["planned_ms"] / facts["predicted_ms"] - 1
            times = f"{three(facts['planned_ms'])} of {three(facts['predicted_ms'])} ms, {100 * ratio:+.1f} %"
        rows.append([record.what.workload, record.what.kernel, mine, held, error, times])
    header = ["step", "attention", "planned", "compiled", "error", "time, planned of scheduled"]
    return markdown(header, rows) + provenance(chosen) if rows else ""


TITLES = MappingProxyType(
    {
        "rotation": "q and k, projected and rotated",
        "inputs": "norm, then q, k and v",
        "mlp": "norm, SwiGLU, residual",
        "order": "up projection by the weight's order",
        "groups": "product with 4-bit groups",
    }
)
"""Part of a layer -> title."""


def parts(records: Sequence[Record]) -> str:
    """Show the predicted time of a layer's parts: a row per form (way to compute the part), a column per chip.

    A part's first form is the baseline. The other forms also show the ratio of their time to the baseline's.
    """
    chosen = newest(r for r in records if r.what.op == "part of a layer")
    chips = sorted({r.facts["chip"] for r in chosen})
    found: dict[tuple, dict[str, dict[str, float]]] = {}
    for record in chosen:
        facts = record.facts
        title = f"{TITLES[facts['part']]}, {facts['rows']:,} rows"
        title += f", g {facts['group']}" if "group" in facts else ""
        found.setdefault((title, facts["form"]), {})[facts["chip"]] = record.median
    rows, before = [], None
    for (title, form), times in found.items():
        first = next(other for (name, _), other in found.items() if name == title)
        shown = [three(1e3 * times[chip]) if chip in times else "" for chip in chips]
        if times is not first:
            shares = (times[chip] / first[chip] if chip in times and chip in first else None for chip in chips)
            shown = [f"{text} ({share:.2f})" if share else text for text, share in zip(shown, shares)]
        rows.append([title if title != before else "", form, *shown])
        before = title
    return markdown(["microseconds", "form", *chips], rows) + provenance(chosen) if rows else ""


FASTER = 1.7
"""Goal: minimum ratio of the decoding speed with fewer bits per weight to that with bfloat16 weights."""
MOST_MS = {"llama-3.1-70b": 9.0}
"""Model -> goal: maximum milliseconds per decoded token with fewer bits per weight, under the model's plan."""


def fewer_bits(records: Sequence[Record]) -> str:
    """Show what is predicted if weights and caches take fewer bits: bytes per device, ms per token, met goals."""
    found = {r.what.workload: r for r in newest(r for r in records if r.what.op == "planned step")}
    chosen = {name: r for name, r in found.items() if r.facts.get("decode_ms")}
    rows = []
    for name, record in chosen.items():
        facts = record.facts
        base = chosen.get(name.partition(", ")[0] + ", " + name.split(", ")[1])
        goal = ""
        if facts["weights"] and base is not None and base is not record:
            gain = base.facts["decode_ms"] / facts["decode_ms"]
            goal = f"{gain:.2f} times as fast, goal {FASTER}: {'met' if gain >= FASTER else '**missed**'}"
        elif facts["weights"] and (most := MOST_MS.get(name.split()[0])):
            goal = f"goal {three(most)} ms: {'met' if facts['decode_ms'] <= most else '**missed**'}"
        sizes = quantity(facts["planned_bytes"], "bytes"), quantity(facts["hbm_bytes"], "bytes")
        rows.append([name, record.what.kernel, *sizes, f"{three(facts['decode_ms'])} ms", goal])
    header = ["step", "attention", "planned", "compiled", "predicted per token", "goal"]
    return markdown(header, rows) + provenance(list(chosen.values())) if rows else ""


def step_memory(records: Sequence[Record]) -> str:
    """Show the memory and the time of each step: a row per form, such as "cache donated" or "bfloat16".

    A step's first form is the baseline. The other forms also show, in brackets, the ratio of their memory to the
    baseline's. Times are shown only as such ratios, because other work on the machine slows all forms. A result that
    takes the place of a donated argument counts once, as an argument.
    """
    chosen = newest(r for r in records if r.what.op == "memory of a step")
    first: dict[str, Record] = {}
    rows = []
    for record in chosen:
        base, held = first.setdefault(record.what.workload, record), record.facts["memory"]
        total, took = quantity(record.median, "bytes"), ""
        if record is not base:
            total += f" ({record.median / base.median:.2f})"
        if ms := record.facts.get("ms_samples"):
            theirs = base.facts["ms_samples"]
            ends = (f"{end:.2f}" for end in timing.ratio_interval(ms, theirs))
            took = "1" if record is base else f"{timing.ratio(ms, theirs):.2f}{interval(*ends, len(ms))}"
        sizes = held["argument"], held["output"] - held["alias"], held["temp"]
        parts = (quantity(size, "bytes") for size in sizes)
        rows.append([record.what.workload, f"{record.what.kernel}, {record.what.dtype}", total, *parts, took])
    header = ["step", "form", "memory", "arguments", "new results", "temporaries", "time, measured (95 %)"]
    return markdown(header, rows) + provenance(chosen) if rows else ""
