"""What noise and sampling cost in a run, for algorithms that share out epsilons: by an accountant, or by a fast formula.

``RunPricing`` is what a run uses. ``RoughPricing`` orders mechanisms alike without an accountant; it serves to check an
experiment before its noise is calibrated, and is never the basis of an epsilon that is shown.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from fedhdp.algorithms import Spent
from fedhdp.errors import require
from fedhdp.mechanism import SENSITIVITY, Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import Accountant, compose
from fedhdp.privacy.calibration import min_noise_multiplier, noise_multiplier_for
from fedhdp.privacy.costs import ROUNDING, PrivacyCost
from fedhdp.theory.planning import MLP_PARAMETERS, estimate_error


@functools.lru_cache(maxsize=16384)
def _epsilon(costs: tuple[PrivacyCost, ...], delta: float, accountant: Accountant) -> float:
    return compose(costs, delta, accountant) * (1 + ROUNDING)


def _error(mechanism: Mechanism, rounds: int, parameters: int) -> float:
    """The expected error; infinity where no update counts."""
    return estimate_error(mechanism, rounds, parameters).error if mechanism.expected_weight > 0 else math.inf


class RunPricing:
    """What noise and sampling cost in a run, by its accountant.

    Args:
        rounds: The rounds of the run.
        delta: The delta of all groups, or of each by its name.
        accountant: The run's accountant.
        parameters: The number of the model's parameters, or what counts them, called if an error is estimated.

    Raises:
        InvalidValueError: If there are no rounds.
    """

    def __init__(
        self,
        rounds: int,
        delta: float | Callable[[str], float],
        accountant: Accountant = "pld",
        parameters: int | Callable[[], int] = MLP_PARAMETERS,
    ):
        require(rounds >= 1, "rounds", rounds, "at least 1")
        self.rounds, self.accountant = rounds, accountant
        self._delta, self._parameters = delta, parameters

    def epsilon(self, mechanism: Mechanism, group: PrivacyGroup) -> float:
        """What the group's own noise multiplier costs over all rounds: its promise."""
        noise = group.noise_multiplier / SENSITIVITY[mechanism.sampling]
        cost = PrivacyCost(noise, mechanism.sampling_probability(group), mechanism.sampling, self.rounds)
        return math.inf if group.opted_out and not cost.free else self._compose(group, cost)

    def noise_multiplier(self, mechanism: Mechanism, group: PrivacyGroup, epsilon: float) -> float:
        """The noise multiplier at which all rounds cost the group this epsilon."""
        rate, sampling = mechanism.sampling_probability(group), mechanism.sampling
        numbers = (epsilon, rate, self.rounds, self._delta_of(group), self.accountant, sampling)
        return noise_multiplier_for(*numbers) * SENSITIVITY[sampling]

    def sampling_rate(self, group: PrivacyGroup, epsilon: float, rounds: int, spent: Spent | None = None) -> float:
        """The largest Poisson sampling rate at which these rounds, after those spent, cost the group this epsilon."""
        noise = group.noise_multiplier
        before = [] if spent is None else [PrivacyCost(noise, spent.sampling_rate, "poisson", spent.rounds)]

        def epsilon_at(rate: float) -> float:
            return self._compose(group, *before, PrivacyCost(noise, rate, "poisson", rounds))

        if epsilon_at(1.0) <= epsilon:
            return 1.0
        start_rate = group.sampling_rate  # the search begins here
        return start_rate / min_noise_multiplier(lambda factor: epsilon_at(min(1.0, start_rate / factor)), epsilon)

    def error(self, mechanism: Mechanism) -> float:
        """The expected error of the model, by theory."""
        count = self._parameters
        return _error(mechanism, self.rounds, count() if callable(count) else count)

    def _delta_of(self, group: PrivacyGroup) -> float:
        return self._delta(group.name) if callable(self._delta) else self._delta

    def _compose(self, group: PrivacyGroup, *costs: PrivacyCost) -> float:
        return _epsilon(costs, self._delta_of(group), self.accountant)


class RoughPricing:
    """As `RunPricing`, by the formula ε = q √T / z, which no accountant has checked.

    Args:
        rounds: The rounds of the run.
    """

    def __init__(self, rounds: int):
        self.rounds = rounds

    def epsilon(self, mechanism: Mechanism, group: PrivacyGroup) -> float:
        """The epsilon of all rounds."""
        rate = mechanism.sampling_probability(group)
        if group.opted_out:
            return math.inf if rate else 0.0
        return rate * math.sqrt(self.rounds) / group.noise_multiplier

    def noise_multiplier(self, mechanism: Mechanism, group: PrivacyGroup, epsilon: float) -> float:
        """The noise multiplier for an epsilon of all rounds."""
        return mechanism.sampling_probability(group) * math.sqrt(self.rounds) / epsilon

    def sampling_rate(self, group: PrivacyGroup, epsilon: float, rounds: int, spent: Spent | None = None) -> float:
        """The sampling rate for an epsilon."""
        left = (epsilon * group.noise_multiplier) ** 2
        left -= 0.0 if spent is None else spent.sampling_rate**2 * spent.rounds
        return min(1.0, math.sqrt(max(0.0, left) / rounds))

    def error(self, mechanism: Mechanism) -> float:
        """The expected error of the paper's network for MNIST."""
        return _error(mechanism, self.rounds, MLP_PARAMETERS)
