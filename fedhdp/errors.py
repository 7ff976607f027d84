"""The errors that callers handle: one line each, with the field and the value.

All are ``ValueError``; the command line prints the line and exits with 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FedHDPError(ValueError):
    """Any input that cannot be used.

    Args:
        message: One line that names the field and the value.
        field: The name of the field, argument or option at fault, if there is one.
        value: Its value.
    """

    def __init__(self, message: str, field: str | None = None, value: object = None):
        super().__init__(message)
        self.field, self.value = field, value


class InvalidValueError(FedHDPError):
    """A value outside of its range."""


class ConfigError(FedHDPError):
    """An experiment's file, a run configuration or an option that cannot be read."""


class DataError(FedHDPError):
    """Examples that do not fit each other, the model or the groups."""


class ModelError(FedHDPError):
    """A model that cannot be initialized, applied or scored on the data."""


class RunError(FedHDPError):
    """A run directory or a checkpoint that is damaged, missing, locked or of another run."""


class LedgerError(FedHDPError):
    """A ledger that cannot be read, or does not allow the operation."""


def require(
    condition: bool, field: str, value: object, rule: str, error: type[FedHDPError] = InvalidValueError
) -> None:
    """Raise an error unless the condition holds.

    Args:
        condition: What must hold; written so that NaN fails it.
        field: The name of the field.
        value: Its value.
        rule: What the field must be, to complete "field must be ...".
        error: The class of the error.

    Raises:
        FedHDPError: If the condition does not hold.
    """
    if not condition:
        raise error(f"{field} must be {rule}, got {value!r}", field, value)


@contextmanager
def errors_in(place: str) -> Iterator[None]:
    """Put the place of the data before the message of any error: a file, a table, a row. It becomes a `DataError`."""
    try:
        yield
    except FedHDPError as error:
        raise DataError(f"{place}: {error}", error.field, error.value) from error


@contextmanager
def errors_of(field: str, kind: type[FedHDPError] = InvalidValueError) -> Iterator[None]:
    """Put a field before the field of an error about its value: ``delta`` becomes ``budgets.delta``."""
    try:
        yield
    except InvalidValueError as error:
        raise kind(f"{field}.{error}", f"{field}.{error.field}", error.value) from error
