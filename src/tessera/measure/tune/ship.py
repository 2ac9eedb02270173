"""Turn a finished search into a record, and into a row of the table that dispatch reads."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tessera.attention import tuned
from tessera.core import hardware
from tessera.core.files import check_writable, sole_writer
from tessera.measure import evidence
from tessera.measure.tune import Budget, Task


def record(task: Task, budget: Budget, found: Mapping[str, Any], command: str) -> evidence.Record:
    """Build the record of all candidates; its one sample is the shipped config's gain over the default."""
    s, spec = task.shapes, task.spec
    names = ("default", "interval", "elsewhere", "confirmed", "refused", "gain", "rank_correlation", "candidates")
    facts = {name: found[name] for name in names if found.get(name) is not None}
    shipped = found["gain"] if found["winner"] != found["default"] else 1.0
    return evidence.make(
        what_of(task, found["winner"]),
        [shipped],
        command=command,
        unit="gain",
        how=evidence.How(
            warmup=1,
            iterations=budget.rounds,
            interleaved=True,
            check="rows of the first and last call against float64",
        ),
        comparison=evidence.Comparison(against="default", ratio=shipped),
        facts=facts
        | {"budget": vars(budget), "resumed_answers": found["replayed"]}
        | {"spec": asdict(spec), "shapes": s._asdict()},
    )


def failed(task: Task, error: Exception, command: str) -> evidence.Record:
    """Build the record of a search that failed."""
    return evidence.make(what_of(task, {}), (), command=command, unit="gain", error=str(error))


def what_of(task: Task, config: Mapping[str, Any]) -> evidence.What:
    """Return the `what` field for the search's record: the tuned call, and the config found for it."""
    s = task.shapes
    size = f"{s.num_queries:,} x {s.num_keys:,}, heads {s.num_heads} of {s.num_kv_heads} x {s.head_dim}"
    title = f"{size}, tile {task.spec.tile}" if task.kernel.role == "sparse" else size
    return evidence.What(
        op="tune", kernel=task.kernel.name, workload=task.name, dtype=s.dtype, title=title, config=config
    )


def row(task: Task, found: Mapping[str, Any], made: evidence.Record, file: Path) -> tuned.Row:
    """Build the table's row.

    It covers calls with the same dtype, head dim, groups and tiles, lengths within a factor of two, and at most twice
    the batch.
    """
    found_measures = tuned.measures(task.spec, task.shapes)
    decode = task.kernel.phase == "decode"
    exact = ["dtype", "head_dim", "groups"] + (["kv_heads"] if decode else [])
    exact += ["tile"] if task.kernel.role != "dense" else []
    exact += ["query_tile"] if task.kernel.role != "dense" and not decode else []
    ranged = ["num_keys"] if task.shapes.capacity is None else ["listed"]
    ranged += [] if decode else ["num_queries"]
    bucket = {name: found_measures[name] for name in exact}
    bucket |= {name: (found_measures[name] // 2 + 1, found_measures[name] * 2) for name in ranged}
    bucket["batch"] = (1, 2 * task.shapes.batch)
    return tuned.Row(
        kernel=task.kernel.name,
        bucket=bucket,
        config=found["winner"],
        gain=round(made.median, 4),
        record={"file": file.name, "workload": made.what.workload, "date": made.date},
    )


def run(workload: str, role: str, budget: Budget, *, out: Path | None = None, table: Path | None = None) -> int:
    """Tune one catalogue workload, show progress, and store the record and the row. Return exit code 0.

    Args:
        out: file of the record; evidence/tune-<device>.jsonl if None.
        table: file of the row; the shipped table of this device if None.

    Raises:
        ValueError: the workload is unknown, or the journal belongs to another search.
        tune.Failed: the default fails, or default and winner could not be timed; `out` gets a record of the error.
    """
    from rich.console import Console

    from tessera.measure import tune

    task, slug = tune.task_of(workload, role), hardware.device_slug()
    out = Path("evidence") / f"tune-{slug}.jsonl" if out is None else out
    table = tuned.TABLES / f"{tuned.device()}.jsonl" if table is None else table
    check_writable(table, flag="--table")
    journal = Path("build/tune") / f"{slug}-{workload}-{role}.jsonl"
    console = Console(stderr=True, highlight=False)
    console.print(f"{task.kernel.name} on {task.name}; Ctrl-C stops, the same command resumes ({journal})")
    journal.parent.mkdir(parents=True, exist_ok=True)
    with sole_writer(journal):
        try:
            found = tune.tune(task, budget, journal, on_step=console.print)
        except tune.Failed as failure:
            evidence.append(out, failed(task, failure, command(workload, role, budget)))
            journal.unlink()
            raise
        made = record(task, budget, found, command(workload, role, budget))
        evidence.append(out, made)
        tuned.write(table, [row(task, found, made, out)])
        journal.unlink()  # the record holds everything measured
    print_result(console, found)
    return 0


def command(workload: str, role: str, budget: Budget) -> str:
    """Return the command that repeats a search: candidates, seed, and all options that differ from their defaults."""
    given = {"candidates": budget.candidates, "seed": budget.seed}
    given |= {f.name: getattr(budget, f.name) for f in fields(budget) if getattr(budget, f.name) != f.default}
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    return f"tessera tune --workload {workload} --role {role} {words}"


def print_result(console, found: Mapping[str, Any]) -> None:
    """Print the winner, its gain and the gain's interval, and the rank correlations of estimates and times."""
    if found["winner"] == found["default"]:
        refused = f"; {found['refused']} was not confirmed ({found['gain']:.3f}x)" if "refused" in found else ""
        console.print(f"the default stays: {found['default']}{refused}")
    else:
        low, high = found["interval"]
        elsewhere = ", ".join(f"{name}: {gain:.3f}x" for name, gain in found["elsewhere"].items())
        console.print(f"{found['winner']}: {found['gain']:.3f}x the default ({low:.3f} to {high:.3f}); {elsewhere}")
    for name, value in found["rank_correlation"].items():
        console.print(f"rank correlation, {name.replace('_', ' ')}: {'none' if value is None else f'{value:.2f}'}")
