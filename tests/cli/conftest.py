"""The command line in this process."""

from __future__ import annotations

import json
import sys
import warnings
from typing import NamedTuple

import pytest

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # typer's, about names in click
    from fedhdp import cli


class Output(NamedTuple):
    """What a command prints, and its exit code."""

    out: str
    err: str
    code: int


@pytest.fixture
def run_cli(monkeypatch, capfdbinary):
    """Run a command: its output and exit code."""

    def run(*arguments: object) -> Output:
        monkeypatch.setattr(sys, "argv", ["fedhdp", *map(str, arguments)])
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return Output(out.decode(), err.decode(), exit_info.value.code or 0)

    return run


@pytest.fixture
def run_json(run_cli):
    """Run a command with ``--json``: the document, which is all that it prints."""

    def run(*arguments: object) -> dict:
        out, err, code = run_cli(*arguments, "--json")
        assert (err, code) == ("", 0)
        return json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    return run


@pytest.fixture
def run_refused(run_cli):
    """Run a command that is refused: the one line that it prints on standard error."""

    def run(*arguments: object) -> str:
        out, err, code = run_cli(*arguments)
        assert (out, code, err.count("\n")) == ("", 2, 1)
        return err

    return run
