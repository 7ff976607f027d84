"""The shapes of 62 glyphs (digits, capitals, small letters) as pen strokes, and points sampled along them.

Strokes are separated by ``/``. Each is a list of points ``x,y`` in hundredths of a capital's height, y downwards. A
stroke is a smooth curve through its points, with a corner at each point marked ``!``. Small letters have the same
baseline (y = 100), are 60 high and may descend below it. A glyph may have several shapes, drawn with equal probability;
a shape that is listed twice is drawn twice as often.

Axis letters: V shapes, S points sampled along a shape, P points of a stroke as written below.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

NUM_POINTS = 64  # of a shape; a W has 72 pixels of line at 20 pixels of height, so they are closer than a pen is wide
MAX_STROKES = 3

_O = "50,0 22,14 9,52 24,90 52,100 82,86 91,48 78,12 46,1"
GLYPHS: dict[str, tuple[str, ...]] = {
    "0": (
        "50,0 25,14 15,50 28,88 52,100 78,85 85,48 74,12 46,1",
        "66,8 38,4 18,40 24,86 50,100 78,78 84,36 64,6 44,10",
    ),
    "1": ("50,0 50,100", "50,0 50,100", "34,20 52,0! 51,100", "30,22 52,0! 52,100 / 28,100 76,100"),
    "2": (
        "18,24 30,5 54,0 78,14 78,34 56,62 16,100! 86,98",
        "18,22 34,3 60,2 80,18 74,44 48,76 26,96 13,90 24,80 48,90 70,100 90,92",
        "20,14 48,0 76,12 76,36 52,68 20,96! 52,90 88,100",
    ),
    "3": (
        "20,12 44,0 74,10 74,32 44,46! 76,56 82,80 56,100 18,88",
        "20,2 78,2! 46,40! 74,50 82,76 58,100 18,90",
        "18,10 52,0 76,20 56,44 38,48 58,50 82,72 58,98 14,94",
    ),
    "4": (
        "28,0 18,56! 86,56 / 68,22 64,100",
        "64,100 66,0! 14,66! 90,64",
        "24,2 20,44 44,54 78,44 / 80,0 74,50 70,100",
        "30,2 20,54! 82,52 / 76,4 62,100",
    ),
    "5": (
        "78,2 30,2! 24,42! 54,38 82,58 74,90 46,100 16,90",
        "30,4 26,44! 56,40 80,62 70,92 42,100 16,90 / 30,4 84,0",
        "84,0 40,4 32,40 66,56 70,84 44,100 14,94",
    ),
    "6": (
        "68,0 36,24 18,64 30,96 58,98 76,78 62,54 36,58 22,76",
        "52,0 28,40 20,80 44,100 74,88 72,62 46,56 24,78",
        "76,4 48,8 22,46 22,86 52,100 80,82 74,60 50,56 28,72",
    ),
    "7": (
        "16,4 82,4! 60,44 42,100",
        "16,4 82,4! 60,44 42,100 / 34,50 78,48",
        "18,20 20,4! 84,4! 58,50 46,100",
        "16,8 48,4 80,10 70,40 50,100",
    ),
    "8": (
        "74,12 48,0 24,16 34,38 64,56 80,78 50,100 22,82 34,58 66,38 76,14",
        "50,46 26,26 50,0 74,22 50,46 20,74 50,100 80,74 50,46",
        "70,8 36,4 30,32 66,58 70,90 40,98 34,70 66,36 80,8",
    ),
    "9": (
        "76,20 52,2 24,22 36,50 64,46 78,20! 74,60 64,100",
        "74,18 50,0 26,20 34,46 60,46 76,22 78,56 62,92 28,96",
        "72,10 40,6 26,30 50,44 74,22 72,6! 62,60 46,100",
    ),
    "A": ("14,100 50,0! 86,100 / 28,64 74,64", "14,100 36,24 54,0 70,26 84,100 / 24,60 80,58"),
    "B": ("24,0 24,100 / 24,2 62,4 72,24 54,46 24,48! 66,52 82,74 64,98 24,100",),
    "C": ("82,18 56,0 26,16 14,52 28,88 56,100 84,84",),
    "D": ("24,0 24,100 / 24,0 62,8 84,48 64,92 24,100",),
    "E": ("78,2 24,2! 24,100! 80,98 / 24,48 68,48", "78,10 46,0 26,22 50,46! 20,72 42,100 82,88"),
    "F": ("80,2 24,2! 24,100 / 24,48 68,46", "28,4 26,100 / 22,2 84,0 / 26,46 66,46"),
    "G": (
        "80,16 54,0 24,18 14,54 30,92 60,98 82,78 82,56! 54,56",
        "78,14 48,0 18,40 28,90 62,96 80,62! 52,60 / 80,56 80,100",
    ),
    "H": ("20,0 20,100 / 80,0 80,100 / 20,50 80,48",),
    "I": ("50,0 50,100 / 26,0 74,0 / 26,100 74,100", "50,0 50,100"),
    "J": ("70,0 70,72 54,98 28,94 18,72", "70,0 70,72 54,98 28,94 18,72 / 40,0 96,0"),
    "K": ("22,0 22,100 / 78,2 22,56! 82,100", "24,0 22,100 / 78,0 44,36 24,54! 52,60 82,100"),
    "L": ("24,0 24,100! 80,98",),
    "M": ("14,100 20,0! 50,62! 80,0! 88,100", "12,100 22,6 34,10 50,70! 66,10 78,6 90,100"),
    "N": ("20,100 20,0! 80,100! 80,0",),
    "O": (_O,),
    "P": ("24,0 24,100 / 24,2 66,4 80,26 64,50 24,54",),
    "Q": (_O + " / 58,70 94,108",),
    "R": ("24,0 24,100 / 24,2 66,4 78,24 62,46 24,50! 82,100",),
    "S": ("78,14 52,0 24,14 30,40 66,56 80,80 52,100 18,88",),
    "T": ("50,2 50,100 / 12,2 88,2",),
    "U": ("18,0 18,64 34,96 62,97 80,66 80,0", "18,0 18,64 34,96 62,97 78,66 80,0! 80,78 90,100"),
    "V": ("14,0 50,100! 86,0",),
    "W": ("6,0 28,100! 50,30! 74,100! 96,0", "6,0 14,80 32,98 48,70 50,20 54,74 72,98 88,74 96,0"),
    "X": ("18,0 82,100 / 82,0 18,100",),
    "Y": ("16,0 50,48 / 84,0 36,100", "16,0 20,36 44,50 76,34 / 82,0 76,70 54,100"),
    "Z": ("18,2 82,2! 16,98! 86,98", "18,2 82,2! 16,98! 86,98 / 30,50 72,50"),
    "a": (
        "74,48 50,40 26,56 24,84 44,100 66,86 76,44! 74,86 88,98",
        "28,50 52,40 72,54 72,100 / 72,66 38,68 26,88 46,100 72,86",
    ),
    "b": ("26,0 26,100 / 26,62 50,44 74,58 74,86 50,100 26,88",),
    "c": ("72,50 48,40 26,58 28,88 50,100 76,90",),
    "d": ("72,60 50,42 26,58 26,86 48,100 72,84 / 74,0 74,98",),
    "e": ("26,70 74,68! 66,46 44,40 24,64 32,94 56,100 78,88",),
    "f": ("76,10 58,0 46,18 44,100 / 24,44 72,44",),
    "g": ("72,50 48,40 26,56 28,80 50,88 72,74 / 74,42 74,110 56,132 26,122",),
    "h": ("26,0 26,100 / 26,66 50,44 70,56 72,100",),
    "i": ("50,42 50,100 / 49,12 52,20", "48,42 48,88 56,99 68,94 / 49,12 52,20"),
    "j": ("56,42 56,112 42,130 22,120 / 55,12 58,20",),
    "k": ("28,0 28,100 / 70,46 28,74! 74,100",),
    "l": ("46,0 46,84 54,99 68,94", "50,0 50,100", "40,84 66,18 54,0 44,18 44,84 56,100 72,92"),
    "m": ("12,42 12,100 / 12,62 30,42 46,54 48,100 / 48,62 66,42 84,54 86,100",),
    "n": ("26,42 26,100 / 26,64 50,42 70,56 72,100",),
    "o": ("50,40 26,52 22,76 42,99 68,94 78,68 64,44 46,41",),
    "p": ("26,42 26,138 / 26,60 50,42 74,58 74,84 50,98 26,88",),
    "q": ("72,58 50,42 26,58 26,84 48,98 72,84 / 74,42 74,138 92,120",),
    "r": ("30,42 30,100 / 30,66 48,44 72,46",),
    "s": ("70,48 48,40 30,52 46,68 70,80 56,100 26,94",),
    "t": ("48,10 48,84 60,99 76,92 / 24,40 74,40", "48,10 48,100 / 24,40 74,40"),
    "u": ("26,42 26,82 42,100 62,92 72,72 / 72,42 74,100",),
    "v": ("24,42 48,100! 74,42",),
    "w": ("14,42 30,100! 50,54! 68,100! 88,42", "14,42 18,86 32,100 48,84 50,50 52,84 68,100 84,82 88,42"),
    "x": ("26,42 74,100 / 74,42 26,100",),
    "y": ("26,42 50,92 / 76,42 52,96 30,136", "26,42 28,76 44,88 70,74 / 74,42 74,110 56,132 26,124"),
    "z": ("26,44 72,44! 26,98! 76,98", "26,44 72,44! 48,66! 74,88 62,124 36,130 34,114 82,88"),
}


class ShapeTable(NamedTuple):
    """The points of every shape, and which shapes belong to which glyph."""

    curve_VS2: np.ndarray  # on the smooth curves
    polyline_VS2: np.ndarray  # on straight lines, in the same order
    position_VS: np.ndarray  # along the shape, from 0 to 1
    length_VS: np.ndarray  # of the line that a point represents
    stroke_VS: np.ndarray  # the number of the point's stroke
    first_shape: np.ndarray  # of each glyph
    num_shapes: np.ndarray  # of each glyph


class _Trace(NamedTuple):
    """A stroke as a dense sequence of points."""

    curve_P2: np.ndarray
    polyline_P2: np.ndarray
    distance_P: np.ndarray  # along the curve


@cache
def shape_table() -> ShapeTable:
    """`GLYPHS` as arrays."""
    shapes = [_sample_shape(strokes) for variants in GLYPHS.values() for strokes in variants]
    num_shapes = np.array([len(variants) for variants in GLYPHS.values()], np.int32)
    first_shape = np.cumsum(num_shapes, dtype=np.int32) - num_shapes
    curve, polyline, position, length, stroke = (np.stack(column) for column in zip(*shapes, strict=True))
    return ShapeTable(curve, polyline, position, length, stroke, first_shape, num_shapes)


def _sample_shape(strokes: str) -> tuple[np.ndarray, ...]:
    """The points of one shape, distributed over its strokes by length: the first five fields of `ShapeTable`."""
    traces = [_trace(stroke) for stroke in strokes.split("/")]
    lengths = np.array([trace.distance_P[-1] for trace in traces])
    counts = np.maximum(np.round(NUM_POINTS * lengths / lengths.sum()).astype(int), 1)
    counts[counts.argmax()] += NUM_POINTS - counts.sum()
    curves, polylines = [], []
    for trace, count, length in zip(traces, counts, lengths, strict=True):
        distance_S = (np.arange(count) + 0.5) / count * length
        curves.append(_interpolate(distance_S, trace.distance_P, trace.curve_P2))
        polylines.append(_interpolate(distance_S, trace.distance_P, trace.polyline_P2))
    position_S, length_S = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS, np.repeat(lengths / counts, counts)
    points = (np.concatenate(curves), np.concatenate(polylines), position_S, length_S)
    return (*(array.astype(np.float32) for array in points), np.repeat(np.arange(len(counts)), counts).astype(np.int32))


def _interpolate(distance_S: np.ndarray, distance_P: np.ndarray, points_P2: np.ndarray) -> np.ndarray:
    return np.stack([np.interp(distance_S, distance_P, points_P2[:, axis]) for axis in (0, 1)], -1)


def _trace(stroke: str) -> _Trace:
    """The stroke's curve, a Catmull-Rom spline from corner to corner, and its straight lines."""
    words = stroke.split()
    points_P2 = np.array([[float(number) / 100 for number in word.rstrip("!").split(",")] for word in words])
    corners = [0, *(index for index, word in enumerate(words) if word.endswith("!")), len(words) - 1]
    curves, polylines = [], []
    for start, stop in pairwise(corners):
        piece_P2 = points_P2[start : stop + 1]
        # Reflected end points let the curve leave in any direction, so that two points make a straight line.
        padded_P2 = np.concatenate([[2 * piece_P2[0] - piece_P2[1]], piece_P2, [2 * piece_P2[-1] - piece_P2[-2]]])
        u = np.linspace(0, 1, 33)[:, None]
        for a, b, c, d in zip(padded_P2[:-3], padded_P2[1:-2], padded_P2[2:-1], padded_P2[3:], strict=True):
            curves.append(b + u / 2 * ((c - a) + u * ((2 * a - 5 * b + 4 * c - d) + u * (3 * b - a - 3 * c + d))))
            polylines.append(b + u * (c - b))
    curve_P2, polyline_P2 = np.concatenate(curves), np.concatenate(polylines)
    steps = np.linalg.norm(np.diff(curve_P2, axis=0), axis=1)
    return _Trace(curve_P2, polyline_P2, np.concatenate([[0.0], np.cumsum(steps)]))
