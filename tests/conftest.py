"""Small populations and mechanisms that the tests share."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest

from fedhdp.data import FederatedData, examples
from fedhdp.mechanism import AdaptiveClip, Mechanism, PrivacyGroup

# Tests compile the same small programs in many processes: they share what is compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "fedhdp-tests-compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


def tiny_population(sizes: list[int], inputs: int = 12, classes: int = 3, seed: int = 0) -> FederatedData:
    """Clients of these sizes with noisy blobs for classes, as bytes."""
    rng = np.random.default_rng(seed)
    centre = rng.integers(40, 215, (classes, inputs))

    def blobs(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, classes, count).astype(np.int32)
        return np.clip(centre[y] + rng.normal(0, 30, (count, inputs)), 0, 255).astype(np.uint8), y

    test_sizes = [3 + size % 2 for size in sizes]
    train, test = examples(*blobs(sum(sizes)), sizes), examples(*blobs(sum(test_sizes)), test_sizes)
    return FederatedData("tiny", train, test, *blobs(50), classes)


def mechanism_of(*groups: tuple[int, float, float], rate: float = 0.5, **others: object) -> Mechanism:
    """A mechanism from (clients, noise multiplier, weight) for each group."""
    made = tuple(PrivacyGroup(f"group {i}", n, z, rate, r, pull=0.1 + 0.2 * i) for i, (n, z, r) in enumerate(groups))
    return Mechanism(made, **({"clip": AdaptiveClip(initial=0.3)} | others))  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def _forget_what_was_compiled():
    """Linux gives a process 65,530 memory maps and every compiled program takes some: one that has none left is aborted."""
    yield
    import jax  # not above: it would not see the cache's folder

    jax.clear_caches()


@pytest.fixture(scope="session")
def population() -> FederatedData:
    """Nineteen clients, from one example each to thirteen."""
    return tiny_population([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
