"""The built-in models, their losses, and that equal models share a compilation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mechanism_of, tiny_data

from fedhdp.client import LocalTraining
from fedhdp.errors import DataError
from fedhdp.models import cnn, cross_entropy, linear, mlp, squared_error
from fedhdp.simulation import Simulation


def test_same_arguments_give_the_same_model():
    assert mlp() is mlp()
    assert cnn(8) is cnn(8)
    assert linear(4, 1, loss=squared_error) is linear(4, 1, loss=squared_error)
    assert mlp(12) is not mlp(13)


def test_simulations_with_equal_models_share_a_compilation():
    data, mechanism, training = tiny_data([4, 5]), mechanism_of((2, 1.0, 1.0)), LocalTraining(1, 4)
    simulations = [Simulation(data, mlp(12, 5, 3), mechanism, training) for _ in range(2)]
    assert simulations[0].engine is simulations[1].engine


@pytest.mark.slow
def test_dropout_is_active_in_training_and_off_in_evaluation():
    model = cnn(8, 3, channels=(2, 3), hidden=6)
    theta, x = model.init(jax.random.key(0)), np.random.default_rng(0).random((4, 8, 8), np.float32)
    first, second = (np.asarray(model.apply(theta, x, jax.random.key(k))) for k in (1, 2))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(model.apply(theta, x, None), model.apply(theta, x, None))
    outputs = jax.vmap(lambda key: model.apply(theta, x, key))(jax.random.split(jax.random.key(3), 20))
    assert np.asarray(outputs).std(axis=0).max() > 0


@pytest.mark.slow
def test_cnn_is_the_papers_network():
    theta = cnn().init(jax.random.key(0))
    shapes = {name: layer["w"].shape for name, layer in theta.items()}
    assert shapes == {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense1": (1568, 128), "dense2": (128, 62)}
    assert cnn().apply(theta, jnp.zeros((2, 28, 28)), None).shape == (2, 62)


@pytest.mark.slow
def test_gradient_of_cross_entropy_is_that_of_automatic_differentiation():
    logits_NL = jax.random.normal(jax.random.key(0), (6, 4)) * jnp.array([1.0, 10.0, 200.0, 1.0, 1.0, 1e3])[:, None]
    label_N, weight_N = jnp.array([0, 1, 2, 3, 0, 1]), jnp.array([1.0, 2.0, 0.5, 0.0, 3.0, 1.0])

    def weighted(logits_NL: jax.Array) -> jax.Array:
        return weight_N @ cross_entropy(logits_NL, label_N)

    def expected(logits_NL: jax.Array) -> jax.Array:
        return -weight_N @ jax.nn.log_softmax(logits_NL)[jnp.arange(6), label_N]

    np.testing.assert_allclose(jax.grad(weighted)(logits_NL), jax.grad(expected)(logits_NL), atol=1e-6)
    np.testing.assert_allclose(jax.hessian(weighted)(logits_NL), jax.hessian(expected)(logits_NL), atol=1e-6)


def test_losses():
    logits, label = jnp.array([[1.0, 2.0, 0.5]]), jnp.array([1])
    assert float(cross_entropy(logits, label)[0]) == pytest.approx(-float(jax.nn.log_softmax(logits)[0, 1]))
    assert float(squared_error(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 4.0]]))[0]) == pytest.approx(2.5)
    assert linear(4, 2, loss=squared_error).loss is squared_error


@pytest.mark.parametrize(("loss", "field"), [(cross_entropy, "labels"), (squared_error, "targets")])
def test_losses_refuse_shapes_that_would_be_broadcast(loss, field):
    with pytest.raises(DataError) as error:
        loss(jnp.zeros((4, 3)), jnp.zeros((4, 1)))
    assert error.value.field == field
