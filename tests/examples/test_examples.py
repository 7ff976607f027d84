"""The examples run as they stand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.slow
def test_quickstart(monkeypatch, capsys):
    run_example(monkeypatch, "quickstart.py", 2, 40)
    table = capsys.readouterr().out
    assert [name for name in ("non_private", "dp_fedavg", "hdp_fedavg", "fedhdp") if name not in table] == []


def test_sheet(monkeypatch, tmp_path):
    from matplotlib import image

    run_example(monkeypatch, "sheet.py", tmp_path / "sheet.png")
    assert image.imread(tmp_path / "sheet.png").shape[:2] == (7 * 28, 27 * 28)


@pytest.mark.slow
def test_sequences(monkeypatch, capsys):
    run_example(monkeypatch, "sequences.py", 2)
    table = capsys.readouterr().out
    assert [name for name in ("Non-Private", "DP-FedAvg", "FedHDP", "ε strict") if name not in table] == []
