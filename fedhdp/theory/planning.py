"""Before anything is run: what privacy levels and their shares of the clients mean for noise, weights and one another.

A plan is read off a ``Mechanism``: levels become groups, ``calibrate`` gives each its noise, the theory its weight. All
lengths are in clips. A round's update is the weighted sum of clipped updates and one noise, over what is expected. What
is looked for, the mean of everybody's clipped updates, is at most one clip long; the mean of T rounds misses it by

    noise        sigma sqrt(d / T) / W              sigma = max_j r_j z_j, W = sum_j q N_j r_j, d parameters
    sampling     sqrt(sum_j q N_j r_j^2 / T) / W    who happened to come
    imbalance    sqrt(sum_j N_j r_j^2 / (sum_j N_j r_j)^2 - 1 / N)    who is hardly heard

The weights are those of least error, all three together: the theory's, with sigma_c^2 = q + q^2 T and noise d z_j^2.
Derivation and limits: docs/how-to/plan.md. Axis letters: G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from fedhdp.algorithms import dp_fedavg, hdp_fedavg, non_private
from fedhdp.errors import require
from fedhdp.mechanism import AdaptiveClip, Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import epsilon
from fedhdp.privacy.calibration import calibrate
from fedhdp.theory import linear_regression, shared_noise

PAPERS_PARAMETERS = 39_760  # a network of 784, 50 and 10 units


class Level(msgspec.Struct, frozen=True):
    """A privacy level that clients may choose, and the share of them who do; infinity is opting out."""

    name: str
    epsilon: float
    share: float

    def __post_init__(self) -> None:
        require(self.name != "", "level", self.name, "given a name")
        require(self.epsilon > 0, f"epsilon of {self.name!r}", self.epsilon, "above 0")
        require(0 < self.share <= 1, f"share of {self.name!r}", self.share, "above 0 and at most 1")


class ErrorEstimate(msgspec.Struct, frozen=True):
    """What reaches the model, in clips: the noise of a round, and how far the mean of all rounds is from everybody's."""

    noise_per_parameter: float  # of one round, on each parameter
    noise_of_a_round: float  # of one round, on all parameters together
    noise: float
    sampling: float
    imbalance: float
    error: float  # the three together; the mean that is looked for is at most 1


class PlannedLevel(msgspec.Struct, frozen=True):
    """What one level needs, gets and weighs."""

    name: str
    clients: int
    clients_a_round: float
    opted_out: bool
    epsilon_asked: float
    noise_multiplier: float
    weight: float
    weight_per_group: float  # were every group noised by itself, as the paper has it
    weight_share: float  # the level's part of the weighted mean
    epsilon_rdp: float  # of the noise it really gets
    epsilon_pld: float


class Cost(msgspec.Struct, frozen=True):
    """What a level's choice costs everybody, beside two worlds without it; None where there is no such world."""

    name: str
    without: ErrorEstimate | None  # these clients do not take part at all
    opted_out: ErrorEstimate | None  # they take part, and ask for no privacy
    unweighed_without: ErrorEstimate | None  # as the first, with every update the same weight


class Plan(msgspec.Struct, frozen=True):
    """A mechanism with the weights that theory suggests, and what to expect of it and of its alternatives."""

    clients: int
    cohort: float
    rounds: int
    delta: float
    parameters: int
    mechanism: Mechanism
    levels: tuple[PlannedLevel, ...]
    error_estimates: dict[str, ErrorEstimate]  # by algorithm
    costs: tuple[Cost, ...]


def plan(
    clients: int,
    cohort: float,
    rounds: int,
    delta: float,
    levels: Sequence[Level],
    parameters: int = PAPERS_PARAMETERS,
) -> Plan:
    """The noise, the weights, and what they let through, for clients who choose among levels."""
    require(clients >= 1, "clients", clients, "at least 1")
    require(0 < cohort <= clients, "cohort", cohort, f"above 0 and at most the {clients} clients")
    require(rounds >= 1, "rounds", rounds, "at least 1")
    require(parameters >= 1, "parameters", parameters, "at least 1")
    chosen = _mechanism(clients, cohort / clients, levels)
    asked = {level.name: level.epsilon for level in levels}
    chosen = with_optimal_weights(calibrate(chosen, asked, rounds, delta), rounds, parameters)
    return Plan(
        clients,
        cohort,
        rounds,
        delta,
        parameters,
        chosen,
        levels=_planned(chosen, asked, rounds, delta, parameters),
        error_estimates={
            "fedhdp": estimate_error(chosen, rounds, parameters),
            "fedhdp_per_group": estimate_error(
                with_optimal_weights(replace(chosen, noise="per_group"), rounds, parameters), rounds, parameters
            ),
            "hdp_fedavg": estimate_error(hdp_fedavg(chosen), rounds, parameters),
            "dp_fedavg": estimate_error(dp_fedavg(chosen), rounds, parameters),
            "non_private": estimate_error(non_private(chosen), rounds, parameters),
        },
        costs=tuple(_cost(chosen, group, rounds, parameters) for group in chosen.groups),
    )


def estimate_error(mechanism: Mechanism, rounds: int, parameters: int, everybody: int | None = None) -> ErrorEstimate:
    """What of some rounds reaches a model of so many parameters; everybody: more clients than take part."""
    n_G = np.array([mechanism.expected_cohort_size(group) for group in mechanism.groups])
    N_G = np.array([group.clients for group in mechanism.groups])
    r_G = np.array([group.weight for group in mechanism.groups])
    each = mechanism.update_noise_stddev / mechanism.expected_weight
    of_a_round = each * math.sqrt(parameters)
    noise = of_a_round / math.sqrt(rounds)
    sampling = math.sqrt(float(n_G @ r_G**2) / rounds) / mechanism.expected_weight
    imbalance = math.sqrt(max(0.0, float(N_G @ r_G**2) / float(N_G @ r_G) ** 2 - 1 / (everybody or mechanism.clients)))
    return ErrorEstimate(each, of_a_round, noise, sampling, imbalance, math.hypot(noise, sampling, imbalance))


def with_optimal_weights(mechanism: Mechanism, rounds: int, parameters: int) -> Mechanism:
    """The mechanism with the weights of least error, which are relative to the level that is owed least."""
    theory = shared_noise if mechanism.noise == "shared" else linear_regression
    weight_G = theory.optimal_weights(_problem(mechanism, rounds, parameters)).tolist()
    return replace(mechanism, groups=tuple(replace(g, weight=r) for g, r in zip(mechanism.groups, weight_G)))


def _problem(mechanism: Mechanism, rounds: int, parameters: int) -> linear_regression.Problem:
    """All rounds as the theory's problem, in squared clips over T: a client spreads by q + q^2 T, the noise by d z^2."""
    rate = mechanism.expected_cohort_size() / mechanism.clients
    owed = ((g, parameters * mechanism.update_noise_multiplier(g) ** 2) for g in mechanism.groups)
    levels = tuple(linear_regression.Level(g.name, g.clients, noise / g.clients**2) for g, noise in owed)
    return linear_regression.Problem(levels, alpha2=rate, tau2=rate**2 * rounds)


def _mechanism(clients: int, rate: float, levels: Sequence[Level]) -> Mechanism:
    """The levels as groups, without noise or weights as yet."""
    require(len(levels) >= 1, "levels", levels, "at least one level")
    total = math.fsum(level.share for level in levels)
    require(abs(total - 1) < 1e-6, "shares", total, "shares that add to 100%")
    for level in levels:
        require(
            level.share * clients >= 1, f"share of {level.name!r}", level.share, f"one of {clients} clients or more"
        )
    shares = [level.share / total for level in levels]
    split = linear_regression.levels_from_shares(clients, shares, [0.0] * len(levels))
    groups = tuple(PrivacyGroup(level.name, part.clients, 0.0, rate) for level, part in zip(levels, split))
    return Mechanism(groups, AdaptiveClip(initial=0.5))


def _planned(
    mechanism: Mechanism, asked: dict[str, float], rounds: int, delta: float, parameters: int
) -> tuple[PlannedLevel, ...]:
    own = with_optimal_weights(replace(mechanism, noise="per_group"), rounds, parameters)
    rdp, pld = epsilon(mechanism, rounds, delta, "rdp"), epsilon(mechanism, rounds, delta, "pld")
    return tuple(
        PlannedLevel(
            group.name,
            group.clients,
            mechanism.expected_cohort_size(group),
            group.opted_out,
            asked[group.name],
            group.noise_multiplier,
            group.weight,
            alone.weight,
            group.weight * mechanism.expected_cohort_size(group) / mechanism.expected_weight,
            rdp[group.name],
            pld[group.name],
        )
        for group, alone in zip(mechanism.groups, own.groups)
    )


def _cost(mechanism: Mechanism, group: PrivacyGroup, rounds: int, parameters: int) -> Cost:
    """What the others would have without these clients, weighed or not, and with them if they asked for nothing."""
    others = tuple(other for other in mechanism.groups if other != group)
    without = replace(mechanism, groups=others) if others else None
    open_ = tuple(replace(g, noise_multiplier=0.0) if g == group else g for g in mechanism.groups)

    def at_best(changed: Mechanism) -> ErrorEstimate:
        return estimate_error(with_optimal_weights(changed, rounds, parameters), rounds, parameters, mechanism.clients)

    return Cost(
        group.name,
        without=at_best(without) if without else None,
        opted_out=None if group.opted_out else at_best(replace(mechanism, groups=open_)),
        unweighed_without=estimate_error(hdp_fedavg(without), rounds, parameters, mechanism.clients)
        if without
        else None,
    )
