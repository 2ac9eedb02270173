"""Draw the demo's pictures as SVG strings, with dark text, units on the axes, and the same colours throughout."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from lab.report.pictures import GRID, INK, STYLE

DENSE, KASCADE, OWN = "#1f4e79", "#c8590a", "#4f7f4f"

_STYLE = STYLE | {"font.size": 11, "xtick.color": INK, "ytick.color": INK}


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """One layer's choice of tiles.

    `heads_BY` [query tiles, key tiles] counts the KV heads that list a key tile for a query tile. It is -1 where the
    key tile is not visible.
    """

    layer: int
    heads_BY: np.ndarray
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot that compares the times of two sides, such as dense and Kascade, over prompt lengths.

    `sides` maps a side's name to its seconds at each length.
    """

    title: str
    label: str
    lengths: Sequence[int]
    sides: Mapping[str, Sequence[float]]


def times(panels: Sequence[Panel]) -> str:
    """Plot milliseconds against prompt length, both axes logarithmic.

    The label at each length is the time of the first entry in the panel's `sides` divided by the time of the second.
    """

    def plot(figure: Figure) -> None:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
            for (name, seconds), colour, mark in zip(panel.sides.items(), (DENSE, KASCADE), "os"):
                milliseconds = [1e3 * s for s in seconds]
                axes.plot(panel.lengths, milliseconds, color=colour, marker=mark, linewidth=2, label=name)
            for length, top, bottom in zip(panel.lengths, *panel.sides.values()):
                place = (length, 1e3 * max(top, bottom))
                axes.annotate(
                    f"{top / bottom:.1f}x", place, textcoords="offset points", xytext=(0, 8), ha="center", fontsize=10
                )
            axes.set(xscale="log", yscale="log", xlabel="prompt length (tokens)", ylabel=panel.label, title=panel.title)
            axes.set_xticks(
                list(panel.lengths),
                [f"{n:,}" for n in panel.lengths],
                rotation=0 if len(panel.lengths) < 5 else 30,
            )
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.margins(y=0.15)
            axes.legend(frameon=False, loc="upper left")
        figure.subplots_adjust(wspace=0.25)

    return _draw(plot, (6.2 * len(panels), 4.4))


ROLES = {
    "score": (DENSE, "anchor: scores all keys"),
    "dense": (DENSE, "anchor: reads all keys"),
    "own": (OWN, "own: chooses by cheap scores"),
    "sparse": (KASCADE, "reuse: reads what its source chose"),
}
"""Role of a layer -> its colour and its words in the legend."""


def densities(layers: Sequence[float], roles: Sequence[str]) -> str:
    """Plot the share of the visible keys that each layer read, coloured by the layer's role (`Kascade.roles`)."""

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        bars = axes.bar(range(len(layers)), [100 * share for share in layers],
                        color=[ROLES[role][0] for role in roles], width=0.7)  # fmt: skip
        sign = " %" if len(layers) <= 16 else ""  # 30 bars leave no room for the sign
        axes.bar_label(bars, [f"{100 * share:.0f}{sign}" for share in layers], padding=2, fontsize=10)
        axes.set(xlabel="layer", ylabel="keys read (% of visible)", ylim=(0, 115))
        axes.set_title("Keys read per layer, the whole prompt")
        axes.set_xticks(range(len(layers)))
        axes.grid(visible=False, axis="x")
        shown = [ROLES[role] for role in dict.fromkeys(roles)]
        handles = [Patch(color=colour) for colour, _ in shown]
        figure.legend(handles, [words for _, words in shown], frameon=False, loc="lower center", ncols=len(shown))
        figure.subplots_adjust(bottom=0.24)

    return _draw(plot, (max(6.6, 0.36 * len(layers)), 4.2))


def chosen_tiles(anchors: Sequence[Anchor], tile: int, query_tile: int, marks: Sequence[int]) -> str:
    """Plot one map per layer that chooses tiles: query tiles down, key tiles across.

    The colour says how many KV heads list the key tile.

    Args:
        anchors: the layers' choices, at least one; each gets a panel.
        tile: keys per key tile, for the axis.
        query_tile: rows per query tile, for the axis.
        marks: key positions of answers, drawn as dashed lines.
    """

    def plot(figure: Figure) -> None:
        panels = figure.subplots(1, len(anchors), squeeze=False)[0]
        for axes, anchor in zip(panels, anchors):
            num_rows, num_tiles = anchor.heads_BY.shape
            steps = ["#f0f0f0", *LinearSegmentedColormap.from_list("", ["#f6c9a0", KASCADE])(
                np.linspace(0, 1, anchor.num_heads))]  # fmt: skip
            colours = ListedColormap(["white", *steps])
            extent = (0, num_tiles * tile, num_rows * query_tile, 0)
            axes.imshow(anchor.heads_BY, cmap=colours, vmin=-1.5, vmax=anchor.num_heads + 0.5, extent=extent,
                        aspect="auto", interpolation="nearest")  # fmt: skip
            for position in marks:
                axes.axvline(position, color=DENSE, linewidth=1.2, linestyle="--")
            axes.set(title=f"chosen by layer {anchor.layer}", xlabel=f"key position (tiles of {tile})")
            axes.grid(visible=False)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        panels[0].set_ylabel(f"query position (tiles of {query_tile})")
        count = anchors[0].num_heads
        words = ["not chosen", *(f"chosen by {n} of {count} KV heads" for n in range(1, count + 1))]
        handles = [Patch(facecolor=c, edgecolor=GRID) for c in steps]
        if marks:
            handles.append(Line2D([], [], color=DENSE, linestyle="--"))
            words.append("position of an answer")
        figure.legend(handles, words, frameon=False, loc="lower center", ncols=2)
        figure.subplots_adjust(bottom=0.24, wspace=0.28)

    return _draw(plot, (max(6.6, 4.2 * len(anchors)), 5.2))


def _draw(plot: Callable[[Figure], Any], size: tuple[float, float]) -> str:
    """Run a plot function on a new figure, without global state, and return the <svg> element."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size)
        plot(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
