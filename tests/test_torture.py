"""A short version of ``make torture``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "torture"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ("--quick", "--trials", "10"),
        ("--trials", "1", "--only", "contended ledger", "--only", "full disk", "--only", "read-only folder"),
        ("--trials", "1", "--only", "killed run", "--kills", "2"),
    ],
)
def test_nothing_fails_under_torture(arguments):
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, "FAILED" in done.stdout) == (0, False), done.stdout + done.stderr
