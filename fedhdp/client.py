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
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import optax

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism
from fedhdp.models import Array, Parameters
from fedhdp.optimizers import OptimizerConfig, as_optimizer, as_schedule, value_at

LEARNING_RATE = 0.5  # of plain SGD, where none is given
MAX_COUNT = 10**6  # epochs, examples of a batch
UNROLLED = 4  # the largest number of batches in an epoch that are compiled one by one


class LocalTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a client trains: epochs of minibatches, by gradient descent or another optimizer of optax.

    Gradient descent is ``learning_rate`` with ``decay``. An ``optimizer`` has a learning rate of its own; its schedule
    counts rounds, and the rate is constant within a round. Its state starts anew in every round at every client.

    Args:
        epochs: Epochs in each round.
        batch_size: Examples in a batch.
        learning_rate: The rate of gradient descent on the global model; by default 0.5. None with an optimizer.
        personal_learning_rate: The rate of the personal model; by default that of the global model. With an
            OptimizerConfig it may be a schedule.
        decay: Both rates are multiplied by it every ``decay_every`` rounds.
        decay_every: Rounds between two decays.
        personalize: Whether clients have personal models.
        personal_epochs: Epochs of the personal model in each round, which may be more or fewer; by default ``epochs``.
        proximal: The pull of the global model towards its start (FedProx).
        drop_remainder: Whether an epoch leaves out a last batch that is incomplete, unless it is the only one.
        optimizer: An OptimizerConfig, its table or any optax transformation, whose rate is its own. None: gradient descent.

    Raises:
        InvalidValueError: If a field is out of its range.
    """

    epochs: int = 25
    batch_size: int = 20
    learning_rate: float | None = None
    personal_learning_rate: Any = None
    decay: float = 1.0
    decay_every: int = 50
    personalize: bool = True
    personal_epochs: int | None = None
    proximal: float = 0.0
    drop_remainder: bool = False
    optimizer: Any = None

    def __post_init__(self) -> None:
        for field in ("epochs", "batch_size", "decay_every"):  # the engine counts steps in 32 bits
            number = getattr(self, field)
            require(1 <= number <= MAX_COUNT, field, number, f"between 1 and {MAX_COUNT:,}")
        if self.personal_epochs is not None:
            require(self.personal_epochs >= 1, "personal_epochs", self.personal_epochs, "at least 1")
        require(0 < self.decay <= 1, "decay", self.decay, "above 0 and at most 1")
        self._check_rates()
        require(0 <= self.proximal < math.inf, "proximal", self.proximal, "finite and at least 0")
        if (rates := self._sgd_rates()) is not None:
            rule = f"at least 0 and below {2 / rates[0]:g}, or training diverges at this learning rate"
            require(self.proximal * rates[0] < 2, "proximal", self.proximal, rule)

    def _check_rates(self) -> None:
        optimizer = as_optimizer(self.optimizer)
        msgspec.structs.force_setattr(self, "optimizer", optimizer)
        rate, personal = self.learning_rate, as_schedule(self.personal_learning_rate, "personal_learning_rate")
        if optimizer is not None:
            rule = "left out where the optimizer has a learning rate"
            require(rate is None, "learning_rate", rate, rule)
            require(self.decay == 1, "decay", self.decay, rule)
        elif rate is not None:
            require(0 < rate < math.inf, "learning_rate", rate, "finite and above 0")
        if isinstance(optimizer, OptimizerConfig):
            decay = optimizer.get("weight_decay", 0.0)
            require(isinstance(decay, int | float), "optimizer.weight_decay", decay, "a number in local training")
        elif optimizer is not None:
            require(personal is None, "personal_learning_rate", personal, "left out where the optimizer is of optax")
        if personal is not None and (optimizer is None or not callable(getattr(personal, "function", personal))):
            valid = isinstance(personal, int | float) and 0 < personal < math.inf
            require(valid, "personal_learning_rate", personal, "finite and above 0")
        msgspec.structs.force_setattr(self, "personal_learning_rate", personal)

    def check(self, mechanism: Mechanism) -> None:
        """Refuse a pull at which gradient descent moves personal models past the global one, further with each step.

        Raises:
            InvalidValueError: If a group's pull is too large for the personal learning rate.
        """
        rates = self._sgd_rates()
        if rates is None or not self.personalize:
            return
        for group in mechanism.groups:
            rule = f"below {2 / rates[1]:g}, or personal models diverge at the personal learning rate {rates[1]:g}"
            require(group.pull * rates[1] < 2, f"pull of {group.name!r}", group.pull, rule)

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is the gradient times the learning rate."""
        return self.optimizer is None or (isinstance(self.optimizer, OptimizerConfig) and self.optimizer.is_plain_sgd)

    def _sgd_rates(self) -> tuple[float, float] | None:
        """The rates of plain SGD before any decay; None for schedules and other optimizers."""
        if not self.is_plain_sgd:
            return None
        rate = self.optimizer["learning_rate"] if self.optimizer else self.learning_rate or LEARNING_RATE
        personal = self.personal_learning_rate or rate
        if isinstance(rate, int | float) and isinstance(personal, int | float):
            return rate, personal
        return None

    def rates(self, round: int) -> tuple[float, float]:
        """The learning rates of the global and the personal model in this round, the first round being 0.

        They are 1 where the optimizer is an optax transformation, which has its own.
        """
        if self.optimizer is None:
            rate, factor = self.learning_rate or LEARNING_RATE, self.decay ** (round // self.decay_every)
            return rate * factor, (self.personal_learning_rate or rate) * factor
        if not isinstance(self.optimizer, OptimizerConfig):
            return 1.0, 1.0
        rate, personal = self.optimizer.rate(round), self.personal_learning_rate
        return rate, rate if personal is None else value_at(personal, round, "personal_learning_rate")

    def transformation(self, rate: Any) -> optax.GradientTransformation:
        """The optax transformation of a round with this learning rate."""
        if isinstance(self.optimizer, OptimizerConfig):
            return self.optimizer.transformation(rate)
        return optax.sgd(rate) if self.optimizer is None else self.optimizer

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
        rests = index >= self.own_batches
        return batch._replace(key=key, rests=rests if self.unrolled else rests | (epoch >= self.epochs.stop))


class TrainedModel(NamedTuple):
    """A model in training, and the state of its optimizer."""

    theta: Parameters
    state: Any


def local_train(
    predict: Callable[[Parameters, Batch], Array],
    loss: Callable[[Array, Array], Array],
    start: TrainedModel,
    anchor: Parameters,
    pull: Array | float,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
) -> TrainedModel:
    """Train one model of one client by an optimizer that gets its gradient and a pull towards an anchor.

    Plain SGD at the rate η steps as Algorithm 1 has it: θ ← θ − η(∇f + λ(θ − anchor)).

    Args:
        predict: From parameters and a batch to the model's outputs.
        loss: From outputs and targets to the loss of each example.
        start: The parameters to begin with, and the optimizer's state.
        anchor: The parameters that the pull is towards: the global model of the round.
        pull: λ; 0 for a global model, or FedProx's.
        optimizer: The optax transformation, with the round's learning rate.
        schedule: The client's batches. Where it rests, parameters and state stay.

    Returns:
        The trained parameters and the optimizer's state.
    """

    def f(theta: Parameters, batch: Batch) -> Array:
        loss_B = loss(predict(theta, batch), batch.y_B)
        return jnp.sum(jnp.where(batch.real_B, loss_B, 0.0)) / jnp.maximum(jnp.sum(batch.real_B), 1)

    def step(model: TrainedModel, batch: Batch) -> TrainedModel:
        theta, gradient = model.theta, jax.grad(f)(model.theta, batch)
        gradient = jax.tree.map(lambda g, theta, anchor: g + pull * (theta - anchor), gradient, theta, anchor)
        change, state = optimizer.update(gradient, model.state, theta)
        return _unless(batch.rests, model, TrainedModel(optax.apply_updates(theta, change), state))

    return TrainedModel(*jax.lax.fori_loop(0, schedule.turns, lambda n, m: reduce(step, schedule.turn(n), m), start))


def _unless(rests: Array | bool, model: TrainedModel, moved: TrainedModel) -> TrainedModel:
    """The model after the step, unless the client rests."""
    return moved if rests is False else TrainedModel(*jax.tree.map(partial(jnp.where, rests), model, moved))
