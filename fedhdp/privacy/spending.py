"""What a population has spent over time, and how long its budgets last at the present pace."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedhdp.privacy.accounting import LEDGER_ACCOUNTANT, compose
from fedhdp.privacy.costs import PrivacyCost
from fedhdp.privacy.ledger import Ledger

PACE_WEEKS = 4.0  # the present pace is that of the last so many weeks
MIN_WEEKS = 1 / 7


class Spending(NamedTuple):
    """A group's epsilon after a run's last charge, over all charges until then."""

    time: datetime.datetime
    run: str
    rounds: int
    epsilon: float


def spending(ledger: Ledger, group: str, delta: float) -> list[Spending]:
    """A group's epsilon over time, a point for each run, by the ledger's accountant.

    A run's rounds count from its latest charge on. Costs by different kinds of sampling do not compose: none then.

    Args:
        ledger: The ledger.
        group: The group.
        delta: The delta of the epsilons.
    """
    charges = ledger.charges(group)
    if len({charge.cost.sampling for charge in charges}) > 1:
        return []
    points: list[Spending] = []
    costs: list[PrivacyCost] = []
    for charge in charges:
        costs.append(charge.cost)
        point = Spending(charge.latest, charge.run, charge.cost.rounds, compose(costs, delta, LEDGER_ACCOUNTANT))
        points.append(point)
    return points


def rounds_per_week(points: Sequence[Spending], now: datetime.datetime) -> float:
    """The present pace: rounds charged in the last four weeks, or since the first charge if that is later."""
    if not points:
        return 0.0
    weeks = max(MIN_WEEKS, min(PACE_WEEKS, (now - points[0].time) / datetime.timedelta(weeks=1)))
    recent = [point for point in points if now - point.time <= datetime.timedelta(weeks=PACE_WEEKS)]
    return sum(point.rounds for point in recent) / weeks


def weeks_left(rounds_left: float | None, pace: float) -> float | None:
    """For how many weeks rounds last at a pace; None where either is not known, infinity where no round is charged."""
    if rounds_left is None:
        return None
    return math.inf if pace == 0 or rounds_left == math.inf else rounds_left / pace
