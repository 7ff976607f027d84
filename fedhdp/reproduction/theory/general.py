"""Beyond the paper's diagonal assumption: clients with unequal sample counts and features of any covariance.

Client j has n_j samples of features F_j. Its least-squares estimate has the error matrix C_j = beta2 (F_j' F_j)^-1, its
update S_j = C_j + (tau2 + noise_j) I. The server's optimum (Gauss-Markov) and the client's (Bayes) weight by matrices;
FedHDP has one number per group for each. Its local objective |F_j x - y_j|^2 / (2 n_j) + pull/2 |x - global|^2 blends
by pull (H_j + pull I)^-1 with H_j = F_j' F_j / n_j. This module computes both optima and the loss of FedHDP against them.
Errors are per coordinate.

Axis letters: N clients, G groups, D coordinates (twice: a matrix).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from fedhdp.errors import require
from fedhdp.theory.linear_regression import TheoryGroup


class GeneralProblem(msgspec.Struct, frozen=True):
    """Every client's error matrix and curvature; clients are in the order of the groups."""

    groups: tuple[TheoryGroup, ...]
    tau2: float
    error_NDD: np.ndarray  # C_j
    curvature_NDD: np.ndarray  # H_j

    @property
    def group_N(self) -> np.ndarray:
        """The group of each client."""
        return np.repeat(np.arange(len(self.groups)), [group.clients for group in self.groups])

    @property
    def noise_N(self) -> np.ndarray:
        """The variance of the noise on each client's update."""
        return np.array([group.clients * group.gamma2 for group in self.groups])[self.group_N]

    @property
    def update_NDD(self) -> np.ndarray:
        """S_j, the error matrix of each update around the global truth."""
        return self.error_NDD + (self.tau2 + self.noise_N)[:, None, None] * np.eye(self.error_NDD.shape[-1])


class GeneralLoss(msgspec.Struct, frozen=True):
    """The optima beside FedHDP at its best weights and pulls; client errors are means over a group."""

    server_optimal: float
    server_fedhdp: float
    client_optimal: tuple[float, ...]
    client_fedhdp: tuple[float, ...]
    weights: tuple[float, ...]
    pulls: tuple[float, ...]

    @property
    def server_loss(self) -> float:
        """The relative excess of FedHDP's server error over the optimum."""
        return self.server_fedhdp / self.server_optimal - 1

    @property
    def client_loss(self) -> tuple[float, ...]:
        """The relative excess of the clients' error over the optimum, for each group."""
        return tuple(fedhdp / best - 1 for fedhdp, best in zip(self.client_fedhdp, self.client_optimal, strict=True))


def from_features(
    groups: Sequence[TheoryGroup], features: Sequence[np.ndarray], beta2: float, tau2: float
) -> GeneralProblem:
    """The problem of clients with these features (samples by coordinates), in the order of the groups."""
    clients = sum(group.clients for group in groups)
    require(len(features) == clients >= 2, "features", len(features), f"one for each of {clients} clients, at least 2")
    require(all(group.gamma2 < np.inf for group in groups), "gamma2", np.inf, "finite")
    require(0 <= tau2 < np.inf, "tau2", tau2, "finite and at least 0")
    require(0 < beta2 < np.inf, "beta2", beta2, "finite and above 0")
    squares = np.stack([F.T @ F for F in features])
    ranks = np.linalg.matrix_rank(squares)
    require(bool(np.all(ranks == squares.shape[-1])), "features", int(ranks.min()), "of full rank for every client")
    samples_N = np.array([len(F) for F in features], float)
    return GeneralProblem(tuple(groups), tau2, beta2 * np.linalg.inv(squares), squares / samples_N[:, None, None])


def random_features(
    clients: int, samples: tuple[int, int], covariance_DD: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Gaussian features for clients; ``samples`` is the range of their sample counts."""
    require(samples[0] > len(covariance_DD), "samples", samples, "more than there are coordinates")
    root_DD = np.linalg.cholesky(covariance_DD)
    counts = rng.integers(samples[0], samples[1], size=clients, endpoint=True)
    return [rng.standard_normal((count, len(covariance_DD))) @ root_DD.T for count in counts]


def optimal_server_error(problem: GeneralProblem) -> np.ndarray:
    """Gauss-Markov: the inverse of the summed precisions."""
    return np.linalg.inv(np.linalg.inv(problem.update_NDD).sum(axis=0))


def optimal_client_errors(problem: GeneralProblem) -> np.ndarray:
    """Bayes: the other clients' updates as prior, the local estimate as likelihood; an error for each client."""
    precision_NDD = np.linalg.inv(problem.update_NDD)
    others_prior_NDD = np.linalg.inv(precision_NDD.sum(axis=0) - precision_NDD)
    prior_NDD = others_prior_NDD + problem.tau2 * np.eye(others_prior_NDD.shape[-1])
    posterior_NDD = np.linalg.inv(np.linalg.inv(prior_NDD) + np.linalg.inv(problem.error_NDD))
    return _per_coordinate(posterior_NDD)


def fedhdp_weights(problem: GeneralProblem) -> np.ndarray:
    """The best weight of each group, relative to the first: the inverse of its clients' mean error."""
    error_N = _per_coordinate(problem.update_NDD)
    mean_G = np.array([error_N[problem.group_N == g].mean() for g in range(len(problem.groups))])
    return mean_G[0] / mean_G


def fedhdp_server_error(problem: GeneralProblem, weights: ArrayLike) -> np.ndarray:
    """The error matrix of the server's weighted mean."""
    w_N = _client_weights(problem, weights)
    return np.einsum("n,nde->de", w_N**2, problem.update_NDD)


def fedhdp_client_errors(problem: GeneralProblem, weights: ArrayLike, pull: float) -> np.ndarray:
    """The exact error of every client's personal estimate at one pull, with its own noise in the global estimate."""
    w_N = _client_weights(problem, weights)[:, None, None]
    eye = np.eye(problem.error_NDD.shape[-1])
    blend_NDD = pull * np.linalg.inv(problem.curvature_NDD + pull * eye)
    own_NDD = eye - (1 - w_N) * blend_NDD
    others_NDD = fedhdp_server_error(problem, weights) - w_N**2 * problem.update_NDD
    rest_NDD = others_NDD + ((1 - w_N) ** 2 * problem.tau2 + w_N**2 * problem.noise_N[:, None, None]) * eye
    return _per_coordinate(_sandwich(own_NDD, problem.error_NDD) + _sandwich(blend_NDD, rest_NDD))


def fedhdp_pulls(problem: GeneralProblem, weights: ArrayLike) -> np.ndarray:
    """The best pull of each group, by a search over its logarithm."""

    def error(log_pull: float, group: int) -> float:
        return fedhdp_client_errors(problem, weights, np.exp(log_pull))[problem.group_N == group].mean()

    def lowest(group: int) -> float:
        result: Any = minimize_scalar(error, bounds=(-12, 12), args=(group,), method="bounded")
        return result.x

    return np.exp([lowest(g) for g in range(len(problem.groups))])


def compare(problem: GeneralProblem) -> GeneralLoss:
    """Compare FedHDP at its best weights and pulls with the optima."""
    weight_G = fedhdp_weights(problem)
    pull_G = fedhdp_pulls(problem, weight_G)
    best_N = optimal_client_errors(problem)
    fedhdp_N = np.choose(problem.group_N, [fedhdp_client_errors(problem, weight_G, pull) for pull in pull_G])
    members = [problem.group_N == g for g in range(len(problem.groups))]
    return GeneralLoss(
        server_optimal=float(_per_coordinate(optimal_server_error(problem))),
        server_fedhdp=float(_per_coordinate(fedhdp_server_error(problem, weight_G))),
        client_optimal=tuple(float(best_N[member].mean()) for member in members),
        client_fedhdp=tuple(float(fedhdp_N[member].mean()) for member in members),
        weights=tuple(weight_G.tolist()),
        pulls=tuple(pull_G.tolist()),
    )


def _client_weights(problem: GeneralProblem, weights: ArrayLike) -> np.ndarray:
    weight_N = np.asarray(weights, float)[problem.group_N]
    return weight_N / weight_N.sum()


def _per_coordinate(error_DD: np.ndarray) -> np.ndarray:
    return np.trace(error_DD, axis1=-2, axis2=-1) / error_DD.shape[-1]


def _sandwich(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    return outer @ inner @ np.swapaxes(outer, -1, -2)
