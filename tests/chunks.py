"""A chunk of clients with random examples, trained without the rest of a round."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedhdp.client import LocalTraining, scale_inputs, shuffle
from fedhdp.engine.chunk import Clients, client_updates
from fedhdp.engine.low_rank import Parametrization
from fedhdp.engine.network import Network
from fedhdp.models import Model, take
from fedhdp.server import Layers


class Chunk(NamedTuple):
    """Clients with one personal model each, beside one global model."""

    theta: Any
    personal_C: Any
    x_CM: np.ndarray
    y_CM: np.ndarray
    count_C: jax.Array
    pull_C: jax.Array
    key_C: jax.Array

    def client(self, i: int) -> Chunk:
        """The same chunk with this client alone."""
        return Chunk(self.theta, *(take(field, slice(i, i + 1)) for field in self[1:]))


def random_chunk(
    seed: int, model: Model, counts: list[int], shape: tuple[int, ...], capacity: int, classes: int
) -> Chunk:
    """Clients with so many examples each, padded to the capacity."""
    rng = np.random.default_rng(seed)
    x_CM = rng.integers(0, 256, (len(counts), capacity, *shape)).astype(np.uint8)
    y_CM = rng.integers(0, classes, (len(counts), capacity)).astype(np.int32)
    for i, count in enumerate(counts):
        x_CM[i, count:], y_CM[i, count:] = 0, 0
    keys = jax.random.split(jax.random.key(seed), len(counts) + 1)
    pull_C = jnp.asarray(rng.uniform(0, 1, len(counts)), jnp.float32)
    theta, personal_C = model.init(keys[0]), jax.vmap(model.init)(keys[1:])
    return Chunk(theta, personal_C, x_CM, y_CM, jnp.asarray(counts, jnp.int32), pull_C, keys[1:])


@partial(jax.jit, static_argnums=(0, 1, 3, 4), static_argnames="layers")
def train(
    model: Model,
    training: LocalTraining,
    chunk: Chunk,
    kind: type[Parametrization],
    uniform_size: bool = False,
    layers: Layers | None = None,
    scale_CL: np.ndarray | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Updates, scaled, and personal models as one row for each client, and the updates' norms."""
    order_CM = jax.vmap(partial(shuffle, capacity=chunk.x_CM.shape[1]))(chunk.key_C, chunk.count_C)
    x_CM, y_CM = (jax.vmap(lambda a_M, order_M: a_M[order_M])(a, order_CM) for a in (chunk.x_CM, chunk.y_CM))
    run_V, personal_CV = np.zeros(1, int), jax.tree.map(lambda leaf_C: leaf_C[:, None], chunk.personal_C)
    x_CM = scale_inputs(x_CM, 1 / 255)
    network = Network(model, jax.ShapeDtypeStruct(x_CM.shape[2:], x_CM.dtype), training)
    parametrization = kind(network, take(chunk.theta, None), run_V, x_CM, layers=layers)
    clients = Clients(y_CM, chunk.count_C, chunk.pull_C[:, None], chunk.key_C)
    rates = jnp.array(training.rates(0))
    updates, personal_CV = client_updates(model, training, parametrization, clients, personal_CV, rates, uniform_size)
    update_C = jax.tree.map(lambda leaf_CR: leaf_CR[:, 0], updates.update_CR)
    scales = jnp.eye(len(x_CM))  # each client alone
    if layers is not None:
        scales = scales[:, :, None] * (jnp.ones((1, layers.number)) if scale_CL is None else scale_CL)
    full_C = jax.vmap(lambda scale_C: parametrization.weighted_sum(scale_C, update_C))(scales)
    return flatten(full_C), flatten(personal_CV), updates.norm_CR[:, 0]


def flatten(parameters_C: Any) -> jax.Array:
    """Stacked parameters as one row for each client."""
    return jax.vmap(lambda parameters: ravel_pytree(parameters)[0])(parameters_C)
