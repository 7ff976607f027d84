"""`fedhdp run`: its table, its JSON, its options and what they refuse."""

from __future__ import annotations

import json
import logging
import re
import statistics
from pathlib import Path

import pytest
from experiment_helpers import TINY, command, files_of, keep_going, tiny
from msgspec.structs import replace
from rich.console import Console
from run_files import write_run

from fedhdp.cli import _output
from fedhdp.cli._output import SafeConsole
from fedhdp.cli.show import print_runs
from fedhdp.experiments import EXPERIMENTS, Variant, from_toml, run
from fedhdp.results import Summary, read_value
from fedhdp.results.stored import read_runs


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    """The directory of a run of three rounds."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run(tiny(rounds=3), directory, keep_going)
    return directory


def test_list_names_the_built_in_experiments():
    listed = command("list").stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(EXPERIMENTS)


@pytest.mark.slow
def test_table_states_the_basis_of_epsilons(tmp_path):
    done = command("run", TINY, "--out", tmp_path / "run", "--rounds", 3)
    assert done.code == 0
    assert "FedHDP" in done.stdout
    assert "ε private" in done.stdout
    basis = r"delta 0\.0001, q 0\.3, z [\d.]+, 3 rounds, Poisson sampling, add or remove one client, PLD"
    assert re.search(basis, done.stdout)
    assert "not private" in done.stdout
    assert f"results in {tmp_path / 'run'}" in done.stderr
    assert re.search(r"\[1–2/2\] round 3/3.*: DP-FedAvg", done.stderr)  # plain lines where there is no terminal
    assert "\x1b" not in done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "run" / "report.html")
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_path_of_the_network_is_explained(tmp_path, monkeypatch):
    logger = logging.getLogger("fedhdp.network")
    monkeypatch.setattr(logger, "handlers", [])
    try:
        done = command("run", TINY, "--out", tmp_path / "run", "--rounds", 1, "--explain")
    finally:
        logger.setLevel(logging.NOTSET)
    line = "first layer: first/w (784 inputs → 8 units) is trained in the span of a client's 6 examples"
    assert done.stderr.splitlines().count(line) == 1


def test_json_is_one_document(finished_run):
    done = command("run", "--resume", finished_run, "--json")
    document = json.loads(done.stdout)
    assert set(document) >= {"experiment", "seconds", "variants", "version", "commit"}
    opted_out, private = document["variants"][1]["groups"]
    assert set(private["values"]) >= {"global/accuracy", "personal/accuracy"}
    assert (opted_out["unprotected"], opted_out["epsilon"]) == (True, "inf")
    assert private["epsilon"] > 0


def test_directory_of_a_run_is_left_alone(finished_run):
    before = files_of(finished_run)
    done = command("run", TINY, "--out", finished_run)
    assert done.code == 2
    assert f"fedhdp run --resume {finished_run}" in done.stderr
    assert files_of(finished_run) == before


def test_directory_of_a_run_is_priced_by_name_and_not_run(finished_run):
    priced, expected = (command("account", path, "--json") for path in (finished_run, finished_run / "experiment.toml"))
    assert (priced.code, priced.stdout) == (0, expected.stdout)
    refused = command("run", finished_run)
    assert refused.code == 2
    assert f"fedhdp run --resume {finished_run}" in refused.stderr


def test_bad_options_exit_2_and_write_nothing(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(TINY.read_text().replace("sampling_rate = 0.3", "sampling_rate = 1.5", 1))
    out = ("--out", tmp_path / "run")
    optimizer = tmp_path / "optimizer.toml"
    optimizer.write_text(f'server.optimizer.name = "adamm"\n{TINY.read_text()}')
    cases = {
        ("run", bad, *out): ("sampling_rate", "1.5"),
        ("run", optimizer, *out): ("server.optimizer.name", "adamm"),
        ("run", "nosuch", *out): ("nosuch", "quickstart"),
        ("run", tmp_path / "missing.toml", *out): ("missing.toml", "cannot be read"),
        ("run", TINY, "--rounds", -3, *out): ("rounds", "-3"),
        ("run", TINY, "--seed", -1, *out): ("seed", "-1"),
        ("run", "--resume", tmp_path): (str(tmp_path), "no run"),
        ("run", "--resume", tmp_path, "--rounds", 5): (str(tmp_path), "no run"),
        ("run", "--resume", tmp_path, "--seed", 5): ("--resume",),
        ("run", TINY, "--allow-more-epsilon", *out): ("--allow-more-epsilon",),
        ("run", "--resume", tmp_path, "--seeds", 5): ("--seeds", "--resume"),
        ("run", TINY, "--ledger", bad, *out): ("bad.toml", "ledger"),
    }
    for arguments, parts in cases.items():
        done = command(*arguments)
        assert (done.code, done.stdout) == (2, ""), arguments
        assert done.stderr.startswith("fedhdp: ")
        assert done.stderr.count("\n") == 1
        assert all(part in done.stderr for part in parts), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml", "optimizer.toml"]


@pytest.mark.slow
def test_seeds_are_one_folder_and_can_be_added(tmp_path):
    several = ("run", TINY, "--rounds", 2, "--out", tmp_path / "runs")
    document = json.loads(command(*several, "--seeds", "2", "--json").stdout)
    assert [(run["path"], run["seed"]) for run in document["runs"]] == [("seed-0", 0), ("seed-1", 1)]
    for seed in "01":
        experiment = from_toml((tmp_path / f"runs/seed-{seed}/experiment.toml").read_text(), "x")
        assert (experiment.seed, experiment.noise_seed) == (int(seed), 2 + int(seed))
    first = (tmp_path / "runs/seed-0/summary.json").stat().st_mtime_ns
    done = command(*several, "--seeds", "3")
    assert (tmp_path / "runs/seed-0/summary.json").stat().st_mtime_ns == first
    assert "mean of 3 seeds ± half of its 95% interval" in done.stdout
    summaries = [read_value(tmp_path / f"runs/seed-{seed}/summary.json", Summary) for seed in range(3)]
    accuracies = [100 * summary.variants[1].server_accuracy for summary in summaries]
    half = 4.3027 * statistics.stdev(accuracies) / 3**0.5  # Student's t with two degrees of freedom
    cell = f" {statistics.fmean(accuracies):.2f} ±{half:.2f} "
    assert cell in done.stdout
    assert cell in (tmp_path / "runs" / "table.md").read_text()
    assert done.stdout.count("ε private = ") == 1
    means = json.loads((tmp_path / "runs" / "summary.json").read_text())["means"]
    assert {mean["seeds"] for mean in means} == {3}
    again = command("run", "--resume", tmp_path / "runs")
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--seeds", "2", "--seed", "1"), "--seed"),
        (("--seeds", "0"), "--seeds"),
        (("--seeds", "2", "--ledger", "population.ledger"), "population.ledger"),
    ],
)
def test_bad_seeds_are_refused(options, field, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("run", TINY, "--rounds", 2, "--out", tmp_path / "runs", *options)
    assert done.code == 2
    assert field in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [200, 60])
def test_names_are_printed_as_they_are(width, capsys, monkeypatch, tmp_path):
    def narrow(**options: object) -> Console:
        return SafeConsole(**(options | {"width": width}))  # type: ignore[arg-type]

    monkeypatch.setattr(_output, "SafeConsole", narrow)
    groups = tuple(
        replace(group, name=name) for group, name in zip(tiny().mechanism.groups, ("[b]one", "two"), strict=True)
    )
    names = ["[/x] odd", "r=0.5, [bold]other"]
    variants = tuple(Variant(name) for name in names)
    mechanism = replace(tiny().mechanism, groups=groups)
    runs = [write_run(tmp_path / str(seed), seed, variants, mechanism=mechanism) for seed in (0, 1)]
    print_runs(read_runs(runs))
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert "10.50 ±" in printed
    assert max(map(len, printed.splitlines()[2:])) <= width
