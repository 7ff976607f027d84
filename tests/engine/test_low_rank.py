"""Low-rank updates: the same training as with all parameters, and norms that are never too small."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import random_chunk, train
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from norm_search import worst_client

from fedhdp.client import LocalTraining
from fedhdp.clips import MIN_CLIP
from fedhdp.engine.low_rank import FullRank, LowRank, gram_matmul, uses_low_rank
from fedhdp.engine.network import Network
from fedhdp.models import Model, cnn, linear, mlp, take
from fedhdp.server import Layers


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_low_rank_training_is_full_rank_training(data):
    inputs, hidden, classes = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 8)), data.draw(st.integers(2, 5))
    batch, epochs = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    personal_epochs = data.draw(st.none() | st.integers(1, 2 * epochs))
    counts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    model = data.draw(st.sampled_from([mlp(inputs, hidden, classes), linear(inputs, classes)]))
    rates = {"learning_rate": 0.2, "personal_learning_rate": 0.1}
    training = LocalTraining(epochs=epochs, batch_size=batch, personal_epochs=personal_epochs, **rates)
    capacity = -(-max(counts) // batch) * batch
    chunk = random_chunk(data.draw(st.integers(0, 99)), model, counts, (inputs,), capacity, classes)
    full_rank, low_rank = train(model, training, chunk, FullRank), train(model, training, chunk, LowRank)
    for a, b in zip(full_rank[:2], low_rank[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def network_of(model: Model, inputs: int = 784) -> Network:
    return Network(model, jax.ShapeDtypeStruct((inputs,), jnp.float32), LocalTraining())


def uses(model: Model, capacity: int, layers: Layers | None = None) -> bool:
    return uses_low_rank(network_of(model), capacity, layers)


def test_low_rank_is_used_where_examples_are_fewer_than_inputs():
    assert uses(mlp(), 40)
    assert not uses(mlp(), 800)
    assert not uses(cnn(), 40)


def test_gradient_of_gram_matmul_goes_to_the_rows_of_the_batch():
    rng = np.random.default_rng(0)
    A_MH, gram_MM, g_BH = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((5, 3), (5, 5), (2, 3)))
    output_BH, backward = jax.vjp(lambda A_MH: gram_matmul(A_MH, gram_MM[2:4], 2), A_MH)
    np.testing.assert_allclose(output_BH, gram_MM[2:4] @ A_MH, rtol=1e-6)
    np.testing.assert_array_equal(backward(g_BH)[0], jnp.zeros((5, 3)).at[2:4].set(g_BH))


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_norms_bound_the_updates(data):
    model, training = mlp(60, 8, 3), LocalTraining(epochs=data.draw(st.integers(1, 6)), batch_size=5, learning_rate=0.5)
    chunk = random_chunk(data.draw(st.integers(0, 99)), model, [10, 7, 5], (60,), 10, 3)
    if data.draw(st.booleans()):  # one image under many labels: its gradients cancel
        chunk.x_CM[:] = chunk.x_CM[:, :1]
    update_CP, _, norm_C = train(model, training, chunk, LowRank)
    expected_C = np.linalg.norm(np.asarray(update_CP, np.float64), axis=1)
    assert (np.asarray(norm_C) >= expected_C * (1 - 1e-6)).all()
    np.testing.assert_allclose(norm_C, expected_C, rtol=0.02)  # where examples cancel, else closer


@pytest.mark.slow
def test_norm_covers_rounding_where_examples_cancel():
    model = mlp(60, 8, 3)
    theta_R = take(model.init(jax.random.key(0)), None)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x_M = jnp.asarray(np.tile(rng.random(60, np.float32), (30, 1)))
        A_MH = rng.normal(size=(30, 8)).astype(np.float32)
        low_rank = LowRank(network_of(model, 60), theta_R, np.zeros(0, int), x_M[None])
        trained_CR = {
            "A": jnp.asarray(A_MH - A_MH.mean(0))[None, None],
            "rest": [leaf_R[None] for leaf_R in low_rank.rest_R],
        }
        updates = low_rank.delta(trained_CR)
        written_out = low_rank.weighted_sum(jnp.ones(1), take(updates.update_CR, (slice(None), 0)))
        flat_P = np.asarray(ravel_pytree(written_out)[0], np.float64)
        assert float(updates.norm_CR[0, 0]) >= np.linalg.norm(flat_P)


def test_norm_covers_rounding_of_nearly_constant_inputs():
    """Each client has two examples of thousands of inputs that are nearly equal, so that roundings agree and add up."""
    rng, inputs = np.random.default_rng(0), 5_000
    value_C, gap_C = rng.uniform(0.1, 1, 300), 10.0 ** rng.uniform(-4.5, -2, 300)
    example_CM = np.stack([value_C, value_C * (1 + gap_C)], axis=1).astype(np.float32)
    model = linear(inputs, 1)
    theta_R = take(model.init(jax.random.key(0)), None)
    low_rank = LowRank(
        network_of(model, inputs), theta_R, np.zeros(0, int), jnp.asarray(example_CM)[..., None] * jnp.ones(inputs)
    )
    A_CRMH = jnp.broadcast_to(jnp.array([[1.0], [-1.0]]), (300, 1, 2, 1))
    norm_C = low_rank.delta({"A": A_CRMH, "rest": []}).norm_CR[:, 0]
    expected_C = np.sqrt(inputs) * np.abs(np.diff(np.float64(example_CM), axis=1)[:, 0])
    assert (np.asarray(norm_C) >= expected_C).all()


@pytest.mark.parametrize("size", [1e-12, 1e-18, 3e-20, 1e-30])
@pytest.mark.parametrize("bias", [True, False])
def test_norm_covers_inputs_whose_squares_underflow(size, bias):
    """Without a bias their Gram matrix is 0, while large gradients make the update as large as any."""
    inputs, examples = 100, 40
    model = linear(inputs, 1, bias=bias)
    theta_R = take(model.init(jax.random.key(0)), None)
    x_CM = jnp.full((1, examples, inputs), size, jnp.float32)
    low_rank = LowRank(network_of(model, inputs), theta_R, np.zeros(0, int), x_CM)
    for power in (-10, 0, 8, 15, 17):
        updates = low_rank.delta({"A": jnp.full((1, 1, examples, 1), 10.0**power), "rest": []})
        written_out = low_rank.weighted_sum(jnp.ones(1), take(updates.update_CR, (slice(None), 0)))
        flat_P = np.asarray(ravel_pytree(written_out)[0], np.float64)
        assert max(float(updates.norm_CR[0, 0]), MIN_CLIP / 1000) >= np.linalg.norm(flat_P)


@pytest.mark.slow
@pytest.mark.parametrize("model", [linear, mlp])
@pytest.mark.parametrize("inputs", [784, 8000, 20_000])
def test_search_for_a_client_beyond_the_clip(inputs, model):
    network = linear(inputs, 2) if model is linear else mlp(inputs, 20, 2)
    for kind in (LowRank, FullRank):
        assert worst_client(network, inputs, kind, size=24, turns=2) <= 1


def test_models_of_too_many_inputs_train_by_all_parameters():
    assert uses_low_rank(network_of(mlp(2**20, 1), 2**20), 40)
    assert not uses_low_rank(network_of(mlp(2**20 + 1, 1), 2**20 + 1), 40)


LAYERS = Layers((1, 1, 0, 2), (8, 480, 3, 24))  # of the first layer, the output's bias and the output's weights


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_norms_by_layer_bound_the_updates(data):
    model, training = mlp(60, 8, 3), LocalTraining(epochs=data.draw(st.integers(1, 6)), batch_size=5, learning_rate=0.5)
    chunk = random_chunk(data.draw(st.integers(0, 99)), model, [10, 7, 5], (60,), 10, 3)
    if data.draw(st.booleans()):  # one image under many labels: its gradients cancel
        chunk.x_CM[:] = chunk.x_CM[:, :1]
    for kind in (LowRank, FullRank):
        update_CP, _, norm_CL = train(model, training, chunk, kind, layers=LAYERS)
        parts = {layer: [] for layer in range(3)}
        for layer, columns in LAYERS.segments:
            parts[layer].append(np.asarray(update_CP, np.float64)[:, columns])
        expected_CL = np.stack([np.linalg.norm(np.concatenate(of_layer, 1), axis=1) for of_layer in parts.values()], 1)
        assert (np.asarray(norm_CL) >= expected_CL * (1 - 1e-6)).all()
        np.testing.assert_allclose(norm_CL, expected_CL, rtol=0.02)


@pytest.mark.parametrize("kind", [LowRank, FullRank])
def test_each_layer_is_summed_at_its_own_scale(kind):
    model, scale_CL = mlp(60, 8, 3), np.float32([[1.0, 2.0, 3.0], [0.5, 0.0, 0.25]])
    chunk = random_chunk(0, model, [7, 5], (60,), 10, 3)
    training = LocalTraining(epochs=2, batch_size=5, learning_rate=0.5)
    update_CP, _, _ = train(model, training, chunk, kind, layers=LAYERS)
    scaled_CP, _, _ = train(model, training, chunk, kind, layers=LAYERS, scale_CL=scale_CL)
    scale_CP = np.repeat(scale_CL[:, list(LAYERS.layer_of)], LAYERS.sizes, axis=1)
    np.testing.assert_allclose(scaled_CP, scale_CP * np.asarray(update_CP), rtol=1e-5, atol=1e-7)


def test_full_rank_where_a_clip_divides_the_first_layer():
    assert uses(mlp(), 40, Layers((0, 0, 1, 1), (50, 39_200, 10, 500)))
    assert not uses(mlp(), 40, Layers((0, 1, 1, 1), (50, 39_200, 10, 500)))
