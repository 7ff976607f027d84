"""What a deployment's rounds cost each group: charged in the ledger before anything is sent.

Clients join while a run goes on, and a group whose budget is spent may be left out, so a run has one mechanism after
another. Each is a run of its own in the ledger, and a group's epsilon is that of all of them composed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from fedhdp.flower.config import Deployment
from fedhdp.mechanism import Mechanism
from fedhdp.privacy.accounting import PrivacyCost, compose, privacy_cost
from fedhdp.privacy.budget import BudgetExhausted, charge_round, without
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.schema import GroupResult, account_groups


class Segment(msgspec.Struct):
    """Rounds that were run under one mechanism, and the name under which the ledger knows them."""

    name: str
    mechanism: Mechanism
    rounds: int = 0


class DeploymentBilling:
    """Pays for a run's rounds."""

    def __init__(self, deployment: Deployment, ledger: Ledger, run: str, stretches: list[Segment], left_out: set[str]):
        self.deployment, self.ledger, self.run = deployment, ledger, run
        self.stretches, self.left_out = stretches, left_out
        self._members: dict[str, str] = {}
        for name, budget in deployment.budgets.items():
            ledger.tighten(name, budget.epsilon, budget.delta)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of the rounds that come."""
        return self.stretches[-1].mechanism

    def admit(self, members: Mapping[str, str]) -> None:
        """Let the coming rounds be with these clients."""
        if dict(members) != self._members:
            self._members = dict(members)
            self._turn()

    def _turn(self) -> None:
        """Begin with the mechanism that is due, or go on with it; the ledger must know what was completed."""
        self.ledger.refuse_if_older(self.run, sum(stretch.rounds for stretch in self.stretches), self.charged)
        due = without(self._whole(), self.left_out)
        if not self.stretches or self.mechanism != due:
            taken = {run.name for run in self.ledger.runs()}  # also by rounds that a crash made us forget
            name = next(name for n in itertools.count(1) if (name := f"{self.run}/{n}") not in taken)
            self.stretches.append(Segment(name, due))
        self.ledger.begin(self.stretches[-1].name, due, self.stretches[-1].rounds, self._members)

    def _whole(self) -> Mechanism:
        """The mechanism with everybody in it, those who are left out by now too."""
        return self.deployment.mechanism(Counter(self._members.values()))

    def pay(self) -> None:
        """Charge the next round to every group, durably, or raise when nobody is left to go on with."""
        due = lambda: (self.stretches[-1].name, self.mechanism)  # noqa: E731
        try:
            charge_round(
                self.ledger, due, self.deployment.repeatable, self.deployment.on_budget_exhausted, self._leave_out
            )
        except BudgetExhausted:
            if self.deployment.on_budget_exhausted == "leave_out":
                self.left_out = {group.name for group in self.mechanism.groups}
            raise

    def _leave_out(self, names: tuple[str, ...]) -> None:
        self.left_out |= set(names)
        self._turn()

    def completed(self) -> None:
        """Count a round that was paid for and is done."""
        self.stretches[-1].rounds += 1

    @property
    def charged(self) -> int:
        """How many rounds of this run are paid for, also those that were run again after a crash."""
        return self.ledger.charged(f"{self.run}/")

    def spent(self, level: str) -> list[PrivacyCost]:
        """What this run has cost a group so far: all that was charged, or would have been without a seed."""
        if self.deployment.repeatable:
            groups = ((s, group) for s in self.stretches for group in s.mechanism.groups if group.name == level)
            return [
                privacy_cost(stretch.mechanism, group, stretch.rounds) for stretch, group in groups if stretch.rounds
            ]
        names = (run.name for run in self.ledger.runs() if run.name.startswith(f"{self.run}/"))
        return [PrivacyCost(*spent) for name in names for spent in self.ledger.spent(level, name)]

    def epsilon(self) -> dict[str, float]:
        """Each group's epsilon, over all runs that the ledger knows: infinity for those who opted out."""
        return {
            group.name: math.inf
            if group.opted_out
            else compose(self.ledger.spent(group.name), self.deployment.delta_of(group.name))
            for group in self.mechanism.groups
        }

    def priced(self) -> list[GroupResult]:
        """Every group with what this run has cost it, by both accountants."""
        return account_groups(self._whole(), self.spent, self.deployment.delta_of)
