"""Rows of arrays or of a table, one an example, among clients: ids, levels, classes, and the rows that are held out.

What a client holds out follows from the seed, its id and the number of its rows alone. With a client more or less, the
others train on the same examples; without that, the noise for one client's update would not cover the difference.

Axis letters: N rows, K clients.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedhdp.errors import DataError, require

BLOCK_BYTES, MAX_FLOAT = 2**26, float(np.finfo(np.float32).max)
VALIDATION, TEST = 1, 3  # the streams of what is held out; stream 2 draws levels


LevelSize: TypeAlias = int | float | Sequence[str]  # of a level: a count, a share of all clients, or its clients' ids
NUMBER = (int, float, np.number)


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
    """Which of two things an argument is: a share, or arrays of examples.

    Raises:
        DataError: If it is neither.
    """
    if value is None or isinstance(value, NUMBER):
        return float(value or 0), None
    if isinstance(value, tuple | list) and len(value) == len(names):
        sizes = [len(array) for array in value]
        if len(set(sizes)) > 1:
            raise DataError(f"{field} must have arrays of one length, got {sizes}", field, sizes)
        return 0.0, tuple(value)
    rule = f"a share, arrays ({', '.join(names)}) or None"
    raise DataError(f"{field} must be {rule}, got {type(value).__name__}", field, type(value).__name__)


def input_array(x: Any, count: int) -> np.ndarray:
    """Inputs as an array of numbers with this many rows.

    Raises:
        DataError: If they are not.
    """
    x_N = as_array(x, "x")
    if x_N.dtype.kind not in "biuf":
        raise DataError(f"x must be numbers, got {x_N.dtype}", "x", str(x_N.dtype))
    if x_N.ndim < 1 or len(x_N) != count:
        raise DataError(f"x must have a row for each of {count} examples, got the shape {x_N.shape}", "x", x_N.shape)
    return x_N


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
    if ids_N.ndim != 1 or not len(ids_N):
        shape = ids_N.shape
        raise DataError(f"{field} must be one id for each example, one or more, got the shape {shape}", field, shape)
    if ids_N.dtype.kind == "O":
        refuse_missing(ids_N, field)
        is_number_N = np.array([isinstance(value, NUMBER) for value in ids_N])
        if all(isinstance(value, int | np.integer) for value in ids_N):
            ids_N = ids_N.astype(np.int64)
        elif is_number_N.any():  # 1, 1.0 and "1" would be one client or two
            value = ids_N[is_number_N.argmax()]
            raise DataError(
                f"{field} must be all strings or all whole numbers, got {value!r} among others", field, value
            )
        else:
            ids_N = ids_N.astype(str)
    if ids_N.dtype.kind == "S":
        ids_N = ids_N.astype(str)
    if ids_N.dtype.kind not in "iuU":
        raise DataError(f"{field} must be strings or whole numbers, got {ids_N.dtype}", field, str(ids_N.dtype))
    if ids_N.dtype.kind == "U":
        refuse_missing(ids_N, field)
    return ids_N


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
    if level_N.shape != client_N.shape:
        rule = f"one for each of {len(client_N)} examples, or a mapping from client to level"
        raise DataError(f"level must be {rule}, got the shape {level_N.shape}", "level", level_N.shape)
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
    if not 0 <= size <= (math.inf if is_count else 1):
        raise DataError(f"level {level!r} must have a count, or a share of at most 1, got {size}", "levels", size)
    return int(size) if is_count else round(float(size) * clients, 6)


def class_targets(
    labels: Sequence[Any], classes: int | Sequence[str] | None
) -> tuple[list[np.ndarray], int, tuple[str, ...] | None]:
    """Labels of several parts as targets: text by its position among the classes' names, numbers as they are.

    Args:
        labels: For each part, the label of each example.
        classes: The number of classes, or their names in order; None to take them from the labels.

    Returns:
        The targets of each part, the number of classes (or of outputs), and the classes' names if they are known.

    Raises:
        DataError: If a label is missing, not finite, negative or of no class.
    """
    parts = [as_array(label, "y") for label in labels]
    names = None if classes is None or isinstance(classes, int) else tuple(map(str, classes))
    size = classes if isinstance(classes, int) else None if names is None else len(set(names))
    is_valid = size is None or (size >= 1 and size == (len(names) if names else size))
    require(is_valid, "classes", classes, "a number of at least 1, or names that differ")
    if any(part.dtype.kind in "OUS" for part in parts):
        return _text_targets(parts, names, size)
    for part in parts:
        _check_numbers(part)
        if (part.dtype.kind == "f") != (parts[0].dtype.kind == "f"):
            raise DataError(f"y must be {parts[0].dtype} in all parts, got {part.dtype}", "y", str(part.dtype))
    if parts[0].dtype.kind == "f":
        return parts, size or math.prod(parts[0].shape[1:]), names
    largest = max(int(part.max(initial=0)) for part in parts)
    size = largest + 1 if size is None else size
    if largest >= size:
        raise DataError(f"y must be from 0 to {size - 1}, the classes, got {largest}", "y", largest)
    return [part.astype(np.int32) for part in parts], size, names


def _text_targets(
    parts: Sequence[np.ndarray], names: tuple[str, ...] | None, size: int | None
) -> tuple[list[np.ndarray], int, tuple[str, ...]]:
    for part in parts:
        refuse_missing(part, "y")
    texts = [part.astype(str) for part in parts]
    names = names or tuple(np.unique(np.concatenate(texts)).tolist())
    size = len(names) if size is None else size
    if len(names) > size:
        raise DataError(f"classes must be at least {len(names)}, the labels there are, got {size}", "classes", size)
    return [_positions(text_N, names) for text_N in texts], size, names


def _positions(text_N: np.ndarray, names: Sequence[str]) -> np.ndarray:
    number_of = {name: number for number, name in enumerate(names)}
    for row, text in enumerate(text_N.tolist()):
        if text not in number_of:
            raise DataError(f"y must be one of {', '.join(names)}, got {text!r} in row {row + 1}", "y", text)
    return np.array([number_of[text] for text in text_N.tolist()], np.int32)


def _check_numbers(y_N: np.ndarray) -> None:
    if y_N.dtype.kind not in "biuf":
        raise DataError(f"y must be numbers or text, got {y_N.dtype}", "y", str(y_N.dtype))
    valid_N = np.isfinite(y_N) if y_N.dtype.kind == "f" else y_N >= 0
    for row in np.flatnonzero(~valid_N.reshape(len(y_N), -1).all(axis=1)):
        rule = "finite" if y_N.dtype.kind == "f" else "at least 0"
        raise DataError(f"y must be {rule}, got {y_N[row]} in row {row + 1}", "y", y_N[row].tolist())


def as_array(values: Any, field: str) -> np.ndarray:
    """Values as an array; objects that are numbers become numbers.

    Raises:
        DataError: If they do not form one.
    """
    try:
        array = np.asanyarray(values)
    except (ValueError, TypeError) as error:
        raise DataError(f"{field} must be an array, got {type(values).__name__}: {error}", field) from error
    if np.ma.is_masked(array):
        count = int(np.ma.count_masked(array))
        raise DataError(f"{field} must have no masked values, got {count}", field, count)
    return _numbers_of_objects(array) if array.dtype.kind == "O" else array


def _numbers_of_objects(array: np.ndarray) -> np.ndarray:
    """An array of objects as numbers if all of them are, else as it is."""
    try:
        number = np.array(array.tolist())
    except ValueError:  # lists of several lengths
        return array
    return number if number.dtype.kind in "biuf" and number.shape == array.shape else array


def is_missing(value: object) -> bool:
    """Whether a cell has no value: None, empty text, or what differs from itself, as NaN does."""
    if value is None or (isinstance(value, str | bytes) and not value):
        return True
    try:
        return bool(value != value)
    except TypeError:  # pandas.NA
        return True


def refuse_missing(values_N: np.ndarray, field: str) -> None:
    """Raise `DataError` if a value is missing."""
    for row, value in enumerate(values_N.tolist()):
        if is_missing(value):
            raise DataError(f"{field} is missing in row {row + 1}", field, value)


def invalid_rows(values_N: np.ndarray, scaled: bool) -> Iterator[int]:
    """The rows with NaN, infinity or a number that 32 bits cannot hold; arrays may be memory-mapped, and are read in blocks.

    Args:
        values_N: Inputs or targets.
        scaled: Whether integers become floats.
    """
    is_safe = np.can_cast(values_N.dtype, np.int32) or (values_N.dtype.kind in "iu" and scaled)
    block = max(1, BLOCK_BYTES // max(1, values_N[:1].nbytes))
    for first in range(0, 0 if is_safe or values_N.dtype.kind not in "fiu" else len(values_N), block):
        valid_N = _is_valid(np.asarray(values_N[first : first + block]))
        yield from (first + np.flatnonzero(~valid_N.reshape(len(valid_N), -1).all(axis=1))).tolist()


def invalid_value(values: np.ndarray) -> float:
    """The first value of a row that ``invalid_rows`` found."""
    row = np.atleast_1d(np.asarray(values)).ravel()
    value: float = row[~_is_valid(row)][0].item()
    return value


def _is_valid(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "iu":
        return (values >= -(2**31)) & (values < 2**31)
    return np.isfinite(values) if values.dtype.itemsize <= 4 else np.abs(values) <= MAX_FLOAT
