"""How a figure is written: a number with its unit, a row of Markdown, the sentence that says where it comes from."""

import re
from collections.abc import Iterable, Iterator, Sequence

from tessera.core.units import quantity
from tessera.workbench import evidence
from tessera.workbench.evidence import Key, Record


def side_by_side(records: Iterable[Record]) -> list[Record]:
    """The records with those of one measurement on several machines next to each other."""
    groups: dict[tuple[Key, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.key._replace(machine=""), series(record)), []).append(record)
    return [record for group in groups.values() for record in group]


def current(records: Iterable[Record]) -> list[Record]:
    """The last record of each key in its series. What a compiler alone decides may stand once per machine: `newest`.

    A time without an interval replaces none of the same sizes and settings that has one, better or worse.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(series(record), []).append(record)
    return [record for group in groups.values() for record in evidence.latest(_without_short(group)).values()]


def _without_short(records: Iterable[Record]) -> Iterator[Record]:
    """The records, less times of too few samples for an interval that come after one of enough, no error between."""
    full: dict[Key, Record] = {}
    for record in records:
        timed, held = record.unit == "s" and not record.error, full.get(record.key)
        if timed and len(record.samples) >= evidence.INTERVAL_ROUNDS:
            full[record.key] = record
        elif timed and held and held.what.config == record.what.config:
            continue
        elif record.error:
            full = {key: other for key, other in full.items() if other.command != record.command}
        yield record


def series(record: Record) -> str:
    """What a record is of besides its key, so that it replaces no other: most are of none, which is empty.

    The suites of `tessera eval` ask some of the same with other settings ("demo", "study", "demo --model FOLDER"),
    `tessera bench` has a suite of tiny sizes, and the methods of `tessera tune` search the same space.
    """
    option = "--method " if record.what.op == "tune" else "--suite "
    return record.command.partition(option)[2].partition(" --only")[0]


def is_prediction(record: Record) -> bool:
    """Whether nothing was timed: the figure comes from a compiler's schedule or a roofline."""
    return "predict" in record.what.op or "not measured" in (record.how.check or "")


def newest(records: Iterable[Record]) -> list[Record]:
    """The newest of each kernel and workload, whatever machine made it: for what a compiler alone decides."""
    found: dict[tuple[str, str, str], Record] = {}
    for record in sorted(records, key=lambda r: r.date):
        found[record.what.kernel, record.what.workload, record.what.dtype] = record
    return list(found.values())


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. A first cell equal to the one above is left empty, so that what belongs together is seen."""
    lines, above = [header, ["---"] * len(header)], ""
    for first, *rest in rows:
        lines.append(["" if first == above else first, *rest])
        above = first
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """The text of an error may hold what ends a cell or a row."""
    return " ".join(text.replace("|", "\\|").split())


def provenance(records: Iterable[Record]) -> str:
    """Where the records of one table come from, one sentence per machine.

    Raises:
        ValueError: a record that does not name its commit, date and command.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if not record.traceable:
            raise ValueError(f"record {record.key} must name a commit, a date and a command before it can be published")
        where = record.where
        groups.setdefault(f"{where.machine}, jax {where.versions.get('jax', '?')}", []).append(record)
    lines = []
    for place, group in groups.items():
        commits = sorted({record.code.name for record in group})
        dates = sorted({record.date[:10] for record in group})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        commands = sorted({re.sub(r" --(only|kernel) \S+", "", record.command) for record in group})
        lines.append(
            f"{place}; commit {', '.join(commits)}; {when}; repeat with {', '.join(f'`{c}`' for c in commands)}."
        )
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def title_of(record: Record) -> str:
    """The workload in words, and its element type."""
    dtype = f", {record.what.dtype}" if record.what.dtype else ""
    return (record.what.title or record.what.workload) + dtype


def result_of(record: Record) -> str:
    """The median with its unit, or the error in its place."""
    return f"error: {record.error}" if record.error or record.median is None else quantity(record.median, record.unit)


def keys_read(record: Record) -> str:
    """The mean share of keys that attention read."""
    return "all" if record.mean_density is None else f"{100 * record.mean_density:.0f} %"
