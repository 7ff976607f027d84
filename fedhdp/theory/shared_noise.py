"""One noise for all levels: the weights of least error when only the weighted sum is ever released.

Level j is owed noise of standard deviation z_j = N_j gamma_j on the sum of its updates (its mean then carries
gamma_j^2, as in the paper). The paper noises every level's sum: variance sum_j (r_j z_j)^2. Where only the total is
released, max_j (r_j z_j)^2 keeps the same promises. The server's error is then

    V(r) = ( sigma_c2 sum_j N_j r_j^2 + max_j (r_j z_j)^2 ) / ( sum_j N_j r_j )^2

and the best weights are r_j = min(1, c / z_j): nobody's noise may stick out above c. Not in the paper.
Axis letters: G levels.
"""

from __future__ import annotations

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
    """z_j, the noise each level is owed on the sum of its updates."""
    return problem.clients_G * np.sqrt([level.gamma2 for level in problem.levels])


def shared_noise(problem: Problem, weights: ArrayLike) -> float:
    """The variance of the one noise in the global estimate."""
    return float(product(client_weights(problem, weights), multipliers(problem)).max() ** 2)


def server_variance(problem: Problem, weights: ArrayLike) -> float:
    """The error of the global estimate under one shared noise."""
    w_G = client_weights(problem, weights)
    return float(problem.sigma_c2 * (problem.clients_G @ w_G**2) + shared_noise(problem, weights))


def optimal_weights(problem: Problem) -> np.ndarray:
    """r_j = min(1, c / z_j), relative to the level that is owed least."""
    z_G = multipliers(problem)
    return np.minimum(1.0, quotient(_noise_ceiling(problem), z_G, 1.0))


def _noise_ceiling(problem: Problem) -> float:
    """The c at which sigma_c2 * sum_{z_j > c} (N_j / z_j)(1 - c / z_j) = c, searched level by level from above.

    The left side falls and the right side rises, so there is one such c; between two levels it is a quotient. Below the
    least z_j every c means the same weights, so the least z_j stands for them all.
    """
    steps = np.unique(multipliers(problem))
    for floor, ceiling in zip(steps[-2::-1], steps[:0:-1]):
        c = min(_ceiling_between(problem, float(ceiling)), float(ceiling))
        if c > floor:
            return c
    return float(steps[0])


def _ceiling_between(problem: Problem, least: float) -> float:
    """sigma_c2 sum N_j / z_j over 1 + sigma_c2 sum N_j / z_j^2, over the levels that are owed at least so much."""
    if least == np.inf:
        return 0.0
    z_G = multipliers(problem)
    x_G, N_G = least / z_G[z_G >= least], problem.clients_G[z_G >= least]
    return least * problem.sigma_c2 * float(N_G @ x_G) / (problem.sigma_c2 * float(N_G @ x_G**2) + least * least)


def optimal_pulls(problem: Problem, weights: ArrayLike) -> np.ndarray:
    """The pull of least error; the noise belongs to nobody, so nobody can take it out."""
    return pulls_under_noise(problem, weights, np.full(len(problem.levels), shared_noise(problem, weights)))


def client_mse(problem: Problem, weights: ArrayLike, pulls: ArrayLike) -> np.ndarray:
    """The exact error of a personal estimate at each level under one shared noise."""
    return mse_under_noise(problem, weights, pulls, np.full(len(problem.levels), shared_noise(problem, weights)))


def gain(problem: Problem) -> float:
    """How many times larger the error of the paper's rule is, each at its best weights."""
    return float(quotient(optimal_server_variance(problem), server_variance(problem, optimal_weights(problem)), 1.0))
