"""Place each text next to its mark: at the nearest of the spots that overlap the fewest marks, texts and edges."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation

ROOM = (11.0, 9.0)
"""Printer's points (x, y). Texts of font size 7 overlap if their centres are closer than this in both directions."""
RADII = (10, 14, 19, 25, 32, 40, 49, 59)
"""Printer's points. Distances from a mark to its text, in order of preference."""
NEAR = RADII[1]
"""Printer's points. A line joins a text to its mark if they are farther apart than this."""
DIRECTIONS = [(np.cos(turn), np.sin(turn)) for turn in np.pi * np.array([0, 8, 4, 12, 2, 6, 10, 14, 1, 7, 9, 15]) / 8]
"""Unit vectors from a mark to its text, in order of preference: right, left, up, down, diagonals, others."""


def place(
    axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str], colours: Sequence[str]
) -> list[Annotation]:
    """Write each text next to its point, in the given colour. The figure's layout must be final."""
    to_points = 72 / axes.figure.dpi
    marks = axes.transData.transform(np.array(points).reshape(-1, 2)) * to_points
    low, high = axes.get_window_extent().get_points() * to_points
    sides = np.array([(radius * x, radius * y) for radius in RADII for x, y in DIRECTIONS])
    taken, written = marks, []
    for point, mark, text, colour in zip(points, marks, texts, colours):
        spots = mark + sides
        meets = (np.abs(spots[:, None] - taken[None]) < ROOM).all(-1).sum(-1)
        outside = ((spots < low + np.array(ROOM) / 2) | (spots > high - np.array(ROOM) / 2)).any(-1)
        best = int(np.argmin(meets + 2 * outside))  # argmin takes the first, and near spots come first
        taken = np.vstack([taken, spots[best]])
        leads = np.hypot(*sides[best]) > NEAR
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 3, "shrinkB": 3} if leads else None
        note = axes.annotate(text, point, sides[best], textcoords="offset points", color=colour, fontsize=7,
                             ha="center", va="center", arrowprops=line,
                             bbox={"boxstyle": "square,pad=0.05", "color": "white", "alpha": 0.8})  # fmt: skip
        note.set_in_layout(False)
        written.append(note)
    return written
