"""Data and models of a file of one's own: run, gone on with and paid for as those that are here, and never exchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_experiments import command, onwards, same_run, tiny

from fedhdp.errors import LedgerError
from fedhdp.experiments.components import PythonData, PythonModel
from fedhdp.experiments.config import Experiment, find, from_toml, to_toml
from fedhdp.experiments.runner import Interrupted, Progress, resume, run
from fedhdp.privacy.ledger import Ledger

EXAMPLES = Path(__file__).parents[1] / "examples"
CODE = """
import jax, jax.numpy as jnp, numpy as np
from fedhdp.models import Model
from fedhdp.data import Population, examples

def population(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(120, 3)).astype(np.float32), rng.integers(0, 2, 120)
    clients = examples(x, y, np.full(20, 6))
    return Population("coins", clients, clients, x, y, classes=2)

def model():
    return Model(lambda key: jnp.zeros((3, 2)), lambda w, x, key: x @ w)
"""


@pytest.fixture
def own(tmp_path) -> Experiment:
    """The tiny experiment with data and model of a file."""
    (tmp_path / "coins.py").write_text(CODE)
    data, model = PythonData(20, file="coins.py"), PythonModel(file="coins.py")
    return tiny(data=data, model=model).beside(tmp_path)


def rewritten(experiment: Experiment, old: str, new: str) -> Experiment:
    """The experiment after a change in its file."""
    assert old in CODE
    Path(experiment.data.file).write_text(CODE.replace(old, new))
    return experiment


def test_the_example_runs_from_the_command_line_and_its_file_is_kept_with_its_sum(tmp_path):
    done = command("run", EXAMPLES / "own.toml", "--rounds", 2, "--out", tmp_path / "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [variant["name"] for variant in found["variants"]] == ["DP-FedAvg", "HDP-FedAvg", "FedHDP"]
    assert [group["clients"] for group in found["variants"][2]["groups"]] == [200, 200, 200]
    assert len({round(group["epsilon"], 6) for group in found["variants"][0]["groups"]}) == 1
    kept = from_toml((tmp_path / "run/experiment.toml").read_text(), "kept")
    assert Path(kept.data.file).samefile(EXAMPLES / "own.py")
    assert len(kept.data.sha256) == len(kept.model.sha256) == 64
    assert from_toml(to_toml(kept), "x") == kept


def test_the_files_data_and_model_are_what_is_trained(own, tmp_path):
    run(own, tmp_path / "run", onwards)
    from fedhdp.results import store as results

    assert results.read_arrays(tmp_path / "run/fedhdp/model.npz")["global/"].shape == (3, 2)
    bigger = rewritten(own, "jnp.zeros((3, 2))", "jnp.ones((3, 2))")
    run(replace(bigger, rounds=1, evaluate_every=1), tmp_path / "ones", onwards)
    assert results.read_arrays(tmp_path / "ones/fedhdp/model.npz")["global/"].mean() > 0.5


def test_what_is_stopped_goes_on_to_the_same_end_and_only_with_the_same_file(own, tmp_path):
    def until_five(progress: Progress) -> bool:
        return progress.round < 5

    run(own, tmp_path / "whole", onwards)
    with pytest.raises(Interrupted):
        run(own, tmp_path / "stopped", until_five)
    changed = rewritten(own, "default_rng(seed)", "default_rng(seed + 1)")
    with pytest.raises(ValueError, match=r"coins.py has changed: its sha256 is \w{64}, and was \w{64}"):
        resume(tmp_path / "stopped", onwards)
    with pytest.raises(ValueError, match=r"coins.py has changed"):
        run(find(str(tmp_path / "whole/experiment.toml"), {}), tmp_path / "again", onwards)
    assert not (tmp_path / "again").exists()
    rewritten(changed, "coins", "coins")
    resume(tmp_path / "stopped", onwards)
    same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_ledger_knows_the_population_by_its_file_and_not_by_where_it_lies(own, tmp_path):
    paying = replace(own, ledger=str(tmp_path / "ledger.db"), noise_seed=None, rounds=1, variants=own.variants[1:])
    run(paying, tmp_path / "one", onwards)
    (tmp_path / "moved").mkdir()
    for name in ("coins.py", "dice.py"):
        (tmp_path / "moved" / name).write_text(CODE + "# edited\n")
    run(replace(paying, data=PythonData(20, file=str(tmp_path / "moved/coins.py"))), tmp_path / "two", onwards)
    with Ledger(tmp_path / "ledger.db", read_only=True) as ledger:
        assert sum(rounds for *_, rounds in ledger.costs("private")) == 2
    other = replace(paying, data=PythonData(20, file=str(tmp_path / "moved/dice.py")))
    with pytest.raises(LedgerError, match=r"those of python \(clients 20, file coins.py\), seed 1, not of .* dice.py"):
        run(other, tmp_path / "three", onwards)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def population", "def others", r"coins.py has no function population\(\)"),
        ("def model", "def others", r"coins.py has no function model\(\)"),
        ("def population(seed)", "def population()", r"coins.py: TypeError: population\(\) takes 0 positional"),
        ("rng.integers", "rng.whole_numbers", r"coins.py, line 8: AttributeError: .*whole_numbers"),
        ("import jax, ", "import jax, nowhere, ", r"coins.py, line 2: ModuleNotFoundError: .*nowhere"),
        ("x @ w)", "x @ w", r"coins.py, line 13: '\(' was never closed"),
        ("return Population(", "return tuple([", r"coins.py, line 10: closing parenthesis"),
        ("return Population", "return print", r"coins.py, line 10: TypeError: .*'classes'"),
        ("return Model(", "return (", r"what model\(\) of .*coins.py returns must be a Model, got 'tuple'"),
        ("np.full(20, 6)", "np.full(40, 3)", r"data.clients must be 40, as .*coins.py has, got 20"),
        ("x @ w", "x @ w.T", r"the model's apply failed with float32\[2, 3\]: TypeError: dot_general"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place_and_nothing_is_begun(own, tmp_path, old, new, said):
    with pytest.raises(ValueError, match=said):
        run(rewritten(own, old, new), tmp_path / "run", onwards)
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there_is_one_line_at_the_command_line(own, tmp_path):
    (tmp_path / "own.toml").write_text(to_toml(replace(own, data=PythonData(20, file="nowhere.py"))))
    done = command("run", "own.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("nowhere.py cannot be read: No such file or directory")
    assert not (tmp_path / "runs").exists()
