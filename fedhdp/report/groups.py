"""What each group's clients get: the global model, personal models, and the worst tenth of clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedhdp.report.charts import caption
from fedhdp.report.html import Content, Html, Panel, Section, element, join, name, short, table
from fedhdp.report.rows import MODELS, Point, Row, Study

LEAD = (
    "A client's own model starts from the global one and learns from the client's own examples. What counts for one client "
    "is its group's personal accuracy, and how far the worst tenth is below it."
)
LEGEND = (
    "○ global model → ● personal models: means over the group's clients. | worst tenth: the mean of the lowest tenth."
)
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


def groups_section(study: Study) -> Section | None:
    """Each group at the end; None where nothing was measured on clients."""
    panels = [_group_panel(study, group, ends) for group in study.groups if (ends := _ends(study, group))]
    if not panels:
        return None
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
        hidden = f"v v{end.row.number}"
        parts.append(element("span", name(end.row.name), class_=hidden))
        parts.append(_dots(study, end, low - margin, high + margin))
    body = join([element("div", *parts, class_="dots"), caption(LEGEND, _gain_words(study, ends))])
    return Panel(join([name(short(group)), ": ", _title(study, ends)]), body, "clients")


def _dots(study: Study, end: End, low: float, high: float) -> Html:
    def x(point: Point) -> str:
        return f"{8 + 224 * (point.mean - low) / (high - low):.1f}"

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
    parts.append(element("text", words, x="284", y="17.5", text_anchor="end", class_="label"))
    classes = f"{end.row.style} v v{end.row.number}"
    return element("svg", *parts, viewBox="0 0 286 26", class_=classes, role="img", aria_label=words)


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
