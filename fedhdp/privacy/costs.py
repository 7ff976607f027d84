"""What rounds cost each group (``PrivacyCost``): the numbers of a mechanism that its epsilons depend on.

``poisson`` sampling is accounted for adding or removing one client. ``fixed`` cohorts, drawn without replacement from
each group, are accounted for replacing one client by another (Wang, Balle & Kasiviswanathan, 2019). That changes a
clipped sum, and a sum of bits, by twice as much, so a mechanism's noise multiplier counts half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism, PrivacyGroup, ScheduledMechanism

ADJACENCY = {"poisson": "add or remove one client", "fixed": "replace one client"}
SAMPLER = {"poisson": "Poisson sampling", "fixed": "fixed cohorts without replacement"}
ROUNDING = 1e-9  # the last bits, in which equal noise multipliers may differ


class PrivacyCost(NamedTuple):
    """What rounds cost a group."""

    noise_multiplier: float  # a multiple of the L2 sensitivity to one neighbouring change
    sampling_rate: float  # the probability that a client takes part in a round
    sampling: str
    rounds: int = 1

    @property
    def free(self) -> bool:
        """Whether the rounds reveal nothing of the group."""
        return self.rounds == 0 or self.sampling_rate == 0 or self.noise_multiplier == math.inf

    def checked(self) -> PrivacyCost:
        """This cost; ``InvalidValueError`` if a field is out of range, since NaN or -5 rounds would lower an epsilon."""
        noise_multiplier, sampling_rate, sampling, rounds = self
        require(noise_multiplier >= 0, "noise_multiplier", noise_multiplier, "at least 0")
        require(0 <= sampling_rate <= 1, "sampling_rate", sampling_rate, "between 0 and 1")
        require(sampling in ADJACENCY, "sampling", sampling, "'poisson' or 'fixed'")
        require(0 <= rounds < math.inf and int(rounds) == rounds, "rounds", rounds, "a whole number, at least 0")
        return self


def privacy_cost(mechanism: Mechanism, group: PrivacyGroup, rounds: int = 1) -> PrivacyCost:
    """What rounds of a mechanism cost one of its groups, for update and clip bit together."""
    require(group in mechanism.groups, "group", group.name, "a group of the mechanism")  # any other would cost nothing
    noise_multiplier = mechanism.accounted_noise_multiplier(group)
    return PrivacyCost(noise_multiplier, mechanism.sampling_probability(group), mechanism.sampling, rounds).checked()


def privacy_costs(mechanism: Mechanism, rounds: int = 1) -> dict[str, PrivacyCost]:
    """What rounds of a mechanism cost each group, by name."""
    return {group.name: privacy_cost(mechanism, group, rounds) for group in mechanism.groups}


def composed_costs(mechanisms: Iterable[Mechanism] | Mapping[Mechanism, int]) -> dict[str, tuple[PrivacyCost, ...]]:
    """What rounds cost each group, by name, where each round has a mechanism of its own.

    Args:
        mechanisms: The mechanism of every round, or how many rounds each runs. All have the same groups, and which mechanism
            runs must not depend on private data.
    """
    costs: dict[str, list[PrivacyCost]] = {}
    for mechanism, rounds in Counter(mechanisms).items():
        for name, cost in privacy_costs(mechanism, rounds).items():
            costs.setdefault(name, []).append(cost)
    return {name: merge_costs(of_group) for name, of_group in costs.items()}


def scheduled_costs(mechanism: ScheduledMechanism, rounds: int) -> dict[str, tuple[PrivacyCost, ...]]:
    """What the first rounds of a mechanism, or of a function of the round, cost each group, by name."""
    if isinstance(mechanism, Mechanism):
        return composed_costs({mechanism: rounds})
    return composed_costs(mechanism(round) for round in range(rounds))


def merge_costs(costs: Iterable[PrivacyCost], tolerance: float = ROUNDING) -> tuple[PrivacyCost, ...]:
    """The same costs or more, with the rounds added up whose noise multipliers differ by no more than a tolerance.

    Args:
        costs: The costs.
        tolerance: The relative difference. The smaller noise multiplier counts, so no cost is lost.
    """
    merged: list[PrivacyCost] = []
    for cost in sorted(costs, key=lambda cost: (cost.sampling, cost.sampling_rate, cost.noise_multiplier)):
        last = merged[-1] if merged else None
        is_alike = last is not None and cost.noise_multiplier <= last.noise_multiplier * (1 + tolerance)
        if last is not None and is_alike and last[1:3] == cost[1:3]:
            merged[-1] = last._replace(rounds=last.rounds + cost.rounds)
        else:
            merged.append(cost)
    return tuple(merged)


def without_noise(costs: Mapping[str, PrivacyCost]) -> dict[str, PrivacyCost]:
    """The costs of rounds whose noise can be computed again from a seed: as if there were none."""
    return {name: cost._replace(noise_multiplier=0.0) for name, cost in costs.items()}
