"""A deployment computes what the simulator computes."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    DATA,
    LEVELS,
    MODEL,
    PLAIN_MODEL,
    PRIVATE,
    SEED,
    TRAINING,
    InProcessGrid,
    is_equal,
    jax_trainer_of,
    ledger_costs,
    make_deployment,
    make_grid,
    open_ledger,
    plain_node,
    run_jax,
    run_plain,
    saved_model,
    saved_values,
)
from helpers import group_by_group, raises_field

from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.flower import FedHDP, client_app, initial_arrays
from fedhdp.flower.aggregation import noise_key
from fedhdp.flower.client_state import InMemoryState
from fedhdp.flower.protocol import flatten, from_record, to_record
from fedhdp.flower.registry import Registry
from fedhdp.flower.serverapp import start_billing
from fedhdp.optimizers import OptimizerConfig
from fedhdp.privacy.calibration import PrivacyLevel
from fedhdp.server import ServerOptimizer
from fedhdp.simulation import simulate

ADAM = LocalTraining(2, 4, optimizer=OptimizerConfig("adam", learning_rate=0.02, eps=1e-3), personal_learning_rate=0.01)


BY_LAYER = LayerClip({"first": 0.3, "rest": 0.1})


@pytest.mark.parametrize("arithmetic", ["float32", "exact"])
@pytest.mark.parametrize(
    ("training", "clip"),
    [(TRAINING, AdaptiveClip(0.3)), (ADAM, AdaptiveClip(0.3)), (TRAINING, BY_LAYER)],
    ids=["sgd", "adam", "clip by layer"],
)
def test_deployment_equals_simulation(tmp_path, training, clip, arithmetic):
    optimizer = ServerOptimizer(OptimizerConfig("sgd", learning_rate=1.0, momentum=0.9), average=0.5)
    changes = {
        "rounds": 4,
        "server": optimizer,
        "evaluate_every": 2,
        "cohort_seed": 7,
        "clip": clip,
        "arithmetic": arithmetic,
    }
    deployment = make_deployment(tmp_path, training=training, **changes)
    mechanism = deployment.mechanism({"open": 2, "mid": 3, "strict": 3}, parameters=83)

    (variant,) = run_jax(make_grid(app=client_app(partial(jax_trainer_of, training=training))), deployment).variants
    data = DATA.with_levels(group_by_group(mechanism))
    simulation = simulate(data, MODEL, mechanism, training, optimizer, 4, seed=SEED, noise_seed=7)

    model = saved_model(deployment)
    assert abs(initial_arrays(MODEL, SEED)["first/w"] - model["global/first/w"]).max() > 0.01
    assert set(model) == set(simulation.parameters)
    for name, array in simulation.parameters.items():
        np.testing.assert_allclose(model[name], array, atol=3e-5)
    scores = {(row.group, row.model, row.metric): row.value for row in simulation.history}
    for group, simulated in zip(variant.groups, simulation.result("", 1e-4, "rdp").groups, strict=True):
        assert group.value("accuracy") == pytest.approx(scores[group.name, "global", "accuracy"], abs=1e-6)
        assert group.value("accuracy", "personal") == pytest.approx(
            scores[group.name, "personal", "accuracy"], abs=1e-6
        )
        assert group.epsilon == simulated.epsilon
        assert group.epsilon_basis == simulated.epsilon_basis
    assert variant.repeatable


def test_layers_that_are_not_the_models_are_refused(tmp_path):
    deployment = make_deployment(tmp_path, clip=LayerClip({"w": 0.3, "last": 0.1}))
    with raises_field("clip.layers"):
        run_plain(make_grid(), deployment)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ledger").exists()


def test_without_seeds_runs_differ(tmp_path):
    models, cohorts = [], []
    for name in ("first", "second"):
        deployment = make_deployment(tmp_path / name, rounds=6, **PRIVATE)
        (variant,) = run_plain(make_grid(), deployment).variants
        assert not variant.repeatable
        models.append(flatten(saved_model(deployment)))
        cohorts.append([saved_values(deployment, level, "sampled") for level in LEVELS])
    assert (models[0] != models[1]).all()
    assert cohorts[0] != cohorts[1]


def test_noise_keys_differ_without_a_seed():
    def keys(noise_seed: int | None, round: int = 0) -> set[tuple]:
        return {tuple(np.asarray(jax.random.key_data(noise_key(noise_seed, round)))) for _ in range(4)}

    assert len(keys(None)) == 4
    assert len(keys(7)) == 1
    assert keys(7) != keys(7, round=1)


@pytest.mark.parametrize("seeds", [{"noise_seed": None}, {"cohort_seed": None}, {}])
def test_repeatable_run_is_charged_as_without_noise(tmp_path, seeds):
    deployment = make_deployment(tmp_path, **seeds)
    (variant,) = run_plain(make_grid(), deployment).variants
    assert deployment.repeatable
    assert variant.repeatable
    assert {cost.noise_multiplier for level in LEVELS for cost in ledger_costs(deployment, level)} == {0.0}


def test_strategy_runs_in_flowers_own_loop(tmp_path):
    deployment = make_deployment(tmp_path)
    reference = make_deployment(tmp_path / "reference")
    grid = make_grid()
    with open_ledger(deployment.ledger, read_only=False) as ledger:
        registry = Registry(deployment, ledger, "run")
        registry.wait_for_clients(grid)
        billing = start_billing(deployment, ledger, "run", 9)
        strategy = FedHDP(deployment, registry, billing, "run", PLAIN_MODEL)
        strategy.admit(grid)
        result = strategy.start(grid, to_record(PLAIN_MODEL), num_rounds=3)
    run_plain(make_grid(), reference)
    model = {f"global/{name}": array for name, array in from_record(result.arrays).items()}
    assert is_equal(model, saved_model(reference))


def test_client_without_a_framework(tmp_path):
    levels = {"open": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.0)}
    deployment = make_deployment(tmp_path, levels=levels, clip=100.0, rounds=2)
    grid = InProcessGrid([plain_node(1), plain_node(2)])
    run_plain(grid, deployment)
    np.testing.assert_allclose(saved_model(deployment)["global/w"], np.full((2, 3), 1.0), rtol=1e-6)
    personal = InMemoryState(grid.nodes[1].context.state).load_personal(PLAIN_MODEL)
    np.testing.assert_allclose(personal["w"], np.full((2, 3), 0.5))  # two quarters onto the initial model
