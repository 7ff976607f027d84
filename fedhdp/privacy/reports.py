"""Reports on epsilons as values: of rounds whose numbers are given, of mechanisms, of privacy levels, of a ledger's groups.

The command line prints them as tables or as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fedhdp.errors import InvalidValueError, require
from fedhdp.mechanism import SENSITIVITY, Mechanism, PrivacyGroup, Sampling
from fedhdp.privacy.accounting import (
    ADJACENCY,
    Accountant,
    PrivacyCost,
    compose,
    epsilon_best_of,
    gaussian_epsilon,
    privacy_costs,
    reports_by_accountant,
    rounds_left,
)
from fedhdp.privacy.calibration import min_noise_multiplier, noise_multiplier_for
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.privacy.tuning import format_trials, tuning_reports

CURVE_POINTS = 10


class Tuning(NamedTuple):
    """The random number of private runs of which only the best is shown: its mean, and the shape of its distribution."""

    trials: float
    shape: float = math.inf

    def __str__(self) -> str:
        return format_trials(*self)


class CurvePoint(msgspec.Struct, frozen=True):
    """Epsilon after some rounds."""

    rounds: int
    epsilon: float


class RoundsReport(msgspec.Struct, frozen=True):
    """The epsilon of rounds whose numbers are given, or the noise multiplier for a target epsilon."""

    epsilon: float
    target_epsilon: float | None
    unprotected: bool
    delta: float
    noise_multiplier: float
    sampling_rate: float
    rounds: int
    sampling: str
    adjacency: str
    accountant: str
    tuning: str | None
    noise_in_clips: float
    epsilon_if_noise_in_clips: float  # if the noise multiplier were a multiple of one clip
    curve: list[CurvePoint]


class GroupReport(msgspec.Struct, frozen=True):
    """A group's epsilons under a mechanism; None where there is none by PLD, or no tuning."""

    group: str
    clients: int
    unprotected: bool
    epsilon: float
    epsilon_pld: float | None
    epsilon_tuned: float | None
    delta: float
    noise_multiplier: float
    sampling_rate: float
    rounds: int
    sampling: str
    adjacency: str


class MechanismReport(msgspec.Struct, frozen=True):
    """The epsilons of the variants that cost every group the same."""

    variants: list[str]
    groups: list[GroupReport]


class LevelReport(msgspec.Struct, frozen=True):
    """The epsilons that a privacy level guarantees."""

    level: str
    opted_out: bool
    epsilon: float
    epsilon_pld: float
    delta: float
    noise_multiplier: float
    sampling_rate: float
    weight: float
    budget: float | None


class GroupStanding(msgspec.Struct, frozen=True):
    """A group in a ledger: its budget, its epsilons over all runs, and the rounds left; None where not known."""

    group: str
    clients: int
    first_client: int | None
    budget: Budget | None
    epsilon: float | None
    epsilon_pld: float | None
    unprotected: bool
    delta: float
    rounds_left: float | None
    adjacency: str | None
    charges: list[dict[str, Any]]  # the fields of each PrivacyCost
    note: str


def account_rounds(
    sampling_rate: float,
    rounds: int,
    delta: float,
    *,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    accountant: Accountant = "rdp",
    sampling: Sampling = "poisson",
    tuning: Tuning | None = None,
) -> RoundsReport:
    """The epsilon of rounds, or the noise multiplier for a target epsilon.

    Args:
        sampling_rate: The probability that a client takes part in a round.
        rounds: The number of rounds.
        delta: The delta.
        noise_multiplier: The noise as a multiple of the L2 sensitivity. Either this or ``target_epsilon``.
        target_epsilon: The epsilon to stay within.
        accountant: ``rdp``, or ``pld`` for Poisson sampling without tuning.
        sampling: ``poisson`` or ``fixed``.
        tuning: The number of runs, if only the best of several is shown.

    Raises:
        InvalidValueError: If a value is out of range, or not exactly one of the two is set.
    """
    if tuning is not None:
        require(accountant == "rdp", "accountant", accountant, "'rdp' where there is tuning")

    def epsilon_of(cost: PrivacyCost) -> float:
        return compose([cost], delta, accountant) if tuning is None else epsilon_best_of(cost, *tuning, delta)

    def epsilon_at(noise: float) -> float:
        return epsilon_of(PrivacyCost(noise, sampling_rate, sampling, rounds))

    if target_epsilon is not None:
        require(noise_multiplier is None, "noise_multiplier", noise_multiplier, "None where there is a target_epsilon")
        noise_multiplier = noise_multiplier_for(target_epsilon, sampling_rate, rounds, delta, accountant, sampling)
        if tuning is not None and noise_multiplier > 0:
            noise_multiplier = min_noise_multiplier(epsilon_at, target_epsilon)
    if noise_multiplier is None or not noise_multiplier < math.inf:
        message = f"noise_multiplier must be finite where there is no target_epsilon, got {noise_multiplier}"
        raise InvalidValueError(message, "noise_multiplier", noise_multiplier)
    cost = PrivacyCost(noise_multiplier, sampling_rate, sampling, rounds).checked()
    epsilon, sensitivity = epsilon_of(cost), SENSITIVITY[sampling]
    points = sorted({round(rounds * point / CURVE_POINTS) for point in range(1, CURVE_POINTS + 1)})
    return RoundsReport(
        epsilon=epsilon,
        target_epsilon=target_epsilon,
        unprotected=epsilon == math.inf,
        delta=delta,
        noise_multiplier=noise_multiplier,
        sampling_rate=sampling_rate,
        rounds=rounds,
        sampling=sampling,
        adjacency=ADJACENCY[sampling],
        accountant=accountant,
        tuning=None if tuning is None else str(tuning),
        noise_in_clips=noise_multiplier * sensitivity,
        epsilon_if_noise_in_clips=epsilon_of(cost._replace(noise_multiplier=noise_multiplier / sensitivity)),
        curve=[CurvePoint(point, epsilon_of(cost._replace(rounds=point))) for point in points],
    )


def account_mechanisms(
    variants: Sequence[tuple[str, Mechanism]],
    rounds: int,
    delta_of: Callable[[str], float],
    tuning: Tuning | None = None,
) -> list[MechanismReport]:
    """Each group's epsilons by both accountants, once for all variants that cost every group the same.

    Args:
        variants: The name and the mechanism of each variant; all have the same groups.
        rounds: The number of rounds.
        delta_of: The delta of each group.
        tuning: The number of runs, if only the best of several variants is shown. For a group, the candidates are the
            variants in which it has not opted out.

    Returns:
        A report for each set of variants with equal costs, in the order of the first of them.
    """
    equal: dict[tuple[tuple[str, PrivacyCost], ...], list[tuple[str, Mechanism]]] = {}
    for name, mechanism in variants:
        equal.setdefault(tuple(privacy_costs(mechanism).items()), []).append((name, mechanism))
    mechanisms = [mechanism for _, mechanism in variants]
    reports = []
    for equal_variants in equal.values():
        mechanism = equal_variants[0][1]
        groups = [
            _group_report(mechanism, group, rounds, delta_of(group.name), mechanisms, tuning)
            for group in mechanism.groups
        ]
        reports.append(MechanismReport([name for name, _ in equal_variants], groups))
    return reports


def _group_report(
    mechanism: Mechanism,
    group: PrivacyGroup,
    rounds: int,
    delta: float,
    mechanisms: Sequence[Mechanism],
    tuning: Tuning | None,
) -> GroupReport:
    rdp, pld = next(
        reports for reports in reports_by_accountant(mechanism, rounds, delta) if reports[0].group == group.name
    )
    tuned = None
    if tuning is not None and rdp.epsilon == math.inf:  # the variant protects nothing, whichever is shown
        tuned = math.inf
    elif tuning is not None:
        candidates = [m for m in mechanisms if not _group_of(m, group.name).opted_out] or mechanisms
        tuned = tuning_reports(candidates, rounds, delta, *tuning)[group.name].epsilon
    return GroupReport(
        group=group.name,
        clients=group.clients,
        unprotected=rdp.epsilon == math.inf,
        epsilon=rdp.epsilon,
        epsilon_pld=None if pld is None else pld.epsilon,
        epsilon_tuned=tuned,
        delta=delta,
        noise_multiplier=rdp.noise_multiplier,
        sampling_rate=rdp.sampling_rate,
        rounds=rounds,
        sampling=rdp.sampling,
        adjacency=rdp.adjacency,
    )


def _group_of(mechanism: Mechanism, name: str) -> PrivacyGroup:
    return next(group for group in mechanism.groups if group.name == name)


def account_levels(
    mechanism: Mechanism, rounds: int, delta_of: Callable[[str], float], budgets: Mapping[str, Budget]
) -> list[LevelReport]:
    """The epsilons that each level of a deployment guarantees after all rounds, whatever levels others choose.

    Args:
        mechanism: A mechanism with Poisson sampling whose groups are the levels.
        rounds: The number of rounds.
        delta_of: The delta of each level.
        budgets: The budgets of the levels that have one.
    """
    reports = []
    for group in mechanism.groups:
        delta, budget = delta_of(group.name), budgets.get(group.name)
        numbers = (group.noise_multiplier, group.sampling_rate, rounds, delta)
        reports.append(
            LevelReport(
                level=group.name,
                opted_out=group.opted_out,
                epsilon=gaussian_epsilon(*numbers, "rdp", mechanism.sampling),
                epsilon_pld=gaussian_epsilon(*numbers, "pld", mechanism.sampling),
                delta=delta,
                noise_multiplier=group.noise_multiplier,
                sampling_rate=group.sampling_rate,
                weight=group.weight,
                budget=None if budget is None else budget.epsilon,
            )
        )
    return reports


def group_standing(ledger: Ledger, group: str, delta: float) -> GroupStanding:
    """A group's budget, epsilons and rounds left, over all runs of a ledger; a budget has its own delta.

    Raises:
        LedgerError: If the ledger has no such group.
    """
    costs, budget, clients = ledger.costs(group), ledger.budget(group), ledger.clients(group)
    delta = budget.delta if budget else delta
    samplings = sorted({cost.sampling for cost in costs})
    composes = len(samplings) <= 1
    mechanisms = [run.mechanism for run in ledger.runs() if group in {g.name for g in run.mechanism.sampled_groups}]
    left = None
    if budget and mechanisms and samplings in ([], [mechanisms[-1].sampling]):
        left = rounds_left(costs, privacy_costs(mechanisms[-1])[group], budget)
    epsilon = compose(costs, delta) if composes else None
    return GroupStanding(
        group=group,
        clients=len(clients),
        first_client=clients.start if clients else None,
        budget=budget,
        epsilon=epsilon,
        epsilon_pld=compose(costs, delta, "pld") if samplings in ([], ["poisson"]) else None,
        unprotected=epsilon == math.inf,
        delta=delta,
        rounds_left=left,
        adjacency=ADJACENCY[samplings[0]] if len(samplings) == 1 else None,
        charges=[cost._asdict() for cost in costs],
        note="" if composes else "Poisson sampling and fixed cohorts were mixed: their epsilons do not compose",
    )
