"""Federated data: the examples of every client, and the server's own test set.

Examples are flat arrays with a start and a count for each client, so that memory follows their number; images stay
``uint8``, and ``input_scale`` says what a byte means. Arrays may be memory-mapped: only a cohort's examples are read.

A client has an id and, where it is known, a privacy level. Both belong to the client, not to its position.

Axis letters: K clients, C clients of a cohort, N examples, M examples of one client, padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

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


LevelSize: TypeAlias = int | float | Sequence[str]  # of a level: a count, a share of all clients, or its clients' ids
NUMBER = (int, float, np.number)


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
        client_ids: The clients' ids, strings that differ. None: their numbers.
        levels: Each client's privacy level, the name of its group. None: not known.
        input_scale: Inputs are multiplied by it, as floats. None: floats reach the model as they are, integers as integers.
    """

    name: str
    train: ExampleSource
    test: Examples
    server_x_N: np.ndarray
    server_y_N: np.ndarray
    classes: int
    validation: Examples | None = None
    client_ids: np.ndarray | None = None
    levels: np.ndarray | None = None
    input_scale: float | None = None

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.train.count_K)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.template.x_N.shape[1:]

    @property
    def template(self) -> Examples:
        """Examples in memory: their arrays tell the shape and type of inputs and targets."""
        return self.train if isinstance(self.train, Examples) else self.test

    @property
    def ids(self) -> np.ndarray:
        """Each client's id, a string."""
        if self.client_ids is not None:
            return np.asarray(self.client_ids).astype(str)
        return np.arange(self.num_clients).astype(f"<U{len(str(self.num_clients))}")

    def with_levels(self, levels: Sequence[str] | np.ndarray | Mapping[str, Sequence[str]]) -> FederatedData:
        """The data with these levels.

        Args:
            levels: Each client's level, in the order of the clients; or by level the ids of its clients.

        Raises:
            DataError: If there is not one level for each client, or no client with an id.
        """
        if isinstance(levels, Mapping):
            return self.draw_levels({level: list(ids) for level, ids in levels.items()}, seed=0)
        if len(levels) != self.num_clients:
            message = f"there are {len(levels)} levels, but the data has {self.num_clients} clients"
            raise DataError(message, "levels", len(levels))
        return self._replace(levels=np.asarray(levels).astype(str))

    def draw_levels(self, sizes: Mapping[str, LevelSize], seed: int) -> FederatedData:
        """The data with levels that are drawn at random where no ids are given.

        Args:
            sizes: By level, its number of clients; as a float, its share of all clients; or the ids of its clients.
            seed: Seed of the draw.

        Raises:
            DataError: If the sizes are not those of all clients, no client has an id, or a client has two levels.
        """
        names, index_K = list(sizes), np.full(self.num_clients, -1)
        listed = {names.index(level): ids for level, ids in sizes.items() if not isinstance(ids, NUMBER)}
        number_of = {client: number for number, client in enumerate(self.ids.tolist())} if listed else {}
        for index, ids in listed.items():
            for client in map(str, ids):
                if client not in number_of:
                    message = f"level {names[index]!r} has a client {client!r}, which the data does not have"
                    raise DataError(message, "levels", client)
                if (other := index_K[number_of[client]]) >= 0:
                    message = f"client {client!r} has two levels, {names[other]!r} and {names[index]!r}"
                    raise DataError(message, "levels", client)
                index_K[number_of[client]] = index
        counts = level_counts(sizes, self.num_clients)
        drawn = [index for index in range(len(names)) if index not in listed]
        rng = np.random.default_rng([seed, 0, 2])  # stream 0 is the data's; its stream 1 draws the validation examples
        index_K[rng.permutation(np.flatnonzero(index_K < 0))] = np.repeat(drawn, [counts[names[i]] for i in drawn])
        return self._replace(levels=np.array(names)[index_K])

    def level_indices(self, names: Sequence[str]) -> np.ndarray:
        """The index of each client's level among these names of groups.

        Raises:
            DataError: If a level is not among them, or one of them is no client's level.
        """
        if self.levels is None or len(self.levels) != self.num_clients:
            count = 0 if self.levels is None else len(self.levels)
            message = f"there are {count} levels, but the data has {self.num_clients} clients"
            raise DataError(message, "levels", count)
        levels, index_K = np.asarray(self.levels).astype(str), np.full(self.num_clients, -1, np.int32)
        for index, name in enumerate(names):
            index_K[levels == name] = index
        if (index_K < 0).any():
            client = int(np.argmin(index_K))
            message = f"client {str(self.ids[client])!r} has the level {str(levels[client])!r}, which is no group's"
            raise DataError(f"{message}: groups are {', '.join(names)}", "levels", str(levels[client]))
        for name, count in zip(names, np.bincount(index_K, minlength=len(names)), strict=True):
            if count == 0:
                message = f"group {name!r} has no client: levels of the data are {', '.join(np.unique(levels))}"
                raise DataError(message, "groups", name)
        return index_K


def level_counts(sizes: Mapping[str, LevelSize], clients: int) -> dict[str, int]:
    """The number of clients of each level.

    Args:
        sizes: By level a count, a share of all clients, or ids. Shares are rounded so that all clients have a level.
        clients: The number of all clients.

    Raises:
        DataError: If a size is negative, a share is above 1, or they do not add up.
    """
    quotas = {level: _quota(level, size, clients) for level, size in sizes.items()}
    counts = {level: math.floor(quota) for level, quota in quotas.items()}
    rounded = [level for level in quotas if counts[level] < quotas[level]]
    rounded.sort(key=lambda level: counts[level] - quotas[level])
    for level in rounded[: max(0, clients - sum(counts.values()))]:
        counts[level] += 1
    if (total := sum(counts.values())) != clients:
        parts = ", ".join(f"{level} {count:,}" for level, count in counts.items())
        message = f"levels add up to {total:,} clients ({parts}), but the data has {clients:,}"
        raise DataError(message, "levels", total)
    return counts


def _quota(level: str, size: LevelSize, clients: int) -> float:
    """The number of clients of a level, not rounded."""
    if not isinstance(size, NUMBER):
        return len(size)
    is_count = isinstance(size, int | np.integer)
    if not 0 <= size <= (math.inf if is_count else 1):
        raise DataError(f"level {level!r} must have a count, or a share of at most 1, got {size}", "levels", size)
    return int(size) if is_count else round(float(size) * clients, 6)


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
