"""Render the tables and the picture of `python -m lab simulate`."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from matplotlib.figure import Figure

from lab.report.markdown import markdown, newest, provenance, quantity
from lab.report.pictures import COLOURS, INK, Picture, drawn
from tessera.core.units import three
from tessera.measure.evidence import Record

OP = "simulated serving"


def _chosen(records: Sequence[Record], scenario: str) -> list[tuple[str, str, Record]]:
    """Return (machine, rest of the name, newest record) of each scenario whose name starts with `scenario`."""
    found = []
    for record in newest(r for r in records if r.what.op == OP):
        machine, name = record.what.workload.split(", ", 1)
        if name.startswith(scenario):
            found.append((machine, name.removeprefix(scenario), record))
    return found


def capacities(records: Sequence[Record]) -> str:
    """Show the load that one replica serves within the latency limits, by request mix, attention and scheduler."""
    chosen = _chosen(records, "capacity, ")
    rows = []
    for machine, mix, record in chosen:
        facts, versus = record.facts, record.comparison
        first = "; ".join(f"{kind} {quantity(found['p99'], 's')}" for kind, found in facts.get("ttft_s", {}).items())
        ratio = "" if versus is None or versus.against == record.what.kernel else f"{versus.ratio:.2f}"
        if ratio and versus.target:
            ratio += f" ({versus.target}: {'met' if versus.met else '**missed**'})"
        gaps, cached = facts.get("itl_ms", {}), facts.get("cached_share")
        rows.append(
            [
                machine,
                mix,
                record.what.kernel,
                three(record.median),
                ratio,
                first,
                f"{gaps['p99']:.0f} ms" if gaps else "",
                "" if cached is None else f"{100 * cached:.0f} %",
            ]
        )
    header = ["machine", "mix", "attention, scheduler", "requests/s of a replica", "first row's rate / this row's"]
    header += ["p99 to the first token", "p99 between tokens", "prompt tokens from the cache"]
    return markdown(header, rows) + provenance([record for *_, record in chosen]) if rows else ""


def days(records: Sequence[Record]) -> str:
    """Show the results of the simulated days and of the greedy-tenant scenarios, and whether they met the goals."""
    chosen = [*_longest_days(records), *_chosen(records, "greedy tenant")]
    rows = []
    for machine, _, record in chosen:
        facts = record.facts
        if "jain" in facts:
            said = f"Jain's index {facts['jain']:.3f}; the others' p99 to the first token "
            said += (
                f"{facts['ratio']:.2f} times as long ({' and '.join(quantity(s, 's') for s in facts['others_p99_s'])})"
            )
            said += (
                f"; their share in the limits {' and '.join(quantity(s, 'fraction') for s in facts['others_in_slo'])}"
            )
            shares = " and ".join(quantity(share, "fraction") for share in facts["others_cached_share"])
            said += f"; their prompt tokens from the cache {shares}"
        else:
            said = f"{facts['submitted']:,} requests, {facts['lost']} lost, {quantity(facts['in_slo'], 'fraction')} in "
            said += f"the limits; replicas busy {quantity(facts['busy'], 'fraction')}; {facts['preempted']} gave way"
        rows.append([machine, record.what.workload.split(", ", 1)[1], said, "met" if facts["met"] else "**missed**"])
    header = ["machine", "scenario", "result", "goals"]
    return markdown(header, rows) + provenance([record for *_, record in chosen]) if rows else ""


def _longest_days(records: Sequence[Record]) -> list[tuple[str, str, Record]]:
    """Return `_chosen` days; if a machine has days of several lengths, as in a quick look, only its longest."""
    longest: dict[str, tuple[str, str, Record]] = {}
    for each in sorted(_chosen(records, "day of "), key=lambda each: float(each[1].split()[0])):
        longest[each[0]] = each
    return list(longest.values())


def day(records: Sequence[Record]) -> Picture | None:
    """Plot each simulated day: requests per second, and the p99 of time to the first token / its limit."""
    chosen = _longest_days(records)
    if not chosen:
        return None

    def draw(figure: Figure) -> None:
        for axes, (machine, length, record) in zip(figure.subplots(len(chosen), squeeze=False).flat, chosen):
            found = record.facts["hours"]
            at = [each["hour"] + 0.5 for each in found]
            axes.bar(at, [each["requests_per_s"] for each in found], 0.9, color=COLOURS[0], alpha=0.35)
            axes.set(title=f"{machine}, a day in {length}", ylabel="requests per second", xlim=(0, 24))
            right = axes.twinx()
            right.plot(at, [each["ttft_of_limit_p99"] for each in found], "o-", color=COLOURS[1])
            right.axhline(1, color=INK, linewidth=1)
            right.set(ylabel="p99 to the first token / limit", ylim=(0, None))
            right.grid(False)
        figure.axes[-2].set_xlabel("hour")

    title = "Simulated days: load (bars) and p99 of the time to the first token over its limit (line)"
    return Picture(title, drawn(draw, (10, 3.2 * len(chosen))), tuple(record for *_, record in chosen))


PICTURES: Final[Mapping[str, Callable[[Sequence[Record]], Picture | None]]] = MappingProxyType({"served-day": day})
"""File name -> function that draws the picture. The report also writes each picture to its own SVG file."""
