"""Tuned block sizes, which replace a kernel's default config.

They ship as tables, with one file per device and one row per line. A row applies to the calls of its kernel that match
its *bucket*: a map from *measures* (properties of a call, see `measures`) to the exact value that a call must have, or
to the interval [low, high], both ends included, in which its value must lie. Measures that change the shape of the work
need an exact value; lengths and batch sizes have intervals around the values that were searched. All searches ran
causal calls without window or softcap, on keys in the queries' dtype, so rows apply only to such calls.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.kernel import Kernel
from tessera.core import files, hardware

TABLES = Path(__file__).with_name("tables")

MEASURES = (
    *("dtype", "head_dim", "groups", "kv_heads", "batch", "num_queries", "num_keys"),
    *("tile", "query_tile", "listed"),
)
"""Measures that a bucket may name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    kernel: str  # name of a kernel in `dispatch.KERNELS`, which includes the role
    bucket: Mapping[str, Any]  # per measure, the value that a call must have, or the interval (low, high) of values
    config: Mapping[str, Any]  # fields of the kernel's Config
    # time of the default config / time of this one; 1 if the default won, None if the default does not compile
    gain: float | None
    record: Mapping[str, str]  # "file" in evidence/, "workload" and "date" of the record that lists every config tried

    def __post_init__(self):
        for name, wanted in self.bucket.items():
            if name not in MEASURES:
                raise ValueError(f"bucket names {name!r}, which must be one of {', '.join(MEASURES)}")
            if isinstance(wanted, tuple) and not (len(wanted) == 2 and wanted[0] <= wanted[1]):
                raise ValueError(f"bucket[{name!r}]={wanted} must be a value or an interval [low, high], low <= high")
        if set(self.record) != {"file", "workload", "date"}:
            raise ValueError(f"record={dict(self.record)} must have exactly the keys file, workload and date")

    def holds(self, kernel: str, spec: AttentionSpec, shapes: Shapes) -> bool:
        """Return whether this row applies to a call."""
        plain = spec.causal and spec.window is None and spec.softcap is None and not shapes.scaled
        if kernel != self.kernel or not plain:
            return False
        found = measures(spec, shapes)
        return all(
            wanted[0] <= (found[name] or 0) <= wanted[1] if isinstance(wanted, tuple) else found[name] == wanted
            for name, wanted in self.bucket.items()
        )


def measures(spec: AttentionSpec, shapes: Shapes) -> dict[str, Any]:
    """Return the measures that buckets test; "listed" is C * tile, in keys, or None if there is no selection."""
    return {
        "dtype": shapes.dtype,
        "head_dim": shapes.head_dim,
        "groups": shapes.num_heads // shapes.num_kv_heads,
        "kv_heads": shapes.num_kv_heads,
        "batch": shapes.batch,
        "num_queries": shapes.num_queries,
        "num_keys": shapes.num_keys,
        "tile": spec.tile,
        "query_tile": spec.query_tile,
        "listed": None if shapes.capacity is None else shapes.capacity * spec.tile,
    }


def config(kernel: Kernel, spec: AttentionSpec, shapes: Shapes) -> Any:
    """Return the kernel's Config for a call: from the table of the device that the program is traced for, or the
    kernel's default if no row applies.
    """
    for row in table(device()):
        if row.holds(kernel.name, spec, shapes):
            return built(row, kernel)
    return kernel.default_config(spec, shapes)


def built(row: Row, kernel: Kernel) -> Any:
    """Build the kernel's Config from a row, or raise ValueError if the row does not fit it."""
    try:
        return kernel.Config(**row.config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tuned config {dict(row.config)} does not fit {kernel.name}: {error}") from error


def device() -> str:
    """Name the table of the device that the program is traced for: "v6e", "h200", or a CPU's name as in evidence/."""
    on = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if on is None else on.device_kind
    chip = hardware.chip(kind)
    if chip is not None:
        return chip.name
    return this_cpu() if kind == "cpu" else kind


this_cpu = functools.cache(hardware.device_slug)
"""Name the table of this host's CPU; cached, because the look-up reads /proc."""


@functools.cache
def table(name: str) -> tuple[Row, ...]:
    """Return the rows of a device's table, read on first use; an empty tuple if the device has no table."""
    path = TABLES / f"{name}.jsonl"
    return read(path) if path.exists() else ()


def read(path: Path) -> tuple[Row, ...]:
    """Read the rows of a table file; a ValueError names the first line that is not a row."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            body = json.loads(line)
            bucket = {k: tuple(v) if isinstance(v, list) else v for k, v in body["bucket"].items()}
            rows.append(Row(**{**body, "bucket": bucket}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path.name} line {number} is not a row of tuned block sizes: {error}") from error
    return tuple(rows)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merge rows into a table file: a new row replaces old rows of the same kernel with the same bucket or workload.

    The workload is compared too because a new search of a workload may have changed the bucket.
    """
    rows = tuple(rows)
    found_anew = {_searched(row) for row in rows}
    kept = {_key(row): row for row in (read(path) if path.exists() else ()) if _searched(row) not in found_anew}
    kept |= {_key(row): row for row in rows}
    lines = [json.dumps(asdict(row)) for row in sorted(kept.values(), key=_key)]
    files.replace_text(path, "".join(f"{line}\n" for line in lines))


def _key(row: Row) -> tuple[str, str]:
    return row.kernel, json.dumps(row.bucket, sort_keys=True)


def _searched(row: Row) -> tuple[str, str]:
    return row.kernel, row.record["workload"]
