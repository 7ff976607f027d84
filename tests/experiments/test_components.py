"""Data and models of a user's Python file: run, resumed and charged like built-in ones, refused when the file changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiment_helpers import assert_same_run, command, keep_going, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import ConfigError, DataError, FedHDPError, LedgerError, ModelError
from fedhdp.experiments import EXPERIMENTS, Experiment, Interrupted, Progress, find, from_toml, resume, run, to_toml
from fedhdp.experiments.components import PythonData, PythonModel
from fedhdp.privacy.ledger import Ledger
from fedhdp.results import read_arrays

EXAMPLES = Path(__file__).parents[2] / "examples"
CODE = """
import jax, jax.numpy as jnp, numpy as np
from fedhdp.models import Model
from fedhdp.data import FederatedData, examples

def data(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(120, 3)).astype(np.float32), rng.integers(0, 2, 120)
    clients = examples(x, y, np.full(20, 6))
    return FederatedData("coins", clients, clients, x, y, classes=2)

def model():
    return Model(lambda key: jnp.zeros((3, 2)), lambda w, x, key: x @ w)
"""


@pytest.fixture
def coins(tmp_path) -> Experiment:
    """The tiny experiment with data and model of a file."""
    (tmp_path / "coins.py").write_text(CODE)
    data, model = PythonData(20, file="coins.py"), PythonModel(file="coins.py")
    return tiny(data=data, model=model).resolve(tmp_path)


def rewrite(experiment: Experiment, old: str, new: str) -> Experiment:
    """Change the experiment's file."""
    assert old in CODE
    Path(experiment.data.file).write_text(CODE.replace(old, new))
    return experiment


@pytest.mark.slow
def test_example_runs(tmp_path):
    done = command("run", EXAMPLES / "own.toml", "--rounds", 2, "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [variant["name"] for variant in summary["variants"]] == ["DP-FedAvg", "HDP-FedAvg", "FedHDP"]
    assert [group["clients"] for group in summary["variants"][2]["groups"]] == [200, 200, 200]
    assert len({round(group["epsilon"], 6) for group in summary["variants"][0]["groups"]}) == 1
    recorded = from_toml((tmp_path / "run/experiment.toml").read_text(), "recorded")
    assert Path(recorded.data.file).samefile(EXAMPLES / "own.py")
    assert len(recorded.data.sha256) == len(recorded.model.sha256) == 64
    assert from_toml(to_toml(recorded), "x") == recorded


@pytest.mark.slow
def test_data_and_model_of_the_file_are_trained(coins, tmp_path):
    run(coins, tmp_path / "run", keep_going)
    assert read_arrays(tmp_path / "run/fedhdp/model.npz")["global/"].shape == (3, 2)
    ones = replace(rewrite(coins, "jnp.zeros((3, 2))", "jnp.ones((3, 2))"), rounds=1, evaluate_every=1)
    run(ones, tmp_path / "ones", keep_going)
    assert read_arrays(tmp_path / "ones/fedhdp/model.npz")["global/"].mean() > 0.5


@pytest.mark.slow
def test_metrics_of_the_file_are_measured(coins, tmp_path):
    function = "lambda outputs, labels: float((labels == 1).mean())"
    model = f"x @ w, metrics=('accuracy', Metric('ones', {function}, higher_is_better=False)))"
    code = rewrite(coins, "x @ w)", model)
    Path(coins.data.file).write_text("from fedhdp import Metric\n" + Path(coins.data.file).read_text())
    (_, result) = run(replace(code, rounds=1, metrics=("ones", "f1")), tmp_path / "run", keep_going).variants
    assert [(metric.name, metric.higher_is_better) for metric in result.metrics] == [("ones", False), ("f1", True)]
    assert {name for name in result.values if name.startswith("global/")} == {"global/ones", "global/f1"}
    assert set(read_arrays(tmp_path / "run/fedhdp/scores.npz")) == {
        f"{model}/{name}" for model in ("global", "personal") for name in ("ones", "f1")
    }


@pytest.mark.parametrize(
    ("metrics", "value"),
    [
        ("metrics=('ones',)", "ones"),
        ("metrics=(lambda outputs, labels: 0.0,)", "<lambda>"),
        ("metrics=(np.outer,)", "outer"),
        ("metrics='accuracy'", "accuracy"),
        ("metrics=('mean_squared_error',)", "mean_squared_error"),
    ],
)
def test_wrong_metrics_of_the_file_are_refused_before_training(coins, tmp_path, metrics, value):
    with raises_field("metrics", (ModelError, DataError)) as caught:
        run(rewrite(coins, "x @ w)", f"x @ w, {metrics})"), tmp_path / "run", keep_going)
    assert caught.value.value == value
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_changed_file_is_refused(coins, tmp_path):
    def watch(progress: Progress) -> bool:
        return progress.round < 5

    run(coins, tmp_path / "whole", keep_going)
    with pytest.raises(Interrupted):
        run(coins, tmp_path / "stopped", watch)
    rewrite(coins, "default_rng(seed)", "default_rng(seed + 1)")
    with pytest.raises(ConfigError) as error:
        resume(tmp_path / "stopped", keep_going)
    assert error.value.field == "sha256"
    with pytest.raises(ConfigError):
        run(find(str(tmp_path / "whole/experiment.toml"), EXPERIMENTS), tmp_path / "again", keep_going)
    assert not (tmp_path / "again").exists()
    rewrite(coins, "coins", "coins")
    resume(tmp_path / "stopped", keep_going)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_ledger_knows_the_population_by_the_files_name(coins, tmp_path):
    first = replace(coins, ledger=str(tmp_path / "ledger.db"), noise_seed=None, rounds=1, variants=coins.variants[1:])
    run(first, tmp_path / "first", keep_going)
    (tmp_path / "moved").mkdir()
    for name in ("coins.py", "dice.py"):
        (tmp_path / "moved" / name).write_text(CODE + "# edited\n")
    moved = replace(first, data=PythonData(20, file=str(tmp_path / "moved/coins.py")))
    run(moved, tmp_path / "second", keep_going)
    with Ledger(tmp_path / "ledger.db", read_only=True) as ledger:
        assert sum(cost.rounds for cost in ledger.costs("private")) == 2
    other = replace(first, data=PythonData(20, file=str(tmp_path / "moved/dice.py")))
    with pytest.raises(LedgerError):
        run(other, tmp_path / "third", keep_going)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("def data", "def others", "coins.py has no function data()"),
        ("def model", "def others", "coins.py has no function model()"),
        ("def data(seed)", "def data()", "coins.py: TypeError"),
        ("rng.integers", "rng.whole_numbers", "coins.py, line 8: AttributeError"),
        ("import jax, ", "import jax, nowhere, ", "coins.py, line 2: ModuleNotFoundError"),
        ("x @ w)", "x @ w", "coins.py, line 13: "),
        ("return FederatedData(", "return tuple([", "coins.py, line 10: "),
        ("return FederatedData", "return print", "coins.py, line 10: TypeError"),
        ("return Model(", "return (", "coins.py must return a Model, got tuple"),
        ("np.full(20, 6)", "np.full(40, 3)", "data.clients must be 40"),
        ("x @ w", "x @ w.T", "TypeError: dot_general"),
    ],
)
def test_error_in_a_file_is_located(coins, tmp_path, old, new, place):
    with pytest.raises(FedHDPError) as error:
        run(rewrite(coins, old, new), tmp_path / "run", keep_going)
    assert place in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_missing_file_is_one_line(coins, tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text(to_toml(replace(coins, data=PythonData(20, file="nowhere.py"))))
    monkeypatch.chdir(tmp_path)
    done = command("run", "own.toml")
    assert done.code == 2
    assert done.stderr.splitlines()[-1].endswith("nowhere.py cannot be read: No such file or directory")
    assert not (tmp_path / "runs").exists()
