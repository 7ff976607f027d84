"""The cost of tuning: choosing a weight, or anything else, by trying several private runs.

Papernot & Steinke (2022): run a random number of trials and show the best one only. That costs more than one run and
far less than all of them. The number of trials must be random, or the best score itself reveals a client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism
from fedhdp.privacy.accounting import EpsilonReport, epsilon_best_of, make_report, pluralize
from fedhdp.privacy.costs import PrivacyCost, privacy_cost


def format_trials(trials: float, shape: float = math.inf) -> str:
    """The number of trials as text: its mean and its distribution."""
    default = f"negative binomial (shape {shape:g})"
    distribution = {math.inf: "Poisson", 1: "geometric", 0: "logarithmic"}.get(shape, default)
    return f"best of {pluralize(trials, 'trial')} on average ({distribution})"


class Tuning(NamedTuple):
    """The random number of private runs of which only the best is shown: its mean, and the shape of its distribution."""

    trials: float
    shape: float = math.inf

    def __str__(self) -> str:
        return format_trials(*self)


def tuning_reports(
    candidates: Sequence[Mechanism], rounds: int, delta: float, trials: float, shape: float = math.inf
) -> dict[str, EpsilonReport]:
    """Each group's epsilon for the best of a random number of whole runs (Papernot & Steinke, 2022), by RDP.

    Each trial draws one of the candidates at random. A group's epsilon is that of the candidate which reveals most of it.
    It holds only if nothing of the other trials is shown, and if the score that selects comes from public data or from
    clients who opted out.

    Args:
        candidates: Mechanisms of the same groups and the same sampling.
        rounds: The rounds of each run.
        delta: The delta.
        trials: The mean number of trials, which is drawn beforehand.
        shape: The distribution of that number: infinity Poisson, 1 geometric, 0 logarithmic, or another truncated negative
            binomial.

    Returns:
        Reports by group name; epsilon is infinity for a group that has no noise in one of the candidates.

    Raises:
        InvalidValueError: If the candidates differ in groups or sampling, or a value is out of range.
    """
    require(len(candidates) >= 1, "candidates", candidates, "at least one mechanism")
    names = [group.name for group in candidates[0].groups]
    return {name: tuning_report(candidates, name, rounds, delta, trials, shape) for name in names}


def tuning_report(
    candidates: Sequence[Mechanism], name: str, rounds: int, delta: float, trials: float, shape: float = math.inf
) -> EpsilonReport:
    """The same for the group of one name."""
    members = [[(group.name, group.clients) for group in mechanism.groups] for mechanism in candidates]
    require(all(group == members[0] for group in members), "candidates", members, "mechanisms of the same groups")
    samplings = sorted({mechanism.sampling for mechanism in candidates})
    require(len(samplings) == 1, "sampling", samplings, "the same for all candidates")
    groups = [group for mechanism in candidates for group in mechanism.groups if group.name == name]
    costs = [privacy_cost(*pair, rounds) for pair in zip(candidates, groups, strict=True)]
    noise_multiplier, rate = min(cost.noise_multiplier for cost in costs), max(cost.sampling_rate for cost in costs)
    worst = PrivacyCost(noise_multiplier, rate, samplings[0], rounds)
    opted_out = any(group.opted_out for group in groups)
    epsilon = math.inf if opted_out else epsilon_best_of(worst, trials, shape, delta)
    return make_report(name, epsilon, delta, worst, "rdp", format_trials(trials, shape))
