"""Tables in narrow terminals, and names that are hostile to one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedhdp.cli._output import console, new_table, print_table


@pytest.mark.parametrize("width", [24, 40, 64, 200])
def test_narrow_table_keeps_names_and_numbers(width):
    shown = new_table(("level",), ("clients", "target ε", "noise z\nof a round", "ε PLD"))
    rows = [("a level of many words", "1,950", "12.25", "4.0025", "1.9957"), ("open", "50", "∞", "0", "∞")]
    for row in rows:
        shown.add_row(*row)
    narrow = Console(width=width, file=io.StringIO())
    print_table(narrow, shown)
    text = narrow.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert text.count("open") == text.count("─\n") == {24: 4, 40: 2, 64: 1, 200: 1}[width]  # a name in every piece
    assert all(number in text for row in rows for number in row[1:])
    assert "…" not in text


def test_control_characters_of_a_name_are_shown_and_not_obeyed(capsys):
    shown = new_table(("name",), ("ε",))
    shown.add_row("\x1b[2Jcleared \u202eturned שלום", "3.6")
    print_table(console(), shown)
    console().print("a sentence on \x1b]0;title\x07\nand a line")
    text = capsys.readouterr().out
    assert "\\x1b[2Jcleared \\u202eturned שלום" in text
    assert "\\x1b]0;title\\x07\nand a line" in text
    assert {c for c in text if not c.isprintable()} == {"\n"}
