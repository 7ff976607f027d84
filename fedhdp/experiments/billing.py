"""How a run pays: what its rounds cost so far, and the ledger's charge before each round where there is a ledger.

A group whose budget is spent ends the run before the round that would pass it, or is left out of the rounds that follow,
as the experiment chooses. Without the accounting library a run trains all the same, and its epsilons are not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedhdp.experiments.config import Experiment
from fedhdp.privacy.accounting import compose, privacy_costs, rounds_left
from fedhdp.privacy.budget import charge_round, without
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.schema import ACCOUNTING, GroupResult, account_groups
from fedhdp.simulation import Simulation


class RunBilling:
    """Pays for the rounds of one variant, or of several that share a global training."""

    def __init__(
        self,
        experiment: Experiment,
        simulation: Simulation,
        number: int,
        ledger: Ledger | None,
        run: str,
        completed: int,
        again: int,
    ):
        self.experiment, self.simulation, self.ledger, self.run = experiment, simulation, ledger, run
        self.again = 0 if experiment.noise_seed is not None else again  # with a seed they are the same rounds
        self.whole = simulation.mechanisms[number]  # with everybody in it
        if ledger is not None and number == 0:  # with a ledger all variants of a simulation are one run
            ledger.begin(run, self.whole, completed + again, population=experiment.population)

    def pay(self) -> None:
        """Charge the next round, before anything of it can be seen; raise if nobody is left to go on with."""
        if self.ledger is None:
            return
        due = lambda: (self.run, self.simulation.mechanism)  # noqa: E731
        repeatable = self.experiment.noise_seed is not None
        charge_round(self.ledger, due, repeatable, self.experiment.when_spent, self._leave_out)

    def _leave_out(self, names: tuple[str, ...]) -> None:
        self.simulation.set_mechanisms([without(mechanism, names) for mechanism in self.simulation.mechanisms])

    def epsilon(self, rounds: int) -> dict[str, float]:
        """Each group's epsilon for this run so far, or for all runs where there is a ledger."""
        if not ACCOUNTING:
            return {}
        found = {}
        for group in self.whole.groups:
            spent, delta = self._spent(group.name, rounds, None), self.experiment.delta_of(group.name)
            found[group.name] = math.inf if self.whole.effective_noise_multiplier(group) == 0 else compose(spent, delta)
        return found

    def rounds_left(self) -> dict[str, float]:
        """How many more rounds the budgets allow, for the groups that have one."""
        if self.ledger is None:
            return {}
        left = {}
        for name, once in privacy_costs(self.whole).items():
            budget = self.ledger.budget(name)
            if budget is not None:
                left[name] = rounds_left(self.ledger.spent(name), once, *budget)
        return left

    def priced(self, rounds: int) -> list[GroupResult]:
        """Every group with what this run has cost it: what the ledger charged, rounds that were run again included."""
        return account_groups(self.whole, lambda name: self._spent(name, rounds, self.run), self.experiment.delta_of)

    def _spent(self, name: str, rounds: int, run: str | None) -> Iterable[tuple]:
        if self.ledger is None or (run is not None and self.experiment.noise_seed is not None):
            return [privacy_costs(self.whole, rounds + self.again)[name]]  # with a seed: what it would be without
        return self.ledger.spent(name, run)
