"""Data and models that do not fit each other are refused before they train."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import raises_field, tiny_data

from fedhdp.engine.checks import check_data
from fedhdp.errors import DataError, ModelError
from fedhdp.models import Model, linear, mlp, squared_error

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
    ],
)
def test_model_that_does_not_fit_is_refused(field, model, kind):
    with raises_field(field, kind):
        check_data(DATA, model)


def test_data_and_model_that_fit_are_accepted():
    check_data(DATA, MODEL)


def test_server_without_examples_is_accepted():
    check_data(DATA._replace(server_x_N=np.zeros((0,)), server_y_N=np.zeros(0)), MODEL)
