"""What a client does, the right column of the paper's Algorithm 1, written once for many clients at a time.

Axis letters: C clients, R global models, V personal models, T both, M examples of one client (padded), B examples of a
batch. Several global models are several runs at once; several personal ones may be pulled towards the same global one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

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
    whole_batches: bool = False  # leave out an epoch's last batch where it is not whole, unless it is the only one

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

    def batches(self, count_C: Array) -> Array:
        """How many batches of an epoch clients with this many examples have."""
        if self.whole_batches:
            return jnp.where(count_C > 0, jnp.maximum(count_C // self.batch_size, 1), 0)
        return -(-count_C // self.batch_size)


def trains_in_span(model: Model, examples: int, inputs: int) -> bool:
    """Whether the span of the examples is where to train: there are fewer of them than inputs, and the model allows it."""
    return model.head is not None and examples < inputs


def coordinates(model: Model, examples: int, inputs: int) -> Coordinates:
    """Where to train."""
    return in_span(model) if trains_in_span(model, examples, inputs) else direct(model)


def as_floats(x: Array) -> Array:
    """Images come as bytes and are trained on in [0, 1]."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x.astype(jnp.float32)


def shuffle(key: Array, count: Array, capacity: int) -> Array:
    """A random order of the client's own examples, padding last; the same whatever the padding."""
    ticket_M = jax.random.bits(key, (capacity,)) >> 1  # more of them begin with the same
    return jnp.argsort(jnp.where(jnp.arange(capacity) < count, ticket_M, jnp.uint32(0xFFFFFFFF)))


def orders(key_C: Array, count_C: Array, capacity: int) -> Array:
    """The order in which each client trains on its examples."""
    return jax.vmap(shuffle, in_axes=(0, 0, None))(key_C, count_C, capacity)


FEW = 4  # batches that are worth a copy of what is known of them


def _fewer(clients: int) -> list[int]:
    """How many train at a time while the others get done: all, then an eighth of them less each time, or 8."""
    return list(range(clients, 0, -max(8, -(-clients // 8))))


def _axis(number: Any) -> int | None:
    """Whether clients each have a number of their own."""
    return 0 if jnp.ndim(number) else None


class Sent(NamedTuple):
    """The updates of some clients for each global model, in the coordinates they were trained in."""

    update_CR: Parameters
    norm_CR: Array


def client_updates(
    model: Model,
    training: LocalTraining,
    held_in: Coordinates,
    theta_R: Parameters,
    personal_CV: Parameters | None,
    run_V: np.ndarray,
    x_CM: Array,
    y_CM: Array,
    count_C: Array,
    pull_CV: Array,
    key_C: Array,
    rates: Array,
    full: bool = False,
    gram_CMM: Array | None = None,
) -> tuple[Sent, Parameters | None]:
    """ClientUpdate: each client's update of each global model, and its personal models after the round.

    Examples come as floats, in the order in which they are trained on. ``full``: no client has any padding, so that
    batches are known beforehand; ``gram_CMM``: the examples' products with each other, if they are known. The results
    are the same.
    """
    capacity, size = x_CM.shape[1], training.batch_size
    runs = jax.tree.leaves(theta_R)[0].shape[0]
    run_T = np.concatenate([np.arange(runs), run_V]).astype(int)

    # All models of a client train side by side (T): theta ← theta − η(∇f + λ(theta − anchor)), λ_global = 0.
    shared_C = jax.vmap(partial(held_in.know, theta_R))(x_CM, gram_CMM)
    enter = lambda own_V, x_M, shared: held_in.enter(theta_R, own_V, run_V, x_M, shared)  # noqa: E731
    held_CT, known_CT = jax.vmap(enter)(personal_CV, x_CM, shared_C)
    anchor_T = held_in.anchor(theta_R, run_T, capacity)
    rate_T = rates[(np.arange(len(run_T)) >= runs).astype(int)]
    pull_CT = jnp.concatenate([jnp.zeros((len(x_CM), runs)), pull_CV], axis=1)
    batches_C = training.batches(count_C)

    def known_in(first: Any, size: int, clients: int | None = None) -> Any:
        """What is known of a batch: the same numbers for every client, or its own for each of the first ones."""
        known = jax.tree.map(lambda known_C: known_C[:clients], known_CT)
        batch = lambda known_T, first: held_in.batch(known_T, len(run_T), first, size)  # noqa: E731
        return jax.vmap(batch, in_axes=(0, _axis(first)))(known, first)

    def step(epoch: Any, first: Any, size: int, held_CT: Parameters, known_CTB: Any) -> Parameters:
        """One batch B of the first clients; one that has no such batch or epoch rests at rate 0."""

        def of_client(epoch, first, held_T, known_TB, pull_T, y_M, count, batches, key):
            key = jax.random.fold_in(jax.random.fold_in(key, epoch), first)
            y_B = jax.lax.dynamic_slice_in_dim(y_M, first, size)
            real_B = jnp.ones(size, bool) if full else first + jnp.arange(size) < count
            has = (epoch < training.epochs) & (first // training.batch_size < batches)
            busy = 1.0 if full else jnp.where(has, 1.0, 0.0)

            def descend(held, known_B, rate, pull, anchor):
                def f(held: Parameters) -> Array:
                    loss_B = model.loss(held_in.predict(held, known_B, first, key), y_B)
                    return jnp.sum(jnp.where(real_B, loss_B, 0.0)) / jnp.maximum(jnp.sum(real_B), 1)

                if personal_CV is None:
                    return jax.tree.map(lambda h, g: h - rate * g, held, jax.grad(f)(held))
                return jax.tree.map(lambda h, g, a: h - rate * (g + pull * (h - a)), held, jax.grad(f)(held), anchor)

            return jax.vmap(descend)(held_T, known_TB, busy * rate_T, pull_T, anchor_T)

        clients = jax.tree.leaves(held_CT)[0].shape[0]
        theirs = (a_C[:clients] for a_C in (pull_CT, y_CM, count_C, batches_C, key_C))
        axes = (_axis(epoch), _axis(first), *(0,) * 7)
        return jax.vmap(of_client, in_axes=axes)(epoch, first, held_CT, known_CTB, *theirs)

    # Where every client has the same few batches they are cut once for all epochs, else when their turn comes.
    whole, rest = capacity // size, 0 if training.whole_batches and capacity >= size else capacity % size
    cuts = [(batch * size, size) for batch in range(whole)] + [(whole * size, rest)] * (rest > 0)
    known_in_cuts = [known_in(*cut) for cut in cuts] if full and len(cuts) <= FEW else []

    def together(number: Array, held_CT: Parameters) -> Parameters:
        """An epoch in which every client takes the same batch at a time."""
        for (first, many), known_CTB in zip(cuts, known_in_cuts):
            held_CT = step(number, first, many, held_CT, known_CTB)
        if known_in_cuts:
            return held_CT
        turn = lambda batch, held: step(number, batch * size, size, held, known_in(batch * size, size))  # noqa: E731
        held_CT = jax.lax.fori_loop(0, whole if full else jnp.max(batches_C), turn, held_CT)
        return step(number, whole * size, rest, held_CT, known_in(whole * size, rest)) if full and rest else held_CT

    def apart(held_CT: Parameters) -> Parameters:
        """All epochs, each client at its own pace: when the last ones are done, the others go on without them."""

        def turn(number: Array, held_CT: Parameters) -> Parameters:
            clients = jax.tree.leaves(held_CT)[0].shape[0]
            each_C = jnp.maximum(batches_C[:clients], 1)
            first_C = number % each_C * size
            return step(number // each_C, first_C, size, held_CT, known_in(first_C, size, clients))

        def turns(number: Array, held_CT: Parameters) -> Parameters:
            """As many turns as there are epochs: a number known beforehand, and what all that are done are done after."""
            return jax.lax.fori_loop(
                0, training.epochs, lambda i, held: turn(number * training.epochs + i, held), held_CT
            )

        done: list[Parameters] = []
        begun, clients = jnp.int32(0), _fewer(len(x_CM))
        for here, left in zip(clients, [*clients[1:], 0]):
            held_CT = jax.tree.map(lambda held_C: held_C[:here], held_CT)  # noqa: B023
            until = jnp.maximum(begun, jnp.max(batches_C[left:]))
            held_CT = jax.lax.fori_loop(begun, until, turns, held_CT)
            done.insert(0, jax.tree.map(lambda held_C: held_C[left:], held_CT))  # noqa: B023
            begun = until
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *done)

    # In the span a batch is a part of what is trained, and cutting the same one for all is what is fast.
    held_CT = apart(held_CT) if not full and held_in.apart else jax.lax.fori_loop(0, training.epochs, together, held_CT)
    held_CR, held_CV = (jax.tree.map(lambda h_CT: h_CT[:, part], held_CT) for part in (slice(runs), slice(runs, None)))  # noqa: B023
    update_CR = jax.vmap(lambda held_R: jax.vmap(held_in.sent)(held_R, theta_R))(held_CR)
    of_runs = jax.vmap(held_in.norm, in_axes=(0, None, None))
    sent = Sent(update_CR, jax.vmap(of_runs)(update_CR, shared_C, x_CM))
    if personal_CV is None:
        return sent, None
    leave = lambda held_V, own_V, x_M: held_in.leave(held_V, theta_R, own_V, run_V, x_M)  # noqa: E731
    return sent, jax.vmap(leave)(held_CV, personal_CV, x_CM)


def updates_in_full(held_in: Coordinates, sent: Sent, x_CM: Array) -> Parameters:
    """Each client's updates written out, for a client who has to send them."""
    one = lambda update_R, x_M: jax.vmap(lambda u: held_in.add(jnp.ones(1), _alone(u), x_M[None]))(update_R)  # noqa: E731
    return jax.vmap(one)(sent.update_CR, x_CM)


def _alone(parameters: Parameters) -> Parameters:
    return jax.tree.map(lambda leaf: leaf[None], parameters)
