"""Local training: in the span as directly, padding or not, dropout only while training."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from fedhdp.client import (
    Clients,
    LocalTraining,
    as_floats,
    client_updates,
    coordinates,
    orders,
    shuffle,
    updates_in_full,
)
from fedhdp.engine.low_rank import direct, gram, in_span
from fedhdp.models import (
    Model,
    cnn,
    cross_entropy,
    dense_first,
    linear,
    mlp,
    squared_error,
)


def clients(seed: int, model: Model, counts: list[int], shape: tuple[int, ...], capacity: int, classes: int):
    """Random clients with personal models of their own."""
    rng = np.random.default_rng(seed)
    x_CM = rng.integers(0, 256, (len(counts), capacity, *shape)).astype(np.uint8)
    y_CM = rng.integers(0, classes, (len(counts), capacity)).astype(np.int32)
    for i, count in enumerate(counts):
        x_CM[i, count:], y_CM[i, count:] = 0, 0
    keys = jax.random.split(jax.random.key(seed), len(counts) + 1)
    theta, personal_C = model.init(keys[0]), jax.vmap(model.init)(keys[1:])
    pull_C = jnp.asarray(rng.uniform(0, 1, len(counts)), jnp.float32)
    return theta, personal_C, x_CM, y_CM, jnp.asarray(counts, jnp.int32), pull_C, keys[1:]


def trained(model, training, made, held_in):
    """Updates and personal models, flat."""
    update_CP, own_CP, _ = updates(model, training, made, held_in)
    return np.asarray(update_CP), np.asarray(own_CP)


@partial(jax.jit, static_argnums=(0, 1, 3, 4))
def updates(model, training, made, held_in, full=False):
    """Updates and personal models, flat, in one compilation."""
    theta, personal_C, x_CM, y_CM, count_C, pull_C, key_C = made
    order_CM = orders(key_C, count_C, x_CM.shape[1])
    x_CM, y_CM = (
        jnp.take_along_axis(a, order_CM.reshape(*order_CM.shape, *[1] * (a.ndim - 2)), 1) for a in (x_CM, y_CM)
    )
    x_CM = as_floats(x_CM)
    theta_R = jax.tree.map(lambda leaf: leaf[None], theta)
    personal_CV = jax.tree.map(lambda leaf: leaf[:, None], personal_C)
    clients, rates = Clients(x_CM, y_CM, count_C, pull_C[:, None], key_C), jnp.array(training.rates(0))
    sent, own_CV = client_updates(
        model, training, held_in, clients, theta_R, personal_CV, np.zeros(1, int), rates, full
    )
    update_CR = updates_in_full(held_in, sent, x_CM)
    return flatten(update_CR), flatten(own_CV), sent.norm_CR[:, 0]


def flatten(parameters_C1):
    """Stacked parameters as one row for each client."""
    return jax.vmap(lambda parameters: ravel_pytree(parameters)[0])(parameters_C1)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_training_in_the_span_is_training_directly(data):
    inputs, hidden, classes = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 8)), data.draw(st.integers(2, 5))
    batch, epochs = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    own_epochs = data.draw(st.none() | st.integers(1, epochs))
    counts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    model = data.draw(st.sampled_from([mlp(inputs, hidden, classes), linear(inputs, classes)]))
    rates = {"learning_rate": 0.2, "personal_learning_rate": 0.1}
    training = LocalTraining(epochs=epochs, batch_size=batch, personal_epochs=own_epochs, **rates)
    capacity = -(-max(counts) // batch) * batch
    made = clients(data.draw(st.integers(0, 99)), model, counts, (inputs,), capacity, classes)
    one, other = trained(model, training, made, direct(model)), trained(model, training, made, in_span(model))
    for a, b in zip(one, other):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_span_is_chosen_where_it_wins_and_the_model_allows_it():
    assert coordinates(mlp(), 40, 784).leave.__qualname__.startswith("in_span")
    assert coordinates(mlp(), 800, 784).leave.__qualname__.startswith("direct")
    assert coordinates(cnn(), 40, 784).leave.__qualname__.startswith("direct")


@pytest.mark.parametrize("model", [mlp(36, 5, 3), cnn(8, 3, channels=(2, 3), hidden=6)], ids=["mlp", "cnn"])
def test_padding_changes_no_result(model):
    training = LocalTraining(epochs=2, batch_size=4, learning_rate=0.1)
    shape = (36,) if model.head else (8, 8)
    tight = clients(0, model, [5, 3], shape, 8, 3)
    theta, personal_C, x_CM, y_CM, *rest = tight
    x_wide = np.concatenate([x_CM, np.zeros_like(x_CM), np.zeros_like(x_CM)], axis=1)
    y_wide = np.concatenate([y_CM, np.zeros_like(y_CM), np.zeros_like(y_CM)], axis=1)
    wide = (theta, personal_C, x_wide, y_wide, *rest)
    for a, b in zip(trained(model, training, tight, direct(model)), trained(model, training, wide, direct(model))):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("otherwise", [{}, {"whole_batches": True}, {"personal_epochs": 2}], ids=str)
@pytest.mark.parametrize("held_in", [in_span, direct])
def test_a_client_trains_the_same_beside_anybody(held_in, otherwise):
    """Also one with few batches beside those with many, who go on without it, in whatever order they come."""
    counts = [16, 2, 9, 12, *(1 + 7 * i % 16 for i in range(15)), 0]
    model = mlp(12, 5, 3)
    training = LocalTraining(epochs=3, batch_size=4, learning_rate=0.1, **otherwise)
    theta, personal_C, x_CM, y_CM, count_C, pull_C, key_C = clients(0, model, counts, (12,), 16, 3)
    made = (theta, personal_C, x_CM, y_CM, count_C, pull_C, key_C)
    together = trained(model, training, made, held_in(model))
    for i in range(len(counts)):
        own_C = jax.tree.map(lambda a, i=i: a[i : i + 1], personal_C)
        only = (theta, own_C, x_CM[i : i + 1], y_CM[i : i + 1], count_C[i : i + 1], pull_C[i : i + 1], key_C[i : i + 1])
        for a, b in zip(together, trained(model, training, only, held_in(model))):
            np.testing.assert_allclose(a[i], b[0], atol=1e-6)
    np.testing.assert_array_equal(together[0][-1], 0.0)  # nobody's update


def test_a_strong_pull_keeps_personal_models_at_the_global_one():
    model = mlp(12, 5, 3)
    theta, personal_C, x_CM, y_CM, count_C, _, key_C = clients(0, model, [8, 8], (12,), 8, 3)
    training = LocalTraining(epochs=20, batch_size=8, learning_rate=0.01)
    pull_C = jnp.array([0.0, 50.0])
    _, own_CP = trained(model, training, (theta, personal_C, x_CM, y_CM, count_C, pull_C, key_C), in_span(model))
    theta_P = np.asarray(ravel_pytree(theta)[0])
    away = np.linalg.norm(own_CP - theta_P, axis=1)
    assert away[1] < 0.05 * away[0]


def test_examples_are_shuffled_the_same_whatever_the_padding():
    key = jax.random.key(5)
    tight, wide = np.asarray(shuffle(key, 7, 8)), np.asarray(shuffle(key, 7, 40))
    np.testing.assert_array_equal(tight[:7], wide[:7])
    assert sorted(tight[:7]) == list(range(7))
    assert not np.array_equal(tight[:7], np.asarray(shuffle(jax.random.key(6), 7, 8))[:7])


def test_dropout_is_active_in_training_and_off_in_evaluation():
    model = cnn(8, 3, channels=(2, 3), hidden=6)
    theta, x = model.init(jax.random.key(0)), np.random.default_rng(0).random((4, 8, 8), np.float32)
    one, other = (np.asarray(model.apply(theta, x, jax.random.key(k))) for k in (1, 2))
    assert not np.allclose(one, other)
    np.testing.assert_array_equal(model.apply(theta, x, None), model.apply(theta, x, None))
    many = jax.vmap(lambda key: model.apply(theta, x, key))(jax.random.split(jax.random.key(3), 20))
    assert np.asarray(many).std(axis=0).max() > 0


def test_the_cnn_is_the_papers_network():
    theta = cnn().init(jax.random.key(0))
    shapes = {name: layer["w"].shape for name, layer in theta.items()}
    assert shapes == {"conv1": (9, 16), "conv2": (144, 32), "dense1": (1568, 128), "dense2": (128, 62)}
    assert cnn().apply(theta, jnp.zeros((2, 28, 28)), None).shape == (2, 62)


def test_a_model_of_your_own_trains_from_plain_jax():
    def init(key):
        return {"scale": jnp.ones(4), "shift": 0.1 * jax.random.normal(key, (3,))}

    def apply(parameters, x_N, key):
        return (x_N * parameters["scale"]) @ jnp.ones((4, 3)) + parameters["shift"]

    model, training = Model(init, apply), LocalTraining(epochs=1, batch_size=4, learning_rate=0.1)
    made = clients(0, model, [4, 4], (4,), 4, 3)
    update_CP, _ = trained(model, training, made, coordinates(model, 4, 4))
    assert update_CP.shape == (2, 7)
    assert np.abs(update_CP).max() > 0


def test_a_model_from_flax_trains():
    nn = pytest.importorskip("flax.linen")
    net = nn.Dense(3)
    model = Model(init=lambda key: net.init(key, jnp.zeros((1, 4))), apply=lambda p, x_N, key: net.apply(p, x_N))
    made = clients(0, model, [4], (4,), 4, 3)
    update_CP, _ = trained(model, LocalTraining(epochs=1, batch_size=4), made, direct(model))
    assert update_CP.shape == (1, 15)


def test_the_slope_of_the_cross_entropy_is_the_one_that_differentiation_finds():
    logits_NC = jax.random.normal(jax.random.key(0), (6, 4)) * jnp.array([1.0, 10.0, 200.0, 1.0, 1.0, 1e3])[:, None]
    label_N, weight_N = jnp.array([0, 1, 2, 3, 0, 1]), jnp.array([1.0, 2.0, 0.5, 0.0, 3.0, 1.0])

    def plain(logits_NC: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(logits_NC)[jnp.arange(6), label_N]

    ours, theirs = (lambda x: weight_N @ cross_entropy(x, label_N)), (lambda x: weight_N @ plain(x))
    np.testing.assert_allclose(jax.grad(ours)(logits_NC), jax.grad(theirs)(logits_NC), atol=1e-6)
    np.testing.assert_allclose(jax.hessian(ours)(logits_NC), jax.hessian(theirs)(logits_NC), atol=1e-6)


def test_losses_are_what_they_say():
    logits, label = jnp.array([[1.0, 2.0, 0.5]]), jnp.array([1])
    assert float(cross_entropy(logits, label)[0]) == pytest.approx(-float(jax.nn.log_softmax(logits)[0, 1]))
    assert float(squared_error(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 4.0]]))[0]) == pytest.approx(2.5)
    assert dense_first(lambda key: {}, lambda rest, h, key: h, 4, 2, loss=squared_error).loss is squared_error


def test_rates_decay_over_the_rounds():
    training = LocalTraining(learning_rate=0.5, personal_learning_rate=0.1, decay=0.9, decay_every=50)
    assert training.rates(49) == (0.5, 0.1)
    assert training.rates(100) == pytest.approx((0.405, 0.081))


@pytest.mark.parametrize(
    ("field", "value"), [("epochs", 0), ("batch_size", 0), ("learning_rate", float("nan")), ("decay", 1.5)]
)
def test_training_that_cannot_be_meant_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        LocalTraining(**{field: value})


@settings(max_examples=6, deadline=None)
@given(count=st.integers(1, 13), batch=st.integers(1, 7), seed=st.integers(0, 99))
def test_clients_without_padding_train_the_same_with_batches_known_beforehand(count, batch, seed):
    model, training = mlp(20, 5, 3), LocalTraining(epochs=2, batch_size=batch, learning_rate=0.2)
    theta, personal_C, x_CM, y_CM, *rest = clients(seed, model, [count] * 3, (20,), -(-count // batch) * batch, 3)
    padded = updates(model, training, (theta, personal_C, x_CM, y_CM, *rest), in_span(model))
    tight = (theta, personal_C, x_CM[:, :count], y_CM[:, :count], *rest)
    for one, other in zip(padded, updates(model, training, tight, in_span(model), full=True)):
        np.testing.assert_allclose(one, other, atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_norms_in_the_span_are_those_of_the_updates_and_never_too_small(data):
    model, training = mlp(60, 8, 3), LocalTraining(epochs=data.draw(st.integers(1, 6)), batch_size=5, learning_rate=0.5)
    theta, personal_C, x_CM, *rest = clients(data.draw(st.integers(0, 99)), model, [10, 7, 5], (60,), 10, 3)
    if data.draw(st.booleans()):  # the same image under many labels: what it is taught cancels
        x_CM[:] = x_CM[:, :1]
    update_CP, _, norm_C = updates(model, training, (theta, personal_C, x_CM, *rest), in_span(model))
    norms = np.linalg.norm(np.asarray(update_CP, np.float64), axis=1)
    assert (np.asarray(norm_C) >= norms * (1 - 1e-6)).all()
    np.testing.assert_allclose(norm_C, norms, rtol=2e-3)


def test_a_norm_in_the_span_covers_what_rounding_leaves_where_examples_cancel():
    model = mlp(60, 8, 3)
    held_in, rest = in_span(model), jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0))["rest"])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x_M = jnp.asarray(np.tile(rng.random(60, np.float32), (30, 1)))
        A_MH = rng.normal(size=(30, 8)).astype(np.float32)
        sent = {"A": jnp.asarray(A_MH - A_MH.mean(0)), "rest": rest}
        added = held_in.add(jnp.ones(1), jax.tree.map(lambda leaf: leaf[None], sent), x_M[None])
        flat_P = np.asarray(ravel_pytree(added)[0], np.float64)
        assert float(held_in.norm(sent, (None, gram(x_M)), x_M)) >= np.linalg.norm(flat_P)
