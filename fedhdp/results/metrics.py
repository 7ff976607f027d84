"""Statistics of the scores: each group's mean, variance and worst decile, and confidence intervals over seeds.

Axis letters: K clients of the population.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import stdev

import numpy as np
from numpy.typing import ArrayLike

from fedhdp.mechanism import SERVER
from fedhdp.results.schema import MetricRow

CONFIDENCE = 0.95


def group_rows(round: int, model: str, names: list[str], group_K: np.ndarray, score_K: np.ndarray) -> list[MetricRow]:
    """Summarize the clients' scores by group: their mean, their variance and the mean of the worst tenth.

    Args:
        round: The round of the measurement.
        model: The kind of model that was scored.
        names: The groups.
        group_K: Each client's index into ``names``.
        score_K: Each client's score; NaN for a client without test examples, who does not count.

    Returns:
        Three rows for each group with a score.
    """
    rows = []
    for number, name in enumerate(names):
        scores = score_K[(group_K == number) & ~np.isnan(score_K)]
        if len(scores) == 0:
            continue
        worst = np.sort(scores)[: max(1, len(scores) // 10)]
        values = {"accuracy": scores.mean(), "variance": scores.var(), "worst_decile": worst.mean()}
        rows += [MetricRow(round, name, model, metric, float(value)) for metric, value in values.items()]
    return rows


def evaluation_rows(
    round: int,
    group_K: np.ndarray,
    server_scores: Mapping[str, float],
    client_scores: Mapping[str, np.ndarray],
    clips: list[MetricRow],
    refused: Mapping[str, float],
) -> list[MetricRow]:
    """The rows of a simulation's evaluation.

    Args:
        round: The round of the measurement.
        group_K: Each client's index into the groups.
        server_scores: The score on the server's test set, by the kind of model.
        client_scores: Each client's score on its own test examples, by the kind of model.
        clips: The rows of the next round's clips.
        refused: The updates refused so far, by group.
    """
    rows = [MetricRow(round, SERVER, model, "accuracy", score) for model, score in server_scores.items()]
    for model, score_K in client_scores.items():
        rows += group_rows(round, model, list(refused), group_K, score_K)
    rows += clips
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
