"""Where randomness comes from: a stream for each purpose and round, or the operating system's entropy.

A stream is a function of the seed, the purpose and the round alone, so that a run resumes from any round. Privacy rests on
the cohorts and the noise. These come from the operating system's entropy, unless a noise seed is given: then a run is
repeatable and not private.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

MODEL, COHORT, BATCHES, NOISE = range(1, 5)  # the purposes; 0 is the data


def stream(seed: int, purpose: int, round: int) -> np.ndarray:
    """The key of one purpose in one round, as the two words of a JAX key."""
    return np.random.SeedSequence([seed, purpose, round]).generate_state(2)


def process_entropy(words: int) -> np.ndarray:
    """Words of 32 bits from the operating system's entropy, of this process alone."""
    return np.frombuffer(os.urandom(4 * words), np.uint32)


def os_entropy(words: int) -> np.ndarray:
    """Words of 32 bits from the operating system's entropy, the same in all processes of a ``jax.distributed`` run."""
    entropy = process_entropy(words)
    return entropy if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(entropy))


def secret_generator(words: Sequence[int]) -> np.random.Generator:
    """A generator for secret cohorts, from words of 32 bits that hold entropy.

    The models often show which clients without noise were sampled. These are outputs of the generator, and from its
    outputs the state of NumPy's default generator can be computed: it would reveal who else was sampled. Philox, under
    a key that is a hash of the words, has no such known attack. It is built like a block cipher, but is not proven secure.
    """
    key = hashlib.sha256(np.array(words, np.uint32).tobytes()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))


def noise_bytes(noise_seed: int | None, round: int) -> Callable[[int], bytes]:
    """The source of a round's random bytes for exact arithmetic: the operating system's entropy, or a stream of the seed."""
    return os.urandom if noise_seed is None else np.random.default_rng([noise_seed, NOISE, round]).bytes


def cohort_generator(
    round: int, noise_seed: int | None, entropy: np.ndarray | None, public_seed: int | None
) -> np.random.Generator:
    """The generator that draws a round's cohort; secret unless there is a noise seed or all groups opted out.

    Args:
        round: The round.
        noise_seed: The noise seed, if there is one.
        entropy: Secret words, from which several simulations draw the same cohorts. None: fresh ones.
        public_seed: A seed that is no secret, where all groups opted out. None: some group did not.
    """
    if noise_seed is not None:
        return np.random.default_rng([noise_seed, COHORT, round])
    if entropy is None and public_seed is not None:
        return np.random.default_rng([public_seed, COHORT, round])
    words = os_entropy(4) if entropy is None else entropy
    return secret_generator([*words.tolist(), COHORT, round])
