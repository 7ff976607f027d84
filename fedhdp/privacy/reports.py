"""Reports on epsilons as values: of mechanisms, of privacy levels, of a ledger's groups.

The command line prints them as tables or as JSON.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from fedhdp.mechanism import Mechanism, PrivacyGroup, ScheduledMechanism, mechanism_at
from fedhdp.privacy.accounting import (
    LEDGER_ACCOUNTANT,
    Accountant,
    compose,
    gaussian_epsilon,
    rounds_left,
    within_budget,
)
from fedhdp.privacy.calibration import explain_surplus
from fedhdp.privacy.costs import ADJACENCY, PrivacyCost, composed_costs, privacy_costs, scheduled_costs
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.privacy.tuning import Tuning, tuning_report


class GroupReport(msgspec.Struct, frozen=True):
    """A group's epsilon under a mechanism, beside the one it asked for; None where it asked for none, or no tuning."""

    group: str
    clients: int
    unprotected: bool
    epsilon: float
    epsilon_target: float | None
    epsilon_tuned: float | None  # by RDP
    accountant: str
    delta: float
    noise_multiplier: float  # the smallest of all rounds
    mechanisms: int  # that cost the group differently, where weights change from round to round
    sampling_rate: float
    rounds: int
    sampling: str
    adjacency: str
    surplus: str | None  # why it has more noise than it asked for, and which weight would use it


class MechanismReport(msgspec.Struct, frozen=True):
    """The epsilons of the variants that cost every group the same."""

    variants: list[str]
    groups: list[GroupReport]


class LevelReport(msgspec.Struct, frozen=True):
    """The epsilon that a privacy level guarantees, by the ledger's accountant, beside the one that it states."""

    level: str
    opted_out: bool
    epsilon: float
    epsilon_target: float | None
    accountant: str
    delta: float
    noise_multiplier: float
    sampling_rate: float
    weight: float | None  # None: the theory's for the clients who enroll
    budget: float | None


class GroupStanding(msgspec.Struct, frozen=True):
    """A group in a ledger: its budget, its epsilon over all runs, and the rounds left; None where not known.

    ``rounds_left`` counts rounds like the costliest of the group's last run.
    """

    group: str
    clients: int
    budget: Budget | None
    epsilon: float | None
    unprotected: bool
    delta: float
    rounds_left: float | None
    adjacency: str | None
    charges: list[dict[str, Any]]  # the fields of each PrivacyCost
    note: str

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget allows no further round like the costliest of the group's last run."""
        is_exceeded = self.budget is not None and self.epsilon is not None and self.epsilon > self.budget.epsilon
        return is_exceeded or self.rounds_left == 0


def account_mechanisms(
    variants: Sequence[tuple[str, ScheduledMechanism]],
    rounds: int,
    delta_of: Callable[[str], float],
    accountant: Accountant,
    targets: Sequence[Mapping[str, float]] | None = None,
    tuning: Tuning | None = None,
) -> list[MechanismReport]:
    """Each group's epsilons, once for all variants that cost every group the same.

    Args:
        variants: The name and the mechanism of each variant, or its function of the round; all have the same groups.
        rounds: The number of rounds.
        delta_of: The delta of each group.
        accountant: The run's accountant.
        targets: For each variant, the epsilons that groups asked for, by name.
        tuning: The number of runs, if only the best of several variants is shown. For a group, the candidates are the
            variants in which it has not opted out.

    Returns:
        A report for each set of variants with equal costs, in the order of the first of them.
    """
    names_of: dict[tuple[GroupReport, ...], list[str]] = {}
    rounds_of = [_rounds_of_mechanisms(schedule, rounds) for _, schedule in variants]
    mechanisms = [mechanism for of_variant in rounds_of for mechanism in of_variant]
    for (name, _), of_variant, epsilons in zip(variants, rounds_of, targets or [{}] * len(variants), strict=True):
        groups = []
        mechanism, costs = next(iter(of_variant)), composed_costs(of_variant)
        for group in mechanism.groups:
            report = _group_report(mechanism, group, costs[group.name], delta_of(group.name), accountant)
            tuned = None if tuning is None else _tuned_epsilon(mechanisms, report, tuning)
            groups.append(replace(report, epsilon_target=epsilons.get(group.name), epsilon_tuned=tuned))
        names_of.setdefault(tuple(groups), []).append(name)
    return [MechanismReport(names, list(groups)) for groups, names in names_of.items()]


def _rounds_of_mechanisms(schedule: ScheduledMechanism, rounds: int) -> Mapping[Mechanism, int]:
    """How many rounds each mechanism runs."""
    if isinstance(schedule, Mechanism):
        return {schedule: rounds}
    return Counter(mechanism_at(schedule, round) for round in range(rounds))


def _group_report(
    mechanism: Mechanism, group: PrivacyGroup, costs: Sequence[PrivacyCost], delta: float, accountant: Accountant
) -> GroupReport:
    """The report of a group, without target and tuning."""
    cost = min(costs, key=lambda cost: cost.noise_multiplier)._replace(rounds=sum(cost.rounds for cost in costs))
    epsilon = math.inf if cost.noise_multiplier == 0 else compose(costs, delta, accountant)
    return GroupReport(
        group=group.name,
        clients=group.clients,
        unprotected=epsilon == math.inf,
        epsilon=epsilon,
        epsilon_target=None,
        epsilon_tuned=None,
        accountant=accountant,
        delta=delta,
        noise_multiplier=cost.noise_multiplier,
        mechanisms=len(costs),
        sampling_rate=cost.sampling_rate,
        rounds=cost.rounds,
        sampling=cost.sampling,
        adjacency=ADJACENCY[cost.sampling],
        surplus=explain_surplus(mechanism, group) if len(costs) == 1 else None,
    )


def _tuned_epsilon(mechanisms: Sequence[Mechanism], report: GroupReport, tuning: Tuning) -> float:
    """The epsilon of a group if only the best of several variants is shown, of those in which it has not opted out."""
    if report.noise_multiplier == 0:  # the variant protects nothing, whichever is shown
        return math.inf
    candidates = [m for m in mechanisms if not _group_of(m, report.group).opted_out] or mechanisms
    return tuning_report(candidates, report.group, report.rounds, report.delta, *tuning).epsilon


def _group_of(mechanism: Mechanism, name: str) -> PrivacyGroup:
    return next(group for group in mechanism.groups if group.name == name)


def account_levels(
    mechanism: Mechanism,
    rounds: int,
    delta_of: Callable[[str], float],
    budgets: Mapping[str, Budget],
    targets: Mapping[str, float],
    weights: Mapping[str, float],
) -> list[LevelReport]:
    """The epsilons that each level of a deployment guarantees after all rounds, whatever levels others choose.

    Args:
        mechanism: A mechanism with Poisson sampling whose groups are the levels.
        rounds: The number of rounds.
        delta_of: The delta of each level.
        budgets: The budgets of the levels that have one.
        targets: The epsilons that levels state, by name.
        weights: The weights that levels state, by name.
    """
    reports = []
    for group in mechanism.groups:
        delta, budget = delta_of(group.name), budgets.get(group.name)
        numbers = (group.noise_multiplier, group.sampling_rate, rounds, delta)
        reports.append(
            LevelReport(
                level=group.name,
                opted_out=group.opted_out,
                epsilon=gaussian_epsilon(*numbers, LEDGER_ACCOUNTANT, mechanism.sampling),
                epsilon_target=targets.get(group.name),
                accountant=LEDGER_ACCOUNTANT,
                delta=delta,
                noise_multiplier=group.noise_multiplier,
                sampling_rate=group.sampling_rate,
                weight=weights.get(group.name),
                budget=None if budget is None else budget.epsilon,
            )
        )
    return reports


def group_standing(ledger: Ledger, group: str, delta: float, budget: Budget | None = None) -> GroupStanding:
    """A group's budget, epsilon and rounds left, over all runs of a ledger.

    Args:
        ledger: The ledger.
        group: The group.
        delta: The delta of its epsilon if it has no budget; a budget has its own.
        budget: As if it had this budget. None: its own, if it was promised one.

    Raises:
        LedgerError: If the ledger has no such group.
    """
    costs, clients, budget = ledger.costs(group), ledger.clients(group), budget or ledger.budget(group)
    delta = budget.delta if budget else delta
    samplings = sorted({cost.sampling for cost in costs})
    composes = len(samplings) <= 1
    last, left = _costliest_round(ledger, group), None
    if budget and last is not None and samplings in ([], [last.sampling]):
        left = rounds_left(costs, last, budget)
    epsilon = compose(costs, delta, LEDGER_ACCOUNTANT) if composes else None
    return GroupStanding(
        group=group,
        clients=clients,
        budget=budget,
        epsilon=epsilon,
        unprotected=epsilon == math.inf,
        delta=delta,
        rounds_left=left,
        adjacency=ADJACENCY[samplings[0]] if len(samplings) == 1 else None,
        charges=[cost._asdict() for cost in costs],
        note="" if composes else "Poisson sampling and fixed cohorts were mixed: their epsilons do not compose",
    )


def restored_note(ledger: Ledger) -> str:
    """What a reader must know of a ledger that was restored from a backup; empty where it was not."""
    times = [f"{time[:16].replace('T', ' ')} UTC" for time in ledger.restorations()]
    if not times:
        return ""
    words = "charges before may be missing, so that more was spent than it says"
    return f"Restored from a backup ({', '.join(times)}): {words}."


def _costliest_round(ledger: Ledger, group: str) -> PrivacyCost | None:
    """A round with the least noise and the largest sampling rate of the group's last run; None before its first.

    Weights may change from round to round, and other groups' noise may go, so the run's first round may cost less.
    """
    for run in reversed(ledger.runs()):
        costs = [cost for cost in ledger.costs(group, run.name) if cost.sampling_rate > 0]
        if not costs and group in {sampled.name for sampled in run.mechanism.sampled_groups}:
            costs = [privacy_costs(run.mechanism)[group]]  # no round is charged yet
        if costs:
            noise_multiplier, rate = min(c.noise_multiplier for c in costs), max(c.sampling_rate for c in costs)
            return PrivacyCost(noise_multiplier, rate, costs[0].sampling)
    return None


def rounds_allowed(
    ledger: Ledger | None, trainings: Sequence[ScheduledMechanism], budgets: Mapping[str, Budget], rounds: int
) -> list[dict[str, int]]:
    """How many rounds of trainings, one after the other, the budgets allow after what a ledger has charged.

    Args:
        ledger: The ledger; None: nothing is charged or promised yet.
        trainings: The mechanism of each training, or its function of the round.
        budgets: Budgets by group, which lower those of the ledger.
        rounds: The rounds of each training. It ends where the first budget does.

    Returns:
        For each training, numbers of rounds by group, for the groups that have a budget.
    """
    known = () if ledger is None else ledger.groups()
    charged = {name: ledger.costs(name) for name in known} if ledger is not None else {}
    promised = {name: ledger.budget(name) for name in known} if ledger is not None else {}
    results = []
    for training in trainings:
        allowed: dict[str, int] = {}
        for name in privacy_costs(mechanism_at(training, 0)):
            budget = budgets[name].lowered(promised.get(name)) if name in budgets else promised.get(name)
            if budget is not None:
                allowed[name] = _rounds_within(budget, charged.get(name, ()), training, name, rounds)
        results.append(allowed)
        for name, costs in scheduled_costs(training, min(allowed.values(), default=rounds)).items():
            charged[name] = (*charged.get(name, ()), *costs)
    return results


def _rounds_within(
    budget: Budget, charged: Sequence[PrivacyCost], training: ScheduledMechanism, group: str, rounds: int
) -> int:
    """How many of the first rounds of a training a budget allows."""

    def is_refused(count: int) -> bool:
        return not within_budget((*charged, *scheduled_costs(training, count)[group]), budget)

    return bisect_left(range(1, rounds + 1), True, key=is_refused)
