"""Billing: every round is charged to the ledger before it is run, and the mechanism to run is the result of the charge.

A group whose budget does not allow the next round ends the run (``stop``), or is sampled no more (``drop_group``), as
the experiment or deployment chooses in ``on_budget_exhausted``. ``RunBilling`` is for simulated runs, whose groups are
fixed; ``DeploymentBilling`` is for deployments, whose clients join while rounds are run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism, PrivacyGroup, ScheduledMechanism, mechanism_at
from fedhdp.privacy.accounting import LEDGER_ACCOUNTANT, Accountant, compose, is_accounting_installed, rounds_left
from fedhdp.privacy.costs import PrivacyCost, composed_costs, merge_costs, privacy_cost, privacy_costs, without_noise
from fedhdp.privacy.ledger import Budget as Budget
from fedhdp.privacy.ledger import BudgetError, Ledger

SHOWN_TOLERANCE = 0.01  # of the noise multipliers that count as one in the epsilon of a run's progress
OnBudgetExhausted = Literal["stop", "drop_group"]


class BudgetExhausted(Exception):
    """No further round can be charged: the run ends here."""


class RunBilling:
    """Charges the rounds of a simulated run, and knows their cost.

    Args:
        mechanism: The run's mechanism, with all its groups, or a function of the round that returns it.
        ledger: The ledger to charge; None charges nothing and refuses nothing.
        run: The name of the run in the ledger.
        repeatable: Whether noise comes from a given seed; such rounds are charged as rounds without noise.
        on_exhausted: What to do when a budget does not allow the next round.
        delta_of: The delta at which a group's epsilon is computed.
        accountant: The run's accountant; with a ledger, the ledger's.
        completed: The rounds that the run has completed.
        replayed_rounds: The numbers of the rounds that were shown and, after a crash, run again with other noise. Each
            counts as often as it is in this list, once more than it is run.
        members: The run's clients, by id, with their groups; None: numbers, one group after the other.
        population: Where ids are numbers, a description of the clients who have them.
        begin: Whether to open the run in the ledger; False where another billing has opened it.

    Raises:
        InvalidValueError: If there is a ledger and the accountant is another than the ledger's.
        LedgerError: If the ledger refuses the run.
    """

    def __init__(
        self,
        mechanism: ScheduledMechanism,
        ledger: Ledger | None,
        run: str,
        *,
        repeatable: bool,
        on_exhausted: OnBudgetExhausted,
        delta_of: Callable[[str], float],
        accountant: Accountant,
        completed: int = 0,
        replayed_rounds: Sequence[int] = (),
        members: Mapping[str, str] | None = None,
        population: str | None = None,
        begin: bool = True,
    ):
        is_ledgers = ledger is None or accountant == LEDGER_ACCOUNTANT
        require(is_ledgers, "accountant", accountant, f"{LEDGER_ACCOUNTANT!r} where a ledger keeps the budgets")
        self._schedule, self.ledger, self.run, self.accountant = mechanism, ledger, run, accountant
        self.mechanism = mechanism_at(mechanism, 0)
        self._last = self.mechanism  # of the last round that was charged
        self._by_round: list[Mechanism] = []  # so that a function is evaluated once a round
        self.repeatable, self.on_exhausted, self.delta_of = repeatable, on_exhausted, delta_of
        self.replayed_rounds = () if repeatable else tuple(replayed_rounds)  # with a seed they are the same rounds
        self._dropped_groups: set[str] = set()
        if ledger is not None and begin:
            rounds = completed + len(replayed_rounds)
            ledger.begin(run, self.mechanism, rounds, members, population, admit_new=True)

    def charge_next(self, mechanisms: Sequence[Mechanism]) -> list[Mechanism]:
        """Charge the next round, durably, and return what to run.

        Args:
            mechanisms: The mechanisms of the next round. They share one global training, so the first is charged.

        Returns:
            The same mechanisms, or the mechanisms without the groups whose budgets are exhausted.

        Raises:
            BudgetExhausted: If the run is to stop, or no group is left. Nothing was charged.
            InvalidValueError: If there is a ledger and the mechanisms differ in more than pulls.
        """
        mechanisms = [drop_groups(mechanism, self._dropped_groups) for mechanism in mechanisms]
        trainings = {mechanism.without_pulls for mechanism in mechanisms} if self.ledger is not None else ()
        require(
            len(trainings) <= 1, "mechanisms", len(trainings), "such that they differ in pulls alone: one is charged"
        )
        while self.ledger is not None:
            try:
                self.ledger.charge(self.run, _round_costs(mechanisms[0], self.repeatable))
                break
            except BudgetError as error:
                if ending := _end_of_run(mechanisms[0], error, self.on_exhausted):
                    raise ending from error
                self._dropped_groups |= set(error.groups)
                mechanisms = [drop_groups(mechanism, error.groups) for mechanism in mechanisms]
        self._last = mechanisms[0]
        return mechanisms

    def epsilon(self, rounds: int) -> dict[str, float]:
        """Each group's epsilon after so many rounds of this run, over all runs of the ledger where there is one.

        Where the mechanism changes from round to round, PLD's is a bound that is computed fast: noise multipliers within a
        percent count as the smallest of them.

        Returns:
            Epsilons by group; infinity without noise. Empty where dp-accounting is not installed.
        """
        epsilons = {}
        for group in self.mechanism.groups if is_accounting_installed() else ():
            costs = self._run_costs(group.name, rounds) if self.ledger is None else self.ledger.costs(group.name)
            has_noise = self.mechanism.effective_noise_multiplier(group) > 0
            bound = merge_costs(costs, SHOWN_TOLERANCE) if self.accountant == "pld" else costs
            epsilons[group.name] = compose(bound, self.delta_of(group.name), self.accountant) if has_noise else math.inf
        return epsilons

    def rounds_left(self) -> dict[str, float]:
        """How many more rounds like the last one the budgets allow, by group; 0 for groups that were dropped."""
        left: dict[str, float] = {}
        if self.ledger is None:
            return left
        costs = _round_costs(drop_groups(self._last, self._dropped_groups), self.repeatable)
        for name, cost in costs.items():
            budget = self.ledger.budget(name)
            if budget is not None:
                is_dropped = name in self._dropped_groups
                left[name] = 0 if is_dropped else rounds_left(self.ledger.costs(name), cost, budget)
        return left

    def costs(self, group: str, rounds: int) -> tuple[PrivacyCost, ...]:
        """What so many rounds of this run have cost a group, replayed rounds included; as if it were not repeatable."""
        if self.ledger is None or self.repeatable:
            return self._run_costs(group, rounds)
        return self.ledger.costs(group, self.run)

    def _run_costs(self, group: str, rounds: int) -> tuple[PrivacyCost, ...]:
        dropped = self._dropped_groups - {group}  # their noise is gone for the others too
        numbers = (*range(rounds), *self.replayed_rounds)
        if isinstance(self._schedule, Mechanism):
            return (privacy_costs(drop_groups(self._schedule, dropped), len(numbers))[group],)
        if not numbers:
            return ()
        return composed_costs(drop_groups(self._at(number), dropped) for number in numbers)[group]

    def _at(self, round: int) -> Mechanism:
        """The mechanism of a round, with all groups."""
        while len(self._by_round) <= round:
            self._by_round.append(mechanism_at(self._schedule, len(self._by_round)))
        return self._by_round[round]


class Segment(msgspec.Struct):
    """Consecutive rounds of a deployment under one mechanism, and the name of their run in the ledger."""

    name: str
    mechanism: Mechanism
    rounds: int = 0


class DeploymentBilling:
    """Charges the rounds of a deployment, and knows their cost.

    Clients join, and groups are dropped, while rounds are run, so a deployment has one mechanism after another. Each is a
    run of its own in the ledger, and a group's epsilon composes all of them.

    Args:
        ledger: The ledger to charge.
        run: The name of the deployment's run; its runs in the ledger are called ``run/1``, ``run/2``.
        segments: The segments so far, empty for a new run.
        dropped_groups: The groups that were dropped so far.
        build_mechanism: The mechanism for a number of clients by level.
        delta_of: The delta at which a level's epsilon is computed.
        repeatable: Whether noise or cohorts come from a given seed; such rounds are charged as rounds without noise.
        on_exhausted: What to do when a budget does not allow the next round.
        budgets: Budgets by level, which lower those of the ledger when clients are admitted.
    """

    def __init__(
        self,
        ledger: Ledger,
        run: str,
        segments: Iterable[Segment] = (),
        dropped_groups: Iterable[str] = (),
        *,
        build_mechanism: Callable[[Mapping[str, int]], Mechanism],
        delta_of: Callable[[str], float],
        repeatable: bool,
        on_exhausted: OnBudgetExhausted,
        budgets: Mapping[str, Budget],
    ):
        self.ledger, self.run = ledger, run
        self.segments, self.dropped_groups = list(segments), set(dropped_groups)
        self.repeatable, self.on_exhausted, self.delta_of = repeatable, on_exhausted, delta_of
        self._build_mechanism, self._budgets = build_mechanism, dict(budgets)
        self._members: dict[str, str] = {}

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of the next round."""
        return self.segments[-1].mechanism

    @property
    def full_mechanism(self) -> Mechanism:
        """The mechanism with all groups, also those that were dropped."""
        return self._build_mechanism(Counter(self._members.values()))

    @property
    def members(self) -> dict[str, str]:
        """The admitted clients with their levels, in the order of enrollment."""
        return dict(self._members)

    def refused_levels(self, members: Mapping[str, str]) -> set[str]:
        """The levels of these clients that are new to a run under way and would end it.

        A level would end it if its budget allows no round, or if it has no noise here and had some in another run.
        """
        if not self.segments:
            return set()
        mechanism = self._build_mechanism(Counter(members.values()))
        costs, present = _round_costs(mechanism, self.repeatable), {group.name for group in self.mechanism.groups}
        had_noise = {g.name for run in self.ledger.runs() for g in run.mechanism.groups if not g.opted_out}

        def ends_run(group: PrivacyGroup) -> bool:
            budget, past = self.ledger.budget(group.name), self.ledger.costs(group.name)
            is_exhausted = budget is not None and rounds_left(past, costs[group.name], budget) < 1
            return (is_exhausted and self.on_exhausted == "stop") or (group.opted_out and group.name in had_noise)

        return {group.name for group in mechanism.groups if group.name not in present and ends_run(group)}

    def admit(self, members: Mapping[str, str]) -> None:
        """Run the next rounds with these clients, each with its level.

        Raises:
            LedgerError: If the ledger refuses them, or has charged fewer rounds than are completed.
        """
        if dict(members) != self._members:
            for name, budget in self._budgets.items():
                self.ledger.lower_budget(name, budget)
            self._begin_segment(dict(members))

    def charge_next(self) -> Mechanism:
        """Charge the next round, durably, and return the mechanism to run.

        Returns:
            The mechanism of the next round, without the groups whose budgets are exhausted.

        Raises:
            BudgetExhausted: If the run is to stop, or no group is left. Nothing was charged.
        """
        while True:
            try:
                self.ledger.charge(self.segments[-1].name, _round_costs(self.mechanism, self.repeatable))
                return self.mechanism
            except BudgetError as error:
                if ending := _end_of_run(self.mechanism, error, self.on_exhausted):
                    if self.on_exhausted == "drop_group":
                        self.dropped_groups = {group.name for group in self.mechanism.groups}
                    raise ending from error
                self.dropped_groups |= set(error.groups)
            self._begin_segment(self._members)

    def completed(self) -> None:
        """Count a round that was charged and is completed."""
        self.segments[-1].rounds += 1

    @property
    def charged(self) -> int:
        """How many rounds of this run are charged, also those that were run again after a crash."""
        return self.ledger.charged_rounds(f"{self.run}/")

    def costs(self, level: str) -> list[PrivacyCost]:
        """What this run has cost the clients of a level; for a repeatable run, as if it were not."""
        if self.repeatable:
            return [
                privacy_cost(segment.mechanism, group, segment.rounds)
                for segment in self.segments
                for group in segment.mechanism.groups
                if group.name == level and segment.rounds
            ]
        names = [run.name for run in self.ledger.runs() if run.name.startswith(f"{self.run}/")]
        return [cost for name in names for cost in self.ledger.costs(level, name)]

    def epsilon(self) -> dict[str, float]:
        """Each group's epsilon over all runs of the ledger: infinity for groups that opted out."""
        epsilons = {}
        for group in self.mechanism.groups:
            costs = self.ledger.costs(group.name)
            delta = self.delta_of(group.name)
            epsilons[group.name] = math.inf if group.opted_out else compose(costs, delta, LEDGER_ACCOUNTANT)
        return epsilons

    def _begin_segment(self, members: dict[str, str]) -> None:
        """Begin the segment of these members' mechanism, or resume it; nothing changes if the ledger refuses it."""
        self.ledger.check_charged(self.run, sum(segment.rounds for segment in self.segments), self.charged)
        mechanism = drop_groups(self._build_mechanism(Counter(members.values())), self.dropped_groups)
        if self.segments and self.mechanism == mechanism:
            self.ledger.begin(self.segments[-1].name, mechanism, self.segments[-1].rounds, members)
        else:
            taken = {run.name for run in self.ledger.runs()}  # also runs that began after the last checkpoint
            names = (f"{self.run}/{number}" for number in itertools.count(1))
            segment = Segment(next(name for name in names if name not in taken), mechanism)
            self.ledger.begin(segment.name, mechanism, members=members)
            self.segments.append(segment)
        self._members = members


def drop_groups(mechanism: Mechanism, names: Iterable[str]) -> Mechanism:
    """The mechanism in which no client of the groups of these names is sampled."""
    dropped = set(names)
    groups = (replace(group, sampling_rate=0.0) if group.name in dropped else group for group in mechanism.groups)
    return replace(mechanism, groups=tuple(groups))


def _round_costs(mechanism: Mechanism, repeatable: bool) -> dict[str, PrivacyCost]:
    """What a round costs; the noise of a repeatable round can be computed from its seed, so that counts as none."""
    costs = privacy_costs(mechanism)
    return without_noise(costs) if repeatable else costs


def _end_of_run(mechanism: Mechanism, error: BudgetError, on_exhausted: OnBudgetExhausted) -> BudgetExhausted | None:
    """The exception that ends the run, unless it may go on without the groups of the error and others are left."""
    if on_exhausted == "stop":
        return BudgetExhausted(str(error))
    is_sampled = any(group.sampling_rate > 0 for group in drop_groups(mechanism, error.groups).groups)
    return None if is_sampled else BudgetExhausted(f"{error}; no group is left")
