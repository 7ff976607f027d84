"""Colours and style of every picture: an algorithm has the same colour in plots, figures and pages.

The colours of FedHDP and its baselines are Okabe and Ito's, those of its rivals Paul Tol's muted ones: colour-blind
readers tell them apart, on light and on dark paper.
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
    "threshold": "#7F7F7F",
    "weiavg": "#56B4E9",
    "idp_scale": "#8C6D31",
    "idp_sample": "#AA4499",
    "time_adaptive": "#999933",
    "gdpfed": "#117733",
}
OTHER_COLOURS = ("#6699CC", "#CC6677", "#882255")  # of algorithms that are not the package's
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
