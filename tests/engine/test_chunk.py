"""A client's training does not depend on padding, on its chunk, or on how batches are scheduled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import random_chunk, train
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from fedhdp.client import LocalTraining
from fedhdp.engine import chunk as chunk_module
from fedhdp.engine.low_rank import FullRank, LowRank
from fedhdp.models import Model, cnn, mlp


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"), [(mlp(36, 5, 3), (36,)), (cnn(8, 3, channels=(2, 3), hidden=6), (8, 8))], ids=["mlp", "cnn"]
)
def test_padding_changes_no_result(model, shape):
    training = LocalTraining(epochs=2, batch_size=4, learning_rate=0.1)
    tight = random_chunk(0, model, [5, 3], shape, 8, 3)
    x_CM, y_CM = (np.concatenate([a, np.zeros_like(a), np.zeros_like(a)], axis=1) for a in (tight.x_CM, tight.y_CM))
    padded = tight._replace(x_CM=x_CM, y_CM=y_CM)
    for a, b in zip(train(model, training, tight, FullRank), train(model, training, padded, FullRank), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"drop_remainder": True}, {"personal_epochs": 2}, {"personal_epochs": 7}], ids=str
)
@pytest.mark.parametrize(("kind", "on_cpu"), [(LowRank, True), (FullRank, True), (FullRank, False)])
def test_client_trains_the_same_in_any_chunk(monkeypatch, kind, on_cpu, settings):
    """Also a client with few batches beside others with many: in lockstep (LowRank), one by one and ragged (FullRank)."""
    monkeypatch.setattr(chunk_module, "on_cpu", lambda: on_cpu)
    counts = [16, 2, 9, 12, *(1 + 7 * i % 16 for i in range(15)), 0]
    model = mlp(12, 5, 3)
    training = LocalTraining(epochs=3, batch_size=4, learning_rate=0.1, **settings)
    chunk = random_chunk(0, model, counts, (12,), 16, 3)
    update_CP, personal_CP, _ = train(model, training, chunk, kind)
    for i in range(len(counts)):
        update_1P, personal_1P, _ = train(model, training, chunk.client(i), kind)
        np.testing.assert_allclose(update_CP[i], update_1P[0], atol=1e-6)
        np.testing.assert_allclose(personal_CP[i], personal_1P[0], atol=1e-6)
    np.testing.assert_array_equal(update_CP[-1], 0.0)  # the client without examples


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(count=st.integers(1, 13), batch=st.integers(1, 7), seed=st.integers(0, 99))
def test_batches_known_at_compile_time_change_no_result(count, batch, seed):
    model, training = mlp(20, 5, 3), LocalTraining(epochs=2, batch_size=batch, learning_rate=0.2)
    padded = random_chunk(seed, model, [count] * 3, (20,), -(-count // batch) * batch, 3)
    tight = padded._replace(x_CM=padded.x_CM[:, :count], y_CM=padded.y_CM[:, :count])
    for kind in (LowRank, FullRank):
        pairs = zip(train(model, training, padded, kind), train(model, training, tight, kind, True), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_strong_pull_keeps_personal_models_at_the_global_one():
    model = mlp(12, 5, 3)
    chunk = random_chunk(0, model, [8, 8], (12,), 8, 3)._replace(pull_C=np.array([0.0, 50.0], np.float32))
    training = LocalTraining(epochs=20, batch_size=8, learning_rate=0.01)
    _, personal_CP, _ = train(model, training, chunk, LowRank)
    theta_P = np.asarray(ravel_pytree(chunk.theta)[0])
    distance_C = np.linalg.norm(personal_CP - theta_P, axis=1)
    assert distance_C[1] < 0.05 * distance_C[0]


def test_custom_model_trains():
    def init(key):
        return {"scale": jnp.ones(4), "shift": 0.1 * jax.random.normal(key, (3,))}

    def apply(parameters, x_N, key):
        return (x_N * parameters["scale"]) @ jnp.ones((4, 3)) + parameters["shift"]

    model, training = Model(init, apply), LocalTraining(epochs=1, batch_size=4, learning_rate=0.1)
    update_CP, _, _ = train(model, training, random_chunk(0, model, [4, 4], (4,), 4, 3), FullRank)
    assert update_CP.shape == (2, 7)
    assert np.abs(update_CP).max() > 0


def test_flax_model_trains():
    nn = pytest.importorskip("flax.linen")
    net = nn.Dense(3)
    model = Model(init=lambda key: net.init(key, jnp.zeros((1, 4))), apply=lambda p, x_N, key: net.apply(p, x_N))
    training = LocalTraining(epochs=1, batch_size=4)
    update_CP, _, _ = train(model, training, random_chunk(0, model, [4], (4,), 4, 3), FullRank)
    assert update_CP.shape == (1, 15)
