"""Compare two sets of records: which figures got better, which got worse, and which are too noisy to judge.

A comparison's result is a factor: how many times better the second set's figure is. A figure that was measured in turns
with a peer is compared by its ratio to the peer, so that a slow day of the machine cancels out. Any other figure is
compared by its median. The factor's interval is a bootstrap over the raw samples of both sets. It redraws rounds, so
the samples of a figure and its peer from one round stay together.

The figure regressed if the interval lies below 1 - MARGIN, and it is as good as before if the interval lies above
1 - WANTED. A figure in between, or with few samples, cannot be judged, and the report says so. Figures of different
suites or sizes are never compared; figures that the second set lacks are listed.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.measure import evidence
from tessera.measure.evidence import INTERVAL_ROUNDS, Key, Record
from tessera.measure.series import current, is_prediction

UNJUDGED: Final = 3
"""Exit code of a comparison that found no regression but could not judge every figure."""
DRAWS, TAIL = 4000, 0.025
MARGIN: Final = 0.05
"""Fraction of a figure that may be lost, beyond noise, before it counts as a regression."""
WANTED: Final = 0.20
"""Fractional loss that a comparison should detect or rule out; `Change.blind` marks figures where it does neither."""
LESS_IS_BETTER: Final = ("s", "bytes", "of tolerance")
ANSWERED: Final = ("tune", "block sizes")
"""Operations whose records hold their result in the field `config`. Other records hold the requested sizes and settings
there."""

COMPILED: Final = ("gpu gates", "tpu sweep")
"""Operations whose results repeat exactly, since only a compiler decides them. Predictions repeat too; `is_prediction`
recognises them."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure in the two sets of records.

    Attributes:
        before, after: medians, or ratios to the peer if `against` names one.
        unit: unit of `before` and `after`; "x" for a ratio.
        factor: how many times better the second set is; below 1 is worse.
        interval: bootstrap 95 % interval of `factor`; None if a set has fewer than INTERVAL_ROUNDS samples.
    """

    key: Key
    before: float
    after: float
    unit: str
    against: str | None
    factor: float
    interval: tuple[float, float] | None

    @property
    def regressed(self) -> bool:
        """Whether even the better end of the interval is a loss of more than MARGIN."""
        return self.interval is not None and self.interval[1] < 1 - MARGIN

    @property
    def blind(self) -> bool:
        """Whether the figure cannot be judged: it did not certainly regress, but a loss above WANTED is possible."""
        return not self.regressed and (self.interval is None or self.interval[0] < 1 - WANTED)


def figures(records: Iterable[Record]) -> dict[Key, Record]:
    return {record.key: record for record in current(records)}


def changes(before: Iterable[Record], after: Iterable[Record]) -> Iterator[Change]:
    """Yield the change of every figure whose latest records in both sets have equal sizes and no error."""
    old, new = figures(before), figures(after)
    for key, record in new.items():
        if key in old and alike(old[key], record):
            yield change(key, (old[key], peer_of(old[key], old)), (record, peer_of(record, new)))


def alike(before: Record, after: Record) -> bool:
    """Return whether two records of one key have figures with the same unit, sizes and settings."""
    if before.median is None or after.median is None or before.unit != after.unit:
        return False
    return before.what.op in ANSWERED or _settings(before) == _settings(after)


def _settings(record: Record) -> str:
    return json.dumps(record.what.config, sort_keys=True)  # JSON, since a stored tuple is read back as a list


def broken(before: Iterable[Record], after: Iterable[Record]) -> list[Record]:
    """Return the second set's latest records that are errors, unless the same figure is an error in the first set."""
    old = figures(before)
    return [r for key, r in figures(after).items() if r.error and (key not in old or not old[key].error)]


def vanished(before: Iterable[Record], after: Iterable[Record]) -> list[Record]:
    """Return the first set's records whose figures the second set lacks, or has only at other sizes.

    Figures are ignored if the second set lacks their suite or machine altogether, if their case crashed in the second
    set, or if the last run of their case in the first set did not record them.
    """
    before = list(before)
    old, new = figures(before), figures(after)
    runs, crashed = {(key.suite, key.machine) for key in new}, {r.run for r in new.values() if r.error}
    last = {r.run: r.code for r in sorted(before, key=lambda r: r.date) if not r.error}
    asked = {r.key for r in before if r.code == last.get(r.run)}  # `figures` drops short runs
    return [
        record
        for key, record in old.items()
        if (key.suite, key.machine) in runs and not record.error and key in asked
        if record.run not in crashed and not (key in new and alike(record, new[key]))
    ]


def peer_of(record: Record, table: dict[Key, Record]) -> Record | None:
    """Return the peer's record of the same interleaved run; None if the set lacks it."""
    if record.comparison is None or not record.how.interleaved:
        return None
    found = table.get(record.key._replace(kernel=record.comparison.against))
    same_run = found is not None and found.command == record.command and len(found.samples) == len(record.samples)
    return found if same_run else None


def change(key: Key, before: tuple[Record, Record | None], after: tuple[Record, Record | None]) -> Change:
    """Compute the change of one figure from (record, peer's record or None) of each set. The ratio to the peer is
    compared if both sets have the peer's record, else the median."""
    paired = before[1] is not None and after[1] is not None
    rng = np.random.default_rng(0)
    sides = [drawn(record, peer if paired else None, rng) for record, peer in (before, after)]
    (old, old_draws), (new, new_draws) = sides
    less = not paired and before[0].unit in LESS_IS_BETTER
    interval = None
    if old_draws is not None and new_draws is not None:
        ends = np.quantile(_better(old_draws, new_draws, less), [TAIL, 1 - TAIL], method="closest_observation")
        interval = (float(ends[0]), float(ends[1]))
    return Change(
        key=key,
        before=old,
        after=new,
        unit="x" if paired else before[0].unit,
        against=before[0].comparison.against if paired else None,
        factor=float(_better(np.array(old), np.array(new), less)),
        interval=interval,
    )


def _better(old: np.ndarray, new: np.ndarray, less: bool) -> np.ndarray:
    """Return how many times better `new` is than `old`; 1 where they are equal, even if both are 0."""
    more, fewer = (old, new) if less else (new, old)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(more == fewer, 1.0, more / fewer)


def drawn(record: Record, peer: Record | None, rng: np.random.Generator) -> tuple[float, np.ndarray | None]:
    """Return the figure and its bootstrap draws, or None for the draws if there are too few samples.

    The figure is the record's median or, with a peer, the peer's median / the record's median. A share of right answers
    is stored as one sample, so the answers are redrawn. A compiler's result or a prediction is equal in every draw.
    """
    if is_prediction(record) or record.what.op in COMPILED:
        return record.median, np.full(DRAWS, record.median)
    trials, right = record.facts.get("trials"), record.facts.get("right")
    if trials and right is not None:
        return record.median, rng.binomial(trials, right / trials, DRAWS) / trials
    samples, enough = np.asarray(record.samples), len(record.samples) >= INTERVAL_ROUNDS
    pick = rng.integers(0, len(samples), (DRAWS, len(samples)))
    own = np.median(samples[pick], axis=1)
    if peer is None:
        return record.median, own if enough else None
    draws = np.median(np.asarray(peer.samples)[pick], axis=1) / own
    return peer.median / record.median, draws if enough else None


def compare_files(before: str | os.PathLike, after: str | os.PathLike) -> int:
    return compare(evidence.read(before), evidence.read(after), f"{before} and {after}")


def compare(old: Sequence[Record], new: Sequence[Record], names: str) -> int:
    """Print what changed from one set of records to another.

    Return 1 if a figure is worse beyond noise or became an error; otherwise UNJUDGED if a figure could not be judged or
    is missing; otherwise 0. Sets that share no figure are a ValueError.
    """
    found, errors, missing = list(changes(old, new)), broken(old, new), vanished(old, new)
    if not found and not errors:
        parts = "op, kernel, workload, dtype, machine, suite, sizes and settings"
        raise ValueError(f"{names} share no figure: {parts} must be equal")
    print_changes(found, errors, missing)
    if errors or any(change.regressed for change in found):
        return 1
    return UNJUDGED if missing or any(change.blind for change in found) else 0


def print_changes(found: Sequence[Change], errors: Sequence[Record], missing: Sequence[Record] = ()) -> None:
    """Print one line per figure, worst first; then the missing figures; then the errors."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.width = max(console.width, 110)
    table = Table(title="change from the first set to the second; above 1 is better", title_justify="left")
    for name in ("figure", "dtype", "before", "after", "change", "95 % interval", ""):
        table.add_column(name, justify="left" if name in ("figure", "dtype", "") else "right", no_wrap=name != "figure")
    for c in sorted(found, key=lambda c: c.factor):
        values = (f"{c.before:.4g} {c.unit}", f"{c.after:.4g} {c.unit}", f"{c.factor:.3f}", _interval(c))
        table.add_row(_name(c), c.key.dtype, *values, "REGRESSED" if c.regressed else "cannot tell" if c.blind else "")
    console.print(table)
    if blind := [c for c in found if c.blind]:
        said = f"{len(blind)} of {len(found)} figures cannot be judged (a loss of {WANTED:.0%} or more is possible)"
        console.print(f"{said}: measure them again on an idle machine", style="yellow")
        for c in blind:
            console.print(f"    {_name(c)}: {c.factor:.3f}, 95 % interval {_interval(c)}", style="yellow", markup=False)
    for record in missing:
        name = f"{record.what.workload}: {record.what.kernel} {record.what.dtype}".strip()
        console.print(f"{name}: in the first set, but not in the second", style="yellow", markup=False)
    for record in errors:
        console.print(f"{record.what.workload}: {record.what.kernel}: error: {record.error}", style="red", markup=False)


def _name(c: Change) -> str:
    return f"{c.key.workload}: {c.key.kernel}" + (f" against {c.against}" if c.against else "")


def _interval(c: Change) -> str:
    return f"{c.interval[0]:.3f} to {c.interval[1]:.3f}" if c.interval else "too few samples"
