"""Modules of Flax linen and nnx, Equinox and Haiku as models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mechanism_of, raises_field, tiny_data

from fedhdp import adapters
from fedhdp.client import LocalTraining
from fedhdp.errors import ModelError
from fedhdp.models import Model
from fedhdp.simulation import Simulation

INPUT = np.zeros(12, np.float32)


class Case(NamedTuple):
    """A network of one hidden layer and dropout."""

    model: Model
    own: Callable[[Any, Any], Any]  # the module's own outputs in evaluation, from the model's parameters
    stateful: Callable[[], Model]  # a module with batch statistics


def linen() -> Case:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(5)(x)))
            return nn.Dense(3)(x)

    model = adapters.from_flax(Net(), INPUT)
    return Case(
        model,
        lambda theta, x: Net().apply({"params": theta}, x, train=False),
        lambda: adapters.from_flax(nn.BatchNorm(use_running_average=True), INPUT),
    )


def nnx() -> Case:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, *, rngs):
            self.hidden, self.out = nnx.Linear(12, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.out(self.dropout(nnx.relu(self.hidden(x))))

    def own(theta, x):
        net = Net(rngs=nnx.Rngs(0))
        net.eval()
        for layer in ("hidden", "out"):
            for name, value in theta[layer].items():
                setattr(getattr(net, layer), name, nnx.Param(value))
        return net(x)

    return Case(adapters.from_nnx(Net), own, lambda: adapters.from_nnx(lambda rngs: nnx.BatchNorm(12, rngs=rngs)))


def equinox() -> Case:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        hidden: eqx.nn.Linear
        dropout: eqx.nn.Dropout
        out: eqx.nn.Linear

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.hidden, self.out = eqx.nn.Linear(12, 5, key=first), eqx.nn.Linear(5, 3, key=second)
            self.dropout = eqx.nn.Dropout(0.5)

        def __call__(self, x, key=None):
            return self.out(self.dropout(jax.nn.relu(self.hidden(x)), key=key))

    def own(theta, x):
        return jax.vmap(lambda x: theta.out(jax.nn.relu(theta.hidden(x))))(x)

    return Case(adapters.from_equinox(Net), own, lambda: adapters.from_equinox(eqx.nn.BatchNorm(12, "x", mode="batch")))


def haiku() -> Case:
    hk = pytest.importorskip("haiku")

    def net(x, is_training):
        x = jax.nn.relu(hk.Linear(5)(x))
        x = hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x
        return hk.Linear(3)(x)

    plain = hk.transform(net)
    return Case(
        adapters.from_haiku(net, INPUT),
        lambda theta, x: plain.apply(theta, None, x, False),
        lambda: adapters.from_haiku(lambda x: hk.BatchNorm(True, True, 0.9)(x, True), INPUT),
    )


CASES = [linen, nnx, equinox, haiku]


@pytest.mark.parametrize("make", CASES)
def test_outputs_and_gradients_are_the_modules_own(make):
    model, own, _ = make()
    theta, x_N = model.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (6, 12))
    np.testing.assert_allclose(model.apply(theta, x_N, None), own(theta, x_N), atol=1e-6)
    gradients = [jax.grad(lambda theta, f=f: jnp.sum(f(theta) ** 2))(theta) for f in (
        lambda theta: model.apply(theta, x_N, None), lambda theta: own(theta, x_N))]  # fmt: skip
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("make", CASES)
def test_dropout_follows_the_key(make):
    model, _, _ = make()
    theta, x_N = model.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (6, 12))
    evaluated, *trained = (model.apply(theta, x_N, key) for key in (None, *map(jax.random.key, (1, 1, 2))))
    np.testing.assert_array_equal(trained[0], trained[1])
    assert (trained[0] != trained[2]).any()
    assert (trained[0] != evaluated).any()
    other = model.init(jax.random.key(1))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (theta, other)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("make", CASES)
def test_rounds_train_global_and_personal_models(make):
    model, data = make().model, tiny_data([8, 5, 12, 3])
    training = LocalTraining(epochs=4, batch_size=4, optimizer={"name": "adam", "learning_rate": 0.02})
    simulation = Simulation(data, model, mechanism_of((4, 0.0, 1.0), rate=1.0, clip=9.0), training, noise_seed=1)
    own = slice(data.train.start_K[2], data.train.start_K[3])
    x_N, y_N = data.train.x_N[own] * np.float32(1 / 255), jnp.asarray(data.train.y_N[own])

    def loss(theta) -> float:
        return float(jnp.mean(model.loss(model.apply(theta, x_N, None), y_N)))

    first = loss(simulation.model())
    simulation.run(2)
    assert loss(simulation.model()) < first
    assert loss(simulation.model(client=2)) < first
    assert loss(simulation.model(client=2)) != loss(simulation.model())


@pytest.mark.parametrize("make", CASES)
def test_module_with_state_is_refused(make):
    with pytest.raises(ModelError) as caught:
        make().stateful()
    assert caught.value.field in ("state", "init")  # Haiku itself refuses such a function
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("adapter", ["from_flax", "from_nnx", "from_equinox", "from_haiku"])
def test_what_is_no_module_is_refused(adapter):
    pytest.importorskip({"from_equinox": "equinox", "from_haiku": "haiku"}.get(adapter, "flax"))
    arguments = (INPUT,) if adapter in ("from_flax", "from_haiku") else ()
    with raises_field("module", ModelError):
        getattr(adapters, adapter)(3, *arguments)
    if not arguments:
        with raises_field("module", ModelError):
            getattr(adapters, adapter)(lambda x: 3)


def test_wrong_input_and_parameters_are_refused():
    nn = pytest.importorskip("flax.linen")

    class Counter(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.param("count", lambda key: jnp.arange(12))

    with raises_field("parameters", ModelError):
        adapters.from_flax(Counter(), INPUT)
    with raises_field("init", ModelError):
        adapters.from_flax(nn.Conv(3, (3, 3)), np.float32(0))
    with raises_field("apply", ModelError):
        adapters.from_flax(nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=False)]), INPUT)


def test_instances_begin_with_their_own_parameters():
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    for model in (
        adapters.from_equinox(eqx.nn.MLP(12, 3, 5, 1, key=jax.random.key(3))),
        adapters.from_nnx(nnx.Linear(12, 3, rngs=nnx.Rngs(3))),
    ):
        a, b = (jax.tree.leaves(model.init(jax.random.key(seed))) for seed in (0, 1))
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
        assert model.apply(model.init(jax.random.key(0)), jnp.ones((4, 12)), None).shape == (4, 3)
