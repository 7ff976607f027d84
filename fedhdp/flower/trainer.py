"""Trainers for models of ``models.py``: one client through the same ``client_updates`` as the simulator's chunks.

Axis letters: M examples of the client, N examples.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.client import LocalTraining, as_floats, shuffle
from fedhdp.engine import kernels
from fedhdp.engine.chunk import Clients, client_updates
from fedhdp.engine.low_rank import parametrize
from fedhdp.flower.clientapp import Trainer
from fedhdp.flower.protocol import Arrays
from fedhdp.models import Model, Parameters, take, use_conv_relu_pool
from fedhdp.rng import BATCHES, MODEL, stream


def named(parameters: Parameters) -> Arrays:
    """A model's parameters as arrays named by where they stand in it."""
    leaves, _ = jax.tree.flatten_with_path(parameters)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def initial_arrays(model: Model, seed: int) -> Arrays:
    """The model before the first round: the simulator's, under the same seed."""
    return named(model.init(_key(seed, MODEL, 0)))


def scorer(model: Model, x_N: np.ndarray, y_N: np.ndarray) -> Callable[[Arrays], float]:
    """How good a model is on these examples."""

    def score(arrays: Arrays) -> float:
        outputs_N = model.apply(_parameters(model, arrays), as_floats(jnp.asarray(x_N)), None)
        return float(jnp.mean(model.score(outputs_N, jnp.asarray(y_N))))

    return score


def jax_trainer(
    model: Model,
    training: LocalTraining,
    x_M: np.ndarray,
    y_M: np.ndarray,
    test: tuple[np.ndarray, np.ndarray] | None = None,
    batches: tuple[int, int] | None = None,
) -> Trainer:
    """A trainer for one client's examples; ``batches``: a seed and the client's number, for batches like a simulator's."""

    def fit(parameters: Arrays, personal: Arrays, pull: float, round: int) -> tuple[Arrays, Arrays | None]:
        theta = _parameters(model, parameters)
        own = _parameters(model, personal) if training.personalize else None
        seed, number = batches if batches is not None else (secrets.randbits(31), 0)
        key = jax.random.fold_in(_key(seed, BATCHES, round), number)
        rates = jnp.array(training.rates(round), jnp.float32)
        update, own = _compile(model, training)(theta, own, x_M, y_M, jnp.float32(pull), key, rates)
        trained = jax.tree.map(jnp.add, theta, update)
        return named(trained), None if own is None else named(own)

    return Trainer(fit, None if test is None or not len(test[1]) else scorer(model, *test))


@lru_cache(maxsize=8)
def _compile(model: Model, training: LocalTraining) -> Callable:
    """A compiled round of one client, a chunk of one."""

    def train(theta, personal, x_M, y_M, pull, key, rates):
        count = len(y_M)
        order_M = shuffle(key, count, count)
        x_CM, y_CM = as_floats(x_M[order_M])[None], y_M[order_M][None]
        theta_R = take(theta, None)
        personal_CV = None if personal is None else take(personal, (None, None))
        run_V, pull_CV = np.zeros(0 if personal is None else 1, int), jnp.full((1, 0 if personal is None else 1), pull)
        clients = Clients(y_CM, jnp.array([count]), pull_CV, key[None])
        with use_conv_relu_pool(kernels.conv_relu_pool):
            parametrization = parametrize(model, theta_R, run_V, x_CM)
            updates, personal_CV = client_updates(
                model, training, parametrization, clients, personal_CV, rates, uniform_size=True
            )
        update = parametrization.weighted_sum(
            jnp.ones(1), jax.tree.map(lambda leaf_CR: leaf_CR[:, 0], updates.update_CR)
        )
        return update, None if personal is None else take(personal_CV, (0, 0))

    return jax.jit(train)


def _parameters(model: Model, arrays: Arrays) -> Parameters:
    """Named arrays as the model's parameters; arrays of other names or shapes are refused."""
    like = jax.eval_shape(model.init, jax.random.key(0))
    leaves, tree = jax.tree.flatten_with_path(like)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if set(names) != set(arrays) or any(arrays[name].shape != leaf.shape for name, (_, leaf) in zip(names, leaves)):
        raise ValueError(f"arrays {sorted(arrays)} are not this model's, {names}")
    return jax.tree.unflatten(tree, [jnp.asarray(arrays[name]) for name in names])


def _key(seed: int, purpose: int, round: int) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(stream(seed, purpose, round)))
