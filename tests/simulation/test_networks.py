"""A user's own network against the built-in one, and the line that says which path a network takes."""

from __future__ import annotations

import logging

import jax
import numpy as np
import optax
import pytest
from helpers import tiny_data
from simulations import CHOSEN, MODEL, trained

from fedhdp.algorithms import non_private
from fedhdp.client import LocalTraining
from fedhdp.models import Model, cnn, name_parameters


def own_init(key):
    theta = MODEL.init(key)
    return {"a": (theta["rest"]["w"], theta["rest"]["b"]), "z": [theta["first"]["b"], theta["first"]["w"].T]}


def own_apply(theta, x, key):
    (w_out, b_out), (b, w) = theta["a"], theta["z"]
    return jax.vmap(lambda x: jax.nn.relu(w @ x + b) @ w_out + b_out)(x)


NAMES = {"first/b": "z/0", "first/w": "z/1", "rest/b": "a/1", "rest/w": "a/0"}


def test_users_network_is_trained_as_the_built_in_one(data):
    """Other names, another order and a transposed matrix; without noise, whose order is that of the parameters."""
    built_in, own = (trained(data, non_private(CHOSEN), model=model) for model in (MODEL, Model(own_init, own_apply)))
    assert "first layer: z/1 (12 inputs → 5 units)" in own.explain()
    assert own.explain().split("units")[1] == built_in.explain().split("units")[1]
    for theirs, ours in ((built_in.model(), own.model()), (built_in.model(client=3), own.model(client=3))):
        theirs, ours = name_parameters(theirs), name_parameters(ours)
        for name, other in NAMES.items():
            expected = theirs[name].T if name == "first/w" else theirs[name]
            np.testing.assert_allclose(ours[other], expected, atol=1e-5)


ADAM = LocalTraining(2, 4, optimizer=optax.adam(0.01))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"training": LocalTraining(2, 4)}, "by all parameters, as a client has 16 examples, no fewer than inputs"),
        (
            {"training": ADAM},
            "first/w (12 inputs → 5 units) by all parameters, as the optimizer is not plain SGD",
        ),
    ],
)
def test_a_line_says_why_all_parameters_are_trained(data, caplog, options, line):
    with caplog.at_level(logging.INFO, "fedhdp.network"):
        simulation = trained(data, CHOSEN, rounds=0, **options)
    assert line in simulation.explain()
    assert caplog.messages == [simulation.explain()]


@pytest.mark.slow
def test_convolutions_and_poolings_are_counted():
    simulation = trained(tiny_data([4] * 19, inputs=64), CHOSEN, rounds=0, model=cnn(8, 3, channels=(2, 3), hidden=6))
    assert "2 convolutions as products of patches; 2 poolings as reshapes" in simulation.explain()
