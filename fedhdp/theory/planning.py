"""Plan before running: the noise, weights and expected error of privacy levels and their shares of the clients.

Levels become the groups of a ``Mechanism``, ``calibrate`` sets their noise, and the theory sets their weights. All lengths
are in units of the clip. A round's update is the weighted sum of clipped updates plus noise, over its expected weight.
The target is the mean of all clients' clipped updates, of length at most 1. The mean of T rounds differs from it by

    noise            sigma sqrt(d / T) / W              sigma = max_j r_j z_j, W = sum_j q N_j r_j, d parameters
    sampling         sqrt(sum_j q N_j r_j^2 / T) / W    from the random cohorts
    weighting bias   sqrt(sum_j N_j (q_j r_j)^2 / (sum_j N_j q_j r_j)^2 - 1 / N)    from unequal weights

The weights minimize the three together: they are the theory's, with sigma_c^2 = q + q^2 T and noise d z_j^2.
Derivation and limits: docs/how-to/plan.md. Axis letters: G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from fedhdp.algorithms import dp_fedavg, hdp_fedavg, non_private
from fedhdp.clips import AdaptiveClip
from fedhdp.errors import require
from fedhdp.mechanism import MAX_VALUE, MIN_WEIGHT, Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import Accountant, epsilon
from fedhdp.privacy.calibration import calibrate
from fedhdp.theory import linear_regression, shared_noise

_THEORY = {"shared": shared_noise, "per_group": linear_regression}
MLP_PARAMETERS = 39_760  # the paper's network for MNIST: 784, 50 and 10 units


class LevelShare(msgspec.Struct, frozen=True):
    """A privacy level and the share of clients who choose it; an infinite epsilon opts out."""

    name: str
    epsilon: float
    share: float

    def __post_init__(self) -> None:
        require(self.name != "", "level", self.name, "a name")
        require(self.epsilon > 0, f"epsilon of {self.name!r}", self.epsilon, "above 0")
        require(0 < self.share <= 1, f"share of {self.name!r}", self.share, "above 0 and at most 1")


class ErrorEstimate(msgspec.Struct, frozen=True):
    """The expected error of the model, in units of the clip: of one round, and of the mean over rounds."""

    noise_per_parameter: float  # one round, standard deviation on each parameter
    noise_per_round: float  # one round, norm over all parameters
    noise: float
    sampling: float
    weighting_bias: float
    error: float  # root of the sum of squares of the last three


class PlannedLevel(msgspec.Struct, frozen=True):
    """The noise, weights and epsilons of one level."""

    name: str
    clients: int
    expected_cohort_size: float
    opted_out: bool
    target_epsilon: float
    noise_multiplier: float
    weight: float
    weight_per_group: float  # where noise is added per group, as in the paper
    weight_share: float  # the level's share of the weighted mean
    epsilon: float  # of its effective noise


class LevelCost(msgspec.Struct, frozen=True):
    """The error of the model if a level's clients chose otherwise; None where that is not possible."""

    name: str
    without: ErrorEstimate | None  # these clients do not participate
    opted_out: ErrorEstimate | None  # these clients opt out
    equal_weights_without: ErrorEstimate | None  # as `without`, with equal weights


class Plan(msgspec.Struct, frozen=True):
    """A mechanism with the theory's weights, and the expected error of it and of its alternatives."""

    clients: int
    cohort: float
    rounds: int
    delta: float
    parameters: int
    accountant: Accountant
    mechanism: Mechanism
    levels: tuple[PlannedLevel, ...]
    error_estimates: dict[str, ErrorEstimate]  # by algorithm
    costs: tuple[LevelCost, ...]


def plan(
    clients: int,
    cohort: float,
    rounds: int,
    delta: float,
    levels: Sequence[LevelShare],
    parameters: int = MLP_PARAMETERS,
    accountant: Accountant = "pld",
) -> Plan:
    """Calibrate the noise, choose the weights and estimate the error.

    Args:
        clients: The size of the population.
        cohort: The expected number of clients in a round.
        rounds: The number of rounds.
        delta: Of every level's guarantee.
        levels: The levels, whose shares add to one.
        parameters: The number of the model's parameters.
        accountant: ``rdp`` for runs with a ledger, else ``pld``.

    Raises:
        InvalidValueError: If an argument is out of range, or the shares do not add to one.
    """
    require(clients >= 1, "clients", clients, "at least 1")
    require(0 < cohort <= clients, "cohort", cohort, f"above 0 and at most the {clients} clients")
    require(rounds >= 1, "rounds", rounds, "at least 1")
    require(parameters >= 1, "parameters", parameters, "at least 1")
    targets = {level.name: level.epsilon for level in levels}
    calibrated = calibrate(_uncalibrated(clients, cohort / clients, levels), targets, rounds, delta, accountant)
    mechanism = with_optimal_weights(calibrated, rounds, parameters)
    per_group = with_optimal_weights(replace(mechanism, noise="per_group"), rounds, parameters)
    algorithms = {
        "fedhdp": mechanism,
        "fedhdp_per_group": per_group,
        "hdp_fedavg": hdp_fedavg(mechanism),
        "dp_fedavg": dp_fedavg(mechanism),
        "non_private": non_private(mechanism),
    }
    return Plan(
        clients,
        cohort,
        rounds,
        delta,
        parameters,
        accountant,
        mechanism,
        levels=_planned_levels(mechanism, per_group, targets, epsilon(mechanism, rounds, delta, accountant)),
        error_estimates={name: estimate_error(m, rounds, parameters) for name, m in algorithms.items()},
        costs=tuple(_level_cost(mechanism, group, rounds, parameters) for group in mechanism.groups),
    )


def estimate_error(mechanism: Mechanism, rounds: int, parameters: int, clients: int | None = None) -> ErrorEstimate:
    """Estimate the error of the mean of all rounds for a model with so many parameters.

    ``clients`` is the size of the population. None: all clients are in the mechanism.
    """
    cohort_G = np.array([mechanism.expected_cohort_size(group) for group in mechanism.groups])
    clients_G = np.array([group.clients for group in mechanism.groups])
    weight_G = np.array([group.weight for group in mechanism.groups])
    noise_per_parameter = mechanism.update_noise_stddev / mechanism.expected_weight
    noise_per_round = noise_per_parameter * math.sqrt(parameters)
    noise = noise_per_round / math.sqrt(rounds)
    sampling = math.sqrt(float(cohort_G @ weight_G**2) / rounds) / mechanism.expected_weight
    share_G = weight_G * cohort_G / clients_G  # what a client counts over many rounds
    spread = float(clients_G @ share_G**2) / float(clients_G @ share_G) ** 2
    bias = math.sqrt(max(0.0, spread - 1 / (clients or mechanism.clients)))
    return ErrorEstimate(noise_per_parameter, noise_per_round, noise, sampling, bias, math.hypot(noise, sampling, bias))


def with_optimal_weights(
    mechanism: Mechanism,
    rounds: int,
    parameters: int | Callable[[], int],
    names: Collection[str] | None = None,
) -> Mechanism:
    """The mechanism with the weights of least error.

    Weights are relative to the group with the least noise among those that count: its weight is 1 if it is not given.
    Given weights stay as they are; the others have the least error beside them.

    Args:
        mechanism: The mechanism.
        rounds: The number of rounds.
        parameters: The number of the model's parameters, or what counts them, called if a weight depends on it.
        names: The groups whose weights to set; None: all. The others' weights are given.

    Raises:
        InvalidValueError: If a name is of no group.
    """
    every = [group.name for group in mechanism.groups]
    names = every if names is None else names
    unknown = sorted(set(names) - set(every))
    require(not unknown, "names", unknown, f"groups of the mechanism ({', '.join(every)})")
    given_G = np.array([math.nan if group.name in names else group.weight for group in mechanism.groups])
    weight_G = _with_reference(mechanism, given_G)
    if mechanism.expected_cohort_size() == 0:
        weight_G = np.nan_to_num(weight_G, nan=1.0)
    elif np.isnan(weight_G).any():
        count = parameters() if callable(parameters) else parameters
        problem, theory = _problem(mechanism, rounds, count), _THEORY[mechanism.noise]
        every_is_free = np.isnan(given_G).all()
        weight_G = (
            theory.optimal_weights(problem) if every_is_free else theory.optimal_weights_beside(problem, weight_G)
        )
    weights = np.where(weight_G > 0, np.clip(weight_G, MIN_WEIGHT, MAX_VALUE), 0.0).tolist()
    groups = tuple(replace(group, weight=r) for group, r in zip(mechanism.groups, weights, strict=True))
    return replace(mechanism, groups=groups)


def _with_reference(mechanism: Mechanism, given_G: np.ndarray) -> np.ndarray:
    """The given weights, and 1 for the group with the least noise among those that count, if it is not given."""
    noise_G = np.array(
        [math.inf if r == 0 else g.noise_multiplier for g, r in zip(mechanism.groups, given_G, strict=True)]
    )
    least_G = noise_G == noise_G.min()
    if not np.isnan(given_G).any() or not np.isnan(given_G[least_G]).all():
        return given_G
    return np.where(np.arange(len(given_G)) == least_G.argmax(), 1.0, given_G)


def _problem(mechanism: Mechanism, rounds: int, parameters: int) -> linear_regression.Problem:
    """All rounds as the theory's problem, in squared clips over T: a client has variance q + q^2 T, the noise d z^2."""
    rate = mechanism.expected_cohort_size() / mechanism.clients
    groups = []
    for group in mechanism.groups:
        noise = parameters * mechanism.update_noise_multiplier(group) ** 2
        groups.append(linear_regression.TheoryGroup(group.name, group.clients, noise / group.clients**2))
    return linear_regression.Problem(tuple(groups), alpha2=rate, tau2=rate**2 * rounds)


def _uncalibrated(clients: int, rate: float, levels: Sequence[LevelShare]) -> Mechanism:
    """The levels as groups without noise, of weight 1."""
    require(len(levels) >= 1, "levels", levels, "at least one level")
    total = math.fsum(level.share for level in levels)
    require(abs(total - 1) < 1e-6, "shares", total, "shares that add to 100%")
    for level in levels:
        rule = f"large enough for one of {clients} clients"
        require(level.share * clients >= 1, f"share of {level.name!r}", level.share, rule)
    shares = [level.share / total for level in levels]
    split = linear_regression.groups_from_shares(clients, shares, [0.0] * len(levels))
    pairs = zip(levels, split, strict=True)
    groups = tuple(PrivacyGroup(level.name, part.clients, 0.0, rate) for level, part in pairs)
    return Mechanism(groups, AdaptiveClip(initial=0.5))


def _planned_levels(
    mechanism: Mechanism, per_group: Mechanism, targets: dict[str, float], epsilons: dict[str, float]
) -> tuple[PlannedLevel, ...]:
    return tuple(
        PlannedLevel(
            group.name,
            group.clients,
            mechanism.expected_cohort_size(group),
            group.opted_out,
            targets[group.name],
            group.noise_multiplier,
            group.weight,
            same_group.weight,
            group.weight * mechanism.expected_cohort_size(group) / mechanism.expected_weight,
            epsilons[group.name],
        )
        for group, same_group in zip(mechanism.groups, per_group.groups, strict=True)
    )


def _level_cost(mechanism: Mechanism, group: PrivacyGroup, rounds: int, parameters: int) -> LevelCost:
    """The error without these clients, with and without optimal weights, and the error if they opted out."""

    def error(changed: Mechanism) -> ErrorEstimate:
        return estimate_error(changed, rounds, parameters, mechanism.clients)

    def optimal_error(changed: Mechanism) -> ErrorEstimate:
        return error(with_optimal_weights(changed, rounds, parameters))

    without = equal_weights_without = opted_out = None
    if others := tuple(other for other in mechanism.groups if other != group):
        remaining = replace(mechanism, groups=others)
        without, equal_weights_without = optimal_error(remaining), error(hdp_fedavg(remaining))
    if not group.opted_out:
        changed = tuple(replace(g, noise_multiplier=0.0) if g == group else g for g in mechanism.groups)
        opted_out = optimal_error(replace(mechanism, groups=changed))
    return LevelCost(group.name, without, opted_out, equal_weights_without)


def describe_gain(plan: Plan) -> str:
    """One sentence: the error of DP-FedAvg, which gives all clients the strictest level."""
    strictest = max(plan.levels, key=lambda level: level.noise_multiplier)
    if strictest.opted_out:
        return "All clients opted out, so there is no noise."
    ratio = plan.error_estimates["dp_fedavg"].error / plan.error_estimates["fedhdp"].error
    comparison = "the same" if math.isclose(ratio, 1, rel_tol=0.005) else f"{ratio:.2g} times the planned one"
    return f"With all clients at the level {strictest.name!r}, which is DP-FedAvg, the error is {comparison}."
