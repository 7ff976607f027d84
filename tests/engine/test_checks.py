"""Data and models that do not fit each other are refused before they train."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import raises_field, tiny_data

from fedhdp.client import LocalTraining
from fedhdp.engine.checks import check_data, check_optimizers
from fedhdp.errors import DataError, ModelError
from fedhdp.models import Model, linear, mlp, squared_error
from fedhdp.server import ServerOptimizer

MODEL, DATA = mlp(12, 5, 3), tiny_data([3, 4, 5])


def fewer_clients(part):
    return part._replace(start_K=part.start_K[1:], count_K=part.count_K[1:])


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("test", {"test": fewer_clients(DATA.test)}),
        ("validation", {"validation": fewer_clients(DATA.test)}),
        ("targets", {"server_y_N": DATA.server_y_N[:, None]}),
        ("labels", {"server_y_N": DATA.server_y_N.astype(np.float32)}),
        ("labels", {"server_y_N": DATA.server_y_N + 1}),
        ("inputs", {"server_x_N": DATA.server_x_N[:, :-1]}),
        ("inputs", {"server_x_N": DATA.server_x_N.astype(np.float32), "input_scale": None}),
        ("inputs", {"server_x_N": DATA.server_x_N.astype(str)}),
        ("server_x_N", {"server_x_N": DATA.server_x_N[1:]}),
        ("input_scale", {"input_scale": 0.0}),
        ("input_scale", {"input_scale": np.nan}),
    ],
)
def test_data_that_does_not_fit_is_refused(field, changes):
    with raises_field(field, DataError):
        check_data(DATA._replace(**changes), MODEL)


@pytest.mark.parametrize(
    ("field", "model", "kind"),
    [
        ("labels", mlp(12, 5, 2), DataError),
        ("targets", linear(12, 1, loss=squared_error), DataError),
        ("loss", MODEL._replace(loss=lambda outputs, y_N: jnp.float32(0)), ModelError),
        ("apply", mlp(13, 5, 3), ModelError),
        ("init", Model(lambda key: key[5], MODEL.apply), ModelError),
        ("parameters", Model(lambda key: jnp.zeros((12, 3), int), lambda w, x_N, key: x_N @ w), ModelError),
        ("parameters", Model(lambda key: jnp.zeros((12, 3), jnp.bfloat16), lambda w, x_N, key: x_N @ w), ModelError),
        ("parameters", Model(lambda key: jnp.zeros((12, 3), jnp.float16), lambda w, x_N, key: x_N @ w), ModelError),
    ],
)
def test_model_that_does_not_fit_is_refused(field, model, kind):
    with raises_field(field, kind):
        check_data(DATA, model)


def test_data_and_model_that_fit_are_accepted():
    check_data(DATA, MODEL)


def test_server_without_examples_is_accepted():
    check_data(DATA._replace(server_x_N=np.zeros((0,)), server_y_N=np.zeros(0)), MODEL)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.lbfgs(),  # needs the loss
        optax.multi_transform({"all": optax.sgd(0.1)}, {"first": "all"}),  # labels of other parameters
        optax.GradientTransformation(lambda theta: 0, lambda update, state, theta: (update, jnp.zeros(state + 2))),
        optax.stateless(lambda update, theta: jax.tree.map(jnp.sum, update)),
    ],
    ids=["lbfgs", "labels", "state", "update"],
)
def test_optimizer_that_cannot_train_the_model_is_refused(optimizer):
    like = jax.eval_shape(MODEL.init, jax.random.key(0))
    with raises_field("training.optimizer"):
        check_optimizers(like, LocalTraining(optimizer=optimizer), ServerOptimizer())
    with raises_field("server.optimizer"):
        check_optimizers(like, LocalTraining(), ServerOptimizer(optimizer))
    check_optimizers(like, LocalTraining(optimizer=optax.adamw(0.1)), ServerOptimizer(optax.adafactor(0.1)))
