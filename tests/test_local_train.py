"""Local training of one model of one client against the plain loop, and its settings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from helpers import raises_field

from fedhdp.client import ClientData, LocalTraining, Schedule, TrainedModel, local_train, shuffle
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.models import Model, mlp
from fedhdp.optimizers import OptimizerConfig

ADAM = OptimizerConfig("adam", learning_rate=0.2, b1=0.8, eps=1e-3)
COSINE = {"schedule": "cosine_decay_schedule", "init_value": 0.4, "decay_steps": 4}


def network(theta: dict) -> reference.Network:
    """The parameters of ``mlp`` as the reference has them."""
    parts = (theta["first"]["w"], theta["first"]["b"], theta["rest"]["w"], theta["rest"]["b"])
    return {name: np.asarray(part, np.float64) for name, part in zip(("w1", "b1", "w2", "b2"), parts, strict=True)}


def apply(model: Model):
    """How the model predicts from its own parameters."""
    return lambda theta, batch: model.apply(theta, batch.x_B, batch.key)


@pytest.mark.parametrize(
    "settings", [{}, {"drop_remainder": True}, {"proximal": 0.8}, {"optimizer": ADAM, "proximal": 0.8}], ids=str
)
@pytest.mark.parametrize("count", [2, 9, 23])  # an incomplete batch, three batches, six batches
@pytest.mark.parametrize("static", [True, False])
def test_local_train_is_the_plain_loop(count, settings, static):
    training = LocalTraining(epochs=3, batch_size=4, **settings)
    model, rng = mlp(12, 5, 3), np.random.default_rng(count)
    theta, personal = model.init(jax.random.key(0)), model.init(jax.random.key(1))
    capacity = count if static else -(-count // 4) * 4 + 4
    x_M, y_M = np.zeros((capacity, 12), np.float32), np.zeros(capacity, np.int32)
    x_M[:count], y_M[:count] = rng.random((count, 12)), rng.integers(0, 3, count)
    data = ClientData(x_M, y_M, count if static else jnp.int32(count), jax.random.key(2))

    def train(start, pull, rate):
        schedule = Schedule(data, training, range(training.epochs))
        optimizer = training.transformation(rate)
        model_0 = TrainedModel(start, optimizer.init(start))
        return local_train(apply(model), model.loss, model_0, theta, pull, optimizer, schedule).theta

    trained, trained_personal = train(theta, training.proximal, 0.2), train(personal, 0.5, 0.1)

    order = np.arange(count)
    update_P, expected_personal = reference.client_update(
        network(theta), network(personal), x_M, y_M, order, 0.2, 0.1, 0.5, training
    )
    change_P = reference.flat(network(trained)) - reference.flat(network(theta))
    np.testing.assert_allclose(change_P, update_P, atol=1e-6)
    for name, expected in expected_personal.items():
        np.testing.assert_allclose(network(trained_personal)[name], expected, atol=1e-6)


def test_step_is_the_update_line_of_algorithm_1():
    model = Model(lambda key: None, lambda theta, x_B, key: theta, loss=lambda theta, y_B: theta**3 + 0 * y_B)
    data = ClientData(np.zeros((1, 1)), np.zeros(1), 1, jax.random.key(0))
    schedule = Schedule(data, LocalTraining(), range(1))
    start, optimizer = TrainedModel(jnp.float32(2.0), optax.EmptyState()), optax.scale(-0.1)
    trained = local_train(apply(model), model.loss, start, jnp.float32(1.0), 0.5, optimizer, schedule)
    assert float(trained.theta) == pytest.approx(2.0 - 0.1 * (3 * 2.0**2 + 0.5 * (2.0 - 1.0)))


@pytest.mark.parametrize("optimizer", [None, ADAM], ids=str)
def test_steps_in_parts_are_all_steps(optimizer):
    model, training = mlp(12, 5, 3), LocalTraining(epochs=2, batch_size=4, optimizer=optimizer)
    rng, theta = np.random.default_rng(0), model.init(jax.random.key(0))
    x_M, y_M = rng.random((12, 12), np.float32), rng.integers(0, 3, 12)
    data = ClientData(x_M, y_M, jnp.int32(10), jax.random.key(2))

    def train(start, steps=None):
        schedule = Schedule(data, training, range(2), steps=steps)
        return local_train(apply(model), model.loss, start, theta, 0.3, transformation, schedule)

    transformation = training.transformation(0.05)
    start = TrainedModel(theta, transformation.init(theta))
    in_parts = train(train(start, (0, 2)), (2, 6))  # more than there are: the client rests
    for a, b in zip(jax.tree.leaves(in_parts), jax.tree.leaves(train(start)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_shuffle_does_not_depend_on_padding():
    key = jax.random.key(5)
    tight, padded = np.asarray(shuffle(key, 7, 8)), np.asarray(shuffle(key, 7, 40))
    np.testing.assert_array_equal(tight[:7], padded[:7])
    assert sorted(tight[:7]) == list(range(7))
    assert not np.array_equal(tight[:7], np.asarray(shuffle(jax.random.key(6), 7, 8))[:7])


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_of_an_int_are_those_of_an_array(drop_remainder):
    training = LocalTraining(batch_size=4, drop_remainder=drop_remainder)
    counts = [0, 1, 3, 4, 5, 8, 11]
    expected = [0, 1, 1, 1, 1, 2, 2] if drop_remainder else [0, 1, 1, 1, 2, 2, 3]
    assert [training.batches(count) for count in counts] == expected
    np.testing.assert_array_equal(training.batches(jnp.array(counts)), expected)


def test_rates_decay_over_the_rounds():
    training = LocalTraining(learning_rate=0.5, personal_learning_rate=0.1, decay=0.9, decay_every=50)
    assert training.rates(49) == (0.5, 0.1)
    assert training.rates(100) == pytest.approx((0.405, 0.081))


@pytest.mark.parametrize(
    ("field", "value"), [("epochs", 0), ("batch_size", 0), ("learning_rate", float("nan")), ("decay", 1.5)]
)
def test_invalid_settings_are_refused(field, value):
    with raises_field(field):
        LocalTraining(**{field: value})


def test_rates_of_a_schedule_count_rounds():
    cosine = optax.cosine_decay_schedule(0.4, 4)
    training = LocalTraining(optimizer={"name": "adam", "learning_rate": COSINE})
    assert training.rates(1) == (float(cosine(1)), float(cosine(1)))
    personal = LocalTraining(optimizer=ADAM, personal_learning_rate=COSINE)
    assert personal.rates(3) == (0.2, float(cosine(3)))
    assert (
        LocalTraining(optimizer=OptimizerConfig("sgd", learning_rate=lambda round: 0.1 * round)).rates(3)[0] == 0.1 * 3
    )


def test_training_is_hashed():
    adam = optax.adam(1e-3)
    by_name = [LocalTraining(optimizer={"name": "adam", "learning_rate": COSINE}) for _ in range(2)]
    assert len({LocalTraining(optimizer=adam), LocalTraining(optimizer=adam), *by_name}) == 2


def test_only_plain_sgd_has_a_limit_for_pulls():
    mechanism = Mechanism((PrivacyGroup("all", 4, 1.0, 0.5, pull=9.0),), clip=1.0)
    for sgd in ({"learning_rate": 0.3}, {"optimizer": OptimizerConfig("sgd", learning_rate=0.3)}):
        with raises_field("pull of 'all'"):
            LocalTraining(**sgd).check(mechanism)
    LocalTraining(optimizer=ADAM).check(mechanism)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("optimizer", {"optimizer": "adam"}),
        ("optimizer.name", {"optimizer": {"name": "adamm"}}),
        ("optimizer.weight_decay", {"optimizer": OptimizerConfig("adamw", learning_rate=0.1, weight_decay=COSINE)}),
        ("learning_rate", {"optimizer": ADAM, "learning_rate": 0.1}),
        ("decay", {"optimizer": ADAM, "decay": 0.9}),
        ("personal_learning_rate", {"optimizer": optax.adam(0.1), "personal_learning_rate": 0.1}),
        ("personal_learning_rate", {"optimizer": ADAM, "personal_learning_rate": -0.1}),
        ("personal_learning_rate", {"personal_learning_rate": COSINE}),
        ("personal_learning_rate.schedule", {"optimizer": ADAM, "personal_learning_rate": {"name": "adam"}}),
        ("proximal", {"optimizer": ADAM, "proximal": -1.0}),
    ],
)
def test_invalid_optimizer_is_refused(field, fields):
    with raises_field(field):
        LocalTraining(**fields)
