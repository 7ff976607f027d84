"""The server as an audit sees it: its own sampling, clipping, summing and noise, over canaries' updates.

Axis letters: C clients, G groups, L layers, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp import server
from fedhdp.exact import ExactRound
from fedhdp.mechanism import Mechanism, RoundParams
from fedhdp.privacy.audit.canaries import Floats32, Integers
from fedhdp.rng import noise_bytes, os_entropy, secret_generator
from fedhdp.server import Layers

CHUNK = 128  # clients whose updates are summed at a time


class ServerFunctions(NamedTuple):
    """The functions of a round, which a mutant replaces.

    Attributes:
        sample_cohort: As ``server.sample_cohort``.
        round_params: The numbers of the round.
        dense_updates: As ``server.dense_updates``.
        clip_and_sum: As ``server.clip_and_sum``.
        private_mean: As ``server.private_mean``.
        noise_key: Returns the words of the next round's key.
    """

    sample_cohort: Callable[..., Any] = server.sample_cohort
    round_params: Callable[[Mechanism], RoundParams] = lambda mechanism: mechanism.round_params
    dense_updates: Callable[..., Any] = server.dense_updates
    clip_and_sum: Callable[..., Any] = server.clip_and_sum
    private_mean: Callable[..., Any] = server.private_mean
    noise_key: Callable[[], np.ndarray] = lambda: os_entropy(2)


SOUND = ServerFunctions()


class ServerSystem:
    """Rounds by the functions of ``server.py``, or with exact arithmetic by ``exact.py``.

    Args:
        mechanism: The mechanism of the first round; groups and layers stay as they are.
        width: How many parameters each layer has.
        functions: The functions of a round.
    """

    def __init__(self, mechanism: Mechanism, width: int, functions: ServerFunctions = SOUND):
        names = mechanism.layers
        self._layers = server.make_layers(mechanism, dict.fromkeys(names, width)) if names else None
        self._parameters, self._functions = width * max(len(names), 1), functions
        ends = np.cumsum([group.clients for group in mechanism.groups])
        self._members_G = np.split(np.arange(ends[-1]), ends[:-1])

    def sample(self, mechanism: Mechanism) -> Integers:
        """The clients of a round, by secret coins."""
        rng = secret_generator(os_entropy(4).tolist())
        return np.asarray(self._functions.sample_cohort(mechanism, self._members_G, rng), np.int64)

    def release(
        self, mechanism: Mechanism, clip: Floats32, group_C: Integers, update_CP: Floats32
    ) -> tuple[Floats32, Floats32]:
        """The noised update of a round, and the next clip; the noise is from the operating system's entropy."""
        if mechanism.arithmetic == "exact":
            segments = None if self._layers is None else self._layers.segments
            sums = ExactRound(mechanism.grid_params, clip, self._parameters, segments, noise_bytes(None, 0))
            for update_P, group in zip(update_CP, group_C, strict=True):
                sums.add(update_P, int(group))
            return sums.finish()
        functions, params = self._functions, self._functions.round_params(mechanism)
        add_chunk, finish = _compile(functions, self._layers)
        starts = range(0, max(len(group_C), 1), CHUNK)
        parts = [add_chunk(params, clip, *_pad(group_C[i : i + CHUNK], update_CP[i : i + CHUNK])) for i in starts]
        total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)
        update_P, next_clip = finish(params, clip, total, functions.noise_key())
        return np.asarray(update_P), np.asarray(next_clip)


def _pad(group_C: Integers, update_CP: Floats32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows for a whole chunk, and which of them are clients."""
    missing = CHUNK - len(group_C)
    return (
        np.pad(update_CP, ((0, missing), (0, 0))),
        np.pad(group_C, (0, missing)).astype(np.int32),
        np.arange(CHUNK) < len(group_C),
    )


@lru_cache(maxsize=4)
def _compile(functions: ServerFunctions, layers: Layers | None) -> tuple[Callable, Callable]:
    """The sums over a chunk, and the noise, as compiled functions."""

    def add_chunk(params, clip, update_CP, group_C, is_participating_C):
        updates = functions.dense_updates(update_CP, layers)
        return functions.clip_and_sum(params, clip, updates, group_C, is_participating_C)

    def finish(params, clip, sums, words):
        return functions.private_mean(params, jnp.asarray(clip), sums, jax.random.wrap_key_data(words), layers)

    return jax.jit(add_chunk), jax.jit(finish)
