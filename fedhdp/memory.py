"""Whether this machine has the memory that something needs, asked before it is built."""

from __future__ import annotations

import os

from fedhdp.errors import require

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
TRAINED_COPIES = 4  # of a model, at least: the global one, a client's, its update, and the sum
UNKNOWN_MEMORY = 2**40  # where the system does not say: nobody has more by accident


def machine_memory() -> int:
    """The bytes of memory of this machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return UNKNOWN_MEMORY


def require_memory(size: int, field: str, value: object) -> None:
    """Raise `InvalidValueError` unless the machine has memory of this many bytes.

    Args:
        size: The bytes that are needed, at least.
        field: The name of the field that asks for them.
        value: Its value.

    Raises:
        InvalidValueError: If they are more than the machine has.
    """
    memory = machine_memory()
    rule = f"smaller: it needs {format_bytes(size)} of memory, and this machine has {format_bytes(memory)}"
    require(size <= memory, field, value, rule)


def format_bytes(size: int) -> str:
    """A number of bytes in words, such as 4.0 GB."""
    number, unit = float(min(size, 10**30)), 0
    while number >= 1000 and unit < len(UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {UNITS[unit]}"
