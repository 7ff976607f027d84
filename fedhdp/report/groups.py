"""What each group's clients get: the global model, personal models, and the worst tenth of clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from fedhdp.report.charts import Axes, Charts, Line, caption, round_numbers
from fedhdp.report.html import Content, Html, Panel, Section, element, join, name, short, table, variants_class
from fedhdp.report.rows import MODELS, Point, Row, Study
from fedhdp.report.training import interval_note
from fedhdp.results.metrics import half_interval, tenths

LEAD = (
    "A client's own model starts from the global one and learns from the client's own examples. What counts for one client "
    "is its group's personal accuracy, and how far the worst tenth is below it."
)
LEGEND = (
    "○ global model → ● personal models: means over the group's clients. | worst tenth: the mean of the lowest tenth."
)
PLACES = ("worst", *map(str, range(2, 10)), "best")
DOTS_BOX = "0 0 300 26"
LITTLE = 0.5  # points of gain that are next to nothing


class End(NamedTuple):
    """What a group's clients have at the end of a row."""

    row: Row
    of_global: Point | None
    of_personal: Point | None
    worst: Point | None

    @property
    def shown(self) -> Point | None:
        """The personal models' mean where there are some, else the global model's."""
        return self.of_personal or self.of_global


def groups_section(study: Study, charts: Charts) -> Section | None:
    """Each group at the end; None where nothing was measured on clients."""
    panels = [_group_panel(study, group, ends) for group in study.groups if (ends := _ends(study, group))]
    if not panels:
        return None
    for number, group in enumerate(study.groups):
        panels += _tenths_panel(study, charts, number, group)
    panels.append(Panel("Groups in numbers", _group_table(study), "clients", wide=True))
    return Section("groups", "What each group's clients get", LEAD, panels)


def _ends(study: Study, group: str) -> list[End]:
    ends = []
    for row in study.rows:
        of_global, of_personal = (row.last(group, model, study.metric.name) for model in MODELS)
        worst = row.last(group, "personal" if of_personal else "global", f"{study.metric.name}_worst_decile")
        if of_global or of_personal:
            ends.append(End(row, of_global, of_personal, worst))
    return ends


def _group_panel(study: Study, group: str, ends: Sequence[End]) -> Panel:
    values = [point.mean for end in ends for point in end[1:] if isinstance(point, Point)]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.02
    parts: list[Html] = []
    for end in ends:
        parts.append(element("span", name(end.row.name), class_=variants_class((end.row.number,))))
        parts.append(_dots(study, end, low - margin, high + margin))
    parts += [element("span", study.unit, class_="unit"), _dots_axis(study, low - margin, high + margin)]
    body = join([element("div", *parts, class_="dots"), caption(LEGEND, _gain_words(study, ends))])
    return Panel(join([name(short(group)), ": ", _title(study, ends)]), body, "clients")


def _place(value: float, low: float, high: float) -> float:
    return round(8 + 224 * (value - low) / (high - low), 1)


def _dots_axis(study: Study, low: float, high: float) -> Html:
    """The axis below the dots, with round numbers."""
    scaled = (study.scaled(low), study.scaled(high))
    parts = [element("path", d="M8 1H232", class_="axis")]
    for tick in round_numbers(*scaled):
        x = _place(tick, *scaled)
        parts.append(element("path", d=f"M{x} 1V5", class_="tick"))
        parts.append(element("text", f"{tick:g}", x=x, y="19", text_anchor="middle"))
    return element("svg", *parts, viewBox=DOTS_BOX, aria_hidden="true")


def _dots(study: Study, end: End, low: float, high: float) -> Html:
    def x(point: Point) -> float:
        return _place(point.mean, low, high)

    parts = [element("path", d="M8 13H232", class_="grid")]
    if end.of_global and end.of_personal:
        parts.append(element("path", d=f"M{x(end.of_global)} 13H{x(end.of_personal)}", class_="arrow"))
    if end.worst:
        parts.append(element("path", d=f"M{x(end.worst)} 6V20", class_="worst"))
    if end.of_global:
        parts.append(element("circle", cx=x(end.of_global), cy="13", r="4.5", class_="ring"))
    if end.of_personal:
        parts.append(element("circle", cx=x(end.of_personal), cy="13", r="5"))
    words = study.format(end.shown.mean) if end.shown else ""
    parts.append(element("text", words, x="298", y="17.5", text_anchor="end", class_="label"))
    classes = f"{end.row.style} {variants_class((end.row.number,))}"
    return element("svg", *parts, viewBox=DOTS_BOX, class_=classes, role="img", aria_label=words)


def _title(study: Study, ends: Sequence[End]) -> str:
    end = next((end for end in ends if end.row.number == study.main.number), ends[-1])
    label = short(end.row.name, 28)
    if end.of_global and end.of_personal:
        both = (study.format(point.mean) for point in (end.of_global, end.of_personal))
        return "{} with the global model, {} with their own".format(*both) + f" ({label})"
    return f"{study.format(end.shown.mean)} ({label})" if end.shown else label


def _gain_words(study: Study, ends: Sequence[End]) -> str:
    """What an ordinary reader should take from the panel."""
    if not study.metric.percent:
        return ""
    gains = [100 * (end.of_personal.mean - end.of_global.mean) for end in ends if end.of_global and end.of_personal]
    if not gains:
        return ""
    if max(gains) <= LITTLE:
        return "Their own models gain these clients next to nothing."
    low, high = f"{min(gains):.1f}".replace("-", "−"), f"{max(gains):.1f}"
    return f"Their own models gain these clients {low if low == high else f'{low} to {high}'} points."


def _tenths_panel(study: Study, charts: Charts, number: int, group: str) -> list[Panel]:
    """The mean of each tenth of a group's clients; no panel where the runs have no scores by client."""
    for model in reversed(MODELS):
        lines = [line for row in study.rows if (line := _tenths_line(study, row, group, model)) is not None]
        if lines:
            break
    else:
        return []
    main = next((line for line in lines if study.main.number in line.numbers), lines[-1])
    worst, best = (study.format_scaled(main.points[place][1]) for place in (0, -1))
    axes = Axes(
        "tenth of the group's clients",
        study.metric_words,
        places=PLACES,
        limits=study.limits,
        format=study.format_scaled,
    )
    figure = charts.add(f"tenths-{number}", lines, axes, unit=study.unit)
    words = f", {MODELS[model]}: {worst} in the worst tenth, {best} in the best ({short(main.label, 28)})"
    body = join(
        [figure, caption("Mean of each tenth of the clients, on their own test examples.", interval_note(study))]
    )
    return [Panel(join([name(short(group)), words]), body, "clients")]


def _tenths_line(study: Study, row: Row, group: str, model: str) -> Line | None:
    info = study.metric
    of_seeds = [tenths(variant.client_scores(group, model, info.name), info.higher_is_better) for variant in row.seeds]
    values = list(zip(*filter(None, of_seeds), strict=True))  # by tenth, then by seed
    if not values:
        return None
    points = [(float(place), study.scaled(fmean(of_tenth))) for place, of_tenth in enumerate(values)]
    halves = [study.scaled(half_interval(of_tenth) or 0.0) for of_tenth in values]
    worst = study.format_scaled(points[0][1])
    return Line(row.name, row.style, (row.number,), points, halves, row.dash, worst)


def _group_table(study: Study) -> Html:
    models = [m for m in MODELS if any(row.last(g, m, study.metric.name) for row in study.rows for g in study.groups)]
    parts = {"global": ("global model", "its spread", "its worst tenth")}
    parts["personal"] = ("personal models", "their spread", "their worst tenth")
    header = ["variant", "group", *(word for model in models for word in parts[model])]
    rows: list[list[Content]] = []
    for row in study.rows:
        for group in study.groups:
            cells = [cell for model in models for cell in _cells(study, row, group, model)]
            if any(cell != "–" for cell in cells):
                rows.append([name(row.name), name(group), *cells])
    spread = f"{study.unit.capitalize()}. Spread: standard deviation across the group's clients."
    return join([table(header, rows, texts=2, sortable=True), caption(spread, *_differences(study, models))])


def _cells(study: Study, row: Row, group: str, model: str) -> list[str]:
    info = study.metric
    mean, variance, worst = (
        row.last(group, model, f"{info.name}{part}") for part in ("", "_variance", "_worst_decile")
    )
    half = "" if mean is None or mean.half is None else f" ±{info.format(mean.half, 1)}"
    return [
        "–" if mean is None else info.format(mean.mean, 1) + half,
        "–" if variance is None else info.format(math.sqrt(variance.mean), 1),
        "–" if worst is None else info.format(worst.mean, 1),
    ]


def _differences(study: Study, models: Sequence[str]) -> list[str]:
    """Δ between two groups, as the table has it."""
    if len(study.groups) != 2:
        return []
    more, less = study.groups
    sentences = []
    for model in models:
        parts = []
        for row in study.rows:
            one, other = (row.last(group, model, study.metric.name) for group in (less, more))
            if one and other:
                sign = 1 if study.metric.higher_is_better else -1
                difference = f"{sign * study.scaled(one.mean - other.mean):+.1f}".replace("-", "−")
                parts.append(f"{short(row.name, 24)} {difference}")
        if parts:
            sentences.append(f"Δ, {short(less)} above {short(more)}, {MODELS[model]}: {', '.join(parts)}.")
    return sentences
