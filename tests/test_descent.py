"""A step of gradient descent: by the gradient, and with a wide layer that moves while the gradient passes it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedhdp.engine import descent
from fedhdp.engine.descent import Moving, descend, in_passing, times
from fedhdp.engine.kernels import convolution
from fedhdp.models import cnn, dense

CLIENTS, MODELS = 3, 2
RATE_CT = jnp.array([[0.1, 0.2], [0.0, 0.0], [0.3, 0.1]])  # the second client rests
PULL_CT = jnp.array([[0.0, 0.3], [0.0, 0.2], [0.0, 0.5]])


@pytest.fixture
def interpreted(monkeypatch):
    """As on a GPU, in as many digits as there are, by kernels that are run without one; counts them."""
    made = []

    def run(h_NI: jax.Array, moving: Moving) -> jax.Array:
        made.append(moving)
        return in_passing(h_NI, moving, True)

    monkeypatch.setattr(descent, "on_nvidia", lambda: True)
    monkeypatch.setattr(descent, "in_passing", run)
    with jax.default_matmul_precision("float32"):
        yield made


def network(key: jax.Array, sizes: tuple[int, ...]) -> dict:
    keys = jax.random.split(key, 3)
    return {name: dense(k, i, o) for name, k, i, o in zip(("before", "wide", "after"), keys, sizes, sizes[1:])}


def loss(x_NI: jax.Array, theta: dict) -> jax.Array:
    h = jnp.tanh(x_NI @ theta["before"]["w"] + theta["before"]["b"])
    h = jnp.tanh(times(h, theta["wide"]["w"]) + theta["wide"]["b"])
    return jnp.mean((h @ theta["after"]["w"] + theta["after"]["b"]) ** 2)


def after_steps(wide: str | None, pulled: bool, sizes: tuple[int, ...], examples: int) -> tuple[dict, dict]:
    """Several models of several clients, as the engine has them: before and after two steps."""
    theta_CT = jax.vmap(jax.vmap(partial(network, sizes=sizes)))(jax.random.split(jax.random.key(0), (CLIENTS, MODELS)))
    anchor_T = jax.vmap(partial(network, sizes=sizes))(jax.random.split(jax.random.key(1), MODELS))
    x_CNI = jax.random.normal(jax.random.key(2), (CLIENTS, examples, sizes[0]))

    def of_client(x_NI, theta_T, rate_T, pull_T):
        def of_model(theta, rate, pull, anchor):
            return descend(partial(loss, x_NI), theta, rate, pull if pulled else None, anchor, wide)

        return jax.vmap(of_model)(theta_T, rate_T, pull_T, anchor_T)

    moved_CT = theta_CT
    for _ in range(2):
        moved_CT = jax.vmap(of_client)(x_CNI, moved_CT, RATE_CT, PULL_CT)
    return theta_CT, moved_CT


@pytest.mark.parametrize("pulled", [True, False])
@pytest.mark.parametrize(("inputs", "outputs", "examples"), [(100, 16, 20), (7 * 32 + 1, 32, 5), (20, 128, 33)])
def test_a_layer_that_moves_in_passing_makes_the_same_step(interpreted, pulled, inputs, outputs, examples):
    sizes = (10, inputs, outputs, 4)
    _, plainly = after_steps(None, pulled, sizes, examples)
    assert not interpreted
    before, passing = after_steps("wide", pulled, sizes, examples)
    assert len(interpreted) == 2
    for one, other in zip(jax.tree.leaves(passing), jax.tree.leaves(plainly), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_array_equal(passing["wide"]["w"][1], before["wide"]["w"][1])  # who rests does not move at all
    assert float(jnp.max(jnp.abs(passing["wide"]["w"][2] - before["wide"]["w"][2]))) > 0.01


def test_a_step_is_what_algorithm_1_says():
    f = lambda theta: jnp.sum(theta["a"] ** 3)  # noqa: E731
    stepped = descend(f, {"a": jnp.array([2.0])}, jnp.float32(0.1), jnp.float32(0.5), {"a": jnp.array([1.0])})
    np.testing.assert_allclose(stepped["a"], 2.0 - 0.1 * (3 * 2.0**2 + 0.5 * (2.0 - 1.0)), rtol=1e-6)


@pytest.mark.parametrize("outputs", [8, 24])
def test_sizes_that_a_kernel_cannot_have_move_by_their_gradient(interpreted, outputs):
    after_steps("wide", True, (10, 40, outputs, 4), 5)
    assert not interpreted


def test_a_gpu_is_given_the_kernel_for_the_networks_dense_layer(monkeypatch):
    for module in (descent, convolution):
        monkeypatch.setattr(module, "on_nvidia", lambda: True)
    model = cnn()
    theta = model.init(jax.random.key(0))
    x_N, y_N = jnp.zeros((20, 28, 28)), jnp.zeros(20, int)

    def step(theta: dict, rate: jax.Array) -> dict:
        f = lambda theta: jnp.sum(model.loss(model.apply(theta, x_N, jax.random.key(1)), y_N))  # noqa: E731
        return descend(f, theta, rate, rate, theta, model.wide)

    made = jax.jit(step).trace(theta, jnp.float32(0.1)).lower(lowering_platforms=("cuda",)).as_text()
    assert '"dense_in_passing"' in made
