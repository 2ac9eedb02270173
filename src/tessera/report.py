"""Records to Markdown: the tables of the README and of docs/evidence.md are written by this module and by nobody else.

A table stands between `<!-- records:NAME -->` and `<!-- end -->`. `python -m tessera.report` rewrites them all from
the files under evidence/; a test fails while one differs from what the records say.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tessera import evidence
from tessera.evidence import Key, Record

PAGES = ("README.md", "docs/evidence.md")
"""Where rendered tables stand."""

_BLOCK = re.compile(r"(?P<open><!-- records:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<close><!-- end -->)", re.DOTALL)


def quantity(value: float, unit: str) -> str:
    """A value with three significant digits and its unit, scaled for reading: 0.0123 s is 12.3 ms."""
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
            if abs(value) * factor >= 1:
                return f"{_three(value * factor)} {name}"
        return f"{_three(value * 1e6)} us"
    if unit == "bytes":
        for factor, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if abs(value) >= factor:
                return f"{_three(value / factor)} {name}"
        return f"{value:.0f} bytes"
    if unit == "fraction":
        return f"{100 * value:.1f} %"
    return f"{_three(value)} {unit}".strip()


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - int(f"{abs(value):e}".split("e")[1]))
    return f"{value:,.{digits}f}"


def side_by_side(records: Iterable[Record]) -> list[Record]:
    """The records with those of one measurement on several machines next to each other."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(record.key._replace(machine=""), []).append(record)
    return [record for group in groups.values() for record in group]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. A first cell equal to the one above is left empty, so that what belongs together is seen."""
    lines, above = [header, ["---"] * len(header)], ""
    for first, *rest in rows:
        lines.append(["" if first == above else first, *rest])
        above = first
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def provenance(records: Iterable[Record]) -> str:
    """Where the records of one table come from, one sentence per machine.

    Raises:
        ValueError: a record that does not name its commit or its command.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.code.commit is None or not record.command:
            raise ValueError(f"record {record.key} must name a commit and a command before it can be published")
        where = record.where
        groups.setdefault(f"{where.machine}, jax {where.versions.get('jax', '?')}", []).append(record)
    lines = []
    for place, group in groups.items():
        commits = sorted({_commit(record) for record in group})
        dates = sorted({record.date[:10] for record in group})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        commands = sorted({re.sub(r" --only \S+", "", record.command) for record in group})
        lines.append(
            f"{place}; commit {', '.join(commits)}; {when}; repeat with {', '.join(f'`{c}`' for c in commands)}."
        )
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _commit(record: Record) -> str:
    return record.code.commit[:9] + (" with uncommitted changes" if record.code.dirty else "")


def _title(record: Record) -> str:
    dtype = f", {record.what.dtype}" if record.what.dtype else ""
    return (record.what.title or record.what.workload) + dtype


def _result(record: Record) -> str:
    return f"error: {record.error}" if record.error or record.median is None else quantity(record.median, record.unit)


def headline(records: Sequence[Record]) -> str:
    """The compared measurements in short: a row per workload, a column per machine, targets missed in bold."""
    chosen = [r for r in records if r.what.op in ("attention", "model") and r.comparison and r.comparison.target]
    machines = sorted({r.where.machine for r in chosen})
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in chosen:
        lead = (_title(record), f"{record.what.kernel} against {record.comparison.against}")
        rows.setdefault(lead, {})[record.where.machine] = record
    lines = []
    for (title, sides), found in rows.items():
        shown = [_short(found[m].comparison) if m in found else "" for m in machines]
        [target, *_] = {r.comparison.target for r in found.values()}
        lines.append([f"{title}: {sides}", *shown, f"{target}x"])
    return markdown(["faster by", *machines, "target"], lines) + provenance(chosen) if lines else ""


def _short(versus: evidence.Comparison) -> str:
    return f"{versus.ratio:.2f}x" if versus.met else f"**{versus.ratio:.2f}x**"


def speed(records: Sequence[Record]) -> str:
    """Every compared measurement: ours, the other side of the same run, ratio with interval, target."""
    by_key = {record.key: record for record in records}
    rows, used = [], []
    for record in records:
        if record.what.op not in ("attention", "model"):
            continue
        lead = [_title(record), record.where.machine]
        if record.error:
            rows.append([*lead, f"{record.what.kernel} {_result(record)}".strip(), "", "", "", ""])
            used.append(record)
        if record.comparison is None:
            continue
        versus = record.comparison
        other = by_key.get(record.key._replace(kernel=versus.against))
        shown = f"{versus.against} {_result(other)}" if other else versus.against
        interval = f" ({versus.interval[0]:.2f} to {versus.interval[1]:.2f})" if versus.interval else ""
        target = f"{versus.target}x: {'met' if versus.met else '**missed**'}" if versus.target else "none"
        rows.append([*lead, _result(record), shown, f"{versus.ratio:.2f}x{interval}", _keys_read(record), target])
        used += [record, other] if other else [record]
    if not rows:
        return ""
    header = ["workload", "machine", "Tessera", "against", "ratio (95 %)", "keys read", "target"]
    return markdown(header, rows) + provenance(used)


def _keys_read(record: Record) -> str:
    return f"{100 * sum(record.density) / len(record.density):.0f} %" if record.density else "all"


def memory(records: Sequence[Record]) -> str:
    """Peak memory at every length in one row, and the straight line through it."""
    chosen = [record for record in records if record.what.op == "memory"]
    measured = [record for record in chosen if not record.error]
    lengths = sorted({record.what.config["tokens"] for record in measured})
    series: dict[tuple[str, str], dict[int, Record]] = {}
    for record in measured:
        tokens = record.what.config["tokens"]
        words = f"{_title(record).replace(f' {tokens:,} tokens,', '')}, {record.what.kernel}"
        series.setdefault((words, record.where.machine), {})[tokens] = record
    rows = [
        [*lead, *(_result(found[n]) if n in found else "" for n in lengths), _growth(found)]
        for lead, found in series.items()
    ]
    rows += [[_title(r), r.where.machine, *[""] * len(lengths), _result(r)] for r in chosen if r.error]
    header = ["memory", "machine", *(f"{n:,} tokens" for n in lengths), "growth"]
    return markdown(header, rows) + provenance(chosen) if rows else ""


def _growth(found: Mapping[int, Record]) -> str:
    """The straight line that the run fitted over all its lengths; the record of the longest one holds it."""
    facts = found[max(found)].facts
    if "slope_bytes_per_token" not in facts:
        return ""
    slope, off = quantity(facts["slope_bytes_per_token"], "bytes"), quantity(facts["worst_residual"], "fraction")
    return f"{slope} per token; a line fits within {off} of the largest"


def costs(records: Sequence[Record]) -> str:
    """Compile time and start-up: one figure each."""
    chosen = [r for r in records if r.what.op in ("compile", "start")]
    rows = [[_title(r), r.where.machine, r.what.kernel, _result(r), _notes(r.facts)] for r in chosen]
    header = ["what", "machine", "how", "median", "also"]
    return markdown(header, rows) + provenance(chosen) if rows else ""


def _notes(facts: Mapping[str, object]) -> str:
    """Single numbers and words; the unit at the end of a name is read, lists stay in the record."""
    shown = []
    for name, value in facts.items():
        words = name.removesuffix("_s").replace("_", " ")
        if isinstance(value, float):
            shown.append(f"{words} {quantity(value, 's' if name.endswith('_s') else '')}")
        elif isinstance(value, int | str):
            shown.append(f"{words} {value}")
    return "; ".join(shown)


def quality(records: Sequence[Record]) -> str:
    """Answers kept: accuracy of each policy per task, with the share of keys read."""
    chosen = [r for r in records if r.what.op in ("quality", "plan study")]
    rows = []
    for record in chosen:
        trials = str(record.facts.get("trials", record.how.iterations))
        perplexity = record.facts.get("perplexity")
        shown = _three(perplexity) if isinstance(perplexity, float) else ""
        lead = [_title(record), record.where.machine, _policy(record)]
        rows.append([*lead, _result(record), trials, _keys_read(record), shown])
    header = ["task", "machine", "policy", "right", "trials", "keys read", "perplexity"]
    return markdown(header, rows) + provenance(chosen) if rows else ""


def _policy(record: Record) -> str:
    """The policy, and what sets it apart in a study of several."""
    config = record.what.config
    parts = [f"{name.replace('_', ' ')} {config[name]}" for name in ("anchors", "tile", "window") if config.get(name)]
    return ", ".join([record.what.kernel, *parts])


def tpu(records: Sequence[Record]) -> str:
    """What the TPU kernels are held to, predicted: a row per figure, a column per chip."""
    chosen = [r for r in records if r.what.op == "predicted figure"]
    figures: dict[str, dict[str, Record]] = {}
    for record in chosen:
        figure, _, chip = record.what.workload.rpartition(", ")
        figures.setdefault(figure, {})[chip] = record
    chips = sorted({chip for found in figures.values() for chip in found})
    rows = [[figure, *(_held(found.get(chip)) for chip in chips)] for figure, found in figures.items()]
    return markdown(["predicted", *chips], rows) + provenance(chosen) if rows else ""


def _held(record: Record | None) -> str:
    if record is None or record.comparison is None:
        return ""
    versus = record.comparison
    return f"{versus.ratio:.2f} ({versus.target}: {'met' if versus.met else '**missed**'})"


def prediction(records: Sequence[Record]) -> str:
    """How far predicted times are from measured ones, per chip; what misses its goal in bold."""
    chosen = [r for r in records if r.what.op == "prediction"]
    rows = []
    for record in chosen:
        facts, plain = record.facts, record.facts["no_fitted_constant"]
        middle, worst = (facts[f"{name}_absolute_error"] for name in ("median", "p90"))
        by_dim = {dim: found["spearman"] for dim, found in facts.get("by_head_dim", {}).items()}
        rows.append(
            [
                _title(record),
                str(facts["points"]),
                _goal(quantity(middle, "fraction"), middle <= 0.05),
                _goal(quantity(worst, "fraction"), worst <= 0.12),
                _goal(f"{facts['spearman']:.4f}", facts["spearman"] >= 0.99),
                ", ".join(_goal(f"{dim}: {rank:.3f}", rank >= 0.99) for dim, rank in by_dim.items()),
                quantity(plain["median_absolute_error"], "fraction"),
            ]
        )
    header = ["against", "points", "median error (<= 5 %)", "90th percentile (<= 12 %)", "rank correlation (>= 0.99)"]
    header += ["the same by head dim", "median error, nothing fitted"]
    return markdown(header, rows) + provenance(chosen) if rows else ""


def _goal(text: str, met: bool) -> str:
    return text if met else f"**{text}**"


def steps(records: Sequence[Record]) -> str:
    """Whole-model steps on a mesh: predicted time, memory, what is communicated."""
    chosen = [r for r in records if r.what.op == "predicted step"]
    rows = []
    for record in chosen:
        parts = "; ".join(f"{name} {quantity(ms / 1e3, 's')}" for name, ms in record.facts["parts_ms"].items() if ms)
        held = quantity(record.facts["hbm_bytes"], "bytes")
        rows.append([record.what.workload, record.what.kernel, _result(record), held, parts])
    header = ["step", "attention", "predicted", "memory per device", "of which"]
    return markdown(header, rows) + provenance(chosen) if rows else ""


TABLES: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {
        "headline": headline,
        "speed": speed,
        "quality": quality,
        "memory": memory,
        "costs": costs,
        "tpu": tpu,
        "prediction": prediction,
        "steps": steps,
    }
)


def render(name: str, records: Iterable[Record]) -> str:
    """The Markdown of one table, from the latest record of each key, machines side by side.

    Raises:
        ValueError: no table of that name, or no record for it.
    """
    if name not in TABLES:
        raise ValueError(f"table {name!r} must be one of {sorted(TABLES)}")
    table = TABLES[name](side_by_side(evidence.latest(records).values()))
    if not table:
        raise ValueError(
            f"table {name!r} has no record: run `tessera bench` first (--suite cpu for speed, demo for quality)"
        )
    return table


def rewrite(text: str, records: Sequence[Record]) -> str:
    """The text with every marked table rendered anew."""
    return _BLOCK.sub(lambda m: m["open"] + "\n" + render(m["name"], records) + "\n" + m["close"], text)


def stale(readme: str | os.PathLike, folder: str | os.PathLike) -> list[str]:
    """Names of the tables in a file that differ from what the records under a folder say, or have no record."""
    text, records = Path(readme).read_text(), evidence.collect(folder)
    wrong = []
    for block in _BLOCK.finditer(text):
        try:
            expected = "\n" + render(block["name"], records) + "\n"
        except ValueError as error:
            wrong.append(f"{block['name']}: {error}")
            continue
        if block["body"] != expected:
            wrong.append(block["name"])
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the tables of the pages in place; `--check` only says which are stale (exit status 1)."""
    parser = argparse.ArgumentParser(prog="python -m tessera.report", description=main.__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--evidence", default="evidence")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    if options.check:
        wrong = [f"{name} in {page}" for page in options.pages for name in stale(page, options.evidence)]
        for name in wrong:
            print(f"stale: {name}; `make readme` renders it", file=sys.stderr)
        return 1 if wrong else 0
    records = evidence.collect(options.evidence)
    for path in map(Path, options.pages):
        path.write_text(rewrite(path.read_text(), records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
