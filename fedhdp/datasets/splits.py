"""From images that belong to somebody to a population: nine tenths to train, clients in shuffled order.

Axis letters: K clients, N images.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedhdp.data import Examples, FederatedData, examples

Split = Literal["by_writer", "one_digit", "skewed"]


def tested(count_K: np.ndarray | int) -> np.ndarray:
    """How many of so many images are to test: a tenth, rounded up, but never the only one."""
    return np.maximum(np.minimum(-(-np.asarray(count_K) // 10), np.asarray(count_K) - 1), 0)


def nine_tenths(client_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whether each image is a test image: a random tenth of each client's."""
    count_K = np.bincount(client_N)
    order_N = np.lexsort((rng.random(len(client_N)), client_N))
    place_N = np.arange(len(client_N)) - np.repeat(np.cumsum(count_K) - count_K, count_K)
    is_test_N = np.empty(len(client_N), bool)
    is_test_N[order_N] = place_N < np.repeat(tested(count_K), count_K)
    return is_test_N


def by_client(
    name: str,
    x_N: np.ndarray,
    y_N: np.ndarray,
    client_N: np.ndarray,
    is_test_N: np.ndarray,
    known: int,
    classes: int,
    clients: int | None,
    rng: np.random.Generator,
) -> FederatedData:
    """A population from images in any order, each with its client (of so many known) and its part."""
    parts = []
    for wanted in (~is_test_N, is_test_N):
        rows_N = np.flatnonzero(wanted)
        rows_N = rows_N[np.argsort(client_N[rows_N], kind="stable")]
        parts.append((x_N[rows_N], y_N[rows_N], np.bincount(client_N[rows_N], minlength=known)))
    return shuffled(name, examples(*parts[0]), examples(*parts[1]), classes, clients, rng)


def shuffled(
    name: str, train: Examples, test: Examples, classes: int, clients: int | None, rng: np.random.Generator
) -> FederatedData:
    """So many of the clients (None: all), in shuffled order; the server tests on the test examples of all of them."""
    known = len(train.count_K)
    if clients is not None and not 1 <= clients <= known:
        raise ValueError(f"{name} has {known} clients, so clients must be from 1 to {known}, not {clients}")
    order_K = rng.permutation(known)[:clients]
    # Train examples stay where they lie, perhaps on disk; test examples are asked for in the order of the clients.
    train = Examples(train.x_N, train.y_N.astype(np.int32), train.start_K[order_K], train.count_K[order_K])
    count_K = test.count_K[order_K]
    place_N = np.arange(count_K.sum()) - np.repeat(np.cumsum(count_K) - count_K, count_K)
    rows_N = np.repeat(test.start_K[order_K], count_K) + place_N
    test = examples(test.x_N[rows_N], test.y_N[rows_N].astype(np.int32), count_K)
    return FederatedData(name, train, test, test.x_N, test.y_N, classes)
