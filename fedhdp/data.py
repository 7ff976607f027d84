"""Federated data: the examples of every client, and the server's own test set.

Examples are flat arrays with a start and a count for each client, so that memory follows their number; images stay
``uint8``. Arrays may be memory-mapped: only a cohort's examples are read.

Axis letters: K clients, C clients of a cohort, N examples, M examples of one client, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fedhdp.errors import DataError, require


class ExampleSource(Protocol):
    """The clients' training examples: arrays, files, or generated when they are needed."""

    @property
    def count_K(self) -> np.ndarray:
        """How many examples each client has."""

    @property
    def uniform_size(self) -> bool:
        """Whether all clients have the same number of examples."""

    def take(self, clients_C: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and targets of these clients, each padded to the same capacity."""


class Examples(NamedTuple):
    """Inputs and targets of many clients; client k has the ``count_K[k]`` examples from ``start_K[k]`` on."""

    x_N: np.ndarray
    y_N: np.ndarray
    start_K: np.ndarray
    count_K: np.ndarray

    @property
    def uniform_size(self) -> bool:
        """Whether all clients have the same number of examples."""
        return bool((self.count_K == self.count_K[0]).all())

    def take(self, clients_C: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and targets of these clients, each padded to the same capacity with zeros."""
        position_M = np.arange(capacity)
        if (self.count_K[clients_C] == capacity).all():
            rows_CM = self.start_K[clients_C, None] + position_M
            return self.x_N[rows_CM], self.y_N[rows_CM]
        is_padding_CM = position_M >= self.count_K[clients_C, None]
        rows_CM = np.where(is_padding_CM, 0, self.start_K[clients_C, None] + position_M)
        x_CM, y_CM = self.x_N[rows_CM], self.y_N[rows_CM]
        x_CM[is_padding_CM], y_CM[is_padding_CM] = 0, 0
        return x_CM, y_CM


def examples(x_N: np.ndarray, y_N: np.ndarray, count_K: Sequence[int] | np.ndarray) -> Examples:
    """Examples from flat arrays.

    Args:
        x_N: The inputs, client after client.
        y_N: The targets.
        count_K: How many examples each client has.

    Raises:
        DataError: If the counts are not whole numbers, or do not add up to the number of inputs and targets.
    """
    x_N, y_N, counts = np.asanyarray(x_N), np.asanyarray(y_N), np.asarray(count_K)
    if counts.dtype.kind not in "iu":
        raise DataError(f"counts must be whole numbers, got {counts.dtype}", "counts", str(counts.dtype))
    counts = counts.astype(np.int32)
    if counts.min(initial=0) < 0:
        raise DataError(f"counts must be at least 0, got {counts.min()}", "counts", int(counts.min()))
    if counts.sum() != len(y_N) or len(x_N) != len(y_N):
        message = f"counts add up to {counts.sum()}, but there are {len(x_N)} inputs and {len(y_N)} targets"
        raise DataError(message, "counts", int(counts.sum()))
    return Examples(x_N, y_N, np.cumsum(counts) - counts, counts)


def from_lists(x_K: Sequence[np.ndarray], y_K: Sequence[np.ndarray]) -> Examples:
    """Examples from one array of inputs and one of targets for each client.

    Raises:
        DataError: If a client has not as many targets as inputs.
    """
    if len(x_K) != len(y_K):
        raise DataError(f"there are inputs of {len(x_K)} clients and targets of {len(y_K)}", "y_K", len(y_K))
    for client, (x, y) in enumerate(zip(x_K, y_K, strict=True)):
        if len(x) != len(y):
            raise DataError(f"client {client} has {len(x)} inputs and {len(y)} targets", "y_K", len(y))
    return examples(np.concatenate(x_K), np.concatenate(y_K), np.array([len(y) for y in y_K]))


class FederatedData(NamedTuple):
    """Every client's examples and the server's test set.

    Attributes:
        name: A name for tables.
        train: The clients' training examples.
        test: The clients' test examples; a client may have none.
        server_x_N: The inputs of the server's test set, which may be empty.
        server_y_N: Its targets.
        classes: The number of classes, or of outputs.
        validation: Examples that clients hold out to choose by, never trained on.
    """

    name: str
    train: ExampleSource
    test: Examples
    server_x_N: np.ndarray
    server_y_N: np.ndarray
    classes: int
    validation: Examples | None = None

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.train.count_K)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.server_x_N.shape[1:]


def hold_out(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Move a share of each client's training examples to its validation examples, at least one if it has two.

    Args:
        data: The data.
        share: The share to hold out.
        seed: Seed of the choice, which for one client does not depend on the others' examples.

    Raises:
        InvalidValueError: If the share is not at least 0 and below 1.
        DataError: If the examples are generated when they are needed.
    """
    require(0 <= share < 1, "validation", share, "at least 0 and below 1")
    if share == 0:
        return data
    train = data.train
    if not isinstance(train, Examples):
        raise DataError(f"{data.name} is generated on demand: nothing can be held out of it", "validation", share)
    at_least_one_K = np.clip(np.round(share * train.count_K), 1, train.count_K - 1)
    held_out_K = np.where(train.count_K > 1, at_least_one_K, 0).astype(int)
    train_rows, validation_rows = [], []
    for client, (start, count, held_out) in enumerate(zip(train.start_K, train.count_K, held_out_K, strict=True)):
        order = start + np.random.default_rng([seed, 0, 1, client]).permutation(count)
        train_rows.append(np.sort(order[held_out:]))
        validation_rows.append(np.sort(order[:held_out]))

    def at(rows: list[np.ndarray], count_K: np.ndarray) -> Examples:
        row_N = np.concatenate(rows)
        return examples(train.x_N[row_N], train.y_N[row_N], count_K)

    return data._replace(train=at(train_rows, train.count_K - held_out_K), validation=at(validation_rows, held_out_K))
