"""Run benchmarks and append a record per contender. Contenders take turns on fresh inputs; their outputs are checked.

    python -m lab bench --suite cpu                   run a suite, append to evidence/<device>.jsonl
    python -m lab bench --suite cpu --only start_up   run one case
    python -m lab bench --suite cpu --resume          run only the cases without a record from this commit
    python -m lab bench --suite cpu --gate            store nothing; exit code 1 if a case failed or a figure got worse

On a slow machine a case runs fewer rounds (at least three, or one for the longest prompts), so that the suite takes
about 15 minutes at most. A case selected with --only runs every round. A figure from fewer than five rounds has no
confidence interval.

A failed case becomes a record with its error, and the exit code is 1. Exit code 3 of a comparison means undecided: no
figure certainly got worse, but a figure was too noisy to judge or was not measured again.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from rich.console import Console

from lab.bench import answers, attention, model, same_file
from lab.bench.stand import SMOKE, Sizes, Stand, compiled_anew
from tessera.core import hardware
from tessera.measure import compare, evidence
from tessera.measure.errors import plain
from tessera.measure.evidence import Record, What


class Case(NamedTuple):
    """One benchmark: `op` is the kind of operation that it measures, and `run` yields its records."""

    op: str
    run: Callable[[Stand], Iterator[Record]]


CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "dense_prefill_f32": Case("attention", partial(attention.dense_prefill, dtype="float32")),
        "dense_prefill_bf16": Case("attention", partial(attention.dense_prefill, dtype="bfloat16")),
        "sparse_prefill": Case("attention", attention.sparse_prefill),
        "peer_model": Case("model", model.peer_model),
        "crossover": Case("model", model.crossover),
        "prefill_memory": Case("memory", model.prefill_memory),
        "compilation": Case("compile", model.compilation),
        "start_up": Case("start", model.start_up),
        "kascade_prefill": Case("model", model.kascade_prefill),
        "pass_keys": Case("quality", answers.pass_keys),
        "smollm2_start": Case("start", same_file.start),
        "smollm2_1k": Case("model", partial(same_file.lengths, length=1024)),
        "smollm2_4k": Case("model", partial(same_file.lengths, length=4096)),
        "smollm2_8k": Case("model", partial(same_file.lengths, length=same_file.LONGEST)),
    }
)
"""Every case by name. To add one, write a generator of records and add a line here."""

SAME_FILE: Final = tuple(name for name in CASES if name.startswith("smollm2_"))
SPEED: Final = tuple(name for name, case in CASES.items() if case.op != "quality" and name not in SAME_FILE)


class Suite(NamedTuple):
    """Sizes of the cases, and the names of the cases that the suite runs by default."""

    sizes: Sizes
    cases: tuple[str, ...]


SUITES: Final[Mapping[str, Suite]] = MappingProxyType(
    {
        "cpu": Suite(Sizes(), SPEED),
        "demo": Suite(Sizes(), ("pass_keys",)),
        "smoke": Suite(SMOKE, (*SPEED, "pass_keys")),
        "smollm2": Suite(Sizes(suite_s=math.inf), SAME_FILE),
    }
)
"""Suites by name: "cpu" measures speed, "demo" the shipped model's answers, "smollm2" a real model's file against
llama.cpp and transformers (over an hour; fetches the model); "smoke" checks that the cases of "cpu" and "demo" run."""


def run(
    suite: str = "cpu",
    *,
    out: str | os.PathLike | None = None,
    peer_python: str | os.PathLike = ".venv-peers/bin/python",
    only: Sequence[str] = (),
    resume: bool = False,
) -> int:
    """Run a suite and append its records.

    Args:
        suite: "cpu", "demo", "smollm2" or "smoke".
        out: file to append to; None means evidence/<device>.jsonl under the working folder.
        peer_python: interpreter of the environment with torch and transformers (`make peers`).
        only: names of cases; empty runs the whole suite.
        resume: skip cases that this commit has already recorded in the file without an error.

    Returns:
        0, or 1 if a case failed (its record says why).

    Raises:
        ValueError: the suite or a case is unknown.
    """
    if suite not in SUITES:
        raise ValueError(f"suite={suite!r} must be one of {sorted(SUITES)}")
    unknown = sorted(set(only) - set(CASES))
    if unknown:
        raise ValueError(f"only={unknown} must name cases: {list(CASES)}")
    out = Path("evidence") / f"{hardware.device_slug()}.jsonl" if out is None else Path(out)
    done = _done(out, suite) if resume else set()
    sizes, cases = SUITES[suite].sizes, tuple(only or SUITES[suite].cases)
    stand, console, failed = Stand(suite, sizes, peer_python), Console(stderr=True), False
    begin = time.monotonic()
    try:
        with compiled_anew():
            for number, name in enumerate(cases, start=1):
                if not only:  # a case gets an equal share of time and what earlier cases left unused
                    stand.ends = begin + sizes.suite_s * number / len(cases)
                if name in done:
                    console.print(f"{name}: already recorded")
                    continue
                records = _run_case(stand, name)
                evidence.append(out, records)
                failed |= any(record.error for record in records)
                for record in records:
                    console.print(f"{name}: {_line(record)}", highlight=False)
                    for peer, reason in record.facts.get("skipped", {}).items():
                        console.print(f"{name}: {peer} is skipped: {reason}", highlight=False, markup=False)
    finally:
        stand.close()
    return int(failed)


def gate(suite: str = "cpu", **options) -> int:
    """Run a suite and compare it with this device's stored records.

    Args:
        suite, options: as for `run`, except out and resume.

    Returns:
        1 if a case failed or a figure is worse than the stored one beyond noise; otherwise `compare.UNJUDGED` if a
        figure could not be judged or is missing; otherwise 0.

    Raises:
        ValueError: there are no stored records to compare with, or the suite or a case is unknown.
    """
    stored = Path("evidence") / f"{hardware.device_slug()}.jsonl"
    if not stored.exists():
        raise ValueError(f"{stored} does not exist, so there is nothing to compare with: run without --gate first")
    if suite not in SUITES:
        raise ValueError(f"suite={suite!r} must be one of {sorted(SUITES)}")
    asked = set(options.get("only") or ())
    old = [r for r in evidence.read(stored) if r.suite == suite and (not asked or r.case in asked)]
    if not old:
        raise ValueError(f"{stored} has no record of --suite {suite} for these cases: run them without --gate first")
    with tempfile.TemporaryDirectory(prefix="tessera-gate-") as folder:
        fresh = Path(folder) / "fresh.jsonl"
        run(suite, out=fresh, **options)
        return compare.compare(old, evidence.read(fresh), f"{stored} and this run")


def _run_case(stand: Stand, name: str) -> list[Record]:
    """Run a case and return its records, or a single record with the error if it failed."""
    stand.case, case = name, CASES[name]
    try:
        return list(case.run(stand))
    except (RuntimeError, ValueError, TypeError, MemoryError, TimeoutError, OSError) as error:
        what = What(op=case.op, kernel="", workload=name, title=name.replace("_", " "))
        return [evidence.make(what, (), command=stand.command(), error=plain(error))]


def _done(path: Path, suite: str) -> set[str]:
    """Return the suite's cases that this commit has recorded in the file, on this machine and without any error."""
    code = evidence.code()
    if code.dirty or code.commit is None or not path.exists():
        return set()
    machine = evidence.here().machine
    mine = [r for r in evidence.read(path) if (r.code, r.suite, r.where.machine) == (code, suite, machine)]
    return {r.case for r in mine} - {r.case for r in mine if r.error}


def _line(record: Record) -> str:
    """Return a one-line summary of a record, to print while the suite runs."""
    who = f"{record.what.kernel or record.what.workload} {record.what.dtype}".strip()
    if record.error:
        return f"{who}: error: {record.error}"
    text = f"{who}: median {record.median:.4g} {record.unit}, spread {record.spread or 0:.2g}"
    versus = record.comparison
    if versus is None:
        return text
    said = "" if versus.met is None else f", target {versus.target} {'met' if versus.met else 'MISSED'}"
    return f"{text}; {versus.ratio:.2f}x {versus.against}{said}"
