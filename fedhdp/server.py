"""What the server does, the left column of the paper's Algorithm 1: sample, clip, sum, noise, weigh, move the clip.

Everything that is released is computed in this file. Its numbers come from ``Mechanism.round_params`` alone. The caller
gives the random generator of the cohort, the key of the noise, and the updates: their norms and a function that sums them.

``Sums`` can be added: over the clients of a chunk, over chunks, devices and messages. Only ``private_mean`` reads the total,
and only its result may leave the server. Everything after it is post-processing and costs no privacy. The number of refused
updates is for the server's operator and is not released.

Axis letters: C clients, G groups, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax.scipy.special import ndtri
from jax.typing import ArrayLike
from numpy.typing import NDArray

from fedhdp.errors import require
from fedhdp.mechanism import MAX_VALUE, MIN_CLIP, Mechanism, RoundParams

Array = jax.Array
IntArray = NDArray[np.integer[Any]]
OptimizerName = Literal["sgd", "adam", "yogi"]


class Sums(NamedTuple):
    """The sums over a round's updates: secret, as they have no noise yet."""

    update_P: Array  # Σ_j r_j Σ_{i∈j} clipped_i
    bits: Array  # Σ_i (b_i − ½)
    refused_G: Array  # number of updates that are not finite


def sample_cohort(mechanism: Mechanism, members_G: Sequence[IntArray], rng: np.random.Generator) -> IntArray:
    """Sample the cohort C^t: every client by its own coin, or a fixed number from each group.

    Args:
        mechanism: The groups, their sampling rates and the sampling scheme.
        members_G: The numbers of each group's clients.
        rng: A secret generator, unless no group is private.

    Returns:
        The sampled clients in ascending order.

    Raises:
        InvalidValueError: If a group does not have as many members as the mechanism states.
    """
    cohort, fixed = [], mechanism.sampling == "fixed"
    for group, members in zip(mechanism.groups, members_G, strict=True):
        rule = f"{len(members)}, the number of its members"
        require(group.clients == len(members), f"clients of {group.name!r}", group.clients, rule)
        size = mechanism.expected_cohort_size(group) if fixed else rng.binomial(group.clients, group.sampling_rate)
        cohort.append(members[rng.choice(group.clients, int(size), replace=False, shuffle=False)])
    return np.sort(np.concatenate(cohort))


class Updates(NamedTuple):
    """The updates of some clients, in whatever representation: their norms, and a function that sums them.

    Attributes:
        norm_C: Each update's norm.
        weighted_sum: Takes scale_C and returns Σ_C scale · update. An update at scale 0 is absent, even if it is NaN.
    """

    norm_C: Array
    weighted_sum: Callable[[Array], Any]


def dense_updates(update_CP: Array) -> Updates:
    """Updates that are the rows of an array."""

    def weighted_sum(scale_C: Array) -> Array:
        present_CP = jnp.where(scale_C[:, None] == 0, 0.0, update_CP)  # 0 · NaN would still be NaN
        return jnp.matmul(scale_C, present_CP, precision="highest")  # as precise as the norms

    return Updates(jnp.linalg.norm(update_CP, axis=1), weighted_sum)


def clip_and_sum(params: RoundParams, clip: Array, updates: Updates, group_C: Array, is_participating_C: Array) -> Sums:
    """Clip each update to norm S, take its bit b = [norm ≤ S], and sum both.

    Args:
        params: The numbers of the round.
        clip: The clip S of the round.
        updates: The clients' updates; none is trusted.
        group_C: Each client's group.
        is_participating_C: False for padding.

    Returns:
        The weighted sum of the clipped updates, the sum of the centred bits, and the refused updates by group.
    """
    norm_C = updates.norm_C
    counts_C = is_participating_C & jnp.isfinite(norm_C)  # a client who sends NaN or infinity is absent
    scale_C = jnp.where(counts_C, params.weight_G[group_C] * clip / jnp.maximum(norm_C, clip), 0.0)
    bit_C = jnp.where(counts_C, (norm_C <= clip) - 0.5, 0.0)
    group_CG = jax.nn.one_hot(group_C, params.weight_G.shape[0], dtype=jnp.int32)
    return Sums(updates.weighted_sum(scale_C), jnp.sum(bit_C), (is_participating_C & ~counts_C) @ group_CG)


def private_mean(params: RoundParams, clip: Array, sums: Sums, key: Array) -> tuple[Array, Array]:
    """Add the noise: all that a round releases.

    Args:
        params: The numbers of the round.
        clip: The clip S of the round, which scales the noise.
        sums: The sums over the cohort.
        key: The key of this round's noise, used once.

    Returns:
        The noised, weighted mean update, and the next round's clip.
    """
    key_update, key_bits = jax.random.split(key)

    noise_P = params.update_noise_stddev * clip * gaussian(key_update, sums.update_P.shape)
    update_P = _ratio(sums.update_P + noise_P, params.expected_weight, 0.0)

    noisy_bits = sums.bits + params.bit_noise_stddev * gaussian(key_bits)
    unclipped = _ratio(noisy_bits, params.expected_cohort_size, params.quantile - 0.5) + 0.5
    next_clip = clip * jnp.exp(-params.clip_learning_rate * (unclipped - params.quantile))
    return update_P, jnp.clip(next_clip, MIN_CLIP, MAX_VALUE)  # at clip 0 there is no noise


def gaussian(key: Array, shape: tuple[int, ...] = ()) -> Array:
    """Standard normal samples, by the inverse of their distribution from 64 random bits each.

    JAX's own use 23 bits, and have so few values beyond 4.5 standard deviations that a client shows between them.
    """
    high, low = (jax.random.bits(key, shape) for key in jax.random.split(key))
    below_half = ((high >> 1).astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32) * 2.0**-32
    return jnp.where(high & 1, 1.0, -1.0) * ndtri(below_half)


def _ratio(total: Array, denominator: ArrayLike, default: ArrayLike) -> Array:
    """A sum over a public denominator; the default where the denominator is 0."""
    positive = jnp.asarray(denominator) > 0
    return jnp.where(positive, total / jnp.where(positive, denominator, 1.0), default)


class ServerOptimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the server applies a noised update to the global model.

    Args:
        name: "sgd" adds the update, "adam" and "yogi" scale it by its history.
        learning_rate: The step size.
        momentum: Decay of the average of past updates. None: 0 for sgd, 0.9 for adam and yogi.
        average: Decay of an exponential average of the global models, which is evaluated beside them. None: no average.

    Raises:
        InvalidValueError: If a field is out of range.
    """

    name: OptimizerName = "sgd"
    learning_rate: float = 1.0
    momentum: float | None = None
    average: float | None = None

    def __post_init__(self) -> None:
        names = get_args(OptimizerName)
        require(self.name in names, "name", self.name, f"one of {', '.join(names)}")
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "finite and above 0")
        if self.momentum is not None:
            require(0 <= self.momentum < 1, "momentum", self.momentum, "at least 0 and below 1")
        if self.average is not None:
            require(0 < self.average < 1, "average", self.average, "between 0 and 1")

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation. Its gradient is minus the noised update."""
        if self.name == "sgd":
            return optax.sgd(self.learning_rate, momentum=self.momentum or None)
        optimizer = optax.adam if self.name == "adam" else optax.yogi
        momentum = 0.9 if self.momentum is None else self.momentum
        return optimizer(self.learning_rate, b1=momentum, b2=0.99, eps=1e-3)


Optimizer: TypeAlias = ServerOptimizer | optax.GradientTransformation


def average_decay(optimizer: Optimizer) -> float | None:
    """The decay of the average of global models, or None without an average."""
    return optimizer.average if isinstance(optimizer, ServerOptimizer) else None


def _transformation(optimizer: Optimizer) -> optax.GradientTransformation:
    return optimizer.transformation() if isinstance(optimizer, ServerOptimizer) else optimizer


class ServerState(NamedTuple):
    """What the server carries from round to round."""

    theta_P: Array  # the global model
    clip: Array
    optimizer: Any
    average: Any  # state of the average, or None
    refused_G: Array  # updates refused so far, by group


def initial_state(mechanism: Mechanism, optimizer: Optimizer, theta_P: Array) -> ServerState:
    """The server's state before the first round, from the initial global model."""
    decay = average_decay(optimizer)
    average = None if decay is None else optax.ema(decay).init(theta_P)
    clip, refused_G = jnp.float32(mechanism.initial_clip), jnp.zeros(len(mechanism.groups), jnp.int32)
    return ServerState(theta_P, clip, _transformation(optimizer).init(theta_P), average, refused_G)


def finish_round(optimizer: Optimizer, params: RoundParams, state: ServerState, sums: Sums, key: Array) -> ServerState:
    """Add the noise and apply the update: theta ← theta + noised update, S ← next clip. The noise's key is used once."""
    update_P, clip = private_mean(params, state.clip, sums, key)
    step_P, optimizer_state = _transformation(optimizer).update(-update_P, state.optimizer, state.theta_P)
    theta_P = state.theta_P + jnp.asarray(step_P)
    decay = average_decay(optimizer)
    average = None if decay is None else optax.ema(decay).update(theta_P, state.average)[1]
    return ServerState(theta_P, clip, optimizer_state, average, state.refused_G + sums.refused_G)


def averaged_model(optimizer: Optimizer, state: ServerState) -> Array:
    """The exponential average of the global models so far, corrected for its start; the optimizer has an average."""
    decay = average_decay(optimizer)
    assert decay is not None
    average: Array = state.average.ema / (1 - decay ** jnp.maximum(state.average.count, 1))
    return average
