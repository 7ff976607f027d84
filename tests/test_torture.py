"""A short version of ``make torture``, and the tests of its findings."""

from __future__ import annotations

import re
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


def test_every_finding_names_a_test():
    page = PROGRAM.parents[1] / "docs" / "explanation" / "robustness.md"
    names = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    tests = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.rglob("test_*.py"))
    assert len(names) > 15
    assert {name for name in names if f"def {name}(" not in tests} == set()
