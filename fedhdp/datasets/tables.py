"""A user's examples from a file: a table (CSV, Parquet) or an npz, with one row for each example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedhdp.archives import array_names, read_npz
from fedhdp.data import FederatedData
from fedhdp.errors import DataError, errors_in

MISSING = ["", "NA", "N/A", "NaN", "nan", "NULL", "null"]  # cells of a CSV file that are missing values
PARTS = {
    "train": ("x", "y", "client"),
    "test": ("test_x", "test_y", "test_client"),
    "server": ("server_x", "server_y"),
}  # the arrays of an npz; it may also have level


def load_table(
    path: str | Path,
    client: str,
    label: str,
    level: Any = None,
    test: float | str | Path | None = 0.2,
    server: float | str | Path | None = None,
    **others: Any,
) -> FederatedData:
    """Examples from a CSV or Parquet file; needs pyarrow (``pip install 'fedhdp[tables]'``).

    Args:
        path: The file, .csv or .parquet; a CSV file begins with the names of its columns.
        client: The column with each example's client.
        label: The column to predict.
        level: The column with each client's level, a mapping of clients to levels, or None.
        test: A share that clients hold out, or another file.
        server: A share that the server takes for its test set, another file, or None.
        **others: As in `FederatedData.from_dataframe`.

    Raises:
        DataError: If a file, a column or a cell cannot be used. Rows are counted from 1, without the CSV file's header.
    """
    text_columns = [name for name in (client, level) if isinstance(name, str)]
    parts: list[Any] = [path, test, server]
    for number, part in enumerate(parts):
        if isinstance(part, str | Path):
            with errors_in(str(part)):
                parts[number] = _read_table(Path(part), text_columns)
    with errors_in(str(path)):
        options: dict[str, Any] = {"test": parts[1], "server": parts[2], "name": Path(path).stem} | others
        return FederatedData.from_dataframe(parts[0], client, label, level, **options)


def _read_table(path: Path, text_columns: list[str]) -> Any:
    """A file as a table of pyarrow; these columns of a CSV file are read as text."""
    try:
        import pyarrow
        from pyarrow import csv, parquet
    except ImportError as error:
        raise DataError("tables need pyarrow: pip install 'fedhdp[tables]'", "path", str(path)) from error
    _check_file(path)
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise DataError("the file's name must end with .csv or .parquet", "path", str(path))
    try:
        if kind == ".parquet":
            return parquet.read_table(path)
        types = {name: pyarrow.string() for name in text_columns}
        options = csv.ConvertOptions(column_types=types, null_values=MISSING, strings_can_be_null=True)
        return csv.read_csv(path, convert_options=options)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"it cannot be read as {kind[1:]}: {reason}", "path", str(path)) from error


def load_npz(path: str | Path, test: float | None = 0.2, server: float | None = None, **others: Any) -> FederatedData:
    """Examples from an npz with the arrays x, y and client, one row for each example.

    Args:
        path: The file. It may also have level, test_x, test_y and test_client, server_x and server_y.
        test: The share that clients hold out, unless the file has test examples.
        server: The share that the server takes for its test set, unless the file has one.
        **others: As in `FederatedData.from_arrays`.

    Raises:
        DataError: If the file or an array cannot be used.
    """
    with errors_in(str(path)):
        arrays = _read_npz(Path(path))
        options: dict[str, Any] = {"test": test, "server": server, "name": Path(path).stem} | others
        for field, names in PARTS.items():
            if names[0] in arrays:
                options[field] = tuple(arrays[name] for name in names)
        x_N, y_N, client_N = options.pop("train")
        return FederatedData.from_arrays(x_N, y_N, client_N, arrays.get("level"), **options)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of `PARTS`, each part whole or absent, and level."""
    _check_file(path)
    known = {"level", *(name for part in PARTS.values() for name in part)}
    try:
        names, arrays = array_names(path), read_npz(path)
    except (OSError, ValueError) as error:
        raise DataError(f"it cannot be read as npz: {error}", "path", str(path)) from error
    for name in sorted(set(names) - known):
        raise DataError(f"the arrays must be among {', '.join(sorted(known))}, got {name!r}", "path", name)
    for part in PARTS.values():
        for name in part:
            if name not in arrays and (part == PARTS["train"] or arrays.keys() & set(part)):
                raise DataError(f"the array {name!r} is missing; there are {', '.join(names)}", "path", name)
    return arrays


def _check_file(path: Path) -> None:
    """Raise `DataError` unless there is a file that is not empty."""
    if not path.is_file():
        reason = "it is a directory" if path.is_dir() else "No such file or directory"
        raise DataError(f"it cannot be read: {reason}", "path", str(path))
    if not path.stat().st_size:
        raise DataError("it is empty", "path", str(path))
