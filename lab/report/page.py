"""Render all records as one self-contained HTML page: pictures first, then every number with its source."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from lab.report import real_pictures as report_real_pictures
from lab.report import served
from lab.report.documents import MACHINE_TABLES
from lab.report.markdown import joined, ratio_of, repeat_with, side_by_side
from lab.report.pictures import PICTURES
from tessera.core import files
from tessera.core.units import quantity
from tessera.measure import evidence
from tessera.measure.evidence import Record
from tessera.measure.series import current, is_prediction

GROUPS = {
    "attention": "Attention, timed",
    "model": "Whole model, timed",
    "predicted figure": "TPU kernels, predicted",
    "prediction": "Predictions against measured times",
    "tune": "Block sizes, tuned",
    "eval task": "Answers",
    "eval fidelity": "Closeness to dense",
    "eval recall": "Attention mass kept",
    "eval real text": "A real model: closeness to dense",
    "eval real task": "A real model: answers",
    "quality": "Pass keys",
    "verify": "Correctness",
    "block sizes": "Block sizes, predicted",
    "gpu gates": "Hopper kernels, machine code",
    "roofline figure": "Hopper kernels, rooflines",
    "tpu sweep": "TPU kernels, compiled",
    "serving figure": "The server against its goals",
}
"""Operation (`what.op` of a record) -> heading, in the page's order. Records of any other operation follow, with the
operation as the heading."""

TABLES = {
    "headline": "Speed in short, all machines",
    "own-model": "A model's prefill under its plan, all machines",
    "speed": "Speed against peers, all machines",
    "amdahl": "Gains of attention and of whole calls, all machines",
    "use": "Flops and bandwidth in use, all machines",
    "memory": "Memory of prefill, all machines",
    "costs": "Compiling, and starting a process, all machines",
    "tune": "Block sizes, tuned, all machines",
    "verify": "Kernels against float64, all machines",
    "quality": "Pass keys, all machines",
    "eval": "Policies side by side, all machines",
    "granularity": "The cost of tiles, all machines",
    "study": "The cost of the plan's choices, all machines",
}
"""Name in MACHINE_TABLES -> title. The documents show these tables for one machine only."""


def render(records: Iterable[Record]) -> str:
    """Render the page.

    Raises:
        ValueError: a record lacks its commit, date or command; the page shows only what can be traced.
    """
    every = list(records)
    for record in every:
        if not record.traceable:
            raise ValueError(
                f"record {record.key} must name a commit, a date and a command: measure it again in a git clone"
            )
    latest = current(every)
    pictures = []
    for name, draw in (PICTURES | report_real_pictures.PICTURES | served.PICTURES).items():
        picture = draw(every if name == "progress" else latest)
        if picture is not None:
            flag = any(map(is_prediction, picture.records))
            pictures.append(
                {"title": picture.title, "svg": picture.svg, "where": sources(picture.records), "predicted": flag}
            )
    ops = list(dict.fromkeys([*GROUPS, *sorted({r.what.op for r in latest})]))
    groups = [{"title": GROUPS.get(op, op), "rows": [row(r) for r in latest if r.what.op == op]} for op in ops]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["bold"] = bold
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    machines = {r.where.machine for r in every}
    tables = [table for name in MACHINE_TABLES if (table := every_machine(name, latest))["rows"]]
    shown = {"pictures": pictures, "tables": tables, "groups": [group for group in groups if group["rows"]]}
    return template.render(records=every, digest=digest(every), machines=machines, **shown)


def every_machine(name: str, latest: Sequence[Record]) -> dict[str, Any]:
    """Return a table of MACHINE_TABLES for all machines, as the fields that the template shows."""
    table = MACHINE_TABLES[name](side_by_side(latest))
    rows = list(joined(table.rows))
    return {"title": TABLES.get(name, name), "header": table.header, "rows": rows, "where": sources(table.records)}


def bold(text: str) -> Markup:
    """Escape a cell's text and turn Markdown's bold into HTML's."""
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(escape(text))))


def digest(records: Iterable[Record]) -> str:
    """Return a hash of the records. The page states the hash of the records that it shows."""
    return hashlib.sha256("\n".join(map(evidence.encode, records)).encode()).hexdigest()


def sources(records: Sequence[Record]) -> list[str]:
    """Return a line of text for each machine and command of the records, with their commits and dates."""
    lines: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        lines.setdefault((record.where.machine, record.command.partition(" --only")[0]), []).append(record)
    said = []
    for (machine, command), own in lines.items():
        commits = ", ".join(sorted({r.code.name for r in own}))
        dates = sorted({r.date[:10] for r in own})
        said.append(f"{machine}; {commits}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {command}")
    return said


def row(record: Record) -> dict[str, Any]:
    """Return a record as a table row, as the fields that the template shows."""
    versus = record.comparison
    against = ""
    if versus is not None:
        ends = ratio_of(record).partition("x")[2]
        target = "" if versus.target is None else f", wanted {versus.target}: {'met' if versus.met else 'missed'}"
        against = f"{versus.ratio:.3g}x {versus.against}{ends}{target}"
    failed = record.error or record.median is None
    return {
        "title": record.what.title or record.what.workload,
        "kernel": record.what.kernel,
        "dtype": record.what.dtype,
        "result": f"error: {record.error}" if failed else quantity(record.median, record.unit),
        "error": bool(failed),
        "predicted": is_prediction(record),
        "spread": "" if record.spread is None or failed else quantity(record.spread, record.unit),
        "density": "" if record.mean_density is None else f"{100 * record.mean_density:.1f} %",
        "against": against,
        "missed": versus is not None and versus.met is False,
        "where": f"{record.where.machine}; {record.code.name}; {record.date[:16]}",
        "command": repeat_with(record),
    }


def write(folder: Path, out: Path) -> int:
    """Render the records under `folder` to the page `out`, and return the number of records.

    The pictures of real models and of simulated days are also written to SVG files next to the page.

    Raises:
        ValueError: the folder holds no records, or a record lacks its commit, date or command.
    """
    records = evidence.collect(folder)
    if not records:
        raise ValueError(f"{folder} holds no records: run `tessera bench` first, or name another folder")
    files.replace_text(out, render(records))
    for name, draw in (report_real_pictures.PICTURES | served.PICTURES).items():
        picture = draw(current(records))
        if picture is not None:
            files.replace_text(out.with_name(f"{name}.svg"), picture.svg)
    return len(records)
