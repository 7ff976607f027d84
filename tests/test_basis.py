"""A public basis: the matrices themselves, whose data they take, and the model on one."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers import raises_field, tiny_data
from hypothesis import given
from hypothesis import strategies as st

from fedhdp import Mechanism, PrivacyGroup, linear, mlp, simulate
from fedhdp.basis import (
    Moments,
    add_moments,
    cosine_basis,
    fingerprint,
    pca_basis,
    public_moments,
    random_basis,
    second_moments,
    with_basis,
)
from fedhdp.client import LocalTraining
from fedhdp.errors import DataError

SIZES = [4, 4, 8, 8]
LEVELS = ["open", "private", "open", "private"]
DATA = tiny_data(SIZES).with_levels(LEVELS)


def lengths(basis_FK: np.ndarray) -> np.ndarray:
    return np.sqrt((basis_FK.astype(float) ** 2).sum(axis=0))


@given(
    st.sampled_from([(5,), (4, 6), (3, 4, 2), (7, 7, 1)]),
    st.floats(-1, 1),
    st.data(),
)
def test_columns_are_orthogonal_and_their_lengths_have_a_root_mean_square_of_one(shape, exponent, data):
    inputs = int(np.prod(shape))
    size = data.draw(st.integers(1, inputs))
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(3 * inputs, inputs)) * np.arange(1, inputs + 1)
    bases = (
        cosine_basis(shape, size, exponent),
        random_basis(inputs, size),
        pca_basis(second_moments(x_NF), size, exponent),
    )
    for basis_FK in bases:
        assert basis_FK.shape == (inputs, size)
        assert basis_FK.dtype == np.float32
        assert np.sqrt(np.mean(lengths(basis_FK) ** 2)) == pytest.approx(1, abs=1e-5)
        unit_FK = basis_FK / lengths(basis_FK)
        np.testing.assert_allclose(unit_FK.T @ unit_FK, np.eye(size), atol=1e-5)


def test_cosines_are_those_of_the_definition_from_the_lowest_frequency_on():
    height, width, exponent = 4, 6, 0.3
    pairs = sorted(((i, j) for i in range(height) for j in range(width)), key=lambda pair: pair[0] ** 2 + pair[1] ** 2)
    basis_FK = cosine_basis((height, width), 5, exponent)
    scale = lengths(basis_FK)
    for k, (i, j) in enumerate(pairs[:5]):
        rows, columns = (np.cos(np.pi * (np.arange(n) + 0.5) * f / n) for n, f in ((height, i), (width, j)))
        wave_F = np.outer(rows, columns).ravel()
        np.testing.assert_allclose(basis_FK[:, k], wave_F / np.linalg.norm(wave_F) * scale[k], atol=1e-6)
        assert scale[k] / scale[0] == pytest.approx((1 + i**2 + j**2) ** exponent, rel=1e-5)


def test_principal_directions_are_those_of_the_largest_eigenvalues():
    rng = np.random.default_rng(1)
    spread_F = np.array([1.0, 5.0, 0.1, 2.0])
    moments = second_moments(rng.normal(size=(5000, 4)) * spread_F)
    basis_FK = pca_basis(moments, 2, 0.25)
    assert np.abs(basis_FK).argmax(axis=0).tolist() == [1, 3]
    value_K = np.array([basis_FK[:, k] @ moments.sum_FF @ basis_FK[:, k] for k in range(2)]) / lengths(basis_FK) ** 2
    np.testing.assert_allclose(
        lengths(basis_FK)[0] / lengths(basis_FK)[1], (value_K[0] / value_K[1]) ** -0.25, rtol=1e-4
    )


def test_bases_do_not_change_from_call_to_call():
    for make in (
        lambda: cosine_basis((4, 3), 7),
        lambda: random_basis(12, 7, 3),
        lambda: pca_basis(second_moments(x_N()), 3),
    ):
        assert fingerprint(make()) == fingerprint(make())
    assert fingerprint(random_basis(12, 7, 3)) != fingerprint(random_basis(12, 7, 4))


def x_N() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(20, 4))


def test_moments_of_clients_add_up_to_those_of_all_their_examples():
    parts = [second_moments(DATA.train.x_N[:5], DATA.input_scale), second_moments(DATA.train.x_N[5:], DATA.input_scale)]
    together, expected = add_moments(parts), second_moments(DATA.train.x_N, DATA.input_scale)
    np.testing.assert_allclose(together.sum_FF, expected.sum_FF)
    assert together.num_examples == sum(SIZES)


@pytest.mark.parametrize("value", [0, 255])
def test_private_clients_data_does_not_change_a_basis_of_the_clients_who_opted_out(value):
    """Whatever the others hold: the released matrix is the same to the bit."""
    x_N = DATA.train.x_N.copy()
    for client in np.flatnonzero(np.array(LEVELS) == "private"):
        x_N[DATA.train.start_K[client] :][: DATA.train.count_K[client]] = value
    changed = DATA._replace(train=DATA.train._replace(x_N=x_N), test=DATA.test._replace(x_N=DATA.test.x_N * 0))
    bases = [pca_basis(public_moments(data, ["open"]), 3) for data in (DATA, changed)]
    assert bases[0].tobytes() == bases[1].tobytes()


def test_private_clients_examples_are_not_even_read():
    class Watched:
        count_K, uniform_size = DATA.train.count_K, False

        def __init__(self):
            self.clients = []

        def take(self, clients_C, capacity):
            self.clients += clients_C.tolist()
            return DATA.train.take(clients_C, capacity)

    watched = Watched()
    public_moments(DATA._replace(train=watched), ["open"])
    assert watched.clients == [0, 2]


def test_a_private_client_with_not_a_number_leaves_the_basis_as_it_is():
    x_N = DATA.train.x_N.astype(np.float32)
    floats = DATA._replace(train=DATA.train._replace(x_N=x_N), input_scale=None)
    poisoned = x_N.copy()
    poisoned[DATA.train.start_K[1]] = np.nan
    bases = [
        pca_basis(public_moments(floats._replace(train=floats.train._replace(x_N=x)), ["open"]), 3)
        for x in (x_N, poisoned)
    ]
    assert bases[0].tobytes() == bases[1].tobytes()
    poisoned[DATA.train.start_K[0]] = np.nan
    with raises_field("moments", DataError):
        pca_basis(public_moments(floats._replace(train=floats.train._replace(x_N=poisoned)), ["open"]), 3)


def test_what_cannot_be_a_basis_is_refused():
    with raises_field("size"):
        cosine_basis((2, 2), 5)
    with raises_field("exponent"):
        cosine_basis((2, 2), 2, float("nan"))
    with raises_field("size"):
        random_basis(4, 0)
    with raises_field("size", DataError):
        pca_basis(second_moments(np.ones((10, 4))), 2)  # one direction
    with raises_field("moments", DataError):
        pca_basis(Moments(np.eye(3), 0), 2)
    with raises_field("moments", DataError):
        add_moments([])
    with raises_field("moments", DataError):
        add_moments([Moments(np.eye(3), 1), Moments(np.eye(2), 1)])
    with raises_field("basis"):
        with_basis(linear(2, 3), np.full((4, 2), np.inf))
    with raises_field("basis"):
        with_basis(linear(2, 3), np.ones(4))


def test_a_basis_of_the_clients_who_opted_out_is_refused_where_nobody_did():
    with raises_field("basis", DataError):
        public_moments(DATA, ["nobody"])
    with raises_field("basis", DataError):
        public_moments(DATA, [])
    with raises_field("levels", DataError):
        public_moments(DATA._replace(levels=None), ["open"])


def test_a_model_on_a_basis_is_the_model_of_the_projected_inputs():
    basis_FK, inner = random_basis(12, 5), mlp(5, 4, 3)
    model, key = with_basis(inner, basis_FK), jax.random.key(0)
    parameters = model.init(key)
    assert parameters["first"]["w"].shape == (5, 4)
    x_N = np.random.default_rng(0).normal(size=(6, 3, 4)).astype(np.float32)
    expected = inner.apply(parameters, x_N.reshape(6, 12) @ basis_FK, None)
    np.testing.assert_allclose(model.apply(parameters, x_N, None), expected, atol=1e-5)


def test_the_same_basis_and_model_are_the_same_object():
    basis_FK = random_basis(12, 5)
    assert with_basis(mlp(5, 4, 3), basis_FK).apply is with_basis(mlp(5, 4, 3), basis_FK.copy()).apply
    assert with_basis(mlp(5, 4, 3), basis_FK).apply is not with_basis(mlp(5, 4, 3), 2 * basis_FK).apply


def test_training_on_a_basis_is_training_on_projected_data():
    """Global and personal models, noise included."""
    basis_FK = random_basis(12, 5)
    groups = (PrivacyGroup("open", 2, 0.0, 0.8), PrivacyGroup("private", 2, 1.0, 0.8, weight=0.5))
    training = LocalTraining(epochs=2, batch_size=4, learning_rate=0.3)

    def project(x_N: np.ndarray) -> np.ndarray:
        return (x_N.astype(np.float32) / 255) @ basis_FK

    parts = {part: getattr(DATA, part)._replace(x_N=project(getattr(DATA, part).x_N)) for part in ("train", "test")}
    projected = DATA._replace(**parts, server_x_N=project(DATA.server_x_N), input_scale=None)
    arguments = (Mechanism(groups, 0.5), training)
    on_basis = simulate(DATA, with_basis(mlp(5, 4, 3), basis_FK), *arguments, rounds=4, noise_seed=1)
    on_projected = simulate(projected, mlp(5, 4, 3), *arguments, rounds=4, noise_seed=1)
    for name, array in on_projected.parameters.items():
        np.testing.assert_allclose(on_basis.parameters[name], array, atol=2e-4)
    values = [
        {(row.group, row.model, row.metric): row.value for row in run.history} for run in (on_basis, on_projected)
    ]
    assert values[0] == pytest.approx(values[1], abs=0.05, nan_ok=True)
