"""How commands print: one JSON document for programs, sentences and tables for people."""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text


class SafeConsole(Console):
    """A console that prints control characters as escapes, so that a name cannot command the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string that is printed; rich calls this for cells of tables too."""
        return super().render_str(visible(text), **options)


def print_json(value: object) -> None:
    """Print a value as one JSON document; an infinite number is the string "inf"."""
    from fedhdp.results.store import encode_json

    sys.stdout.buffer.write(encode_json(value))
    sys.stdout.buffer.flush()


def visible(text: str) -> str:
    """Escape control characters, and those that change the direction of writing."""
    if text.isprintable():
        return text
    escaped = (c for c in set(text) if unicodedata.category(c).startswith("C") and c != "\n")
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in escaped})


def console(width: int = 100) -> Console:
    """Standard output for people, of this width where it is no terminal."""
    terminal = sys.stdout.isatty()
    return SafeConsole(width=None if terminal else width, highlight=False, markup=False, emoji=False)


def error_console() -> Console:
    """Standard error for people, where everything goes that is no result."""
    return SafeConsole(stderr=True, highlight=False, markup=False, emoji=False)


def epsilon_text(epsilon: float | None, otherwise: str = "–") -> str:
    """An epsilon, or a noise multiplier that keeps one, as a cell of a table: never rounded down."""
    from fedhdp.privacy.accounting import format_epsilon

    return otherwise if epsilon is None else format_epsilon(epsilon)


def number_text(number: float | None, digits: int = 4) -> str:
    """A number as a cell of a table, with this many digits; – for None."""
    return "–" if number is None else "∞" if number == math.inf else f"{number:.{digits}g}"


def delta_warnings(delta: float, clients: int) -> list[str]:
    """A warning about a delta that permits publishing a client's data; none where it is small enough."""
    if delta * clients < 1:
        return []
    risk = f"delta {delta:g} with {clients:,} clients permits publishing the data of a random client"
    return [f"{risk}; take one far below {1 / clients:.1g}"]


def new_table(texts: Iterable[str], numbers: Iterable[str], rows: Iterable[Iterable[str]] = ()) -> Table:
    """A table: columns of text, which may fold, then columns of numbers, which may not; more rows may be added."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table from `new_table` in as many pieces as the console's width requires.

    Each piece repeats the columns of text, which may fold to half of the width, and has as many columns of numbers as fit.
    """
    texts = [column for column in table.columns if column.justify == "left"]
    numbers = [column for column in table.columns if column.justify != "left"]
    text_width = min(sum(map(_width, texts)), console.width // 2)
    pieces: list[list[Column]] = [[]]
    for column in numbers:
        if pieces[-1] and text_width + sum(map(_width, [*pieces[-1], column])) > console.width:
            pieces.append([])
        pieces[-1].append(column)
    for piece in pieces:
        console.print(_piece(table, texts, piece))


def table_width(table: Table) -> int:
    """The width that a table takes in one piece."""
    return sum(map(_width, table.columns))


def _width(column: Column) -> int:
    lines = [line for cell in (column.header, *column.cells) for line in str(cell).split("\n")]
    return max(cell_len(visible(line)) for line in lines) + 2


def _piece(table: Table, texts: list[Column], numbers: list[Column]) -> Table:
    piece = new_table([str(column.header) for column in texts], [str(column.header) for column in numbers])
    for row, *cells in zip(table.rows, *(column.cells for column in (*texts, *numbers)), strict=True):
        piece.add_row(*cells, style=row.style, end_section=row.end_section)
    return piece
