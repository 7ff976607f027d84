"""Federated linear regression and point estimation (paper: section 3).

The true parameters of client j are the global ones plus noise of variance ``tau2`` in each coordinate. Its examples
are such that its local estimate has variance ``alpha2`` in each coordinate. Features are orthogonal, F_j' F_j = n_s I as
in the paper, so the mean of ``models.squared_error`` over a client's examples is 1/2 |x - estimate_j|^2 plus a constant.
One full-batch step with learning rate 1 therefore ends at the local estimate from anywhere, and a step of the personal
model with 1 / (1 + pull) at (estimate_j + pull * global) / (1 + pull). The model is ``models.linear(..., bias=False)``.

Test examples are noiseless: the unit vectors and the true parameters. The squared error on them is the estimate's error
per coordinate.

Axis letters: K clients, M examples of a client, D coordinates, N examples.
"""

from __future__ import annotations

import numpy as np

from fedhdp.data import Examples, FederatedData, examples
from fedhdp.errors import require

Arrays = tuple[np.ndarray, np.ndarray]


def make_linear_regression(
    clients: int, dimensions: int, samples: int, alpha2: float, tau2: float, seed: int = 0
) -> FederatedData:
    """Examples of a feature vector and its noisy response.

    Args:
        clients: The number of clients.
        dimensions: The number of coordinates.
        samples: Examples of each client, at least as many as dimensions.
        alpha2: Variance of a client's local estimate, in each coordinate.
        tau2: Variance of the clients' true parameters around the global ones, in each coordinate.
        seed: Determines all of it.

    Returns:
        Inputs of as many numbers as dimensions, targets of one.

    Raises:
        InvalidValueError: If an argument is out of range.
    """
    require(samples >= dimensions, "samples", samples, f"at least the number of dimensions, {dimensions}")
    rng = _generator(clients, dimensions, samples, alpha2, tau2, seed)
    true_D, true_KD = _true_parameters(rng, clients, dimensions, tau2)
    feature_KMD = samples**0.5 * np.linalg.qr(rng.standard_normal((clients, samples, dimensions)))[0]
    noise_KM = (samples * alpha2) ** 0.5 * rng.standard_normal((clients, samples))
    response_KM = np.einsum("kmd,kd->km", feature_KMD, true_KD) + noise_KM
    unit_DD = np.eye(dimensions)
    return _federated(
        "linear regression",
        train=(feature_KMD, response_KM[..., None]),
        test=(np.broadcast_to(unit_DD, (clients, dimensions, dimensions)), true_KD[..., None]),
        server=(unit_DD, true_D[:, None]),
    )


def make_point_estimation(
    clients: int, dimensions: int, samples: int, alpha2: float, tau2: float, seed: int = 0
) -> FederatedData:
    """Examples of noisy observations of a client's true parameters.

    The arguments are those of `make_linear_regression`, with any number of samples.

    Returns:
        Inputs of a single 1, targets of as many numbers as dimensions.

    Raises:
        InvalidValueError: If an argument is out of range.
    """
    rng = _generator(clients, dimensions, samples, alpha2, tau2, seed)
    true_D, true_KD = _true_parameters(rng, clients, dimensions, tau2)
    noise_KMD = (samples * alpha2) ** 0.5 * rng.standard_normal((clients, samples, dimensions))
    return _federated(
        "point estimation",
        train=(np.ones((clients, samples, 1)), true_KD[:, None] + noise_KMD),
        test=(np.ones((clients, 1, 1)), true_KD[:, None]),
        server=(np.ones((1, 1)), true_D[None]),
    )


def _generator(
    clients: int, dimensions: int, samples: int, alpha2: float, tau2: float, seed: int
) -> np.random.Generator:
    for name, count in {"clients": clients, "dimensions": dimensions, "samples": samples}.items():
        require(count >= 1, name, count, "at least 1")
    for name, variance in {"alpha2": alpha2, "tau2": tau2}.items():
        require(0 <= variance < np.inf, name, variance, "finite and at least 0")
    return np.random.default_rng([seed, 0])  # stream 0 is the data's


def _true_parameters(rng: np.random.Generator, clients: int, dimensions: int, tau2: float) -> Arrays:
    true_D = rng.standard_normal(dimensions)
    return true_D, true_D + tau2**0.5 * rng.standard_normal((clients, dimensions))


def _federated(name: str, train: Arrays, test: Arrays, server: Arrays) -> FederatedData:
    server_x_N, server_y_N = (array.astype(np.float32) for array in server)
    parts = (_flatten(*train), _flatten(*test), server_x_N, server_y_N)
    return FederatedData(name, *parts, classes=0, server_has_client_data=False)


def _flatten(x_KM: np.ndarray, y_KM: np.ndarray) -> Examples:
    """Inputs and targets client after client, in single precision."""
    x_N, y_N = (array.reshape(-1, array.shape[-1]).astype(np.float32) for array in (x_KM, y_KM))
    return examples(x_N, y_N, np.full(len(x_KM), x_KM.shape[1]))
