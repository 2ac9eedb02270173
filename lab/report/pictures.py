"""The style of the pictures in docs/, and how one is drawn.

A module that draws pictures has a table of functions that take records and return a picture, or None if they have
nothing to show.
"""

import io
from collections.abc import Callable
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from tessera.measure.evidence import Record

INK, GRID = "#1a1a1a", "#d9d9d9"
COLOURS = ("#1f4e79", "#c8590a", "#3a7d44", "#7a4f9a", "#8c6d1f", "#555555", "#c2185b", "#00939f", "#e8a0bf", "#8bc34a")
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
    """A picture: its title, its SVG text, and the records that it shows."""

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
