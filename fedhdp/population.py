"""A population: every client's examples, one after the other, and the server's own test set.

Examples lie in flat arrays with a start and a count for each client, so that storage follows the real number of
examples; images stay ``uint8``. Arrays may be memory-mapped: only a cohort's examples are ever read.

Axis letters: K clients of the population, C clients of a cohort, N examples, M examples of one client, padded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Examples(NamedTuple):
    """Inputs and targets of many clients; client k has the ``count_K[k]`` examples from ``start_K[k]`` on."""

    x_N: np.ndarray
    y_N: np.ndarray
    start_K: np.ndarray
    count_K: np.ndarray

    @property
    def alike(self) -> bool:
        """Whether all clients have the same number of examples."""
        return bool((self.count_K == self.count_K[0]).all())

    def take(self, clients_C: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples of these clients, each padded to the same capacity with zeros: nothing of a neighbour's."""
        place_M = np.arange(capacity)
        spare_CM = place_M >= self.count_K[clients_C, None]
        rows_CM = np.where(spare_CM, 0, self.start_K[clients_C, None] + place_M)
        x_CM, y_CM = self.x_N[rows_CM], self.y_N[rows_CM]
        x_CM[spare_CM], y_CM[spare_CM] = 0, 0
        return x_CM, y_CM


def examples(x_N: np.ndarray, y_N: np.ndarray, count_K: np.ndarray) -> Examples:
    """Examples that lie client after client."""
    count_K = np.asarray(count_K, np.int32)
    if count_K.sum() != len(y_N) or len(x_N) != len(y_N):
        raise ValueError(f"counts add up to {count_K.sum()}, but there are {len(x_N)} inputs and {len(y_N)} targets")
    return Examples(x_N, y_N, np.cumsum(count_K) - count_K, count_K)


class Population(NamedTuple):
    """Every client's training and test examples, and the server's test set."""

    name: str
    train: Examples
    test: Examples
    server_x_N: np.ndarray
    server_y_N: np.ndarray
    classes: int

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train.count_K)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.server_x_N.shape[1:]
