"""An experiment's data from a table or an npz: run, recorded, and refused with wrong or changed files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from experiment_helpers import command, keep_going
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import ConfigError, DataError, LedgerError
from fedhdp.experiments import from_toml, resume, run, to_toml
from fedhdp.experiments.components import PythonData
from fedhdp.privacy.ledger import Ledger

RNG = np.random.default_rng(0)
LEVELS = {"A": "open", "B": "strict", "C": "strict", "D": "open"}
EXPERIMENT = """
rounds = 1
delta = 0.01
evaluate_every = 1
model = { name = "linear" }
training = { epochs = 1, batch_size = 4, learning_rate = 0.1 }
variants = [{ algorithm = "fedhdp" }]
[data]
name = "table"
path = "patients.csv"
client = "clinic"
label = "sick"
level = "privacy"
standardize = "public"
[mechanism]
clip = 0.5
groups = [
  { name = "open", clients = 2, sampling_rate = 1.0, epsilon = inf },
  { name = "strict", clients = 2, sampling_rate = 0.5, noise_multiplier = 2.0 },
]
"""
ARRAYS = EXPERIMENT.replace(
    EXPERIMENT[EXPERIMENT.index("[data]") : EXPERIMENT.index("[mechanism]")],
    '[data]\nname = "arrays"\npath = "patients.npz"\nvalidation = 0.2\n',
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A table, the same as arrays, and their experiments, in the current directory."""
    pytest.importorskip("pyarrow")
    clinic, age, sick = RNG.choice(list(LEVELS), 60), RNG.normal(50, 10, 60), RNG.choice(["no", "yes"], 60)
    rows = [f"{c},{LEVELS[c]},{a:g},{s}" for c, a, s in zip(clinic, age, sick, strict=True)]
    (tmp_path / "patients.csv").write_text("\n".join(["clinic,privacy,age,sick", *rows]) + "\n")
    level = np.array([LEVELS[client] for client in clinic])
    np.savez(tmp_path / "patients.npz", x=age[:, None] / 50, y=sick, client=clinic, level=level)
    (tmp_path / "table.toml").write_text(EXPERIMENT)
    (tmp_path / "arrays.toml").write_text(ARRAYS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table", "arrays"])
def test_file_runs(folder, monkeypatch, name):
    monkeypatch.chdir(folder.parent)  # paths are relative to the experiment's file
    done = command("run", folder / f"{name}.toml", "--out", folder / "run", "--json")
    assert done.code == 0, done.stderr
    [variant] = json.loads(done.stdout)["variants"]
    assert [(group["name"], group["clients"]) for group in variant["groups"]] == [("open", 2), ("strict", 2)]
    assert ("opted out (open)" in variant["preparation"]) == (name == "table")
    recorded = from_toml((folder / "run/experiment.toml").read_text(), "recorded")
    assert Path(recorded.data.path).samefile(folder / ("patients.csv" if name == "table" else "patients.npz"))
    assert len(recorded.data.sha256) == 64
    assert from_toml(to_toml(recorded), "x") == recorded
    if name == "table":
        assert "inputs: standardized by" in command("run", "--resume", folder / "run").stdout


@pytest.mark.slow
def test_ledger_knows_the_clients_of_a_table_whatever_the_seed(folder):
    experiment = replace(from_toml(EXPERIMENT, "table"), ledger="clinics.ledger")
    for seed in (0, 1):
        run(replace(experiment, seed=seed), folder / f"run-{seed}", keep_going)
    with Ledger(folder / "clinics.ledger", read_only=True) as ledger:
        assert sum(cost.rounds for cost in ledger.costs("strict")) == 2
    swapped = (folder / "patients.csv").read_text().replace("A,open", "A,strict").replace("B,strict", "B,open")
    (folder / "others.csv").write_text(swapped)
    other = replace(experiment, data=replace(experiment.data, path="others.csv"))
    with pytest.raises(LedgerError):
        run(other, folder / "other", keep_going)


@pytest.mark.slow
def test_changed_file_is_refused(folder):
    experiment = from_toml(EXPERIMENT, "table")
    run(experiment, folder / "run", keep_going)
    (folder / "run/summary.json").unlink()
    (folder / "run/fedhdp/result.json").unlink()
    with open("patients.csv", "a") as file:
        file.write("A,open,1,no\n")
    with pytest.raises(ConfigError) as error:
        resume(folder / "run", keep_going)
    assert error.value.field == "data.sha256"


@pytest.mark.parametrize(
    ("public", "epsilon", "is_refused"), [("open", "inf", 0), ("strict", "inf", 1), ("open", "8.0", 1)]
)
def test_statistics_of_a_python_file_are_of_clients_who_opted_out(folder, public, epsilon, is_refused):
    columns = f"client='clinic', label='sick', level='privacy', standardize='public', public=['{public}']"
    code = (
        f"from fedhdp.datasets.tables import load_table\ndef data(seed): return load_table('patients.csv', {columns})"
    )
    (folder / "clinics.py").write_text(code)
    mechanism = from_toml(EXPERIMENT.replace("epsilon = inf", f"epsilon = {epsilon}"), "table").mechanism
    with raises_field("public_levels", DataError) if is_refused else contextlib.nullcontext():
        assert PythonData(file="clinics.py").load(mechanism, 0).public_levels == (public,)


def test_test_examples_in_another_file(folder):
    (folder / "test.csv").write_text((folder / "patients.csv").read_text())
    text = EXPERIMENT.replace('level = "privacy"', 'level = "privacy"\ntest = "test.csv"\nserver = "test.csv"')
    experiment = from_toml(text.replace('"public"', '"server"'), "table").resolve(folder).pin()
    assert list(experiment.data.files) == ["path", "test", "server"]
    data = experiment.data.load(experiment.mechanism, 0)
    assert len(data.train.y_N) == len(data.test.y_N) == len(data.server_y_N) == 60
    assert data.preparation.startswith("standardized by the server's 60 examples")
    (folder / "test.csv").write_text("clinic,privacy,age,sick\n")
    with pytest.raises(ConfigError):
        experiment.pin()


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("table", '"patients.csv"', '"none.csv"', "none.csv cannot be read: No such file or directory"),
        ("table", '"patients.csv"', '"."', "cannot be read: Is a directory"),
        ("table", '"patients.csv"', '"patients.npz"', "must end with .csv or .parquet"),
        ("table", 'path = "patients.csv"', "", "data.path is missing"),
        ("table", 'client = "clinic"', 'client = "clinik"', "client must be a column of the table, got 'clinik'"),
        ("table", 'label = "sick"', 'labels = "sick"', "data.labels"),
        ("table", 'standardize = "public"', 'standardize = "private"', "data.standardize"),
        ("table", 'standardize = "public"', "standardize = { age = [50, 0] }", "standardize.age"),
        ("table", 'standardize = "public"', "standardize = { weight = [50, 1] }", "'weight'"),
        ("table", 'standardize = "public"', 'standardize = "server"', "standardize = 'server'"),
        (
            "table",
            'standardize = "public"',
            "test = 1.5",
            "data.test must be at least 0 and below 1, or a path, got 1.5",
        ),
        ("table", 'standardize = "public"', 'test = "none.csv"', "none.csv cannot be read"),
        ("table", 'standardize = "public"', "classes = 0", "classes must be a number of at least 1"),
        ("table", 'standardize = "public"', 'features = ["hight"]', "got 'hight'"),
        ("table", "epsilon = inf", "epsilon = 3.0", "standardize = 'public' needs levels, and a level that opted out"),
        ("arrays", '"patients.npz"', '"patients.csv"', "cannot be read as npz"),
        ("arrays", "validation = 0.2", "validation = 2", "data.validation"),
        ("arrays", "validation = 0.2", "test = -0.1", "data.test must be at least 0 and below 1"),
        ("arrays", "validation = 0.2", 'clients = "clinic"', "unknown field data.clients"),
    ],
)
def test_wrong_data_is_one_line_and_writes_nothing(folder, name, old, new, words):
    text = {"table": EXPERIMENT, "arrays": ARRAYS}[name]
    assert old in text
    (folder / f"{name}.toml").write_text(text.replace(old, new))
    done = command("run", f"{name}.toml", "--out", "run")
    assert (done.code, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]
    assert not (folder / "run").exists()
