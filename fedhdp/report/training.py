"""What training did over rounds: accuracy, and clip, noise and the share of updates within the clip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedhdp.clips import AdaptiveClip
from fedhdp.mechanism import SERVER
from fedhdp.report.charts import Axes, Charts, Line, Reference, caption, empty
from fedhdp.report.html import Content, Disclosure, Html, Panel, Section, join, name, short
from fedhdp.report.rows import MODELS, Point, Row, Study

CLIPS_AT_MOST = 8  # charts of clips by layer
EARLY = 0.25  # of the rounds, which may lie outside of a chart
Pairs = list[tuple[float, float]]


def interval_note(study: Study) -> str:
    """What bands are."""
    if study.seeds == 1:
        return "One seed: no intervals."
    return f"Bands: 95% interval of the mean over {study.seeds} seeds."


def metric_lines(study: Study, group: str, model: str) -> list[Line]:
    """A line for each row: the page's metric over rounds."""
    lines = []
    for row in study.rows:
        series = row.series(group, model, study.metric.name)
        if series:
            points = [(float(point.round), study.scaled(point.mean)) for point in series]
            halves = [study.scaled(point.half or 0.0) for point in series]
            value = study.format(series[-1].mean)
            lines.append(Line(row.name, row.style, (row.number,), points, halves, row.dash, value))
    return lines


def rounds_section(study: Study, charts: Charts, published: Sequence[tuple[str, float]] = ()) -> Section:
    """Accuracy over rounds: on the server's test set, and on each group's clients.

    Args:
        study: What the page shows.
        charts: The page's charts.
        published: Names and values of published numbers of the global model.
    """
    owners: list[tuple[str, str, str]] = [(SERVER, "global", "server"), (SERVER, "average", "average")]
    has_personal = any(row.last(group, "personal", study.metric.name) for row in study.rows for group in study.groups)
    has_server = any(row.last(SERVER, "global", study.metric.name) for row in study.rows)
    for number, group in enumerate(study.groups):
        owners += [(group, "global", f"global-{number}")] * (not (has_personal and has_server))
        owners.append((group, "personal", f"personal-{number}"))
    panels = []
    for owner, model, ident in owners:
        lines = metric_lines(study, owner, model)
        if lines:
            references = (
                [Reference(label, y, study.format_scaled(y)) for label, y in published] if owner == SERVER else []
            )
            panels.append(_rounds_panel(study, charts, ident, (owner, model), lines, references))
    if not panels:
        words = (
            "Nothing that may be published was measured over rounds." if study.public else "Nothing is measured yet."
        )
        panels.append(Panel("No measurements", empty(words)))
    lead = f"How {study.metric_words} moved while the variants trained on the same data."
    return Section("rounds", f"{study.metric_words.capitalize()} over rounds", lead, panels)


def _rounds_panel(
    study: Study,
    charts: Charts,
    ident: str,
    owner: tuple[str, str],
    lines: Sequence[Line],
    references: Sequence[Reference],
) -> Panel:
    group, model = owner
    start = _zoom_start(lines)
    axes = Axes("round", study.metric_words, limits=study.limits, format=study.format_scaled, smooth=True, start=start)
    figure = charts.add(ident, lines, axes, references, unit=study.unit)
    subject: Content = "Server's test set" if group == SERVER else join([name(short(group)), ", ", MODELS[model]])
    subject = "Server's test set, averaged model" if model == "average" else subject
    disclosure = study.server_disclosure if group == SERVER else "clients"
    note = study.uncovered_words if disclosure == "mixed" else ""
    early = "Some early rounds lie outside of the picture." if start is not None else ""
    body = join([figure, caption(interval_note(study), early, note)])
    return Panel(join([subject, ": ", _ends(study, group, model)]), body, disclosure)


def _zoom_start(lines: Sequence[Line]) -> float | None:
    """The round from which on values set the range of a chart, where earlier ones would more than double it."""
    points = [point for line in lines for point in line.points]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    start = first + EARLY * (last - first)
    spreads = [max(ys) - min(ys) for ys in ([y for _, y in points], [y for x, y in points if x >= start])]
    return start if spreads[0] > 2 * spreads[1] > 0 else None


def _ends(study: Study, group: str, model: str) -> str:
    """Where the page's main row ends, and DP-FedAvg beside it."""
    rows = {row.number: row for row in (study.main, study.rival) if row is not None}
    parts = []
    for row in rows.values():
        last = row.last(group, model, study.metric.name)
        if last is not None:
            parts.append(f"{short(row.name, 28)} ends at {study.format(last.mean)}")
    return ", ".join(parts) or "the variants by round"


def clip_section(study: Study, charts: Charts) -> Section | None:
    """Clip, noise and the share of updates within the clip, over rounds; None where no clip was recorded."""
    points = (point for row in study.rows for variant in row.seeds for point in variant.history)
    metrics = list(dict.fromkeys(point.metric for point in points if point.metric.partition("/")[0] == "clip"))
    panels = []
    for number, metric in enumerate(metrics[:CLIPS_AT_MOST]):
        layer = metric.partition("/")[2]
        words = f"Clip of layer {short(layer)}" if layer else "The clip, which bounds what one client changes"
        pairs = [(row, _pairs(row.series(SERVER, "global", metric))) for row in study.rows]
        panels += _number_panel(study, charts, f"clip-{number}", words, "L2 norm of an update", pairs)
    if metrics == ["clip"]:
        words, unit = "Noise on each parameter of a round's update", "standard deviation, in the model's units"
        panels += _number_panel(study, charts, "noise", words, unit, [(row, _noise(row)) for row in study.rows])
        words, unit = "Updates within the clip, as the server sees them through the noise", "share of updates, %"
        shares = [(row, _unclipped(row)) for row in study.rows]
        panels += _number_panel(study, charts, "unclipped", words, unit, shares, "%")
    if not panels:
        return None
    lead = (
        "The clip bounds what one client can change, and the noise is in proportion to it. An adaptive clip follows a "
    )
    return Section("clip", "Clip and noise", f"{lead}quantile of the update norms, through noise of its own.", panels)


def _pairs(series: Sequence[Point]) -> Pairs:
    return [(float(point.round), point.mean) for point in series]


def _number_panel(
    study: Study, charts: Charts, ident: str, subject: str, unit: str, rows: Iterable[tuple[Row, Pairs]], sign: str = ""
) -> list[Panel]:
    shown = [(row, points) for row, points in rows if points]
    if not shown:
        return []
    lines = [
        Line(r.name, r.style, (r.number,), points, dash=r.dash, value=f"{points[-1][1]:.3g}{sign}")
        for r, points in shown
    ]
    without = [short(row.name, 24) for row, _ in shown if _clip_has_client_data(row)]
    figure = charts.add(ident, lines, Axes("round", unit, y_range=(0.0, 0.0), smooth=True), unit=unit)
    note = (
        f"Follows clients' updates without noise, or with noise from a seed: {', '.join(without)}." if without else ""
    )
    disclosure: Disclosure = "public" if not without else "clients" if len(without) == len(shown) else "mixed"
    ends: Html = _range_words(study, shown, sign)
    return [Panel(join([subject, ends]), join([figure, caption(note)]), disclosure)]


def _range_words(study: Study, shown: Sequence[tuple[Row, Pairs]], sign: str) -> Html:
    """From where to where the main row goes."""
    row, points = next(((row, points) for row, points in shown if row.number == study.main.number), shown[-1])
    return join([f": {points[0][1]:.3g}{sign} to {points[-1][1]:.3g}{sign} (", name(short(row.name, 28)), ")"])


def _clip_has_client_data(row: Row) -> bool:
    """Whether the clip follows clients' updates without noise, or with noise that can be computed again."""
    mechanism = row.mechanism
    if mechanism is None:
        return True
    return mechanism.is_adaptive and (mechanism.bit_noise_stddev == 0 or row.result.repeatable)


def _noise(row: Row) -> Pairs:
    """The standard deviation of the noise on each parameter of a round's mean update: clip · σ over the public weight."""
    mechanism = row.mechanism
    if mechanism is None or mechanism.expected_weight == 0:
        return []
    scale = mechanism.update_noise_stddev / mechanism.expected_weight
    return [(x, y * scale) for x, y in _pairs(row.series(SERVER, "global", "clip"))]


def _unclipped(row: Row) -> Pairs:
    """The noised share of updates within the clip, as means between evaluations.

    The clip's own movement says it, since ``S ← S·exp(−η(b̄ − κ))`` follows that share alone.
    """
    clip = row.mechanism.clip if row.mechanism is not None else None
    if not isinstance(clip, AdaptiveClip) or clip.learning_rate == 0:
        return []
    points: Pairs = []
    before = (0.0, clip.initial)
    for round, value in _pairs(row.series(SERVER, "global", "clip")):
        if value > 0 and round > before[0]:
            share = clip.quantile - math.log(value / before[1]) / (clip.learning_rate * (round - before[0]))
            points.append((round, 100 * share))
        before = (round, value)
    return points
