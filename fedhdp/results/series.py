"""Lines to plot from stored runs: a metric against a setting or against rounds, one line for each kind of variant.

Variants that differ in the setting of the x axis alone are points of one line; seeds are repetitions of a point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fedhdp.errors import RunError, require
from fedhdp.mechanism import SERVER
from fedhdp.results.metrics import half_interval
from fedhdp.results.stored import RepeatedRun, StoredVariant

ROUND = "round"


class Point(NamedTuple):
    """The mean over seeds at a value of the x axis, and half of its 95% interval, which one seed does not have."""

    x: Any
    mean: float
    half_interval: float | None
    seeds: int


class Series(NamedTuple):
    """A line: its label, its algorithm, and its points in the order of x."""

    label: str
    algorithm: str
    points: list[Point]


class _Kind(NamedTuple):
    """A variant with all its seeds, its settings, and its value on the x axis."""

    run: str
    seeds: list[StoredVariant]
    settings: dict[str, Any]  # what was stated, without the x axis
    x: Any


class Lines(NamedTuple):
    """What a plot shows.

    Attributes:
        x: The full key of the x axis.
        groups: The series of each group.
        percent: Whether the metric is a rate that is shown in percent.
    """

    x: str
    groups: dict[str, list[Series]]
    percent: bool = False


def make_lines(
    runs: Sequence[RepeatedRun], x: str, metric: str, model: str = "global", groups: Sequence[str] = ()
) -> Lines:
    """The lines of a metric against a key of the settings, or against ``round``.

    Args:
        runs: The runs.
        x: ``round``, or the end of a dotted key: ``weight``, ``private.weight``, ``training.learning_rate``.
        metric: The metric of the y axis.
        model: Which model is measured: global, personal, average or chosen.
        groups: Whose measurements; empty for the server's, or for all groups' where the server has none.

    Raises:
        RunError: If the key, metric, model or group is not there, or the key is not unique or the same everywhere.
    """
    variants = [(run.label, seeds) for run in runs for seeds in run.variants()]
    names = _groups([variant for _, seeds in variants for variant in seeds], metric, model, groups)
    key = ROUND if x == ROUND else _resolve(x, [seeds[0].settings for _, seeds in variants])
    kinds = [_Kind(label, seeds, *_without(seeds[0], key)) for label, seeds in variants]
    lines: list[list[_Kind]] = []
    for kind in kinds:
        matching_line = next((line for line in lines if key != ROUND and _continues(line, kind)), None)
        lines.append([kind]) if matching_line is None else matching_line.append(kind)
    labels = _labels(lines)
    by_group = {}
    for group in names:
        points = [(line, _points(line, key, (group, model, metric))) for line in lines]
        by_group[group] = [
            Series(label, line[0].seeds[0].result.algorithm, of_line)
            for label, (line, of_line) in zip(labels, points, strict=True)
            if of_line
        ]
    infos = {info.name: info for _, seeds in variants for info in seeds[0].result.metrics}
    percent = metric.removesuffix("_worst_decile") in [name for name, info in infos.items() if info.percent]
    return Lines(key, by_group, percent)


def _continues(line: Sequence[_Kind], kind: _Kind) -> bool:
    """Whether a variant is another point of a line: equal in all but x, whose value is new."""
    return line[0].settings == kind.settings and kind.x not in [other.x for other in line]


def _without(variant: StoredVariant, key: str) -> tuple[dict[str, Any], Any]:
    """The stated settings without a key, and its value. An epsilon and the noise that keeps it are one setting."""
    group, _, name = key.rpartition(".")
    hidden = {f"{group}.noise_multiplier", f"{group}.epsilon"} if name in ("noise_multiplier", "epsilon") else {key}
    stated = {name: variant.settings[name] for name in variant.stated if name not in hidden}
    return stated, variant.settings.get(key)


def _groups(variants: Sequence[StoredVariant], metric: str, model: str, groups: Sequence[str]) -> list[str]:
    """The groups to show, in the order of the history."""
    rows = [row for variant in variants for row in variant.last]
    metrics = dict.fromkeys(row.metric for row in rows)
    require(metric in metrics, "--y", metric, f"a metric of these runs ({', '.join(metrics)})", RunError)
    models = dict.fromkeys(row.model for row in rows if row.metric == metric)
    require(model in models, "--model", model, f"a model with {metric} ({', '.join(models)})", RunError)
    measured = list(dict.fromkeys(row.group for row in rows if (row.metric, row.model) == (metric, model)))
    for group in groups:
        rule = f"a group with {metric} of the {model} model ({', '.join(measured)})"
        require(group in measured, "--group", group, rule, RunError)
    return list(dict.fromkeys(groups)) or ([SERVER] if SERVER in measured else measured)


def _resolve(x: str, settings: Sequence[dict[str, Any]]) -> str:
    """The full key whose end is ``x``, and whose values differ."""
    keys = dict.fromkeys(key for of_variant in settings for key in of_variant)
    matching = [key for key in keys if key == x or key.endswith(f".{x}")]
    varying = [key for key in keys if _varies(key, settings)]
    rule = f"{ROUND} or a key of the settings in which these runs differ ({', '.join(varying) or 'they do not differ'})"
    require(bool(matching), "--x", x, rule, RunError)
    candidates = [key for key in matching if key in varying]
    require(bool(candidates), "--x", x, f"{rule}; it is the same everywhere", RunError)
    parts = _by_algorithm(settings)
    names = [key for key in candidates if any(_varies(key, part) for part in parts)] or candidates
    require(len(names) == 1 or x in names, "--x", x, f"one of {', '.join(names)}", RunError)
    return x if x in names else names[0]


def _varies(key: str, settings: Iterable[dict[str, Any]]) -> bool:
    first, *others = (of_variant.get(key) for of_variant in settings)
    return any(value != first for value in others)


def _by_algorithm(settings: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    by_algorithm: dict[str, list[dict[str, Any]]] = {}
    for of_variant in settings:
        by_algorithm.setdefault(of_variant["algorithm"], []).append(of_variant)
    return list(by_algorithm.values())


def _points(line: Sequence[_Kind], key: str, of: tuple[str, str, str]) -> list[Point]:
    values: dict[Any, list[float]] = {}
    for kind in line:
        for variant in kind.seeds:
            for row in variant.history if key == ROUND else variant.last:
                if (row.group, row.model, row.metric) == of and not math.isnan(row.value):
                    values.setdefault(row.round if key == ROUND else _hashable(kind.x), []).append(row.value)
    points = [Point(x, fmean(scores), half_interval(scores), len(scores)) for x, scores in values.items()]
    return sorted(points, key=lambda point: (not is_number(point.x), point.x if is_number(point.x) else str(point.x)))


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else "none" if value is None else str(value)


def is_number(value: Any) -> bool:
    """Whether a value of the x axis has a place on a scale."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _labels(lines: Sequence[list[_Kind]]) -> list[str]:
    """A label for each line: the words that its variants' names share, and more where these do not tell lines apart."""
    labels = [_shared_words([kind.seeds[0].result.name for kind in line]) for line in lines]
    labels = [label or line[0].seeds[0].result.algorithm for label, line in zip(labels, lines, strict=True)]
    if len(set(labels)) == len(labels):
        return labels
    names = []
    for label, line in zip(labels, lines, strict=True):
        parts = [other[0].settings for name, other in zip(labels, lines, strict=True) if name == label]
        keys = [key for key in dict.fromkeys(key for part in parts for key in part) if _varies(key, parts)][:2]
        names.append(", ".join([label, *(f"{key.rpartition('.')[2]}={line[0].settings.get(key)}" for key in keys)]))
    pairs = zip(names, lines, strict=True)
    return [f"{name} ({line[0].run})" if names.count(name) > 1 else name for name, line in pairs]


def _shared_words(names: Sequence[str]) -> str:
    words = [name.split(" ") for name in names]
    return " ".join(word for word in words[0] if all(word in others for others in words)).strip(" ,")
