"""Draw what the choice of keys alone keeps in `tessera eval --suite real`: closeness to dense and answers, against keys
read, sparse from the first token on."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from lab.report.pictures import COLOURS, INK, Picture, drawn
from lab.report.real import TASK, TEXT, answered
from tessera.measure.evidence import INTERVAL_ROUNDS, Record

LOOKS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "plan": (COLOURS[1], "D"),
        "control": (INK, "X"),
        "the plan's whole heads + window": (COLOURS[5], "s"),
        "window + sink": (COLOURS[0], "o"),
        "own choice, tile 1": ("#9ccc9f", "^"),
        "own choice, tile 16": (COLOURS[2], "^"),
        "own choice, tile 32": ("#5f9e67", "<"),
        "own choice, tile 64": ("#1f4a28", "v"),
        "mean keys of 4": (COLOURS[3], "p"),
        "mean keys": (COLOURS[8], "8"),
        "min and max": (COLOURS[7], "h"),
        "random tiles": (COLOURS[4], "d"),
    }
)
"""Contender -> colour and mark, which are the same at every budget of keys."""

BARS = "(bars: 95 % intervals, of at least five blocks or documents; single marks near the plan are at its keys)"

Point = tuple[float, float, float, float]
"""Share of keys read, value, and the low and high ends of the value's interval."""


def real_text(records: Sequence[Record]) -> Picture | None:
    """Plot divergence from dense, averaged over domains, against keys read: a panel per range of positions."""
    shown = [r for r in answered(records, TEXT, alone=True) if r.what.kernel in LOOKS]
    if not shown:
        return None
    spans = sorted({(r.facts["from"], r.facts["to"]) for r in shown})
    titles = [f"tokens {low:,} to {high:,}" for low, high in spans]

    def point(own: Sequence[Record]) -> Point:
        ends = ("low", "high") if all(len(r.samples) >= INTERVAL_ROUNDS for r in own) else ("mean", "mean")
        values = [np.mean([r.facts[name] for r in own]) for name in ("mean", *ends)]
        return (float(np.mean([r.mean_density for r in own])), *map(float, values))

    def draw(figure: Figure) -> None:
        keys = [{(r.what.kernel, r.facts["policy"]): [] for r in shown} for _ in spans]
        for record in shown:
            place = spans.index((record.facts["from"], record.facts["to"]))
            keys[place][record.what.kernel, record.facts["policy"]].append(record)
        panels = [{lead: point(own) for lead, own in panel.items() if own} for panel in keys]
        _panels(figure, panels, titles, "KL(dense || policy), nats per token", log=True)

    domains = len({r.facts["domain"] for r in shown})
    title = f"Divergence from dense over keys read, mean of {domains} domains {BARS}"
    return Picture(title, drawn(draw, _size(len(spans))), tuple(shown))


def real_needles(records: Sequence[Record]) -> Picture | None:
    """Plot the share of dense's needles that each policy keeps, against the share of keys read: a panel per length."""
    shown = [r for r in answered(records, TASK, alone=True) if r.what.kernel in LOOKS and r.facts["kind"] == "single"]
    shown = [r for r in shown if r.facts.get("kept") is not None]
    if not shown:
        return None
    lengths = sorted({r.facts["length"] for r in shown})

    def point(record: Record) -> Point:
        ends = ("kept_low", "kept_high") if len(record.facts["found"]) >= INTERVAL_ROUNDS else ("kept", "kept")
        return record.mean_density, *(100 * record.facts[name] for name in ("kept", *ends))

    def draw(figure: Figure) -> None:
        panels = [
            {(r.what.kernel, r.facts["policy"]): point(r) for r in shown if r.facts["length"] == length}
            for length in lengths
        ]
        counts = [next(r.facts["of_dense"] for r in shown if r.facts["length"] == length) for length in lengths]
        titles = [f"{length:,} tokens, dense finds {count}" for length, count in zip(lengths, counts)]
        _panels(figure, panels, titles, "needles kept of dense's, %", log=False)

    title = f"Needles kept, of those that dense finds, over keys read {BARS}"
    return Picture(title, drawn(draw, _size(len(lengths))), tuple(shown))


def _size(panels: int) -> tuple[float, float]:
    return 12.0, 1.4 + 4.0 * (-(-panels // 2))


def _panels(
    figure: Figure, panels: Sequence[Mapping[tuple[str, str], Point]], titles: Sequence[str], label: str, *, log: bool
) -> None:
    """Draw two panels per row with one legend. A line joins a contender's points at different budgets of keys."""
    axes_of = figure.subplots(-(-len(panels) // 2), min(2, len(panels)), sharey=True, squeeze=False).flat
    for axes, panel, title in zip(axes_of, panels, titles):
        for name in LOOKS:
            points = sorted(point for (family, _), point in panel.items() if family == name)
            if points:
                _line(axes, name, points)
        axes.set_title(title, fontsize=11)
        axes.set(yscale="log" if log else "linear", xlim=(0, None))
        if not log:
            axes.set_ylim(-4, 104)
        else:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.supylabel(label, fontsize=11)
    figure.supxlabel("keys read, % of the visible ones, all layers and heads", fontsize=11)
    handles = {name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels())}
    names = [name for name in ("the plan" if n == "plan" else n for n in LOOKS) if name in handles]
    figure.legend([handles[n] for n in names], names, loc="outside upper center", ncols=4, fontsize=10, frameon=False)


def _line(axes: Axes, name: str, points: Sequence[Point]) -> None:
    """Draw one contender's points with their intervals. The plan's points are larger and on top."""
    (colour, mark), main = LOOKS[name], name == "plan"
    read, value, low, high = np.transpose(points)
    if len(points) == 1 and name not in (
        "plan",
        "control",
    ):  # all single points are at the plan's keys: shift them so that marks do not overlap
        read = read + 0.003 * (list(LOOKS).index(name) - len(LOOKS) / 2)
    spread = np.maximum([value - low, high - value], 0)
    axes.errorbar(
        read,
        value,
        spread,
        fmt=mark + "-",
        color=colour,
        markersize=10 if main else 7.5,
        linewidth=2 if main else 1,
        elinewidth=1,
        capsize=2.5,
        zorder=5 if main else 3,
        markeredgecolor="white",
        markeredgewidth=0.5,
        label="the plan" if main else name,
    )


PICTURES: Final[Mapping[str, Callable[[Sequence[Record]], Picture | None]]] = MappingProxyType(
    {"real-kl": real_text, "real-needles": real_needles}
)
"""File name -> function that draws the picture. The report also writes each picture to its own SVG file."""
