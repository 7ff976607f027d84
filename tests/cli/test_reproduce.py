"""`fedhdp reproduce` as users see it: running, resuming, rendering and comparing tables."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
from experiment_helpers import files_of
from reproduction_runs import make_toy_parts, write_runs
from rich.console import Console

from fedhdp.cli import _options
from fedhdp.cli._progress import ProgressDisplay
from fedhdp.experiments.toml import from_toml
from fedhdp.reproduction import extensions, figures, render, runner
from fedhdp.reproduction.comparison import compare
from fedhdp.reproduction.tables import TableRow
from fedhdp.results import store
from fedhdp.results.schema import Summary


@pytest.fixture(autouse=True)
def _empty_data_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHDP_DATA", str(tmp_path / "no-data"))


@pytest.fixture
def toy(monkeypatch):
    """All parts at toy size, with three rounds by default."""
    monkeypatch.setattr(extensions, "make_parts", make_toy_parts(extensions.make_parts))


@pytest.fixture
def no_runs(monkeypatch):
    """Running anything fails the test."""
    monkeypatch.setattr(runner.runner, "run", lambda *_: pytest.fail("it ran"))


@pytest.fixture
def reproduce(run_cli):
    """Run `fedhdp reproduce` with these words: the exit code, standard output, standard error."""
    return functools.partial(run_cli, "reproduce")


def assert_refused(result: tuple[int, str, str], *words: str) -> None:
    """Exit code 2 and one line with these words."""
    code, _, err = result
    assert (code, err.count("\n")) == (2, 1)
    assert all(word in err for word in words), err


# Options


@pytest.mark.parametrize(
    ("table", "rows", "words"),
    [
        ("mnist", None, ("'mnist'", "noniid-mnist, skewed-mnist, fmnist, femnist, levels")),
        ("noniid-mnist", "fedavg", ("'fedavg'", "paper, non-private", "R = 0, 0.001", "pld")),
        ("levels", "dp-fedavg", ("'dp-fedavg'", "extensions, two, three, five")),
    ],
)
def test_unknown_names_are_refused_with_the_choices(reproduce, tmp_path, table, rows, words):
    options = ["--rows", rows] if rows else []
    assert_refused(reproduce(table, *options, "--out", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seeds", "0"], ("--seeds", "'0'", "--render")),
        (["--seeds", "many"], ("--seeds", "'many'")),
        (["--data", "tff"], ("--data", "'tff'", "auto, mnist, handwriting")),
        (["--data", "mnist"], ("mnist is not in the data directory",)),
        (["--rounds", "0"], ("0 is not in the range x>=1",)),
        (["--personal-epochs", "0"], ("0 is not in the range x>=1",)),
        (["--personal-epochs", "1", "--pulls", "none"], ("--personal-epochs", "--pulls none")),
        (["--render"], ("has no finished run of noniid-mnist",)),
        *((["--pulls", pulls], ("--pulls", repr(pulls))) for pulls in ("", "none,0.05", "no", "nan", "-1")),
    ],
)
def test_invalid_options(reproduce, tmp_path, options, words):
    assert_refused(reproduce("noniid-mnist", *options, "--out", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_table_is_required(reproduce):
    assert_refused(reproduce("--seeds", 3), "TABLE")


@pytest.mark.parametrize("mode", ["--render", "--compare=DP-FedAvg+Ditto"])
def test_modes_that_run_nothing_take_no_options_of_runs(reproduce, tmp_path, mode):
    write_runs(tmp_path, "noniid-mnist", 1, "dp-fedavg")
    result = reproduce("noniid-mnist", mode, "--rows", "dp-fedavg", "--out", tmp_path)
    assert_refused(result, mode.partition("=")[0], "--rows")


@pytest.mark.parametrize("words", [("noniid-mnist",), ("noniid-mnist", "--render"), ("--docs", "docs")])
def test_matplotlib_is_required_before_anything_runs(reproduce, no_runs, tmp_path, monkeypatch, words):
    monkeypatch.setattr(_options.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert_refused(reproduce(*words), "pip install 'fedhdp[figures]'")
    assert not list(tmp_path.iterdir())


# Running


@pytest.mark.slow
def test_interrupted_table_resumes_and_takes_more_seeds(reproduce, toy, tmp_path, monkeypatch):
    out = tmp_path / "out"
    words = ("noniid-mnist", "--rows", "dp-fedavg,fedhdp:0.01,average", "--out", out)
    rounds = []

    def stop_in_second_part(display, progress):
        rounds.append(progress.round)
        return len(rounds) < 8

    with monkeypatch.context() as patch:
        patch.setattr(ProgressDisplay, "watch", stop_in_second_part)
        code, _, err = reproduce(*words)
    assert code == 130
    assert "part 1 of 2: seed 0, paper starts, 6 variants" in err
    assert f"to resume: fedhdp reproduce {' '.join(map(str, words))}" in " ".join(err.split())
    finished = (out / "seed-0/paper/summary.json").stat().st_mtime_ns

    code, printed, err = reproduce(*words, "--seeds", 2, "--json")
    assert code == 0
    assert (out / "seed-0/paper/summary.json").stat().st_mtime_ns == finished
    assert "seed 0, poisson resumes" in err
    comparison = json.loads(printed)
    assert (comparison["seeds"], comparison["unfinished"]) == ([0, 1], [])
    lines = {(line["key"]["row"], line["key"]["pull"]): line["cells"] for line in comparison["lines"]}
    for row in ("DP-FedAvg+Ditto", "FedHDP r=0.01"):
        assert {pull for name, pull in lines if name == row} == {None, 0.005, 0.05, 0.25}
    assert all(len(cell["values"]) == 2 for cells in lines.values() for cell in cells.values())
    averaged, poisson = lines["average r=0.01", None]["acc_g"], lines["poisson r=0.01", None]["average"]
    assert averaged["values"] == poisson["values"]
    for name in ("table.csv", "table.md", "table.png", "summary.json"):
        assert (out / name).stat().st_size > 0


@pytest.mark.slow
def test_directory_of_another_experiment_is_refused_and_left_as_it_is(reproduce, toy, tmp_path, monkeypatch):
    words = ("noniid-mnist", "--rows", "dp-fedavg", "--out", tmp_path / "out")
    assert reproduce(*words)[0] == 0
    before = files_of(tmp_path)
    result = reproduce(*words, "--rounds", 4, "--sampling", "poisson")
    assert_refused(result, "seed-0/paper", "rounds, mechanism", "--out")
    assert files_of(tmp_path) == before
    result = reproduce("skewed-mnist", "--render", "--out", tmp_path / "out")
    assert_refused(result, "'noniid-mnist/paper'", "skewed-mnist")
    monkeypatch.setattr(runner.runner, "run", lambda *_: pytest.fail("it ran"))
    code, out, _ = reproduce("noniid-mnist", "--render", "--out", tmp_path / "out")
    assert code == 0
    assert "DP-FedAvg+Ditto" in out


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ("noniid-mnist", ("--seeds", "1-1", "--rounds", 4, "--rows", "dp-fedavg"), ("rounds",)),
        ("noniid-mnist", ("--rows", "chosen-pull", "--batches", "all"), ("training",)),
        ("skewed-mnist", ("--seeds", "1-1", "--rows", "dp-fedavg"), ("'noniid-mnist/paper'", "skewed-mnist")),
    ],
)
def test_incompatible_parts_are_refused(reproduce, toy, no_runs, tmp_path, table, options, words):
    write_runs(tmp_path / "out", "noniid-mnist", 1, "dp-fedavg")
    assert_refused(reproduce(table, *options, "--out", tmp_path / "out", "--data", "handwriting"), *words)


@pytest.mark.parametrize("name", ["experiment.toml", "letter.txt"])
def test_directory_with_other_files_is_refused(reproduce, no_runs, tmp_path, name):
    (tmp_path / name).touch()
    assert_refused(reproduce("noniid-mnist", "--rows", "dp-fedavg", "--out", tmp_path), "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_file_as_directory_is_refused(reproduce, no_runs, tmp_path):
    (tmp_path / "out").write_text("content")
    assert_refused(reproduce("noniid-mnist", "--out", tmp_path / "out"), "--out")
    assert (tmp_path / "out").read_text() == "content"


@pytest.mark.slow
def test_rows_and_pulls_are_added(reproduce, toy, tmp_path, monkeypatch):
    out = tmp_path / "out"
    words = ("noniid-mnist", "--out", out, "--json")
    code, printed, _ = reproduce(*words, "--rows", "dp-fedavg", "--pulls", 0.05)
    assert code == 0
    first, runs = json.loads(printed), {path: path.read_bytes() for path in out.rglob("seed-0/*/*") if path.is_file()}

    code, printed, err = reproduce(*words, "--rows", "dp-fedavg,fedhdp:0.1", "--pulls", "0.05,0.25")
    assert code == 0
    assert "part 2 of 2: seed 0, paper.2 starts, 3 variants" in err
    assert all(path.read_bytes() == content for path, content in runs.items())
    second = json.loads(printed)
    before, after = (
        {(line["key"]["row"], line["key"]["pull"]): line["cells"] for line in comparison["lines"]}
        for comparison in (first, second)
    )
    names = ("DP-FedAvg+Ditto", "FedHDP r=0.1")
    assert after.keys() == {(name, pull) for name in names for pull in (None, 0.05, 0.25)}
    assert after[names[0], 0.05] == before[names[0], 0.05]
    # The global model of DP-FedAvg was trained once for each pull: its number is the mean of both.
    summary = store.read_value(out / "seed-0/paper.2/summary.json", Summary)
    (added,) = [100 * v.server_accuracy for v in summary.variants if v.algorithm == "dp_fedavg"]
    mean = (before[names[0], None]["acc_g"]["mean"] + added) / 2
    assert after[names[0], None]["acc_g"]["mean"] == pytest.approx(mean)
    note = "pulls of a seed were run separately"
    assert [any(text.startswith(note) for text in comparison["notes"]) for comparison in (first, second)] == [
        False,
        True,
    ]
    assert second["seconds_per_seed"].keys() == {"paper"}

    monkeypatch.setattr(runner.runner, "run", lambda *_: pytest.fail("it ran"))
    assert reproduce(*words, "--rows", "fedhdp:0.1", "--pulls", 0.25)[0] == 0
    assert_refused(reproduce(*words, "--rows", "fedhdp:0.2", "--rounds", 7), "rounds")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "shown"),
    [
        ("noniid-mnist", "chosen-pull", r"chosen-pull r=0.025 +chosen"),
        ("skewed-mnist", "fedhdp:0.3", "FedHDP r=0.3"),
        ("levels", "three", "three: FedHDP, shared noise"),
        ("femnist", "non-private", r"Non-Private\+Ditto"),
    ],
)
def test_rows_of_every_kind_run(reproduce, toy, tmp_path, name, rows, shown):
    code, out, _ = reproduce(name, "--rows", rows, "--out", tmp_path / "out", "--rounds", 1)
    assert code == 0
    assert re.search(shown, out)
    assert (tmp_path / "out" / "table.png").exists()


@pytest.mark.slow
def test_noise_seed_is_repeatable(reproduce, toy, tmp_path):
    words = ("noniid-mnist", "--rows", "dp-fedavg", "--pulls", 0.05, "--seeds", 2)
    for folder in ("first", "second"):
        code, out, _ = reproduce(*words, "--noise-seed", 5, "--out", tmp_path / folder)
        assert code == 0
        assert "repeatable, and therefore not private" in out
    assert "--noise-seed 5" in (tmp_path / "first" / "table.md").read_text()
    assert (tmp_path / "first" / "table.csv").read_text() == (tmp_path / "second" / "table.csv").read_text()
    paths = sorted(tmp_path.glob("first/*/*/experiment.toml"))
    assert [from_toml(path.read_text(), "x").noise_seed for path in paths] == [5, 6]
    assert_refused(reproduce(*words, "--seeds", 3, "--out", tmp_path / "first"), "noise_seed")


# Rendering


def three_points_per_seed(row: TableRow, seed: int) -> float:
    """A difference between seeds."""
    return 3.0 * seed


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("table", ["noniid-mnist", "levels"])
def test_wide_table_is_split(reproduce, tmp_path, monkeypatch, table, columns):
    rows = "dp-fedavg,fedhdp:0.01" if table == "noniid-mnist" else None
    write_runs(tmp_path, table, 2, rows, three_points_per_seed)
    monkeypatch.setattr("fedhdp.cli.reproduce.console", lambda width: Console(width=columns, highlight=False))
    code, out, _ = reproduce(table, "--render", "--out", tmp_path)
    assert code == 0
    shown = out.partition("±: half")[0]
    assert max(map(len, shown.splitlines())) <= columns
    comparison = compare(tmp_path, table)
    words = " ".join(shown.split())
    for text in (render.global_table(comparison, wide=False), render.personal_table(comparison, wide=False)):
        assert all(cell.strip() in words for row in text.rows for cell in row[1:])
        assert all(word in words for row in text.rows for word in row[0].split())
    assert "…" not in shown


@pytest.mark.slow
def test_table_is_rendered_from_its_summary(reproduce, tmp_path):
    write_runs(tmp_path / "runs", "noniid-mnist", 2, "dp-fedavg,fedhdp:0.01", three_points_per_seed)
    _, first, _ = reproduce("noniid-mnist", "--render", "--out", tmp_path / "runs")
    (tmp_path / "summary").mkdir()
    (tmp_path / "runs" / "summary.json").rename(tmp_path / "summary" / "summary.json")
    code, second, _ = reproduce("noniid-mnist", "--render", "--out", tmp_path / "summary")
    assert code == 0
    page = tmp_path / "runs" / "report.html"
    assert f"{second}{page}\n" == first
    assert "DP-FedAvg+Ditto" in page.read_text()


@pytest.mark.slow
def test_pull_that_the_paper_does_not_have_is_drawn(reproduce, toy, tmp_path):
    words = ("noniid-mnist", "--rows", "dp-fedavg,fedhdp:0.01,fedhdp:0.1", "--pulls", "0.05,0.1")
    assert reproduce(*words, "--out", tmp_path / "out", "--data", "handwriting")[0] == 0
    labels = [handle.get_label() for handle in figures._legend(compare(tmp_path / "out", "noniid-mnist"))]
    assert "λ = 0.1" in labels
    assert "λ = 0.1, paper" not in labels
    assert "<code>fedhdp reproduce noniid-mnist --rows dp-fedavg" in (tmp_path / "out" / "report.html").read_text()


def test_difference_of_rows(reproduce, tmp_path):
    write_runs(tmp_path, "noniid-mnist", 3, "dp-fedavg,fedhdp:0.01", three_points_per_seed)
    words = ("noniid-mnist", "--out", tmp_path, "--compare", "FedHDP r=0.01")
    code, out, _ = reproduce(*words, "--compare", "DP-FedAvg+Ditto")
    assert (code, out) == (0, "+4.12 ±0.00, standard deviation 0.00; above 0 in 3 of 3 seeds\n")
    code, out, _ = reproduce(*words, "--column", "delta_g")
    assert code == 0
    assert out.endswith("above 0 in 3 of 3 seeds\n")
    assert_refused(reproduce(*words, "--compare", "FedHDP r=0.3"), "'FedHDP r=0.3'", "DP-FedAvg+Ditto")


def test_unknown_cause_is_refused(reproduce, tmp_path):
    assert_refused(reproduce("causes", "--rows", "base,luck", "--out", tmp_path / "out"), "'luck'", "base")
    assert not (tmp_path / "out").exists()


def test_docs_are_written(reproduce, tmp_path):
    committed, results = Path(__file__).parents[2] / "docs" / "results", tmp_path / "results"
    for name in ("intro.md", "levels/summary.json", "levels/findings.md"):
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_bytes((committed / name).read_bytes())
    code, out, _ = reproduce("--docs", results)
    assert code == 0
    names = ("results.md", "results/levels/table.md", "results/levels/table.png")
    assert out.split() == [str(tmp_path / name) for name in names]
    heading, *_ = (results / "levels" / "findings.md").read_text().splitlines()
    assert f"## {heading.lstrip('# ')}\n" in (tmp_path / "results.md").read_text()
    assert_refused(reproduce("--docs", results, "--seeds", 3), "--docs", "--seeds")
