"""What the server does, the left column of the paper's Algorithm 1: sample, clip, sum, noise, weigh, move the clip.

What is released is made on this page. The numbers come from ``Mechanism.round_params``, nothing else; norms and weighted sums of
updates that are not written out come from ``span``, who is drawn and the noise's keys from who calls.

Sums add up: over the clients of a chunk, over chunks, over devices, over messages. Only ``private_mean`` looks at the
total, and only what it returns may leave the server; what follows it is post-processing and costs no privacy. How many
updates were refused is kept beside it for the one who runs the server, and is no part of what is released.

Axis letters: C clients, G groups, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax.scipy.special import ndtri

from fedhdp.errors import require
from fedhdp.mechanism import MAX_VALUE, MIN_CLIP, Mechanism, RoundParams

Array = jax.Array
Optimizer = Literal["add", "momentum", "adam", "yogi"]


class Sums(NamedTuple):
    """What the updates of a round add up to; never to be shown without noise."""

    update_P: Array  # Σ_j r_j Σ_{i∈j} clipped_i
    bits: Array  # Σ_i (b_i − ½)
    refused_G: Array  # how many clients sent an update that is not finite


def sample_cohort(mechanism: Mechanism, rng: np.random.Generator) -> np.ndarray:
    """C^t: every client by its own coin, or a fixed number from each group where the paper is read literally."""
    cohort, first = [], 0
    for group in mechanism.groups:
        fixed = mechanism.sampling == "fixed"
        size = mechanism.expected_cohort_size(group) if fixed else rng.binomial(group.clients, group.sampling_rate)
        cohort.append(first + rng.choice(group.clients, int(size), replace=False, shuffle=False))
        first += group.clients
    return np.sort(np.concatenate(cohort))


class Updates(NamedTuple):
    """The updates of some clients, as the server needs them: how long each is, and how to add them up."""

    norm_C: Array
    weighted_sum: Callable[
        [Array], Any
    ]  # scale_C -> Σ_C scale·update; an update at scale 0 is absent, even if it is NaN


def dense_updates(update_CP: Array) -> Updates:
    """Updates that lie there one by one."""

    def weighted_sum(scale_C: Array) -> Array:
        present_CP = jnp.where(scale_C[:, None] == 0, 0.0, update_CP)  # 0 · NaN would still be NaN
        return jnp.matmul(scale_C, present_CP, precision="highest")  # GPUs would round, and what is summed was measured

    return Updates(jnp.linalg.norm(update_CP, axis=1), weighted_sum)


def clip_and_sum(terms: RoundParams, clip: Array, updates: Updates, group_C: Array, is_participating_C: Array) -> Sums:
    """Clip each update to norm S, take its bit b = [norm ≤ S], and add up what counts; no update, no trust."""
    norm_C = updates.norm_C
    counts_C = is_participating_C & jnp.isfinite(norm_C)  # a client who sends NaN or infinity counts as absent
    scale_C = jnp.where(counts_C, terms.weight_G[group_C] * clip / jnp.maximum(norm_C, clip), 0.0)
    bit_C = jnp.where(counts_C, (norm_C <= clip) - 0.5, 0.0)
    of_group_CG = jax.nn.one_hot(group_C, terms.weight_G.shape[0], dtype=jnp.int32)
    return Sums(updates.weighted_sum(scale_C), jnp.sum(bit_C), (is_participating_C & ~counts_C) @ of_group_CG)


def private_mean(terms: RoundParams, clip: Array, sums: Sums, key: Array) -> tuple[Array, Array]:
    """The noised, weighted mean update and the next clip: all that a round releases."""
    key_update, key_bits = jax.random.split(key)

    noise_P = terms.update_noise_stddev * clip * gaussian(key_update, sums.update_P.shape)  # the clip of this round
    update_P = _share(sums.update_P + noise_P, terms.expected_weight, 0.0)

    noisy_bits = sums.bits + terms.bit_noise_stddev * gaussian(key_bits)
    unclipped = _share(noisy_bits, terms.expected_cohort, terms.quantile - 0.5) + 0.5
    next_clip = clip * jnp.exp(-terms.clip_learning_rate * (unclipped - terms.quantile))
    return update_P, jnp.clip(next_clip, MIN_CLIP, MAX_VALUE)  # at 0 there would be no noise, and who sent 0 would show


def gaussian(key: Array, shape: tuple[int, ...] = ()) -> Array:
    """Standard normal numbers, by the inverse of their distribution, from 64 random bits each.

    JAX's own have 23 bits, and so few values beyond 4.5 deviations that a client shows between them.
    """
    high, low = (jax.random.bits(one, shape) for one in jax.random.split(key))
    below_half = ((high >> 1).astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32) * 2.0**-32
    return jnp.where(high & 1, 1.0, -1.0) * ndtri(below_half)


def _share(total: Array, expected: Any, otherwise: Any) -> Array:
    """A sum over what is expected, a public constant; where nothing ever is, something else."""
    return jnp.where(expected > 0, total / jnp.where(expected > 0, expected, 1.0), otherwise)


class ServerOptimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the server takes a noised update in: plain addition unless asked, and an average of models beside it."""

    optimizer: Optimizer = "add"
    learning_rate: float = 1.0
    momentum: float = 0.9
    average: float | None = None  # decay of an exponential average of the global model

    def __post_init__(self) -> None:
        known = get_args(Optimizer)
        require(self.optimizer in known, "optimizer", self.optimizer, f"one of {', '.join(known)}")
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "finite and above 0")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "at least 0 and below 1")
        if self.average is not None:
            require(0 < self.average < 1, "average", self.average, "between 0 and 1")

    def optax(self) -> optax.GradientTransformation:
        """The optimizer; it sees the update as minus a gradient."""
        if self.optimizer == "add":
            return optax.sgd(self.learning_rate)
        if self.optimizer == "momentum":
            return optax.sgd(self.learning_rate, momentum=self.momentum)
        make = optax.adam if self.optimizer == "adam" else optax.yogi
        return make(self.learning_rate, b1=self.momentum, b2=0.99, eps=1e-3)


class ServerState(NamedTuple):
    """What the server carries from round to round."""

    theta_P: Array  # the global model
    clip: Array
    optimizer: Any
    average: Any  # state of the average, or None
    refused_G: Array  # updates refused so far, by group


def start(mechanism: Mechanism, server: ServerOptimizer, theta_P: Array) -> ServerState:
    """The server before the first round."""
    average = None if server.average is None else optax.ema(server.average).init(theta_P)
    clip = jnp.float32(mechanism.initial_clip)
    return ServerState(
        theta_P, clip, server.optax().init(theta_P), average, jnp.zeros(len(mechanism.groups), jnp.int32)
    )


def finish_round(
    server: ServerOptimizer, terms: RoundParams, state: ServerState, sums: Sums, key: Array
) -> ServerState:
    """theta ← theta + noised update, S ← next clip."""
    update_P, clip = private_mean(terms, state.clip, sums, key)
    step_P, optimizer = server.optax().update(-update_P, state.optimizer, state.theta_P)
    theta_P = state.theta_P + step_P
    average = None if server.average is None else optax.ema(server.average).update(theta_P, state.average)[1]
    return ServerState(theta_P, clip, optimizer, average, state.refused_G + sums.refused_G)


def averaged_model(server: ServerOptimizer, state: ServerState) -> Array:
    """The exponential average of the global models so far, its start made up for."""
    assert server.average is not None
    return state.average.ema / (1 - server.average ** jnp.maximum(state.average.count, 1))
