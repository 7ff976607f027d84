"""Federated linear regression with any number of privacy levels, in closed form (paper: section 3.1, appendix A).

A client's truth is the global truth plus heterogeneity of variance tau2. Its local estimate of it has variance alpha2.
Its update carries noise of variance N_i gamma_i^2, where N_i is the size of its group. All variances are per coordinate.
Coordinates are independent and alike, so the dimension does not appear. Three quantities determine all results:

    sigma2   alpha2 + tau2 + N_i gamma_i^2         variance of one update of group i around the global truth
    1 / T    server variance                       T sums the precisions 1 / sigma2 of all clients
    1 / P_j  variance without one client of j      P_j = T - 1 / sigma_j^2

Weights are relative: one for each group, shared by its clients. Limits (no noise, infinite noise, a single client,
tau2 = 0, alpha2 = 0) are values, not exceptions. Derivations: docs/theory.md.

Axis letters: G groups, J groups from the view of one client of them, N clients, D coordinates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from fedhdp.errors import require


class TheoryGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The clients of one privacy level: the mean of their updates carries noise of variance gamma2, which may be inf."""

    name: str
    clients: int
    gamma2: float

    def __post_init__(self) -> None:
        require(self.name != "", "name", self.name, "a name")
        is_count = 1 <= self.clients < math.inf and self.clients == int(self.clients)
        require(is_count, "clients", self.clients, "a whole number of at least 1")
        require(self.gamma2 >= 0, "gamma2", self.gamma2, "at least 0")


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The groups, least private first; the variance of a local estimate; the heterogeneity between clients."""

    groups: tuple[TheoryGroup, ...]
    alpha2: float
    tau2: float

    def __post_init__(self) -> None:
        require(len(self.groups) >= 1, "groups", self.groups, "at least one group")
        (name, count), *_ = Counter(group.name for group in self.groups).most_common(1)
        require(count == 1, "groups", name, "groups of different names")
        require(0 <= self.alpha2 < math.inf, "alpha2", self.alpha2, "finite and at least 0")
        require(0 <= self.tau2 < math.inf, "tau2", self.tau2, "finite and at least 0")

    @property
    def sigma_c2(self) -> float:
        """The variance of a local estimate around the global truth."""
        return self.alpha2 + self.tau2

    @property
    def clients_G(self) -> np.ndarray:
        """The number of clients of each group."""
        return np.array([group.clients for group in self.groups], float)

    @property
    def noise_G(self) -> np.ndarray:
        """The variance of the noise on one client's update, N_i gamma_i^2."""
        return product(self.clients_G, [group.gamma2 for group in self.groups])

    @property
    def sigma2_G(self) -> np.ndarray:
        """The variance of one client's update around the global truth."""
        return self.sigma_c2 + self.noise_G

    @property
    def others_JG(self) -> np.ndarray:
        """The number of other clients of each group, for a client of group j."""
        return self.clients_G - np.eye(len(self.groups))


def groups_from_shares(clients: int, shares: Sequence[float], gamma2: Sequence[float]) -> tuple[TheoryGroup, ...]:
    """Split clients into groups by shares that add to one, rounding by the largest remainder."""
    require(len(shares) == len(gamma2), "shares", list(shares), f"as many as the {len(gamma2)} values of gamma2")
    require(all(0 <= share <= 1 for share in shares), "shares", list(shares), "between 0 and 1")
    require(abs(math.fsum(shares) - 1) < 1e-9, "shares", list(shares), "shares that add to one")
    exact_G = clients * np.asarray(shares, float)
    count_G = np.floor(exact_G + 1e-9).astype(int)
    missing = clients - int(count_G.sum())
    count_G[np.argsort(count_G - exact_G, kind="stable")[:missing]] += 1
    return tuple(TheoryGroup(f"level {i + 1}", int(n), g) for i, (n, g) in enumerate(zip(count_G, gamma2, strict=True)))


def quotient(numerator: ArrayLike, denominator: ArrayLike, indeterminate: float) -> np.ndarray:
    """Divide, with ``indeterminate`` for 0/0 and inf/inf."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        result = np.divide(numerator, denominator)
    return np.where(np.isnan(result), indeterminate, result)


def product(factor: ArrayLike, other: ArrayLike) -> np.ndarray:
    """Multiply, with 0 times infinity as 0: a group of weight 0 adds no noise."""
    with np.errstate(invalid="ignore", over="ignore"):
        result = np.multiply(factor, other)
    return np.where(np.isnan(result), 0.0, result)


# The server (lemma: global estimate optimality)


def client_weights(problem: Problem, weights: ArrayLike) -> np.ndarray:
    """The weight of one client of each group, normalized over all clients."""
    weight_G = np.asarray(weights, float)
    require(weight_G.shape == (len(problem.groups),), "weights", weights, f"{len(problem.groups)} numbers")
    is_valid = bool(np.all(weight_G >= 0) and np.all(weight_G < np.inf) and np.any(weight_G > 0))
    require(is_valid, "weights", weights, "finite, at least 0 and not all 0")
    return weight_G / (problem.clients_G @ weight_G)


def server_variance(problem: Problem, weights: ArrayLike) -> float:
    """The error of the global estimate for any weights: sum_i N_i w_i^2 sigma_i^2."""
    w_G = client_weights(problem, weights)
    return float(np.sum(product(problem.clients_G * w_G**2, problem.sigma2_G)))


def optimal_weights(problem: Problem) -> np.ndarray:
    """r_i* = sigma_1^2 / sigma_i^2, relative to the group with the least noise."""
    return quotient(problem.sigma2_G.min(), problem.sigma2_G, 1.0)


def optimal_weights_beside(problem: Problem, given_G: np.ndarray) -> np.ndarray:
    """The weights of least error where some are given: r_j = sum N_i r_i^2 sigma_i^2 / (sigma_j^2 sum N_i r_i) over these.

    Args:
        problem: The groups.
        given_G: Their weights, of which one is above 0; NaN where the weight is to be found.
    """
    is_free_G = np.isnan(given_G)
    r_G = np.where(is_free_G, 0.0, given_G)
    numerator = np.sum(product(problem.clients_G * r_G**2, problem.sigma2_G)) / (problem.clients_G @ r_G)
    return np.where(is_free_G, quotient(numerator, problem.sigma2_G, 1.0), given_G)


def optimal_server_variance(problem: Problem) -> float:
    """1 / T, the least variance of any estimate from the updates."""
    return float(_pooled_variance(problem.sigma2_G, problem.clients_G))


def variance_without_one(problem: Problem) -> np.ndarray:
    """1 / P_j: the variance of the best estimate from all other clients' updates, for a client of group j."""
    return np.array([_pooled_variance(problem.sigma2_G, others_G) for others_G in problem.others_JG])


def _pooled_variance(sigma2_G: np.ndarray, clients_G: np.ndarray) -> float:
    """The variance of the best weighted mean over these clients; infinite without clients."""
    present_G = clients_G > 0
    if not present_G.any():
        return math.inf
    sigma2_G, clients_G = sigma2_G[present_G], clients_G[present_G]
    return sigma2_G.min() / float(clients_G @ quotient(sigma2_G.min(), sigma2_G, 1.0))


def global_estimate(updates_ND: np.ndarray, group_N: np.ndarray, weights: ArrayLike) -> np.ndarray:
    """The server's weighted mean of the updates."""
    weight_N = np.asarray(weights, float)[group_N]
    return weight_N @ updates_ND / weight_N.sum()


# The clients (lemma: local estimates optimality)


def blend(pull: ArrayLike) -> np.ndarray:
    """b = pull / (1 + pull), the share of the global estimate in a personal one; 1 for an infinite pull."""
    return quotient(pull, 1 + np.asarray(pull, float), 1.0)


def personal_estimate(local: np.ndarray, global_: np.ndarray, pull: float) -> np.ndarray:
    """The minimizer of 1/2 |x - local|^2 + pull/2 |x - global|^2, FedHDP's personal estimate."""
    b = blend(pull)
    return (1 - b) * local + b * global_


def optimal_pulls(problem: Problem) -> np.ndarray:
    """lambda_j* = alpha2 / (tau2 + w_j N_j gamma_j^2), Bayes-optimal for a client that subtracts its own noise."""
    return _pull(problem, product(_noise_share(problem), optimal_server_variance(problem)))


def own_noise_pulls(problem: Problem) -> np.ndarray:
    """alpha2 / (tau2 + N_j gamma_j^2 w_j / (1 - w_j)), the best for a client that cannot subtract its own noise."""
    return _pull(problem, product(_noise_share(problem), variance_without_one(problem)))


def _noise_share(problem: Problem) -> np.ndarray:
    """N_j gamma_j^2 / sigma_j^2, the share of noise in an update's variance."""
    return np.where(np.isinf(problem.noise_G), 1.0, quotient(problem.noise_G, problem.sigma2_G, 0.0))


def _pull(problem: Problem, distance_G: np.ndarray) -> np.ndarray:
    """alpha2 / (tau2 + distance); 0 where alpha2 is 0, as a perfect local estimate needs no global one."""
    return quotient(problem.alpha2, problem.tau2 + distance_G, 0.0)


def bayes_mse(problem: Problem) -> np.ndarray:
    """The Bayes error of a client of each group, given its local estimate and all other clients' updates."""
    prior_G = problem.tau2 + variance_without_one(problem)
    return problem.alpha2 * (1 - quotient(problem.alpha2, problem.alpha2 + prior_G, 0.0))


def bayes_estimate(problem: Problem, updates_ND: np.ndarray, client: int, local_D: np.ndarray) -> np.ndarray:
    """The estimate with the Bayes error. Clients are in the order of the groups; the client's own update is not used."""
    group_N = np.repeat(np.arange(len(problem.groups)), problem.clients_G.astype(int))
    others_N = np.arange(len(group_N)) != client
    if not others_N.any():
        return local_D
    sigma2_N = problem.sigma2_G[group_N[others_N]]
    weight_N = quotient(sigma2_N.min(), sigma2_N, 1.0)
    prior_mean_D = weight_N @ updates_ND[others_N] / weight_N.sum()
    distance = problem.tau2 + variance_without_one(problem)[group_N[client]]
    return personal_estimate(local_D, prior_mean_D, float(quotient(problem.alpha2, distance, 0.0)))


# Any weights and any pull. In the global estimate, w_j is the weight of one client of group j; u_j = 1 - w_j.


def client_mse(problem: Problem, weights: ArrayLike, pulls: ArrayLike, own_noise: bool = True) -> np.ndarray:
    """The exact error of FedHDP's personal estimate in each group.

    Args:
        problem: The groups.
        weights: The relative weight of each group.
        pulls: The pull of each group, or one for all.
        own_noise: Whether the client's own noise stays in the global estimate.
    """
    return mse_under_noise(problem, weights, pulls, _global_noise(problem, weights, own_noise))


def best_pulls(problem: Problem, weights: ArrayLike, own_noise: bool = True) -> np.ndarray:
    """The pull of least error for these weights: the best Ditto for any server."""
    return pulls_under_noise(problem, weights, _global_noise(problem, weights, own_noise))


def mse_under_noise(problem: Problem, weights: ArrayLike, pulls: ArrayLike, noise_J: np.ndarray) -> np.ndarray:
    """(1 - b u)^2 alpha2 + b^2 (u^2 tau2 + sum_i M_i w_i^2 sigma_c2 + noise), M_i the other clients of group i."""
    pull_J = np.broadcast_to(np.asarray(pulls, float), (len(problem.groups),))
    require(bool(np.all(pull_J >= 0)), "pulls", pulls, "at least 0")
    w_G, b_J = client_weights(problem, weights), blend(pull_J)
    u_J, square_J = problem.others_JG @ w_G, problem.others_JG @ w_G**2
    prior_J = u_J**2 * problem.tau2 + square_J * problem.sigma_c2 + noise_J
    return (1 - b_J * u_J) ** 2 * problem.alpha2 + product(b_J**2, prior_J)


def pulls_under_noise(problem: Problem, weights: ArrayLike, noise_J: np.ndarray) -> np.ndarray:
    """The zero of the derivative of `mse_under_noise`; infinite where the global estimate itself is best."""
    w_G = client_weights(problem, weights)
    u_J, square_J = problem.others_JG @ w_G, problem.others_JG @ w_G**2
    # sum_i M_i w_i^2 - u_j w_j, summed term by term so that equal weights cancel to the bit
    excess_J = np.sum(problem.others_JG * w_G * (w_G - w_G[:, None]), axis=1)
    slope_J = (u_J**2 + square_J) * problem.tau2 + excess_J * problem.alpha2 + noise_J
    return quotient(u_J * problem.alpha2, np.maximum(slope_J, 0.0), 0.0)


def _global_noise(problem: Problem, weights: ArrayLike, own_noise: bool) -> np.ndarray:
    """The variance of the privacy noise in the global estimate, for a client of each group."""
    counted_JG = problem.clients_G + np.zeros((len(problem.groups), 1)) if own_noise else problem.others_JG
    return product(counted_JG, product(client_weights(problem, weights) ** 2, problem.noise_G)).sum(axis=1)
