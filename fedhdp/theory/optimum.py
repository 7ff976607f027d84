"""What a user asks of the theory: the best weights, pulls and errors for their own levels, with the baselines beside.

The values here are plain records, ready to be printed or written as JSON (``msgspec.to_builtins``). A baseline is the
same closed form at other weights and other noise, each with the best Ditto pull it can have (paper: section 3.1.1).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from fedhdp.mechanism import Mechanism, Noise, PrivacyGroup
from fedhdp.theory import linear_regression, shared_noise
from fedhdp.theory.linear_regression import Level, Problem, quotient


class GroupOptimum(msgspec.Struct, frozen=True):
    """FedHDP for the clients of one level.

    ``client_mse`` is the error at ``pull`` and ``client_mse_own_noise`` at ``pull_own_noise``, both with the client's
    own noise inside the global estimate; ``bayes_mse`` is the error at ``pull`` when the client takes that noise out.
    """

    name: str
    clients: int
    weight: float
    pull: float
    pull_own_noise: float
    client_mse: float
    client_mse_own_noise: float
    bayes_mse: float


class GroupOutcome(msgspec.Struct, frozen=True):
    """What another algorithm gives the clients of one level, at its best pull."""

    name: str
    weight: float
    pull: float
    client_mse: float


class Outcome(msgspec.Struct, frozen=True):
    """What another algorithm gives; no server, no server variance."""

    server_variance: float | None
    groups: tuple[GroupOutcome, ...]


class Optimum(msgspec.Struct, frozen=True):
    """FedHDP at its best, and beside it the baselines and FedHDP with one shared noise instead of one for each level."""

    server_variance: float
    groups: tuple[GroupOptimum, ...]
    baselines: dict[str, Outcome]


def optimum(problem: Problem) -> Optimum:
    """The best weights, pulls and errors; a weight is relative to the first level."""
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
    rows = zip(problem.levels, *(column.tolist() for column in columns))
    return Optimum(
        server_variance=linear_regression.optimal_server_variance(problem),
        groups=tuple(GroupOptimum(level.name, level.clients, *numbers) for level, *numbers in rows),
        baselines=baselines(problem) | {"fedhdp_shared_noise": _shared(problem)},
    )


def baselines(problem: Problem) -> dict[str, Outcome]:
    """Equal weights without noise, with the strictest noise for all, with each level's own; and no server at all."""
    equal_G = np.ones(len(problem.levels))
    return {
        "non_private": _outcome(with_noise(problem, np.zeros(len(problem.levels))), equal_G),
        "dp_fedavg": _outcome(with_noise(problem, np.full(len(problem.levels), problem.noise_G.max())), equal_G),
        "hdp_fedavg": _outcome(problem, equal_G),
        "local_only": Outcome(None, _groups(problem, equal_G * 0, equal_G * 0, equal_G * problem.alpha2)),
    }


def with_noise(problem: Problem, noise_G: ArrayLike) -> Problem:
    """The same clients with other noise on their updates."""
    pairs = zip(problem.levels, np.asarray(noise_G, float).tolist())
    levels = tuple(Level(level.name, level.clients, noise / level.clients) for level, noise in pairs)
    return Problem(levels, problem.alpha2, problem.tau2)


def mechanism(
    problem: Problem,
    weights: ArrayLike,
    pulls: ArrayLike,
    clip: float,
    noise: Noise = "per_group",
) -> Mechanism:
    """What the engine runs for these levels: the noise N_j gamma_j that level j is owed on its sum, in clips.

    Each of N_j clients noising its own update by N_j gamma_j^2 puts variance (N_j gamma_j)^2 on the level's sum, and the
    engine's server adds the same to the sum itself. The clip must leave every update whole, as the theory has none.
    """
    owed_G = shared_noise.multipliers(problem) / clip
    weight_G, pull_G = (np.broadcast_to(np.asarray(a, float), owed_G.shape).tolist() for a in (weights, pulls))
    rows = zip(problem.levels, owed_G.tolist(), weight_G, pull_G)
    groups = tuple(PrivacyGroup(level.name, level.clients, z, 1.0, weight, pull) for level, z, weight, pull in rows)
    return Mechanism(groups, clip=clip, noise=noise)


def _outcome(problem: Problem, weight_G: np.ndarray) -> Outcome:
    pull_G = linear_regression.best_pulls(problem, weight_G)
    mse_G = linear_regression.client_mse(problem, weight_G, pull_G)
    return Outcome(linear_regression.server_variance(problem, weight_G), _groups(problem, weight_G, pull_G, mse_G))


def _shared(problem: Problem) -> Outcome:
    weight_G = shared_noise.optimal_weights(problem)
    pull_G = shared_noise.optimal_pulls(problem, weight_G)
    mse_G = shared_noise.client_mse(problem, weight_G, pull_G)
    groups = _groups(problem, quotient(weight_G, weight_G[0], 1.0), pull_G, mse_G)
    return Outcome(shared_noise.server_variance(problem, weight_G), groups)


def _groups(problem: Problem, weight_G: np.ndarray, pull_G: np.ndarray, mse_G: np.ndarray) -> tuple[GroupOutcome, ...]:
    rows = zip(problem.levels, weight_G.tolist(), pull_G.tolist(), mse_G.tolist())
    return tuple(GroupOutcome(level.name, *numbers) for level, *numbers in rows)
