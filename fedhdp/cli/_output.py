"""How commands print: one JSON document for programs, sentences and tables for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from fedhdp.privacy.accounting import format_epsilon


def print_json(answer: object) -> None:
    """One JSON document and nothing else; what is infinite is null."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n")
    sys.stdout.buffer.flush()


def console() -> Console:
    """Where people read; wide where no terminal says how wide it is."""
    width = None if sys.stdout.isatty() else 100
    return Console(width=width, highlight=False, markup=False, emoji=False)  # names are shown as they are


def in_short(epsilon: float | None, otherwise: str = "–") -> str:
    """An epsilon for a table, or the noise that keeps one: never rounded down."""
    return otherwise if epsilon is None else format_epsilon(epsilon)


def on_delta(delta: float, clients: int) -> list[str]:
    """What is to be said of a delta that leaves room to give somebody's data away: nothing, where it does not."""
    if delta * clients < 1:
        return []
    return [
        f"delta {delta:g} with {clients:,} clients: one who is drawn at random could be shown whole within it; "
        f"take one far below {1 / clients:.1g}"
    ]


def table(texts: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table: columns of words, which may fold, then columns of numbers, which may not."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in texts:
        shown.add_column(name, overflow="fold")
    for name in numbers:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def print_table(out: Console, shown: Table) -> None:
    """A table, in as many pieces as a narrow terminal needs, each with the columns of words."""
    texts = [column for column in shown.columns if column.justify == "left"]
    numbers = [column for column in shown.columns if column.justify != "left"]
    wide = {id(column): max(_wide(cell) for cell in (column.header, *column.cells)) + 2 for column in shown.columns}
    names = min(sum(wide[id(column)] for column in texts), out.width // 2)
    pieces: list[list] = [[]]
    for column in numbers:
        if pieces[-1] and names + sum(wide[id(one)] for one in (*pieces[-1], column)) > out.width:
            pieces.append([])
        pieces[-1].append(column)
    for piece in pieces:
        made = table((str(column.header) for column in texts), (str(column.header) for column in piece))
        for row, *cells in zip(shown.rows, *(column.cells for column in (*texts, *piece)), strict=True):
            made.add_row(*cells, end_section=row.end_section)
        out.print(made)


def _wide(cell: object) -> int:
    return max(map(len, str(cell).split("\n")))
