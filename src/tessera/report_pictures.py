"""The report's pictures, one function each: records in, an SVG string and the records it shows out, or None."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tessera.evidence import Record

INK, GRID = "#1a1a1a", "#d9d9d9"
COLOURS = ("#1f4e79", "#c8590a", "#3a7d44", "#7a4f9a", "#8c6d1f", "#555555")
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
    """An SVG, what it says in a sentence, and the records behind it."""

    title: str
    svg: str
    records: tuple[Record, ...]


def is_prediction(record: Record) -> bool:
    """Whether nothing was timed: the figure comes from a compiler's schedule or a roofline."""
    return "predict" in record.what.op or "predict" in (record.how.check or "")


def drawn(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """A figure as SVG without a date, so that the same records make the same bytes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def roofline(records: Sequence[Record]) -> Picture | None:
    """Rates over arithmetic intensity, with the share of what the device's own ceilings allow."""
    shown = [r for r in records if r.flops and r.bytes and r.flops_per_s and not r.error]
    if not shown:
        return None

    machines = list(dict.fromkeys(r.where.machine for r in shown))
    kernels = sorted({r.what.kernel for r in shown})

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(machines), sharey=True, squeeze=False)[0]
        for axes, machine in zip(panels, machines):
            for index, kernel in enumerate(kernels):
                own = [r for r in shown if (r.what.kernel, r.where.machine) == (kernel, machine)]
                x, y = [r.flops / r.bytes for r in own], [r.flops_per_s / 1e9 for r in own]
                mark = "osD^v<>PX*"[index % 10]
                axes.plot(x, y, mark, color=COLOURS[index % len(COLOURS)], label=kernel, alpha=0.85)
                for record, a, b in zip(own, x, y):
                    if record.peak_fraction:
                        axes.annotate(f"{100 * record.peak_fraction:.0f}", (a, b), (5, 2), fontsize=7,
                                      textcoords="offset points")  # fmt: skip
            axes.set(xscale="log", yscale="log", xlabel="flops per byte that must be moved")
            axes.set_title(machine, fontsize=9)
        panels[0].set_ylabel("Gflop/s")
        panels[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))

    title = "Rate over arithmetic intensity; labels: per cent of the device's measured ceiling"
    return Picture(title, drawn(draw, (11, 4.4)), tuple(shown))


def needles(records: Sequence[Record]) -> Picture | None:
    """Needle heat map: answers right by length and depth, one panel per policy."""
    shown = [r for r in records if r.what.op == "eval task" and r.facts.get("kind") == "single"]
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
            axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", interpolation="nearest")
            axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45)
            depths = shown[0].facts["depths"]
            axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
            axes.set_title(policy, fontsize=9)
            axes.grid(visible=False)
        panels[0].set_ylabel("depth of the needle")
        figure.supxlabel("tokens", fontsize=10)

    return Picture("Pass key found (green) by length and depth", drawn(draw, (11, 3.8)), tuple(shown))


def quality(records: Sequence[Record]) -> Picture | None:
    """Mean task score over the share of keys read, per policy, with 95 % intervals."""
    shown = [r for r in records if r.what.op == "eval task" and not _is_study(r)]
    if not shown:
        return None
    policies = list(dict.fromkeys(r.facts["policy"] for r in shown))
    kinds = list(dict.fromkeys(r.facts["kind"] for r in shown))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for axes, kind in zip(panels, kinds):
            for index, policy in enumerate(policies):
                own = [r for r in shown if (r.facts["policy"], r.facts["kind"]) == (policy, kind)]
                mean = [100 * r.median for r in own]
                spread = [
                    [100 * (r.median - r.facts["low"]) for r in own],
                    [100 * (r.facts["high"] - r.median) for r in own],
                ]
                density = [100 * r.density[0] for r in own]
                axes.errorbar(density, mean, np.maximum(spread, 0), fmt="osD^vP"[index % 6], capsize=2, alpha=0.85,
                              color=COLOURS[index % len(COLOURS)], label=policy)  # fmt: skip
            axes.set(ylim=(-4, 104), title=kind.replace("_", " "))
            axes.set_title(kind.replace("_", " "), fontsize=9)
        panels[0].set_ylabel("score, %")
        figure.supxlabel("keys read, %", fontsize=10)
        panels[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return Picture("Answers kept over keys read (a point per length)", drawn(draw, (12, 3.6)), tuple(shown))


def granularity(records: Sequence[Record]) -> Picture | None:
    """KL divergence from dense by tile and query tile: what coarser tiles cost."""
    shown = [r for r in records if r.what.op == "eval fidelity" and r.facts["policy"].startswith("tile ")]
    if not shown:
        return None
    tiles = sorted({r.what.config["tile"] for r in shown})
    rows = sorted({r.what.config["query_tile"] for r in shown})

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, query_tile in enumerate(rows):
            own = sorted((r for r in shown if r.what.config["query_tile"] == query_tile),
                         key=lambda r: r.what.config["tile"])  # fmt: skip
            x = [tiles.index(r.what.config["tile"]) + 0.06 * (index - len(rows) / 2) for r in own]
            mean = np.array([r.facts["mean"] for r in own])
            low, high = (np.array([r.facts[end] for r in own]) for end in ("low", "high"))
            axes.errorbar(x, mean, [np.maximum(mean - low, 0), np.maximum(high - mean, 0)], fmt="osD^"[index % 4] + "-",
                          color=COLOURS[index], capsize=3, label=f"query tile {query_tile}")  # fmt: skip
        axes.set_xticks(range(len(tiles)), [str(t) for t in tiles])
        axes.set(xlabel="keys per tile", ylabel="KL(dense || Kascade), nats per token", ylim=(0, None))
        axes.legend(fontsize=8)

    return Picture("What tile size costs (95 % intervals over windows)", drawn(draw, (8, 4.2)), tuple(shown))


def tuning(records: Sequence[Record]) -> Picture | None:
    """Every candidate of each search in the order it was tried, and the best so far."""
    shown = [r for r in records if r.what.op == "tune" and r.facts.get("candidates")]
    if not shown:
        return None

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, record in zip(panels, shown):
            found = [c["quick_s"] for c in record.facts["candidates"]]
            times = np.array([math.nan if t is None else 1e3 * t for t in found])
            axes.plot(times, "o", color=COLOURS[0], label="candidate")
            axes.plot(np.fmin.accumulate(times), "-", color=COLOURS[1], label="best so far")
            failed = [i for i, t in enumerate(found) if t is None]
            axes.plot(failed, [np.nanmax(times)] * len(failed), "x", color="black", label="failed")
            axes.set(xlabel="candidate", ylabel="ms, quick", ylim=(0, None))
            axes.set_title(f"{record.what.workload}: {record.median:.2f}x the default", fontsize=9)
        panels[0].legend(fontsize=7)

    return Picture("Tuning history", drawn(draw, (max(5, 4 * len(shown)), 3.6)), tuple(shown))


def progress(records: Sequence[Record]) -> Picture | None:
    """Each compared figure over time: its ratio to the target at every date it was measured."""
    shown = [r for r in records if r.comparison and r.comparison.target and not r.error and _target(r)]
    groups: dict[str, list[Record]] = {}
    for record in shown:
        groups.setdefault(f"{record.what.workload}, {record.what.kernel}, {record.where.machine}", []).append(record)
    groups = {name: own for name, own in groups.items() if len({r.date for r in own}) > 1}
    if not groups:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (name, own) in enumerate(groups.items()):
            own = sorted(own, key=lambda r: r.date)
            ratios = [r.comparison.ratio / _target(r) for r in own]
            axes.plot([np.datetime64(r.date[:19]) for r in own], ratios, "osD^vP"[index % 6] + "-",
                      color=COLOURS[index % len(COLOURS)], label=name)  # fmt: skip
        axes.axhline(1, color=INK, linewidth=1)
        axes.tick_params(axis="x", rotation=45)
        axes.set(xlabel="date (UTC)", ylabel="figure over its target (above 1: met)", ylim=(0, None))
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return Picture("Progress of the figures", drawn(draw, (11, 4.2)), tuple(r for own in groups.values() for r in own))


def predicted(records: Sequence[Record]) -> Picture | None:
    """Predicted figures against their targets, a bar per chip."""
    shown = [r for r in records if r.what.op == "predicted figure" and r.comparison]
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
                goal = _target(record)
                axes.plot([goal, goal], [place - height / 2, place + height / 2], color="black", linewidth=2)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="ratio (black: target; 'against' wants more, the others less)")
        axes.legend(fontsize=8)

    return Picture("TPU figures, predicted from schedules, not measured", drawn(draw, (10, 5.5)), tuple(shown))


def _target(record: Record) -> float | None:
    words = record.comparison.target.split()
    try:
        return float(words[-1])
    except ValueError:
        return None


def _is_study(record: Record) -> bool:
    return record.command.endswith("--suite study")


PICTURES: Final[Mapping[str, Callable[[Sequence[Record]], Picture | None]]] = MappingProxyType(
    {
        "roofline": roofline,
        "progress": progress,
        "predicted": predicted,
        "quality": quality,
        "needles": needles,
        "granularity": granularity,
        "tuning": tuning,
    }
)
"""Every picture by name, in the page's order."""
