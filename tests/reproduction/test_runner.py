"""Parts are run, resumed and supplemented, and only what can be compared is in one directory."""

from __future__ import annotations

import pytest
from helpers import raises_field
from reproduction_runs import small, write_runs

from fedhdp.errors import RunError
from fedhdp.experiments.runner import Interrupted
from fedhdp.reproduction import runner
from fedhdp.reproduction.comparison import compare
from fedhdp.reproduction.extensions import make_parts
from fedhdp.reproduction.tables import Options
from fedhdp.results import store


@pytest.mark.slow
def test_part_that_was_stopped_before_its_first_round_starts_again(tmp_path):
    part = small(make_parts("noniid-mnist", "fedhdp:0.01", options=Options(rounds=2))[0])
    with pytest.raises(Interrupted):
        runner.run_part(part, tmp_path, lambda progress: False, "")
    runner.run_part(part, tmp_path, lambda progress: True, "the command")
    assert runner.is_finished(tmp_path, part)
    machine = store.read_value(tmp_path / part.folder / runner.MACHINE, runner.Machine)
    assert machine.command == "the command"


@pytest.mark.parametrize(
    ("table", "rows", "options", "field"),
    [
        ("noniid-mnist", "dp-fedavg", {"rounds": 4}, "rounds"),
        ("noniid-mnist", "dp-fedavg", {"batches": "all"}, "training"),
        ("noniid-mnist", "dp-fedavg", {"sampling": "poisson"}, "mechanism"),
        ("noniid-mnist", "momentum", {"rounds": 4}, "rounds"),
        ("noniid-mnist", "chosen-pull", {"batches": "all"}, "training"),
        ("skewed-mnist", "dp-fedavg", {}, "--out"),
    ],
)
def test_incompatible_parts_are_refused(tmp_path, table, rows, options, field):
    write_runs(tmp_path, "noniid-mnist", 1, "dp-fedavg")
    parts = make_parts(table, rows, range(1, 2), Options("handwriting", **options))
    with raises_field(field, RunError):
        runner.plan_parts(tmp_path, parts)


def test_incompatible_runs_are_not_compared(tmp_path):
    write_runs(tmp_path, "noniid-mnist", 2, "dp-fedavg,pld,chosen-pull")
    assert compare(tmp_path, "noniid-mnist").seeds == (0, 1)
    for folder in ("seed-1/paper", "seed-0/pld"):
        path = tmp_path / folder / store.EXPERIMENT_FILE
        content = path.read_text()
        path.write_text(content.replace("rounds = 500", "rounds = 400"))
        with raises_field("rounds", RunError):
            compare(tmp_path, "noniid-mnist")
        path.write_text(content)


@pytest.mark.parametrize("name", ["experiment.toml", "letter.txt"])
def test_directory_with_other_files_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with raises_field("--out", RunError):
        runner.check_output_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_file_is_not_an_output_directory(tmp_path):
    (tmp_path / "out").write_text("content")
    with raises_field("--out", RunError):
        runner.check_output_directory(tmp_path / "out")
