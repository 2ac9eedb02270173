"""Choose the records that count: the last of each measurement, unless an earlier one has more samples."""

from collections.abc import Iterable, Iterator

from tessera.measure import evidence
from tessera.measure.evidence import Key, Record


def current(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each key.

    A time with too few samples for an interval does not replace a time with an interval at the same sizes and settings,
    unless the same case recorded an error in between.
    """
    return list(evidence.latest(_without_short(records)).values())


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
            full = {key: other for key, other in full.items() if other.run != record.run}
        yield record


def is_prediction(record: Record) -> bool:
    """Return whether a record's result was computed from a compiler's schedule or a roofline, not measured."""
    return "predict" in record.what.op or "not measured" in (record.how.check or "")
