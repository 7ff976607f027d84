"""A population: every client's examples, one after the other, and the server's own test set.

Examples lie in flat arrays with a start and a count for each client, so that storage follows the real number of
examples; images stay ``uint8``. Arrays may be memory-mapped: only a cohort's examples are ever read.

Axis letters: K clients of the population, C clients of a cohort, N examples, M examples of one client, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Source(Protocol):
    """Examples of clients wherever they come from: arrays, files, or made when they are asked for."""

    @property
    def count_K(self) -> np.ndarray:
        """How many each client has."""

    @property
    def uniform_size(self) -> bool:
        """Whether all clients have the same number of examples."""

    def take(self, clients_C: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples of these clients, each padded to the same capacity."""


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
        """The examples of these clients, each padded to the same capacity with zeros: nothing of a neighbour's."""
        place_M = np.arange(capacity)
        if (self.count_K[clients_C] == capacity).all():
            rows_CM = self.start_K[clients_C, None] + place_M
            return self.x_N[rows_CM], self.y_N[rows_CM]
        spare_CM = place_M >= self.count_K[clients_C, None]
        rows_CM = np.where(spare_CM, 0, self.start_K[clients_C, None] + place_M)
        x_CM, y_CM = self.x_N[rows_CM], self.y_N[rows_CM]
        x_CM[spare_CM], y_CM[spare_CM] = 0, 0
        return x_CM, y_CM


def examples(x_N: np.ndarray, y_N: np.ndarray, count_K: np.ndarray) -> Examples:
    """Examples that lie client after client."""
    x_N, y_N, whole_K = np.asanyarray(x_N), np.asanyarray(y_N), np.asarray(count_K)
    if whole_K.dtype.kind not in "iu":
        raise ValueError(f"counts must be whole numbers, not of the type {whole_K.dtype}")
    count_K = whole_K.astype(np.int32)
    if count_K.min(initial=0) < 0:
        raise ValueError(f"counts must be at least 0, not {count_K.min()}")
    if count_K.sum() != len(y_N) or len(x_N) != len(y_N):
        raise ValueError(f"counts add up to {count_K.sum()}, but there are {len(x_N)} inputs and {len(y_N)} targets")
    return Examples(x_N, y_N, np.cumsum(count_K) - count_K, count_K)


def from_lists(x_K: Sequence[np.ndarray], y_K: Sequence[np.ndarray]) -> Examples:
    """Examples that are given client by client."""
    if len(x_K) != len(y_K) or any(len(x) != len(y) for x, y in zip(x_K, y_K)):
        raise ValueError("every client must have as many targets as inputs")
    return examples(np.concatenate(x_K), np.concatenate(y_K), np.array([len(y) for y in y_K]))


class FederatedData(NamedTuple):
    """Every client's training and test examples, and the server's test set."""

    name: str
    train: Source
    test: Examples
    server_x_N: np.ndarray
    server_y_N: np.ndarray
    classes: int
    validation: Examples | None = None  # what clients hold out to choose by, never to train on

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self.train.count_K)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.server_x_N.shape[1:]


def hold_out(population: FederatedData, share: float, seed: int) -> FederatedData:
    """The population in which every client with two or more examples keeps a share of them, at least one, from training."""
    train = population.train
    if not 0 <= share < 1:
        raise ValueError(f"validation must be at least 0 and below 1, got {share!r}")
    if share == 0:
        return population
    if not isinstance(train, Examples):
        raise ValueError(f"{population.name} is made on demand: nothing can be held out of it")
    kept_K = np.where(train.count_K > 1, np.clip(np.round(share * train.count_K), 1, train.count_K - 1), 0).astype(int)
    parts: tuple[list, list] = ([], [])
    for client, (start, count, kept) in enumerate(zip(train.start_K, train.count_K, kept_K)):
        rng = np.random.default_rng([seed, 0, 1, client])  # its own: what one has changes nothing for another
        order = start + rng.permutation(count)
        parts[0].append(np.sort(order[kept:]))
        parts[1].append(np.sort(order[:kept]))
    rows = [np.concatenate(part) for part in parts]
    made = [
        examples(train.x_N[row_N], train.y_N[row_N], count_K)
        for row_N, count_K in zip(rows, (train.count_K - kept_K, kept_K))
    ]
    return population._replace(train=made[0], validation=made[1])
