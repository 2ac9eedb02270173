"""Records of measurements: what, where, which code, how, and the result or the error, one JSON object per line.

A record never names a host or a private folder. Appending survives a kill: the writer appends in one call and syncs,
the reader drops a last line that a kill cut short, and the next writer removes that line.
"""

import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from tessera.core import files, hardware

SCHEMA = 2
"""2 added `Record.suite` and `Record.case`."""
OWN_MODEL = "own model"
"""Suite of the records that `tessera bench --model` makes."""
INTERVAL_ROUNDS = 5
"""Minimum samples for a bootstrap interval. An interval of fewer samples tells little more than the samples' range."""

PUBLIC_WORDS = frozenset({"localhost", "linux", "tessera", "bench", "demo", "train", "quality"})
"""Host and user names that any record may hold, since they reveal nothing: common names and our own commands."""


@dataclass(frozen=True, kw_only=True)
class What:
    """The thing measured. `title` is the workload in words, for tables; `config` holds free-form settings."""

    op: str
    kernel: str
    workload: str
    dtype: str = ""
    title: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Where:
    """The machine, without a host name or an address."""

    device: str
    count: int
    cpu: str
    cores: int
    memory_bytes: int
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    clocks: str | None = None
    driver: str | None = None

    @property
    def machine(self) -> str:
        """Machine in words, for tables: "AMD EPYC, 2 cores", "TPU v6 lite", "4 x TPU v6 lite"."""
        if self.device == "cpu":
            words = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b", " ", self.cpu).split()
            return f"{' '.join(words)}, {self.cores} cores"
        return self.device if self.count == 1 else f"{self.count} x {self.device}"


@dataclass(frozen=True, kw_only=True)
class Code:
    """The code measured. `commit` is None outside a checkout, and `dirty` says whether tracked sources differed from
    it.

    `landed` is the commit in this repository's history that contains the same code, if `commit` was squashed with
    others and so is not in the history itself.
    """

    commit: str | None
    dirty: bool | None
    landed: str | None = None

    @property
    def name(self) -> str:
        """Short commit hash, with a note on uncommitted changes or on the commit in which this code landed."""
        changes = " with uncommitted changes" if self.dirty else ""
        return f"{self.commit[:9]}{changes}" + (
            f" (not in this history; landed in {self.landed[:9]})" if self.landed else ""
        )


@dataclass(frozen=True, kw_only=True)
class How:
    """The method: warm-up calls, samples, whether contenders took turns, compile seconds, cache state, output check."""

    warmup: int = 0
    iterations: int = 1
    interleaved: bool = False
    compile_s: float | None = None
    cold_cache: str | None = None
    check: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ratio baseline / ours (above 1, ours is faster or smaller), its bootstrap 95 % interval, and its target."""

    against: str
    ratio: float
    interval: tuple[float, float] | None = None
    target: str | None = None
    met: bool | None = None


class Key(NamedTuple):
    """Identity of a measurement. It names the machine, so a record never replaces one from another machine, and the
    suite, since suites run the same cases at different sizes."""

    op: str
    kernel: str
    workload: str
    dtype: str
    machine: str
    suite: str
    case: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measurement, or the error in its place.

    Attributes:
        unit: unit of samples and median ("s", "bytes", "fraction", "tokens/s").
        spread: interquartile range of the samples, in the same unit.
        flops, bytes: work of one sample, by the stated formula of the workload.
        facts: other numbers of the same run; names carry their units.
        command: command line that repeats the measurement.
        suite, case: what `suite_and_case` finds in the command (--suite; --only or other flags); both are in the key.
    """

    what: What
    where: Where
    code: Code
    how: How
    command: str
    date: str
    suite: str = ""
    case: str = ""
    unit: str = "s"
    samples: tuple[float, ...] = ()
    median: float | None = None
    spread: float | None = None
    flops: float | None = None
    bytes: float | None = None
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    peak_fraction: float | None = None
    density: tuple[float, ...] | None = None
    comparison: Comparison | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    schema: int = SCHEMA

    @property
    def key(self) -> Key:
        """Key of the measurement; a later record of the same key replaces an earlier one."""
        what = self.what
        return Key(what.op, what.kernel, what.workload, what.dtype, self.where.machine, self.suite, self.case)

    @property
    def run(self) -> tuple[str, ...]:
        """The part of a suite that is run as a whole; for a record without a suite, its command."""
        return (self.suite, self.case) if self.suite else (self.command,)

    @property
    def mean_density(self) -> float | None:
        """Share of keys read, mean over layers; None if every key is read."""
        return sum(self.density) / len(self.density) if self.density else None


def make(
    what: What,
    samples: Sequence[float],
    *,
    command: str,
    how: How | None = None,
    work: Mapping[str, float] | None = None,
    **fields_: Any,
) -> Record:
    """Build a record of samples taken here and now: fill in where, code, date, median, spread and rates.

    Args:
        samples: raw samples in `unit` (default seconds); may be empty only when `error` is given.
        how: method; by default only the number of samples.
        work: {"flops": per sample, "bytes": per sample}; rates per second are added if the unit is seconds.
        fields_: further fields of Record (unit, density, comparison, facts, error).

    Raises:
        ValueError: there are neither samples nor an error, or a field names this host or a private folder.
    """
    samples = tuple(float(s) for s in samples)
    if not samples and not fields_.get("error"):
        raise ValueError(f"{samples=} must hold at least one sample, or pass error=")
    median = statistics.median(samples) if samples else None
    rates: dict[str, float] = dict(work or {})
    if median and fields_.get("unit", "s") == "s":
        rates |= {f"{name}_per_s": amount / median for name, amount in rates.items()}
    suite, case = suite_and_case(what.op, command)
    record = Record(
        what=what,
        where=here(),
        code=code(),
        how=how or How(iterations=len(samples)),
        command=command,
        suite=suite,
        case=case,
        date=now(),
        samples=samples,
        median=median,
        spread=_quartile_range(samples),
        **rates,
        **fields_,
    )
    private = _private_words(encode(record))
    if private:
        raise ValueError(f"a record must not name {private}: pass relative paths and plain words")
    return record


def suite_and_case(op: str, command: str) -> tuple[str, str]:
    """Find the suite and its case in a command; ("", "") if it names none.

    The case is the value of --only or, in a suite without such cases, the command's other flags, such as "--model
    FOLDER". The method of `tune` counts as a suite, and so does `bench --model`, whose cases are the models.
    """
    if op == "tune":
        return command.partition("--method ")[2], ""
    if model := command.partition("tessera bench --model ")[2]:
        return OWN_MODEL, model
    suite, _, rest = command.partition("--suite ")[2].partition(" ")
    return suite, rest.removeprefix("--only ")


def now() -> str:
    """Return the current UTC time to the second, in the format of records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _quartile_range(samples: Sequence[float]) -> float | None:
    if len(samples) < 2:
        return None
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def _private_words(line: str) -> list[str]:
    text = re.sub(r"\\.", " ", line)  # JSON writes a line end as \n, whose n would hide the start of a word
    names = {platform.node(), os.path.expanduser("~"), os.getcwd()} - PUBLIC_WORDS
    return sorted(n for n in names if len(n) > 3 and re.search(rf"(?<![\w-]){re.escape(n)}(?![\w-])", text))


def here() -> Where:
    """Describe this machine for a record. Queries jax for its devices, so never call it at import."""
    import jax

    devices = jax.devices()
    host = hardware.cpu()
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    for name in ("libtpu", "jax-cuda13-plugin"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Where(
        device=devices[0].device_kind,
        count=len(devices),
        cpu=host.model,
        cores=host.cores,
        memory_bytes=host.memory_bytes,
        python=platform.python_version(),
        versions=versions,
    )


@functools.cache
def code() -> Code:
    """Return the commit of the checkout that this package runs from. Cached, since loaded code does not change."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return Code(commit=None, dirty=None)
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src", "lab")
    return Code(commit=commit, dirty=None if changed is None else bool(changed))


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # no git here: the record holds None
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def encode(record: Record) -> str:
    """Encode a record as JSON on one line, without its None fields; raise ValueError for NaN or infinity."""
    body = {name: value for name, value in asdict(record).items() if value is not None and value != {}}
    return json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def decode(line: str) -> Record:
    """Decode the record of one line; raise ValueError if it is not a record, or has a newer schema."""
    body = json.loads(line)
    if not isinstance(body, dict) or "what" not in body:
        raise ValueError(f"{line[:80]!r} is not a record: it must be a JSON object with the field 'what'")
    if body.get("schema", 0) > SCHEMA:
        raise ValueError(f"schema={body['schema']} must be at most {SCHEMA}: update tessera to read this record")
    known = {f.name for f in fields(Record)}
    unknown = sorted(set(body) - known)
    if unknown:
        raise ValueError(f"record fields {unknown} are unknown to schema {SCHEMA}: remove them, or update tessera")
    for name, part in (("what", What), ("where", Where), ("code", Code), ("how", How), ("comparison", Comparison)):
        if body.get(name) is not None:
            body[name] = part(**body[name])
    for name in ("samples", "density"):
        if body.get(name) is not None:
            body[name] = tuple(body[name])
    record = Record(**body)
    if record.schema < 2:
        suite, case = suite_and_case(record.what.op, record.command)
        record = replace(record, suite=suite, case=case)
    return _checked(record)


def _checked(record: Record) -> Record:
    """Return the record if its fields have the types and values that readers rely on, else raise ValueError."""
    for name, kind in (("what", What), ("where", Where), ("code", Code), ("how", How), ("comparison", Comparison)):
        part = getattr(record, name)
        if part is None and kind is Comparison:
            continue
        if not isinstance(part, kind):
            raise ValueError(f"{name}={part!r:.40} must be an object")
        for inner in fields(kind):
            if not _fits(getattr(part, inner.name), inner.type):
                raise ValueError(f"{name}.{inner.name}={getattr(part, inner.name)!r:.40} must be {inner.type}")
    if not isinstance(record.facts, Mapping):
        raise ValueError(f"facts={record.facts!r:.40} must be an object")
    for name in ("command", "suite", "case", "date", "unit", "error"):
        if not isinstance(getattr(record, name), str if name != "error" else str | None):
            raise ValueError(f"{name}={getattr(record, name)!r:.40} must be a string")
    single = (record.median, record.spread, record.flops, record.bytes, record.peak_fraction)
    single += (record.flops_per_s, record.bytes_per_s)
    for number in (*record.samples, *(record.density or ()), *(x for x in single if x is not None)):
        if not _fits(number, float):
            raise ValueError(f"{number!r:.40} must be a finite number, like every sample, density, median and rate")
    if record.error is None and (not record.samples or record.median is None):
        raise ValueError("a record must have an error, or samples and their median, but this one has neither")
    if record.samples and record.median is not None:
        median = statistics.median(record.samples)
        if not math.isclose(record.median, median, rel_tol=1e-9):
            raise ValueError(f"median={record.median} must be the median of its samples, {median}")
    return record


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON fits a type annotation; numbers must be finite, and a bool is not a number."""
    if isinstance(kind, types.UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool) and math.isfinite(value)
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    return isinstance(value, get_origin(kind) or kind)


def append(path: str | os.PathLike, records: Record | Iterable[Record]) -> None:
    """Append records to a file, as `files.append_lines` does."""
    batch = [records] if isinstance(records, Record) else list(records)
    files.append_lines(Path(path), "".join(encode(record) + "\n" for record in batch).encode())


def read(path: str | os.PathLike) -> list[Record]:
    """Read all records of a file in order, ignoring a last line that a kill cut short. Any other line that is not a
    record is a ValueError that gives its number."""
    records = []
    for number, line in enumerate(files.whole_lines(Path(path)), start=1):
        if not line.strip():
            continue
        try:
            records.append(decode(line.decode()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{Path(path).name} line {number} is not a record: {error}") from error
    return records


def latest(records: Iterable[Record]) -> dict[Key, Record]:
    """Return the last record of each key, in order of first appearance. A later error replaces an earlier figure.

    A case that crashed as a whole left one error record that names no kernel. The next record of the same case on the
    same machine removes that error.
    """
    table: dict[Key, Record] = {}
    crashes: dict[tuple[str, ...], Key] = {}
    for record in records:
        case = (*record.run, record.where.machine)
        if case in crashes:
            table.pop(crashes.pop(case), None)
        if record.error and not record.what.kernel:
            crashes[case] = record.key
        table[record.key] = record
    return table


def collect(folder: str | os.PathLike) -> list[Record]:
    """Read the records of every .jsonl file under a folder, in order of file names."""
    return [record for path in sorted(Path(folder).rglob("*.jsonl")) for record in read(path)]
