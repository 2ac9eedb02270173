"""Draw the demo's pictures as SVG strings, with dark text, units on the axes, and the same colours throughout."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.report.pictures import INK, STYLE

DENSE, KASCADE, OWN = "#1f4e79", "#c8590a", "#4f7f4f"

_STYLE = STYLE | {"font.size": 11, "xtick.color": INK, "ytick.color": INK}


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


def _draw(plot: Callable[[Figure], Any], size: tuple[float, float]) -> str:
    """Run a plot function on a new figure, without global state, and return the <svg> element."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size)
        plot(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
