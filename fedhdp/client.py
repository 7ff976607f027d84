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

from fedhdp.engine.descent import descend
from fedhdp.engine.low_rank import Parametrization, direct, in_span
from fedhdp.engine.pace import apart, together
from fedhdp.errors import require
from fedhdp.mechanism import Mechanism
from fedhdp.models import Array, Model, Parameters, take


class LocalTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a client trains: epochs of minibatch gradient descent, at rates that decay over the rounds."""

    epochs: int = 25
    batch_size: int = 20
    learning_rate: float = 0.5
    personal_learning_rate: float | None = None  # None: the same
    decay: float = 1.0
    decay_every: int = 50
    personalize: bool = True
    personal_epochs: int | None = None  # of the personal model, before it rests until the next round; None: as many
    proximal: float = 0.0  # how strongly local training of the global model is pulled back to where it began (FedProx)
    whole_batches: bool = False  # leave out an epoch's last batch where it is not whole, unless it is the only one

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        if self.personal_epochs is not None:
            require(
                1 <= self.personal_epochs <= self.epochs, "personal_epochs", self.personal_epochs, "from 1 to epochs"
            )
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "finite and above 0")
        if self.personal_learning_rate is not None:
            rate = self.personal_learning_rate
            require(0 < rate < math.inf, "personal_learning_rate", rate, "finite and above 0")
        rule = f"at least 0 and below {2 / self.learning_rate:g}, or models run away at this learning rate"
        require(0 <= self.proximal * self.learning_rate < 2, "proximal", self.proximal, rule)
        require(0 < self.decay <= 1, "decay", self.decay, "above 0 and at most 1")
        require(self.decay_every >= 1, "decay_every", self.decay_every, "at least 1")

    def check(self, mechanism: Mechanism) -> None:
        """Refuse a pull so strong that each step takes a personal model further past the global one than it was off."""
        rate = self.rates(0)[1]
        for group in mechanism.groups if self.personalize else ():
            rule = f"below {2 / rate:g}, or at the personal learning rate {rate:g} personal models run away"
            require(group.pull * rate < 2, f"pull of {group.name!r}", group.pull, rule)

    def rates(self, round: int) -> tuple[float, float]:
        """The learning rates of the global and the personal model in this round, the first round being 0."""
        factor = self.decay ** (round // self.decay_every)
        return self.learning_rate * factor, (self.personal_learning_rate or self.learning_rate) * factor

    def whole_and_rest(self, examples: int) -> tuple[int, int]:
        """How many whole batches an epoch of this many examples has, and how many examples the last one of less."""
        whole, rest = divmod(examples, self.batch_size)
        return whole, 0 if self.whole_batches and whole else rest

    def batches(self, count_C: Array) -> Array:
        """How many batches of an epoch clients with this many examples have."""
        if self.whole_batches:
            return jnp.where(count_C > 0, jnp.maximum(count_C // self.batch_size, 1), 0)
        return -(-count_C // self.batch_size)


def trains_in_span(model: Model, examples: int, inputs: int) -> bool:
    """Whether the span of the examples is where to train: there are fewer of them than inputs, and the model allows it."""
    return model.head is not None and examples < inputs


def coordinates(model: Model, examples: int, inputs: int) -> Parametrization:
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


class Clients(NamedTuple):
    """What some clients train with."""

    x_CM: Array  # examples as floats, in the order in which they are trained on
    y_CM: Array
    count_C: Array  # how many examples are real
    pull_CV: Array
    key_C: Array
    gram_CMM: Array | None = None  # the examples' products with each other, if they are known


class Sent(NamedTuple):
    """The updates of some clients for each global model, in the coordinates they were trained in."""

    update_CR: Parameters
    norm_CR: Array


def client_updates(
    model: Model,
    training: LocalTraining,
    held_in: Parametrization,
    clients: Clients,
    theta_R: Parameters,
    personal_CV: Parameters | None,
    run_V: np.ndarray,
    rates: Array,
    full: bool = False,
) -> tuple[Sent, Parameters | None]:
    """ClientUpdate: each client's update of each global model, and its personal models after the round.

    ``full``: no client has any padding, so that batches are known beforehand; the results are the same.
    """
    x_CM, y_CM, count_C, pull_CV, key_C, gram_CMM = clients
    capacity, size = x_CM.shape[1], training.batch_size
    runs = jax.tree.leaves(theta_R)[0].shape[0]
    run_T = np.concatenate([np.arange(runs), run_V]).astype(int)

    # All models of a client train side by side (T): theta ← theta − η(∇f + λ(theta − anchor)), in the paper λ_global = 0.
    shared_C = jax.vmap(partial(held_in.know, theta_R))(x_CM, gram_CMM)
    enter = lambda own_V, x_M, shared: held_in.enter(theta_R, own_V, run_V, x_M, shared)  # noqa: E731
    held_CT, known_CT = jax.vmap(enter)(personal_CV, x_CM, shared_C)
    anchor_T = held_in.anchor(theta_R, run_T, capacity)
    rate_T = rates[(np.arange(len(run_T)) >= runs).astype(int)]
    pull_CT = jnp.concatenate([jnp.full((len(x_CM), runs), training.proximal), pull_CV], axis=1)
    batches_C = training.batches(count_C)

    def known(models: int, first: Any, size: int, many: int | None = None) -> Any:
        """What is known of a batch: the same for every client, or its own for each of the first ones."""
        batch = lambda known_T, first: held_in.batch(known_T, models, first, size)  # noqa: E731
        return jax.vmap(batch, in_axes=(0, _axis(first)))(take(known_CT, slice(many)), first)

    def step(epoch: Any, first: Any, size: int, held_CT: Parameters, known_CTB: Any = None) -> Parameters:
        """One batch B of the first clients' first models; a client that has no such batch rests at rate 0."""
        many, models = jax.tree.leaves(held_CT)[0].shape[:2]
        if known_CTB is None:
            known_CTB = known(models, first, size, many)

        def of_client(epoch, first, held_T, known_TB, pull_T, y_M, count, batches, key):
            key = jax.random.fold_in(jax.random.fold_in(key, epoch), first)
            y_B = jax.lax.dynamic_slice_in_dim(y_M, first, size)
            real_B = jnp.ones(size, bool) if full else first + jnp.arange(size) < count
            busy = 1.0 if full else jnp.where(first // training.batch_size < batches, 1.0, 0.0)

            def of_model(held, known_B, rate, pull, anchor):
                def f(held: Parameters) -> Array:
                    loss_B = model.loss(held_in.predict(held, known_B, first, key), y_B)
                    return jnp.sum(jnp.where(real_B, loss_B, 0.0)) / jnp.maximum(jnp.sum(real_B), 1)

                pulled = models > runs or training.proximal > 0
                return descend(f, held, rate, pull if pulled else None, anchor, held_in.wide)

            rate_of, anchor_of = busy * rate_T[:models], take(anchor_T, slice(models))
            return jax.vmap(of_model)(held_T, known_TB, rate_of, pull_T, anchor_of)

        theirs = (a_C[:many] for a_C in (pull_CT[:, :models], y_CM, count_C, batches_C, key_C))
        axes = (_axis(epoch), _axis(first), *(0,) * 7)
        return jax.vmap(of_client, in_axes=axes)(epoch, first, held_CT, known_CTB, *theirs)

    def train(held_CT: Parameters, epochs: range) -> Parameters:
        """These epochs, of as many models of each client as are given."""
        if not full and held_in.apart:
            return apart(step, held_CT, epochs, size, batches_C)
        batches, rest = training.whole_and_rest(capacity) if full else (jnp.max(batches_C), 0)
        know = partial(known, jax.tree.leaves(held_CT)[0].shape[1])
        return together(step, know, held_CT, epochs, size, batches, rest)

    # Personal models may stop before the global ones.
    all_train = training.epochs if personal_CV is None else training.personal_epochs or training.epochs
    held_CT = train(held_CT, range(all_train))
    held_CR, held_CV = (jax.tree.map(lambda h_CT: h_CT[:, part], held_CT) for part in (slice(runs), slice(runs, None)))  # noqa: B023
    if all_train < training.epochs:
        held_CR = train(held_CR, range(all_train, training.epochs))
    update_CR = jax.vmap(lambda held_R: jax.vmap(held_in.sent)(held_R, theta_R))(held_CR)
    of_runs = jax.vmap(held_in.norm, in_axes=(0, None, None))
    sent = Sent(update_CR, jax.vmap(of_runs)(update_CR, shared_C, x_CM))
    if personal_CV is None:
        return sent, None
    leave = lambda held_V, own_V, x_M: held_in.leave(held_V, theta_R, own_V, run_V, x_M)  # noqa: E731
    return sent, jax.vmap(leave)(held_CV, personal_CV, x_CM)


def updates_in_full(held_in: Parametrization, sent: Sent, x_CM: Array) -> Parameters:
    """Each client's updates written out, for a client who has to send them."""
    one = lambda update_R, x_M: jax.vmap(lambda u: held_in.add(jnp.ones(1), _alone(u), x_M[None]))(update_R)  # noqa: E731
    return jax.vmap(one)(sent.update_CR, x_CM)


def _axis(number: Any) -> int | None:
    """Whether clients each have a number of their own."""
    return 0 if jnp.ndim(number) else None


def _alone(parameters: Parameters) -> Parameters:
    return jax.tree.map(lambda leaf: leaf[None], parameters)
