"""MNIST among clients.

``one_digit`` and ``skewed`` are the paper's non-IID MNIST: each client holds samples of one digit, and the number of
clients with a digit is proportional to the digit's images. With 2,000 clients of 30 samples, nearly all of the 60,000
train images are used once. No digit's count is a multiple of 30, so 42 images belong to two clients and 42 to none. A
client's test examples are drawn from the test images of its digit, independently for each client. The paper does not
state their number; its variances across clients (0.13 at 94% accuracy) imply about 50 or more, and 100 is the default.
``by_writer`` gives each client the images of one writer, nine tenths of them for training.

The seed shuffles the order of the clients; in ``skewed`` the first ones hold a 7.

Axis letters: K clients, M examples of a client, N examples.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedhdp.data import FederatedData, examples
from fedhdp.datasets.cache import load_arrays
from fedhdp.datasets.splits import Split, check_split, draw_test_mask, group_by_client, shuffle_clients
from fedhdp.errors import DataError, require

CLASSES, SKEWED_DIGIT, DEFAULT_CLIENTS = 10, 7, 2000


def load_mnist(
    split: Split = "one_digit",
    clients: int | None = None,
    skewed_clients: int = 0,
    samples: int = 30,
    test_samples: int = 100,
    seed: int = 0,
    directory: Path | None = None,
) -> FederatedData:
    """MNIST from the data directory.

    Args:
        split: How images are split among clients.
        clients: The number of clients; by default 2,000, or all 836 writers.
        skewed_clients: In the split ``skewed``: how many of the first clients hold a 7.
        samples: Train examples of each client, unless the split is ``by_writer``.
        test_samples: Test examples of each client, unless the split is ``by_writer``.
        seed: Determines who holds what, and the order of the clients.
        directory: The data directory; by default the user's.

    Returns:
        The clients' examples. The server tests on MNIST's test images, or with ``by_writer`` on the clients'.

    Raises:
        InvalidValueError: If an argument is out of range.
        DataError: If MNIST, or with ``by_writer`` its writers, are not in the data directory.
    """
    check_split(split, skewed_clients)
    rng = np.random.default_rng([seed, 0])  # stream 0 is the data's
    arrays = load_arrays("mnist", directory)
    if split == "by_writer":
        return _by_writer(arrays, load_arrays("mnist-writers", directory), clients, rng)
    clients = DEFAULT_CLIENTS if clients is None else clients
    return _one_digit(arrays, split, clients, skewed_clients, samples, test_samples, rng)


def _by_writer(
    arrays: dict[str, np.ndarray], writers: dict[str, np.ndarray], clients: int | None, rng: np.random.Generator
) -> FederatedData:
    """Each client holds the images of one writer, from MNIST's two parts: no writer occurs in both."""
    x_N, y_N = (np.concatenate([arrays[f"train_{axis}"], arrays[f"test_{axis}"]]) for axis in "xy")
    names_K, writer_N = np.unique(np.concatenate([writers["train"], writers["test"]]), return_inverse=True)
    if len(writer_N) != len(y_N):
        raise DataError(f"mnist-writers has {len(writer_N)} images, mnist has {len(y_N)}", "dataset", "mnist-writers")
    is_test_N = draw_test_mask(writer_N, rng)
    train, test = (
        group_by_client(x_N[mask_N], y_N[mask_N], writer_N[mask_N], len(names_K)) for mask_N in (~is_test_N, is_test_N)
    )
    return shuffle_clients("mnist-by_writer", train, test, CLASSES, clients, rng)


def _one_digit(
    arrays: dict[str, np.ndarray],
    split: str,
    clients: int,
    skewed_clients: int,
    samples: int,
    test_samples: int,
    rng: np.random.Generator,
) -> FederatedData:
    """Each client holds one digit; each digit has clients in proportion to its images."""
    pools, test_pools = (
        [np.flatnonzero(arrays[f"{part}_y"] == digit) for digit in range(CLASSES)] for part in ("train", "test")
    )
    for name, value, sizes in (("samples", samples, pools), ("test_samples", test_samples, test_pools)):
        rarest = min(map(len, sizes))
        require(1 <= value <= rarest, name, value, f"from 1 to {rarest}, the images of the rarest digit")
    require(clients >= 1, "clients", clients, "at least 1")
    clients_10 = apportion(clients, np.array([len(pool) for pool in pools]))
    # A pool that is too small for all its clients is repeated; no client has an image twice.
    row_KM = np.concatenate(
        [
            np.resize(rng.permutation(pool), (num_clients, samples))
            for pool, num_clients in zip(pools, clients_10, strict=True)
        ]
    )
    digit_K = np.repeat(np.arange(CLASSES), clients_10)
    order_K = rng.permutation(clients)
    if split == "skewed":
        order_K = _skewed_first(order_K, digit_K[order_K], skewed_clients)
    row_KM, digit_K = row_KM[order_K], digit_K[order_K]
    test_row_KM = np.stack([rng.choice(test_pools[digit], test_samples, replace=False) for digit in digit_K])
    train, test = (
        examples(
            arrays[f"{part}_x"][rows_KM.ravel()],
            np.repeat(digit_K, rows_KM.shape[1]).astype(np.int32),
            np.full(clients, rows_KM.shape[1]),
        )
        for part, rows_KM in (("train", row_KM), ("test", test_row_KM))
    )
    server = arrays["test_x"], arrays["test_y"].astype(np.int32)
    return FederatedData(
        f"mnist-{split}", train, test, *server, CLASSES, input_scale=1 / 255, server_has_client_data=False
    )


def _skewed_first(order_K: np.ndarray, digit_K: np.ndarray, skewed_clients: int) -> np.ndarray:
    """Move this many of the clients with a 7 to the front."""
    sevens = np.flatnonzero(digit_K == SKEWED_DIGIT)
    upper = len(sevens)
    require(0 <= skewed_clients <= upper, "skewed_clients", skewed_clients, f"at most {upper}, the clients with a 7")
    return np.concatenate([order_K[sevens[:skewed_clients]], np.delete(order_K, sevens[:skewed_clients])])


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Whole numbers that add up to the total, in proportion to the weights (largest remainder)."""
    quotas = total * weights / weights.sum()
    shares = np.floor(quotas).astype(int)
    shares[np.argsort(shares - quotas, kind="stable")[: total - shares.sum()]] += 1
    return shares
