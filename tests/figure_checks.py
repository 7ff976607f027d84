"""Figures of matplotlib: that nothing which is drawn lies outside of the paper."""

from __future__ import annotations

from matplotlib.figure import Figure

TOLERANCE = 0.03  # inches, by which the box of a letter is wider than its ink


def overhang(figure: Figure) -> float:
    """How far a text or a line is cut off at an edge, in inches; 0 where all is on the paper."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    most = max(-box.x0, -box.y0, box.x1 - width, box.y1 - height)
    return round(most, 2) if most > TOLERANCE else 0.0
