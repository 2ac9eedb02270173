"""Search block sizes for TPUs that are absent, by predicted time, and ship the results.

    python -m lab study tpu-blocks --chip v6e        # compiles; resumes where it stopped
    python -m lab study tpu-blocks --report          # records to evidence/, rows to attention/tables/

The search starts from the kernel's default (or a related case's winner), moves one field at a time to the next value in
the kernel's search space, and keeps a move that lowers the time. A config whose memory traffic alone takes as long as
the best config so far is skipped. Each other config becomes one line (a candidate) of the file of results, even if it
does not compile. A config whose line was written by another commit is compiled again.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from lab import campaign
from tessera.attention import tuned
from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import choose
from tessera.attention.kernel import Kernel
from tessera.core import files
from tessera.deviceless import inspection
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import inspection as tpu_inspection
from tessera.deviceless.tpu import predict
from tessera.measure import evidence

ANY = 1 << 20
"""Tokens of the longest calls that a row of a table covers."""
LEAST_GAIN = 1.01
"""Minimum gain (old time / new time) for which the search moves, and for which a table's row replaces the default. The
prediction cannot resolve smaller gains."""
RECORDS = Path("evidence/tpu-blocks.jsonl")

DEVICES = MappingProxyType(
    {"v5e": ("TPU v5 lite", 1), "v5p": ("TPU v5", 2), "v6e": ("TPU v6 lite", 1), "v7x": ("TPU7x", 1)}
)
"""Chip -> (device kind, cores) of one jax device, as jax reports them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of every chip's table: the call to compile, and the lengths and batches for which the row holds.

    Attributes:
        queries: number of query rows, the last of a longer prefill; all rows if None.
        intervals: sizes that the row covers: a name in `tuned.MEASURES` -> (low, high), both ends included.
        like: case whose winner is tried right after the default; the search then has half the budget.
    """

    role: str
    phase: str = "prefill"
    length: int
    queries: int | None = None
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    batch: int = 1
    tile: int = 128
    query_tile: int = 32
    fraction: float = 0.1
    intervals: Mapping[str, tuple[int, int]]
    like: str | None = None

    def call(self) -> tuple[AttentionSpec, Shapes]:
        """Return (spec, shapes); a sparse call lists `fraction` of the key tiles."""
        return inspection.call(
            role=self.role,
            phase=self.phase,
            batch=self.batch,
            length=self.length,
            queries=self.queries,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            spec=AttentionSpec(tile=self.tile, query_tile=self.query_tile),
            fraction=self.fraction,
        )

    def bucket(self) -> dict[str, Any]:
        """Return which calls the row covers: name in `tuned.MEASURES` -> value or interval that a call must have."""
        exact = ["dtype", "head_dim", "groups"]
        exact += ["kv_heads"] if self.phase == "decode" else []
        exact += ["tile"] if self.role != "dense" else []
        exact += ["query_tile"] if self.role != "dense" and self.phase == "prefill" else []
        found = tuned.measures(*self.call())
        return {name: found[name] for name in exact} | dict(self.intervals)


WHOLE = {"num_queries": (4096, ANY)}
LISTED = {"listed": (4096, 1 << 17)}
MIDDLE, LONG = (8192, 49151), (49152, ANY)

CASES = MappingProxyType(
    {
        "decode dense": Case(role="dense", phase="decode", length=131072,
                             intervals={"batch": (1, 3), "num_keys": (16384, ANY)}),
        "decode dense, 16 sequences": Case(role="dense", phase="decode", length=131072, batch=16,
                                           intervals={"batch": (4, 64), "num_keys": (16384, ANY)}),
        "decode sparse": Case(role="sparse", phase="decode", length=131072, intervals={"batch": (1, 3), **LISTED}),
        "decode sparse, 16 sequences": Case(role="sparse", phase="decode", length=131072, batch=16,
                                            intervals={"batch": (4, 64), **LISTED}),
        # A query tile lists a tenth of its visible keys, which averages to 0.05 of all keys over a causal prefill.
        "sparse, query tile 128": Case(role="sparse", length=131072, query_tile=128, fraction=0.05,
                                       intervals={"num_queries": (1024, ANY), **LISTED}),
        "sparse, query tile 32": Case(role="sparse", length=131072, fraction=0.05,
                                      intervals={"num_queries": (1024, ANY), **LISTED}),
        "dense, one head a group": Case(role="dense", length=16384, heads=16, kv_heads=16,
                                        intervals={**WHOLE, "num_keys": MIDDLE}),
        "dense": Case(role="dense", length=16384, intervals={**WHOLE, "num_keys": MIDDLE}),
        "dense, long": Case(role="dense", length=131072, intervals={**WHOLE, "num_keys": LONG}, like="dense"),
        # Mass memory grows with keys, so cap the interval at the length compiled.
        "score": Case(role="score", length=16384, intervals={**WHOLE, "num_keys": (8192, 16384)}),
        "score, long": Case(role="score", length=131072, query_tile=128,
                            intervals={**WHOLE, "num_keys": (49152, 131072)}, like="score"),
        "dense, a chunk": Case(role="dense", length=32768, queries=2048,
                               intervals={"num_queries": (1024, 4095), "num_keys": (8192, ANY)}, like="dense"),
        "dense, head dim 64": Case(role="dense", length=16384, head_dim=64, intervals={**WHOLE, "num_keys": MIDDLE}),
        "dense, head dim 256": Case(role="dense", length=16384, head_dim=256, heads=16, kv_heads=4,
                                    intervals={**WHOLE, "num_keys": MIDDLE}),
        "dense, float32": Case(role="dense", length=16384, dtype="float32", intervals={**WHOLE, "num_keys": MIDDLE}),
    }
)  # fmt: skip
"""Name -> call that gets a row in the tables of block sizes, in the order of the search."""


def on_chip(chip: str):
    """Return a context in which a kernel that asks jax for its device gets this chip."""
    kind, cores = DEVICES[chip]
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("chip",), abstract_device=AbstractDevice(kind, cores, "tpu"))
    )


def kernel_of(case: Case) -> Kernel:
    """Return the kernel that dispatch chooses for the case on a TPU."""
    return choose(*case.call(), platform="tpu")


def around(config: Any, name: str, space: list[Any]) -> Iterator[Any]:
    """Yield `config` with field `name` at its next smaller and its next larger value, where the space has them."""
    mine = asdict(config)
    line = {asdict(c)[name]: c for c in space if {**asdict(c), name: mine[name]} == mine} | {mine[name]: config}
    values = sorted(line)
    at = values.index(mine[name])
    yield from (line[values[i]] for i in (at - 1, at + 1) if 0 <= i < len(values))


def search(
    first: list[Any],
    space: list[Any],
    ms_of: Callable[[Any], float | None],
    floor_of: Callable[[Any], float],
    names: Sequence[str],
    budget: int,
) -> None:
    """Try every config of `first`, then descend from the best one, field by field, until no neighbour is better.

    Args:
        first: the default, then other promising configs.
        space: every config that may be tried.
        ms_of: tries a config and returns its milliseconds; None if it does not compile.
        floor_of: returns a lower bound on a config's milliseconds; a config whose bound is too high is not tried.
        names: fields to move, in this order.
        budget: maximum number of configs tried.
    """
    tried = {}

    def better(config: Any, than: Any) -> bool:
        goal = math.inf if than is None or tried[than] is None else tried[than] / LEAST_GAIN
        if config in tried or len(tried) >= budget or floor_of(config) > goal:
            return False
        tried[config] = ms_of(config)
        return tried[config] is not None and tried[config] <= goal

    best = None
    for config in first:
        best = config if better(config, best) else best
    best = first[0] if best is None else best
    moved = True
    while moved:
        moved = False
        for name in names:
            while step := next((c for c in around(best, name, space) if better(c, best)), None):
                best, moved = step, True


def attempt(chip: str, case: Case, kernel: str, config: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Compile one config and predict its time."""
    spec, shapes = case.call()
    found = tpu_inspection.inspect_call(chip, spec, shapes, kernel=kernel, config=config, limit_s=limit_s)
    line = {"config": dict(config), "compile_s": round(found.compile_s, 1)}
    if not found.compiled:
        return {**line, "error": str(found.error)}
    return {
        **line,
        "ms": found.predicted_ms,
        "compute_ms": round(found.prediction.compute_ms, 6),
        "bytes_ms": round(found.prediction.dma_ms, 6),
        "bound_by": found.bound_by,
    }


def run(chip: str, name: str, found: list[dict], options: Any) -> None:
    """Search one case on one chip. Reuse the lines in `found`; append new lines to `found` and the file of results."""
    case, code = CASES[name], asdict(evidence.code())
    kernel = kernel_of(case)
    with on_chip(chip):
        default = kernel.default_config(*case.call())
        space = list(kernel.search_space(*case.call()))
    bytes_per_ms = 1e-3 * predict.device(chip).bytes_per_s * predict.CALIBRATED.bandwidth_share
    first, budget = [default], options.budget
    first += [replace(default, **json.loads(changes)) for changes in options.first]
    if case.like is not None:
        seed = winner(lines_of(found, chip, case.like))
        first += [] if seed is None else [kernel.Config(**seed["config"])]
        budget = (budget + 1) // 2

    def ms_of(config: Any) -> float | None:
        known = [line for line in lines_of(found, chip, name) if line["config"] == asdict(config)]
        known = [line for line in known if campaign.is_done(line, code)]
        if not known:
            line = {"chip": chip, "case": name, "default": config == default}
            line |= attempt(chip, case, kernel.name, asdict(config), options.limit_s) | code
            found.append(line)
            files.append_line(options.out, line)
            said = f"{line['ms']:.4f} ms ({line['bound_by']})" if "ms" in line else line["error"][:80]
            print(f"{chip} {name}: {config} {said}, {line['compile_s']} s", flush=True)
            known = [line]
        return known[0].get("ms")

    def floor_of(config: Any) -> float:
        return kernel.executions(*case.call(), config)[predict.BYTES] / bytes_per_ms

    names = options.field or [field.name for field in fields(default)]
    search(first, space, ms_of, floor_of, names, budget)


def lines_of(found: list[dict], chip: str, name: str) -> list[dict]:
    """Return one case's candidates on one chip, in the order tried, from the commit of the last candidate only."""
    own = [line for line in found if (line["chip"], line["case"]) == (chip, name)]
    return campaign.of_last_code(own, lambda line: json.dumps(line["config"]))


def winner(lines: list[dict]) -> dict | None:
    """Return the fastest candidate, or the default if the gain is below LEAST_GAIN; None if no candidate compiled."""
    compiled = [line for line in lines if "ms" in line]
    if not compiled:
        return None
    best = min(compiled, key=lambda line: line["ms"])
    default = next((line for line in compiled if line["default"]), best)
    return best if default["ms"] >= LEAST_GAIN * best["ms"] else default


def record_of(chip: str, name: str, lines: list[dict]) -> evidence.Record:
    """Build the record of a case on a chip: every candidate, and the winner as its config."""
    case, best = CASES[name], winner(lines)
    spec, shapes = case.call()
    default = next(line for line in lines if line["default"])
    gain = default["ms"] / best["ms"] if "ms" in default else None
    record = evidence.make(
        evidence.What(
            op="block sizes",
            kernel=kernel_of(case).name,
            workload=f"{name}, {chip}",
            dtype=shapes.dtype,
            config=best["config"],
        ),
        [best["ms"]],
        command=f"python -m lab study tpu-blocks --chip {chip}",
        unit="ms",
        how=evidence.How(check="predicted from the compiler's schedule, not measured"),
        comparison=None if gain is None else evidence.Comparison(against="the kernel's default", ratio=gain),
        facts={
            "spec": asdict(spec),
            "shapes": shapes._asdict(),
            "default": {k: v for k, v in default.items() if k not in ("chip", "case", "default")},
            "candidates": [{k: v for k, v in x.items() if k not in ("chip", "case", "default")} for x in lines],
        },
    )
    return campaign.of_its_code(record, lines[-1])


def row_of(name: str, record: evidence.Record) -> tuned.Row:
    """Build the table's row from the case's record."""
    gain = record.comparison.ratio if record.comparison else None
    return tuned.Row(
        kernel=record.what.kernel,
        bucket=CASES[name].bucket(),
        config=record.what.config,
        gain=None if gain is None else round(gain, 4),
        record={"file": RECORDS.name, "workload": record.what.workload, "date": record.date},
    )


def report(found: list[dict], chips: list[str]) -> None:
    """Append the records that changed, print the gains, and write the tables of the chips in `found`.

    A table has a row for every case that has a record, from this search or an earlier one.
    """
    held = {record.what.workload: record for record in (evidence.read(RECORDS) if RECORDS.exists() else [])}
    for chip in (chip for chip in chips if any(line["chip"] == chip for line in found)):
        rows = []
        for name in CASES:
            record, lines = held.get(f"{name}, {chip}"), lines_of(found, chip, name)
            if winner(lines) is not None:
                made = record_of(chip, name, lines)
                if record is None or (record.what, record.facts) != (made.what, json.loads(json.dumps(made.facts))):
                    record = made
                    evidence.append(RECORDS, record)
            if record is None:
                continue
            rows.append(row_of(name, record))
            if lines:
                print(f"{chip} {name}: {rows[-1].gain} x the default, {len(lines)} tried, {dict(rows[-1].config)}")
        tuned.write(tuned.TABLES / f"{chip}.jsonl", rows)


def study(options: Any) -> int:
    """Search missing cases, or, with --report, append records and write the tables."""
    campaign.check_names("--case", options.case, tuple(CASES))
    found = files.read_lines(options.out)
    chips = options.chip or list(tpu.TOPOLOGIES)
    if options.report:
        report(found, chips)
        return 0
    evidence.code()  # before the first compile: caches the commit that is checked out now
    for name in options.case or CASES:
        for chip in chips:
            run(chip, name, found, options)
    return 0
