"""Stored runs beside each other: one table, what differs in their settings, and every number with its interval."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fedhdp.errors import RunError, require
from fedhdp.results.metrics import half_interval
from fedhdp.results.schema import MetricInfo
from fedhdp.results.stored import RepeatedRun, StoredVariant, differing_settings
from fedhdp.results.tables import footnotes, legend, table_cells


class MeanRow(NamedTuple):
    """A number of the last evaluation, over seeds."""

    run: str
    variant: str
    algorithm: str
    group: str
    model: str  # empty for epsilons, which are a group's; the largest among the seeds
    metric: str
    mean: float
    half_interval: float | None  # half of the 95% interval of the mean; None for a single seed
    seeds: int


def shown_metric(runs: Sequence[RepeatedRun], metric: str | None = None) -> MetricInfo:
    """The metric of this name, or the first of the first run's.

    Raises:
        RunError: If a run has no such metric.
    """
    by_variant = [{info.name: info for info in variant.result.metrics} for variant in _variants(runs)]
    name = metric or next(iter(by_variant[0]))
    for measured in by_variant:
        require(name in measured, "--metric", name, f"one of all these runs ({', '.join(measured)})", RunError)
    return by_variant[0][name]


def _variants(runs: Sequence[RepeatedRun]) -> list[StoredVariant]:
    return [variant for run in runs for seeds in run.variants() for variant in seeds]


def combined_cells(
    runs: Sequence[RepeatedRun], variances: bool = True, metric: str | None = None
) -> tuple[list[str], list[list[str]]]:
    """The cells of one table with a row for each variant of each run, means over seeds where there are several.

    Args:
        runs: The runs. Where there are several, the first column names them.
        variances: Whether to show variances across clients.
        metric: The metric's name. None: the first of the first run's.

    Returns:
        The header and the rows. A cell that a run does not have is a dash.

    Raises:
        RunError: If a run has no such metric.
    """
    tables, name = [], shown_metric(runs, metric).name
    for run in runs:
        for seeds in run.variants():
            results = [[variant.result] for variant in seeds]
            header, rows = table_cells(results[0], variances, results[1:], name)
            labels = {"run": run.label} if len(runs) > 1 else {}
            tables.append(labels | dict(zip(header, rows[0], strict=True)))
    header = _merged(list(table) for table in tables)
    return header, [[table.get(name, "–") for name in header] for table in tables]


def short_cells(runs: Sequence[RepeatedRun]) -> tuple[list[str], list[list[str]], str]:
    """The cells of a table for one look: the server's test set, personal models by group, and epsilons.

    Where there are no personal models, the global model's means stand in their place.

    Returns:
        The header, the rows, and what the columns are.
    """
    header, rows = combined_cells(runs, variances=False)
    info, texts = shown_metric(runs), min(2, len(runs))
    letter = next((letter for letter in "lg" if any(column.startswith(f"{letter}: ") for column in header)), "l")
    servers = [column for column in header if column.endswith(("_g", "_avg")) and not column.startswith("Δ")]
    own_data = [column for column in header if column.startswith(f"{letter}: ")]
    columns = [*header[:texts], *servers, *own_data, *(column for column in header if column.startswith("ε "))]
    names = {column: "server" if column.endswith("_g") else "server, averaged" for column in servers}
    names |= {column: column.removeprefix(f"{letter}: ") for column in own_data}
    parts = ["the global model on the server's test set"] * bool(servers)
    parts += [f"{'personal models' if letter == 'l' else 'the global model'} on clients' own data"] * bool(own_data)
    legend = f"{info.name}{' in %' if info.percent else ''}: {', '.join(parts)}; ε of each group"
    legend = ", ".join(filter(None, [legend, describe_seeds(runs)]))
    places = [header.index(column) for column in columns]
    return [names.get(column, column) for column in columns], [[row[i] for i in places] for row in rows], legend


def _merged(headers: Iterable[list[str]]) -> list[str]:
    """All names of the headers; one that only a later header has comes after the name that it follows there."""
    merged: list[str] = []
    for header in headers:
        place = 0
        for name in header:
            if name not in merged:
                merged.insert(place, name)
            place = merged.index(name) + 1
    return merged


def settings_cells(runs: Sequence[RepeatedRun]) -> tuple[list[str], list[list[str]]]:
    """The settings in which runs differ, as the cells of a table with a row for each run.

    Returns:
        The header and the rows; no rows where nothing differs.
    """
    differing = differing_settings(runs)
    header = ["run", *differing]
    cells = [[run.label, *(_text(values[i]) for values in differing.values())] for i, run in enumerate(runs)]
    return header, cells if differing else []


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def notes(runs: Sequence[RepeatedRun], metric: str | None = None) -> list[str]:
    """The footnotes of all runs, and which variants and runs have no results yet; the metric is that of the table."""
    lines = list(dict.fromkeys(footnotes([variant.result for variant in _variants(runs)], metric)))
    for part in (part for run in runs for part in run.runs):
        if part.unfinished:
            lines.append(f"{part.path}: without results yet: {', '.join(part.unfinished)}")
        if part.missing:
            lines.append(f"not finished: {', '.join(map(str, part.missing))}")
    return lines


def caption(
    runs: Sequence[RepeatedRun], header: Sequence[str], metric: str | None = None, variances: bool = True
) -> list[str]:
    """What a table of runs shows: the experiments, the metric, how many seeds, and what its columns are.

    Args:
        runs: The runs.
        header: The columns, of `combined_cells`.
        metric: As in `combined_cells`.
        variances: As in `combined_cells`.
    """
    names = ", ".join(dict.fromkeys(run.runs[0].experiment for run in runs))
    metric_text, columns = legend(header, shown_metric(runs, metric), variances, describe_seeds(runs))
    return [f"{names}: {metric_text}", columns]


def describe_seeds(runs: Sequence[RepeatedRun]) -> str:
    """How many seeds the means of a table are of; empty for single seeds."""
    counts = sorted({len(run.runs) for run in runs})
    if counts[-1] == 1:
        return ""
    number = str(counts[-1]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean of {number} seeds ± half of its 95% interval"


def mean_rows(runs: Sequence[RepeatedRun]) -> list[MeanRow]:
    """Every number of the last evaluations, and the epsilons that each group had and asked for."""
    return [row for run in runs for seeds in run.variants() for row in _variant_rows(run.label, seeds)]


def _variant_rows(label: str, seeds: list[StoredVariant]) -> list[MeanRow]:
    result = seeds[0].result
    values: dict[tuple[str, str, str], list[float]] = {}
    for variant in seeds:
        for row in variant.last:
            values.setdefault((row.group, row.model, row.metric), []).append(row.value)
    name = (label, result.name, result.algorithm)
    rows = [MeanRow(*name, *key, fmean(scores), half_interval(scores), len(scores)) for key, scores in values.items()]
    for number, group in enumerate(result.groups):
        epsilons = [variant.result.groups[number].epsilon for variant in seeds]
        known = [epsilon for epsilon in epsilons if epsilon is not None]
        if known:
            rows.append(MeanRow(*name, group.name, "", "epsilon", max(known), None, len(known)))
        if group.epsilon_target is not None:
            rows.append(MeanRow(*name, group.name, "", "epsilon_target", group.epsilon_target, None, len(seeds)))
    return rows


def format_csv(rows: Iterable[MeanRow]) -> str:
    """Every number as a line of CSV; an interval that does not exist is empty, an infinite epsilon is inf."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(MeanRow._fields)
    writer.writerows(rows)
    return text.getvalue()


def document(runs: Sequence[RepeatedRun]) -> dict[str, Any]:
    """The runs as one document: results by seed, numbers over seeds, and the settings in which runs differ.

    Returns:
        Values that `fedhdp.results.store.encode_json` writes.
    """
    parts = [
        {
            "run": run.label,
            "path": str(part.path),
            "experiment": part.experiment,
            **part.seeds,
            "unfinished": part.unfinished,
            "variants": [variant.result for variant in part.variants],
        }
        for run in runs
        for part in run.runs
    ]
    return {
        "runs": parts,
        "means": [row._asdict() for row in mean_rows(runs)],
        "settings": {
            run.label: {key: values[i] for key, values in differing_settings(runs).items()}
            for i, run in enumerate(runs)
        },
    }
