"""Statistics of metrics: each group's mean, variance and worst decile, and confidence intervals over seeds.

Axis letters: K clients of the population.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import stdev

import numpy as np
from numpy.typing import ArrayLike

from fedhdp.mechanism import SERVER
from fedhdp.results.schema import STATISTICS, MetricInfo, MetricRow

CONFIDENCE = 0.95


def group_rows(
    round: int, model: str, metric: MetricInfo, names: Sequence[str], group_K: np.ndarray, value_K: np.ndarray
) -> list[MetricRow]:
    """Summarize a metric of the clients by group: mean, variance, mean of the worst tenth, and how many clients count.

    Args:
        round: The round of the measurement.
        model: The kind of model that was measured.
        metric: The metric.
        names: The groups.
        group_K: Each client's index into ``names``.
        value_K: Each client's value; NaN where it is undefined, and for a client without test examples: it does not count.

    Returns:
        A row for each group and statistic that is defined (see `results.schema.STATISTICS`).
    """
    rows = []
    for number, name in enumerate(names):
        values = np.asarray(value_K, np.float64)[(group_K == number) & ~np.isnan(value_K)]
        if len(values) == 0:
            continue
        from_worst = np.sort(values)[:: 1 if metric.higher_is_better else -1]
        worst = from_worst[: max(1, len(values) // 10)]
        with np.errstate(invalid="ignore"):  # the variance of infinite losses
            statistics = (values.mean(), values.var(), worst.mean(), len(values))
        named = zip(STATISTICS, statistics, strict=True)
        rows += [MetricRow(round, name, model, metric.name + s, float(v)) for s, v in named if not math.isnan(v)]
    return rows


def tenths(value_K: np.ndarray, higher_is_better: bool = True) -> list[float]:
    """The mean of each tenth of the clients, from the worst tenth to the best; none of fewer than ten clients."""
    from_worst = np.sort(value_K)[:: 1 if higher_is_better else -1]
    ends = [number * len(value_K) // 10 for number in range(11)]
    if ends[1] == 0:
        return []
    return [float(from_worst[first:last].mean()) for first, last in pairwise(ends)]


def evaluation_rows(
    round: int,
    metrics: Iterable[MetricInfo],
    names: Sequence[str],
    group_K: np.ndarray,
    server_values: Mapping[str, float],
    client_values: Mapping[str, np.ndarray],
) -> list[MetricRow]:
    """What a simulation's evaluation measured.

    Args:
        round: The round of the measurement.
        metrics: The metrics.
        names: The groups.
        group_K: Each client's index into ``names``.
        server_values: What was measured on the server's test set, by ``MODEL/METRIC``; NaN where it is undefined.
        client_values: Each client's values on its own test examples, by ``MODEL/METRIC``.
    """
    info = {metric.name: metric for metric in metrics}
    rows = []
    for key, value in server_values.items():
        model, name = key.split("/")
        if not math.isnan(value):
            rows.append(MetricRow(round, SERVER, model, name, value))
    for key, value_K in client_values.items():
        model, name = key.split("/")
        rows += group_rows(round, model, info[name], names, group_K, value_K)
    return rows


def round_rows(round: int, clips: Iterable[MetricRow], refused: Mapping[str, float]) -> list[MetricRow]:
    """What a round measured: the clips of the next round, and the updates refused so far, by group."""
    rows = list(clips)
    return rows + [MetricRow(round, name, "global", "refused", float(count)) for name, count in refused.items()]


def clip_rows(round: int, layers: Sequence[str], clip: ArrayLike) -> list[MetricRow]:
    """The clip of the next round: "clip", or where layers are clipped one by one "clip/" and the layer's name."""
    names = [f"clip/{layer}" for layer in layers] or ["clip"]
    values = np.atleast_1d(np.asarray(clip)).tolist()
    return [MetricRow(round, SERVER, "global", name, value) for name, value in zip(names, values, strict=True)]


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of the mean, by Student's t distribution; None for a single value."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
