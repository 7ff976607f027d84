"""How the clients of a chunk train: ``client.local_train`` mapped over clients and over the models of each.

*Lockstep*: all clients take the same batch at a time, and a client without that batch rests. The batch is then the same
slice of every client's arrays. *Ragged*: each client takes its own batches one after the other, and clients that are done
are dropped while the others go on. *One by one*, on a CPU and where all parameters are trained: a core takes one client and
one model at a time, since many small networks side by side make batched products, which are slow there. A client's results
are the same in all three.

Axis letters: C clients of a chunk, R global models, V personal models, T both, M examples of a client (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.client import ClientData, LocalTraining, Schedule, TrainedModel, local_train
from fedhdp.engine.low_rank import ClientUpdates, Parametrization, parametrize
from fedhdp.engine.network import Network
from fedhdp.engine.patches import on_cpu
from fedhdp.models import Array, Model, Parameters, take


class Clients(NamedTuple):
    """What the clients of a chunk train with, besides their inputs, which their parametrization has."""

    y_CM: Array  # targets, in the order in which they are trained on
    count_C: Array  # how many examples are real
    pull_CV: Array
    key_C: Array


def client_updates(
    model: Model,
    training: LocalTraining,
    parametrization: Parametrization,
    clients: Clients,
    personal_CV: Parameters | None,
    rates: Array,
    uniform_size: bool = False,
) -> tuple[ClientUpdates, Parameters | None]:
    """ClientUpdate of Algorithm 1 for the clients of a chunk, all models of a client side by side.

    Args:
        clients: The clients; for ragged training those with most examples come first.
        personal_CV: Their personal models, or None without personalization.
        rates: The learning rates of global and of personal models.
        uniform_size: No client has any padding, so that batches are known at compile time; the results are the same.

    Returns:
        Each client's update of each global model, and its personal models after the round.
    """
    models, capacity = _length(parametrization.anchor_T), clients.y_CM.shape[1]
    runs = models - clients.pull_CV.shape[1]
    rate_T = rates[(np.arange(models) >= runs).astype(int)]
    pull_CT = jnp.concatenate([jnp.full((len(clients.y_CM), runs), training.proximal), clients.pull_CV], axis=1)
    theta_CT, inputs_CT = parametrization.from_params(personal_CV)
    model_CT = jax.vmap(jax.vmap(partial(_start, training)), (0, None))(theta_CT, rate_T)
    batches_C = training.batches(clients.count_C)
    one_by_one = parametrization.ragged and on_cpu()
    each = _one_by_one if one_by_one else jax.vmap

    def train(model_CT: TrainedModel, epochs: range, which: slice = slice(None)) -> TrainedModel:
        """These epochs, of the models that are given, which are those of each client."""

        def of_chunk(model_CT: TrainedModel, batches: Array | None = None, steps: tuple | None = None) -> TrainedModel:
            """Some steps of the first clients of the chunk."""

            def of_client(model_T, inputs_T, pull_T, y_M, count, key):
                def of_model(start, anchor, pull, rate, inputs_M):
                    data = ClientData(inputs_M, y_M, capacity if uniform_size else count, key)
                    schedule = Schedule(data, training, epochs, batches, steps)
                    optimizer = training.transformation(rate)
                    return local_train(parametrization.predict, model.loss, start, anchor, pull, optimizer, schedule)

                anchor_T, others_T = parametrization.anchor_T, (pull_T, rate_T, inputs_T)
                return each(of_model)(model_T, *take((anchor_T, *others_T), which))

            of_clients = (inputs_CT, pull_CT, clients.y_CM, clients.count_C, clients.key_C)
            return each(of_client)(model_CT, *take(of_clients, slice(_length(model_CT))))

        if uniform_size or one_by_one:
            return of_chunk(model_CT)
        if parametrization.ragged:
            return ragged(of_chunk, model_CT, batches_C, len(epochs))
        return of_chunk(model_CT, jnp.max(batches_C))

    # Personal models may stop before the global ones, or go on after them.
    personal_epochs = training.epochs if personal_CV is None else training.personal_epochs or training.epochs
    together = min(training.epochs, personal_epochs)
    model_CT = train(model_CT, range(together))
    model_CR, model_CV = _models(model_CT, slice(runs)), _models(model_CT, slice(runs, None))
    if together < training.epochs:
        model_CR = train(model_CR, range(together, training.epochs), slice(runs))
    if together < personal_epochs:
        model_CV = train(model_CV, range(together, personal_epochs), slice(runs, None))
    updates = parametrization.delta(model_CR.theta)
    return updates, None if personal_CV is None else parametrization.to_params(model_CV.theta, personal_CV)


def _one_by_one(function: Callable[..., Parameters]) -> Callable[..., Parameters]:
    """The function of a client, or of a model, as a function of some, which are taken one after the other."""
    return lambda *args: jax.lax.map(lambda of_one: function(*of_one), args)


def train_clients(
    model: Model,
    training: LocalTraining,
    theta: Parameters,
    x_CM: Array,
    y_CM: Array,
    key_C: Array,
    rates: Array,
    personal_CV: Parameters | None = None,
    pull_CV: Array | None = None,
) -> tuple[Parameters, Parameters | None]:
    """ClientUpdate of Algorithm 1 outside of a simulation's rounds, for clients with as many examples each.

    Args:
        theta: The global model of the round.
        x_CM: Their inputs, as the model gets them.
        personal_CV: Their personal models, or None without personalization.
        pull_CV: The pull of each personal model.

    Returns:
        Each client's update as parameters, and its personal models after the round.
    """
    clients, count = y_CM.shape[:2]
    pull_CV = jnp.zeros((clients, 0)) if pull_CV is None else pull_CV
    network = Network(model, jax.ShapeDtypeStruct(x_CM.shape[2:], x_CM.dtype), training)
    parametrization = parametrize(network, take(theta, None), np.zeros(pull_CV.shape[1], int), x_CM)
    chunk = Clients(y_CM, jnp.full(clients, count), pull_CV, key_C)
    updates, personal_CV = client_updates(
        model, training, parametrization, chunk, personal_CV, rates, uniform_size=True
    )
    update_CR = parametrization.to_params(updates.update_CR, None)
    return jax.tree.map(lambda leaf_CR: leaf_CR[:, 0], update_CR), personal_CV


def _start(training: LocalTraining, theta: Parameters, rate: Array) -> TrainedModel:
    """A model before its first step of the round."""
    return TrainedModel(theta, training.transformation(rate).init(theta))


def ragged(of_chunk: Callable[..., Parameters], theta_C: Parameters, batches_C: Array, epochs: int) -> Parameters:
    """Steps in which each client takes its own batches; clients that are done are dropped, an eighth of them at a time.

    Fast where the clients with most batches come first.
    """

    def turn(number: Array, theta_C: Parameters) -> Parameters:
        """One step for each epoch: a number known at compile time, and a client's last step is at the end of a turn."""
        return of_chunk(theta_C, steps=(number * epochs, epochs))

    total = len(batches_C)
    remaining = list(range(total, 0, -max(8, -(-total // 8))))
    done: list[Parameters] = []
    begin = jnp.int32(0)
    for clients, staying in zip(remaining, [*remaining[1:], 0], strict=True):
        end = jnp.maximum(begin, jnp.max(batches_C[staying:]))
        theta_C = jax.lax.fori_loop(begin, end, turn, take(theta_C, slice(clients)))
        done.insert(0, take(theta_C, slice(staying, None)))
        begin = end
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *done)


def _length(parameters: Parameters) -> int:
    """The size of the leading axis."""
    return jax.tree.leaves(parameters)[0].shape[0]


def _models(model_CT: TrainedModel, which: slice) -> TrainedModel:
    return jax.tree.map(lambda leaf: leaf[:, which], model_CT)
