"""The mechanisms of a simulation. Those that differ in their pulls alone share a run: one training of a global model."""

from __future__ import annotations

from collections.abc import Sequence

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism, ScheduledMechanism


def as_schedules(mechanisms: ScheduledMechanism | Sequence[ScheduledMechanism]) -> tuple[ScheduledMechanism, ...]:
    """One mechanism or several as a tuple."""
    schedules = (mechanisms,) if isinstance(mechanisms, Mechanism) or callable(mechanisms) else tuple(mechanisms)
    require(len(schedules) >= 1, "mechanisms", len(schedules), "one or more")
    return schedules


def run_numbers(schedules: Sequence[ScheduledMechanism]) -> list[int]:
    """The number of each mechanism's run."""
    trainings = [getattr(schedule, "without_pulls", schedule) for schedule in schedules]
    runs = list(dict.fromkeys(trainings))
    return [runs.index(training) for training in trainings]


def run_mechanisms(mechanisms: Sequence[Mechanism], run_of: Sequence[int]) -> list[Mechanism]:
    """The mechanism of each run, without pulls.

    Raises:
        InvalidValueError: If mechanisms of a run differ in more than their pulls.
    """
    by_run: dict[int, Mechanism] = {}
    for run, mechanism in zip(run_of, mechanisms, strict=True):
        shared = by_run.setdefault(run, mechanism.without_pulls) == mechanism.without_pulls
        require(shared, "mechanisms", len(mechanisms), "such that those of a run differ in their pulls alone")
    return [by_run[run] for run in range(len(by_run))]


def check_mechanisms(mechanisms: Sequence[Mechanism], like: Sequence[Mechanism]) -> None:
    """Refuse mechanisms that cannot take the place of others.

    Raises:
        InvalidValueError: If they are not as many, do not draw the same cohorts, or have other groups or layers.
    """
    first = like[0]
    cohorts = {mechanism.cohort_distribution for mechanism in mechanisms}
    require(len(cohorts) == 1, "mechanisms", len(cohorts), "such that all draw the same cohorts")
    layers = {mechanism.layers for mechanism in mechanisms}
    require(layers == {first.layers}, "mechanisms", sorted(layers), f"such that all clip the layers {first.layers}")
    arithmetics = sorted({mechanism.arithmetic for mechanism in mechanisms})
    require(arithmetics == [first.arithmetic], "arithmetic", arithmetics, f"{first.arithmetic!r} in all mechanisms")
    require(len(mechanisms) == len(like), "mechanisms", len(mechanisms), f"{len(like)}, as there are")
    for mechanism in mechanisms:
        rule = f"of the groups {first.group_sizes}"  # the clients keep their groups
        require(mechanism.group_sizes == first.group_sizes, "mechanisms", mechanism.group_sizes, rule)
