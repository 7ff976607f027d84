"""Values that arrays may hold: numbers, none missing, none that 32 bits cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedhdp.errors import DataError, require

NUMBER = (int, float, np.number)
BLOCK_BYTES, MAX_FLOAT = 2**26, float(np.finfo(np.float32).max)


def as_array(values: Any, field: str) -> np.ndarray:
    """Values as an array; objects that are numbers become numbers; a `DataError` if they do not form one."""
    try:
        array = np.asanyarray(values)
    except (ValueError, TypeError) as error:
        raise DataError(f"{field} must be an array, got {type(values).__name__}: {error}", field) from error
    masked = int(np.ma.count_masked(array)) if np.ma.is_masked(array) else 0
    require(masked == 0, field, masked, "without masked values", DataError)
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


def input_array(x: Any, count: int) -> np.ndarray:
    """Inputs as an array of numbers with this many rows; a `DataError` if they are not."""
    x_N = as_array(x, "x")
    require(x_N.dtype.kind in "biuf", "x", str(x_N.dtype), "numbers", DataError)
    valid = x_N.ndim > 0 and len(x_N) == count
    require(valid, "x", x_N.shape, f"an array with a row for each of {count} examples", DataError)
    return x_N


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
