"""The table of a page with texts to copy, accuracy against weight and pull, and the check boxes of variants."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedhdp.errors import RunError
from fedhdp.mechanism import SERVER
from fedhdp.report.charts import Axes, Charts, Line, caption, swatch
from fedhdp.report.html import Content, Html, Panel, Section, copyable, element, join, name, short, table
from fedhdp.report.rows import MODELS, Study
from fedhdp.report.training import interval_note
from fedhdp.results import comparison
from fedhdp.results.series import Lines, Series, is_number, make_lines
from fedhdp.results.tables import format_latex, format_markdown

FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:]+/)+")  # of a path: a page that is mailed does not say where files lay
SWEPT = {"weight": "weight r", "pull": "pull λ"}


def sweep_section(study: Study, charts: Charts) -> Section | None:
    """Accuracy against weight and pull; None where variants do not differ in these."""
    keys = [*SWEPT, *(f"{group}.{key}" for group in study.groups for key in SWEPT)]
    owners = [(SERVER, "global"), *((group, "personal") for group in study.groups)]
    panels: dict[tuple[str, str], Panel] = {}
    for key in keys:
        for owner, model in owners:
            try:
                lines = make_lines(study.runs, key, study.metric.name, model, [owner])
            except RunError:  # the same everywhere, of several groups, or not measured
                continue
            panel = _sweep_panel(study, charts, lines, owner, model) if (lines.x, owner) not in panels else None
            if panel is not None:
                panels[lines.x, owner] = panel
    if not panels:
        return None
    lead = "Variants that differ in one of these alone are one line; horizontal lines do not depend on it."
    return Section("sweep", "Against weight and pull", lead, list(panels.values()))


def _sweep_panel(study: Study, charts: Charts, lines: Lines, owner: str, model: str) -> Panel | None:
    series = lines.groups.get(owner, [])
    curves = [line for line in series if len(line.points) > 1]
    numbers = sorted({point.x for line in curves for point in line.points if is_number(point.x)})
    if len(numbers) < 2:
        return None
    algorithms = [line.algorithm for line in series]
    dashes = [algorithms[:i].count(algorithm) for i, algorithm in enumerate(algorithms)]
    shown = [_sweep_line(study, line, numbers, i)._replace(dash=dashes[i]) for i, line in enumerate(series)]
    group, _, key = lines.x.removeprefix("mechanism.groups.").rpartition(".")
    axes = Axes(
        f"{SWEPT[key]} of {short(group, 30)}",
        study.metric_words,
        places=tuple(f"{x:g}" for x in numbers),
        limits=study.limits,
        format=study.format_scaled,
    )
    figure = charts.add(f"sweep-{len(charts.data)}", shown, axes, unit=study.unit)
    subject: Content = "Server's test set" if owner == SERVER else join([name(short(owner)), ", ", MODELS[model]])
    sign = 1 if study.metric.higher_is_better else -1
    best = max((point for line in curves for point in line.points), key=lambda point: sign * point.mean)
    title = join([subject, f": best at {SWEPT[key]} = {best.x:g}"])
    disclosure = study.server_disclosure if owner == SERVER else "clients"
    return Panel(title, join([figure, caption(interval_note(study), "Values are evenly spaced.")]), disclosure)


def _sweep_line(study: Study, series: Series, numbers: Sequence[float], number: int) -> Line:
    style = next((row.style for row in study.rows if row.result.algorithm == series.algorithm), "c-other-0")
    known = [point for point in series.points if point.x in numbers]
    points = [(float(numbers.index(point.x)), study.scaled(point.mean)) for point in known]
    halves = [study.scaled(point.half_interval or 0.0) for point in known]
    if len(series.points) == 1:  # it does not depend on x
        [point] = series.points
        points = [(float(x), study.scaled(point.mean)) for x in range(len(numbers))]
        halves = [study.scaled(point.half_interval or 0.0)] * len(numbers)
    value = study.format_scaled(max(y for _, y in points)) if points else ""
    return Line(series.label, style, (-1 - number, -1 - number), points, halves, value=value)


def table_section(study: Study, notes: Html) -> Section:
    """The table with all its columns, and texts to copy."""
    runs = study.runs
    texts = min(2, len(runs))
    header, rows = _without_empty(*comparison.combined_cells(runs), texts)
    private = [i for i, column in enumerate(header) if i >= texts and not _is_public(study, column)]
    cells = [[name(cell) if i < texts else cell for i, cell in enumerate(row)] for row in rows]
    shown = table(header, cells, texts, sortable=True, private_columns=private)
    lines = [FOLDERS.sub("", text) for text in (comparison.describe_seeds(runs), *comparison.notes(runs)) if text]
    safe = [study.sentence(line) for line in lines]
    copies = {
        "CSV": comparison.format_csv(comparison.mean_rows(runs)),
        "Markdown": format_markdown(header, rows, lines, texts),
        "LaTeX": format_latex(header, rows, lines, texts),
    }
    foot = element("ul", *(element("li", line) for line in safe), class_="notes")
    uncovered = caption(study.uncovered_words) if not study.public and study.uncovered_words else ""
    body = join([shown, notes, uncovered, foot, copyable(copies)])
    words = study.metric_words.capitalize() + (" in %" if study.metric.percent else "")
    legend = f"{words}."
    if private:
        legend = (
            f"{words}, variance across clients in parentheses. Acc_g: the server's test set; g and l: clients' own "
        )
        legend += "data, with the global and with personal models."
    lead = join([legend, element("span", "Press a column's name to sort.", class_="js")], " ")
    is_mixed = private or study.server_disclosure != "public"
    return Section(
        "table", "The table", lead, [Panel("All variants", body, "mixed" if is_mixed else "public", wide=True)]
    )


def _without_empty(header: list[str], rows: list[list[str]], texts: int) -> tuple[list[str], list[list[str]]]:
    """The cells without columns in which nothing was measured."""
    kept = [i for i in range(len(header)) if i < texts or any(row[i] != "–" for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _is_public(study: Study, column: str) -> bool:
    if column.startswith("ε "):
        return True
    is_server = column.endswith(("_g", "_avg")) and not column.startswith("Δ")
    return is_server and study.server_disclosure != "clients"


def toggles(study: Study) -> Html:
    """Check boxes that show and hide variants, and the strength of smoothing."""
    boxes = [
        element(
            "label",
            Html(f'<input type="checkbox" id="show-{row.number}" checked>'),
            swatch(row.style, row.dash),
            element("bdi", row.name, title=row.name),
        )
        for row in study.rows
    ]
    slider = Html('<input type="range" id="smooth" min="0" max="0.95" step="0.05" value="0">')
    smoothing = element("label", "smoothing", slider, class_="js")
    return element("div", *boxes, smoothing, class_="controls", role="group", aria_label="variants")
