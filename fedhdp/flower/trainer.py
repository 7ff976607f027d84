"""Trainers for ``fedhdp.Model``: one client's round, trained as the simulator trains it.

Axis letters as in ``engine/chunk.py``; M examples of the client, N examples.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.basis import second_moments, with_basis
from fedhdp.client import LocalTraining, scale_inputs, shuffle
from fedhdp.engine.chunk import train_clients
from fedhdp.engine.evaluation import model_metrics
from fedhdp.errors import ModelError
from fedhdp.flower.clientapp import Trainer
from fedhdp.flower.protocol import BASIS, Arrays, array_shapes, without_basis
from fedhdp.metrics import measure
from fedhdp.models import Model, Parameters, take
from fedhdp.rng import BATCHES, MODEL, stream


def to_arrays(parameters: Parameters) -> Arrays:
    """A model's parameters as arrays, named by their path in it."""
    leaves, _ = jax.tree.flatten_with_path(parameters)
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def to_parameters(model: Model, arrays: Arrays) -> Parameters:
    """Named arrays as a model's parameters.

    Raises:
        ModelError: If their names or shapes are not the model's.
    """
    leaves, tree = jax.tree.flatten_with_path(jax.eval_shape(model.init, jax.random.key(0)))
    expected, shapes = {_name(path): leaf.shape for path, leaf in leaves}, array_shapes(arrays)
    if shapes != expected:
        raise ModelError(f"arrays must have the model's shapes {expected}, got {shapes}", "arrays", shapes)
    return jax.tree.unflatten(tree, [jnp.asarray(arrays[name]) for name in expected])


def initial_arrays(model: Model, seed: int) -> Arrays:
    """The initial model; the simulator's for the same seed."""
    return to_arrays(model.init(_key(seed, MODEL, 0)))


def scorer(
    model: Model, x_N: np.ndarray, y_N: np.ndarray, input_scale: float | None = None
) -> Callable[[Arrays], dict[str, float]]:
    """A function that returns a model's metrics on these examples, by name; ``input_scale`` as in `FederatedData`.

    Arrays with a public basis are those of the model on it, whose inputs are the basis's columns.
    """
    metrics = model_metrics(model)

    def score(arrays: Arrays) -> dict[str, float]:
        parameters, x_scaled_N = (
            to_parameters(model, without_basis(arrays)),
            scale_inputs(jnp.asarray(x_N), input_scale),
        )
        return measure(metrics, _on_basis(model, arrays).apply(parameters, x_scaled_N, None), y_N)

    return score


def jax_trainer(
    model: Model,
    training: LocalTraining,
    x_M: np.ndarray,
    y_M: np.ndarray,
    test: tuple[np.ndarray, np.ndarray] | None = None,
    batches: tuple[int, int] | None = None,
    input_scale: float | None = None,
) -> Trainer:
    """A trainer that computes what the simulator computes for a client.

    Args:
        model: The model. In a deployment with a basis: the model of the basis's columns.
        training: Without ``personalize`` there is no personal model.
        x_M: The inputs of the client's training examples.
        y_M: Their labels.
        test: Inputs and labels of the client's test examples, if it has any.
        batches: A seed and the client's number, for the simulator's batches; default: random batches.
        input_scale: Inputs are multiplied by it, 1/255 for bytes of images; None: they reach the model as they are.
    """

    def fit(parameters: Arrays, personal: Arrays, pull: float, round: int) -> tuple[Arrays, Arrays | None]:
        theta = to_parameters(model, without_basis(parameters))
        personal_theta = to_parameters(model, without_basis(personal)) if training.personalize else None
        seed, number = batches if batches is not None else (secrets.randbits(31), 0)
        key = jax.random.fold_in(_key(seed, BATCHES, round), number)
        rates = jnp.array(training.rates(round), jnp.float32)
        train = _compile(_on_basis(model, parameters), training, input_scale)
        update, personal_theta = train(theta, personal_theta, x_M, y_M, jnp.float32(pull), key, rates)
        trained = jax.tree.map(jnp.add, theta, update)
        return to_arrays(trained), None if personal_theta is None else to_arrays(personal_theta)

    score = None if test is None or not len(test[1]) else scorer(model, *test, input_scale)
    return Trainer(fit, score, lambda: second_moments(x_M, input_scale))


def _on_basis(model: Model, arrays: Arrays) -> Model:
    """The model on the public basis among the arrays, if there is one."""
    return with_basis(model, arrays[BASIS]) if BASIS in arrays else model


@lru_cache(maxsize=8)
def _compile(model: Model, training: LocalTraining, input_scale: float | None) -> Callable:
    """A compiled round of one client, a chunk of one."""

    def train(theta, personal, x_M, y_M, pull, key, rates):
        order_M = shuffle(key, len(y_M), len(y_M))
        client = scale_inputs(x_M[order_M], input_scale)[None], y_M[order_M][None], key[None], rates
        if personal is None:
            update_C, _ = train_clients(model, training, theta, *client)
            return take(update_C, 0), None
        personal_CV = take(personal, (None, None))
        update_C, personal_CV = train_clients(model, training, theta, *client, personal_CV, pull[None, None])
        return take(update_C, 0), take(personal_CV, (0, 0))

    return jax.jit(train)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _key(seed: int, purpose: int, round: int) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(stream(seed, purpose, round)))
