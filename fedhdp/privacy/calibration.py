"""From an epsilon to the noise that keeps it, and the configuration in which users state either of the two.

Epsilon falls as noise grows, so calibration is a search: it narrows an interval between a noise multiplier that is
enough and one that is too small until the epsilon of the first is within half a percent of the target. The result is
always the one that is enough.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import msgspec

from fedhdp.clips import Clip, parse_clip
from fedhdp.errors import require
from fedhdp.mechanism import MAX_VALUE, SENSITIVITY, Arithmetic, Mechanism, Noise, PrivacyGroup, Sampling
from fedhdp.privacy.accounting import MIN_NOISE_MULTIPLIER, Accountant, compose, default_accountant
from fedhdp.privacy.costs import ROUNDING, PrivacyCost

SURPLUS = 1.01  # a group has more noise than it asked for from this ratio on: calibration is within 1%
MAX_ROUNDS_PLD = 100_000  # beyond, calibration by PLD takes minutes


class PrivacyLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client can choose: a noise multiplier, or the epsilon that all rounds together may reach.

    Raises:
        InvalidValueError: If a value is out of range, or not exactly one of ``noise_multiplier`` and ``epsilon`` is set.
    """

    sampling_rate: float  # the probability that a client takes part in a round
    noise_multiplier: float | None = None  # 0 opts out
    epsilon: float | None = None  # after all rounds; infinity opts out
    delta: float | None = None  # None: the experiment's or the deployment's
    weight: float | None = None  # what one update counts for on the server; None: the theory's
    pull: float = 0.05  # of personal models towards the global one

    def __post_init__(self) -> None:
        is_exclusive = (self.noise_multiplier is None) != (self.epsilon is None)
        rule = f"set where epsilon is not, and only there (epsilon is {self.epsilon})"
        require(is_exclusive, "noise_multiplier", self.noise_multiplier, rule)
        if self.epsilon is not None:
            require(self.epsilon > 0, "epsilon", self.epsilon, "above 0")
        if self.delta is not None:
            require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")
        self._uncalibrated_group("level", 1)  # checks the other fields

    def _uncalibrated_group(self, name: str, clients: int) -> PrivacyGroup:
        noise_multiplier, weight = self.noise_multiplier or 0.0, 1.0 if self.weight is None else self.weight
        return PrivacyGroup(name, clients, noise_multiplier, self.sampling_rate, weight, self.pull)


class GroupConfig(PrivacyLevel, frozen=True, forbid_unknown_fields=True):
    """A group as a user writes it: its name, its clients and their privacy level.

    The clients are a count, or a share of all, which are drawn at random, or a list of ids. With neither ``clients`` nor
    ``share`` they are those whose level in the data has the group's name.

    Raises:
        InvalidValueError: If a value is out of range, or both ``clients`` and ``share`` are set.
    """

    name: str
    clients: int | tuple[str | int, ...] | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.clients, tuple):
            require(
                len(set(map(str, self.clients))) == len(self.clients) > 0, "clients", self.clients, "ids that differ"
            )
        if self.share is not None:
            require(self.clients is None, "share", self.share, "absent where clients are given")
            require(0 < self.share <= 1, "share", self.share, "above 0 and at most 1")
        self.uncalibrated(default_clients=1)

    @property
    def size(self) -> int | float | tuple[str, ...] | None:
        """The clients as a count, a share as a float, or ids; None: those whose level has the group's name."""
        if self.share is not None:
            return float(self.share)
        return tuple(map(str, self.clients)) if isinstance(self.clients, tuple) else self.clients

    @property
    def count(self) -> int | None:
        """The number of clients; None where it depends on the data."""
        return len(self.clients) if isinstance(self.clients, tuple) else self.clients

    def uncalibrated(self, default_clients: int | None = None) -> PrivacyGroup:
        """The group with noise multiplier 0 where it states an epsilon, and weight 1 where it states none.

        Args:
            default_clients: Its number of clients where that depends on the data, for checks of the other fields.

        Raises:
            InvalidValueError: If its number of clients depends on the data, and there is no default.
        """
        clients = default_clients if self.count is None else self.count
        require(clients is not None, f"clients of {self.name!r}", self.size, "a count, which only the data has")
        assert clients is not None
        return self._uncalibrated_group(self.name, clients)


class MechanismConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mechanism as a user writes it: groups that state noise multipliers or epsilons, clip, sampling, …"""

    groups: tuple[GroupConfig, ...]
    clip: Clip
    noise: Noise = "shared"
    sampling: Sampling = "poisson"
    arithmetic: Arithmetic = "float32"

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "clip", parse_clip(self.clip))
        self.uncalibrated(default_clients=1)

    def with_counts(self, counts: Mapping[str, int]) -> MechanismConfig:
        """The same configuration with these numbers of clients, by group."""
        replace = msgspec.structs.replace
        return replace(self, groups=tuple(replace(g, clients=counts[g.name], share=None) for g in self.groups))

    def uncalibrated(self, default_clients: int | None = None) -> Mechanism:
        """The mechanism in which groups that state an epsilon have no noise, and those without a weight weight 1."""
        groups = tuple(group.uncalibrated(default_clients) for group in self.groups)
        return Mechanism(groups, self.clip, self.noise, self.sampling, self.arithmetic)

    @property
    def epsilon_targets(self) -> dict[str, float]:
        """The epsilons that groups state, by name."""
        return {group.name: group.epsilon for group in self.groups if group.epsilon is not None}

    def with_epsilons(self, epsilons: Mapping[str, float]) -> MechanismConfig:
        """The same with other epsilons for some groups, by name, instead of their epsilons or noise multipliers."""
        groups = (
            msgspec.structs.replace(group, epsilon=epsilons[group.name], noise_multiplier=None)
            if group.name in epsilons
            else group
            for group in self.groups
        )
        return msgspec.structs.replace(self, groups=tuple(groups))

    def build(self, rounds: int, delta: float, accountant: Accountant) -> Mechanism:
        """The mechanism, calibrated where groups state an epsilon; groups without a weight have weight 1.

        Args:
            rounds: How many rounds will be run.
            delta: The delta of groups that state none.
            accountant: The run's accountant, which also prints its epsilons and keeps its budgets.

        Raises:
            InvalidValueError: If no noise keeps an epsilon.
        """
        mechanism = self.uncalibrated()
        targets: dict[float, dict[str, float]] = {}  # by delta
        for group in self.groups:
            if group.epsilon is not None:
                targets.setdefault(group.delta or delta, {})[group.name] = group.epsilon
        for group_delta, epsilons in targets.items():
            mechanism = calibrate(mechanism, epsilons, rounds, group_delta, accountant)
        return mechanism


def min_noise_multiplier(epsilon_of: Callable[[float], float], target: float) -> float:
    """The smallest noise multiplier whose epsilon is at most a target.

    Args:
        epsilon_of: The epsilon of a noise multiplier; it must fall as the noise multiplier grows.
        target: The largest epsilon allowed.

    Returns:
        A noise multiplier whose epsilon is at most ``target`` and, where epsilon is continuous, at least 99.5% of it.

    Raises:
        InvalidValueError: If no noise multiplier reaches the target.
    """
    low = high = 0.0  # logarithms of noise multipliers, since epsilon is close to a power of the noise multiplier
    while (epsilon_low := epsilon_of(math.exp(low))) <= target and math.exp(low) > MIN_NOISE_MULTIPLIER:
        low -= 1
    while not (epsilon_high := epsilon_of(math.exp(high))) <= target:  # NaN is not enough noise
        rule = "larger: no noise can be shown to keep this one at such a delta"
        require(math.exp(high) < MAX_VALUE, "epsilon", target, rule)
        high += 1
    while epsilon_high < 0.995 * target and high - low > 1e-7:
        share = 0.5
        if epsilon_high > 0 and epsilon_low < math.inf:
            share = math.log(epsilon_low / (0.9975 * target)) / math.log(epsilon_low / epsilon_high)
        middle = low + min(max(share, 0.1), 0.9) * (high - low)
        if (epsilon := epsilon_of(math.exp(middle))) <= target:
            high, epsilon_high = middle, epsilon
        else:
            low, epsilon_low = middle, epsilon
    return math.exp(high)


@functools.lru_cache(maxsize=4096)
def noise_multiplier_for(
    epsilon: float,
    sampling_rate: float,
    rounds: int,
    delta: float,
    accountant: Accountant | None = None,
    sampling: Sampling = "poisson",
) -> float:
    """The noise multiplier that keeps rounds within an epsilon. ``accountant``: as in `calibrate`.

    Returns:
        A multiple of the L2 sensitivity (``fixed``: of two clips) whose epsilon is at most ``epsilon`` and within 1% of
        it; 0 for infinity.

    Raises:
        InvalidValueError: If a value is out of range, or no noise keeps the epsilon.
    """
    require(epsilon > 0, "epsilon", epsilon, "above 0")
    accountant = accountant or default_accountant(sampling)
    cost = PrivacyCost(math.inf, sampling_rate, sampling, rounds).checked()
    if epsilon == math.inf:
        return 0.0
    require(sampling_rate > 0, "sampling_rate", sampling_rate, "above 0 where epsilon is finite")
    require(rounds > 0, "rounds", rounds, "above 0 where epsilon is finite")
    if accountant == "pld":
        rule = f"at most {MAX_ROUNDS_PLD:,} where noise is calibrated by PLD, or it takes minutes"
        require(rounds <= MAX_ROUNDS_PLD, "rounds", rounds, rule)

    def epsilon_of(noise_multiplier: float) -> float:
        return compose([cost._replace(noise_multiplier=noise_multiplier)], delta, accountant) * (1 + ROUNDING)

    return min_noise_multiplier(epsilon_of, epsilon)


def calibrate(
    mechanism: Mechanism, targets: Mapping[str, float], rounds: int, delta: float, accountant: Accountant | None = None
) -> Mechanism:
    """Choose the noise multipliers of groups for the epsilons that they may reach.

    A group's noise multiplier alone costs at most its target and at least 99% of it. In the mechanism it may cost less:
    where other groups' noise covers it too, or its weight hides it.

    Args:
        mechanism: The mechanism to change.
        targets: Epsilons by group name; infinity opts out. Other groups stay as they are.
        rounds: How many rounds will be run.
        delta: The delta of the epsilons.
        accountant: By which epsilons are computed. None: PLD for Poisson sampling and RDP for fixed cohorts. For rounds
            that a ledger charges it must be RDP, as the ledger's, or budgets end before the last round.

    Returns:
        The mechanism whose ``epsilon`` is at most the target for each of these groups.

    Raises:
        InvalidValueError: If a target names no group, or no noise keeps it.
    """
    accountant = accountant or default_accountant(mechanism.sampling)
    names = [group.name for group in mechanism.groups]
    unknown = sorted(set(targets) - set(names))
    require(not unknown, "targets", unknown, f"groups of the mechanism ({', '.join(names)})")

    def calibrated(group: PrivacyGroup) -> PrivacyGroup:
        if group.name not in targets:
            return group
        rate, sampling = mechanism.sampling_probability(group), mechanism.sampling
        noise_multiplier = noise_multiplier_for(targets[group.name], rate, rounds, delta, accountant, sampling)
        return msgspec.structs.replace(group, noise_multiplier=noise_multiplier * SENSITIVITY[sampling])

    return msgspec.structs.replace(mechanism, groups=tuple(map(calibrated, mechanism.groups)))


def weight_of_own_noise(mechanism: Mechanism, group: PrivacyGroup) -> float:
    """The weight at which a group's effective noise multiplier is its own; a larger one adds noise to the update.

    Returns:
        The weight; infinity where the mechanism adds no noise to the update.
    """
    require(not group.opted_out, "group", group.name, "one with noise")
    noise = mechanism.update_noise_stddev / mechanism.clip_l2_norm
    return noise / mechanism.update_noise_multiplier(group) if noise > 0 else math.inf


def explain_surplus(mechanism: Mechanism, group: PrivacyGroup) -> str | None:
    """Why a group has more noise than it asked for, and which weight would use it; None where it has no more."""
    if group.opted_out or group not in mechanism.sampled_groups:
        return None
    effective = mechanism.effective_noise_multiplier(group)
    if effective <= SURPLUS * group.noise_multiplier:
        return None
    weight = weight_of_own_noise(mechanism, group)
    use = "any weight above 0" if weight == math.inf else f"weight {weight:.3g} instead of {group.weight:g}"
    if group.weight == 0:
        reason = "its weight is 0, so that its updates do not count"
    else:
        strictest = max(
            mechanism.sampled_groups, key=lambda g: mechanism.l2_sensitivity(g) * mechanism.update_noise_multiplier(g)
        )
        reason = f"the noise that {strictest.name!r} requires covers it"
    noise = "∞" if effective == math.inf else f"{effective:.4g}"
    return f"z {noise} instead of {group.noise_multiplier:.4g}: {reason}; {use} would use it"
