"""Draw the report's pictures. Each function takes records and returns a picture, or None if it has nothing to show."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.dates import DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from lab.report import labels as report_labels
from lab.report.markdown import newest
from tessera.core.units import three
from tessera.measure.evidence import Record
from tessera.measure.series import is_prediction, series

INK, GRID = "#1a1a1a", "#d9d9d9"
COLOURS = ("#1f4e79", "#c8590a", "#3a7d44", "#7a4f9a", "#8c6d1f", "#555555", "#c2185b", "#00939f", "#e8a0bf", "#8bc34a")
MARKS = "osD^vPX*h<"
FOUND = LinearSegmentedColormap.from_list("found", [COLOURS[1], "#f2efe6", COLOURS[0]])
STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "tessera",
    "svg.fonttype": "path",
}


class Picture(NamedTuple):
    """Picture of the report: its title, its SVG text, and the records that it shows."""

    title: str
    svg: str
    records: tuple[Record, ...]


def drawn(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """Draw a figure as SVG without a date, so that the same records give the same bytes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def roofline(records: Sequence[Record]) -> Picture | None:
    """Plot flops per second against flops per byte, a panel per machine. Draw the roof if peak rates were measured."""
    shown = [r for r in records if r.flops and r.bytes and r.flops_per_s and not r.error]
    if not shown:
        return None
    machines = list(dict.fromkeys(r.where.machine for r in shown))
    kernels = sorted({r.what.kernel for r in shown})
    colour = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(kernels)}

    def draw(figure: Figure) -> None:
        for axes, machine in zip(figure.subplots(len(machines), sharex=True, squeeze=False).flat, machines):
            own = [r for r in shown if r.where.machine == machine]
            for record in own:
                axes.plot(*_rate(record), MARKS[kernels.index(record.what.kernel) % len(MARKS)],
                          color=colour[record.what.kernel], label=record.what.kernel, markersize=5)  # fmt: skip
            axes.set(xscale="log", yscale="log")
            axes.margins(0.06, 0.1)
            axes.set_title(f"{machine}{_draw_roof(axes, own)}", fontsize=9)
        figure.supxlabel("flops per byte that must be moved", fontsize=10)
        figure.supylabel("Gflop/s", fontsize=10)
        handles = {name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels())}
        names = [name for name in kernels if name in handles]
        figure.legend([handles[n] for n in names], names, loc="outside upper center", ncols=5, fontsize=8,
                      frameon=False)  # fmt: skip
        figure.draw_without_rendering()  # fixes the positions of the marks
        for axes, machine in zip(figure.axes, machines):
            rated = [r for r in shown if r.where.machine == machine and r.peak_fraction]
            once = {(r.what.kernel, *_rate(r)): r for r in rated}  # a run of ours has a record per peer
            shares = [f"{100 * r.peak_fraction:.0f}" for r in once.values()]
            report_labels.place(axes, [_rate(r) for r in once.values()], shares, [colour[name] for name, *_ in once])

    title = "Rate over arithmetic intensity, and the roof; labels: per cent of what the run's own ceilings allow"
    return Picture(title, drawn(draw, (11, 1 + 3.4 * len(machines))), tuple(shown))


def _rate(record: Record) -> tuple[float, float]:
    """Return a record's (flops per byte, Gflop/s)."""
    return record.flops / record.bytes, record.flops_per_s / 1e9


def _draw_roof(axes: Axes, own: Sequence[Record]) -> str:
    """Draw the roof, min(flops/s, bytes/s x flops per byte), of the newest measured peak rates; return a caption."""
    held = [r for r in own if "ceiling_flops_per_s" in r.facts]
    if not held:
        return "\nno record holds its ceilings"
    newest_held = max(held, key=lambda r: r.date)
    flops, moved = (newest_held.facts[f"ceiling_{name}_per_s"] / 1e9 for name in ("flops", "bytes"))
    least, most = (pick(_rate(r)[0] for r in own) for pick in (min, max))
    x = np.array(sorted({least / 2, max(flops / moved, least / 2), 2 * most}))
    axes.plot(x, np.minimum(flops, moved * x), color=INK, linewidth=1.2, zorder=1)
    return f"\nroof: {three(flops)} Gflop/s in {newest_held.what.dtype}, {three(moved)} GB/s"


def asked(records: Sequence[Record], op: str, suite: str) -> list[Record]:
    """Select an op's records of one `tessera eval` suite, from the machine with the most records (ties: the latest)."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.what.op == op and series(record) == suite and not record.error:
            groups.setdefault(record.where.machine, []).append(record)
    return max(groups.values(), key=lambda own: (len(own), max(r.date for r in own)), default=[])


def needles(records: Sequence[Record]) -> Picture | None:
    """Draw the needle heat map: right answers by document length and needle depth, a panel per policy."""
    shown = [r for r in asked(records, "eval task", "demo") if r.facts["kind"] == "single"]
    policies = list(dict.fromkeys(r.facts["policy"] for r in shown))
    lengths = sorted({r.facts["length"] for r in shown})
    if not shown or len(shown[0].facts["scores"]) < 2:
        return None

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(policies), sharey=True, squeeze=False)[0]
        for axes, policy in zip(panels, policies):
            own = {r.facts["length"]: r for r in shown if r.facts["policy"] == policy}
            grid = np.full((len(shown[0].facts["scores"]), len(lengths)), np.nan)
            for column, length in enumerate(lengths):
                if length in own and len(own[length].facts["scores"]) == len(grid):
                    grid[:, column] = own[length].facts["scores"]
            axes.pcolormesh(grid, vmin=0, vmax=1, cmap=FOUND, edgecolors="white", linewidth=0.5)
            axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{n:,}" for n in lengths], rotation=45)
            depths = shown[0].facts["depths"]
            axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{d:.0%}" for d in depths])
            axes.set_title(policy, fontsize=9)
            axes.grid(visible=False)
        panels[0].invert_yaxis()  # all share one axis; the start of the text goes at the top
        panels[0].set_ylabel("depth of the needle")
        figure.supxlabel("tokens", fontsize=10)

    return Picture("Pass key found (blue) or not (orange), by length and depth", drawn(draw, (11, 3.8)), tuple(shown))


def recall(records: Sequence[Record]) -> Picture | None:
    """Draw the attention mass kept by layer and KV head, a panel per policy. "all" marks layers that read every key."""
    shown = asked(records, "eval recall", "demo")
    if not shown:
        return None
    grids = [np.array(r.facts["per_head"]) for r in shown]
    layers, heads = (max(sizes) for sizes in zip(*(grid.shape for grid in grids)))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, record, grid in zip(panels, shown, grids):
            mesh = axes.pcolormesh(grid, vmin=0, vmax=1, cmap=FOUND, edgecolors="white", linewidth=0.5)
            for (layer, head), kept in np.ndenumerate(grid):
                text = f"{kept:.2f}" if layer in record.facts["sparse_layers"] else "all"
                light = not 0.2 < kept < 0.8
                axes.text(head + 0.5, layer + 0.5, text, color="white" if light else INK, fontsize=7, ha="center",
                          va="center")  # fmt: skip
            axes.set_xticks(np.arange(heads) + 0.5, [str(h) for h in range(heads)])
            axes.set_yticks(np.arange(layers) + 0.5, [str(n) for n in range(layers)])
            axes.set_title(record.facts["policy"], fontsize=9)
            axes.grid(visible=False)
        panels[0].invert_yaxis()  # all share one axis; the first layer goes at the top
        panels[0].set_ylabel("layer")
        figure.supxlabel("KV head", fontsize=10)
        figure.colorbar(mesh, ax=list(panels), label="attention mass kept")

    title = "Attention mass on the keys that each layer and KV head may read (all: the layer reads every key)"
    size = (max(5, len(shown) * (0.9 + 0.42 * heads) + 1.2), 1.2 + 0.28 * layers)
    return Picture(title, drawn(draw, size), tuple(shown))


def quality(records: Sequence[Record]) -> Picture | None:
    """Plot mean task score against the share of keys read, per policy, with 95 % intervals."""
    shown = asked(records, "eval task", "demo")
    if not shown:
        return None
    policies = list(dict.fromkeys(r.facts["policy"] for r in shown))
    kinds = list(dict.fromkeys(r.facts["kind"] for r in shown))
    columns = min(3, len(kinds))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(math.ceil(len(kinds) / columns), columns, sharex=True, sharey=True, squeeze=False).flat
        for axes, kind in zip(panels, kinds):
            for index, policy in enumerate(policies):
                own = [r for r in shown if (r.facts["policy"], r.facts["kind"]) == (policy, kind)]
                if own:
                    _over_lengths(axes, own, "osD^vP"[index % 6], COLOURS[index % len(COLOURS)], policy)
            axes.set(ylim=(-4, 104), xscale="log")
            axes.set_title(kind.replace("_", " "), fontsize=9)
            axes.set_xticks([5, 10, 20, 50, 100])
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.minorticks_off()
        for axes in figure.axes[len(kinds) :]:
            axes.set_axis_off()
        figure.supylabel("score, %", fontsize=10)
        figure.supxlabel("keys read, %", fontsize=10)
        handles = {name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels())}
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), fontsize=9,
                      frameon=False)  # fmt: skip

    title = "Answers kept over keys read: a mark per length, the longest large and with its 95 % interval"
    return Picture(title, drawn(draw, (12, 1.2 + 2.9 * math.ceil(len(kinds) / columns))), tuple(shown))


def _over_lengths(axes: Axes, own: Sequence[Record], mark: str, colour: str, label: str) -> None:
    """Plot a policy's scores on one kind of task against the share of keys read; a line joins the lengths."""
    own = sorted(own, key=lambda r: r.facts["length"])
    density, mean = ([100 * value for value in column] for column in zip(*((r.mean_density, r.median) for r in own)))
    axes.plot(density, mean, mark + "-", color=colour, markersize=3, linewidth=0.8, alpha=0.6)
    last = own[-1].facts
    spread = [[max(mean[-1] - 100 * last["low"], 0)], [max(100 * last["high"] - mean[-1], 0)]]
    axes.errorbar(density[-1:], mean[-1:], spread, fmt=mark, color=colour, capsize=3, markersize=7, label=label)


def granularity(records: Sequence[Record]) -> Picture | None:
    """Plot what coarser tiles cost: KL divergence from dense against keys per tile, a line per query tile size."""
    shown = [r for r in asked(records, "eval fidelity", "study") if r.facts["policy"].startswith("tile ")]
    if not shown:
        return None
    tiles = sorted({r.what.config["tile"] for r in shown})
    rows = sorted({r.what.config["query_tile"] for r in shown})

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, query_tile in enumerate(rows):
            own = sorted((r for r in shown if r.what.config["query_tile"] == query_tile),
                         key=lambda r: r.what.config["tile"])  # fmt: skip
            x = [tiles.index(r.what.config["tile"]) + 0.06 * (index - (len(rows) - 1) / 2) for r in own]
            mean = np.array([r.facts["mean"] for r in own])
            low, high = (np.array([r.facts[end] for r in own]) for end in ("low", "high"))
            axes.errorbar(x, mean, [np.maximum(mean - low, 0), np.maximum(high - mean, 0)], fmt="osD^"[index % 4] + "-",
                          color=COLOURS[index], capsize=3, label=f"query tile {query_tile}")  # fmt: skip
        axes.set_xticks(range(len(tiles)), [str(t) for t in tiles])
        axes.set(xlabel="keys per tile", ylabel="KL(dense || Kascade), nats per token", ylim=(0, None))
        axes.legend(fontsize=8)

    return Picture("What tile size costs (95 % intervals over windows)", drawn(draw, (8, 4.2)), tuple(shown))


def tuning(records: Sequence[Record]) -> Picture | None:
    """Plot the time of every candidate of each tuning search, in the order tried, and the best so far."""
    shown = [r for r in records if r.what.op == "tune" and r.facts.get("candidates") and not r.error]
    if not shown:
        return None
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for axes, record in zip(panels, shown):
            found = [c["quick_s"] for c in record.facts["candidates"]]
            times = np.array([math.nan if t is None else 1e3 * t for t in found])
            axes.plot(times, "o", color=COLOURS[0], label="candidate")
            axes.plot(np.fmin.accumulate(times), "-", color=COLOURS[1], label="best so far")
            failed = [i for i, t in enumerate(found) if t is None]
            axes.plot(failed, [np.nanmax(times)] * len(failed), "x", color="black", label="failed")
            axes.set(xlabel="candidate, in the order tried", ylabel="ms per call\n(brief timing in the search)",
                     ylim=(0, 1.08 * np.nanmax(times)))  # fmt: skip
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            place = ", ".join(filter(None, [record.where.machine, series(record)]))
            axes.set_title(f"{record.what.workload}: {record.median:.2f}x the default\n{place}", fontsize=9)
        for axes in figure.axes[len(shown) :]:
            axes.set_axis_off()
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9, frameon=False)

    return Picture("Tuning history", drawn(draw, (max(5, 4 * columns), 0.5 + 3.1 * rows)), tuple(shown))


def progress(records: Sequence[Record]) -> Picture | None:
    """Plot numbers as shares of their targets over time: a panel per machine, or per chip for predicted numbers."""
    panels: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        if record.comparison and record.comparison.target and not record.error and _target(record):
            name, place = f"{record.what.workload}, {record.what.kernel}", record.where.machine
            if is_prediction(record):
                name, _, chip = record.what.workload.rpartition(", ")
                place = f"{chip}, predicted"
            panels.setdefault(place, {}).setdefault(name, []).append(record)
    panels = {p: {n: own for n, own in found.items() if len({r.date for r in own}) > 1} for p, found in panels.items()}
    panels = {place: found for place, found in panels.items() if found}
    if not panels:
        return None

    def draw(figure: Figure) -> None:
        for axes, (where, found) in zip(figure.subplots(len(panels), squeeze=False).flat, panels.items()):
            for index, (name, own) in enumerate(found.items()):
                own = sorted(own, key=lambda r: r.date)
                thick = 1 - index / len(found)  # later lines are thinner, so that earlier ones show behind them
                axes.plot([np.datetime64(r.date[:19]) for r in own], [_of_target(r) for r in own],
                          MARKS[index % len(MARKS)] + "-", color=COLOURS[index % len(COLOURS)], label=name,
                          linewidth=1 + 3 * thick, markersize=5 + 5 * thick, markeredgecolor="white",
                          markeredgewidth=0.6)  # fmt: skip
            axes.axhline(1, color=INK, linewidth=1)
            axes.xaxis.set_major_formatter(DateFormatter("%m-%d\n%H:%M"))
            axes.margins(y=0.12)
            axes.set(title=where, xlabel="UTC", ylabel="reached over target")
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    shown = tuple(r for found in panels.values() for own in found.values() for r in own)
    return Picture("Progress of the figures (1 or more meets the target)", drawn(draw, (11, 3.4 * len(panels))), shown)


def predicted(records: Sequence[Record]) -> Picture | None:
    """Plot the numbers predicted for TPUs and their targets: one bar per number and chip."""
    shown = newest(r for r in records if r.what.op == "predicted figure" and r.comparison)
    if not shown:
        return None
    names = list(dict.fromkeys(r.what.workload.rpartition(", ")[0] for r in shown))
    chips = list(dict.fromkeys(r.what.workload.rpartition(", ")[2] for r in shown))
    found: Mapping[str, Record] = {r.what.workload: r for r in shown}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        height = 0.8 / len(chips)
        for index, chip in enumerate(chips):
            own = [(i, found[f"{n}, {chip}"]) for i, n in enumerate(names) if f"{n}, {chip}" in found]
            places = [i + height * (index - (len(chips) - 1) / 2) for i, _ in own]
            axes.barh(places, [r.median for _, r in own], height, color=COLOURS[index], label=chip)
            for place, (_, record) in zip(places, own):
                if goal := _target(record):
                    axes.plot([goal, goal], [place - height / 2, place + height / 2], color="black", linewidth=2)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="ratio (black: target; 'against' wants more, the others less)")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    size = (10, max(5.5, 0.45 * len(names)))
    return Picture("TPU figures, predicted from schedules, not measured", drawn(draw, size), tuple(shown))


def lengths(records: Sequence[Record]) -> Picture | None:
    """Plot dense and Kascade time against prompt length, and the length from which Kascade is faster, per machine."""
    shown = [r for r in records if r.what.workload.startswith("crossover_") and not r.error]
    if len({r.what.config["tokens"] for r in shown}) < 2:
        return None
    machines = list(dict.fromkeys(r.where.machine for r in shown))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(machines), squeeze=False)[0]
        for axes, machine in zip(panels, machines):
            here = sorted((r for r in shown if r.where.machine == machine), key=lambda r: r.what.config["tokens"])
            for index, kernel in enumerate(sorted({r.what.kernel for r in here})):
                own = [r for r in here if r.what.kernel == kernel]
                low, middle, high = np.transpose([np.quantile(r.samples, (0.25, 0.5, 0.75)) for r in own])
                axes.errorbar([r.what.config["tokens"] for r in own], middle, [middle - low, high - middle],
                              fmt="os"[index % 2] + "-", color=COLOURS[index], capsize=3, label=kernel)  # fmt: skip
            axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="s per prefill")
            ticks = sorted({r.what.config["tokens"] for r in here})
            axes.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45)
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_title(f"{machine}{_mark_crossover(axes, here)}", fontsize=9)
            axes.legend(fontsize=8)

    title = "Prefill of the demo model over length, dense and Kascade (bars: quartiles of the rounds)"
    return Picture(title, drawn(draw, (5.5 * len(machines), 4)), tuple(shown))


def _mark_crossover(axes: Axes, own: Sequence[Record]) -> str:
    """Draw a line at the length from which Kascade stays faster; return its caption."""
    found = [r.facts["crossover_tokens"] for r in own if "crossover_tokens" in r.facts]
    if not found:  # an incomplete run
        return ""
    if found[-1] is None:
        return "\nKascade is not faster at the longest"
    axes.axvline(found[-1], color=INK, linewidth=1, linestyle="--")
    return f"\nKascade is faster from {found[-1]:,} tokens on (dashed)"


def slots(records: Sequence[Record]) -> Picture | None:
    """Plot how busy the schedule keeps each unit of a TPU core: a panel per call, a bar per unit and chip."""
    busy: dict[str, dict[str, Mapping[str, float]]] = {}
    shown = []
    for record in newest(r for r in records if r.what.op == "predicted figure"):
        found = {name: case["busy"] for name, case in record.facts.items() if isinstance(case, dict) and "busy" in case}
        for name, units in found.items():
            busy.setdefault(name, {})[record.what.workload.rpartition(", ")[2]] = units
        shown += [record] if found else []
    if not shown:
        return None
    chips = sorted({chip for found in busy.values() for chip in found})
    units = list(dict.fromkeys(u for found in busy.values() for own in found.values() for u in own if ":" not in u))
    columns = min(3, len(busy))
    rows = math.ceil(len(busy) / columns)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
        width = 0.8 / len(chips)
        for axes, (name, found) in zip(panels, busy.items()):
            for index, chip in enumerate(chips):
                places = np.arange(len(units)) + width * (index - (len(chips) - 1) / 2)
                whole, moved = _shares(found.get(chip, {}), units)
                axes.bar(places, whole, width, color=COLOURS[index], label=chip)
                axes.bar(places, moved, width, color="none", edgecolor="white", hatch="/////", linewidth=0)
            axes.set_title(name, fontsize=9)
            axes.set(ylim=(0, 100))
            axes.set_xticks(range(len(units)), units, fontsize=8, rotation=60)
            axes.grid(visible=False, axis="x")
        for axes in figure.axes[len(busy) :]:
            axes.set_axis_off()
        figure.supylabel("slots in use, %", fontsize=10)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(chips), fontsize=9, frameon=False)

    title = (
        "Slots in use by unit, by schedule (hatched: registers filled from and spilled to memory; a/b: tile/queries)"
    )
    return Picture(title, drawn(draw, (12, 1 + 2.1 * rows)), tuple(shown))


def _shares(busy: Mapping[str, float], units: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return two lists with a percentage per unit: slots in use, and slots that only fill or spill registers."""
    moved = {name.partition(":")[0]: share for name, share in busy.items() if ":" in name}
    return [100 * busy.get(u, math.nan) for u in units], [100 * moved.get(u, 0.0) for u in units]


def _of_target(record: Record) -> float:
    """Return result / target, or target / result if less is better: 1 or more meets the target."""
    share = record.comparison.ratio / _target(record)
    return 1 / share if record.comparison.target.startswith("<") else share


def _target(record: Record) -> float | None:
    try:
        return float((record.comparison.target or "").rpartition(" ")[2])
    except ValueError:
        return None


PICTURES: Final[Mapping[str, Callable[[Sequence[Record]], Picture | None]]] = MappingProxyType(
    {
        draw.__name__: draw
        for draw in (roofline, progress, lengths, predicted, slots, quality, needles, recall, granularity, tuning)
    }
)
"""Name -> function that draws the picture, in the page's order."""
