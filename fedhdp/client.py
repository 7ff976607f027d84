"""What a client does, the right column of the paper's Algorithm 1, written once for many clients at a time.

Axis letters: C clients, T the models of a client (global, personal), M examples of one client (padded), B examples of a
batch, P parameters.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.flatten_util import ravel_pytree

from fedhdp.mechanism import require
from fedhdp.models import Array, Model, Parameters
from fedhdp.span import Coordinates, direct, in_span


class LocalTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a client trains: epochs of minibatch gradient descent, at rates that decay over the rounds."""

    epochs: int = 25
    batch_size: int = 20
    learning_rate: float = 0.5
    personal_learning_rate: float | None = None  # None: the same
    decay: float = 1.0
    decay_every: int = 50
    personalise: bool = True

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "finite and above 0")
        if self.personal_learning_rate is not None:
            rate = self.personal_learning_rate
            require(0 < rate < math.inf, "personal_learning_rate", rate, "finite and above 0")
        require(0 < self.decay <= 1, "decay", self.decay, "above 0 and at most 1")
        require(self.decay_every >= 1, "decay_every", self.decay_every, "at least 1")

    def rates(self, round: int) -> tuple[float, float]:
        """The learning rates of the global and the personal model in this round, the first round being 0."""
        factor = self.decay ** (round // self.decay_every)
        return self.learning_rate * factor, (self.personal_learning_rate or self.learning_rate) * factor


def coordinates(model: Model, examples: int, inputs: int) -> Coordinates:
    """Where to train: in the span of the examples if there are fewer of them than inputs, and the model allows it."""
    return in_span(model) if model.head is not None and examples < inputs else direct(model)


def as_floats(x: Array) -> Array:
    """Images come as bytes and are trained on in [0, 1]."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x.astype(jnp.float32)


def shuffle(key: Array, count: Array, capacity: int) -> Array:
    """A random order of the client's own examples, padding last; the same whatever the padding."""
    place_M = jnp.arange(capacity)
    ticket_M = jax.vmap(lambda place: jax.random.bits(jax.random.fold_in(key, place)) >> 1)(place_M)
    return jnp.argsort(jnp.where(place_M < count, ticket_M, jnp.uint32(0xFFFFFFFF)))


def client_updates(
    model: Model,
    training: LocalTraining,
    theta: Parameters,
    personal_C: Parameters | None,
    x_CM: Array,
    y_CM: Array,
    count_C: Array,
    pull_C: Array,
    key_C: Array,
    rates: tuple[Array, Array],
    held_in: Coordinates,
    full: bool = False,
) -> tuple[Parameters, Parameters | None]:
    """ClientUpdate: each client's update of the global model, and its personal model after the round.

    ``full``: no client has any padding, so that batches are known beforehand; the results are the same.
    """
    capacity, size = x_CM.shape[1], training.batch_size
    order_CM = jax.vmap(shuffle, in_axes=(0, 0, None))(key_C, count_C, capacity)
    x_CM = as_floats(jax.vmap(lambda x_M, order_M: x_M[order_M])(x_CM, order_CM))
    y_CM = jax.vmap(lambda y_M, order_M: y_M[order_M])(y_CM, order_CM)

    # A client's global and personal model train side by side (T): theta ← theta − η(∇f + λ(theta − anchor)), λ_global = 0.
    starts = [None] if personal_C is None else [None, personal_C]
    entered = [jax.vmap(lambda start, x_M: held_in.enter(theta, start, x_M))(start_C, x_CM) for start_C in starts]
    held_CT, alone_CT = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *entered)
    rate_T = jnp.stack(rates[: len(starts)])
    pull_CT = jnp.stack([jnp.zeros_like(pull_C), pull_C][: len(starts)], axis=1)
    shared_C = jax.vmap(lambda x_M: held_in.know(theta, x_M))(x_CM)
    anchor = held_in.anchor(theta, capacity)

    def step(epoch: Array, first: Any, size: int, held_CT: Parameters) -> Parameters:
        """One batch B, the same numbers for every client; a client that has no such batch rests at rate 0."""

        def of_client(held_T, alone_T, pull_T, shared, y_M, count, key):
            key = jax.random.fold_in(jax.random.fold_in(key, epoch), first)
            y_B = jax.lax.dynamic_slice_in_dim(y_M, first, size)
            real_B = jnp.ones(size, bool) if full else first + jnp.arange(size) < count
            busy = 1.0 if full else jnp.where(first < count, 1.0, 0.0)

            def descend(held, alone, rate, pull):
                def f(held: Parameters) -> Array:
                    loss_B = model.loss(held_in.predict(held, alone, shared, first, size, key), y_B)
                    return jnp.sum(jnp.where(real_B, loss_B, 0.0)) / jnp.maximum(jnp.sum(real_B), 1)

                return jax.tree.map(lambda h, g, a: h - rate * (g + pull * (h - a)), held, jax.grad(f)(held), anchor)

            return jax.vmap(descend)(held_T, alone_T, busy * rate_T, pull_T)

        return jax.vmap(of_client)(held_CT, alone_CT, pull_CT, shared_C, y_CM, count_C, key_C)

    def epoch(number: Array, held_CT: Parameters) -> Parameters:
        whole, rest = (capacity // size, capacity % size) if full else (-(-jnp.max(count_C) // size), 0)
        if not full or whole:
            held_CT = jax.lax.fori_loop(0, whole, lambda batch, held: step(number, batch * size, size, held), held_CT)
        return step(number, whole * size, rest, held_CT) if rest else held_CT  # the last, partial batch is kept

    held_CT = jax.lax.fori_loop(0, training.epochs, epoch, held_CT)
    left = [
        jax.vmap(lambda held, start, x_M: held_in.leave(held, theta, start, x_M))(
            jax.tree.map(lambda h_CT, t=t: h_CT[:, t], held_CT), start_C, x_CM
        )
        for t, start_C in enumerate(starts)
    ]
    update_C = jax.tree.map(lambda trained, start: trained - start, left[0], theta)
    return update_C, left[1] if personal_C is not None else None


def flatten(parameters_C: Parameters) -> Array:
    """Stacked parameters as one row for each client."""
    return jax.vmap(lambda parameters: ravel_pytree(parameters)[0])(parameters_C)
