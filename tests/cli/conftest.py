"""The command line in this process."""

from __future__ import annotations

import json

import pytest
from experiment_helpers import command


@pytest.fixture
def run_cli():
    """Run a command: its exit code and output."""
    return command


@pytest.fixture
def run_json():
    """Run a command with ``--json``: the document, which is all that it prints."""

    def run(*arguments: object) -> dict:
        code, out, err = command(*arguments, "--json")
        assert (err, code) == ("", 0)
        return json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    return run


@pytest.fixture
def run_refused():
    """Run a command that is refused: the one line that it prints on standard error."""

    def run(*arguments: object) -> str:
        code, out, err = command(*arguments)
        assert (out, code, err.count("\n")) == ("", 2, 1)
        return err

    return run
