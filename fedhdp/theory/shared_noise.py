"""One noise for all groups: the weights of least error where only the weighted sum is released.

Group j needs noise of standard deviation z_j = N_j gamma_j on the sum of its updates (its mean then has variance
gamma_j^2, as in the paper). The paper adds noise to each group's sum: variance sum_j (r_j z_j)^2. Where only the total
is released, max_j (r_j z_j)^2 gives the same epsilons. The server's error is then

    V(r) = ( sigma_c2 sum_j N_j r_j^2 + max_j (r_j z_j)^2 ) / ( sum_j N_j r_j )^2

and the best weights are r_j = min(1, c / z_j). Not in the paper. Axis letters: G groups.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from fedhdp.theory.linear_regression import (
    Problem,
    client_weights,
    mse_under_noise,
    optimal_server_variance,
    product,
    pulls_under_noise,
    quotient,
)


def multipliers(problem: Problem) -> np.ndarray:
    """z_j, the standard deviation of the noise that each group needs on the sum of its updates."""
    return problem.clients_G * np.sqrt([group.gamma2 for group in problem.groups])


def shared_noise(problem: Problem, weights: ArrayLike) -> float:
    """The variance of the shared noise in the global estimate."""
    return float(product(client_weights(problem, weights), multipliers(problem)).max() ** 2)


def server_variance(problem: Problem, weights: ArrayLike) -> float:
    """The error of the global estimate under one shared noise."""
    w_G = client_weights(problem, weights)
    return float(problem.sigma_c2 * (problem.clients_G @ w_G**2) + shared_noise(problem, weights))


def optimal_weights(problem: Problem) -> np.ndarray:
    """r_j = min(1, c / z_j), relative to the group with the least noise."""
    z_G = multipliers(problem)
    return np.minimum(1.0, quotient(_noise_ceiling(problem), z_G, 1.0))


def optimal_weights_beside(problem: Problem, given_G: np.ndarray) -> np.ndarray:
    """The weights of least error where some are given: r_j = min(a, c / z_j) for the others.

    The error is quasiconvex in the weights, so also in c once a is the best for it, and a bounded search finds it.

    Args:
        problem: The groups.
        given_G: Their weights, of which one is above 0; NaN where the weight is free.
    """
    from scipy.optimize import minimize_scalar

    z_G = multipliers(problem)
    if not (z_G > 0).any():
        return np.where(np.isnan(given_G), np.nanmax(given_G), given_G)  # without noise the mean is the best
    noise = float(np.nanmax(product(given_G, z_G)))  # of the given weights, below which c has no use
    largest = np.nanmax(given_G) * z_G.max()

    def error(log_c: float) -> float:
        weight_G = _weights_at(problem, given_G, math.exp(log_c))
        return math.log(server_variance(problem, weight_G))

    bounds = (math.log(max(noise, 1e-12 * largest)), math.log(1e6 * largest))
    result = minimize_scalar(error, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    candidates = [_weights_at(problem, given_G, math.exp(log_c)) for log_c in (bounds[0], float(result.x))]
    return min(candidates, key=lambda weight_G: server_variance(problem, weight_G))


def _weights_at(problem: Problem, given_G: np.ndarray, c: float) -> np.ndarray:
    """The weights of least error whose noise is at most c: min(a, c / z_j), with the best a, for those not given.

    With the noise at c the best a is (sum N_j r_j^2 + c^2 / sigma_c2) / sum N_j r_j over the groups whose weight is not a.
    """
    is_free_G, N_G = np.isnan(given_G), problem.clients_G
    limit_G = np.where(is_free_G, quotient(c, multipliers(problem), np.inf), given_G)
    limits = sorted(set(limit_G[is_free_G].tolist()))
    a = 0.0
    for limit in [0.0, *limits]:  # the groups up to this limit are at it, the others at a
        at_limit_G = ~is_free_G | (limit_G <= limit)
        r_G = np.where(at_limit_G, limit_G, 0.0)
        a = (float(N_G @ r_G**2) + float(quotient(c * c, problem.sigma_c2, 0.0))) / float(N_G @ r_G)
        higher = [other for other in limits if other > limit]
        if not higher or a <= higher[0]:
            break
    return np.where(is_free_G, np.minimum(a, limit_G), given_G)


def _noise_ceiling(problem: Problem) -> float:
    """The c at which sigma_c2 * sum_{z_j > c} (N_j / z_j)(1 - c / z_j) = c, searched from the largest z_j down.

    The left side falls and the right side rises, so c is unique; between two values of z_j it is a quotient. All c below
    the least z_j give the same weights, so the search stops there.
    """
    steps = np.unique(multipliers(problem))
    for floor, ceiling in zip(steps[-2::-1], steps[:0:-1], strict=True):
        c = min(_ceiling_between(problem, float(ceiling)), float(ceiling))
        if c > floor:
            return c
    return float(steps[0])


def _ceiling_between(problem: Problem, least: float) -> float:
    """sigma_c2 sum N_j / z_j over 1 + sigma_c2 sum N_j / z_j^2, over the groups with z_j of at least ``least``."""
    if least == np.inf:
        return 0.0
    z_G = multipliers(problem)
    x_G, N_G = least / z_G[z_G >= least], problem.clients_G[z_G >= least]
    return least * problem.sigma_c2 * float(N_G @ x_G) / (problem.sigma_c2 * float(N_G @ x_G**2) + least * least)


def optimal_pulls(problem: Problem, weights: ArrayLike) -> np.ndarray:
    """The pull of least error. No client adds the shared noise, so none can subtract it."""
    return pulls_under_noise(problem, weights, np.full(len(problem.groups), shared_noise(problem, weights)))


def client_mse(problem: Problem, weights: ArrayLike, pulls: ArrayLike) -> np.ndarray:
    """The exact error of a personal estimate in each group under the shared noise."""
    return mse_under_noise(problem, weights, pulls, np.full(len(problem.groups), shared_noise(problem, weights)))


def gain(problem: Problem) -> float:
    """The ratio of the server errors, noise per group over shared noise, each at its best weights."""
    return float(quotient(optimal_server_variance(problem), server_variance(problem, optimal_weights(problem)), 1.0))
