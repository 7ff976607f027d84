"""The example app over the in-process grid, and its PyTorch client."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_apps import EXAMPLES, app_modules, run_app, run_config
from flwr.app import Context, RecordDict
from helpers import raises_field, tiny_data

from fedhdp import LocalTraining, mlp
from fedhdp.errors import ModelError
from fedhdp.flower import Deployment, initial_arrays, jax_trainer
from fedhdp.flower.trainer import to_parameters
from fedhdp.results.schema import VariantResult

APP = EXAMPLES / "flower_app"
OWNERS_LEVELS = ("open", "relaxed", "relaxed", "strict", None)


@pytest.fixture
def load_module():
    with app_modules(APP) as load:
        yield load


def run_example(tmp_path, client_module, server_module) -> VariantResult:
    config = run_config(APP, tmp_path, rounds=2, **{"app.samples": 20})
    node_configs = [
        {"partition-id": number} | ({"privacy": level} if level else {}) for number, level in enumerate(OWNERS_LEVELS)
    ]
    return run_app(client_module, server_module, config, node_configs)


@pytest.mark.slow
def test_example_trains_three_levels(tmp_path, load_module):
    variant = run_example(tmp_path, load_module("client_app"), load_module("server_app"))
    groups = {group.name: group for group in variant.groups}
    assert {name: group.clients for name, group in groups.items()} == {"open": 1, "relaxed": 2, "strict": 2}
    assert variant.server_accuracy > 0.1
    assert all(group.values["personal/accuracy"] > 0.2 for group in variant.groups)
    assert groups["open"].epsilon_target == math.inf
    assert 0.99 * 2.0 <= groups["strict"].epsilon <= groups["strict"].epsilon_target == 2.0
    assert groups["relaxed"].epsilon <= groups["relaxed"].epsilon_target == 8.0


def test_example_is_a_deployment(tmp_path):
    levels = ("strict", "relaxed", "open")
    assert Deployment.from_run_config(run_config(APP, tmp_path)).levels_by_strictness == levels
    assert Deployment.from_app(APP).levels_by_strictness == levels


def test_logits_equal_the_models(load_module):
    task, rng = load_module("task"), np.random.default_rng(0)
    arrays = {
        name: array + rng.normal(0, 0.1, array.shape).astype(np.float32)
        for name, array in initial_arrays(task.MODEL, 0).items()
    }
    x_NF = rng.random((6, 784), np.float32)
    expected = task.MODEL.apply(to_parameters(task.MODEL, arrays), x_NF, None)
    np.testing.assert_allclose(task.logits(arrays, x_NF), expected, atol=1e-5)


def test_arrays_of_another_model_are_refused():
    arrays = initial_arrays(mlp(12, 5, 3), 0)
    with raises_field("arrays", ModelError):
        to_parameters(mlp(12, 6, 3), arrays)


def test_examples_are_stored_in_the_directory(tmp_path, load_module):
    task = load_module("task")
    node_config = {"partition-id": 1, "directory": str(tmp_path / "client")}
    context = Context(1, 1, node_config, RecordDict(), {"app.samples": 6})
    first, second = task.load_examples(context), task.load_examples(context)
    assert [file.name for file in (tmp_path / "client").iterdir()] == ["examples.npz"]
    assert set(first) == set(second) == {"train_x", "train_y", "test_x", "test_y"}
    assert all((first[name] == second[name]).all() for name in first)


def test_torch_client_runs_in_the_example(tmp_path, load_module):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    variant = run_example(tmp_path, load_module("torch_client"), load_module("server_app"))
    assert sum(group.refused for group in variant.groups) == 0
    assert all(group.values["personal/accuracy"] > 0.2 for group in variant.groups)


def test_torch_trainer_equals_jax_trainer(load_module):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    data, model = tiny_data([6]), mlp(12, 5, 3)
    x_N, y_N = data.train.x_N, data.train.y_N
    training = LocalTraining(epochs=3, batch_size=6, learning_rate=0.3)  # one batch, so that its order does not matter
    torch_trainer = load_module("torch_client").torch_trainer(
        training, torch.tensor(x_N) / 255, torch.tensor(y_N).long()
    )
    start = initial_arrays(model, 0)
    personal = {name: array + 0.1 for name, array in start.items()}
    jax_models = jax_trainer(model, training, x_N, y_N, input_scale=1 / 255).fit(start, personal, 0.2, 0)
    torch_models = torch_trainer.fit(start, personal, 0.2, 0)
    for jax_model, torch_model in zip(jax_models, torch_models, strict=True):
        assert set(jax_model) == set(torch_model)
        for name, array in jax_model.items():
            np.testing.assert_allclose(torch_model[name], array, atol=1e-5)
            assert torch_model[name].dtype == np.float32
