"""The price of tuning: what it costs to choose a weight, or anything else, by trying several private runs.

Papernot & Steinke (2022): run a random number of trials, show the best one only. That costs more than one run and far
less than all of them; how many trials there are must be random, or the best score itself gives a client away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism
from fedhdp.privacy.accounting import EpsilonReport, PrivacyCost, epsilon_best_of, make_report, pluralize, privacy_cost


def format_trials(trials: float, shape: float = math.inf) -> str:
    """How many trials there are, for people."""
    law = {math.inf: "Poisson", 1: "geometric", 0: "logarithmic"}.get(shape, f"negative binomial (shape {shape:g})")
    return f"best of {pluralize(trials, 'trial')} on average ({law})"


def tuning_reports(
    candidates: Sequence[Mechanism], rounds: int, delta: float, trials: float, shape: float = math.inf
) -> dict[str, EpsilonReport]:
    """Each group's price for the best of a random number of whole runs (Papernot & Steinke, 2022), by Renyi accounting.

    Each trial draws a candidate at random, such as another weight; a group pays for the one that shows most of it. The
    number of trials is drawn beforehand, with mean ``trials``: Poisson (``shape`` infinite), geometric (1), logarithmic
    (0) or another truncated negative binomial. The price holds only if nothing of the losing trials is shown, and if
    the score that chooses comes from public data or from those who opted out.
    """
    require(len(candidates) >= 1, "candidates", candidates, "at least one mechanism")
    names = [[(group.name, group.clients) for group in mechanism.groups] for mechanism in candidates]
    require(all(name == names[0] for name in names), "candidates", names, "mechanisms of the same groups")
    samplings = sorted({mechanism.sampling for mechanism in candidates})
    require(len(samplings) == 1, "sampling", samplings, "the same for all candidates")
    result = {}
    for groups in zip(*(mechanism.groups for mechanism in candidates)):
        each = [privacy_cost(mechanism, group, rounds) for mechanism, group in zip(candidates, groups)]
        noise, rate = min(one.noise_multiplier for one in each), max(one.sampling_rate for one in each)
        worst = PrivacyCost(noise, rate, samplings[0], rounds)
        opted_out = any(group.opted_out for group in groups)
        cost = math.inf if opted_out else epsilon_best_of(worst, trials, shape, delta)
        result[groups[0].name] = make_report(groups[0].name, cost, delta, worst, "rdp", format_trials(trials, shape))
    return result
