"""Render the server's figures with their goals, from the study `serving`, and its clients, from `make clients`."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from lab.report.markdown import markdown, newest, provenance
from tessera.core.units import three
from tessera.measure.evidence import Record

OP = "serving figure"
CLIENTS = "client loops"


def figures(records: Sequence[Record]) -> str:
    """Show each figure's median and range over its runs, its goal, and whether it met the goal (misses in bold).

    Only the newest record of each case is shown, whichever machine it comes from, since almost all figures are ratios
    or counts, which do not scale with the speed of the machine.
    """
    chosen = newest(r for r in records if r.what.op == OP)
    rows = []
    for record in sorted(chosen, key=lambda r: r.what.workload):
        lead = [record.what.title]
        if record.error:
            rows.append([*lead, "", record.error, "", "**failed**"])
        for figure in record.facts.get("figures", {}).values():
            rows.append([*lead, figure["about"], shown(figure), figure["goal"], _verdict(figure)])
    header = ["case", "figure", "median (range of the runs)", "goal", ""]
    return markdown(header, rows) + provenance(chosen) if rows else ""


def clients(records: Sequence[Record]) -> str:
    """Show, for each client of the server, how many of its cases passed, and what the others failed by."""
    chosen = newest(r for r in records if r.what.op == CLIENTS)
    rows = []
    for record in chosen:
        cases, version = record.facts["cases"], record.what.config["versions"][record.what.kernel]
        wrong = sorted({case["case"] for case in cases if "model" in case})
        faults = record.facts["faults"]
        passed = f"{sum('kept' in case for case in cases)} of {len(cases)}"
        lead = [f"{record.what.kernel} {version}", record.what.workload.partition(",")[0], passed]
        rows.append([*lead, "; ".join(wrong), f"**{faults}**" if faults else "0"])
    header = ["client", "model", "cases passed", "the model wrote something else", "failed by server or client"]
    return markdown(header, rows) + provenance(chosen) if rows else ""


def shown(figure: Mapping[str, Any]) -> str:
    """Format the median of a figure's values, and the range of the values unless all are equal."""
    low, high = min(figure["values"]), max(figure["values"])
    median = three(figure["median"])
    return median if low == high else f"{median} ({three(low)} to {three(high)})"


def _verdict(figure: Mapping[str, Any]) -> str:
    return "met" if figure["met"] else "**missed**"


TABLES: Final[Mapping[str, Callable[[Sequence[Record]], str]]] = MappingProxyType(
    {"serving": figures, "clients": clients}
)
"""Name -> function that draws the table."""
