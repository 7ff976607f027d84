"""What is taken out of a network's steps: the first layer, and what depends on the examples alone. And what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import random_chunk, train

from fedhdp import adapters
from fedhdp.client import LocalTraining
from fedhdp.engine.low_rank import FullRank, LowRank, uses_low_rank
from fedhdp.engine.network import Network
from fedhdp.models import Model, cnn, linear, mlp

INPUTS, UNITS, OUTPUTS, CAPACITY = 12, 5, 3, 8
TRAINING = LocalTraining(2, 3, 0.2)
BASIS = np.random.default_rng(0).normal(size=(INPUTS, 10)).astype(np.float32)


def network_of(apply: Callable, training: LocalTraining = TRAINING, **shapes: tuple[int, ...]) -> Network:
    """A network with these parameters besides two layers."""
    shapes = {"w": (INPUTS, UNITS), "b": (UNITS,), "out": (UNITS, OUTPUTS)} | shapes

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(shapes))
        return {name: jax.random.normal(k, shapes[name]) / 3 for k, name in zip(keys, shapes, strict=True)}

    return Network(Model(init, apply), jax.ShapeDtypeStruct((INPUTS,), jnp.float32), training)


def first_layer(network: Network, capacity: int = CAPACITY) -> tuple[str | None, str | None] | None:
    """The paths of the weights and the bias of the first layer."""
    first = network.split(capacity).first_layer
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(network.like)
    ]
    return None if first is None else (paths[first.weight], None if first.bias is None else paths[first.bias])


def assert_trains_the_same(network: Network, atol: float = 2e-5) -> None:
    """In the span as with all parameters: updates, personal models and norms, which are never too small."""
    chunk = random_chunk(1, network.model, [8, 5, 3], network.x.shape, CAPACITY, OUTPUTS)
    low, full = (train(network.model, network.training, chunk, kind) for kind in (LowRank, FullRank))
    for a, b in zip(low[:2], full[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=atol)
    norm_C = np.linalg.norm(np.asarray(low[0], np.float64), axis=1)
    assert (np.asarray(low[2]) >= norm_C * (1 - 1e-6)).all()
    np.testing.assert_allclose(low[2], norm_C, rtol=0.01)


RECOGNIZED = {
    "plain": lambda p, x, key: jax.nn.relu(x.reshape(len(x), -1) @ p["w"] + p["b"]) @ p["out"],
    "without a bias": lambda p, x, key: jnp.tanh(x @ p["w"]) @ p["out"] + p["b"].sum(),
    "transposed": lambda p, x, key: jax.nn.relu((p["w"].T @ x.T).T + p["b"]) @ p["out"],
    "mapped": lambda p, x, key: jax.vmap(lambda x: jax.nn.relu(p["w"].T @ x + p["b"]) @ p["out"])(x),
    "normalized": lambda p, x, key: (
        jax.nn.relu(((x - x.mean(axis=1, keepdims=True)) / (1 + x.std(axis=1, keepdims=True))) @ p["w"] + p["b"])
        @ p["out"]
    ),
    "scaled by constants": lambda p, x, key: (
        jax.nn.relu((x * np.linspace(0, 1, INPUTS) - 0.5) @ p["w"] + p["b"]) @ p["out"]
    ),
    "tensor": lambda p, x, key: (
        jax.nn.relu(jnp.tensordot(x.reshape(-1, 3, 4), p["w"].reshape(3, 4, UNITS), 2) + p["b"]) @ p["out"]
    ),
    "output used twice": lambda p, x, key: (lambda z: jax.nn.relu(z) + jnp.tanh(z))(x @ p["w"] + p["b"]) @ p["out"],
    "inputs used twice": lambda p, x, key: jax.nn.relu(x @ p["w"] + p["b"]) @ p["out"] + x[:, :1],
    "two products": lambda p, x, key: (jax.nn.relu(x @ p["w"] + p["b"]) * jnp.tanh(x @ p["gate"])) @ p["out"],
}


@pytest.mark.parametrize("name", RECOGNIZED)
def test_first_layer_is_found_and_trained_in_the_span(name):
    network = network_of(RECOGNIZED[name], **({"gate": (INPUTS, UNITS)} if name == "two products" else {}))
    weight, bias = ("w", None) if name == "without a bias" else ("w", "b")
    if name == "two products":  # either is one
        assert first_layer(network) in {("w", "b"), ("gate", None)}
    else:
        assert first_layer(network) == (weight, bias)
    assert_trains_the_same(network)


def test_a_bias_that_is_used_again_is_no_part_of_the_layer():
    network = network_of(lambda p, x, key: jax.nn.relu(x @ p["w"] + p["b"]) @ p["out"] + p["b"].sum())
    assert first_layer(network) == ("w", None)
    assert_trains_the_same(network)


def test_product_that_is_used_without_the_bias_as_well():
    network = network_of(lambda p, x, key: (lambda z: jnp.tanh(z + p["b"]) * jnp.cos(z))(x @ p["w"]) @ p["out"])
    assert first_layer(network) == ("w", None)
    assert_trains_the_same(network)


SQUARE = {"w": (INPUTS, INPUTS), "b": (INPUTS,), "out": (INPUTS, OUTPUTS)}
REFUSED = {
    "weights used again": lambda p, x, key: jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"]) @ p["out"],
    "weights tied to the output": lambda p, x, key: (jax.nn.relu(x @ p["w"] + p["b"]) @ p["w"].T)[:, :OUTPUTS],
    "weights normalized": lambda p, x, key: x @ (p["w"] / jnp.linalg.norm(p["w"])) @ p["out"],
    "weights scaled": lambda p, x, key: x @ (p["w"] * 2) @ p["out"],
    "weights masked": lambda p, x, key: x @ (p["w"] * jnp.eye(INPUTS)) @ p["out"],
    "a part of the weights": lambda p, x, key: x[:, 1:] @ p["w"][1:] @ p["out"],
    "after a layer": lambda p, x, key: jax.nn.relu((x * p["b"]) @ p["w"]) @ p["out"],
    "batch's mean": lambda p, x, key: jax.nn.relu((x - x.mean(axis=0)) @ p["w"]) @ p["out"],
    "batch's size": lambda p, x, key: jax.nn.relu((x / len(x)) @ p["w"]) @ p["out"],
    "number of a row": lambda p, x, key: jax.nn.relu((x + jnp.arange(len(x))[:, None]) @ p["w"]) @ p["out"],
    "inputs dropped": lambda p, x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ p["w"] @ p["out"],
    "rows sorted": lambda p, x, key: jnp.sort(x, axis=0) @ p["w"] @ p["out"],
    "rows reversed": lambda p, x, key: x[::-1] @ p["w"] @ p["out"],
    "rows of several examples": lambda p, x, key: (x.reshape(-1, INPUTS // 2, 2).sum(2) @ p["w"][:6]) @ p["out"],
    "each position": lambda p, x, key: (
        jax.nn.relu(x.reshape(-1, 1, INPUTS) @ p["w"] + x[:, None] @ p["w"])[:, 0] @ p["out"]
    ),
    "in a loop": lambda p, x, key: jax.lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ p["w"]), x) @ p["out"],
    "batch's product": lambda p, x, key: jnp.tanh(x @ x.T @ x @ p["w"]) @ p["out"],
    "half precision": lambda p, x, key: (
        (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32) @ p["out"]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_first_layer_is_refused(name):
    """In the span its update would be another one, and the norm that is clipped too small."""
    network = network_of(REFUSED[name], **SQUARE)
    assert first_layer(network) is None
    assert not uses_low_rank(network, CAPACITY)


def test_sizes_decide_where_the_program_depends_on_the_batch():
    """An apply that does something else for some batch size is taken apart for none."""
    network = network_of(lambda p, x, key: (x if len(x) == CAPACITY else 2 * x) @ p["w"] @ p["out"])
    split = network.split(CAPACITY)
    assert not split.is_split
    assert split.first_layer is None
    one_size = network_of(lambda p, x, key: (x / len(x)) @ p["w"] @ p["out"], LocalTraining(1, CAPACITY))
    assert first_layer(one_size) == ("w", None)  # all batches have the size of a client
    assert first_layer(one_size, CAPACITY + 1) is None


def test_optimizers_with_a_state_train_all_parameters():
    training = LocalTraining(1, 4, optimizer={"name": "adam", "learning_rate": 0.1})
    assert first_layer(network_of(RECOGNIZED["plain"], training)) is None


def test_constant_projection_is_computed_once():
    def projected(p: Any, x: jax.Array, key: Any) -> jax.Array:
        return jax.nn.relu(x.reshape(len(x), -1) @ BASIS @ p["w"] + p["b"]) @ p["out"]

    network = network_of(projected, w=(10, UNITS))
    assert first_layer(network) == ("w", "b")
    split, x_M = network.split(CAPACITY), jnp.ones((CAPACITY, INPUTS))
    np.testing.assert_allclose(split.first_rows(x_M)[0], x_M @ BASIS, rtol=1e-5)
    assert not split.keeps_finite
    assert uses_low_rank(network, 9)
    assert not uses_low_rank(network, 10)  # of the projection's ten inputs
    assert_trains_the_same(network)

    (rows,) = split.rows(x_M)  # with all parameters as well
    np.testing.assert_allclose(rows, x_M @ BASIS, rtol=1e-5)
    theta = network.model.init(jax.random.key(0))
    step = str(
        jax.make_jaxpr(lambda theta: split.apply(theta, [rows[:3]], 3, jax.random.key(0)))(split.transpose(theta))
    )
    assert step.count("dot_general") == 2


def test_what_grows_is_not_computed_once():
    """Nine numbers for an input would be read in every step."""

    def one_hot(p: Any, x: jax.Array, key: Any) -> jax.Array:
        hot = (x[:, :, None] == jnp.arange(9)).astype(jnp.float32).reshape(len(x), -1)
        return (p["b"].sum() * hot) @ p["w"] @ p["out"]

    network = network_of(one_hot, w=(9 * INPUTS, UNITS))
    (rows,) = network.split(CAPACITY).rows(jnp.ones((CAPACITY, INPUTS)))
    assert rows.shape == (CAPACITY, INPUTS)


def test_built_in_networks():
    image = jax.ShapeDtypeStruct((28, 28), jnp.float32)
    assert first_layer(Network(mlp(), image, TRAINING), 30) == ("first/w", "first/b")
    assert first_layer(Network(linear(784, 10), image, TRAINING), 30) == ("first/w", "first/b")
    assert first_layer(Network(linear(784, 10, bias=False), image, TRAINING), 30) == ("w", None)
    assert first_layer(Network(cnn(), image, TRAINING), 30) is None


def linen() -> Model:
    nn = pytest.importorskip("flax.linen")
    return adapters.from_flax(
        nn.Sequential([nn.Dense(UNITS), nn.relu, nn.Dense(OUTPUTS)]), np.zeros(INPUTS, np.float32)
    )


def nnx() -> Model:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, *, rngs):
            self.hidden, self.out = nnx.Linear(INPUTS, UNITS, rngs=rngs), nnx.Linear(UNITS, OUTPUTS, rngs=rngs)

        def __call__(self, x):
            return self.out(jax.nn.relu(self.hidden(x)))

    return adapters.from_nnx(Net)


def equinox() -> Model:
    eqx = pytest.importorskip("equinox")
    return adapters.from_equinox(lambda key: eqx.nn.MLP(INPUTS, OUTPUTS, UNITS, 1, key=key))


def haiku() -> Model:
    hk = pytest.importorskip("haiku")
    return adapters.from_haiku(lambda x: hk.nets.MLP([UNITS, OUTPUTS])(x), np.zeros(INPUTS, np.float32))


@pytest.mark.parametrize("make", [linen, nnx, equinox, haiku])
def test_modules_of_other_libraries_take_the_same_path(make):
    network = Network(make(), jax.ShapeDtypeStruct((INPUTS,), jnp.float32), TRAINING)
    first = network.split(CAPACITY).first_layer
    assert first is not None
    assert first.bias is not None
    assert (first.inputs, first.units) == (INPUTS, UNITS)
    assert_trains_the_same(network)
