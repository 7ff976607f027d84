"""A table as a figure: accuracy against the weight for each group and both models, beside the paper's.

Measured numbers are filled points with the 95% interval of the mean over seeds. The paper's are hollow, for the global
model with the range of its three runs. Baselines are horizontal lines, the paper's dotted. Weights are evenly spaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedhdp.privacy.accounting import pluralize
from fedhdp.reproduction.levels import LEVEL_TABLES, OURS, PFA
from fedhdp.reproduction.summary import CLOSE, Cell, Comparison, Line, published_best
from fedhdp.reproduction.tables import PULLS, TABLES, PaperTable, paper_rows, published_rows
from fedhdp.results.palette import COLOURS, GRID_COLOUR, OTHER_COLOURS, REFERENCE_COLOUR, STYLE

MEASURED, PUBLISHED = COLOURS["fedhdp"], REFERENCE_COLOUR
BASELINES = {
    "non_private": ("Non-Private", COLOURS["non_private"]),
    "dp_fedavg": ("DP-FedAvg", COLOURS["dp_fedavg"]),
    "hdp_fedavg": ("HDP-FedAvg", COLOURS["hdp_fedavg"]),
}
PULL_STYLES = dict(zip(PULLS, (("#56B4E9", "s"), ("#0072B2", "^"), ("#332288", "D")), strict=True))
OTHER_PULLS = (("#c51b7d", "v"), ("#01665e", "P"), ("#8c6d31", "X"))  # that the paper does not have
GLOBAL_PANELS = (
    ("acc_g", "global model, server's test set"),
    ("acc_g_p", "global model, private clients"),
    ("acc_g_np", "global model, opted-out clients"),
)
PANELS = (
    *GLOBAL_PANELS,
    ("acc_l_p", "personal models, private clients"),
    ("acc_l_np", "personal models, opted-out clients"),
)
Height = tuple[float | None, float]  # a weight and a height
OUTLIER_RATIO = 1.5  # of the distance below the others to their spread
LEVELS_SPAN = 12.0  # points of accuracy that the panels of several levels show


def draw(comparison: Comparison, path: Path) -> None:
    """Draw a table's figure as PNG."""
    with rc_context(STYLE):
        figure = Figure(figsize=(14, 8.4), layout="constrained")
        table, data = TABLES.get(comparison.table), comparison.data
        if table is None:
            _draw_levels(figure, comparison)
        elif all(line.key.part != "paper" for line in comparison.lines):
            data = data.replace("; ", ";\n")  # a narrow figure
            figure.set_size_inches(8, 1.7 + 0.4 * len(comparison.global_lines))
            _draw_extensions(figure.subplots(), comparison, table)
        else:
            _draw_paper_table(figure, comparison, table)
        seeds = "1 seed" if len(comparison.seeds) == 1 else f"{len(comparison.seeds)} seeds"
        intervals = (
            "bars and bands: 95% interval of the mean over seeds" if len(comparison.seeds) > 1 else "no intervals"
        )
        head = f"{comparison.table}, {pluralize(comparison.rounds)}, {seeds}; {intervals}"
        figure.suptitle(f"{head}\n{data}", fontsize=11)
        figure.savefig(path, dpi=110)


def _draw_paper_table(figure: Figure, comparison: Comparison, table: PaperTable) -> None:
    panels = PANELS if comparison.personal_lines else GLOBAL_PANELS
    axes = figure.subplots(2, (1 + len(panels)) // 2).ravel()
    weights = sorted(
        {line.key.weight for line in comparison.lines if line.key.part == "paper" and line.key.weight is not None}
        | {row.weight for row in paper_rows(table) if row.weight is not None}
    )
    for axis, (column, name) in zip((*axes[:3], *axes[4:]), panels, strict=False):
        _against_weight(axis, comparison, table, column, weights)
        axis.set_title("\n".join([name, *_best_words(comparison, column)]), fontsize=10)
    _draw_extensions(axes[3], comparison, table)
    figure.legend(handles=_legend(comparison), loc="outside lower center", ncols=6, frameon=False, handlelength=2.6)


def _best_words(comparison: Comparison, column: str) -> list[str]:
    """Where FedHDP is best in a column, and DP-FedAvg beside it."""
    lines = [line for line in comparison.lines if line.key.part == "paper" and column in line.cells]
    own = [line for line in lines if line.key.weight is not None]
    if not own:
        return []
    best = max(own, key=lambda line: line.cells[column].mean)
    pull = "" if best.key.pull is None else f", λ = {best.key.pull}"
    words = [f"best at r = {best.key.weight:g}{pull}: {best.cells[column].mean:.1f}%"]
    rivals = [line for line in lines if (line.key.algorithm, line.key.pull) == ("dp_fedavg", best.key.pull)]
    return [", ".join([*words, *(f"DP-FedAvg {line.cells[column].mean:.1f}%" for line in rivals)])]


def _pull_styles(comparison: Comparison) -> dict[float, tuple[str, str]]:
    """A colour and a marker for each pull, the paper's and others; none without personal models."""
    if not comparison.personal_lines:
        return {}
    pulls = {line.key.pull for line in comparison.personal_lines if line.key.part == "paper"}
    others = sorted(pull for pull in pulls - set(PULLS) if isinstance(pull, float))
    return PULL_STYLES | dict(zip(others, itertools.cycle(OTHER_PULLS), strict=False))


def _against_weight(
    axis: Axes, comparison: Comparison, table: PaperTable, column: str, weights: Sequence[float]
) -> None:
    """One column of the table against the weight."""
    place = {weight: float(number) for number, weight in enumerate(weights)}
    lines = [line for line in comparison.lines if line.key.part == "paper" and column in line.cells]
    heights: list[Height] = []
    if "_l_" in column:
        for pull, (colour, marker) in _pull_styles(comparison).items():
            of_pull = [line for line in lines if line.key.pull == pull]
            heights += _draw_curve(axis, of_pull, column, place, colour, marker)
            heights += _draw_published(axis, table, column, place, (pull,), colour, marker)
    else:
        heights += _draw_curve(axis, lines, column, place, MEASURED, "o")
        heights += _draw_published(axis, table, column, place, PULLS, PUBLISHED, "o")
        heights += _draw_baselines(axis, lines, column, table)
    axis.set_xticks(list(place.values()), [f"{weight:g}" for weight in weights])
    axis.set_xlim(-0.4, len(weights) - 0.6)
    axis.set(xlabel="weight r of private clients", ylabel="accuracy, %")
    axis.grid(color=GRID_COLOUR, linewidth=0.6)
    _zoom(axis, heights)


def _draw_curve(axis: Axes, lines: list[Line], column: str, place: dict, colour: str, marker: str) -> list[Height]:
    """The measured points of FedHDP, joined; weight 0 only if it is not an outlier."""
    points = sorted((line.key.weight, line.cells[column]) for line in lines if line.key.weight is not None)
    rest = [cell.mean for weight, cell in points if weight]
    shown = [(place[w], cell) for w, cell in points if w or not rest or cell.mean > _outlier_bound(rest)]
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.4, "capsize": 3}
    if shown:
        x, cells = zip(*shown, strict=True)
        axis.errorbar(x, [cell.mean for cell in cells], yerr=[_half(cell) for cell in cells], zorder=3, **style)
    return [(weight, height) for weight, cell in points for height in _extent(cell)]


def _outlier_bound(rest: list[float]) -> float:
    return min(rest) - OUTLIER_RATIO * (max(rest) - min(rest)) - 2.0


def _draw_published(
    axis: Axes, table: PaperTable, column: str, place: dict, pulls: Sequence[float], colour: str, marker: str
) -> list[Height]:
    """Draw the paper's points: of one pull, or the mean over all with their range."""
    heights: list[Height] = []
    for weight, x in place.items():
        lines = [line for line in published_rows(table.dataset) if line.row.weight == weight and line.pull in pulls]
        values = [line.numbers[column] for line in lines if column in line.numbers]
        if values:
            mean = sum(values) / len(values)
            style: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": "white", "markersize": 6}
            spread = [[max(0.0, mean - min(values))], [max(0.0, max(values) - mean)]]
            axis.errorbar([x + 0.12], [mean], yerr=spread, linestyle="none", elinewidth=0.8, zorder=2, **style)
            heights += [(weight, value) for value in values]
    return heights


def _draw_baselines(axis: Axes, lines: list[Line], column: str, table: PaperTable) -> list[Height]:
    """Draw horizontal lines: measured ones with a band for the interval, the paper's dotted."""
    heights: list[Height] = []
    for algorithm, (_, colour) in BASELINES.items():
        for line in lines:
            if line.key.algorithm == algorithm:
                cell = line.cells[column]
                axis.axhline(cell.mean, color=colour, linewidth=1.2, zorder=1)
                axis.axhspan(cell.mean - _half(cell), cell.mean + _half(cell), color=colour, alpha=0.12, linewidth=0)
                heights += [(None, height) for height in _extent(cell)]
        published = [line.numbers for line in published_rows(table.dataset) if line.row.algorithm == algorithm]
        values = [numbers[column] for numbers in published if column in numbers]
        if values:
            axis.axhline(sum(values) / len(values), color=colour, linewidth=1.2, linestyle=":", zorder=1)
            heights.append((None, sum(values) / len(values)))
    return heights


def _half(cell: Cell) -> float:
    return cell.half or 0.0


def _extent(cell: Cell) -> list[float]:
    return [cell.mean + side * _half(cell) for side in (-1, 0, 1)]


def _zoom(axis: Axes, heights: list[Height]) -> None:
    """Set the limits to all heights, without those of weight 0 if they are outliers; annotate these."""
    rest = [height for weight, height in heights if weight != 0 and height <= 100] or [0.0, 100.0]
    low, high = min(rest), max(rest)
    far = [height for weight, height in heights if weight == 0 and height < low - OUTLIER_RATIO * (high - low) - 0.5]
    near = rest + [height for weight, height in heights if weight == 0 and height not in far and height <= 100]
    margin = 0.06 * (max(near) - min(near)) + 0.05
    axis.set_ylim(min(near) - margin, max(near) + margin)
    if far:
        text = f"r = 0, far below: {min(far):.1f} to {max(far):.1f}"
        axis.annotate(text, (0.02, 0.02), xycoords="axes fraction", fontsize=8, color="#555555")


def _draw_extensions(axis: Axes, comparison: Comparison, table: PaperTable) -> None:
    """Draw the extensions and the paper's best."""
    lines = [line for line in comparison.global_lines if line.key.part != "paper" and "acc_g" in line.cells]
    if not lines:
        return _draw_differences(axis, comparison)
    rows = [(line.key.row, line.cells["acc_g"].mean, _half(line.cells["acc_g"])) for line in lines]
    _draw_rows(axis, rows, [COLOURS[line.key.algorithm] for line in lines])
    best = published_best(table)
    axis.axvline(best, color=PUBLISHED, linestyle="--", linewidth=1.2)
    style: dict[str, Any] = {"textcoords": "offset points", "color": PUBLISHED, "fontsize": 8}
    axis.annotate(f"paper's best {best:g}", (best, len(lines) - 0.4), (4, 0), **style)
    axis.set_ylim(-0.6, len(lines))
    axis.set(xlabel="accuracy, %")
    above = sum(line.cells["acc_g"].mean > best for line in lines)
    title = "extensions: global model, server's test set\n{} of {} are above the paper's best"
    axis.set_title(title.format(above, len(lines)), fontsize=10)


def _draw_differences(axis: Axes, comparison: Comparison) -> None:
    """Draw the difference of each row from the paper, and a band of one point."""
    cells = [(line.key.row, line.cells["acc_g"]) for line in comparison.global_lines]
    axis.axvspan(-CLOSE, CLOSE, color=PUBLISHED, alpha=0.12, linewidth=0)
    axis.axvline(0, color=PUBLISHED, linewidth=1.2)
    shown = [(row, cell.difference, _half(cell)) for row, cell in cells if cell.difference is not None]
    _draw_rows(axis, shown, [MEASURED] * len(shown))
    axis.set(xlabel="points above the paper")
    close = sum(abs(difference) <= CLOSE for _, difference, _ in shown)
    title = "global model, server's test set: difference from the paper\n{} of {} rows are within a point"
    axis.set_title(title.format(close, len(shown)), fontsize=10)


def _draw_rows(axis: Axes, rows: Sequence[tuple[str, float, float]], colours: Sequence[str]) -> None:
    """Draw a point with its interval for each label, from top to bottom."""
    for height, ((_, value, half), colour) in enumerate(zip(reversed(rows), reversed(colours), strict=True)):
        axis.errorbar(value, height, xerr=half, color=colour, marker="o", markersize=5, capsize=3)
    axis.set_yticks(range(len(rows)), [label for label, *_ in reversed(rows)], fontsize=8)
    axis.grid(color=GRID_COLOUR, linewidth=0.6, axis="x")


def _legend(comparison: Comparison) -> list[Line2D]:
    points: dict[str, Any] = {"marker": "o", "markersize": 6}
    handles = [
        Line2D([], [], color=MEASURED, label="FedHDP", **points),
        Line2D([], [], color=PUBLISHED, linestyle="none", markerfacecolor="white", label="FedHDP, paper", **points),
    ]
    handles += [Line2D([], [], color=colour, label=name) for name, colour in BASELINES.values()]
    handles.append(Line2D([], [], color="#555555", linestyle=":", label="baselines, paper"))
    for pull, (colour, marker) in _pull_styles(comparison).items():
        handles.append(Line2D([], [], color=colour, marker=marker, label=f"λ = {pull:g}"))
        if pull not in PULLS:
            continue
        hollow: dict[str, Any] = {"linestyle": "none", "marker": marker, "markerfacecolor": "white"}
        handles.append(Line2D([], [], color=colour, label=f"λ = {pull:g}, paper", **hollow))
    return handles


def _draw_levels(figure: Figure, comparison: Comparison) -> None:
    """Draw several levels: the global accuracy of each method, in a panel for each part."""
    lines = [line for line in comparison.global_lines if "acc_g" in line.cells]
    methods = list(dict.fromkeys(_method(line) for line in lines))
    by_training = [
        [part for part, (_, on_basis) in LEVEL_TABLES.items() if on_basis == basis] for basis in (False, True)
    ]
    present = {line.key.part for line in lines}
    rows = [[part for part in parts if part in present] for parts in by_training]
    rows = [parts for parts in rows if parts]
    axes = figure.subplots(len(rows), max(map(len, rows)), squeeze=False, sharey=True)
    for row, parts in zip(axes, rows, strict=True):
        for axis in row[len(parts) :]:
            axis.set_visible(False)
        of_row = [line for line in lines if line.key.part in parts]
        means = [line.cells["acc_g"].mean for line in of_row]
        lowest, highest = max(min(means), max(means) - LEVELS_SPAN) - 0.5, max(means) + 0.7
        for axis, part in zip(row, parts, strict=False):
            of_part, (levels, on_basis) = [line for line in of_row if line.key.part == part], LEVEL_TABLES[part]
            _draw_methods(axis, of_part, methods, lowest)
            axis.set_xlim(lowest, highest)
            with_noise = [line for line in of_part if line.key.algorithm != "non_private"]
            best = max(with_noise or of_part, key=lambda line: line.cells["acc_g"].mean)
            training = "64 cosines and momentum" if on_basis else "the paper's training"
            axis.set_title(f"{levels} levels, {training}\nbest with noise: {_method(best)}")
    axes[0, 0].set_yticks(range(len(methods)), methods[::-1], fontsize=8)


def _method(line: Line) -> str:
    """The label of a row of several levels without its part."""
    return line.key.row.partition(": ")[2] or line.key.row


def _draw_methods(axis: Axes, lines: list[Line], methods: list[str], lowest: float) -> None:
    """Draw a point with its interval for each method, and a line at FedHDP; what is below the lowest value as a number."""
    for line in lines:
        height, cell = len(methods) - 1 - methods.index(_method(line)), line.cells["acc_g"]
        is_pfa = _method(line).startswith(PFA)
        colour = OTHER_COLOURS[0] if is_pfa else COLOURS.get(line.key.algorithm, REFERENCE_COLOUR)
        if cell.mean < lowest:
            axis.annotate(f"◂ {cell.mean:.1f}", (lowest, height), color=colour, fontsize=8, va="center")
            continue
        marker = "D" if line.key.algorithm == "fedhdp" else "o"
        axis.errorbar(cell.mean, height, xerr=_half(cell), color=colour, marker=marker, markersize=5, capsize=3)
        if _method(line) == OURS:
            axis.axvline(cell.mean, color=colour, linewidth=0.9, linestyle="--", zorder=1)
    axis.set_ylim(-0.7, len(methods) - 0.3)
    axis.set(xlabel="accuracy on the server's test set, %")
    axis.grid(color=GRID_COLOUR, linewidth=0.6)
