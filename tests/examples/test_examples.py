"""The examples run as they stand."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from experiment_helpers import command

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


@pytest.mark.slow
def test_hospitals(tmp_path):
    pytest.importorskip("pyarrow")
    done = command(
        "run", EXAMPLES / "hospitals/experiment.toml", "--out", tmp_path / "run", "--noise-seed", 1, "--json"
    )
    assert done.code == 0, done.stderr
    _, fedhdp = json.loads(done.stdout)["variants"]
    sizes = [(group["name"], group["clients"]) for group in fedhdp["groups"]]
    assert sizes == [("open", 4), ("mild", 8), ("strict", 8)]
    assert all(group["values"]["global/accuracy"] > 0.7 for group in fedhdp["groups"])
    assert [group["epsilon"] for group in fedhdp["groups"]] == [
        "inf",
        pytest.approx(8, abs=0.05),
        pytest.approx(2, abs=0.05),
    ]
    assert "opted out (open)" in fedhdp["preparation"]


def test_hospitals_data_is_that_of_its_script(tmp_path):
    pytest.importorskip("sklearn")
    shutil.copy(EXAMPLES / "hospitals/make_data.py", tmp_path)
    runpy.run_path(str(tmp_path / "make_data.py"))
    assert (tmp_path / "patients.csv").read_bytes() == (EXAMPLES / "hospitals/patients.csv").read_bytes()
