"""Small data sets, mechanisms and assertions that the tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from msgspec.structs import replace

from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.data import FederatedData, examples
from fedhdp.errors import FedHDPError, InvalidValueError
from fedhdp.mechanism import Mechanism, PrivacyGroup


def tiny_data(sizes: list[int], inputs: int = 12, classes: int = 3, seed: int = 0) -> FederatedData:
    """Clients of these sizes with noisy blobs for classes, as bytes."""
    rng = np.random.default_rng(seed)
    centre = rng.integers(40, 215, (classes, inputs))

    def blobs(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, classes, count).astype(np.int32)
        return np.clip(centre[y] + rng.normal(0, 30, (count, inputs)), 0, 255).astype(np.uint8), y

    test_sizes = [3 + size % 2 for size in sizes]
    train, test = examples(*blobs(sum(sizes)), sizes), examples(*blobs(sum(test_sizes)), test_sizes)
    return FederatedData("tiny", train, test, *blobs(50), classes, input_scale=1 / 255, server_has_client_data=False)


def mechanism_of(*groups: tuple[int, float, float], rate: float = 0.5, **others: object) -> Mechanism:
    """A mechanism from (clients, noise multiplier, weight) for each group."""
    members = tuple(PrivacyGroup(f"group {i}", n, z, rate, r, pull=0.1 + 0.2 * i) for i, (n, z, r) in enumerate(groups))
    return Mechanism(members, **({"clip": AdaptiveClip(initial=0.3)} | others))  # type: ignore[arg-type]


def group_by_group(mechanism: Any) -> np.ndarray:
    """Levels of clients who stand one group after the other."""
    return np.repeat([group.name for group in mechanism.groups], [group.clients for group in mechanism.groups])


@st.composite
def mechanisms(draw: st.DrawFn) -> Mechanism:
    """Any mechanism of one to four groups."""
    groups = tuple(
        PrivacyGroup(
            f"group {i}",
            draw(st.integers(1, 10_000)),
            draw(st.sampled_from([0.0, 0.3, 1.0, 1.5, 4.0, 20.0])),
            draw(st.floats(0.001, 1)),
            draw(st.sampled_from([0.0, 0.001, 0.1, 1.0, 3.0])),
        )
        for i in range(draw(st.integers(1, 4)))
    )
    layers = LayerClip({"a": 0.5, "b": 2.0, "c": 0.1})
    clips = [
        0.5,
        AdaptiveClip(0.5),
        AdaptiveClip(0.5, bit_noise_stddev=20.0),
        layers,
        replace(layers, learning_rate=0.0),
    ]
    clip = draw(st.sampled_from(clips))
    return Mechanism(groups, clip, draw(st.sampled_from(["shared", "per_group"])))


@contextlib.contextmanager
def raises_field(field: str, kind: type[FedHDPError] = InvalidValueError) -> Iterator[pytest.ExceptionInfo]:
    """Assert that an error of this class names this field."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
