"""Privacy is light to import, and does not need what only some systems have."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.process
def test_imports_neither_jax_nor_dp_accounting():
    code = (
        "import sys, fedhdp.privacy, fedhdp.theory.planning, fedhdp.cli.account, fedhdp.cli.ledger\n"
        "print([name for name in ('jax', 'dp_accounting') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.process
def test_works_without_fcntl_and_sched_getaffinity(tmp_path):
    code = (
        "import os, sys; sys.modules['fcntl'] = None; del os.sched_getaffinity\n"
        "from fedhdp.privacy import Ledger\n"
        "Ledger(sys.argv[1]).promise('strict', 1.0, 1e-5)\n"
        "sys.argv = ['fedhdp', 'ledger', 'show', sys.argv[1]]\n"
        "from fedhdp.cli import main; main()"
    )
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path / "ledger"], capture_output=True, text=True
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "strict" in process.stdout
