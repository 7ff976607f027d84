"""Columns of a table as a model's inputs: numbers, standardized if asked for, and categories, one input for each value.

A column's mean, its deviation and the values that occur in it are statistics. Those of private clients are never used: no
noise is added to them, so no epsilon would cover them. Statistics are numbers that the caller gives, or are taken from
rows that the caller names: those of clients who opted out, or the server's.

Axis letters: N rows, F inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from fedhdp.data.values import MAX_FLOAT, is_missing
from fedhdp.errors import DataError, errors_in, require

Columns = Mapping[str, np.ndarray]
Moments = tuple[float, float]  # mean and standard deviation
Standardize = Literal["none", "public", "server"] | Mapping[str, Moments]


def column(columns: Columns, name: str, field: str) -> np.ndarray:
    """The column that a field names; a `DataError` if there is none."""
    require(isinstance(name, str), field, type(name).__name__, "the name of a column", DataError)
    if name in columns:
        return columns[name]
    similar = get_close_matches(name, columns, 1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"columns are {', '.join(columns)}"
    raise DataError(f"{field} must be a column of the table, got {name!r}; {hint}", field, name)


class CellError(DataError):
    """A cell that cannot be used, in a row that is counted from 0, and perhaps a hint."""

    def __init__(self, fault: str, field: str, value: object, row: int, hint: str = "", owner: str = ""):
        super().__init__(f"{fault} in row {row + 1}{owner}{hint}", field, value)
        self.fault, self.row, self.hint = fault, row, hint


@contextmanager
def errors_of_clients(columns: Columns, client: str) -> Iterator[None]:
    """Let errors of cells name the client whose row it is, where the table has a column of clients."""
    try:
        yield
    except CellError as error:
        if client not in columns or error.field is None:
            raise
        owner = f", of client {str(columns[client][error.row])!r}"
        raise CellError(error.fault, error.field, error.value, error.row, error.hint, owner) from error


class Encoder(NamedTuple):
    """How columns become inputs.

    Attributes:
        features: The columns, in order.
        values: The values of each categorical column.
        moments: Mean and deviation of each column that is standardized.
        fill: What replaces a missing value, by column.
        closed: The categorical columns in which another value is an error. In others, all of its inputs are 0.
    """

    features: tuple[str, ...]
    values: dict[str, tuple[str, ...]]
    moments: dict[str, Moments]
    fill: dict[str, Any]
    closed: frozenset[str]

    def encode(self, columns: Columns) -> np.ndarray:
        """The inputs [N, F] of a table's rows.

        Raises:
            DataError: If a column or a value is missing, or a value is no number or none of its category.
        """
        inputs = []
        if len(self.features) == 1 and (only := column(columns, self.features[0], "features")).ndim > 1:
            return only
        for name in self.features:
            cells_N = _filled(column(columns, name, "features"), self.fill, name)
            if name in self.values:
                inputs += self._one_hot(cells_N, name)
            else:
                mean, deviation = self.moments.get(name, (0.0, 1.0))
                inputs.append((_numbers(cells_N, name) - mean) / deviation)
        with np.errstate(over="ignore"):  # infinite inputs are refused with those of arrays
            return np.stack(inputs, axis=1).astype(np.float32)

    def _one_hot(self, cells_N: np.ndarray, name: str) -> list[np.ndarray]:
        texts_N = _texts(cells_N, name)
        if name in self.closed:
            for row in np.flatnonzero(~np.isin(texts_N, self.values[name])).tolist():
                _refuse(name, f"one of {', '.join(self.values[name])}", str(texts_N[row]), row)
        return [texts_N == value for value in self.values[name]]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each input."""
        values = [[f"{name}={value}" for value in self.values.get(name, ())] or [name] for name in self.features]
        return tuple(name for names in values for name in names)


def make_encoder(
    columns: Columns,
    features: Sequence[str],
    categories: Mapping[str, Sequence[Any]] | None = None,
    fill: Mapping[str, Any] | None = None,
    moments: Mapping[str, Moments] | None = None,
    source: Columns | None = None,
) -> Encoder:
    """Decide how columns become inputs.

    Args:
        columns: The table; only the types of its columns are used.
        features: The columns that become inputs.
        categories: The values of categorical columns.
        fill: What replaces a missing value, by column.
        moments: Mean and standard deviation of columns to standardize.
        source: Rows whose statistics may be used, for the moments of all numeric columns and for the values of
            categorical columns that are not in ``categories``.

    Raises:
        DataError: If a field names no feature, or the values of a column of text are not known.
    """
    _check_options(features, categories or {}, fill or {}, moments or {})
    values = {name: tuple(map(str, values)) for name, values in (categories or {}).items()}
    fill, numbers = dict(fill or {}), dict(moments or {})
    for name in features:
        cells_N = column(columns, name, "features")
        if name in values or cells_N.ndim > 1:
            continue
        if _is_text(cells_N) and source is None:
            value = next(cell for cell in cells_N.tolist() if not is_missing(cell))
            rule = f"a number, unless categories.{name} lists its values"
            _refuse(name, rule, value, cells_N.tolist().index(value))
        if source is None:
            continue
        parse = _texts if _is_text(cells_N) else _numbers
        parse(_filled(cells_N, fill, name), name)  # before the rows of the source, whose numbers are not the table's
        with errors_in("server"):  # public rows are the table's: they have no errors here
            parsed_N = parse(_filled(column(source, name, "features"), fill, name), name)
        if parse is _texts:
            values[name] = tuple(np.unique(parsed_N).tolist())
        else:
            numbers[name] = (float(parsed_N.mean()), float(parsed_N.std()) or 1.0)
    return Encoder(tuple(features), values, numbers, fill, closed=frozenset(categories or ()))


def _check_options(
    features: Sequence[str],
    categories: Mapping[str, Sequence[Any]],
    fill: Mapping[str, Any],
    moments: Mapping[str, Moments],
) -> None:
    """Raise `DataError` if an option names no feature, or moments are out of range."""
    for field, names in (("categories", categories), ("fill", fill), ("standardize", moments)):
        for name in names:
            require(name in features, field, name, f"given for features alone ({', '.join(features)})", DataError)
    for name, (mean, deviation) in moments.items():
        require(name not in categories, "standardize", name, "given for columns of numbers alone", DataError)
        valid = bool(np.isfinite(mean)) and 0 < deviation < np.inf
        require(valid, f"standardize.{name}", [mean, deviation], "a mean and a deviation above 0", DataError)


def _is_text(cells_N: np.ndarray) -> bool:
    """Whether a column has text that is no number; one that has both has wrong cells."""
    if cells_N.dtype.kind not in "OUS":
        return False
    cells = [cell for cell in cells_N.tolist() if not is_missing(cell)]
    return bool(cells) and all(isinstance(cell, str | bytes) and not _is_number(cell) for cell in cells)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _filled(cells_N: np.ndarray, fill: Mapping[str, Any], name: str) -> np.ndarray:
    if name not in fill:
        return cells_N
    return np.array([fill[name] if is_missing(cell) else cell for cell in cells_N.tolist()], object)


def _numbers(cells_N: np.ndarray, name: str) -> np.ndarray:
    """Cells as finite numbers."""
    is_column = cells_N.ndim == 1 and cells_N.dtype.kind in "biufOUS"
    require(is_column, name, f"{cells_N.dtype} {cells_N.shape}", "a column of numbers or text", DataError)
    if cells_N.dtype.kind in "OUS":
        for row, cell in enumerate(cells_N.tolist()):
            if is_missing(cell):
                _refuse_missing_cell(name, row)
            if not _is_number(cell):
                _refuse(name, "a number", cell, row)
    number_N = cells_N.astype(np.float64)
    for row in np.flatnonzero(~(np.abs(number_N) <= MAX_FLOAT)).tolist():
        if np.isnan(number_N[row]):
            _refuse_missing_cell(name, row)
        rule = "finite" if np.isinf(number_N[row]) else "of at most 32 bits"
        _refuse(name, rule, float(number_N[row]), row)
    return number_N


def _texts(cells_N: np.ndarray, name: str) -> np.ndarray:
    """Cells of a category as text."""
    for row, cell in enumerate(cells_N.tolist()):
        if is_missing(cell):
            _refuse_missing_cell(name, row)
    return cells_N.astype(str)


def _refuse_missing_cell(name: str, row: int) -> NoReturn:
    hint = f"; fill.{name} can state a value for missing ones"
    raise CellError(f"{name} is missing", name, None, row, hint)


def _refuse(name: str, rule: str, value: object, row: int) -> NoReturn:
    raise CellError(f"{name} must be {rule}, got {value!r}", name, value, row)
