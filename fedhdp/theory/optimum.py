"""The best weights, pulls and errors for given groups, and those of the baselines.

All results are records that msgspec writes as JSON. A baseline is the same closed form at other weights and other noise,
with its best Ditto pull (paper: section 3.1.1).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from fedhdp.mechanism import Mechanism, Noise, PrivacyGroup
from fedhdp.theory import linear_regression, shared_noise
from fedhdp.theory.linear_regression import Problem, TheoryGroup, quotient


class GroupOptimum(msgspec.Struct, frozen=True):
    """FedHDP for the clients of one group.

    ``client_mse`` is the error at ``pull`` and ``client_mse_own_noise`` at ``pull_own_noise``, both with the client's
    own noise in the global estimate. ``bayes_mse`` is the error at ``pull`` if the client subtracts that noise.
    """

    name: str
    clients: int
    weight: float
    pull: float
    pull_own_noise: float
    client_mse: float
    client_mse_own_noise: float
    bayes_mse: float


class BaselineGroup(msgspec.Struct, frozen=True):
    """A baseline for the clients of one group, at its best pull."""

    name: str
    weight: float
    pull: float
    client_mse: float


class Baseline(msgspec.Struct, frozen=True):
    """A baseline; ``server_variance`` is None without a server."""

    server_variance: float | None
    groups: tuple[BaselineGroup, ...]


class Optimum(msgspec.Struct, frozen=True):
    """FedHDP at its optimum, the baselines, and FedHDP with one shared noise instead of one for each group."""

    server_variance: float
    groups: tuple[GroupOptimum, ...]
    baselines: dict[str, Baseline]


def find_optimum(problem: Problem) -> Optimum:
    """Compute the best weights, pulls and errors; weights are relative to the first group."""
    weight_G = linear_regression.optimal_weights(problem)
    pull_G, own_G = linear_regression.optimal_pulls(problem), linear_regression.own_noise_pulls(problem)
    columns = (
        quotient(weight_G, weight_G[0], 1.0),
        pull_G,
        own_G,
        linear_regression.client_mse(problem, weight_G, pull_G),
        linear_regression.client_mse(problem, weight_G, own_G),
        linear_regression.bayes_mse(problem),
    )
    rows = zip(problem.groups, *(column.tolist() for column in columns), strict=True)
    return Optimum(
        server_variance=linear_regression.optimal_server_variance(problem),
        groups=tuple(GroupOptimum(group.name, group.clients, *numbers) for group, *numbers in rows),
        baselines=baselines(problem) | {"fedhdp_shared_noise": _shared(problem)},
    )


def baselines(problem: Problem) -> dict[str, Baseline]:
    """Equal weights without noise, with the strictest noise for all, with each group's noise; and local training only."""
    equal_G = np.ones(len(problem.groups))
    return {
        "non_private": _baseline(with_noise(problem, np.zeros(len(problem.groups))), equal_G),
        "dp_fedavg": _baseline(with_noise(problem, np.full(len(problem.groups), problem.noise_G.max())), equal_G),
        "hdp_fedavg": _baseline(problem, equal_G),
        "local_only": Baseline(None, _groups(problem, equal_G * 0, equal_G * 0, equal_G * problem.alpha2)),
    }


def with_noise(problem: Problem, noise_G: ArrayLike) -> Problem:
    """The same clients with this noise variance on each group's updates."""
    pairs = zip(problem.groups, np.asarray(noise_G, float).tolist(), strict=True)
    groups = tuple(TheoryGroup(group.name, group.clients, noise / group.clients) for group, noise in pairs)
    return Problem(groups, problem.alpha2, problem.tau2)


def make_mechanism(
    problem: Problem, weights: ArrayLike, pulls: ArrayLike, clip: float, noise: Noise = "per_group"
) -> Mechanism:
    """The mechanism with the theory's noise: standard deviation N_j gamma_j on the sum of group j's updates.

    In the theory each of N_j clients adds variance N_j gamma_j^2 to its update, hence (N_j gamma_j)^2 to the group's sum.
    The server adds the same to the sum. The clip must be above every update's norm, as the theory does not clip.
    """
    z_G = shared_noise.multipliers(problem) / clip
    weight_G, pull_G = (np.broadcast_to(np.asarray(a, float), z_G.shape).tolist() for a in (weights, pulls))
    rows = zip(problem.groups, z_G.tolist(), weight_G, pull_G, strict=True)
    groups = tuple(PrivacyGroup(group.name, group.clients, z, 1.0, weight, pull) for group, z, weight, pull in rows)
    return Mechanism(groups, clip=clip, noise=noise)


def _baseline(problem: Problem, weight_G: np.ndarray) -> Baseline:
    pull_G = linear_regression.best_pulls(problem, weight_G)
    mse_G = linear_regression.client_mse(problem, weight_G, pull_G)
    return Baseline(linear_regression.server_variance(problem, weight_G), _groups(problem, weight_G, pull_G, mse_G))


def _shared(problem: Problem) -> Baseline:
    weight_G = shared_noise.optimal_weights(problem)
    pull_G = shared_noise.optimal_pulls(problem, weight_G)
    mse_G = shared_noise.client_mse(problem, weight_G, pull_G)
    groups = _groups(problem, quotient(weight_G, weight_G[0], 1.0), pull_G, mse_G)
    return Baseline(shared_noise.server_variance(problem, weight_G), groups)


def _groups(problem: Problem, weight_G: np.ndarray, pull_G: np.ndarray, mse_G: np.ndarray) -> tuple[BaselineGroup, ...]:
    rows = zip(problem.groups, weight_G.tolist(), pull_G.tolist(), mse_G.tolist(), strict=True)
    return tuple(BaselineGroup(group.name, *numbers) for group, *numbers in rows)
