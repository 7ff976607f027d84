"""The sum of a round's updates, one after the other as they are read, with either arithmetic.

The noise, or the key that it follows from, is drawn when a round is started, before any reply is read.

Axis letters: P parameters, G groups.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp import server
from fedhdp.exact import ExactRound
from fedhdp.mechanism import Mechanism, RoundParams
from fedhdp.rng import NOISE, noise_bytes, os_entropy, stream
from fedhdp.server import Layers, ServerOptimizer, ServerState, Sums


class Aggregation(Protocol):
    """The clipped updates of a round so far."""

    @property
    def refused_G(self) -> np.ndarray:
        """How many updates are not finite, by group."""

    def add(self, update_P: np.ndarray, group: int) -> None:
        """Clip the update of a client of a group, and add it."""

    def finish(self, optimizer: ServerOptimizer) -> ServerState:
        """Add the noise, and apply the update to the server's state."""


def start_aggregation(
    mechanism: Mechanism, state: ServerState, layers: Layers | None, noise_seed: int | None, round: int
) -> Aggregation:
    """Start the sum of a round, and draw its noise.

    Args:
        mechanism: The mechanism in force.
        state: The server's state before the round.
        layers: The layers, where each has a clip.
        noise_seed: For tests only: with a seed nothing is private. None: the operating system's entropy.
        round: The completed rounds, which a seed's noise depends on.
    """
    if mechanism.arithmetic == "exact":
        return ExactSum(mechanism, state, layers, noise_seed, round)
    return FloatSum(mechanism, state, layers, noise_key(noise_seed, round))


def noise_key(noise_seed: int | None, round: int) -> jax.Array:
    """The key of a round's noise, with single precision."""
    words = os_entropy(2) if noise_seed is None else stream(noise_seed, NOISE, round)
    return jax.random.wrap_key_data(jnp.asarray(words))


class FloatSum:
    """The sum in single precision."""

    def __init__(self, mechanism: Mechanism, state: ServerState, layers: Layers | None, key: jax.Array):
        self._params, self._state, self._layers, self._key = mechanism.round_params, state, layers, key
        refused_G = jnp.zeros(len(mechanism.groups), jnp.int32)
        self._sums = Sums(jnp.zeros_like(state.theta_P), jnp.zeros_like(state.clip), refused_G)

    @property
    def refused_G(self) -> np.ndarray:
        """How many updates have a norm that is not finite."""
        return np.asarray(self._sums.refused_G)

    def add(self, update_P: np.ndarray, group: int) -> None:
        """Clip the update of a client of a group, and add it."""
        clipped = _clip_and_sum(self._params, self._state.clip, update_P, np.int32(group), layers=self._layers)
        self._sums = jax.tree.map(jnp.add, self._sums, clipped)

    def finish(self, optimizer: ServerOptimizer) -> ServerState:
        """Add the noise, and apply the update to the server's state."""
        return _finish_round(optimizer, self._params, self._state, self._sums, self._key, layers=self._layers)


class ExactSum:
    """The sum in integers."""

    def __init__(
        self, mechanism: Mechanism, state: ServerState, layers: Layers | None, noise_seed: int | None, round: int
    ):
        segments, self._state = None if layers is None else layers.segments, state
        random_bytes, clip = noise_bytes(noise_seed, round), np.asarray(state.clip)
        self._sum = ExactRound(mechanism.grid_params, clip, state.theta_P.size, segments, random_bytes)

    @property
    def refused_G(self) -> np.ndarray:
        """How many updates are not finite."""
        return self._sum.refused_G

    def add(self, update_P: np.ndarray, group: int) -> None:
        """Clip and round the update of a client of a group, and add it."""
        self._sum.add(update_P, group)

    def finish(self, optimizer: ServerOptimizer) -> ServerState:
        """Add the noise, and apply the update to the server's state."""
        return _apply_update(optimizer, self._state, *self._sum.finish(), self.refused_G)


@partial(jax.jit, static_argnames="layers")
def _clip_and_sum(
    params: RoundParams, clip: jax.Array, update_P: jax.Array, group: jax.Array, layers: Layers | None
) -> Sums:
    """One client's clipped, weighted update and its clip bits."""
    updates = server.dense_updates(update_P[None], layers)
    return server.clip_and_sum(params, clip, updates, group[None], jnp.array([True]))


_finish_round = jax.jit(server.finish_round, static_argnums=0, static_argnames="layers")
_apply_update = jax.jit(server.apply_update, static_argnums=0)
