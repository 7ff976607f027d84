"""A table as a picture: accuracy against the weight for each group and both models, ours beside the paper's.

Ours are filled points with the 95% interval of the mean over seeds; the paper's are hollow, for the global model with
the range of its three runs. Baselines are level lines: full ours, dotted the paper's. Weights are evenly spaced.
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
from fedhdp.reproduction import tables as paper
from fedhdp.reproduction.comparison import CLOSE, Cell, Comparison, Line, papers_best
from fedhdp.reproduction.tables import PULLS, PaperTable
from fedhdp.reproduction.theory.figures import PAPER

OURS, PAPERS = "#111111", "#c1440e"
BASELINES = {
    "non_private": ("Non-Private", "#5f8f2f"),
    "dp_fedavg": ("DP-FedAvg", "#8c564b"),
    "hdp_fedavg": ("HDP-FedAvg", "#7f3fbf"),
}
PULL_STYLES = dict(zip(PULLS, (("#1f77b4", "s"), ("#e08214", "^"), ("#5f8f2f", "D"))))
OTHER_PULLS = (("#c51b7d", "v"), ("#01665e", "P"), ("#8c6d31", "X"))  # which the paper has not
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
Height = tuple[float | None, float]  # a number, and the weight that it is of
FAR = 1.5  # times the height of the rest


def draw(found: Comparison, path: Path) -> None:
    """Draw a table's picture."""
    with rc_context(PAPER):
        figure = Figure(figsize=(14, 8.4), layout="constrained")
        table = paper.TABLES.get(found.table)
        if table is None:
            _levels(figure, found)
        else:
            _paper(figure, found, table)
        seeds = "1 seed" if len(found.seeds) == 1 else f"{len(found.seeds)} seeds"
        figure.suptitle(f"{found.table}, {pluralize(found.rounds)}, {seeds}\n{found.data}", fontsize=11)
        figure.savefig(path, dpi=110)


def _paper(figure: Figure, found: Comparison, table: PaperTable) -> None:
    panels = PANELS if found.personal_lines else GLOBAL_PANELS
    axes = figure.subplots(2, (1 + len(panels)) // 2).ravel()
    weights = sorted(
        {line.key.weight for line in found.lines if line.key.part == "paper" and line.key.weight is not None}
        | {row.weight for row in paper.paper_rows(table) if row.weight is not None}
    )
    for axis, (column, name) in zip((*axes[:3], *axes[4:]), panels):
        _against_weight(axis, found, table, column, weights)
        axis.set_title(name, fontsize=10)
    _own_rows(axes[3], found, table)
    figure.legend(handles=_legend(found), loc="outside lower center", ncols=6, frameon=False, handlelength=2.6)


def _pull_styles(found: Comparison) -> dict[float, tuple[str, str]]:
    """A colour and a marker for each pull, the paper's and others that were asked for; none without personal models."""
    if not found.personal_lines:
        return {}
    run = {line.key.pull for line in found.personal_lines if line.key.part == "paper"}
    others = sorted(pull for pull in run - set(PULLS) if isinstance(pull, float))
    return PULL_STYLES | dict(zip(others, itertools.cycle(OTHER_PULLS)))


def _against_weight(axis: Axes, found: Comparison, table: PaperTable, column: str, weights: Sequence[float]) -> None:
    """One column of the table against the weight."""
    place = {weight: float(number) for number, weight in enumerate(weights)}
    lines = [line for line in found.lines if line.key.part == "paper" and column in line.cells]
    heights: list[Height] = []
    if "_l_" in column:
        for pull, (colour, marker) in _pull_styles(found).items():
            of_pull = [line for line in lines if line.key.pull == pull]
            heights += _curve(axis, of_pull, column, place, colour, marker)
            heights += _papers_points(axis, table, column, place, (pull,), colour, marker)
    else:
        heights += _curve(axis, lines, column, place, OURS, "o")
        heights += _papers_points(axis, table, column, place, PULLS, PAPERS, "o")
        heights += _baselines(axis, lines, column, table)
    axis.set_xticks(list(place.values()), [f"{weight:g}" for weight in weights])
    axis.set_xlim(-0.4, len(weights) - 0.6)
    axis.set(xlabel="weight r of private clients", ylabel="accuracy, %")
    axis.grid(color="#e5e5e5", linewidth=0.6)
    _zoom(axis, heights)


def _curve(axis: Axes, lines: list[Line], column: str, place: dict, colour: str, marker: str) -> list[Height]:
    """Our points of FedHDP, joined; what a weight of 0 gives only where it is near enough to be shown."""
    ours = sorted((line.key.weight, line.cells[column]) for line in lines if line.key.weight is not None)
    rest = [cell.mean for weight, cell in ours if weight]
    shown = [(place[w], cell) for w, cell in ours if w or not rest or cell.mean > _lowest(rest)]
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.4, "capsize": 3}
    if shown:
        x, cells = zip(*shown)
        axis.errorbar(x, [cell.mean for cell in cells], yerr=[_half(cell) for cell in cells], zorder=3, **style)
    return [(weight, height) for weight, cell in ours for height in _reach(cell)]


def _lowest(rest: list[float]) -> float:
    return min(rest) - FAR * (max(rest) - min(rest)) - 2.0


def _papers_points(
    axis: Axes, table: PaperTable, column: str, place: dict, pulls: Sequence[float], colour: str, marker: str
) -> list[Height]:
    """The paper's points: one pull's, or the mean over all with their range."""
    means: list[Height] = []
    for weight, x in place.items():
        lines = [line for line in paper.printed(table.dataset) if line.row.weight == weight and line.pull in pulls]
        values = [line.numbers[column] for line in lines if column in line.numbers]
        if values:
            mean = sum(values) / len(values)
            style: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": "white", "markersize": 6}
            reach = [[max(0.0, mean - min(values))], [max(0.0, max(values) - mean)]]
            axis.errorbar([x + 0.12], [mean], yerr=reach, linestyle="none", elinewidth=0.8, zorder=2, **style)
            means += [(weight, value) for value in values]
    return means


def _baselines(axis: Axes, lines: list[Line], column: str, table: PaperTable) -> list[Height]:
    """Level lines: ours with a band for the interval, the paper's dotted."""
    means: list[Height] = []
    for algorithm, (_, colour) in BASELINES.items():
        for line in lines:
            if line.key.algorithm == algorithm:
                cell = line.cells[column]
                axis.axhline(cell.mean, color=colour, linewidth=1.2, zorder=1)
                axis.axhspan(cell.mean - _half(cell), cell.mean + _half(cell), color=colour, alpha=0.12, linewidth=0)
                means += [(None, height) for height in _reach(cell)]
        printed = [line.numbers for line in paper.printed(table.dataset) if line.row.algorithm == algorithm]
        values = [numbers[column] for numbers in printed if column in numbers]
        if values:
            axis.axhline(sum(values) / len(values), color=colour, linewidth=1.2, linestyle=":", zorder=1)
            means.append((None, sum(values) / len(values)))
    return means


def _half(cell: Cell) -> float:
    return 0.0 if cell.high is None else max(0.0, cell.high - cell.mean)


def _reach(cell: Cell) -> list[float]:
    return [cell.mean + side * _half(cell) for side in (-1, 0, 1)]


def _zoom(axis: Axes, heights: list[Height]) -> None:
    """Show all but what a weight of 0 gives where that is so far below that the rest could not be read."""
    rest = [height for weight, height in heights if weight != 0 and height <= 100] or [0.0, 100.0]
    low, high = min(rest), max(rest)
    far = [height for weight, height in heights if weight == 0 and height < low - FAR * (high - low) - 0.5]
    near = rest + [height for weight, height in heights if weight == 0 and height not in far and height <= 100]
    margin = 0.06 * (max(near) - min(near)) + 0.05
    axis.set_ylim(min(near) - margin, max(near) + margin)
    if far:
        said = f"r = 0, far below: {min(far):.1f} to {max(far):.1f}"
        axis.annotate(said, (0.02, 0.02), xycoords="axes fraction", fontsize=8, color="#555555")


def _own_rows(axis: Axes, found: Comparison, table: PaperTable) -> None:
    """The rows of our own, one above the other, between the paper's best and what no privacy gives."""
    lines = [line for line in found.global_lines if line.key.part != "paper" and "acc_g" in line.cells]
    if not lines:
        return _differences(axis, found)
    for height, line in enumerate(reversed(lines)):
        cell = line.cells["acc_g"]
        axis.errorbar(cell.mean, height, xerr=_half(cell), color=OURS, marker="o", markersize=5, capsize=3)
    axis.set_yticks(range(len(lines)), [line.key.row for line in reversed(lines)], fontsize=8)
    best = papers_best(table)
    axis.axvline(best, color=PAPERS, linestyle="--", linewidth=1.2)
    axis.annotate(
        f"paper's best {best:g}", (best, len(lines) - 0.4), (4, 0), textcoords="offset points", color=PAPERS, fontsize=8
    )
    axis.set_ylim(-0.6, len(lines))
    axis.set(xlabel="accuracy, %")
    axis.set_title("rows of ours: global model, server's test set", fontsize=10)
    axis.grid(color="#e5e5e5", linewidth=0.6, axis="x")


def _differences(axis: Axes, found: Comparison) -> None:
    """Where there are no rows of our own: how far each row is from the paper's, and a band of one point."""
    lines = [line for line in found.global_lines if line.cells["acc_g"].difference is not None]
    axis.axvspan(-CLOSE, CLOSE, color=PAPERS, alpha=0.12, linewidth=0)
    axis.axvline(0, color=PAPERS, linewidth=1.2)
    for height, line in enumerate(reversed(lines)):
        cell = line.cells["acc_g"]
        axis.errorbar(cell.difference or 0.0, height, xerr=_half(cell), color=OURS, marker="o", markersize=5, capsize=3)
    axis.set_yticks(range(len(lines)), [line.key.row for line in reversed(lines)], fontsize=8)
    axis.set(xlabel="points above the paper")
    axis.set_title("global model, server's test set: ours less the paper's", fontsize=10)
    axis.grid(color="#e5e5e5", linewidth=0.6, axis="x")


def _legend(found: Comparison) -> list[Line2D]:
    points: dict[str, Any] = {"marker": "o", "markersize": 6}
    handles = [
        Line2D([], [], color=OURS, label="FedHDP, ours", **points),
        Line2D([], [], color=PAPERS, linestyle="none", markerfacecolor="white", label="FedHDP, paper", **points),
    ]
    handles += [Line2D([], [], color=colour, label=f"{name}, ours") for name, colour in BASELINES.values()]
    handles.append(Line2D([], [], color="#555555", linestyle=":", label="the same, paper"))
    for pull, (colour, marker) in _pull_styles(found).items():
        handles.append(Line2D([], [], color=colour, marker=marker, label=f"λ = {pull:g}, ours"))
        if pull not in PULLS:
            continue
        hollow: dict[str, Any] = {"linestyle": "none", "marker": marker, "markerfacecolor": "white"}
        handles.append(Line2D([], [], color=colour, label=f"λ = {pull:g}, paper", **hollow))
    return handles


def _levels(figure: Figure, found: Comparison) -> None:
    """Several levels: each row's accuracy for the server and every group, with both models."""
    parts = list(dict.fromkeys(line.key.part for line in found.lines))
    models = [("acc_g", "global model", found.global_lines), ("acc_l", "personal models", found.personal_lines)]
    drawn = [model for model in models if model[2]]
    axes = figure.subplots(len(drawn), len(parts), squeeze=False)
    for row, (prefix, name, lines) in zip(axes, drawn):
        for axis, part in zip(row, parts):
            _groups(axis, [line for line in lines if line.key.part == part], prefix)
            axis.set_title(f"{part} levels, {name}", fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)


def _groups(axis: Axes, lines: list[Line], prefix: str) -> None:
    columns = list(dict.fromkeys(c for line in lines for c in line.cells if c.startswith(prefix)))
    names = {"acc_g": "server", "np": "opted out", "p": "private"}
    for number, line in enumerate(lines):
        found = [(i + 0.1 * (number - len(lines) / 2), line.cells[c]) for i, c in enumerate(columns) if c in line.cells]
        x, cells = zip(*found)
        name = line.key.row.partition(": ")[2] or line.key.row
        style: dict[str, Any] = {"linestyle": "none", "marker": "os^Dv"[number % 5], "markersize": 6, "capsize": 3}
        axis.errorbar(x, [c.mean for c in cells], yerr=[_half(c) for c in cells], label=name, **style)
    labels = [names.get(column.removeprefix(f"{prefix}_"), column.removeprefix(f"{prefix}_")) for column in columns]
    axis.set_xticks(range(len(columns)), labels)
    axis.set(ylabel="accuracy, %")
    axis.grid(color="#e5e5e5", linewidth=0.6)
