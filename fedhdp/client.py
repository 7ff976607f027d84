"""What one client does with one model: the right column of the paper's Algorithm 1.

| Algorithm 1, at client c_j                  | here                                                                |
| ------------------------------------------- | ------------------------------------------------------------------- |
| batch the client's data D_j                 | ``shuffle`` once a round, then ``Schedule``                         |
| the global model: θ ← θ⁰, then descent      | ``local_train`` with start = anchor = θ⁰ and pull 0 (FedProx: more) |
| the personal model: θ_j, pulled towards θ⁰  | ``local_train`` with start = θ_j, anchor = θ⁰ and pull λ_j          |
| Δθ, its norm, the clip and the bit b        | ``engine/low_rank.py`` (``delta``) and ``server.clip_and_sum``      |

The engine maps ``local_train`` over the models of a client and over clients; Flower's client does the same with itself.

Axis letters: M examples of the client (padded), B examples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism
from fedhdp.models import Array, Parameters

UNROLLED = 4  # the largest number of batches in an epoch that are compiled one by one


class LocalTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a client trains: epochs of minibatch gradient descent, at rates that decay over the rounds.

    Args:
        epochs: Epochs in each round.
        batch_size: Examples in a batch.
        learning_rate: The rate of the global model.
        personal_learning_rate: The rate of the personal model; by default that of the global model.
        decay: Both rates are multiplied by it every ``decay_every`` rounds.
        decay_every: Rounds between two decays.
        personalize: Whether clients have personal models.
        personal_epochs: Epochs of the personal model in each round; by default as many as ``epochs``.
        proximal: The pull of the global model towards its start (FedProx).
        drop_remainder: Whether an epoch leaves out a last batch that is incomplete, unless it is the only one.

    Raises:
        InvalidValueError: If a field is out of its range.
    """

    epochs: int = 25
    batch_size: int = 20
    learning_rate: float = 0.5
    personal_learning_rate: float | None = None
    decay: float = 1.0
    decay_every: int = 50
    personalize: bool = True
    personal_epochs: int | None = None
    proximal: float = 0.0
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        if self.personal_epochs is not None:
            valid = 1 <= self.personal_epochs <= self.epochs
            require(valid, "personal_epochs", self.personal_epochs, f"between 1 and epochs ({self.epochs})")
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "finite and above 0")
        if self.personal_learning_rate is not None:
            rate = self.personal_learning_rate
            require(0 < rate < math.inf, "personal_learning_rate", rate, "finite and above 0")
        rule = f"at least 0 and below {2 / self.learning_rate:g}, or training diverges at this learning rate"
        require(0 <= self.proximal * self.learning_rate < 2, "proximal", self.proximal, rule)
        require(0 < self.decay <= 1, "decay", self.decay, "above 0 and at most 1")
        require(self.decay_every >= 1, "decay_every", self.decay_every, "at least 1")

    def check(self, mechanism: Mechanism) -> None:
        """Refuse a pull at which personal models overshoot the global one further with each step.

        Raises:
            InvalidValueError: If a group's pull is too large for the personal learning rate.
        """
        rate = self.rates(0)[1]
        for group in mechanism.groups if self.personalize else ():
            rule = f"below {2 / rate:g}, or personal models diverge at the personal learning rate {rate:g}"
            require(group.pull * rate < 2, f"pull of {group.name!r}", group.pull, rule)

    def rates(self, round: int) -> tuple[float, float]:
        """The learning rates of the global and the personal model in this round, the first round being 0."""
        factor = self.decay ** (round // self.decay_every)
        return self.learning_rate * factor, (self.personal_learning_rate or self.learning_rate) * factor

    def batches(self, count: Any) -> Any:
        """The number of batches of an epoch over so many examples; an int for an int, an array for an array."""
        if self.drop_remainder:
            return count // self.batch_size + ((count > 0) & (count < self.batch_size))
        return -(-count // self.batch_size)


def scale_inputs(x: Array, input_scale: float | None) -> Array:
    """Inputs as the model gets them: scaled floats, or without a scale floats as floats and integers as integers."""
    if input_scale is not None:
        return jnp.multiply(x.astype(jnp.float32), jnp.float32(input_scale))
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def shuffle(key: Array, count: Array | int, capacity: int) -> Array:
    """A random order of ``count`` examples, padded to the capacity; the examples' order is the same for every capacity."""
    ticket_M = jax.random.bits(key, (capacity,)) >> 1  # the first ones do not depend on the capacity
    return jnp.argsort(jnp.where(jnp.arange(capacity) < count, ticket_M, jnp.uint32(0xFFFFFFFF)))


class Batch(NamedTuple):
    """Neighbouring examples of a client."""

    x_B: Any
    y_B: Array
    real_B: Array  # False: padding, or an example of another batch
    first: Array | int  # the number of the first example
    key: Array  # for dropout
    rests: Array | bool = False  # the client does not have this batch and takes no step


class ClientData(NamedTuple):
    """One client's examples in the order of ``shuffle``, and its random key of the round."""

    x_M: Any  # inputs, or what a parametrization has precomputed for them: a pytree of arrays [M, ...]
    y_M: Array
    num_examples: Array | int  # without padding; an int is known at compile time
    key: Array

    def batch(self, first: Array | int, size: int) -> Batch:
        """The batch from this example on; one that exceeds the array is read from its end and masked."""
        begin = jnp.minimum(first, len(self.y_M) - size)
        x_B, y_B = jax.tree.map(lambda a_M: jax.lax.dynamic_slice_in_dim(a_M, begin, size), (self.x_M, self.y_M))
        row_B = begin + jnp.arange(size)
        return Batch(x_B, y_B, (row_B >= first) & (row_B < self.num_examples), begin, self.key)


class Schedule:
    """The batches that a client takes, turn by turn.

    Step n is batch n mod ``batches`` of epoch n div ``batches``, and a client rests in a step that it does not have. So
    many clients train side by side, with one number of batches for all (lockstep) or each with its own (ragged). A turn
    is one step; where an epoch has few batches, all known at compile time, it is an epoch, whose slices are taken once.

    Args:
        data: The client's examples.
        training: Batch size, and the rule for incomplete batches.
        epochs: The epochs to train.
        batches: The number of batches in an epoch; by default the client's own.
        steps: The first step and the number of steps; by default all steps of all epochs.
    """

    def __init__(
        self,
        data: ClientData,
        training: LocalTraining,
        epochs: range,
        batches: Array | int | None = None,
        steps: tuple[Array | int, int] | None = None,
    ):
        self.data, self.epochs, examples = data, epochs, len(data.y_M)
        self.own_batches, self.size = training.batches(data.num_examples), min(training.batch_size, examples)
        self.batches = self.own_batches if batches is None else batches
        self.unrolled: list[Batch] | None = None
        self.first: Array | int = 0
        self.turns: Array | int = len(epochs)
        if isinstance(self.batches, int) and self.batches <= UNROLLED and steps is None:
            begins = [index * self.size for index in range(self.batches)]
            self.unrolled = [data.batch(begin, min(self.size, examples - begin)) for begin in begins]
        else:
            self.first, self.turns = steps or (0, len(epochs) * self.batches)

    def turn(self, number: Array) -> list[Batch]:
        """The batches of this turn."""
        if self.unrolled is not None:
            epoch = self.epochs.start + number
            return [self._at(batch, epoch, index) for index, batch in enumerate(self.unrolled)]
        step, batches = self.first + number, jnp.maximum(self.batches, 1)
        epoch, index = self.epochs.start + step // batches, step % batches
        return [self._at(self.data.batch(index * self.size, self.size), epoch, index)]

    def _at(self, batch: Batch, epoch: Array, index: Array | int) -> Batch:
        """The batch with the random key of its step."""
        key = jax.random.fold_in(jax.random.fold_in(batch.key, epoch), index * self.size)
        return batch._replace(key=key, rests=(epoch >= self.epochs.stop) | (index >= self.own_batches))


def local_train(
    predict: Callable[[Parameters, Batch], Array],
    loss: Callable[[Array, Array], Array],
    start: Parameters,
    anchor: Parameters,
    pull: Array | float,
    rate: Array | float,
    schedule: Schedule,
) -> Parameters:
    """Train one model of one client by minibatch gradient descent that is pulled towards an anchor.

    Args:
        predict: From parameters and a batch to the model's outputs.
        loss: From outputs and targets to the loss of each example.
        start: The parameters to begin with.
        anchor: The parameters that the pull is towards: the global model of the round.
        pull: λ; 0 for a global model, or FedProx's.
        rate: η.
        schedule: The client's batches.

    Returns:
        The trained parameters.
    """

    def f(theta: Parameters, batch: Batch) -> Array:
        loss_B = loss(predict(theta, batch), batch.y_B)
        return jnp.sum(jnp.where(batch.real_B, loss_B, 0.0)) / jnp.maximum(jnp.sum(batch.real_B), 1)

    def descend(theta: Parameters, batch: Batch) -> Parameters:
        def of_leaf(theta: Array, gradient: Array, anchor: Array) -> Array:
            return theta - eta * (gradient + pull * (theta - anchor))

        eta = jnp.where(batch.rests, 0.0, rate)
        return jax.tree.map(of_leaf, theta, jax.grad(f)(theta, batch), anchor)

    return jax.lax.fori_loop(0, schedule.turns, lambda n, theta: reduce(descend, schedule.turn(n), theta), start)
