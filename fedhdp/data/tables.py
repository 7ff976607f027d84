"""Tables as the arrays that `FederatedData.from_arrays` takes: data frames, and datasets of other libraries.

Axis letters: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedhdp.data.columns import Columns, Standardize, column, errors_of_clients, make_encoder
from fedhdp.data.rows import Partition, partition_rows, share_or_arrays
from fedhdp.data.values import NUMBER, as_array, refuse_missing
from fedhdp.errors import DataError, errors_in, require


def read_columns(frame: Any) -> dict[str, np.ndarray]:
    """The columns of a table by name, as arrays.

    Args:
        frame: A data frame of pandas or polars, a table of pyarrow, or a mapping of names to arrays.

    Raises:
        DataError: If it is none of these, or a name occurs twice.
    """
    names = getattr(frame, "column_names", None)  # pyarrow
    if names is None:
        names = list(frame) if isinstance(frame, Mapping) else getattr(frame, "columns", None)
    require(names is not None, "frame", type(frame).__name__, "a table with columns", DataError)
    assert names is not None
    names = [str(name) for name in names]
    _require_once("frame", names)
    columns = {name: _stacked(as_array(frame[name], name), name) for name in names}
    sizes = {len(column) for column in columns.values()}
    valid = len(sizes) == 1 and sizes != {0}
    require(valid, "frame", sorted(sizes), "columns of one length, with one row or more", DataError)
    return columns


def _require_once(field: str, names: Sequence[str]) -> None:
    for name in names:
        if list(names).count(name) > 1:
            raise DataError(f"{field} must have each column once, got {name!r} twice", field, name)


def _stacked(cells_N: np.ndarray, name: str) -> np.ndarray:
    """A column whose cells are arrays or lists as one array."""
    cells = cells_N.tolist() if cells_N.dtype.kind == "O" else []
    if not any(isinstance(cell, list | np.ndarray) for cell in cells):
        return cells_N
    shapes = {np.shape(cell) if isinstance(cell, list | np.ndarray) else () for cell in cells}
    require(len(shapes) == 1, name, sorted(shapes), "of one shape in all rows", DataError)
    return np.stack(cells)


def huggingface_columns(dataset: Any, names: Sequence[str] | None) -> Any:
    """The columns of a ``datasets.Dataset``, decoded to arrays; a share or None as it is.

    Raises:
        DataError: If it is something else, as a dictionary of splits, or the rows of a column differ in shape.
    """
    if dataset is None or isinstance(dataset, NUMBER):
        return dataset
    is_dataset = isinstance(getattr(dataset, "num_rows", None), int)
    rule = "a datasets.Dataset, one split of it"
    require(is_dataset, "dataset", type(dataset).__name__, rule, DataError)
    selected = dataset if names is None else dataset.select_columns([n for n in names if n in dataset.column_names])
    return {name: as_array(values, name) for name, values in selected.with_format("numpy")[:].items()}


def torch_arrays(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets of a map-style PyTorch dataset.

    Raises:
        DataError: If it has no length, or its examples are no pairs of one shape.
    """
    require(hasattr(dataset, "__len__"), "dataset", type(dataset).__name__, "map-style, with a length", DataError)
    pairs = [dataset[row] for row in range(len(dataset))]
    try:
        x_N, y_N = ([np.asarray(value) for value in values] for values in zip(*pairs, strict=True))
        return np.stack(x_N), np.stack(y_N)
    except (ValueError, TypeError) as error:
        raise DataError(f"dataset must have pairs (x, y) of one shape: {error}", "dataset") from error


class TableArrays(NamedTuple):
    """A table as arrays: the arguments of `FederatedData.from_arrays`, and how inputs were made."""

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray
    level: Any
    test: Any
    server: Any
    preparation: str


def table_arrays(
    frame: Any,
    client: str,
    label: str,
    level: str | Mapping[Any, str] | None,
    test: Any,
    server: Any,
    features: Sequence[str] | None,
    categories: Mapping[str, Sequence[Any]] | None,
    fill: Mapping[str, Any] | None,
    standardize: Standardize,
    public: Sequence[str],
    seed: int,
) -> TableArrays:
    """Turn a table, and others with test examples, into arrays; arguments as in `FederatedData.from_dataframe`.

    Raises:
        DataError: If a column or a cell cannot be used.
    """
    columns = read_columns(frame)
    test_share, test_columns = _share_or_table("test", test)
    server_share, server_columns = _share_or_table("server", server)
    features = _check_columns(columns, client, label, level, features)
    level_N = column(columns, level, "level") if isinstance(level, str) else level
    source: Columns | None
    if standardize == "public":
        rows = partition_rows(columns[client], level_N, test_share, server_share, seed)
        source, preparation = _public_rows(columns, rows, public)
    else:
        source, preparation = _server_rows(server_columns, label, standardize)
    moments = standardize if isinstance(standardize, Mapping) else None
    with errors_of_clients(columns, client):
        encoder = make_encoder(columns, features, categories, fill, moments, source)

    def pair(part: Columns) -> tuple[np.ndarray, np.ndarray]:
        refuse_missing(column(part, label, "label"), label)
        y_N = part[label]
        with errors_of_clients(part, client):
            x_N = encoder.encode(part)
        return x_N, y_N[:, None] if y_N.dtype.kind == "f" and y_N.ndim == 1 else y_N

    x_N, y_N = pair(columns)
    with errors_in("test"):
        test = test_share if test_columns is None else (*pair(test_columns), column(test_columns, client, "client"))
    with errors_in("server"):
        server = server_share if server_columns is None else pair(server_columns)
    return TableArrays(x_N, y_N, columns[client], level_N, test, server, preparation)


def _check_columns(
    columns: Columns, client: str, label: str, level: object, features: Sequence[str] | None
) -> Sequence[str]:
    """The columns that are inputs: all others where they are not stated."""
    for field, name in (("client", client), ("label", label)):
        refuse_missing(column(columns, name, field), name)
    require(label not in (client, level), "label", label, "another column than client and level", DataError)
    if features is None:
        features = [name for name in columns if name not in (client, label, level)]
    for name in features:
        rule = "columns other than those of clients and labels"
        require(name not in (client, label), "features", name, rule, DataError)
    _require_once("features", features)
    require(len(features) > 0, "features", [], "one column or more beside client, label and level", DataError)
    return features


def _share_or_table(field: str, value: Any) -> tuple[float, dict[str, np.ndarray] | None]:
    if value is None or isinstance(value, int | float):
        return share_or_arrays(field, value, ())[0], None
    return 0.0, read_columns(value)


def _server_rows(server_columns: Columns | None, label: str, standardize: Standardize) -> tuple[Columns | None, str]:
    """The server's rows if their statistics may be used, and a sentence about the statistics."""
    if isinstance(standardize, Mapping):
        return None, "standardized by given means and deviations"
    rule = "none, public, server, or a mean and a deviation for each column"
    require(standardize in ("none", "server"), "standardize", standardize, rule, DataError)
    if standardize == "none":
        return None, ""
    if server_columns is None:
        raise DataError("standardize = 'server' needs a table of the server's examples", "standardize", standardize)
    column(server_columns, label, "server")
    return server_columns, f"standardized by the server's {len(server_columns[label])} examples"


def _public_rows(columns: Columns, rows: Partition, public: Sequence[str]) -> tuple[Columns, str]:
    """The training rows of clients whose level is public, and a sentence about them."""
    if rows.levels is None or not public:
        raise DataError("standardize = 'public' needs levels, and a level that opted out", "standardize", "public")
    is_public_K = np.isin(rows.levels, list(public))
    row_N = rows.train_N[is_public_K[rows.client_N[rows.train_N]]]
    if not len(row_N):
        levels = f"clients with level {', '.join(public)}, levels are {', '.join(np.unique(rows.levels))}"
        raise DataError(f"standardize = 'public' needs {levels}", "standardize", "public")
    about = f"the {len(row_N)} training examples of clients who opted out ({', '.join(public)})"
    preparation = f"standardized by {about}; no epsilon covers these statistics"
    return {name: cells_N[row_N] for name, cells_N in columns.items()}, preparation
