"""How good the models are, and for whom: every group by name, the mean over its clients, their spread, the worst decile.

Axis letters: K clients of the population.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class MetricRow(NamedTuple):
    """One measurement, as a line of a run's history."""

    round: int
    group: str
    model: str  # global, personal, average or chosen
    metric: str
    value: float


def group_rows(round: int, model: str, names: list[str], group_K: np.ndarray, score_K: np.ndarray) -> list[MetricRow]:
    """Each group's mean score over its clients, the variance across them, and the mean of the worst tenth.

    A client without test examples has no score (NaN) and does not count; a group without any is left out.
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


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of the mean over seeds, which is Student's; None for a single one."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
