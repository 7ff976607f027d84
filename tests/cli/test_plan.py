"""Tables in narrow terminals, and `fedhdp plan` as users see it."""

from __future__ import annotations

import functools
import io
import json

import pytest
from rich.console import Console

from fedhdp.cli._output import new_table, print_table


@pytest.fixture
def run(run_cli):
    """Run `fedhdp plan` with these arguments: the exit code, standard output, standard error."""
    return functools.partial(run_cli, "plan")


def test_plan_prints_levels_errors_and_costs(run):
    code, out, err = run("--level", "none:inf:5%", "--level", "relaxed:8:35%", "--level", "strict:2:60%")
    assert (code, err) == (0, "")
    for text in ("0.9026", "2.119", "target ε", "weighting bias", "DP-FedAvg, strictest for all", "'strict'"):
        assert text in out


def test_plan_as_json(run):
    code, out, _ = run("--level", "none:inf:0.05", "--level", "private:3.6:0.95", "--json")
    assert code == 0
    assert [level["name"] for level in json.loads(out)["levels"]] == ["none", "private"]


@pytest.mark.parametrize(
    ("level", "field", "value"),
    [
        ("strict:2", "--level", "'strict:2'"),
        ("strict:0:100%", "epsilon of 'strict'", "0.0"),
        ("a:1:150%", "share of 'a'", "1.5"),
    ],
)
def test_invalid_level(run, level, field, value):
    code, out, err = run("--level", level)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fedhdp: {field} must be")
    assert value in err


def test_json_and_toml_exclude_each_other(run):
    code, _, err = run("--level", "a:1:1", "--json", "--toml")
    assert (code, err.count("\n")) == (2, 1)
    assert "--json" in err


@pytest.mark.parametrize("width", [24, 40, 64, 200])
def test_narrow_table_keeps_names_and_numbers(width):
    shown = new_table(("level",), ("clients", "target ε", "noise z\nof a round", "ε PLD"))
    rows = [("a level of many words", "1,950", "12.25", "4.0025", "1.9957"), ("open", "50", "∞", "0", "∞")]
    for row in rows:
        shown.add_row(*row)
    console = Console(width=width, file=io.StringIO())
    print_table(console, shown)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert text.count("open") == text.count("─\n") == {24: 4, 40: 2, 64: 1, 200: 1}[width]  # a name in every piece
    assert all(number in text for row in rows for number in row[1:])
    assert "…" not in text
