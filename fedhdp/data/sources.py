"""The examples of many clients: flat arrays with a start and a count for each client.

Memory follows their number. Arrays may be memory-mapped: only a cohort's examples are read.

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

    def labels(self, client: int) -> np.ndarray:
        """The targets of one client."""
        return self.y_N[self.start_K[client] : self.start_K[client] + self.count_K[client]]

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
    require(counts.dtype.kind in "iu", "counts", str(counts.dtype), "whole numbers", DataError)
    counts = counts.astype(np.int32)
    least = int(counts.min(initial=0))
    require(least >= 0, "counts", least, "at least 0", DataError)
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
