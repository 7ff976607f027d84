"""Simulate every client of every trial, and compute the error of any estimator from the same draws.

Each client of each trial has a sampling error (variance alpha2), heterogeneity (tau2) and privacy noise (N_i gamma_i^2).
Every estimator of the paper is linear in them. So a trial stores, for each group, the sum of each kind over its clients
and the products of each two kinds: enough for the squared error of every client at any weights and pulls. The global
truth is 0, as estimators move with it.

Axis letters: T trials, G groups, K kinds (sampling error, heterogeneity, noise), D coordinates, N clients.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedhdp.errors import require
from fedhdp.theory import shared_noise
from fedhdp.theory.linear_regression import Problem, blend, client_weights

DRAWS_PER_BLOCK = 300_000  # fits into a core's cache


class Trials(NamedTuple):
    """The sums and products of the draws that errors need."""

    problem: Problem
    sum_TGKD: np.ndarray
    product_TGKK: np.ndarray  # summed over clients and coordinates
    shared_noise_TD: np.ndarray  # of variance 1, for one noise on the server


class Estimated(NamedTuple):
    """A mean over trials and its standard error."""

    mean: float
    standard_error: float


def simulate(problem: Problem, trials: int, dimensions: int, seed: int, workers: int = 2) -> Trials:
    """Draw all trials; the same seed gives the same trials for any number of workers."""
    require(trials >= 2, "trials", trials, "at least 2")
    require(bool(np.all(np.isfinite(problem.noise_G))), "gamma2", np.inf, "finite to be drawn")
    block = max(1, DRAWS_PER_BLOCK // int(3 * dimensions * problem.clients_G.sum()))
    sizes = [min(block, trials - start) for start in range(0, trials, block)]
    streams = np.random.SeedSequence(seed).spawn(len(sizes))
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(lambda size, stream: _simulate_block(problem, size, dimensions, stream), sizes, streams))
    return Trials(problem, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _simulate_block(problem: Problem, trials: int, dimensions: int, stream: np.random.SeedSequence) -> tuple:
    rng = np.random.Generator(np.random.SFC64(stream))
    groups = [
        _draw_group(rng, trials, dimensions, int(clients), np.array([problem.alpha2, problem.tau2, noise]))
        for clients, noise in zip(problem.clients_G, problem.noise_G, strict=True)
    ]
    sums, products = (np.stack(arrays, axis=1) for arrays in zip(*groups, strict=True))
    return sums, products, rng.standard_normal((trials, dimensions))


def _draw_group(
    rng: np.random.Generator, trials: int, dimensions: int, clients: int, variance_K: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums and products over the clients of one group, drawn with variance 1 and scaled afterwards."""
    kinds = np.flatnonzero(variance_K)
    draw_TKDN = rng.standard_normal((trials, len(kinds), dimensions, clients), dtype=np.float32)
    flat_TKX = draw_TKDN.reshape(trials, len(kinds), -1)
    sum_TKD, product_TKK = np.zeros((trials, 3, dimensions)), np.zeros((trials, 3, 3))
    sum_TKD[:, kinds] = draw_TKDN.sum(axis=-1)
    product_TKK[:, kinds[:, None], kinds] = flat_TKX @ flat_TKX.transpose(0, 2, 1)
    scale_K = np.sqrt(variance_K)
    return sum_TKD * scale_K[:, None], product_TKK * np.outer(scale_K, scale_K)


def global_errors(trials: Trials, weights: ArrayLike, shared: bool = False) -> np.ndarray:
    """The error of the global estimate, a vector for each trial."""
    w_G = client_weights(trials.problem, weights)
    kinds = slice(0, 2) if shared else slice(0, 3)
    error_TD = np.einsum("g,tgkd->td", w_G, trials.sum_TGKD[:, :, kinds])
    if shared:
        error_TD += shared_noise.shared_noise(trials.problem, weights) ** 0.5 * trials.shared_noise_TD
    return error_TD


def server_errors(trials: Trials, weights: ArrayLike, shared: bool = False) -> np.ndarray:
    """The server's squared error per coordinate, for each trial."""
    return np.mean(global_errors(trials, weights, shared) ** 2, axis=-1)


def client_errors(
    trials: Trials, weights: ArrayLike, pulls: ArrayLike, own_noise: bool = True, shared: bool = False
) -> np.ndarray:
    """The clients' squared error per coordinate, for each trial and group: the mean over the group's clients."""
    problem = trials.problem
    w_G, b_G = client_weights(problem, weights), blend(np.broadcast_to(pulls, (len(problem.groups),)))
    global_TD = global_errors(trials, weights, shared)
    # a client's error is (1 - b) * sampling error - b * heterogeneity + b * global error, less b w * noise if subtracted
    subtracted_G = b_G * 0 if own_noise or shared else -b_G * w_G
    part_GK = np.stack([1 - b_G, -b_G, subtracted_G], axis=-1)
    own_TG = np.einsum("gk,gl,tgkl->tg", part_GK, part_GK, trials.product_TGKK)
    cross_TG = np.einsum("g,gk,tgkd,td->tg", b_G, part_GK, trials.sum_TGKD, global_TD, optimize=True)
    global_TG = problem.clients_G * b_G**2 * np.sum(global_TD**2, axis=-1)[:, None]
    return (own_TG + 2 * cross_TG + global_TG) / (problem.clients_G * global_TD.shape[-1])


def estimate(error_T: np.ndarray) -> Estimated:
    """The mean over trials with its standard error."""
    return Estimated(float(error_T.mean()), float(error_T.std(ddof=1) / len(error_T) ** 0.5))
