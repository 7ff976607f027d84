"""Colours of algorithms: seen on light and on dark paper, and different from each other."""

from __future__ import annotations

from itertools import combinations

import pytest

from fedhdp.results.palette import COLOURS, OTHER_COLOURS

PAPERS = ("#ffffff", "#14181d")  # of a page
SEEN = 2.0  # contrast of a line with the paper


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_colour_is_seen(paper):
    contrasts = {}
    for colour in (*COLOURS.values(), *OTHER_COLOURS):
        low, high = sorted((luminance(colour), luminance(paper)))
        contrasts[colour] = (high + 0.05) / (low + 0.05)
    assert {colour: contrast for colour, contrast in contrasts.items() if contrast < SEEN} == {}


def test_colours_differ():
    colours = (*COLOURS.values(), *OTHER_COLOURS)
    assert all(one.lower() != other.lower() for one, other in combinations(colours, 2))
