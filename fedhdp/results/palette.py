"""Colours and style of every picture: an algorithm has the same colour in plots, figures and pages.

The colours are Okabe and Ito's, which colour-blind readers tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COLOURS = {
    "fedhdp": "#0072B2",
    "dp_fedavg": "#D55E00",
    "hdp_fedavg": "#CC79A7",
    "non_private": "#009E73",
    "local_only": "#E69F00",
}
OTHER_COLOURS = ("#56B4E9", "#7F7F7F", "#8C6D31")  # of algorithms that are not the package's
REFERENCE_COLOUR, GRID_COLOUR = "#555555", "#e5e5e5"  # of published numbers, and of lines behind the data
STYLE: dict[Any, Any] = {  # of matplotlib
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "svg.hashsalt": "fedhdp",
}


def colours_of(algorithms: Iterable[str]) -> dict[str, str]:
    """A colour for each algorithm."""
    names = list(dict.fromkeys(algorithms))
    others = [name for name in names if name not in COLOURS]
    return {name: COLOURS.get(name) or OTHER_COLOURS[others.index(name) % len(OTHER_COLOURS)] for name in names}


def tint(colour: str, position: float) -> str:
    """A colour mixed with white, from nothing at position 0 to half at 1."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * position / 2):02x}" for part in parts)
