"""The figures of the paper's theory (section 3, appendices A and B): closed forms with simulated points.

Each figure is written as SVG, PNG and CSV. Lines are closed forms, points are means over simulated trials with bars of
two standard errors, stars are the optima of the theory. Lines differ by dash and marker too, for black-and-white print.
The paper does not state its parameters; those used are in each title.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from fedhdp.reproduction.theory import monte_carlo
from fedhdp.results.palette import COLOURS, GRID_COLOUR, STYLE
from fedhdp.theory import linear_regression as regression
from fedhdp.theory import point_estimation
from fedhdp.theory.linear_regression import Problem, TheoryGroup
from fedhdp.theory.optimum import with_noise
from fedhdp.theory.point_estimation import OptOut

STYLES = [("#0072B2", "-", "o"), ("#D55E00", "--", "s"), ("#009E73", "-.", "^"), ("#CC79A7", ":", "D")]
ALGORITHM_OF = {
    "DP-FedAvg": "dp_fedavg",
    "HDP-FedAvg": "hdp_fedavg",
    "FedHDP": "fedhdp",
}  # curves with a colour of their own
STAR: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 13, "markeredgecolor": "white"}
RATIOS = np.linspace(0, 1, 101)
SIMULATED_RATIOS = np.linspace(0, 1, 11)
SHARES = np.linspace(0, 1, 101)
SIMULATED_SHARES = np.array([0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1])
PULLS = np.geomspace(0.03, 100, 121)
SIMULATED_PULLS = np.geomspace(0.03, 100, 13)


class Curve(NamedTuple):
    """A closed form over x, simulated means with standard errors, and the optimum if there is one."""

    label: str
    line: Sequence[tuple[float, float]]
    points: Sequence[tuple[float, ...]]  # x, mean, standard error
    optimum: tuple[float, float] | None = None


class Panel(NamedTuple):
    """Curves on the same axes."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    scales: tuple[str, str] = ("linear", "log")


def theory_figures(out_dir: str | Path, trials: int = 4000) -> list[Path]:
    """Draw every figure into a folder, with this number of trials for each simulated point, and return the files."""
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    regression_case = (10, Problem((TheoryGroup("opted out", 4, 0.0), TheoryGroup("private", 16, 1.0)), 1.0, 0.25))
    point_case = (1, Problem((TheoryGroup("opted out", 2, 0.0), TheoryGroup("private", 13, 0.5)), 1.0, 0.1))
    figures = {
        "server_variance_by_ratio": [ratio_by_noise(trials), ratio_by_spread(trials)],
        "server_variance_by_opted_out_share": [server_by_share(trials)],
        "opting_out_linear_regression": opting_out(*regression_case, trials),
        "opting_out_point_estimation": opting_out(*point_case, 5 * trials),
    }
    return [path for name, panels in figures.items() for path in save(folder, name, panels)]


# Contents


def ratio_by_noise(trials: int) -> Panel:
    """Server variance against the weight ratio, for several noises."""
    cases = {f"γ² = {g:g}": OptOut(500, 0.2, g, 0.8, 0.2) for g in (0.001, 0.003, 0.01, 0.03)}
    curves = [_ratio_curve(label, case, trials, seed) for seed, (label, case) in enumerate(cases.items())]
    title = f"{_optima_words(curves)} as noise grows\n500 clients, 20% opted out, σ$_c$² = 1"
    return Panel(title, "weight ratio r", "server variance σ$_s$²", curves)


def ratio_by_spread(trials: int) -> Panel:
    """Server variance against the weight ratio, for several variances of local estimates."""
    cases = {f"σ$_c$² = {c:g}": OptOut(500, 0.2, 0.01, 0.8 * c, 0.2 * c) for c in (0.5, 1, 2, 4)}
    curves = [_ratio_curve(label, case, trials, seed) for seed, (label, case) in enumerate(cases.items(), 10)]
    title = f"{_optima_words(curves)} as estimates spread\n500 clients, 20% opted out, γ² = 0.01"
    return Panel(title, "weight ratio r", "server variance σ$_s$²", curves)


def _optima_words(curves: Sequence[Curve]) -> str:
    ratios = [curve.optimum[0] for curve in curves if curve.optimum is not None]
    return f"the best r goes from {ratios[0]:.2f} to {ratios[-1]:.2f}"


def _ratio_curve(label: str, case: OptOut, trials: int, seed: int) -> Curve:
    drawn = monte_carlo.simulate(case.problem, trials, 1, seed)
    line = [(r, point_estimation.server_variance(case, r)) for r in RATIOS]
    points = [(r, *monte_carlo.estimate(monte_carlo.server_errors(drawn, [1, r]))) for r in SIMULATED_RATIOS]
    best = (point_estimation.optimal_ratio(case), point_estimation.optimal_server_variance(case))
    return Curve(label, line, points, best)


def server_by_share(trials: int) -> Panel:
    """Server variance against the share that opted out: equal weights, with and without noise for all, and FedHDP."""

    def case(rho: float) -> OptOut:
        return OptOut(500, rho, 0.02, 0.8, 0.2)

    def curve(label: str, closed_form: Callable, noised: Callable, weigh: Callable) -> Curve:
        points = []
        for seed, rho in enumerate(SIMULATED_SHARES, 20):
            problem = noised(case(rho).problem)
            errors = monte_carlo.server_errors(monte_carlo.simulate(problem, trials, 1, seed), weigh(problem))
            points.append((rho, *monte_carlo.estimate(errors)))
        return Curve(label, [(rho, closed_form(case(rho))) for rho in SHARES], points)

    curves = [
        curve("DP-FedAvg", _dp_fedavg_variance, _strictest_noise, _equal_weights),
        curve("HDP-FedAvg", lambda c: point_estimation.server_variance(c, 1), lambda p: p, _equal_weights),
        curve("FedHDP", point_estimation.optimal_server_variance, lambda p: p, regression.optimal_weights),
    ]
    _, equal, own = (np.array(curve.line)[:, 1] for curve in curves)
    least = (own / equal).min()
    title = f"FedHDP has down to {least:.0%} of HDP-FedAvg's variance\n500 clients, σ$_c$² = 1, γ² = 0.02"
    return Panel(title, "share ρ that opted out", "server variance σ$_s$²", curves)


def _dp_fedavg_variance(case: OptOut) -> float:
    gaps = point_estimation.performance_gaps(case)
    return point_estimation.server_variance(case, 1) + gaps.dp_fedavg_over_hdp_fedavg


def _strictest_noise(problem: Problem) -> Problem:
    return with_noise(problem, np.full(len(problem.groups), problem.noise_G.max()))


def opting_out(dimensions: int, stays: Problem, trials: int) -> list[Panel]:
    """One client's error against its pull, private or opted out, for equal and optimal weights."""
    opted_out, private = stays.groups
    groups = (
        TheoryGroup(opted_out.name, opted_out.clients + 1, 0.0),
        TheoryGroup(private.name, private.clients - 1, private.gamma2),
    )
    leaves = Problem(groups, stays.alpha2, stays.tau2)
    setting = (
        f"{opted_out.clients + private.clients} clients, {opted_out.clients} opted out, "
        f"α² = {stays.alpha2:g}, τ² = {stays.tau2:g}, γ² = {private.gamma2:g}"
    )
    cases = {"the client stays private": (stays, 1), "the client opts out": (leaves, 0)}
    drawn = {label: monte_carlo.simulate(problem, trials, dimensions, seed=3) for label, (problem, _) in cases.items()}
    panels = []
    for algorithm, weigh in {"HDP-FedAvg + Ditto": _equal_weights, "FedHDP": regression.optimal_weights}.items():
        curves = [_pull_curve(label, drawn[label], weigh(problem), group) for label, (problem, group) in cases.items()]
        stay, leave = (curve.optimum[1] for curve in curves if curve.optimum is not None)
        title = f"{algorithm}: opting out takes the least error from {stay:.3g} to {leave:.3g}\n{setting}"
        panels.append(Panel(title, "pull λ", "the client's error per coordinate", curves, ("log", "linear")))
    return panels


def _equal_weights(problem: Problem) -> np.ndarray:
    return np.ones(len(problem.groups))


def _pull_curve(label: str, drawn: monte_carlo.Trials, weight_G: np.ndarray, group: int) -> Curve:
    problem = drawn.problem

    def closed_form(pull: float) -> float:
        return float(regression.client_mse(problem, weight_G, pull)[group])

    def simulated(pull: float) -> monte_carlo.Estimated:
        return monte_carlo.estimate(monte_carlo.client_errors(drawn, weight_G, pull)[:, group])

    best = float(regression.best_pulls(problem, weight_G)[group])
    line = [(pull, closed_form(pull)) for pull in PULLS]
    return Curve(label, line, [(pull, *simulated(pull)) for pull in SIMULATED_PULLS], (best, closed_form(best)))


# Drawing


def save(folder: Path, name: str, panels: Sequence[Panel]) -> list[Path]:
    """Write one figure and its numbers."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.4 * len(panels), 4.2), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            draw(axis, panel)
        for axis in axes[1:]:
            axis.set_ylabel("")
            axis.tick_params(labelleft=True)
        words = "lines: closed forms; points: simulated means with two standard errors"
        figure.suptitle(f"{words}; stars: optima of the theory" if panels[0].curves[0].optimum else words, fontsize=9)
        paths = [folder / f"{name}.{ending}" for ending in ("svg", "png", "csv")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=160)
    write_numbers(paths[2], panels)
    return paths


def draw(axis: Axes, panel: Panel) -> None:
    """Draw one panel."""
    for (other, dash, marker), curve in zip(STYLES, panel.curves, strict=False):
        colour = COLOURS.get(ALGORITHM_OF.get(curve.label, ""), other)
        axis.plot(*zip(*curve.line, strict=True), color=colour, linestyle=dash, linewidth=1.4)
        x, mean, error = (np.array(column) for column in zip(*curve.points, strict=True))
        points: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5, "markerfacecolor": "white"}
        axis.errorbar(x, mean, yerr=2 * error, linestyle="none", elinewidth=1, capsize=2, **points)
        axis.plot([], [], linestyle=dash, label=curve.label, **points)
        if curve.optimum is not None:
            axis.plot(*curve.optimum, color=colour, zorder=3, **STAR)
    axis.set(xlabel=panel.x_label, ylabel=panel.y_label, xscale=panel.scales[0], yscale=panel.scales[1])
    for scale, side in zip(panel.scales, (axis.xaxis, axis.yaxis), strict=True):
        if scale == "log":
            side.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
            side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_title(panel.title, fontsize=10)
    axis.grid(color=GRID_COLOUR, linewidth=0.6)
    below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.14), "ncols": len(panel.curves)}
    axis.legend(
        frameon=False, handlelength=2.4, columnspacing=1.0, fontsize=8.5, **below
    )  # inside it would cover points


def write_numbers(path: Path, panels: Sequence[Panel]) -> None:
    """Write the numbers of a figure: a line for each point of a curve, simulated point and optimum."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["panel", "curve", "kind", "x", "y", "standard_error"])
        for panel in panels:
            for curve in panel.curves:
                head = [text.replace("\n", ": ").replace("$", "") for text in (panel.title, curve.label)]
                writer.writerows([*head, "closed form", x, y, ""] for x, y in curve.line)
                writer.writerows([*head, "simulated", *point] for point in curve.points)
                if curve.optimum is not None:
                    writer.writerow([*head, "optimum", *curve.optimum, ""])
