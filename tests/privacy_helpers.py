"""Mechanisms, given and random, for tests of accounting."""

from __future__ import annotations

from hypothesis import strategies as st

from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.mechanism import Mechanism, PrivacyGroup

LAYERS = LayerClip({"a": 0.5, "b": 2.0, "c": 0.1})
FIXED_LAYERS = LayerClip({"a": 0.5, "b": 2.0}, learning_rate=0.0)


def one_group(noise_multiplier: float, rate: float = 0.05, **fields: object) -> Mechanism:
    """A mechanism of one group, called private."""
    return Mechanism((PrivacyGroup("private", 1000, noise_multiplier, rate),), clip=1.0, **fields)  # type: ignore[arg-type]


groups = st.builds(
    PrivacyGroup,
    name=st.sampled_from("abcd"),
    clients=st.integers(1, 2000),
    noise_multiplier=st.one_of(st.just(0.0), st.floats(0.3, 20)),
    sampling_rate=st.sampled_from([0.01, 0.05, 0.3, 1.0]),
    weight=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 3)),
)
mechanisms = st.builds(
    Mechanism,
    groups=st.lists(groups, min_size=1, max_size=4, unique_by=lambda group: group.name).map(tuple),
    clip=st.sampled_from([1.0, AdaptiveClip(0.5), AdaptiveClip(0.5, bit_noise_stddev=15.0), LAYERS, FIXED_LAYERS]),
    noise=st.sampled_from(["shared", "per_group"]),
)
