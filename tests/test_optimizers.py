"""Optimizers and schedules of optax by name."""

from __future__ import annotations

import pickle

import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
import tomli_w
from helpers import raises_field
from simulations import run_python

from fedhdp import optimizers
from fedhdp.optimizers import OptimizerConfig, ScheduleConfig, as_optimizer, as_schedule, value_at

COSINE = {"schedule": "cosine_decay_schedule", "init_value": 0.1, "decay_steps": 10}
JOINED = {
    "schedule": "join_schedules",
    "schedules": [
        {"schedule": "linear_schedule", "init_value": 0, "end_value": 1.0, "transition_steps": 4},
        {"schedule": "constant_schedule", "value": 0.5},
    ],
    "boundaries": [4],
}
PIECES = {"schedule": "piecewise_constant_schedule", "init_value": 1.0, "boundaries_and_scales": {"3": 0.5}}


def steps(transformation: optax.GradientTransformation) -> list[np.ndarray]:
    """Parameters after three steps of one gradient."""
    theta, gradient, thetas = jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0]), []
    state = transformation.init(theta)
    for _ in range(3):
        update, state = transformation.update(gradient, state, theta)
        theta = theta + update
        thetas.append(np.asarray(theta))
    return thetas


@pytest.mark.parametrize("name", sorted(optimizers._optimizers()))
def test_name_and_arguments_are_optax(name):
    config = OptimizerConfig(name, learning_rate=0.1)
    np.testing.assert_array_equal(steps(config.transformation()), steps(getattr(optax, name)(learning_rate=0.1)))
    assert {"adam", "adamw", "sgd", "rmsprop", "yogi", "lamb"} <= optimizers._optimizers().keys()


def test_arguments_and_rate_reach_optax():
    config = OptimizerConfig("adamw", learning_rate=0.1, b1=0.5, weight_decay=0.2)
    expected = optax.adamw(0.3, b1=0.5, weight_decay=0.2)
    np.testing.assert_array_equal(steps(config.transformation(0.3)), steps(expected))


@pytest.mark.parametrize(
    ("table", "function"),
    [
        (COSINE, optax.cosine_decay_schedule(0.1, 10)),
        (JOINED, optax.join_schedules([optax.linear_schedule(0, 1.0, 4), optax.constant_schedule(0.5)], [4])),
        (PIECES, optax.piecewise_constant_schedule(1.0, {3: 0.5})),
    ],
)
def test_schedule_is_optax(table, function):
    schedule = as_schedule(table, "rate")
    assert [value_at(schedule, round, "rate") for round in range(7)] == [float(function(round)) for round in range(7)]
    config = OptimizerConfig("sgd", learning_rate=table)
    assert config.rate(5) == float(function(5))
    np.testing.assert_array_equal(steps(config.transformation()), steps(optax.sgd(function)))


@pytest.mark.parametrize("table", [COSINE, JOINED, PIECES, 0.1], ids=str)
def test_table_is_frozen_hashed_and_written(table):
    config = OptimizerConfig("adam", learning_rate=table, b1=0.5)
    builtins = msgspec.to_builtins(config)
    assert as_optimizer(builtins) == config == pickle.loads(pickle.dumps(config))
    assert hash(as_optimizer(builtins)) == hash(config)
    assert "adam" in tomli_w.dumps({"optimizer": builtins})
    with pytest.raises(TypeError):
        config["name"] = "sgd"


def test_none_is_the_default():
    assert OptimizerConfig("sgd", learning_rate=0.1, momentum=None) == OptimizerConfig("sgd", learning_rate=0.1)
    assert OptimizerConfig("sgd", learning_rate=0.1).is_plain_sgd
    assert not OptimizerConfig("sgd", learning_rate=0.1, momentum=0.9).is_plain_sgd


def test_check_starts_no_backend():
    """Cores become devices when a simulation starts, which is after the experiment's file was checked."""
    program = """
from fedhdp.optimizers import OptimizerConfig
OptimizerConfig("adam", learning_rate={"schedule": "exponential_decay", "init_value": 0.1, "transition_steps": 9,
                                       "decay_rate": 0.9})
from jax._src import xla_bridge
assert not xla_bridge._backends
"""
    run_python(program)


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("name", {"name": "adamm", "learning_rate": 0.1}),
        ("name", {"name": "clip", "learning_rate": 0.1}),
        ("name", {"name": "lbfgs", "learning_rate": 0.1}),
        ("name", {"name": 3}),
        ("name", {"learning_rate": 0.1}),
        ("learning_rate", {"name": "adam"}),
        ("learning_rate", {"name": "adam", "learning_rate": -1.0}),
        ("learning_rate", {"name": "adam", "learning_rate": float("nan")}),
        ("learning_rate", {"name": "adam", "learning_rate": "fast"}),
        ("learning_rate", {"name": "adam", "learning_rate": [0.1]}),
        ("learning_rate", {"name": "adam", "learning_rate": {"value": 0.1}}),
        ("self", {"name": "adam", "learning_rate": 0.1, "self": 0.5}),
        ("beta1", {"name": "adam", "learning_rate": 0.1, "beta1": 0.5}),
        ("b1", {"name": "adam", "learning_rate": 0.1, "b1": 1.0}),
        ("eps", {"name": "adam", "learning_rate": 0.1, "eps": -1e-8}),
        ("nesterov", {"name": "adam", "learning_rate": 0.1, "nesterov": 1}),
        ("momentum", {"name": "sgd", "learning_rate": 0.1, "momentum": "much"}),
        ("momentum", {"name": "sgd", "learning_rate": 0.1, "momentum": COSINE}),
        ("learning_rate.schedule", {"name": "sgd", "learning_rate": {"schedule": "cosine"}}),
        ("learning_rate.decay_steps", {"name": "sgd", "learning_rate": COSINE | {"decay_steps": 0}}),
        ("learning_rate.decay_steps", {"name": "sgd", "learning_rate": COSINE | {"decay_steps": None}}),
        ("learning_rate.init_value", {"name": "sgd", "learning_rate": COSINE | {"init_value": -0.1}}),
        ("learning_rate.begin", {"name": "sgd", "learning_rate": COSINE | {"begin": 1}}),
    ],
)
def test_invalid_table_is_refused(field, table):
    with raises_field(f"optimizer.{field}"):
        as_optimizer(table)


def test_what_is_no_optimizer_is_refused():
    with raises_field("optimizer"):
        as_optimizer("adam")
    with raises_field("rate.schedule"):
        as_schedule({"name": "linear_schedule"}, "rate")


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_value_of_a_function_is_checked(value):
    with raises_field("rate"):
        value_at(lambda round: value, 3, "rate")
    assert value_at(lambda round: 2 * round, 3, "rate") == 6.0
    assert ScheduleConfig("constant_schedule", value=0.5).function()(3) == 0.5
