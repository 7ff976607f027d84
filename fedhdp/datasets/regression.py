"""Federated linear regression and point estimation (paper: section 3), for the theory's estimates from the engine.

Client j's truth is the global truth plus heterogeneity of variance tau2 in each coordinate, and its examples are such
that the estimate it makes of it alone errs by variance alpha2. Features are orthogonal, F_j' F_j = n_s I as the paper
has it, so the mean of ``models.squared_error`` over a client's examples is 1/2 |x - estimate_j|^2 and a constant: one
full-batch step at learning rate 1 from anywhere lands on the client's own estimate, and one at 1 / (1 + pull) of the
personal model on (estimate_j + pull * global) / (1 + pull). The model is ``models.linear(..., bias=False)``.

Test examples are the truth itself: asked in every coordinate, answered without error. The squared error on them is the
estimate's error per coordinate.

Axis letters: K clients, M examples of one client, D coordinates.
"""

from __future__ import annotations

import numpy as np

from fedhdp.data import Examples, FederatedData, examples
from fedhdp.errors import require


def linear_regression(
    clients: int, dimensions: int, samples: int, alpha2: float, tau2: float, seed: int = 0
) -> FederatedData:
    """Each example is a feature vector and its noisy response; one input for each coordinate, one output."""
    require(samples >= dimensions, "samples", samples, f"at least the number of dimensions, {dimensions}")
    rng = _stream(clients, dimensions, samples, alpha2, tau2, seed)
    truth_D, truth_KD = _truths(rng, clients, dimensions, tau2)
    feature_KMD = samples**0.5 * np.linalg.qr(rng.standard_normal((clients, samples, dimensions)))[0]
    error_KM = (samples * alpha2) ** 0.5 * rng.standard_normal((clients, samples))
    response_KM = np.einsum("kmd,kd->km", feature_KMD, truth_KD) + error_KM
    asked_DD = np.eye(dimensions)
    return _population(
        "linear regression",
        (feature_KMD, response_KM[..., None]),
        (np.broadcast_to(asked_DD, (clients, dimensions, dimensions)), truth_KD[..., None]),
        (asked_DD, truth_D[:, None]),
    )


def point_estimation(
    clients: int, dimensions: int, samples: int, alpha2: float, tau2: float, seed: int = 0
) -> FederatedData:
    """Each example is a noisy sight of the client's truth; the one input is 1, one output for each coordinate."""
    rng = _stream(clients, dimensions, samples, alpha2, tau2, seed)
    truth_D, truth_KD = _truths(rng, clients, dimensions, tau2)
    error_KMD = (samples * alpha2) ** 0.5 * rng.standard_normal((clients, samples, dimensions))
    return _population(
        "point estimation",
        (np.ones((clients, samples, 1)), truth_KD[:, None] + error_KMD),
        (np.ones((clients, 1, 1)), truth_KD[:, None]),
        (np.ones((1, 1)), truth_D[None]),
    )


def _stream(clients: int, dimensions: int, samples: int, alpha2: float, tau2: float, seed: int) -> np.random.Generator:
    for name, count in {"clients": clients, "dimensions": dimensions, "samples": samples}.items():
        require(count >= 1, name, count, "at least 1")
    for name, variance in {"alpha2": alpha2, "tau2": tau2}.items():
        require(0 <= variance < np.inf, name, variance, "finite and at least 0")
    return np.random.default_rng([seed, 0])  # stream 0 is the data's


def _truths(rng: np.random.Generator, clients: int, dimensions: int, tau2: float) -> tuple[np.ndarray, np.ndarray]:
    truth_D = rng.standard_normal(dimensions)
    return truth_D, truth_D + tau2**0.5 * rng.standard_normal((clients, dimensions))


def _population(name: str, train: tuple, test: tuple, server: tuple) -> FederatedData:
    """Stacked inputs and targets, client after client, in single precision."""

    def flat(x_KM: np.ndarray, y_KM: np.ndarray) -> Examples:
        x_N, y_N = (a.reshape(-1, a.shape[-1]).astype(np.float32) for a in (x_KM, y_KM))
        return examples(x_N, y_N, np.full(len(x_KM), x_KM.shape[1]))

    server_x_N, server_y_N = (a.astype(np.float32) for a in server)
    return FederatedData(name, flat(*train), flat(*test), server_x_N, server_y_N, classes=0)
