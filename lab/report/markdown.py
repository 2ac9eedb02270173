"""Format records for pages: numbers with units, Markdown tables, and the lines that name the records' sources."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tessera.core.units import quantity
from tessera.measure import evidence
from tessera.measure.evidence import Key, Record


def side_by_side(records: Iterable[Record]) -> list[Record]:
    """Reorder records so that the records of one measurement on several machines are adjacent."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(record.key._replace(machine=""), []).append(record)
    return [record for group in groups.values() for record in group]


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the newest record of each kernel, workload and dtype, from any machine.

    This is for results that do not depend on the machine that computes them, such as a compiler's.
    """
    found: dict[tuple[str, str, str], Record] = {}
    for record in sorted(records, key=lambda r: r.date):
        found[record.what.kernel, record.what.workload, record.what.dtype] = record
    return list(found.values())


class Table(NamedTuple):
    """Table whose rows or columns hold the results of several machines.

    Attributes:
        header: title of each column; a column "machine" names each row's machine.
        rows: the cells of each row.
        records: the records shown.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    records: Sequence[Record]

    def __str__(self) -> str:
        return markdown(self.header, self.rows) + provenance(self.records) if self.rows else ""


def of_one_machine(name: str, draw: Callable[[Sequence[Record]], Table], records: Sequence[Record]) -> str:
    """Draw a table for one machine: the machine with the most figures or, among equals, with the newest figure.

    The column "machine" is dropped, since the provenance names the machine. A last line counts the other machines, and
    names the command that shows them.
    """
    figures: dict[str, dict[Key, Record]] = {}
    for shown in draw(records).records:
        figures.setdefault(shown.where.machine, {})[shown.key] = shown
    if not figures:
        return ""

    def rank(machine: str) -> tuple[int, str]:
        own = figures[machine].values()
        return sum(not record.error for record in own), max(record.date for record in own)

    machine = max(figures, key=rank)
    table = draw([record for record in records if record.where.machine == machine])
    if "machine" in table.header:
        place = list(table.header).index("machine")
        header, *rows = ([*line[:place], *line[place + 1 :]] for line in (table.header, *table.rows))
        table = table._replace(header=header, rows=rows)
    if len(figures) == 1:
        return str(table)
    others = "1 other machine" if len(figures) == 2 else f"{len(figures) - 1} other machines"
    return f"{table}\n`python -m lab report --show {name}` also shows {others}.\n"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *joined(rows)]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def joined(rows: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """Yield rows, with the first cell empty if it equals the one above, so that related rows read as a group."""
    above = ""
    for first, *rest in rows:
        yield ["" if first == above else first, *rest]
        above = first


def _cell(text: str) -> str:
    """Escape a cell's text, since an error message may hold characters that end a cell or a row."""
    return " ".join(text.replace("|", "\\|").split())


def provenance(records: Iterable[Record]) -> str:
    """State where a table's records come from, on one line per machine and jax version.

    Raises:
        ValueError: a record does not name its commit, date and command.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if not all(text and text.strip() for text in (record.code.commit, record.date, record.command)):
            raise ValueError(
                f"record {record.key} must name a commit, a date and a command: measure it again in a git clone"
            )
        where = record.where
        groups.setdefault(f"{where.machine}, jax {where.versions.get('jax', '?')}", []).append(record)
    lines = []
    for place, group in groups.items():
        commits = sorted({record.code.name for record in group})
        dates = sorted({record.date[:10] for record in group})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        commands = sorted({re.sub(r" --(only|kernel) \S+", "", repeat_with(record)) for record in group})
        lines.append(
            f"{place}; commit {', '.join(commits)}; {when}; repeat with {', '.join(f'`{c}`' for c in commands)}."
        )
    return "\n" + "\n".join(lines) + "\n" if lines else ""


RENAMED = {
    "sweep": "compiles --platform tpu",
    "tpu-sweep": "compiles --platform tpu",
    "figures": "tpu-figures",
    "blocks": "tpu-blocks",
    "gpu_gates": "compiles --platform gpu",
    "gpu-gates": "compiles --platform gpu",
    "gpu_figures": "gpu-figures",
}
"""Name of a study or its module in the commands of old records -> its arguments in `python -m lab study` today."""

MOVED = re.compile(
    r"\btessera (?=(?:study|simulate|demo|report)\b|bench --suite|train --recipe|"
    r"eval --suite (?:cache|real-weights)\b)"
)
"""The start of commands that `python -m lab` has today."""

DELETED = re.compile(
    r"\b(?:(?:tessera study |tessera\.deviceless\.)(?:ablations|fusions|memory|planner)|"
    r"tessera eval --suite (?:demo|study))\b"
)
"""Commands of deleted studies and suites. Their code exists only in the commits that made their records."""


def repeat_with(record: Record) -> str:
    """Return the command that repeats the record's measurement, with the name that it has today.

    For a deleted study, the command first checks out the record's commit, which the same line of a table names.
    """
    if DELETED.search(record.command):
        return f"git checkout COMMIT; {record.command}"

    def of_today(found: re.Match) -> str:
        return f"python -m lab study {RENAMED.get(found[1], found[1])}"

    studies = r"(?:python -m tessera\.deviceless\.|(?:tessera|python -m lab) study )([\w-]+)"
    return MOVED.sub("python -m lab ", re.sub(studies, of_today, record.command))


def title_of(record: Record) -> str:
    """Return the workload in words, with its dtype."""
    dtype = f", {record.what.dtype}" if record.what.dtype else ""
    return (record.what.title or record.what.workload) + dtype


def result_of(record: Record) -> str:
    """Format the median with its unit, or the error if there is one."""
    return f"error: {record.error}" if record.error or record.median is None else quantity(record.median, record.unit)


def interval(low: str, high: str, samples: int) -> str:
    """Format a 95 % interval for any page, or return an empty text if there are too few samples for one."""
    return f" ({low} to {high})" if samples >= evidence.INTERVAL_ROUNDS else ""


def ratio_of(record: Record) -> str:
    """Format the comparison's ratio and its interval."""
    versus = record.comparison
    ends = () if versus.interval is None else (f"{end:.2f}" for end in versus.interval)
    return f"{versus.ratio:.2f}x" + (interval(*ends, len(record.samples)) if versus.interval else "")


def keys_read(record: Record) -> str:
    """Format the mean share of the visible keys that attention read, or "all"."""
    return "all" if record.mean_density is None else f"{100 * record.mean_density:.0f} %"
