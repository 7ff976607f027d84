"""The paper's tables run again: every row by its name, on from an interruption, and set beside the paper without slips."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from fedhdp.cli import main
from fedhdp.cli._progress import ProgressDisplay
from fedhdp.experiments.components import Femnist, Handwriting, Mlp, Mnist
from fedhdp.experiments.config import from_toml, to_toml
from fedhdp.experiments.runner import Interrupted
from fedhdp.privacy.accounting import gaussian_epsilon
from fedhdp.privacy.calibration import noise_multiplier_for
from fedhdp.reproduction import comparison as paper_tables
from fedhdp.reproduction import extensions as own
from fedhdp.reproduction import figures as paper_figures
from fedhdp.reproduction import render as paper_writing
from fedhdp.reproduction import runner as reproducing
from fedhdp.reproduction import runs as paper_runs
from fedhdp.reproduction import tables as paper
from fedhdp.reproduction.claims import orderings
from fedhdp.reproduction.files import summary, write
from fedhdp.reproduction.tables import TABLES, Options, Part, Row
from fedhdp.results import store as results
from fedhdp.results.schema import GroupResult, Summary, VariantResult

ALL = [*TABLES, "levels"]
SMALL = Handwriting(40, samples=5, test_samples=2, server_test=50)


@pytest.fixture(autouse=True)
def _no_data(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHDP_DATA", str(tmp_path / "no-data"))


def small(part: Part) -> Part:
    """A part at toy size."""
    chosen = part.experiment
    first, *others = chosen.mechanism.groups
    each = 38 // len(others)
    groups = (
        replace(first, clients=40 - each * len(others), sampling_rate=0.5),
        *(replace(group, clients=each, sampling_rate=0.5) for group in others),
    )
    data = replace(SMALL, split="skewed" if part.experiment.name.startswith("skewed") else "one_digit")
    changes = {
        "data": replace(data, validation=getattr(chosen.data, "validation", 0.0)),
        "model": Mlp(hidden=8),
        "mechanism": replace(chosen.mechanism, groups=groups),
        "training": replace(chosen.training, epochs=1, batch_size=5),
        "evaluate_every": 2,
    }
    return part._replace(experiment=replace(chosen, **changes))


@pytest.fixture
def toy(monkeypatch):
    """The command line with every part at toy size and three rounds unless told otherwise."""
    whole = own.parts

    def parts(name, rows, seeds, options):
        options = options._replace(rounds=3) if options.rounds == paper.ROUNDS else options
        return [small(part) for part in whole(name, rows, seeds, options)]

    monkeypatch.setattr(own, "parts", parts)


def command(monkeypatch, *words: object) -> int:
    """The command line in this process; the status that it ends with."""
    monkeypatch.setattr(sys, "argv", ["fedhdp", "reproduce", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


# tables as experiments


def name_of(row: Row) -> str:
    """A row as it is asked for."""
    names = {algorithm: name for name, algorithm in paper.BASELINES.items()}
    return names.get(row.algorithm) or f"fedhdp:{row.weight:g}"


def test_every_row_of_the_paper_is_found_by_its_name():
    found = 0
    for name, table in TABLES.items():
        for line in paper.printed(table.dataset):
            rows, parts = own.rows_of(name, name_of(line.row))
            assert (rows, parts) == ([line.row], [])
            variants = paper.paper_part(name, rows, SMALL_OF[name], "fixed").variants
            wanted = f"{line.row.label}, λ={line.pull:g}"
            (variant,) = [variant for variant in variants if variant.name == wanted]
            assert set(variant.pulls.values()) == {line.pull}
            found += 1
    assert found == len(paper.printed()) == 105


SMALL_OF = {name: table.choices["handwriting"].data() for name, table in TABLES.items()}


@pytest.mark.parametrize("name", ALL)
def test_a_table_is_of_experiments_that_can_be_written_and_read(name):
    parts = own.parts(name, seeds=range(2))
    assert len({part.folder for part in parts}) == len(parts)
    for part in parts:
        assert part.experiment.seed == part.seed
        assert part.experiment.rounds == 500
        assert from_toml(to_toml(part.experiment), "x") == part.experiment


def test_the_hyper_parameters_are_the_papers():
    for name, noise, epochs, rate, clip in (
        ("noniid-mnist", 1.5, 25, 0.5, 0.5),
        ("skewed-mnist", 1.5, 25, 0.5, 0.5),
        ("fmnist", 4.0, 50, 0.01, 0.5),
        ("femnist", 1.0, 25, 0.02, 2.0),
    ):
        (part, *_) = own.parts(name, "paper")
        chosen, (opted_out, private) = part.experiment, part.experiment.mechanism.groups
        assert (chosen.training.epochs, chosen.training.learning_rate, chosen.training.batch_size) == (epochs, rate, 20)
        assert (chosen.mechanism.clip.initial, private.noise_multiplier) == (clip, noise)
        assert opted_out.clients == round(0.05 * TABLES[name].clients)
        assert chosen.mechanism.sampling == "fixed"
        spent = gaussian_epsilon(noise, private.sampling_rate, chosen.rounds, chosen.delta)
        assert round(spent, 1) == TABLES[name].epsilon


@pytest.mark.parametrize(
    ("table", "rows", "said"),
    [
        ("mnist", None, r"no table 'mnist'; there are noniid-mnist, skewed-mnist, fmnist, femnist, levels"),
        (
            "noniid-mnist",
            "fedavg",
            r"no row 'fedavg' in noniid-mnist; there are paper, non-private, .*R = 0, 0.001.*pld",
        ),
        ("noniid-mnist", "fedhdp:", "no row 'fedhdp:'"),
        ("noniid-mnist", "fedhdp:-1", "no row 'fedhdp:-1'"),
        ("noniid-mnist", "fedhdp:nan", "no row 'fedhdp:nan'"),
        ("noniid-mnist", "", "no row ''"),
        ("fmnist", "ours", "no row 'ours' in fmnist"),
        ("levels", "dp-fedavg", "no row 'dp-fedavg' in levels; there are ours, three, five"),
    ],
)
def test_an_unknown_table_or_row_is_refused_in_one_line_that_lists_what_there_is(
    table, rows, said, monkeypatch, capsys
):
    assert command(monkeypatch, table, *(["--rows", rows] if rows is not None else []), "--out", "never") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error)
    assert not Path("never").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0"], "--seeds must be at least one seed, got '0'; to draw what is there: --render"),
        (["--seeds", "many"], "--seeds must be a number of seeds"),
        (["--data", "tff"], "--data must be one of auto, mnist, handwriting for this table, got 'tff'"),
        (["--data", "mnist"], "mnist is not in the data directory"),
        (["--rounds", "0"], "0 is not in the range x>=1"),
        (["--personal-epochs", "26"], "personal_epochs must be from 1 to epochs, got 26"),
        (["--render"], "holds no finished part of noniid-mnist"),
    ],
)
def test_bad_options_are_refused_in_one_line_before_anything_is_run(words, said, monkeypatch, capsys, tmp_path):
    assert command(monkeypatch, "noniid-mnist", *words, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "out").exists()


def test_data_is_the_papers_where_it_is_there_and_else_the_nearest(monkeypatch):
    present, there = {"mnist", "mnist-writers", "femnist-330"}, {"330": 330, "leaf": 3500}
    monkeypatch.setattr(paper, "is_available", lambda name: name in present)
    monkeypatch.setattr(paper, "load_arrays", lambda name: {})
    monkeypatch.setattr(paper, "load_femnist", lambda origin, classes: SimpleNamespace(clients=there[origin]))
    found = {name: paper.choose_data(table.choices, "auto") for name, table in TABLES.items()}
    assert found["noniid-mnist"] == Mnist(2000)
    assert found["skewed-mnist"] == Mnist(2000, split="skewed")
    assert found["fmnist"] == Mnist(836, split="by_writer")
    assert found["femnist"] == Femnist(330, "330")
    assert "substitute" not in paper.stands_for(TABLES["noniid-mnist"], found["noniid-mnist"])
    for name in ("fmnist", "femnist"):
        assert "a substitute for TFF's federated EMNIST" in paper.stands_for(TABLES[name], found[name])
        groups = paper.groups_of(TABLES[name], found[name])
        assert sum(group.clients * group.sampling_rate for group in groups) == pytest.approx(100, abs=0.1)
    there["330"] = 150
    assert paper.choose_data(TABLES["femnist"].choices, "writers") == Femnist(150, "330")
    present |= {"femnist-leaf"}
    assert paper.choose_data(TABLES["femnist"].choices, "auto") == Femnist(3400, "leaf")
    present |= {"emnist-tff"}
    assert paper.choose_data(TABLES["fmnist"].choices, "auto") == Femnist(3383, "tff", 10)
    assert "substitute" not in paper.stands_for(TABLES["fmnist"], Femnist(3383, "tff", 10))


# rows of our own


def test_our_rows_keep_the_papers_promise_by_poisson_sampling():
    (rows, parts) = own.rows_of("noniid-mnist", "ours")
    assert rows == []
    assert set(parts) == {name for name, one in own.OURS.items() if one.read_from is None}
    for name in parts:
        chosen = own.own_part(name, SMALL_OF["noniid-mnist"])
        private = chosen.mechanism.groups[1]
        accountant = "rdp" if own.OURS[name].noise_multiplier is None else "pld"
        spent = gaussian_epsilon(
            private.noise_multiplier, private.sampling_rate, chosen.rounds, chosen.delta, accountant
        )
        assert chosen.mechanism.sampling == "poisson"
        assert round(spent, 1) == own.PROMISE


def test_the_noise_that_is_written_down_is_what_pld_accounting_asks_for():
    asked = noise_multiplier_for(own.PROMISE, 0.05, 500, 1e-4, "pld")
    assert pytest.approx(asked, rel=0.003) == own.PLD_NOISE
    assert gaussian_epsilon(own.PLD_NOISE, 0.05, 500, 1e-4, "pld") <= own.PROMISE


def test_the_weight_of_theory_is_near_the_one_that_the_paper_tuned():
    (variant,) = own.own_part("theory", SMALL_OF["noniid-mnist"]).variants
    assert 0.02 <= variant.weights["private"] <= 0.03


# running


def test_an_interrupted_table_goes_on_and_loses_no_row_and_takes_more_seeds_later(toy, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    rows = ("noniid-mnist", "--rows", "dp-fedavg,fedhdp:0.01,average", "--out", out)
    seen = []

    def stops(display, progress):
        seen.append(progress.round)
        return len(seen) < 8  # inside of the second part

    with monkeypatch.context() as patch:
        patch.setattr(ProgressDisplay, "watch", stops)
        assert command(monkeypatch, *rows) == 130
    said = capsys.readouterr().err
    assert "part 1 of 2: seed 0, paper begins, 6 variants" in said
    assert f"to go on: fedhdp reproduce {' '.join(map(str, rows))}" in " ".join(said.split())
    finished = (out / "seed-0/paper/summary.json").stat().st_mtime_ns
    assert command(monkeypatch, *rows, "--seeds", 2, "--json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (out / "seed-0/paper/summary.json").stat().st_mtime_ns == finished
    assert "seed 0, poisson goes on" in printed.err
    assert found["seeds"] == [0, 1]
    assert found["unfinished"] == []
    lines = {(line["key"]["row"], line["key"]["pull"]): line["cells"] for line in found["lines"]}
    for row in ("DP-FedAvg+Ditto", "FedHDP r=0.01"):
        assert {pull for name, pull in lines if name == row} == {None, 0.005, 0.05, 0.25}
    assert all(len(cell["values"]) == 2 for cells in lines.values() for cell in cells.values())
    assert lines["average r=0.01", None]["acc_g"] == {
        **lines["poisson r=0.01", None]["average"],
        **{name: lines["average r=0.01", None]["acc_g"][name] for name in ("paper", "difference", "holds")},
    }
    for name in ("table.csv", "table.md", "table.json", "table.png", "summary.json"):
        assert (out / name).stat().st_size > 0


def test_a_folder_that_another_experiment_made_is_refused_and_left_alone(toy, tmp_path, monkeypatch, capsys):
    words = ("noniid-mnist", "--rows", "dp-fedavg", "--out", tmp_path / "out")
    assert command(monkeypatch, *words) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert command(monkeypatch, *words, "--rounds", 4, "--sampling", "poisson") == 2
    said = capsys.readouterr().err
    assert "seed-0/paper was made by another experiment: rounds, mechanism differ; give another --out" in said
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert command(monkeypatch, "skewed-mnist", "--render", "--out", tmp_path / "out") == 2
    assert "holds 'noniid-mnist/paper', not a part of skewed-mnist" in capsys.readouterr().err
    monkeypatch.setattr(reproducing.runs, "run", lambda *_: pytest.fail("it ran"))
    assert command(monkeypatch, *words[:1], "--render", *words[3:]) == 0
    assert "DP-FedAvg+Ditto" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "words", "complaint"),
    [
        ("noniid-mnist", ("--seeds", "1-1", "--rounds", 4), "rounds differ"),
        ("noniid-mnist", ("--seeds", "1-1", "--batches", "all"), "training differ"),
        ("noniid-mnist", ("--seeds", "1-1", "--sampling", "poisson"), "mechanism differ"),
        ("noniid-mnist", ("--rows", "momentum", "--rounds", 4), "rounds differ"),
        ("noniid-mnist", ("--rows", "chosen-pull", "--batches", "all"), "training differ"),
        ("skewed-mnist", ("--seeds", "1-1"), "holds 'noniid-mnist/paper', not a part of skewed-mnist"),
    ],
)
def test_what_cannot_be_compared_is_not_run_into_one_table(toy, tmp_path, monkeypatch, capsys, table, words, complaint):
    made_up(tmp_path / "out", "noniid-mnist", 1, "dp-fedavg")
    out = ("--out", tmp_path / "out", "--data", "handwriting")
    monkeypatch.setattr(reproducing.runs, "run", lambda *_: pytest.fail("it ran"))
    rows = () if "--rows" in words else ("--rows", "dp-fedavg")
    assert command(monkeypatch, table, *rows, *words, *out) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_a_folder_of_parts_that_cannot_be_compared_is_not_drawn(tmp_path):
    made_up(tmp_path, "noniid-mnist", 2, "dp-fedavg,pld,chosen-pull")  # what they may differ in, they do
    assert paper_tables.compare(tmp_path, "noniid-mnist").seeds == (0, 1)
    for folder in ("seed-1/paper", "seed-0/pld"):
        path = tmp_path / folder / results.EXPERIMENT
        whole = path.read_text()
        path.write_text(whole.replace("rounds = 500", "rounds = 400"))
        with pytest.raises(
            ValueError, match=r"cannot stand in one table .*: rounds differ from what noniid-mnist/paper"
        ):
            paper_tables.compare(tmp_path, "noniid-mnist")
        path.write_text(whole)


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("table", ["noniid-mnist", "levels"])
def test_a_table_that_is_too_wide_for_a_terminal_is_shown_in_pieces(tmp_path, monkeypatch, capsys, table, columns):
    rows = "dp-fedavg,fedhdp:0.01" if table == "noniid-mnist" else None
    made_up(tmp_path, table, 2, rows, shift=lambda row, seed: 3.0 * seed)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert command(monkeypatch, table, "--render", "--out", tmp_path) == 0
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).partition("±: half")[0]
    assert max(map(len, shown.splitlines())) <= columns
    found = paper_tables.compare(tmp_path, table)
    for make in (paper_writing.global_table, paper_writing.personal_table):
        cells = [cell for row in make(found, wide=False).rows for cell in row]
        assert all(cell.strip() in shown for cell in cells)
    assert "…" not in shown


def test_a_pull_that_the_paper_has_not_is_drawn_too(toy, tmp_path, monkeypatch, capsys):
    words = (
        "noniid-mnist",
        "--rows",
        "dp-fedavg,fedhdp:0.01,fedhdp:0.1",
        "--pulls",
        "0.05,0.1",
        "--out",
        tmp_path / "out",
    )
    assert command(monkeypatch, *words, "--data", "handwriting") == 0
    found = paper_tables.compare(tmp_path / "out", "noniid-mnist")
    labels = [handle.get_label() for handle in paper_figures._legend(found)]
    assert "λ = 0.1, ours" in labels
    assert "λ = 0.1, paper" not in labels


def test_drawing_takes_all_that_is_there_and_says_so(tmp_path, monkeypatch, capsys):
    made_up(tmp_path, "noniid-mnist", 1, "dp-fedavg")
    assert command(monkeypatch, "noniid-mnist", "--render", "--rows", "dp-fedavg", "--out", tmp_path) == 2
    assert "--render draws all that is there: it takes no --rows" in capsys.readouterr().err


def test_a_table_is_not_kept_in_a_file(toy, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").write_text("mine")
    assert command(monkeypatch, "noniid-mnist", "--out", tmp_path / "out") == 2
    assert "is a file: name a folder" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_rows_and_pulls_can_be_added_to_what_is_there(toy, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words = ("noniid-mnist", "--out", out, "--json")
    assert command(monkeypatch, *words, "--rows", "dp-fedavg", "--pulls", 0.05) == 0
    first = {path: path.read_bytes() for path in out.rglob("seed-0/*/*") if path.is_file()}
    alone = json.loads(capsys.readouterr().out)
    assert command(monkeypatch, *words, "--rows", "dp-fedavg,fedhdp:0.1", "--pulls", "0.05,0.25") == 0
    printed = capsys.readouterr()
    assert "part 2 of 2: seed 0, paper.2 begins, 3 variants" in printed.err
    assert all(path.read_bytes() == content for path, content in first.items())
    found = json.loads(printed.out)
    lines = {(line["key"]["row"], line["key"]["pull"]): line["cells"] for line in found["lines"]}
    names = ("DP-FedAvg+Ditto", "FedHDP r=0.1")
    assert lines.keys() == {(name, pull) for name in names for pull in (None, 0.05, 0.25)}
    before = {(line["key"]["row"], line["key"]["pull"]): line["cells"] for line in alone["lines"]}
    assert lines[names[0], 0.05] == before[names[0], 0.05]
    # The global model of DP-FedAvg was trained twice, once for each pull: its number is the mean of both.
    second = msgspec.json.decode((out / "seed-0/paper.2/summary.json").read_bytes(), type=Summary)
    (twice,) = [100 * v.server_accuracy for v in second.variants if v.algorithm == "dp_fedavg"]
    assert lines[names[0], None]["acc_g"]["mean"] == pytest.approx(
        (before[names[0], None]["acc_g"]["mean"] + twice) / 2
    )
    portions = "pulls of a seed were run in several portions"
    assert [any(note.startswith(portions) for note in one["notes"]) for one in (alone, found)] == [False, True]
    assert found["seconds"].keys() == {"paper"}
    monkeypatch.setattr(reproducing.runs, "run", lambda *_: pytest.fail("it ran"))
    assert command(monkeypatch, *words, "--rows", "fedhdp:0.1", "--pulls", 0.25) == 0
    capsys.readouterr()
    assert command(monkeypatch, *words, "--rows", "fedhdp:0.2", "--rounds", 7) == 2
    assert "rounds differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "rows", "shown"),
    [
        ("noniid-mnist", "chosen-pull", "chosen-pull r=0.025  chosen"),
        ("skewed-mnist", "fedhdp:0.3", "FedHDP r=0.3"),
        ("levels", "three", "three: FedHDP, shared noise"),
        ("femnist", "non-private", "Non-Private+Ditto"),
    ],
)
def test_rows_of_every_kind_run(name, rows, shown, toy, tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, name, "--rows", rows, "--out", tmp_path / "out", "--rounds", 1) == 0
    assert (tmp_path / "out" / "table.png").exists()
    printed = capsys.readouterr().out
    assert "one seed: no intervals" in printed
    assert shown in printed


def test_personal_models_of_fewer_epochs_are_said_and_not_mixed_with_others(toy, tmp_path, monkeypatch, capsys):
    words = ("noniid-mnist", "--rows", "dp-fedavg", "--rounds", 1, "--out", tmp_path / "out")
    assert command(monkeypatch, *words, "--personal-epochs", 1) == 0
    assert "personal models train for 1 of a round's epochs" in capsys.readouterr().out
    assert "--personal-epochs 1" in (tmp_path / "out" / "table.md").read_text()
    assert command(monkeypatch, *words, "--pulls", 0.1) == 2
    assert "training differ" in capsys.readouterr().err


def test_without_pulls_there_are_global_models_alone(toy, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words = ("noniid-mnist", "--rows", "dp-fedavg,fedhdp:0,momentum,chosen-pull", "--out", out)
    assert command(monkeypatch, *words, "--pulls", "none") == 0
    printed = capsys.readouterr().out
    assert "no personal models were trained (--pulls none)" in printed
    assert "ours have" not in printed
    found = paper_tables.compare(out, "noniid-mnist")
    assert {line.key.row for line in found.lines} == {
        "DP-FedAvg+Ditto",
        "FedHDP r=0",
        *(f"{name} r={weight}" for name in ("momentum", "chosen-pull") for weight in (0.01, 0.025)),
    }
    assert all(line.key.pull is None for line in found.lines)
    assert all({"acc_g", "acc_g_p"} <= line.cells.keys() for line in found.lines)
    assert not any(column.startswith("acc_l") for line in found.lines for column in line.cells)
    assert not any("λ" in handle.get_label() for handle in paper_figures._legend(found))
    trained = msgspec.json.decode((out / "seed-0/chosen-pull/summary.json").read_bytes(), type=Summary)
    assert [variant.name for variant in trained.variants] == ["FedHDP r=0.01", "FedHDP r=0.025"]
    personal = [order for order in found.orderings if order.claim.startswith("personal models")]
    assert [order.verdict for order in personal] == ["not measured"]
    assert command(monkeypatch, *words) == 2
    assert "training differ" in capsys.readouterr().err


def test_pulls_are_numbers_or_none(toy, tmp_path, monkeypatch, capsys):
    for wrong in ("", "none,0.05", "no", "nan", "-1"):
        assert command(monkeypatch, "noniid-mnist", "--out", tmp_path / "out", "--pulls", wrong) == 2
        assert "--pulls must be numbers of at least 0 such as 0.05,0.25, or none, got" in capsys.readouterr().err
    words = ("noniid-mnist", "--out", tmp_path / "out", "--pulls", "none", "--personal-epochs", 1)
    assert command(monkeypatch, *words) == 2
    assert "with --pulls none there are none" in capsys.readouterr().err


def test_a_folder_with_something_else_in_it_is_not_written_over(toy, tmp_path, monkeypatch, capsys):
    for name, words in (("experiment.toml", "holds a run"), ("letter.txt", "is not empty, and holds no table")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).touch()
        assert command(monkeypatch, "noniid-mnist", "--rows", "dp-fedavg", "--out", folder) == 2
        assert words in capsys.readouterr().err
        assert [path.name for path in folder.iterdir()] == [name]


def test_noise_from_a_seed_comes_out_the_same_again_and_is_each_seeds_own(toy, tmp_path, monkeypatch, capsys):
    words = ("noniid-mnist", "--rows", "dp-fedavg", "--pulls", 0.05, "--seeds", 2)
    for folder in ("one", "again"):
        assert command(monkeypatch, *words, "--noise-seed", 5, "--out", tmp_path / folder) == 0
        assert (
            "noise and cohorts came from a given seed: repeatable, and therefore not private" in capsys.readouterr().out
        )
    assert "--noise-seed 5" in (tmp_path / "one" / "table.md").read_text()
    assert (tmp_path / "one" / "table.csv").read_text() == (tmp_path / "again" / "table.csv").read_text()
    written = [from_toml(path.read_text(), "x").noise_seed for path in sorted(tmp_path.glob("one/*/*/experiment.toml"))]
    assert written == [5, 6]
    assert command(monkeypatch, *words, "--seeds", 3, "--out", tmp_path / "one") == 2
    assert "noise_seed differ" in capsys.readouterr().err


def test_a_part_that_was_asked_to_stop_before_it_began_can_be_begun_again(tmp_path):
    part = small(own.parts("noniid-mnist", "fedhdp:0.01", options=Options(rounds=2))[0])
    with pytest.raises(Interrupted):
        reproducing.run_part(part, tmp_path, lambda progress: False, "")
    reproducing.run_part(part, tmp_path, lambda progress: True, "the command")
    assert reproducing.done(tmp_path, part)
    machine = results.read_value(tmp_path / part.folder / reproducing.MACHINE, reproducing.Machine)
    assert machine.command == "the command"


# comparison, on summaries made by hand


def made_up(
    out: Path, table: str, seeds: int | range = 3, rows: str | None = None, shift=lambda row, seed: 0.0
) -> Path:
    """A folder with the paper's own numbers, each moved by so many points for a row and a seed."""
    for part in own.parts(table, rows, range(seeds) if isinstance(seeds, int) else seeds, Options("handwriting")):
        chosen, variants = part.experiment, []
        promised = chosen.mechanism.build(chosen.rounds, chosen.delta)
        for variant in chosen.variants:
            mechanism = variant.mechanism(promised)
            weight = mechanism.groups[1].weight if variant.algorithm == "fedhdp" else None
            numbers = _numbers(table, Row(variant.algorithm, weight), mechanism.groups[1].pull)
            more = shift(Row(variant.algorithm, weight), part.seed)
            groups = [_group(group, numbers, more) for group in mechanism.groups]
            result = VariantResult(variant.name, variant.algorithm, chosen.rounds, 1.0, False, groups)
            result.server_accuracy = (numbers.get("acc_g", 90.0) + more) / 100
            result.server_average_accuracy = result.server_accuracy + 0.005
            variants.append(result)
        folder = out / part.folder
        folder.mkdir(parents=True)
        (folder / results.EXPERIMENT).write_text(to_toml(chosen))
        results.write_value(folder / results.SUMMARY, Summary(chosen.name, 2.0, variants))
    return out


def _numbers(table: str, row: Row, pull: float) -> dict[str, float]:
    dataset = TABLES[table].dataset if table in TABLES else "noniid_mnist"
    lines = [line.numbers for line in paper.printed(dataset) if line.row == row and line.pull == pull]
    return lines[0] if lines else {}


def _group(group, numbers: dict[str, float], more: float) -> GroupResult:
    short = "np" if group.opted_out else "p"
    found = GroupResult(group.name, group.clients, group.opted_out, *(0.0,) * 4)
    found.pull, found.weight = group.pull, group.weight
    found.global_accuracy = (numbers.get(f"acc_g_{short}", 90.0) + more) / 100
    found.global_variance = numbers.get(f"var_g_{short}", 0.3) / 100
    found.personal_accuracy = numbers.get(f"acc_l_{short}", 99.0) / 100
    found.personal_variance = numbers.get(f"var_l_{short}", 0.01) / 100
    found.average_accuracy = found.global_accuracy
    return found


def line_of(found: paper_tables.Comparison, row: str, pull: float | None = None) -> paper_tables.Line:
    """A line by its name and pull."""
    (line,) = [line for line in found.lines if (line.key.row, line.key.pull) == (row, pull)]
    return line


def test_a_cell_has_the_mean_the_spread_and_students_interval():
    cell = paper_tables.cell([90.0, 91.0, 92.0], 93.0)
    assert (cell.mean, cell.sd, cell.difference) == (91.0, 1.0, -2.0)
    assert cell.high - cell.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    assert cell.holds
    assert not paper_tables.cell([90.0, 91.0, 92.0], 93.5).holds
    one = paper_tables.cell([90.0], 90.1)
    assert (one.sd, one.low, one.holds) == (None, None, None)
    assert one.difference == pytest.approx(-0.1)


def test_the_papers_own_numbers_compare_as_equal_cell_by_cell(tmp_path):
    for name in TABLES:
        found = paper_tables.compare(made_up(tmp_path / name, name, seeds=1, rows="paper"), name)
        compared = 0
        for line in found.lines:
            pooled = line.key.algorithm in ("non_private", "dp_fedavg")
            for column, cell in line.cells.items():
                if cell.paper is None or (pooled and column.startswith("var")):
                    continue
                slack = 5.0 if column.startswith("delta") else 1e-6  # the paper's own differences have slips
                assert cell.difference == pytest.approx(0, abs=slack), (name, line.key, column)
                compared += 1
            assert line.close in ((True,) if line.key.pull is None else (None,))
        assert compared > 100


def test_numbers_of_the_global_model_stand_beside_the_mean_of_the_papers_three_runs(tmp_path):
    found = paper_tables.compare(
        made_up(tmp_path, "noniid-mnist", rows="paper", shift=lambda row, seed: seed - 2.5), "noniid-mnist"
    )
    cell = line_of(found, "FedHDP r=0.01").cells["acc_g"]
    assert cell.paper == pytest.approx((92.48 + 92.45 + 92.41) / 3)
    assert cell.difference == pytest.approx(-1.5)
    assert (cell.sd, len(cell.values)) == (pytest.approx(1.0), 3)
    assert line_of(found, "FedHDP r=0.01").close is False
    assert line_of(found, "FedHDP r=0.01", 0.25).cells["acc_l_p"].paper == 98.62


def test_non_private_and_dp_fedavg_are_compared_over_all_clients():
    groups = [
        GroupResult("opted out", 100, True, *(0.0,) * 4, global_accuracy=0.9, global_variance=0.01),
        GroupResult("private", 300, False, *(0.0,) * 4, global_accuracy=0.7, global_variance=0.03),
    ]
    for algorithm, short in (("non_private", "np"), ("dp_fedavg", "p")):
        result = VariantResult("x", algorithm, 1, 1.0, False, groups)
        found = paper_runs._columns(result, "g", "global")
        assert found == {
            f"acc_g_{short}": pytest.approx(75.0),
            f"var_g_{short}": pytest.approx(100 * ((0.01 + 3 * 0.03) / 4 + 0.25 * 0.75 * 0.2**2)),
        }
    found = paper_runs._columns(VariantResult("x", "fedhdp", 1, 1.0, False, groups), "g", "global")
    assert found["delta_g"] == pytest.approx(20.0)


def test_epsilons_that_a_run_could_not_know_are_computed_when_the_table_is_made(tmp_path):
    found = paper_tables.compare(made_up(tmp_path, "noniid-mnist", 1, "fedhdp:0.01,pld"), "noniid-mnist")
    prices = {one.part: one for one in found.prices}
    assert prices["paper"].epsilon == pytest.approx(22.4, abs=0.1)
    assert "fixed cohorts without replacement, replace one client" in prices["paper"].basis
    assert prices["paper"].poisson == pytest.approx(3.608, abs=1e-3)
    assert prices["pld"].epsilon_pld == pytest.approx(own.PROMISE, abs=0.01)
    assert prices["pld"].poisson is None
    said = " ".join(paper_writing.footnotes(found))
    assert "Poisson sampling at the same noise would cost 3.61" in said
    assert "the paper states ε = 3.6 at delta 1e-4, which holds for Poisson sampling" in said


def test_without_an_accountant_a_table_says_that_epsilons_are_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_runs, "ACCOUNTING", False)
    found = paper_tables.compare(made_up(tmp_path, "noniid-mnist", 1, "fedhdp:0.01"), "noniid-mnist")
    assert found.prices[0].epsilon is None
    assert "ε private: not known without dp-accounting [FedHDP r=0.01]" in paper_writing.footnotes(found)


def verdicts(found: paper_tables.Comparison) -> list[str]:
    """What was found about each claim."""
    return [one.verdict for one in found.orderings]


def test_the_papers_orderings_hold_in_the_papers_own_numbers(tmp_path):
    for name in ("skewed-mnist", "noniid-mnist"):
        write(tmp_path / name, paper_tables.compare(made_up(tmp_path / name, name, 2, "paper"), name))
    found = paper_tables.compare(tmp_path / "skewed-mnist", "skewed-mnist")
    assert verdicts(found) == ["held"] * 6
    assert [one.papers_verdict for one in found.orderings] == ["held"] * 6
    assert found.orderings[0].numbers == "r=0.1: 89.46, DP-FedAvg 88.50"
    assert found.orderings[0].seeds_held == found.orderings[0].seeds == 2
    assert found.orderings[5].numbers == "skewed r=0.1, not skewed r=0.01"


def test_an_ordering_that_does_not_hold_is_said_with_the_numbers_and_one_not_measured_too(tmp_path):
    def worse(row: Row, seed: int) -> float:
        return -10.0 * (row.algorithm == "fedhdp" and row.weight != 0) - 4.0 * (row.algorithm == "hdp_fedavg")

    found = paper_tables.compare(made_up(tmp_path / "a", "noniid-mnist", 2, "paper", worse), "noniid-mnist")
    assert verdicts(found) == ["held", "held", "not held", "held", "held", "not measured", "not measured"]
    assert found.orderings[2].numbers == "r=0: 90.71, r=1: 84.54"
    assert found.orderings[2].seeds_held == 0
    few = paper_tables.compare(made_up(tmp_path / "b", "fmnist", 1, "fedhdp:0.01,dp-fedavg"), "fmnist")
    assert verdicts(few) == ["held", "not measured", "not measured", "held", "held"]


def test_orderings_compare_rows_on_the_seeds_that_all_have(tmp_path):
    def lucky(row: Row, seed: int) -> float:
        return 20.0 * seed  # the second seed is better for everybody who has it

    made_up(tmp_path, "fmnist", range(1), "paper", lucky)
    found = paper_tables.compare(tmp_path, "fmnist")
    assert found.orderings[0].numbers == "r=0.025: 85.97, DP-FedAvg 73.16"
    made_up(tmp_path, "fmnist", range(1, 2), "dp-fedavg,fedhdp:0.5", lucky)
    more = paper_tables.compare(tmp_path, "fmnist")
    assert more.orderings == found.orderings
    assert more.seeds == (0, 1)
    assert line_of(more, "DP-FedAvg+Ditto").cells["acc_g"].mean == pytest.approx(83.16, abs=0.01)
    kept = {row["row"]: row["seeds"] for row in json.loads(summary(more))["rows"] if row["pull"] is None}
    assert (kept["DP-FedAvg+Ditto"], kept["HDP-FedAvg+Ditto"]) == ([0, 1], [0])
    assert "orderings compare them on seeds 0, which all have" in paper_writing.footnotes(more)[-1]
    assert "unequal seeds" not in " ".join(paper_writing.footnotes(found))


def test_a_weight_that_is_only_as_good_as_equal_ones_is_not_between():
    view = {("paper", "fedhdp", 0.0): {"acc_g": 78.0}, ("paper", "hdp_fedavg", None): {"acc_g": 84.0}}
    for accuracy, verdict in ((84.0, "not held"), (84.1, "held")):
        view["paper", "fedhdp", 0.1] = {"acc_g": accuracy}
        _, above, between, *_ = orderings("fmnist", view, [view], {}, {}, {}, math.inf)
        assert (above.verdict, between.verdict) == (verdict, verdict)


def test_shared_noise_is_set_beside_noise_per_group():
    view = {("three", f"three: FedHDP, {kind}", None): {"acc_g": value} for kind, value in KINDS.items()}
    three, five = orderings("levels", view, [view], {}, {}, {}, math.inf)
    assert (three.verdict, three.numbers) == ("held", "shared 92.00, per group 91.00")
    assert five.verdict == "not measured"


KINDS = {"shared noise": 92.0, "noise per group": 91.0}


# what is written


@pytest.mark.parametrize("name", ALL)
def test_a_table_is_written_for_people_for_programs_and_as_a_picture(name, tmp_path):
    found = paper_tables.compare(made_up(tmp_path, name, 2, shift=lambda row, seed: 0.5 * seed), name)
    paths = write(tmp_path, found)
    assert all(path.stat().st_size > 0 for path in paths)
    assert (tmp_path / "table.png").read_bytes()[:4] == b"\x89PNG"
    assert msgspec.json.decode((tmp_path / "table.json").read_bytes(), type=paper_tables.Comparison) == found
    with (tmp_path / "table.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(line.cells) for line in found.lines)
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary(found)) < 20_000
    assert len(kept["rows"]) == len(found.lines)
    page = (tmp_path / "table.md").read_text()
    for wide in (True, False):
        for table in (paper_writing.global_table(found, wide), paper_writing.personal_table(found, wide)):
            assert {len(row) for row in table.rows} == {len(table.header)}
            assert all(row[0] in page for row in table.rows)
    assert f"data: {found.data}" in page


def test_a_part_that_is_not_finished_is_named_and_left_out(tmp_path):
    made_up(tmp_path, "noniid-mnist", 2, "fedhdp:0.01")
    (tmp_path / "seed-1/paper/summary.json").unlink()
    found = paper_tables.compare(tmp_path, "noniid-mnist")
    assert (found.seeds, found.unfinished) == ((0,), ("seed-1/paper",))
    assert "not finished, and left out: seed-1/paper" in paper_writing.title(found)


def test_a_picture_leaves_out_what_is_so_far_below_that_the_rest_could_not_be_read(tmp_path):
    from matplotlib.figure import Figure

    found = paper_tables.compare(made_up(tmp_path, "skewed-mnist", 1, "paper"), "skewed-mnist")
    axis = Figure().subplots()
    weights = [row.weight for row in paper.paper_rows(TABLES["skewed-mnist"]) if row.weight is not None]
    paper_figures._against_weight(axis, found, TABLES["skewed-mnist"], "acc_g", weights)
    assert axis.get_ylim()[0] > 80
    assert [text.get_text() for text in axis.texts] == ["r = 0, far below: 10.3 to 10.3"]
