"""What of the inputs reaches the model: scaled floats, or integers as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mechanism_of, raises_field, tiny_data

from fedhdp.client import LocalTraining, scale_inputs
from fedhdp.data import FederatedData, examples
from fedhdp.data.values import invalid_rows
from fedhdp.engine.checks import check_data
from fedhdp.errors import DataError
from fedhdp.models import Model, linear, mlp, squared_error
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


def with_value(part, field, row, value):
    """Examples in which one number of a row has another value."""
    values = getattr(part, field).astype(np.float64 if isinstance(value, float) else np.int64)
    values.reshape(len(values), -1)[row, 0] = value
    return part._replace(**{field: values})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("part", ["train", "test", "validation"])
def test_inputs_that_are_not_finite_are_found_by_client(part, value):
    data = tiny_data([3, 4, 5])._replace(client_ids=np.array(["ann", "bob", "cy"]))
    data = data._replace(validation=data.test)
    bad = with_value(getattr(data, part), "x_N", getattr(data, part).start_K[1] + 2, value)
    with raises_field("inputs", DataError) as error:
        check_data(data._replace(**{part: bad}), mlp(12, 5, 3))
    assert "'bob'" in str(error.value)
    assert "example 2" in str(error.value)


def test_targets_and_the_servers_inputs_are_checked():
    data = tiny_data([3, 4, 5])
    with raises_field("targets", DataError) as error:
        check_data(data._replace(train=with_value(data.train, "y_N", 4, np.nan)), linear(12, 1, loss=squared_error))
    assert "client '1'" in str(error.value)
    server = data.server_x_N.astype(np.float32)
    server[3, 2] = np.nan
    with raises_field("inputs", DataError) as error:
        check_data(data._replace(server_x_N=server), mlp(12, 5, 3))
    assert "the server" in str(error.value)


def test_integers_beyond_32_bits_do_not_wrap_around():
    data = tiny_data([3, 4, 5])
    large = data._replace(train=with_value(data.train, "x_N", 0, 2**32 + 7))
    check_data(large, mlp(12, 5, 3))  # scaled, so a float
    with raises_field("inputs", DataError):
        check_data(large._replace(input_scale=None), mlp(12, 5, 3))


def test_rows_of_no_client_are_not_read(tmp_path):
    data = tiny_data([3, 4, 5])
    np.save(tmp_path / "x.npy", with_value(data.train, "x_N", 11, np.nan).x_N)
    x_N = np.load(tmp_path / "x.npy", mmap_mode="r")
    count_K = data.train.count_K - np.array([0, 0, 1])
    check_data(data._replace(train=data.train._replace(x_N=x_N, count_K=count_K)), mlp(12, 5, 3))
    with raises_field("inputs", DataError):
        check_data(data._replace(train=data.train._replace(x_N=x_N)), mlp(12, 5, 3))


def test_blocks_cover_all_rows(monkeypatch):
    monkeypatch.setattr("fedhdp.data.values.BLOCK_BYTES", 100)
    values_N = np.zeros((50, 3))
    values_N[[0, 16, 17, 49], 1] = np.nan
    assert list(invalid_rows(values_N, scaled=False)) == [0, 16, 17, 49]


def test_from_arrays_finds_them():
    x = np.zeros((6, 2))
    x[4, 1] = np.inf
    with raises_field("inputs", DataError) as error:
        FederatedData.from_arrays(x, [0, 1, 0, 1, 0, 1], ["b", "b", "b", "a", "a", "a"])
    assert "'a'" in str(error.value)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e38, 0.0])
def test_no_scale_makes_integers_infinite(scale):
    """The engine takes integers to be finite: 0 · infinity of a client whose update is refused would be in the sum."""
    with raises_field("input_scale", DataError):
        check_data(tiny_data([3, 4, 5])._replace(input_scale=scale), mlp(12, 5, 3))


def test_ids_differ():
    data = tiny_data([3, 4, 5])
    for ids in (["a", "b", "a"], ["a", "b"]):
        with raises_field("client_ids", DataError):
            check_data(data._replace(client_ids=np.array(ids)), mlp(12, 5, 3))
