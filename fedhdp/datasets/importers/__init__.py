"""Importers: raw files of foreign formats, downloaded or local, become datasets in the data directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedhdp.errors import DataError

ProgressCallback = Callable[[str, int, int], None]  # the step, how much of it is done, and its total (0: unknown)


@contextmanager
def refuse_damaged(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors of a file's reader into a `DataError` that names the file."""
    try:
        yield
    except errors as error:
        raise DataError(f"{path} is damaged or truncated: {error}", "file", path) from error
