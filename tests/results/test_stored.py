"""Stored runs: which are repetitions of which, what differs, and their table."""

from __future__ import annotations

import csv
import io

import pytest
from helpers import raises_field
from run_files import weight_variants, write_run, write_settings

from fedhdp.errors import RunError
from fedhdp.results import DamagedRunError, comparison, write_value
from fedhdp.results.stored import RunEntry, RunsInfo, differing_settings, flatten, read_runs


def test_seeds_are_repetitions(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"seed-{seed}", seed)
    [run] = read_runs([tmp_path / f"seed-{seed}" for seed in range(3)])
    header, rows = comparison.combined_cells([run])
    assert header[:2] == ["algorithm", "Acc_g"]
    assert rows[0][:2] == ["DP-FedAvg", "11.00 ±2.48"]
    assert comparison.describe_seeds([run]) == "mean of 3 seeds ± half of its 95% interval"


def test_same_seed_twice_is_two_runs(tmp_path):
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b")])
    assert [run.label for run in runs] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert differing_settings(runs) == {}


def test_differing_settings_are_named(tmp_path):
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", rounds=13)])
    header, rows = comparison.settings_cells(runs)
    assert (header, [row[1:] for row in rows]) == (["run", "rounds"], [["12"], ["13"]])


def test_runs_with_other_variants_share_a_table(tmp_path):
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", variants=weight_variants((0.5,)))])
    header, rows = comparison.combined_cells(runs)
    assert header[:2] == ["run", "algorithm"]
    assert [row[1] for row in rows if row[0].endswith("b")] == ["DP-FedAvg", "FedHDP weight=0.5"]


def test_group_settings_are_those_of_the_mechanism(tmp_path):
    [run] = read_runs([write_run(tmp_path / "run")])
    weights = [seeds[0].settings["mechanism.groups.private.weight"] for seeds in run.variants()]
    assert weights == [1.0, 0.01, 0.1, 1.0]


def test_csv_has_every_number(tmp_path):
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", 1)])
    lines = list(csv.DictReader(io.StringIO(comparison.format_csv(comparison.mean_rows(runs)))))
    [server] = [line for line in lines if (line["variant"], line["group"]) == ("DP-FedAvg", "server")]
    assert float(server["mean"]) == pytest.approx(0.105)
    assert float(server["half_interval"]) > 0
    assert server["seeds"] == "2"
    for metric in ("epsilon", "epsilon_target"):
        assert [line["mean"] for line in lines if line["metric"] == metric][:2] == ["inf", "8.0"]


def test_unfinished_run_shows_what_it_has(tmp_path):
    path = write_run(tmp_path / "run")
    (path / "summary.json").unlink()
    (path / "dp-fedavg" / "result.json").unlink()
    runs = read_runs([path])
    assert len(runs[0].variants()) == 3
    assert "without results yet: DP-FedAvg" in comparison.notes(runs)[-1]


def test_missing_seeds_of_a_folder_are_named(tmp_path):
    write_run(tmp_path / "seed-0")
    entries = [RunEntry(f"seed-{seed}", seed) for seed in range(3)]
    write_value(tmp_path / "runs.json", RunsInfo("", entries))
    runs = read_runs([tmp_path])
    assert len(runs[0].runs) == 1
    assert comparison.notes(runs)[-1].endswith(f"{tmp_path / 'seed-1'}, {tmp_path / 'seed-2'}")


def test_directory_without_results_is_refused(tmp_path):
    write_settings(tmp_path / "begun", {"name": "begun", "variants": [{"name": "a"}]})
    for directory in (tmp_path / "begun", tmp_path / "missing", tmp_path):
        with raises_field("DIR", RunError):
            read_runs([directory])


@pytest.mark.parametrize(("file", "content"), [("experiment.toml", "rounds ="), ("summary.json", "{}")])
def test_damaged_file_is_refused(file, content, tmp_path):
    (write_run(tmp_path / "run") / file).write_text(content)
    with pytest.raises(DamagedRunError):
        read_runs([tmp_path / "run"])


def test_named_tables_are_flattened_by_name():
    nested = {"mechanism": {"groups": [{"name": "open", "weight": 1.0}], "clip": 0.5}}
    assert flatten(nested) == {"mechanism.groups.open.weight": 1.0, "mechanism.clip": 0.5}


def test_deployment_is_shown(tmp_path):
    path = write_run(tmp_path / "run")
    (path / "experiment.toml").write_text('name = "clinics"\nrounds = 12\n[levels.private]\nepsilon = 3.0\n')
    runs = read_runs([path])
    assert runs[0].settings["levels.private.epsilon"] == 3.0
    assert len(comparison.combined_cells(runs)[1]) == 4
