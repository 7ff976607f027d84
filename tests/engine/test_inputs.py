"""What of the inputs reaches the model: scaled floats, or integers as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mechanism_of, tiny_data

from fedhdp.client import LocalTraining, scale_inputs
from fedhdp.data import FederatedData, examples
from fedhdp.models import Model, mlp
from fedhdp.simulation import Simulation, simulate

TRAINING = LocalTraining(epochs=1, batch_size=4, learning_rate=0.1)


@pytest.mark.parametrize(
    ("dtype", "scale", "result"),
    [("uint8", 1 / 255, "float32"), ("int64", None, "int32"), ("bool", None, "int32"), ("float16", None, "float32")],
)
def test_types_of_inputs(dtype, scale, result):
    x = jnp.asarray(np.array([0, 1, 51]).astype(dtype))
    scaled = scale_inputs(x, scale)
    assert scaled.dtype == result
    np.testing.assert_allclose(scaled, np.asarray(x, np.float64) * (scale or 1), rtol=1e-6)


def test_token_ids_reach_the_model():
    """A model that indexes a table by its inputs."""
    rng = np.random.default_rng(0)
    tokens, y = rng.integers(0, 7, (30, 5)).astype(np.int16), rng.integers(0, 3, 30)
    clients = examples(tokens, y, [4, 6, 10, 10])
    data = FederatedData("tokens", clients, clients, tokens[:0], y[:0], 3)

    def init(key):
        return {"table": jax.random.normal(key, (7, 3))}

    def apply(parameters, x, key):
        assert x.dtype == jnp.int32
        return parameters["table"][x].mean(axis=1)

    result = simulate(data, Model(init, apply), mechanism_of((4, 0.0, 1.0), rate=1.0), TRAINING, rounds=1)
    assert np.isfinite(result.parameters["global/table"]).all()


def test_bytes_are_scaled_only_as_the_data_says():
    data, mechanism = tiny_data([5] * 4, inputs=30), mechanism_of((4, 0.0, 1.0), rate=1.0)

    def after_one_round(data):
        simulation = Simulation(data, mlp(30, 4, 3), mechanism, TRAINING, noise_seed=1)
        simulation.run(1)
        return simulation.global_model()

    def converted(data, dtype, factor):
        train = data.train._replace(x_N=(data.train.x_N * np.float32(factor)).astype(dtype))
        test = data.test._replace(x_N=(data.test.x_N * np.float32(factor)).astype(dtype))
        server = {"server_x_N": data.server_x_N[:0], "server_y_N": data.server_y_N[:0]}
        return data._replace(train=train, test=test, input_scale=None, **server)

    scaled, unscaled = after_one_round(data), after_one_round(data._replace(input_scale=None))
    np.testing.assert_allclose(scaled, after_one_round(converted(data, np.float32, 1 / 255)), atol=1e-6)
    np.testing.assert_allclose(unscaled, after_one_round(converted(data, np.float32, 1)), rtol=1e-5, atol=1e-6)
    assert np.abs(scaled - unscaled).max() > 0.01
