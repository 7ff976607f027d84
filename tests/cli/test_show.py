"""`fedhdp show` and `fedhdp plot`: their formats, and what they refuse."""

from __future__ import annotations

import csv
import importlib.util
import json

import pytest
from experiment_helpers import command
from run_files import write_run


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / name, seed, rounds=12 + seed) for seed, name in enumerate(("a_1", "b"))]


def test_text_names_what_differs(runs):
    shown = command("show", *runs)
    assert (shown.code, shown.stderr) == (0, "")
    assert "what differs in their settings" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 200


def test_one_run_has_no_column_of_runs(runs):
    assert str(runs[0]) not in command("show", runs[0]).stdout


def test_markdown(runs):
    first, rule, *rows = command("show", *runs, "--format", "markdown").stdout.splitlines()
    assert first.startswith(r"| run | algorithm | Acc\_g |")
    assert rule.startswith("| --- | --- | ---: |")
    assert len([row for row in rows if row.startswith("|")]) == 8


@pytest.mark.parametrize("format", ["text", "markdown", "latex"])
def test_tables_name_their_metric(runs, format):
    shown = command("show", *runs, "--format", format).stdout.replace("\\", "")
    assert "accuracy in %, variance across clients" in shown
    assert "g and l: clients' own data" in shown or "g: clients' own data" in shown


def test_latex_is_escaped(runs):
    shown = command("show", *runs, "--format", "latex").stdout
    assert r"\toprule" in shown
    assert r"a\_1" in shown
    assert r"$\varepsilon$ private" in shown
    assert r"\begin{tabular}{llr" in shown


def test_csv_and_json(runs, run_json):
    lines = list(csv.DictReader(command("show", *runs, "--format", "csv").stdout.splitlines()))
    assert {line["run"] for line in lines} == {str(run) for run in runs}
    document = json.loads(command("show", *runs, "--format", "json").stdout)
    assert [run["seed"] for run in document["runs"]] == [0, 1]
    assert document["settings"][str(runs[1])] == {"rounds": 13}
    assert document["means"][0]["half_interval"] is None


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_plot_writes_a_picture(ending, runs, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"picture.{ending}"
    done = command("plot", *runs, "--x", "weight", "--group", "server", "--group", "private", "--out", out)
    assert (done.code, done.stdout) == (0, "")
    assert out.stat().st_size > 5000


def test_picture_names_its_error_bars(runs, tmp_path):
    pytest.importorskip("matplotlib")
    assert command("plot", *runs, "--x", "round", "--out", tmp_path / "one.svg").code == 0
    assert "one seed: no error bars" in (tmp_path / "one.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("show", "nosuch"), "nosuch"),
        (("plot", "nosuch", "--x", "weight"), "nosuch"),
        (("plot", "RUN", "--x", "nosuch"), "--x"),
        (("plot", "RUN", "--x", "weight", "--y", "nosuch"), "--y"),
        (("plot", "RUN", "--x", "weight", "--model", "nosuch"), "--model"),
        (("plot", "RUN", "--x", "weight", "--group", "nosuch"), "--group"),
        (("plot", "RUN", "--x", "weight", "--out", "picture.bmp"), "--out"),
    ],
)
def test_bad_arguments_are_refused(arguments, word, runs, run_refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert word in run_refused(*(runs[0] if argument == "RUN" else argument for argument in arguments))
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_matplotlib_names_the_extra(runs, run_refused, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "fedhdp[figures]" in run_refused("plot", runs[0], "--x", "weight")
