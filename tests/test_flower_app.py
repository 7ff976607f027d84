"""The example app as it stands, over the in-process grid, and its PyTorch client beside the built-in one."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_grid import InProcessGrid, Node
from flwr.app import Context, RecordDict
from helpers import tiny_data

from fedhdp.client import LocalTraining
from fedhdp.flower.config import from_run_config
from fedhdp.flower.trainer import _parameters, built_in, start_model
from fedhdp.models import mlp
from fedhdp.results.schema import Summary
from fedhdp.results.store import SUMMARY_FILE, read_value

APP = Path(__file__).parent.parent / "examples" / "flower_app"
OWNERS = ("open", "relaxed", "relaxed", "strict", None)


@pytest.fixture
def modules(monkeypatch):
    """The app's modules by name, as Flower would import them."""
    monkeypatch.syspath_prepend(str(APP))
    for name in ("task", "client_app", "server_app", "torch_client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield lambda name: __import__(name)
    for name in ("task", "client_app", "server_app", "torch_client"):
        sys.modules.pop(name, None)


def run_config(tmp_path, **others):
    def flat(table, prefix=""):
        for key, value in table.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]

    app = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return dict(flat(app["config"])) | {"out": str(tmp_path / "run"), "ledger": str(tmp_path / "ledger")} | others


def run_round(app, server, config) -> Summary:
    nodes = []
    for number, level in enumerate(OWNERS):
        node = Node(number + 1, app, **{"partition-id": number}, **({} if level is None else {"privacy": level}))
        node.context.run_config = config
        nodes.append(node)
    server(InProcessGrid(nodes), Context(1, 1, {}, RecordDict(), config))
    return read_value(Path(str(config["out"])) / SUMMARY_FILE, Summary)


def test_the_example_trains_to_a_table_with_three_levels(tmp_path, modules):
    config = run_config(tmp_path, rounds=2, **{"app.samples": 20})
    (variant,) = run_round(modules("client_app").app, modules("server_app").app, config).variants
    assert {group.name: group.clients for group in variant.groups} == {"open": 1, "relaxed": 2, "strict": 2}
    assert variant.server_accuracy > 0.1
    assert all(group.personal_accuracy > 0.2 for group in variant.groups)
    epsilon = {group.name: group.epsilon_pld for group in variant.groups}
    assert epsilon["open"] is None
    assert epsilon["strict"] <= 2.0
    assert epsilon["relaxed"] <= 8.0


def test_the_example_says_what_it_promises(tmp_path):
    assert from_run_config(run_config(tmp_path)).strictness == ("strict", "relaxed", "open")


def test_the_examples_network_on_named_arrays_is_its_model(modules):
    task, rng = modules("task"), np.random.default_rng(0)
    start = start_model(task.MODEL, 0)
    named = {name: array + rng.normal(0, 0.1, array.shape).astype(np.float32) for name, array in start.items()}
    x_NF = rng.random((6, 784), np.float32)
    wanted = task.MODEL.apply(_parameters(task.MODEL, named), x_NF, None)
    np.testing.assert_allclose(task.logits(named, x_NF), wanted, atol=1e-5)


def test_the_pytorch_client_runs_in_the_same_app(tmp_path, modules):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    config = run_config(tmp_path, rounds=2, **{"app.samples": 20})
    (variant,) = run_round(modules("torch_client").app, modules("server_app").app, config).variants
    assert sum(group.refused for group in variant.groups) == 0
    assert all(group.personal_accuracy > 0.2 for group in variant.groups)


def test_the_pytorch_client_takes_the_same_steps_as_the_built_in_one(modules):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    population, model = tiny_data([6]), mlp(12, 5, 3)
    x_N, y_N = population.train.x_N, population.train.y_N
    training = LocalTraining(epochs=3, batch_size=6, learning_rate=0.3)  # one batch, so that no order matters
    theirs = modules("torch_client").torch_trainer(training, torch.tensor(x_N) / 255, torch.tensor(y_N).long())
    ours = built_in(model, training, x_N, y_N)
    start = start_model(model, 0)
    personal = {name: array + 0.1 for name, array in start.items()}
    for mine, other in zip(ours.fit(start, personal, 0.2, 0), theirs.fit(start, personal, 0.2, 0)):
        assert set(mine) == set(other)
        for name, array in mine.items():
            np.testing.assert_allclose(other[name], array, atol=1e-5)
            assert other[name].dtype == np.float32
