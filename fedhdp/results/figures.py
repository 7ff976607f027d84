"""The lines of stored runs as a picture: a panel for each group, error bars whose kind the picture names.

An algorithm has the same colour in every picture (Okabe and Ito's, which colour-blind readers tell apart); lines of the
same algorithm differ in marker and dashes. Needs matplotlib, the extra ``figures``.

Axis letters: P points of a line.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhdp.mechanism import SERVER
from fedhdp.results.palette import GRID_COLOUR, STYLE, colours_of, tint
from fedhdp.results.series import ROUND, Lines, Point, Series, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS, DASHES = ("o", "s", "^", "D", "v", "P"), ("-", "--", "-.", ":")
MODELS = {
    "global": "global model",
    "personal": "personal models",
    "average": "averaged model",
    "chosen": "chosen models",
}
LOG_RATIO = 10  # of the largest to the smallest value, from which an axis is logarithmic
DODGE = 0.006  # of the axis between the bars of two lines at the same value
BARS_AT_MOST = 8  # points of a line; with more, intervals are bands


def draw(lines: Lines, metric: str, model: str, title: str, path: Path) -> None:
    """Draw lines into a file whose ending is png, svg or pdf.

    Args:
        lines: The lines, from `fedhdp.results.series.make_lines`.
        metric: The metric of the y axis.
        model: Which model was measured.
        title: What was run.
        path: The file.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = len(lines.groups)
    columns = min(panels, 3)
    rows, width = math.ceil(panels / columns), max(6.4, 4.6 * columns)
    styles = _styles([series for of_group in lines.groups.values() for series in of_group])
    longest = max(len(label) for _, label in styles)
    legend_columns = max(1, min(int(width * 72 // (longest * 5.6 + 50)), 4, len(styles)))
    legend_height = 0.22 * math.ceil(len(styles) / legend_columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(width, 4.0 * rows + legend_height + 0.3), layout="constrained")
        axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        for axis, (group, series) in zip(axes, lines.groups.items(), strict=False):
            _draw_panel(axis, series, lines, _places(lines), styles)
            if panels > 1:
                axis.set_title(_owner(group), fontsize=10)
        for axis in axes[panels:]:
            axis.set_visible(False)
        axes[0].set_ylabel(metric.replace("_", " ") + (", %" if lines.percent else ""))
        handles = {
            label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": legend_columns, "frameon": False}
        figure.legend(list(handles.values()), list(handles), **place)
        of_group = f", {_owner(next(iter(lines.groups)))}" if panels == 1 else ""
        subject = (
            f"{metric.replace('_', ' ').capitalize().replace('Auc', 'AUC')} of the {MODELS.get(model, model)}{of_group}"
        )
        texts = (f"{subject}, by {_x_label(lines.x)}", f"{title}; {_interval_text(lines)}")
        figure.suptitle("\n".join(textwrap.fill(text, int(width * 13)) for text in texts), fontsize=10.5)
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=160, metadata=metadata)


def _styles(series: Sequence[Series]) -> dict[tuple[str, str], dict[str, Any]]:
    """The colour, marker and dashes of each line, by algorithm and label."""
    styles: dict[tuple[str, str], dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    colours = colours_of(line.algorithm for line in series)
    for line in series:
        if (line.algorithm, line.label) not in styles:
            number = numbers[line.algorithm] = numbers.get(line.algorithm, -1) + 1
            marker, dash = MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)]
            styles[line.algorithm, line.label] = {"color": number, "marker": marker, "linestyle": dash}
    for (algorithm, _), style in styles.items():
        style["color"] = tint(colours[algorithm], style["color"] / (numbers[algorithm] or 1))
    return styles


def _places(lines: Lines) -> dict[Any, float] | None:
    """Where values of the x axis are that have no scale: text, infinity, or zero beside a wide range; else None."""
    values = {point.x for series in lines.groups.values() for line in series for point in line.points}
    numbers = sorted(value for value in values if is_number(value) and math.isfinite(value))
    is_wide = len(numbers) > 2 and numbers[0] == 0 and numbers[-1] / numbers[1] >= LOG_RATIO
    if len(numbers) == len(values) and not (is_wide and lines.x != ROUND):
        return None
    places = [*numbers, *sorted((value for value in values if value not in numbers), key=str)]
    return {value: float(place) for place, value in enumerate(places)}


def _draw_panel(
    axis: Axes, series: Sequence[Series], lines: Lines, places: dict[Any, float] | None, styles: dict
) -> None:
    from matplotlib.ticker import MaxNLocator

    x = lines.x
    curves = [line for line in series if not _is_level(line, series)]
    values = sorted({point.x if places is None else places[point.x] for line in curves for point in line.points})
    is_log = places is None and x != ROUND and values[0] > 0 and values[-1] / values[0] >= LOG_RATIO
    if is_log:
        axis.set_xscale("log")
    scale = 100 if lines.percent else 1
    with_bars = [line for line in curves if any(point.half_interval for point in line.points)]
    for line in series:
        style = styles[line.algorithm, line.label]
        if line not in curves:  # it does not depend on x
            _draw_level(axis, line, scale, style)
            continue
        shift = DODGE * (with_bars.index(line) - (len(with_bars) - 1) / 2) if line in with_bars else 0.0
        x_P = np.array([point.x if places is None else places[point.x] for point in line.points], float)
        moved_P = x_P * (values[-1] / values[0]) ** shift if is_log else x_P + shift * ((values[-1] - values[0]) or 1)
        _draw_line(axis, line, x_P, moved_P, scale, style)
    if places is not None:
        axis.set_xticks(list(places.values()), [_x_text(value) for value in places])
    elif x == ROUND and len(values) > 1:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    elif len(values) <= BARS_AT_MOST:
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.set_xticks([], minor=True)
    if lines.percent:
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, -1), min(high, 101))
    axis.set_xlabel(_x_label(x))
    axis.grid(color=GRID_COLOUR, linewidth=0.6)


def _is_level(line: Series, series: Sequence[Series]) -> bool:
    """Whether a line has one value only, where others have several: it does not depend on x."""
    return len(line.points) == 1 and any(len(other.points) > 1 for other in series)


def _draw_line(
    axis: Axes, line: Series, x_P: np.ndarray, moved_P: np.ndarray, scale: float, style: dict[str, Any]
) -> None:
    """A line with a band, or with bars, which are moved aside so that those of several lines can be seen."""
    y_P = scale * np.array([point.mean for point in line.points])
    half_P = scale * np.array([point.half_interval or 0.0 for point in line.points])
    if len(x_P) > BARS_AT_MOST:
        axis.plot(x_P, y_P, label=line.label, linewidth=1.5, markevery=max(1, len(x_P) // 8), markersize=4.5, **style)
        axis.fill_between(x_P, y_P - half_P, y_P + half_P, color=style["color"], alpha=0.15, linewidth=0)
        return
    kind: dict[str, Any] = {"linewidth": 1.5, "elinewidth": 1.1, "markersize": 5.5, "capsize": 2.5}
    axis.errorbar(moved_P, y_P, yerr=half_P if half_P.any() else None, label=line.label, **kind, **style)


def _draw_level(axis: Axes, line: Series, scale: float, style: dict) -> None:
    """A line that has one value is drawn over the whole width."""
    [point] = line.points
    mean, half = scale * point.mean, scale * (point.half_interval or 0.0)
    axis.axhline(mean, label=line.label, linewidth=1.3, color=style["color"], linestyle=(0, (5, 2)))
    if half:
        axis.axhspan(mean - half, mean + half, color=style["color"], alpha=0.12, linewidth=0)


def _interval_text(lines: Lines) -> str:
    """What the error bars are, in the picture's own words."""
    panels = list(lines.groups.values())
    points: list[Point] = [point for series in panels for line in series for point in line.points]
    counts = sorted({point.seeds for point in points})
    if counts[-1] == 1:
        return "one seed: no error bars"
    kinds = [len(line.points) > BARS_AT_MOST or _is_level(line, series) for series in panels for line in series]
    shape = "bands" if all(kinds) else "bars and bands" if any(kinds) else "bars"
    seeds = str(counts[-1]) if len(counts) == 1 else f"{max(2, counts[0])} to {counts[-1]}"
    exception = ", none for points of one seed" if counts[0] == 1 else ""
    return f"{shape}: 95% interval of the mean over {seeds} seeds{exception}"


def _x_label(x: str) -> str:
    if x == ROUND:
        return "round"
    if x.startswith("mechanism.groups."):
        group, _, key = x.removeprefix("mechanism.groups.").rpartition(".")
        symbol = {"weight": " r", "pull": " λ", "noise_multiplier": " z", "epsilon": " ε"}.get(key, "")
        return f"{key.replace('_', ' ')}{symbol} of {group}"
    return x.replace("_", " ").replace(".", " ", 1) if x.count(".") == 1 else x


def _x_text(value: Any) -> str:
    return ("∞" if math.isinf(value) else f"{value:g}") if is_number(value) else str(value)


def _owner(group: str) -> str:
    return "server's test set" if group == SERVER else f"clients of the group {group}"
