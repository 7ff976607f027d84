"""A deployment's configuration, its run directory, and the package's public names."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    DATA,
    JAX_APP,
    MODEL,
    PLAIN_MODEL,
    SEED,
    make_deployment,
    make_grid,
    saved_history,
    saved_model,
    saved_values,
)

import fedhdp.flower
from fedhdp.clips import LayerClip
from fedhdp.errors import ConfigError, FedHDPError, InvalidValueError
from fedhdp.flower import Deployment, initial_arrays, run_deployment, scorer
from fedhdp.mechanism import SERVER
from fedhdp.optimizers import OptimizerConfig
from fedhdp.privacy.calibration import PrivacyLevel
from fedhdp.results.schema import Summary
from fedhdp.results.store import VariantDirectory, read_value
from fedhdp.theory import with_optimal_weights

RUN_CONFIG = {
    "out": "runs/one",
    "ledger": "population.ledger",
    "rounds": 5,
    "clip.initial": 0.5,
    "levels.opted out.epsilon": math.inf,
    "levels.opted out.sampling-rate": 0.5,
    "levels.strict.noise-multiplier": 1.0,
    "levels.strict.sampling-rate": 0.5,
    "training.epochs": 2,
    "app.data": "the app's own",
}
OPTIMIZERS = {
    "training.optimizer.name": "adam",
    "training.optimizer.learning-rate.schedule": "constant_schedule",
    "training.optimizer.learning-rate.value": 0.1,
    "server.optimizer.name": "sgd",
    "server.optimizer.learning-rate": 0.5,
}


def test_run_config_is_read_from_dotted_keys():
    deployment = Deployment.from_run_config(RUN_CONFIG)
    assert deployment.levels["opted out"] == PrivacyLevel(sampling_rate=0.5, epsilon=math.inf)
    assert deployment.training.epochs == 2
    assert deployment.strictest_level == "strict"


def test_a_weight_that_is_not_stated_is_the_theorys():
    deployment = Deployment.from_run_config(RUN_CONFIG | {"levels.opted out.weight": 0.5})
    stated = {"levels.opted out.weight": 0.5, "levels.strict.weight": 0.25}
    for clients in ({"opted out": 3, "strict": 5}, {"opted out": 3, "strict": 500}):
        mechanism = deployment.mechanism(clients, parameters=1000)
        assert mechanism == with_optimal_weights(deployment.mechanism(clients), 5, 1000, ["strict"])
        assert mechanism.groups[0].weight == 0.5
        all_stated = Deployment.from_run_config(RUN_CONFIG | stated)
        assert all_stated.mechanism(clients, parameters=1000) == all_stated.mechanism(clients)


def test_optimizers_are_read_from_dotted_keys():
    deployment = Deployment.from_run_config(RUN_CONFIG | OPTIMIZERS)
    adam = OptimizerConfig("adam", learning_rate={"schedule": "constant_schedule", "value": 0.1})
    assert deployment.training.optimizer == adam
    assert deployment.server.optimizer == OptimizerConfig("sgd", learning_rate=0.5)


LAYERS = {
    "clip.layers.conv-1": 0.3,
    "clip.layers.dense.weight": 0.2,
    "clip.layers.dense.bias": 0.1,
    "clip.quantile": 0.6,
}


def test_layers_are_read_from_dotted_keys():
    config = {key: value for key, value in RUN_CONFIG.items() if key != "clip.initial"} | LAYERS
    clips = {"conv-1": 0.3, "dense.weight": 0.2, "dense.bias": 0.1}
    deployment = Deployment.from_run_config(config)
    assert deployment.clip == LayerClip(clips, quantile=0.6)
    assert Deployment.from_toml(deployment.to_toml().decode()) == deployment


@pytest.mark.parametrize("changes", [{}, OPTIMIZERS], ids=["plain", "optimizers"])
def test_toml_round_trip(changes):
    deployment = Deployment.from_run_config(RUN_CONFIG | changes)
    assert Deployment.from_toml(deployment.to_toml().decode()) == deployment


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"training.epoch": 3}, "training.epoch"),
        ({"levels.strict.epsilon": 3.0}, "levels.strict.noise_multiplier"),
        ({"levels.strict.wieght": 3.0}, "levels.strict.wieght = 3.0"),
        ({"rounds": 0}, "rounds"),
        ({"server.optimizer.name": "adamm"}, "server.optimizer.name"),
        ({"server.momentum": 0.9}, "server.momentum"),
        ({"rounds.first": 3}, "rounds.first"),
        ({"clip": 1.0}, "clip"),
        ({"clip.layers.first": 1.0}, "clip.initial"),
        ({"clip.quantil": 1.0}, "clip.quantil"),
        ({"metrics": ""}, "metrics"),
        ({"metrics": "auc,auc"}, "metrics"),
        ({"metrics": "auc_variance"}, "metrics"),
        ({"enroll-timeout-seconds": 0.0}, "enroll_timeout_seconds"),
    ],
)
def test_invalid_run_config_is_refused(change, words):
    with pytest.raises(FedHDPError) as error:
        Deployment.from_run_config(RUN_CONFIG | change)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["rounds = ", "[tool]", None])
def test_app_without_a_configuration_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError):
        Deployment.from_app(tmp_path)


def test_unstable_pull_is_refused(tmp_path):
    with pytest.raises(InvalidValueError) as error:
        make_deployment(tmp_path, levels={"strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=1.0, pull=100.0)})
    assert "pull" in error.value.field


@pytest.mark.slow
def test_run_directory_is_the_simulators(tmp_path):
    deployment = make_deployment(tmp_path, evaluate_every=1)
    score, out = scorer(MODEL, DATA.server_x_N, DATA.server_y_N, DATA.input_scale), Path(deployment.out)
    summary = run_deployment(make_grid(app=JAX_APP), deployment, initial_arrays(MODEL, SEED), score)
    (variant,) = summary.variants
    assert read_value(out / "summary.json", Summary) == summary
    assert VariantDirectory(out / "fedhdp").result() == variant
    model = {name.removeprefix("global/"): array for name, array in saved_model(deployment).items()}
    assert variant.server_accuracy == pytest.approx(score(model)["accuracy"])
    metrics = {row.metric for row in saved_history(deployment)}
    assert metrics >= {"clip", "sampled", "sent", "replies", "refused", "epsilon"}
    assert not (out / "fedhdp" / "checkpoint.npz").exists()
    assert json.loads((out / "run.json").read_text())["id"].startswith("run-")


def test_server_evaluation_needs_no_clients(tmp_path):
    deployment, grid = make_deployment(tmp_path, server_evaluate_every=1), make_grid()
    run_deployment(grid, deployment, PLAIN_MODEL, lambda arrays: float(arrays["w"].mean()))
    assert len(saved_values(deployment, SERVER, "accuracy")) == 3
    assert not any("metrics" in message.content["request"] for message in grid.pushed_of("train"))


def test_public_names():
    assert all(callable(getattr(fedhdp.flower, name)) for name in fedhdp.flower.__all__)
    assert not hasattr(fedhdp.flower, "unknown")


def test_without_flower_a_deployment_can_be_read_and_an_app_names_the_extra():
    program = """
import sys
sys.modules["flwr"] = None
from fedhdp.flower import Deployment
try:
    from fedhdp.flower import server_app
except ModuleNotFoundError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.stderr == ""
    assert "pip install 'fedhdp[flower]'" in process.stdout
    assert process.stdout.count("\n") == 1
