"""Where randomness comes from: a stream of numbers for each purpose, or the operating system's entropy.

A stream is a function of the seed and the round alone, so that a run resumes from any round. What privacy rests on,
cohorts and noise, comes from the operating system's entropy unless a noise seed is given, which makes a run repeatable
and not private.
"""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

MODEL, COHORT, BATCHES, NOISE = range(1, 5)  # the purposes; 0 is the data's


def stream(seed: int, purpose: int, round: int) -> np.ndarray:
    """The key of one purpose in one round, as the two words that JAX's generator takes."""
    return np.random.SeedSequence([seed, purpose, round]).generate_state(2)


def os_entropy(words: int) -> np.ndarray:
    """Words from the operating system's entropy; one draw for all processes that compute with them."""
    drawn = np.frombuffer(os.urandom(4 * words), np.uint32)
    return drawn if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(drawn))
