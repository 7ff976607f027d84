"""Rows of arrays or of a table, one an example, among clients: ids, levels, and the rows that are held out.

What a client holds out follows from the seed, its id and the number of its rows alone. With a client more or less, the
others train on the same examples; without that, the noise for one client's update would not cover the difference.

Axis letters: N rows, K clients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedhdp.data.levels import levels_by_client
from fedhdp.data.values import NUMBER, as_array, refuse_missing
from fedhdp.errors import DataError, require

VALIDATION, TEST = 1, 3  # the streams of what is held out; stream 2 draws levels


class Partition(NamedTuple):
    """Who has which rows; rows lie client after client.

    Attributes:
        client_ids: The clients' ids as text, sorted (numbers by value).
        levels: Their levels, or None where these are not known.
        client_N: Each row's client, as a position in ``client_ids``.
        train_N: The rows to train on, then how many each client has; the same for the test rows.
        server_N: The rows that the server tests on.
    """

    client_ids: np.ndarray
    levels: np.ndarray | None
    client_N: np.ndarray
    train_N: np.ndarray
    train_count_K: np.ndarray
    test_N: np.ndarray
    test_count_K: np.ndarray
    server_N: np.ndarray


def partition_rows(client: Any, level: Any, test: float, server: float, seed: int) -> Partition:
    """Group rows by client, and hold out shares of each client's rows at random.

    Args:
        client: Each row's client id: strings or whole numbers, in any order.
        level: Each row's level, a mapping from client id to level, or None.
        test: The share of its rows that a client tests on: at least one if it has two, and never all.
        server: The share of its rows that the server tests on.
        seed: Seed of the choice.

    Raises:
        InvalidValueError: If a share is out of range.
        DataError: If an id is missing or no id, or a client has no level or several.
    """
    for field, share in (("test", test), ("server", server)):
        require(0 <= share < 1, field, share, "a share of at least 0 and below 1")
    require(test + server < 1, "server", server, f"a share that leaves examples beside the share {test} to test on")
    ids, client_N = np.unique(client_ids(client), return_inverse=True)
    ids = ids.astype(str)
    count_K = np.bincount(client_N, minlength=len(ids))
    rows_K = np.split(np.argsort(client_N, kind="stable"), np.cumsum(count_K)[:-1])
    parts: list[list[np.ndarray]] = [[], [], []]
    for client_id, row_M in zip(ids, rows_K, strict=True):
        count = len(row_M)
        num_server = min(round(server * count), count - 1)
        at_least = 1 if test > 0 else 0
        num_test = max(0, min(max(round(test * count), at_least), count - num_server - 1))
        shuffled_M = row_M[client_generator(seed, TEST, str(client_id)).permutation(count)] if test or server else row_M
        for part, rows in zip(parts, np.split(shuffled_M, [num_server, num_server + num_test]), strict=True):
            part.append(np.sort(rows))
    server_N, test_N, train_N = (np.concatenate(part) for part in parts)
    _, test_count_K, train_count_K = (np.array([len(rows) for rows in part]) for part in parts)
    levels = levels_by_client(level, ids, client_N)
    return Partition(ids, levels, client_N, train_N, train_count_K, test_N, test_count_K, server_N)


def order_by_client(client: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order that puts rows client after client, and how many each client has.

    Raises:
        DataError: If a client is none of the ids.
    """
    number_of = {client: number for number, client in enumerate(ids.tolist())}
    numbers = []
    for value in client_ids(client, "test").astype(str).tolist():
        if value not in number_of:
            raise DataError(f"test has a client {value!r}, which has no other examples", "test", value)
        numbers.append(number_of[value])
    return np.argsort(numbers, kind="stable"), np.bincount(numbers, minlength=len(ids))


def share_or_arrays(field: str, value: Any, names: Sequence[str]) -> tuple[float, tuple[Any, ...] | None]:
    """Which of two things an argument is: a share, or arrays of examples; a `DataError` if it is neither."""
    if value is None or isinstance(value, NUMBER):
        return float(value or 0), None
    if isinstance(value, tuple | list) and len(value) == len(names):
        sizes = [len(array) for array in value]
        require(len(set(sizes)) == 1, field, sizes, "arrays of one length", DataError)
        return 0.0, tuple(value)
    kind = type(value).__name__
    raise DataError(f"{field} must be a share, arrays ({', '.join(names)}) or None, got {kind}", field, kind)


def client_generator(seed: int, purpose: int, client: int | str) -> np.random.Generator:
    """A client's own random numbers: other clients change nothing.

    Args:
        seed: The seed of the data.
        purpose: ``VALIDATION`` or ``TEST``.
        client: The client's number, or its id, which it has in other data too.
    """
    words = [client] if isinstance(client, int) else np.frombuffer(hashlib.sha256(client.encode()).digest()[:16], "<u4")
    return np.random.default_rng([seed, 0, purpose, *words])


def client_ids(client: Any, field: str = "client") -> np.ndarray:
    """Client ids as an array of whole numbers or of text.

    Raises:
        DataError: If there is none, or one is missing or neither.
    """
    ids_N = as_array(client, field)
    valid = ids_N.ndim == 1 and len(ids_N) > 0
    require(valid, field, ids_N.shape, "one id for each example, one or more", DataError)
    if ids_N.dtype.kind == "O":
        refuse_missing(ids_N, field)
        is_number_N = np.array([isinstance(value, NUMBER) for value in ids_N])
        if all(isinstance(value, int | np.integer) for value in ids_N):
            ids_N = ids_N.astype(np.int64)
        elif is_number_N.any():  # 1, 1.0 and "1" would be one client or two
            require(False, field, ids_N[is_number_N.argmax()], "all strings or all whole numbers", DataError)
        else:
            ids_N = ids_N.astype(str)
    if ids_N.dtype.kind == "S":
        ids_N = ids_N.astype(str)
    require(ids_N.dtype.kind in "iuU", field, str(ids_N.dtype), "strings or whole numbers", DataError)
    if ids_N.dtype.kind == "U":
        refuse_missing(ids_N, field)
    return ids_N
