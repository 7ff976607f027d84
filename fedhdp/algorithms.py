"""FedHDP, its special cases and its rivals. Each takes the mechanism that the clients chose and returns what is run.

There is one code path: a baseline or a rival is FedHDP with other numbers, so that comparisons differ in those alone, and
every group keeps the epsilon that it chose.

| algorithm       | noise multiplier of group j | weight r_j     | sampling rate q_j      | what else           |
| --------------- | --------------------------- | -------------- | ---------------------- | ------------------- |
| `fedhdp`        | z_j                         | r_j            | q_j                    |                     |
| `hdp_fedavg`    | z_j                         | 1              | q_j                    |                     |
| `dp_fedavg`     | max_i z_i                   | 1              | q_j                    | shared noise        |
| `non_private`   | 0                           | 1              | q_j                    | no bit noise        |
| `local_only`    | 0                           | 0              | q_j                    | pull 0, fixed clip  |
| `threshold`     | z_l if z_j ≤ z_l            | 1 if z_j ≤ z_l | q_j if z_j ≤ z_l       | l: the level        |
| `weiavg`        | z_j                         | ∝ ε_j          | q_j                    |                     |
| `idp_scale`     | z_j                         | ∝ 1 / z_j      | q_j                    | shared noise        |
| `idp_sample`    | z, the same for all         | 1              | q(ε_j, z), same mean   | shared noise        |
| `time_adaptive` | z_j                         | r_j            | less first, more later |                     |
| `gdpfed`        | z_j                         | 1              | q_j                    | noise per group     |

Those that share out epsilons ask a ``Pricing`` what noise and sampling cost: `fedhdp.theory.RunPricing` answers by the
accountant. Clients who opted out have no epsilon; ``opted_out_epsilon`` stands for it. Sources and formulas are in
docs/explanation/rivals.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_type_hints

import msgspec
from msgspec.structs import replace

from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.errors import require
from fedhdp.mechanism import Mechanism, PrivacyGroup, ScheduledMechanism

OPTED_OUT_EPSILON = 100.0
COHORT_TOLERANCE = 0.01  # relative, of the expected cohort


class Pricing(Protocol):
    """What noise and sampling cost in a run, by group, and what keeps an epsilon: `fedhdp.theory.RunPricing`."""

    @property
    def rounds(self) -> int:
        """The rounds of the run."""

    def epsilon(self, mechanism: Mechanism, group: PrivacyGroup) -> float:
        """What the group's own noise multiplier costs over all rounds: its promise."""

    def noise_multiplier(self, mechanism: Mechanism, group: PrivacyGroup, epsilon: float) -> float:
        """The noise multiplier at which all rounds cost the group this epsilon."""

    def sampling_rate(self, group: PrivacyGroup, epsilon: float, rounds: int, spent: Spent | None = None) -> float:
        """The largest Poisson sampling rate at which these rounds, after those spent, cost the group this epsilon."""

    def error(self, mechanism: Mechanism) -> float:
        """The expected error of the model, by theory."""


class Spent(msgspec.Struct, frozen=True):
    """Rounds that were run before, at another sampling rate."""

    sampling_rate: float
    rounds: int


class TwoStages(msgspec.Struct, frozen=True):
    """A mechanism for the first rounds and another for those after: a function of the round, the first round being 0."""

    first: Mechanism
    then: Mechanism
    first_rounds: int

    def __call__(self, round: int) -> Mechanism:
        """The mechanism of a round."""
        return self.first if round < self.first_rounds else self.then

    @property
    def without_pulls(self) -> TwoStages:
        """The schedule as the server sees it."""
        return replace(self, first=self.first.without_pulls, then=self.then.without_pulls)


def fedhdp(mechanism: Mechanism) -> Mechanism:
    """FedHDP: each group has its own noise multiplier z_j and its own weight r_j.

    update = (Σ_j r_j Σ_{i∈j} clipped_i + noise) / Σ_j r_j q_j N_j

    Args:
        mechanism: What the clients chose.

    Returns:
        The mechanism that is run.
    """
    return mechanism


def hdp_fedavg(mechanism: Mechanism) -> Mechanism:
    """HDP-FedAvg: each group has its own noise multiplier z_j; every update has weight 1.

    Args:
        mechanism: What the clients chose.

    Returns:
        The mechanism that is run.
    """
    groups = tuple(replace(group, weight=1.0) for group in mechanism.groups)
    return replace(mechanism, groups=groups)


def dp_fedavg(mechanism: Mechanism) -> Mechanism:
    """DP-FedAvg: every group has the largest noise multiplier, max_j z_j, added once; every update has weight 1.

    Args:
        mechanism: What the clients chose.

    Returns:
        The mechanism that is run.
    """
    strictest = mechanism.max_noise_multiplier
    groups = tuple(replace(group, weight=1.0, noise_multiplier=strictest) for group in mechanism.groups)
    return replace(mechanism, groups=groups, noise="shared")


def non_private(mechanism: Mechanism) -> Mechanism:
    """Non-Private: no noise on updates or clip bits; every update has weight 1. No client is protected.

    Args:
        mechanism: What the clients chose.

    Returns:
        The mechanism that is run.
    """
    clip = mechanism.clip
    if isinstance(clip, AdaptiveClip | LayerClip):
        clip = replace(clip, bit_noise_stddev=0.0)
    groups = tuple(replace(group, weight=1.0, noise_multiplier=0.0) for group in mechanism.groups)
    return replace(mechanism, groups=groups, clip=clip)


def local_only(mechanism: Mechanism) -> Mechanism:
    """Local training: weight 0 and a fixed clip, so that nothing reaches the server; personal models have pull 0.

    Args:
        mechanism: What the clients chose.

    Returns:
        The mechanism that is run.
    """
    groups = tuple(replace(group, weight=0.0, noise_multiplier=0.0, pull=0.0) for group in mechanism.groups)
    clip = mechanism.clip
    if isinstance(clip, AdaptiveClip | LayerClip):
        clip = replace(clip, learning_rate=0.0)
    return replace(mechanism, groups=groups, clip=clip)


def threshold(mechanism: Mechanism, pricing: Pricing | None = None, *, level: str = "") -> Mechanism:
    """Threshold: everybody at one level; stricter clients are left out. The others all have its noise, and weight 1.

    Args:
        mechanism: What the clients chose.
        pricing: The run's, for the expected error.
        level: The name of the level's group. By default the level of least expected error.

    Raises:
        InvalidValueError: If the level is of no group, or neither it nor a pricing is given.
    """
    names = [group.name for group in mechanism.groups]
    require(level in ("", *names), "level", level, f"one of {', '.join(names)}")
    require(level != "" or pricing is not None, "level", level, "given where there is no pricing")

    def at_level(limit: float) -> Mechanism:
        def change(group: PrivacyGroup) -> PrivacyGroup:
            if group.noise_multiplier > limit:
                return replace(group, weight=0.0, sampling_rate=0.0)
            return replace(group, weight=1.0, noise_multiplier=limit)

        return replace(mechanism, groups=tuple(map(change, mechanism.groups)), noise="shared")

    if level:
        return at_level(next(group.noise_multiplier for group in mechanism.groups if group.name == level))
    assert pricing is not None
    candidates = [at_level(limit) for limit in sorted({group.noise_multiplier for group in mechanism.sampled_groups})]
    return min(candidates, key=pricing.error, default=mechanism)


def weiavg(mechanism: Mechanism, pricing: Pricing, *, opted_out_epsilon: float = OPTED_OUT_EPSILON) -> Mechanism:
    """WeiAvg: weights proportional to epsilon. r_j = ε_j / max_i ε_i.

    Args:
        mechanism: What the clients chose.
        pricing: The run's.
        opted_out_epsilon: Stands for the epsilon of clients who opted out, unless others' is larger.
    """
    epsilons = _epsilons(mechanism, pricing, opted_out_epsilon)
    largest = max(epsilons.values(), default=1.0)
    return _with_weights(mechanism, {name: epsilon / largest for name, epsilon in epsilons.items()})


def idp_scale(mechanism: Mechanism, pricing: Pricing, *, opted_out_epsilon: float = OPTED_OUT_EPSILON) -> Mechanism:
    """Individualized privacy by scale: one noise for all, and updates scaled so that it is each group's own. r_j ∝ 1 / z_j.

    Args:
        mechanism: What the clients chose.
        pricing: The run's.
        opted_out_epsilon: Stands for the epsilon of clients who opted out, unless others' is larger.
    """
    noises = _noise_multipliers(mechanism, pricing, opted_out_epsilon)
    least = min(noises.values(), default=1.0)
    return replace(_with_weights(mechanism, {name: least / z for name, z in noises.items()}), noise="shared")


def idp_sample(mechanism: Mechanism, pricing: Pricing, *, opted_out_epsilon: float = OPTED_OUT_EPSILON) -> Mechanism:
    """Individualized privacy by sample: one noise multiplier z for all; groups with a larger epsilon are sampled more often.

    q_j is the largest rate at which z keeps ε_j, and z is such that the expected cohort stays the same. Weights are 1.

    Args:
        mechanism: What the clients chose.
        pricing: The run's.
        opted_out_epsilon: Stands for the epsilon of clients who opted out, unless others' is larger.

    Raises:
        InvalidValueError: If cohorts are of fixed size.
    """
    require(mechanism.sampling == "poisson", "sampling", mechanism.sampling, "'poisson' where rates keep epsilons")
    noises = _noise_multipliers(mechanism, pricing, opted_out_epsilon)
    epsilons = _epsilons(mechanism, pricing, opted_out_epsilon)
    if all(group.opted_out for group in mechanism.sampled_groups):
        return hdp_fedavg(mechanism)

    def at(z: float) -> Mechanism:
        def change(group: PrivacyGroup) -> PrivacyGroup:
            if group.name not in noises:
                return replace(group, weight=1.0)
            rate = pricing.sampling_rate(replace(group, noise_multiplier=z), epsilons[group.name], pricing.rounds)
            return replace(group, sampling_rate=rate, weight=1.0, noise_multiplier=0.0 if group.opted_out else z)

        return replace(mechanism, groups=tuple(map(change, mechanism.groups)), noise="shared")

    low, high, cohort = min(noises.values()), max(noises.values()), mechanism.expected_cohort_size()
    while True:
        middle = math.sqrt(low * high)
        changed = at(middle)
        size = changed.expected_cohort_size()
        if abs(size / cohort - 1) <= COHORT_TOLERANCE or high / low < 1 + 1e-6:
            return changed
        low, high = (low, middle) if size > cohort else (middle, high)


def time_adaptive(
    mechanism: Mechanism, pricing: Pricing, *, saving_rounds: float = 0.5, saving_rate: float = 0.5
) -> ScheduledMechanism:
    """Time-adaptive spending: private clients are sampled less in the first rounds, and more later, at the same epsilon.

    Weights and noise multipliers are those of the mechanism; those who opted out are sampled as before.

    Args:
        mechanism: What the clients chose.
        pricing: The run's.
        saving_rounds: The share of the rounds in which epsilon is saved.
        saving_rate: Sampling rates in these rounds, over the mechanism's.

    Raises:
        InvalidValueError: If a share is not between 0 and 1, or cohorts are of fixed size.
    """
    require(0 <= saving_rounds < 1, "saving_rounds", saving_rounds, "at least 0 and below 1")
    require(0 <= saving_rate <= 1, "saving_rate", saving_rate, "between 0 and 1")
    require(mechanism.sampling == "poisson", "sampling", mechanism.sampling, "'poisson' where rates keep epsilons")
    first_rounds = round(saving_rounds * pricing.rounds)
    if first_rounds in (0, pricing.rounds):
        return mechanism

    def save(group: PrivacyGroup) -> PrivacyGroup:
        return group if group.opted_out else replace(group, sampling_rate=saving_rate * group.sampling_rate)

    def spend(group: PrivacyGroup) -> PrivacyGroup:
        if group.opted_out or group not in mechanism.sampled_groups:
            return group
        spent = Spent(save(group).sampling_rate, first_rounds)
        epsilon = pricing.epsilon(mechanism, group)
        rate = pricing.sampling_rate(group, epsilon, pricing.rounds - first_rounds, spent)
        return replace(group, sampling_rate=rate)

    first, then = (replace(mechanism, groups=tuple(map(change, mechanism.groups))) for change in (save, spend))
    return TwoStages(first, then, first_rounds)


def gdpfed(mechanism: Mechanism) -> Mechanism:
    """GDPFed: every group's sum has its own noise, of its own noise multiplier z_j; every update has weight 1."""
    return replace(hdp_fedavg(mechanism), noise="per_group")


def _with_weights(mechanism: Mechanism, weights: Mapping[str, float]) -> Mechanism:
    """The mechanism with these weights, and 1 for groups that are not named."""
    groups = tuple(replace(group, weight=weights.get(group.name, 1.0)) for group in mechanism.groups)
    return replace(mechanism, groups=groups)


def _epsilons(mechanism: Mechanism, pricing: Pricing, opted_out_epsilon: float) -> dict[str, float]:
    """The epsilon of each group that is sampled; where it is infinite, what stands for it."""
    require(0 < opted_out_epsilon < math.inf, "opted_out_epsilon", opted_out_epsilon, "above 0 and finite")
    epsilons = {group.name: pricing.epsilon(mechanism, group) for group in mechanism.sampled_groups}
    largest = max([opted_out_epsilon, *(epsilon for epsilon in epsilons.values() if epsilon < math.inf)])
    return {name: min(epsilon, largest) for name, epsilon in epsilons.items()}


def _noise_multipliers(mechanism: Mechanism, pricing: Pricing, opted_out_epsilon: float) -> dict[str, float]:
    """The noise multiplier of the updates of each group that is sampled; if it opted out, a stand-in's."""
    epsilons = _epsilons(mechanism, pricing, opted_out_epsilon)
    return {
        group.name: pricing.noise_multiplier(mechanism, group, epsilons[group.name])
        if group.opted_out
        else mechanism.update_noise_multiplier(group)
        for group in mechanism.sampled_groups
    }


ALGORITHMS: dict[str, Callable[..., Any]] = {
    "fedhdp": fedhdp,
    "hdp_fedavg": hdp_fedavg,
    "dp_fedavg": dp_fedavg,
    "non_private": non_private,
    "local_only": local_only,
    "threshold": threshold,
    "weiavg": weiavg,
    "idp_scale": idp_scale,
    "idp_sample": idp_sample,
    "time_adaptive": time_adaptive,
    "gdpfed": gdpfed,
}
ALGORITHM_NAMES = {  # in tables
    "fedhdp": "FedHDP",
    "hdp_fedavg": "HDP-FedAvg",
    "dp_fedavg": "DP-FedAvg",
    "non_private": "Non-Private",
    "local_only": "Local-Only",
    "threshold": "Threshold",
    "weiavg": "WeiAvg",
    "idp_scale": "IDP-Scale",
    "idp_sample": "IDP-Sample",
    "time_adaptive": "Time-Adaptive",
    "gdpfed": "GDPFed",
}


def algorithm_options(name: str) -> dict[str, type]:
    """The options of an algorithm, with their types."""
    function = ALGORITHMS[name]
    types, parameters = get_type_hints(function), inspect.signature(function).parameters.values()
    return {p.name: types[p.name] for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def takes_pricing(name: str) -> bool:
    """Whether an algorithm shares out the epsilons of a whole run; the others are the same in every round."""
    return "pricing" in inspect.signature(ALGORITHMS[name]).parameters


def apply_algorithm(
    name: str, mechanism: Mechanism, pricing: Pricing, options: Mapping[str, Any] = {}
) -> ScheduledMechanism:
    """Apply an algorithm by its name.

    Args:
        name: A key of ``ALGORITHMS``.
        mechanism: What the clients chose.
        pricing: The run's; algorithms that share out no epsilons do without.
        options: The algorithm's options, by name.

    Raises:
        InvalidValueError: If an option does not exist, or is out of range.
    """
    types, arguments = algorithm_options(name), {}
    for option, value in options.items():
        require(option in types, "options", option, f"one of {', '.join(types) or 'none'} for {name}")
        rule = "text" if types[option] is str else "a number"
        valid = isinstance(value, str if types[option] is str else float | int) and not isinstance(value, bool)
        require(valid, f"options.{option}", value, rule)
        arguments[option] = value
    if takes_pricing(name):
        arguments["pricing"] = pricing
    return ALGORITHMS[name](mechanism, **arguments)
