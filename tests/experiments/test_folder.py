"""A folder of several runs: its files, its pairing, and what interrupts it."""

from __future__ import annotations

import pytest
from experiment_helpers import command, files_of, keep_going, tiny
from helpers import raises_field

from fedhdp import simulation
from fedhdp.errors import ConfigError, RunError
from fedhdp.experiments import Experiment, Interrupted, Progress, RunFolder, run
from fedhdp.results import DamagedRunError
from fedhdp.results.store import VariantDirectory
from fedhdp.results.stored import read_runs


def small(**changes: object) -> Experiment:
    """Two rounds, with one swept key that makes experiments."""
    sweep = {"model.hidden": [4, 6]}
    return tiny(**({"rounds": 2, "evaluate_every": 2, "variants": tiny().variants[1:], "sweep": sweep} | changes))


def run_all(folder: RunFolder) -> None:
    for entry in folder.entries:
        folder.run(entry, keep_going)


@pytest.mark.slow
def test_folder_has_runs_and_one_table(tmp_path):
    with RunFolder.start(tmp_path / "out", small(), [0, 1]) as folder:
        paths = [entry.path for entry in folder.entries]
        run_all(folder)
        runs = folder.write_tables()
    assert paths == ["hidden-4/seed-0", "hidden-4/seed-1", "hidden-6/seed-0", "hidden-6/seed-1"]
    assert [(run.label, len(run.runs)) for run in runs] == [("hidden-4", 2), ("hidden-6", 2)]
    assert [len(run.runs) for run in read_runs([tmp_path / "out"])] == [2, 2]
    assert {"summary.json", "table.md", "table.csv"} <= {file.name for file in (tmp_path / "out").iterdir()}


@pytest.fixture
def cohorts(monkeypatch) -> list[list[int]]:
    """The cohorts that simulations draw."""
    drawn: list[list[int]] = []
    draw = simulation.Simulation.draw_cohort

    def record(self, round):
        drawn.append(draw(self, round).tolist())
        return draw(self, round)

    monkeypatch.setattr(simulation.Simulation, "draw_cohort", record)
    return drawn


@pytest.mark.slow
def test_experiments_of_a_sweep_draw_the_same_cohorts(tmp_path, cohorts):
    with RunFolder.start(tmp_path / "out", small(noise_seed=None)) as folder:
        run_all(folder)
    assert cohorts[:2] == cohorts[2:]
    assert cohorts[0] != cohorts[1]


@pytest.mark.slow
def test_a_second_attempt_draws_other_cohorts(tmp_path, cohorts, monkeypatch):
    """Rounds that run again are charged as independent ones, so their cohorts must be."""

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with RunFolder.start(tmp_path / "out", small(noise_seed=None)) as folder:
        with monkeypatch.context() as patch:
            patch.setattr(VariantDirectory, "append_history", fail)
            with pytest.raises(OSError, match="disk full"):
                folder.run(folder.entries[0], keep_going)
        folder.run(folder.entries[0], keep_going)  # from the checkpoint after the first round
    _, first_attempt, second_attempt = cohorts
    assert first_attempt != second_attempt


def test_interrupted_folder_is_opened_again(tmp_path):
    def stop(progress: Progress) -> bool:
        return False

    with pytest.raises(Interrupted), RunFolder.start(tmp_path / "out", small(), [0]) as folder:
        folder.run(folder.entries[0], stop)
    with RunFolder.open(tmp_path / "out") as folder, raises_field("out", RunError):
        RunFolder.open(tmp_path / "out")
    (tmp_path / "out" / "experiment.toml").write_text("rounds = 3")
    with pytest.raises(DamagedRunError):
        RunFolder.open(tmp_path / "out")


def test_another_experiment_is_refused(tmp_path):
    with RunFolder.start(tmp_path / "out", small(), [0]):
        pass
    with raises_field("out", RunError):
        RunFolder.start(tmp_path / "out", small(rounds=3), [0])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with raises_field("out", RunError):
        RunFolder.start(tmp_path / "other", small())


def test_folder_that_cannot_start_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="stop"), RunFolder.start(tmp_path / "out", small()):
        raise ValueError("stop")
    assert not list(tmp_path.iterdir())
    with raises_field("ledger", ConfigError):
        RunFolder.start(tmp_path / "out", small(ledger=str(tmp_path / "x.ledger")), [0, 1])
    assert not list(tmp_path.iterdir())


def test_all_runs_are_checked_before_the_first(tmp_path):
    """Of two models to begin with, the second does not exist; of two seeds, the second was not begun."""
    with raises_field("start_from", ConfigError):
        RunFolder.start(tmp_path / "out", small(sweep={"start_from": [str(tmp_path / "a"), str(tmp_path / "b")]}))
    assert not list(tmp_path.iterdir())
    with RunFolder.start(tmp_path / "out", small(sweep={}), [0, 1]) as folder:
        folder.run(folder.entries[0], keep_going)
    before = files_of(tmp_path / "out")
    done = command("run", "--resume", tmp_path / "out", "--rounds", 4, "--allow-more-epsilon")
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert "seed-1 was not begun" in done.stderr
    assert files_of(tmp_path / "out") == before


def test_several_experiments_are_no_single_run(tmp_path):
    with raises_field("sweep", ConfigError):
        run(small(), tmp_path / "out", keep_going)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_folder_is_extended_once_all_runs_are_begun(tmp_path):
    with RunFolder.start(tmp_path / "out", small(sweep={}), [0, 1]) as folder:
        first, second = folder.entries
        folder.run(first, keep_going)
        with raises_field("rounds", RunError):
            folder.check_extension(4, allow_more_epsilon=True)
        folder.run(second, keep_going)
        before = files_of(tmp_path / "out")
        with raises_field("rounds", RunError):  # both have more epsilon than they asked for
            folder.check_extension(4)
        assert files_of(tmp_path / "out") == before
        folder.check_extension(4, allow_more_epsilon=True)
        for entry in folder.entries:
            assert folder.extend(entry, 4, keep_going, allow_more_epsilon=True).variants[0].rounds == 4
        [run] = folder.write_tables()
    assert len(run.runs) == 2
