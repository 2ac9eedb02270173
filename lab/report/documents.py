"""Render stored records into the tables of the README and of docs/; nothing else writes those tables.

A table lies between `<!-- records:NAME -->` and `<!-- end -->`; `make readme` rewrites all tables.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from lab.report import figures_served, planned, real_pictures, served
from lab.report import real as report_real
from lab.report import tables as report_tables
from lab.report import weights as report_weights
from lab.report.cached import cached
from lab.report.markdown import (
    Table,
    keys_read,
    markdown,
    newest,
    of_one_machine,
    provenance,
    quantity,
    ratio_of,
    result_of,
    side_by_side,
    title_of,
)
from lab.report.roadmap import roadmap
from lab.report.summary import status, summary
from lab.studies.figures import TERMS
from lab.studies.validation import MEDIAN_GOAL, P90_GOAL, RANK_GOAL
from tessera.core import files
from tessera.core.units import three
from tessera.measure import evidence
from tessera.measure.evidence import OWN_MODEL, Record
from tessera.measure.series import current

PAGES = (
    "README.md",
    "docs/answers.md",
    "docs/speed.md",
    "docs/runtime.md",
    "docs/serving-figures.md",
    "docs/tpu-figures.md",
    "docs/gpu-figures.md",
    "docs/evidence.md",
)
"""Files that contain rendered tables."""

_BLOCK = re.compile(r"(?P<open><!-- records:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<close><!-- end -->)", re.DOTALL)


def headline(records: Sequence[Record]) -> Table:
    """Show measured ratios with a target: a row per comparison, a column per machine. Bold ratios miss their target."""
    chosen = [r for r in records if r.what.op in ("attention", "model") and r.comparison and r.comparison.target]
    machines = sorted({r.where.machine for r in chosen})
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in chosen:
        lead = (title_of(record), f"{record.what.kernel} against {record.comparison.against}")
        rows.setdefault(lead, {})[record.where.machine] = record
    lines = []
    for (title, sides), found in rows.items():
        shown = [_short(found[m].comparison) if m in found else "" for m in machines]
        [target, *_] = {r.comparison.target for r in found.values()}
        lines.append([f"{title}: {sides}", *shown, f"{target}x"])
    return Table(["faster by", *machines, "target"], lines, chosen)


def _short(versus: evidence.Comparison) -> str:
    return f"{versus.ratio:.2f}x" if versus.met else f"**{versus.ratio:.2f}x**"


def speed(records: Sequence[Record]) -> Table:
    """List the comparisons that the benchmark suites measured."""
    return _compared([r for r in records if r.suite != OWN_MODEL])


def own_model(records: Sequence[Record]) -> Table:
    """List the prefill times that `tessera bench --model` measured, under the plan and dense."""
    return _compared([r for r in records if r.suite == OWN_MODEL])


def _compared(records: Sequence[Record]) -> Table:
    """List failed runs and comparisons: our result, the result compared with it, ratio with interval, and target."""
    by_key = {record.key: record for record in records}
    rows, used = [], []
    for record in records:
        if record.what.op not in ("attention", "model"):
            continue
        lead = [title_of(record), record.where.machine]
        if record.error:
            rows.append([*lead, f"{record.what.kernel} {result_of(record)}".strip(), "", "", "", ""])
            used.append(record)
        elif record.facts.get("skipped") and record.comparison is None:  # this workload's peer was not available
            rows.append([*lead, result_of(record), f"left out: {', '.join(record.facts['skipped'])}", "", "", ""])
            used.append(record)
        if record.comparison is None:
            continue
        versus = record.comparison
        other = by_key.get(record.key._replace(kernel=versus.against))
        shown = f"{versus.against} {result_of(other)}" if other else versus.against
        target = f"{versus.target}x: {'met' if versus.met else '**missed**'}" if versus.target else "none"
        rows.append([*lead, result_of(record), shown, ratio_of(record), keys_read(record), target])
        used += [record, other] if other else [record]
    header = ["workload", "machine", "Tessera", "against", "ratio (95 %)", "keys read", "target"]
    return Table(header, rows, used)


def memory(records: Sequence[Record]) -> Table:
    """Show peak memory: a row per model, kernel and machine, a column per prompt length, and the growth per token."""
    chosen = [record for record in records if record.what.op == "memory"]
    measured = [record for record in chosen if not record.error]
    lengths = sorted({record.what.config["tokens"] for record in measured})
    series: dict[tuple[str, str], dict[int, Record]] = {}
    for record in measured:
        tokens = record.what.config["tokens"]
        words = f"{title_of(record).replace(f' {tokens:,} tokens,', '')}, {record.what.kernel}"
        series.setdefault((words, record.where.machine), {})[tokens] = record
    rows = [
        [*lead, *(result_of(found[n]) if n in found else "" for n in lengths), _growth(found)]
        for lead, found in series.items()
    ]
    rows += [[title_of(r), r.where.machine, *[""] * len(lengths), result_of(r)] for r in chosen if r.error]
    header = ["memory", "machine", *(f"{n:,} tokens" for n in lengths), "growth"]
    return Table(header, rows, chosen)


def _growth(found: Mapping[int, Record]) -> str:
    """Describe how memory grows with length: the straight line that the run fitted to all its lengths.

    The record of the longest length holds this line.
    """
    facts = found[max(found)].facts
    if "slope_bytes_per_token" not in facts:
        return ""
    slope, off = quantity(facts["slope_bytes_per_token"], "bytes"), quantity(facts["worst_residual"], "fraction")
    return f"{slope} per token; a line fits within {off} of the largest"


def costs(records: Sequence[Record]) -> Table:
    """Show compile times and start-up times, a row per record."""
    chosen = [r for r in records if r.what.op in ("compile", "start")]
    rows = [[title_of(r), r.where.machine, r.what.kernel, result_of(r), _notes(r.facts)] for r in chosen]
    header = ["what", "machine", "how", "median", "also"]
    return Table(header, rows, chosen)


def _notes(facts: Mapping[str, object]) -> str:
    """Format the facts that are numbers or text. A number whose name ends in _s is in seconds."""
    shown = []
    for name, value in facts.items():
        words = name.removesuffix("_s").replace("_", " ")
        if isinstance(value, float):
            shown.append(f"{words} {quantity(value, 's' if name.endswith('_s') else '')}")
        elif isinstance(value, int | str):
            shown.append(f"{words} {value}")
    return "; ".join(shown)


def quality(records: Sequence[Record]) -> Table:
    """Show the accuracy of each policy per task, with the share of keys read."""
    chosen = [r for r in records if r.what.op == "quality"]
    rows = []
    for record in chosen:
        trials = str(record.facts.get("trials", record.how.iterations))
        lead = [title_of(record), record.where.machine, _policy(record)]
        rows.append([*lead, result_of(record), trials, keys_read(record)])
    header = ["task", "machine", "policy", "right", "trials", "keys read"]
    return Table(header, rows, chosen)


def _policy(record: Record) -> str:
    """Name the policy and its plan's settings."""
    config = record.what.config
    parts = [
        f"{name.replace('_', ' ')} {config[name]}" for name in ("anchors", "tile", "query_tile") if config.get(name)
    ]
    return ", ".join([record.what.kernel, *parts])


def verify(records: Sequence[Record]) -> Table:
    """Show each kernel's errors against the float64 oracle, as error / tolerance, and the number of failed trials."""
    chosen = [r for r in records if r.what.op == "verify"]
    rows = []
    for record in chosen:
        spread, facts = record.facts.get("distribution", {}), record.facts
        kernel = record.what.kernel + (" (simulated)" if facts.get("simulated") else "")
        kernel += record.what.workload.removeprefix("oracle trials").replace(" of ", ", ")
        figures = [three(spread[name]) if name in spread else "" for name in ("p50", "max")]
        elements = f"{facts['elements']:,}" if "elements" in facts else ""
        trials = str(facts.get("trials", ""))
        rows.append(
            [kernel, record.what.dtype, record.where.machine, trials, elements, *figures, _trials_failed(record)]
        )
    header = ["kernel", "dtype", "machine", "trials", "elements", "median error / tolerance", "worst", "failures"]
    return Table(header, rows, chosen)


def _trials_failed(record: Record) -> str:
    """Format the number of failed trials and the first one's error; the record's error lists all failures."""
    if record.error is None:
        return "0"
    count = record.error.count(f"--seed {record.facts['seed']}: ") if "seed" in record.facts else 1
    return f"**{count}**: {record.error.partition('; ')[0][:200]}"


def tpu(records: Sequence[Record]) -> str:
    """Show predicted figures of the TPU kernels, ratios between compiled calls: a row per figure, a column per chip.

    "HBM" marks a figure whose first call is bound by main memory: the call's predicted time is bytes / bandwidth.
    """
    chosen = newest(r for r in records if r.what.op == "predicted figure")
    figures: dict[str, dict[str, Record]] = {}
    for record in chosen:
        figure, _, chip = record.what.workload.rpartition(", ")
        figures.setdefault(figure, {})[chip] = record
    chips = sorted({chip for found in figures.values() for chip in found})
    order = sorted(figures, key=_family(list(figures)))
    rows = [[figure, TERMS.get(figure, ""), *(_held(figures[figure].get(chip)) for chip in chips)] for figure in order]
    return markdown(["predicted", "terms", *chips], rows) + provenance(chosen) if rows else ""


def _family(figures: Sequence[str]) -> Callable[[str], tuple]:
    """Build a sort key that keeps families of figures together, in the order of their first members.

    The names in a family differ only in numbers, or extend a shorter name after a comma. Within a family, names are
    sorted by their numbers, largest first; the last number in a name counts most.
    """

    def family(figure: str) -> str:
        leads = [other for other in figures if figure.startswith(f"{other},")]
        return re.sub(r"\d+", "", min([figure, *leads], key=len))

    families = list(dict.fromkeys(map(family, figures)))

    def key(figure: str) -> tuple:
        numbers = [-int(number) for number in reversed(re.findall(r"\d+", figure))]
        return families.index(family(figure)), bool(numbers), numbers

    return key


def _held(record: Record | None) -> str:
    if record is None or record.comparison is None:
        return ""
    versus = record.comparison
    of_bytes = next(iter(record.facts.values()), {}).get("bound_by") == "HBM" and "bytes" not in record.what.workload
    shown = f"{versus.ratio:.2f}{', HBM' if of_bytes else ''}"
    if versus.target is None:
        return shown
    return f"{shown} ({versus.target}: {'met' if versus.met else '**missed**'})"


def prediction(records: Sequence[Record]) -> str:
    """Show how far predicted times are from measured ones, per group of chips. Figures that miss a goal are in bold."""
    chosen = newest(r for r in records if r.what.op == "prediction")
    rows = []
    for record in chosen:
        facts, plain = record.facts, record.facts["no_fitted_constant"]
        middle, worst = (facts[f"{name}_absolute_error"] for name in ("median", "p90"))
        groups = facts.get("by_head_dim", {})
        worst_by_dim = {dim: found["p90_absolute_error"] for dim, found in groups.items()}
        by_dim = {dim: found["spearman"] for dim, found in groups.items() if found["points"] > 2}  # 2 are too few
        rows.append(
            [
                title_of(record),
                f"{facts['points']} of {facts['planned']}" if "planned" in facts else str(facts["points"]),
                _goal(quantity(middle, "fraction"), middle <= MEDIAN_GOAL),
                _goal(quantity(worst, "fraction"), worst <= P90_GOAL),
                ", ".join(
                    _goal(f"{dim}: {quantity(p90, 'fraction')}", p90 <= P90_GOAL) for dim, p90 in worst_by_dim.items()
                ),
                _goal(f"{facts['spearman']:.4f}", facts["spearman"] >= RANK_GOAL),
                ", ".join(_goal(f"{dim}: {rank:.3f}", rank >= RANK_GOAL) for dim, rank in by_dim.items()),
                quantity(plain["median_absolute_error"], "fraction"),
            ]
        )
    header = ["against", "points", f"median error (<= {100 * MEDIAN_GOAL:g} %)"]
    header += [f"90th percentile (<= {100 * P90_GOAL:g} %)", "by head dim", f"rank correlation (>= {RANK_GOAL})"]
    header += ["by head dim", "median error, nothing fitted"]
    fits = [_fitted(r.facts["constants"], r.facts["fitted_again"]) for r in chosen if "fitted_again" in r.facts]
    return markdown(header, rows) + "".join(fits) + provenance(chosen) if rows else ""


def _fitted(ours: Mapping[str, float], again: Mapping[str, float]) -> str:
    """Format the constants that predictions use, each next to the value that a new fit finds."""
    stall, step, share = ([found[name] for found in (ours, again)] for name in ("stall", "step_s", "bandwidth_share"))
    said = [
        f"cycles per bundle {stall[0]:.3f} and {stall[1]:.3f}",
        f"{1e6 * step[0]:.2f} and {1e6 * step[1]:.2f} us a step",
        f"{100 * share[0]:.0f} % and {100 * share[1]:.0f} % of the bandwidth",
    ]
    return f"\nConstants, used and fitted again: {', '.join(said)}.\n"


def _goal(text: str, met: bool) -> str:
    return text if met else f"**{text}**"


def steps(records: Sequence[Record]) -> str:
    """Show predicted whole-model steps on a mesh of devices: time, memory per device, and the parts of the time."""
    chosen = newest(r for r in records if r.what.op == "predicted step")
    rows = []
    for record in chosen:
        parts = "; ".join(f"{name} {quantity(ms / 1e3, 's')}" for name, ms in record.facts["parts_ms"].items() if ms)
        held = quantity(record.facts["hbm_bytes"], "bytes")
        rows.append([record.what.workload, record.what.kernel, result_of(record), held, parts])
    header = ["step", "attention", "predicted", "memory per device", "of which"]
    return markdown(header, rows) + provenance(chosen) if rows else ""


MACHINE_TABLES: Mapping[str, Callable[[Sequence[Record]], Table]] = MappingProxyType(
    {
        "headline": headline,
        "own-model": own_model,
        "speed": speed,
        "amdahl": report_tables.amdahl,
        "use": report_tables.use,
        "memory": memory,
        "costs": costs,
        "tune": report_tables.tune,
        "verify": verify,
        "quality": quality,
        "eval": report_tables.policies,
        "granularity": report_tables.granularity,
        "study": report_tables.study,
    }
)
"""Name -> function that draws a table of measurements. Markdown pages show one machine; the HTML report shows all."""

TABLES: Mapping[str, Callable[[Sequence[Record]], str]] = MappingProxyType(
    {
        "status": status,
        "summary": summary,
        "roadmap": roadmap,
        "int8-cache": cached,
        "real-tasks": report_real.tasks,
        "real-text": report_real.text,
        "real-tasks-alone": partial(report_real.tasks, alone=True),
        "real-text-alone": partial(report_real.text, alone=True),
        "real-tiles": report_real.tiles,
        "real-gaps": report_real.gaps,
        "real-weights": report_real.weights,
        "real-others": report_real.others,
        "fewer-bits": report_weights.weights,
        "tpu": tpu,
        "prediction": prediction,
        "steps": steps,
        "planned": planned.steps,
        "parts": planned.parts,
        "planned-bits": planned.fewer_bits,
        "step-memory": planned.step_memory,
        "served": served.capacities,
        "served-days": served.days,
        "blocks": report_tables.blocks,
        "choices": report_tables.choices,
        "sweep": report_tables.sweep,
        "gates": report_tables.gates,
        "rooflines": report_tables.rooflines,
        **figures_served.TABLES,
    }
)
"""Name -> function that draws a table as Markdown. It selects one run's records or the newest record of each case."""


def render(name: str, records: Iterable[Record], *, every_machine: bool = False) -> str:
    """Render one table as Markdown from the latest record of each key.

    Args:
        name: name of a table in MACHINE_TABLES or TABLES.
        records: the stored records.
        every_machine: show all machines side by side instead of one. Tables of TABLES ignore this.

    Raises:
        ValueError: no table has that name, or the table has no record.
    """
    shown = side_by_side(current(records))
    if name in MACHINE_TABLES:
        draw = MACHINE_TABLES[name]
        table = str(draw(shown)) if every_machine else of_one_machine(name, draw, shown)
    elif name in TABLES:
        table = TABLES[name](shown)
    else:
        raise ValueError(f"table {name!r} must be one of {sorted([*MACHINE_TABLES, *TABLES])}")
    if not table:
        raise ValueError(
            f"table {name!r} has no record: first run the command that measures it (`tessera bench`, `tessera eval`, "
            "`tessera verify`, `tessera tune`, `python -m lab study` or `python -m lab simulate`)"
        )
    return table


COMPILED = (
    *("predicted figure", "prediction", "predicted step", "block sizes", "kernel choice"),
    *("gpu gates", "roofline figure", "tpu sweep", "planned step", "part of a layer", "simulated serving"),
)
"""Operations (`what.op` of a record) whose results do not depend on the machine that computes them: they come from a
compiler, a roofline or a simulation. A newer record replaces an older one from any machine."""


def replaced(records: Sequence[Record]) -> list[Record]:
    """Return the records that no page shows because newer ones, or a newer run of the Hopper gates, replaced them."""
    latest = current(records)
    kept = [r for r in latest if r.what.op not in COMPILED]
    kept += [r for op in COMPILED if op != "gpu gates" for r in newest(r for r in latest if r.what.op == op)]
    kept += [r for own in report_tables.gated(latest).values() for r in own]
    shown = set(map(id, kept))
    return [r for r in records if id(r) not in shown]


def rewrite(text: str, records: Sequence[Record]) -> str:
    """Return the text with every table between markers rendered again."""
    return _BLOCK.sub(lambda m: m["open"] + "\n" + render(m["name"], records) + "\n" + m["close"], text)


def stale(readme: str | os.PathLike, folder: str | os.PathLike) -> list[str]:
    """Return the names of the tables in a page that differ from the records under `folder` or have no record."""
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


def write(folder: Path) -> None:
    """Rewrite the tables of the pages and the pictures in docs/, from the records under the folder."""
    records = evidence.collect(folder)
    for path in map(Path, PAGES):
        path.write_text(rewrite(path.read_text(), records))
    for name, draw in (real_pictures.PICTURES | served.PICTURES).items():
        if (picture := draw(current(records))) is not None:
            files.replace_text(Path("docs") / f"{name}.svg", picture.svg)


def all_stale(folder: Path) -> list[str]:
    """Name the tables of the pages that differ from the records under the folder."""
    return [f"{name} in {page}" for page in PAGES for name in stale(page, folder)]
