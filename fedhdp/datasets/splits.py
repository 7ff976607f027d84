"""How images are split among clients, and each client's into train and test examples.

Axis letters: K clients, N examples.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from fedhdp.data import Examples, FederatedData, examples
from fedhdp.errors import require

Split = Literal["by_writer", "one_digit", "skewed"]


def check_split(split: str, skewed_clients: int) -> None:
    """Raise `InvalidValueError` unless the split exists and only ``skewed`` has skewed clients."""
    require(split in get_args(Split), "split", split, f"one of {', '.join(get_args(Split))}")
    if split != "skewed":
        require(not skewed_clients, "skewed_clients", skewed_clients, f"0 with the split {split!r}")


def index_in_client(count_K: np.ndarray) -> np.ndarray:
    """The position of each example among those of its client, where examples lie client after client."""
    return np.arange(count_K.sum()) - np.repeat(np.cumsum(count_K) - count_K, count_K)


def num_test_examples(count_K: np.ndarray | int) -> np.ndarray:
    """A tenth of each client's examples, rounded up, but never the only one."""
    return np.maximum(np.minimum(-(-np.asarray(count_K) // 10), np.asarray(count_K) - 1), 0)


def draw_test_mask(client_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random tenth of each client's examples (`num_test_examples`), as a mask."""
    count_K = np.bincount(client_N)
    order_N = np.lexsort((rng.random(len(client_N)), client_N))
    is_test_N = np.empty(len(client_N), bool)
    is_test_N[order_N] = index_in_client(count_K) < np.repeat(num_test_examples(count_K), count_K)
    return is_test_N


def group_by_client(x_N: np.ndarray, y_N: np.ndarray, client_N: np.ndarray, num_clients: int) -> Examples:
    """Examples in any order, sorted by client."""
    order_N = np.argsort(client_N, kind="stable")
    return examples(x_N[order_N], y_N[order_N], np.bincount(client_N, minlength=num_clients))


def shuffle_clients(
    name: str, train: Examples, test: Examples, classes: int, clients: int | None, rng: np.random.Generator
) -> FederatedData:
    """Draw clients in random order.

    Args:
        name: The name of the data.
        train: Train examples of all clients; they are not copied.
        test: Test examples of the same clients. The server tests on those of the clients that are drawn.
        classes: The number of classes.
        clients: The number of clients to draw; None for all.
        rng: The source of the order.

    Returns:
        The data of these clients.

    Raises:
        InvalidValueError: If there are fewer clients.
    """
    available = len(train.count_K)
    if clients is not None:
        require(1 <= clients <= available, "clients", clients, f"from 1 to {available}, the clients of {name}")
    order_K = rng.permutation(available)[:clients]
    train = Examples(train.x_N, train.y_N.astype(np.int32), train.start_K[order_K], train.count_K[order_K])
    # Test examples are copied into the order of the clients, so that the server has no others.
    count_K = test.count_K[order_K]
    rows_N = np.repeat(test.start_K[order_K], count_K) + index_in_client(count_K)
    test = examples(test.x_N[rows_N], test.y_N[rows_N].astype(np.int32), count_K)
    return FederatedData(name, train, test, test.x_N, test.y_N, classes, input_scale=1 / 255)
