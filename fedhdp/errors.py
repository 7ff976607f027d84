"""The errors that callers handle: one line each, with the field and the value.

All are ``ValueError``; the command line prints the line and exits with 2.
"""

from __future__ import annotations


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


def require(condition: bool, field: str, value: object, rule: str) -> None:
    """Raise ``InvalidValueError`` unless the condition holds.

    Args:
        condition: What must hold; written so that NaN fails it.
        field: The name of the field.
        value: Its value.
        rule: What the field must be, to complete "field must be ...".

    Raises:
        InvalidValueError: If the condition does not hold.
    """
    if not condition:
        raise InvalidValueError(f"{field} must be {rule}, got {value!r}", field, value)
