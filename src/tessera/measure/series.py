"""Choose among the records of one measurement: which suite or method made them, and which is the last that counts."""

from collections.abc import Iterable, Iterator

from tessera.measure import evidence
from tessera.measure.evidence import Key, Record


def current(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each key and series (see `series`). A key includes the machine.

    A time with too few samples for an interval does not replace a time with an interval at the same sizes and settings,
    unless the same command recorded an error in between.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(series(record), []).append(record)
    return [record for group in groups.values() for record in evidence.latest(_without_short(group)).values()]


def _without_short(records: Iterable[Record]) -> Iterator[Record]:
    """Drop times with too few samples for an interval if an earlier record has enough, with no error in between."""
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
    """Return the suite or search method that a record's command names; an empty text if it names none.

    Records with equal keys from different series do not replace each other. The suites of `tessera eval` and `tessera
    bench` measure the same things at different settings or sizes, and the methods of `tessera tune` search the same
    space.
    """
    option = "--method " if record.what.op == "tune" else "--suite "
    return record.command.partition(option)[2].partition(" --only")[0]


def is_prediction(record: Record) -> bool:
    """Return whether a record's result was computed from a compiler's schedule or a roofline, not measured."""
    return "predict" in record.what.op or "not measured" in (record.how.check or "")
