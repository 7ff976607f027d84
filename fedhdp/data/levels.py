"""Levels of clients: one for each client, stated by row or by client, or counted and drawn.

Axis letters: N rows, K clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedhdp.data.values import NUMBER, as_array, is_missing
from fedhdp.errors import DataError, require

LevelSize: TypeAlias = int | float | Sequence[str]  # of a level: a count, a share of all clients, or its clients' ids


def levels_by_client(level: Any, ids: np.ndarray, client_N: np.ndarray) -> np.ndarray | None:
    """Each client's level, from a level for each row or from a mapping of ids to levels.

    Raises:
        DataError: If a client has no level or several, or a level is of no client.
    """
    if level is None:
        return None
    if isinstance(level, Mapping):
        level_of = {str(client): value for client, value in level.items()}
        if len(level_of) < len(level):
            (twice, _), *_ = Counter(map(str, level)).most_common(1)
            raise DataError(f"level must name each client once, got {twice!r} as a number and as text", "level", twice)
        for client in level_of.keys() - set(ids.tolist()):
            raise DataError(f"level names client {client!r}, which has no examples", "level", client)
        level_K = np.array([level_of.get(client) for client in ids.tolist()], object)
    else:
        level_K = _level_of_rows(as_array(level, "level"), ids, client_N)
    for client, value in zip(ids.tolist(), level_K, strict=True):
        if is_missing(value):
            raise DataError(f"client {client!r} has no level", "level", None)
    return level_K.astype(str)


def _level_of_rows(level_N: np.ndarray, ids: np.ndarray, client_N: np.ndarray) -> np.ndarray:
    rule = f"one for each of {len(client_N)} examples, or a mapping from client to level"
    require(level_N.shape == client_N.shape, "level", level_N.shape, rule, DataError)
    names, number_N = np.unique([_text(value) for value in level_N.tolist()], return_inverse=True)
    _, first_K = np.unique(client_N, return_index=True)
    number_K = number_N[first_K]
    for row in np.flatnonzero(number_N != number_K[client_N]):
        client, levels = str(ids[client_N[row]]), names[[number_K[client_N[row]], number_N[row]]].tolist()
        raise DataError(f"client {client!r} has two levels, {levels[0]!r} and {levels[1]!r}", "level", levels[1])
    return names[number_K].astype(object)


def _text(value: object) -> str:
    return "" if is_missing(value) else str(value)


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
    valid = 0 <= size <= (math.inf if is_count else 1)
    require(valid, "levels", size, f"a count, or a share of at most 1, for {level!r}", DataError)
    return int(size) if is_count else round(float(size) * clients, 6)
