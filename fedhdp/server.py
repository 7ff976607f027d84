"""What the server does, the left column of the paper's Algorithm 1: sample, clip, sum, noise, weigh, move the clip.

Everything that is released is computed in this file. Its numbers come from ``Mechanism.round_params`` alone. The caller
gives the random generator of the cohort, the key of the noise, and the updates: their norms and a function that sums them.
With exact arithmetic clipping, summing and noise are those of ``exact.py``; the rest is the same.

``Sums`` can be added: over the clients of a chunk, over chunks, devices and messages. Only ``private_mean`` reads the total,
and only its result may leave the server. Everything after it is post-processing and costs no privacy. The number of refused
updates is for the server's operator and is not released.

With a ``LayerClip`` the parameters of each layer are clipped by themselves, and there are a clip and a bit for each layer.

Axis letters: C clients, G groups, L layers, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax.scipy.special import ndtri
from jax.typing import ArrayLike
from numpy.typing import NDArray

from fedhdp.clips import MAX_CLIP, MIN_CLIP
from fedhdp.errors import require
from fedhdp.mechanism import FLOAT32_UNIT_ROUNDOFF, Mechanism, RoundParams
from fedhdp.optimizers import OptimizerConfig, as_optimizer

Array = jax.Array
IntArray = NDArray[np.integer[Any]]


class Sums(NamedTuple):
    """The sums over a round's updates: secret, as they have no noise yet."""

    update_P: Array  # Σ_j r_j Σ_{i∈j} clipped_i
    bits: Array  # Σ_i (b_i − ½), of the shape of the clip
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
        norm_C: Each update's norm; with a clip for each layer, norm_CL.
        weighted_sum: Takes scale_C, or scale_CL, and returns Σ_C scale · update. An update at scale 0 is absent, even if it
            is NaN.
    """

    norm_C: Array
    weighted_sum: Callable[[Array], Any]


def dense_updates(update_CP: Array, layers: Layers | None = None) -> Updates:
    """Updates that are the rows of an array, with one norm each or, where there are layers, one for each layer."""
    if layers is None:
        norm_C = round_up_norm(jnp.linalg.norm(update_CP, axis=1), update_CP.shape[1])
        return Updates(norm_C, partial(_weighted_sum, update_CP))
    parts = [(layer, update_CP[:, columns]) for layer, columns in layers.segments]

    def norm_of_layer(layer: int) -> Array:
        layer_CP = jnp.concatenate([part_CP for of_part, part_CP in parts if of_part == layer], axis=1)
        return round_up_norm(jnp.linalg.norm(layer_CP, axis=1), layer_CP.shape[1])

    def weighted_sum(scale_CL: Array) -> Array:
        return jnp.concatenate([_weighted_sum(part_CP, scale_CL[:, layer]) for layer, part_CP in parts])

    return Updates(jnp.stack([norm_of_layer(layer) for layer in range(layers.number)], axis=1), weighted_sum)


def sum_roundings(size: int) -> float:
    """How many roundings a term of a sum of so many takes part in, at most: XLA sums in trees, of 32 terms on processors."""
    return 2 * math.sqrt(size) + 32


def round_up_norm(norm: Array, size: int) -> Array:
    """A bound on the norm of so many parameters and on its scaling to the clip, from the norm in single precision."""
    return norm * (1 + (sum_roundings(size) / 2 + 8) * FLOAT32_UNIT_ROUNDOFF)


def _weighted_sum(update_CP: Array, scale_C: Array) -> Array:
    present_CP = jnp.where(scale_C[:, None] == 0, 0.0, update_CP)  # 0 · NaN would still be NaN
    total_P: Array = jnp.matmul(scale_C, present_CP, precision="highest")  # as precise as the norms
    return total_P


def clip_and_sum(params: RoundParams, clip: Array, updates: Updates, group_C: Array, is_participating_C: Array) -> Sums:
    """Clip each update to norm S, take its bit b = [norm ≤ S], and sum both.

    Args:
        params: The numbers of the round.
        clip: The clip S of the round, or the clip of each layer.
        updates: The clients' updates; none is trusted.
        group_C: Each client's group.
        is_participating_C: False for padding.

    Returns:
        The weighted sum of the clipped updates, the sum of the centred bits, and the refused updates by group.
    """
    norm_C = updates.norm_C
    axes = tuple(range(1, norm_C.ndim))  # of layers, where each has a clip
    finite_C = jnp.all(jnp.isfinite(norm_C), axis=axes)
    counts_C = is_participating_C & finite_C  # a client who sends NaN or infinity is absent, with all layers
    weight_C, present_C = (jnp.expand_dims(a_C, axes) for a_C in (params.weight_G[group_C], counts_C))
    scale_C = jnp.where(present_C, weight_C * clip / jnp.maximum(norm_C, clip), 0.0)
    bit_C = jnp.where(present_C, (norm_C <= clip) - 0.5, 0.0)
    group_CG = jax.nn.one_hot(group_C, params.weight_G.shape[0], dtype=jnp.int32)
    refused_G = (is_participating_C & ~counts_C) @ group_CG
    return Sums(updates.weighted_sum(scale_C), jnp.sum(bit_C, axis=0), refused_G)


def private_mean(
    params: RoundParams, clip: Array, sums: Sums, key: Array, layers: Layers | None = None
) -> tuple[Array, Array]:
    """Add the noise: all that a round releases.

    Args:
        params: The numbers of the round.
        clip: The clip S of the round, which scales the noise, or the clip of each layer.
        sums: The sums over the cohort.
        key: The key of this round's noise, used once.
        layers: The layers, where each has a clip.

    Returns:
        The noised, weighted mean update, and the next round's clip.
    """
    key_update, key_bits = jax.random.split(key)

    clip_P = clip if layers is None else layers.by_parameter(clip)
    noise_P = params.update_noise_stddev * clip_P * gaussian(key_update, sums.update_P.shape)
    update_P = _ratio(sums.update_P + noise_P, params.expected_weight, 0.0)

    noisy_bits = sums.bits + params.bit_noise_stddev * gaussian(key_bits, clip.shape)
    unclipped = _ratio(noisy_bits, params.expected_cohort_size, params.quantile - 0.5) + 0.5
    next_clip = clip * jnp.exp(-params.clip_learning_rate * (unclipped - params.quantile))
    return update_P, jnp.clip(next_clip, MIN_CLIP, MAX_CLIP)  # at clip 0 there is no noise


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
        optimizer: An OptimizerConfig, its table or any optax transformation. Its gradient is minus the noised update, and
            its schedules count rounds. It sees the model as one vector. None: the update is added.
        average: Decay of an exponential average of the global models, which is evaluated beside them. None: no average.

    Raises:
        InvalidValueError: If a field is out of range.
    """

    optimizer: Any = None
    average: float | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "optimizer", as_optimizer(self.optimizer))
        if self.average is not None:
            require(0 < self.average < 1, "average", self.average, "between 0 and 1")

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation."""
        if self.optimizer is None:
            return optax.sgd(1.0)
        return self.optimizer.transformation() if isinstance(self.optimizer, OptimizerConfig) else self.optimizer


Optimizer: TypeAlias = ServerOptimizer | OptimizerConfig | optax.GradientTransformation


def as_server_optimizer(optimizer: Optimizer | None) -> ServerOptimizer:
    """The server's optimizer without an average, unless it is a ServerOptimizer already."""
    return optimizer if isinstance(optimizer, ServerOptimizer) else ServerOptimizer(optimizer)


class ServerState(NamedTuple):
    """What the server carries from round to round."""

    theta_P: Array  # the global model
    clip: Array  # a number, or one for each layer
    optimizer: Any
    average: Any  # state of the average, or None
    refused_G: Array  # updates refused so far, by group


def initial_state(mechanism: Mechanism, optimizer: ServerOptimizer, theta_P: Array) -> ServerState:
    """The server's state before the first round, from the initial global model."""
    average = None if optimizer.average is None else optax.ema(optimizer.average).init(theta_P)
    clip, refused_G = jnp.asarray(mechanism.initial_clip), jnp.zeros(len(mechanism.groups), jnp.int32)
    return ServerState(theta_P, clip, optimizer.transformation().init(theta_P), average, refused_G)


def finish_round(
    optimizer: ServerOptimizer,
    params: RoundParams,
    state: ServerState,
    sums: Sums,
    key: Array,
    layers: Layers | None = None,
) -> ServerState:
    """Add the noise and apply the update: theta ← theta + noised update, S ← next clip. The noise's key is used once."""
    update_P, clip = private_mean(params, state.clip, sums, key, layers)
    return apply_update(optimizer, state, update_P, clip, sums.refused_G)


def apply_update(
    optimizer: ServerOptimizer, state: ServerState, update_P: Array, clip: Array, refused_G: Array
) -> ServerState:
    """Move the global model by a noised update, and take over the next clip.

    Args:
        optimizer: The server's optimizer.
        state: The state before the round.
        update_P: The noised update.
        clip: The next round's clip, or clips.
        refused_G: The updates that the round refused, by group.
    """
    step_P, optimizer_state = optimizer.transformation().update(-update_P, state.optimizer, state.theta_P)
    theta_P = state.theta_P + jnp.asarray(step_P)
    average = None if optimizer.average is None else optax.ema(optimizer.average).update(theta_P, state.average)[1]
    return ServerState(theta_P, clip, optimizer_state, average, state.refused_G + refused_G)


def averaged_model(optimizer: ServerOptimizer, state: ServerState) -> Array:
    """The exponential average of the global models so far, corrected for its start; the optimizer has an average."""
    assert optimizer.average is not None
    average: Array = state.average.ema / (1 - optimizer.average ** jnp.maximum(state.average.count, 1))
    return average


class Layers(NamedTuple):
    """The layers of a model that are clipped one by one: its arrays of parameters in order, with the layer of each.

    Attributes:
        layer_of: The number of each array's layer, in the order of `Mechanism.layers`.
        sizes: How many parameters each array has.
    """

    layer_of: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def number(self) -> int:
        """The number of layers."""
        return max(self.layer_of) + 1

    @property
    def segments(self) -> list[tuple[int, slice]]:
        """A row of all parameters in parts that belong to one layer each: the layer's number, and the columns."""
        ends = list(accumulate(self.sizes))
        parts = [(layer, end - size, end) for layer, size, end in zip(self.layer_of, self.sizes, ends, strict=True)]
        grouped = [(layer, list(of_layer)) for layer, of_layer in groupby(parts, key=lambda part: part[0])]
        return [(layer, slice(of_layer[0][1], of_layer[-1][2])) for layer, of_layer in grouped]

    def by_parameter(self, value_L: Array) -> Array:
        """The value of each parameter's layer."""
        parts = [jnp.broadcast_to(value_L[layer], columns.stop - columns.start) for layer, columns in self.segments]
        return jnp.concatenate(parts)


def make_layers(mechanism: Mechanism, sizes: Mapping[str, int]) -> Layers | None:
    """The layer of every array of a model's parameters, or None where the mechanism has a flat clip.

    Args:
        mechanism: The mechanism.
        sizes: How many parameters each array has, by its path, in the order of a row of all parameters.

    Raises:
        InvalidValueError: If an array is in no layer or in several, or a layer has no parameters.
    """
    names = mechanism.layers
    if not names:
        return None
    layer_of = []
    for path in sizes:
        of_path = [name for name in names if f"{path}/".replace(".", "/").startswith(f"{name}/".replace(".", "/"))]
        rule = f"such that the parameter {path!r} is in exactly one"
        require(len(of_path) == 1, "clip.layers", of_path or list(names), rule)
        layer_of.append(names.index(of_path[0]))
    for number, name in enumerate(names):
        rule = f"the path of a parameter or the beginning of several ({', '.join(sizes)})"
        require(number in layer_of, "clip.layers", name, rule)
    return Layers(tuple(layer_of), tuple(sizes.values()))
