"""Progress as bars in a terminal and as lines elsewhere."""

from __future__ import annotations

import io
import signal

import pytest
from rich.console import Console

from fedhdp.cli import _progress
from fedhdp.cli._progress import CountDisplay, ProgressDisplay
from fedhdp.experiments import Progress


def console_of(terminal: bool, width: int = 120) -> Console:
    """A console that writes to memory."""
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False)


@pytest.fixture
def impatient(monkeypatch):
    """Every line and every note is due."""
    monkeypatch.setattr(_progress, "LINE_SECONDS", -1.0)
    monkeypatch.setattr(_progress, "NOTE_SECONDS", -1.0)


def test_counts_are_lines_outside_of_a_terminal(impatient, capsys):
    with CountDisplay() as display:
        display.update("downloading", 512, 1024)
        display.update("converting", 7, 0)
    assert capsys.readouterr().err == "downloading: 50%\nconverting: 7\n"


def test_rounds_are_lines_outside_of_a_terminal(impatient):
    display = ProgressDisplay(console_of(terminal=False))
    assert display.watch(Progress(("FedHDP",), (1,), 2, 0, 3))
    assert display.watch(Progress(("FedHDP",), (1,), 2, 3, 3, (0.5,)))
    assert display.console.file.getvalue() == "[1/2] round 3/3: FedHDP 50.0% accuracy\n"


@pytest.mark.parametrize(
    ("names", "numbers", "words"),
    [
        (("DP-FedAvg", "FedHDP"), (1, 2), "[1–2/9] round 3/3: DP-FedAvg 10.0%, FedHDP 11.0% accuracy"),
        (("DP-FedAvg", "FedHDP"), (1, 3), "[1, 3/9] round 3/3: DP-FedAvg 10.0%, FedHDP 11.0% accuracy"),
        (tuple("ABCDEFG"), tuple(range(1, 8)), "[1–7/9] round 3/3: 7 variants, A to G, the best G 16.0% accuracy"),
    ],
)
def test_variants_that_run_now_are_named(impatient, names, numbers, words):
    display = ProgressDisplay(console_of(terminal=False))
    values = tuple(0.1 + number / 100 for number in range(len(names)))
    display.watch(Progress(names, numbers, 9, 0, 3))
    display.watch(Progress(names, numbers, 9, 3, 3, values))
    assert display.console.file.getvalue() == f"{words}\n"


@pytest.mark.parametrize("width", [40, 80, 160])
def test_rounds_are_bars_in_a_terminal(impatient, width):
    with ProgressDisplay(console_of(terminal=True, width=width)) as display:
        display.watch(Progress(("FedHDP",), (1,), 1, 1, 3))
        display.watch(Progress(("FedHDP",), (1,), 1, 3, 3, (0.5,)))
    printed = display.console.file.getvalue()
    assert "FedHDP 50.0% accuracy" in printed


def test_bar_of_the_preparation_becomes_the_first_variants_bar():
    with ProgressDisplay(console_of(terminal=True)) as display:
        display.watch(Progress(("DP-FedAvg",), (1,), 2, 0, 3))
        display.watch(Progress(("DP-FedAvg", "FedHDP"), (1, 2), 2, 0, 3))
        display.watch(Progress(("DP-FedAvg", "FedHDP"), (1, 2), 2, 3, 3, (0.1, 0.5)))
    last = display.console.file.getvalue().rpartition("variant")[2]
    assert "s 1–2/2" in last
    assert "DP-FedAvg 10.0%, FedHDP 50.0% accuracy" in last


def test_ctrl_c_asks_the_run_to_stop():
    before = signal.getsignal(signal.SIGINT)
    with ProgressDisplay(console_of(terminal=False)) as display:
        signal.raise_signal(signal.SIGINT)
        assert not display.watch(Progress(("FedHDP",), (1,), 1, 1, 3))
        assert display.stop
    assert signal.getsignal(signal.SIGINT) is before
