"""The file of one's own federation runs as it stands; every wrong input is one line, and nothing is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

LEVELS = ["open", "mild", "strict"]
HOSPITALS = {f"hospital {number:02}": LEVELS[number % 3] for number in range(30)}
EXPERIMENT = """
rounds = 15
delta = 1e-3
metrics = ["auc", "f1"]
loggers = ["tensorboard"]
data = { name = "table", path = "patients.csv", client = "hospital", label = "sick", level = "privacy", test = 0.25 }
model = { name = "linear" }
training = { epochs = 2, batch_size = 8, optimizer = { name = "adam", learning_rate = 0.01 } }
server = { optimizer = { name = "sgd", learning_rate = 0.4, momentum = 0.9 }, average = 0.98 }
variants = [{ algorithm = "fedhdp" }, { algorithm = "dp_fedavg" }]
[mechanism]
clip = { initial = 0.5 }
groups = [
  { name = "open", sampling_rate = 0.3, epsilon = inf },
  { name = "mild", sampling_rate = 0.3, epsilon = 8.0 },
  { name = "strict", sampling_rate = 0.3, epsilon = 2.0 },
]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with the experiment and its table."""
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    rows = ["hospital,privacy,age,pressure,sick"]
    for hospital in rng.permutation(np.repeat([*HOSPITALS], 12)):
        age, pressure = rng.normal(size=2)
        rows.append(f"{hospital},{HOSPITALS[hospital]},{age:.3f},{pressure:.3f},{int(age + pressure > 0)}")
    (tmp_path / "patients.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_own_federation_runs_as_its_file_stands(folder, run_cli):
    pytest.importorskip("tensorboardX")
    done = run_cli("run", "experiment.toml", "--out", "run", "--json")
    assert done.code == 0, done.stderr
    fedhdp, dp_fedavg = json.loads(done.stdout)["variants"]
    groups = {group["name"]: group for group in fedhdp["groups"]}
    assert {name: group["clients"] for name, group in groups.items()} == dict.fromkeys(LEVELS, 10)
    assert {name: group["epsilon_target"] for name, group in groups.items()} == {"open": "inf", "mild": 8, "strict": 2}
    assert 7.8 < groups["mild"]["epsilon"] <= 8
    assert 1.95 < groups["strict"]["epsilon"] <= 2
    assert {"global/auc", "average/f1", "personal/auc"} <= groups["mild"]["values"].keys()
    assert [group["epsilon"] for group in dp_fedavg["groups"]] == [groups["strict"]["epsilon"]] * 3
    assert len(list(folder.glob("run/tensorboard/*/events*"))) == 2
    level_of = dict(line.split(",")[:2] for line in (folder / "run/clients.csv").read_text().splitlines()[1:])
    assert level_of == HOSPITALS


def refused(folder: Path, run_refused, *arguments: object) -> str:
    """The line of a run that is refused, after which the folder is as before."""
    files = {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
    line = run_refused("run", "experiment.toml", "--out", "run", *arguments)
    assert {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")} == files
    return line


MILD, CLIP, ADAM = '"mild",', "clip = { initial = 0.5 }", 'name = "adam", learning_rate = 0.01'
WRONG_FILES = {
    "count": (MILD, '"mild", clients = 12,', "mechanism.groups[1].clients is 12, but the data has 10"),
    "share": (MILD, '"mild", share = 0.5,', "mechanism.groups[1].share is 0.5"),
    "ids": (MILD, '"mild", clients = ["hospital 01", "clinic"],', "mechanism.groups[1].clients"),
    "level without a group": (
        '  { name = "strict", sampling_rate = 0.3, epsilon = 2.0 },\n',
        "",
        "has the level 'strict'",
    ),
    "group without a client": (
        "groups = [",
        'groups = [{ name = "lax", sampling_rate = 0.3, epsilon = 9.0 },',
        "'lax'",
    ),
    "column of clients": ('"hospital"', '"clinic"', "client must be a column of the table, got 'clinic'"),
    "column of labels": ('"sick"', '"ill"', "label must be a column of the table, got 'ill'"),
    "column of levels": ('"privacy"', '"secrecy"', "level must be a column of the table, got 'secrecy'"),
    "feature": ("test = 0.25", 'features = ["aeg"]', "features must be a column of the table, got 'aeg'"),
    "optimizer": ('"adam"', '"adamm"', "training.optimizer.name must be", "'adamm'"),
    "argument of an optimizer": ("momentum = 0.9", "momentun = 0.9", "server.optimizer.momentun = 0.9"),
    "rate": ("learning_rate = 0.01", "learning_rate = -0.01", "training.optimizer.learning_rate", "-0.01"),
    "schedule": (ADAM, 'name = "adam", learning_rate = { schedule = "cosin" }', "learning_rate.schedule", "'cosin'"),
    "argument of a schedule": (
        ADAM,
        'name = "adam", learning_rate = { schedule = "linear_schedule", start = 1.0 }',
        "training.optimizer.learning_rate.start = 1.0",
    ),
    "schedule of a weight": (
        '{ algorithm = "fedhdp" }',
        '{ algorithm = "fedhdp", weights = { mild = { schedule = "linar_schedule" } } }',
        "variants[0].weights.mild.schedule",
        "'linar_schedule'",
    ),
    "metric": ('"f1"', '"f2"', "metrics must be", "'f2'"),
    "logger": ('"tensorboard"', '"tensorbord"', "loggers must be", "'tensorbord'"),
    "argument of a logger": ('"tensorboard"', '{ name = "tensorboard", folder = "x" }', "loggers[0].folder = 'x'"),
    "layer": (CLIP, "clip = { layers = { secnd = 0.5 } }", "clip.layers", "'secnd'"),
    "clip of a layer": (CLIP, "clip = { layers = { first = -0.5 } }", "mechanism.clip.layers.first", "-0.5"),
    "swept key": ("[mechanism]", "[sweep]\ntraining.epoch = [1]\n[mechanism]", "training.epoch = 1"),
    "swept group": (
        "[mechanism]",
        '[sweep]\n"mechanism.groups.lax.weight" = [1.0]\n[mechanism]',
        "sweep.mechanism.groups.lax.weight",
    ),
    "swept values": ("[mechanism]", "[sweep]\ntraining.epochs = 2\n[mechanism]", "sweep.training.epochs", "got 2"),
    "start": ("rounds = 15", 'rounds = 15\nstart_from = "runs/none"', "start_from", "runs/none"),
    "test share": ("test = 0.25", "test = 1.5", "data.test must be", "1.5"),
    "table": ('"patients.csv"', '"none.csv"', "none.csv cannot be read"),
    "budget": ("rounds = 15", "rounds = 15\nbudgets = { mild = { epsilon = 1.0, delta = 1e-3 } }", "budgets", "'mild'"),
    "accountant": ("rounds = 15", 'rounds = 15\naccountant = "gdp"', "accountant must be", "'gdp'"),
    "key": ("rounds = 15", "rounds = 15\nround = 15", "round = 15; did you mean rounds?"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_file_is_one_line_and_nothing_is_written(folder, run_refused, name):
    old, new, *words = WRONG_FILES[name]
    assert EXPERIMENT.count(old) == 1
    (folder / "experiment.toml").write_text(EXPERIMENT.replace(old, new))
    line = refused(folder, run_refused)
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("hospital 05,strict,nan,0.5,1", ("age is missing in row 361, of client 'hospital 05'", "fill.age")),
        ("hospital 05,strict,inf,0.5,1", ("age must be finite, got inf in row 361, of client 'hospital 05'",)),
        ("hospital 05,strict,old,0.5,1", ("age must be a number, got 'old' in row 361, of client 'hospital 05'",)),
        ("hospital 05,mild,0.1,0.5,1", ("client 'hospital 05' has two levels, 'strict' and 'mild'",)),
        ("hospital 99,lax,0.1,0.5,1", ("'hospital 99' has the level 'lax'",)),
        (",mild,0.1,0.5,1", ("hospital is missing in row 361",)),
        ("hospital 05,strict,0.1,0.5,", ("sick is missing in row 361",)),
        ("hospital 05,strict,0.1", ("patients.csv", "Expected 5 columns, got 3")),
    ],
)
def test_wrong_row_is_one_line_and_nothing_is_written(folder, run_refused, row, words):
    with open("patients.csv", "a") as file:
        file.write(row + "\n")
    line = refused(folder, run_refused)
    assert [word for word in words if word not in line] == [], line


def test_missing_package_is_one_line_and_nothing_is_written(folder, run_refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # importing it fails
    assert "patients.csv: tables need pyarrow: pip install 'fedhdp[tables]'" in refused(folder, run_refused)
