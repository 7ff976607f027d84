"""The command line as a whole: its start, its version, its errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
from experiment_helpers import FEDHDP, TINY, command

import fedhdp


def test_version():
    assert command("--version").stdout == f"fedhdp {fedhdp.__version__}\n"


def test_misspelled_command_gets_a_suggestion():
    done = command("rnu")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == "fedhdp: No such command 'rnu'. Did you mean 'run'?\n"


def test_long_value_is_cut(tmp_path):
    file = tmp_path / "long.toml"
    file.write_text(TINY.read_text().replace('"dp_fedavg"', f'"{"x" * 5000}"'))
    done = command("run", file)
    assert done.code == 2
    assert "variants[0].algorithm" in done.stderr
    assert len(done.stderr) < 1000


def test_missing_file_is_one_line(tmp_path):
    done = command("ledger", "show", tmp_path / "nowhere")
    assert done.code == 2
    assert "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.process
def test_help_imports_nothing_heavy():
    heavy = ("jax", "scipy", "optax", "dp_accounting", "matplotlib", "flwr", "numpy", "msgspec")
    code = "import sys; from fedhdp.cli import app; app(['--help'], standalone_mode=False); "
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.process
def test_package_is_a_command():
    done = subprocess.run([*FEDHDP, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"fedhdp {fedhdp.__version__}\n"
