"""The mechanism: the noise that groups are promised, the noise that they get, and the values that are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import mechanism_of, mechanisms, raises_field
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fedhdp.clips import AdaptiveClip
from fedhdp.mechanism import Mechanism, PrivacyGroup


@given(mechanisms())
def test_every_group_gets_at_least_the_promised_noise(mechanism):
    for group in mechanism.groups:
        assert mechanism.effective_noise_multiplier(group) >= group.noise_multiplier * (1 - 1e-12)


@given(mechanisms())
def test_clip_bits_are_accounted_with_the_update(mechanism):
    for group in mechanism.groups:
        if group.opted_out or not mechanism.is_adaptive:
            assert mechanism.update_noise_multiplier(group) == group.noise_multiplier
            continue
        update = mechanism.update_noise_multiplier(group)
        bits = 2 * mechanism.bit_noise_stddev / math.sqrt(max(len(mechanism.layers), 1))  # each bit moves by ½
        assert update > group.noise_multiplier
        assert (update**-2 + bits**-2) ** -0.5 == pytest.approx(group.noise_multiplier)


@given(mechanisms())
def test_shared_noise_is_never_more_than_noise_per_group(mechanism):
    shared, each = replace(mechanism, noise="shared"), replace(mechanism, noise="per_group")
    assert shared.update_noise_stddev <= each.update_noise_stddev
    if sum(group.weight * group.noise_multiplier > 0 for group in mechanism.groups) <= 1:
        assert shared.update_noise_stddev == pytest.approx(each.update_noise_stddev)


@given(mechanisms(), st.floats(0.01, 100))
def test_only_the_ratios_of_weights_matter(mechanism, factor):
    scaled = replace(mechanism, groups=tuple(replace(g, weight=g.weight * factor) for g in mechanism.groups))
    if mechanism.round_params.expected_weight > 0:
        before = mechanism.round_params.update_noise_stddev / mechanism.round_params.expected_weight
        assert scaled.round_params.update_noise_stddev / scaled.round_params.expected_weight == pytest.approx(
            before, rel=1e-5
        )
    for group, scaled_group in zip(mechanism.groups, scaled.groups, strict=True):
        expected = mechanism.effective_noise_multiplier(group)
        assert scaled.effective_noise_multiplier(scaled_group) == pytest.approx(expected)


def test_group_of_weight_0_pays_for_its_clip_bits():
    mechanism = mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.0), rate=1.0)
    assert mechanism.effective_noise_multiplier(mechanism.groups[1]) == pytest.approx(2 * mechanism.bit_noise_stddev)
    fixed = replace(mechanism, clip=0.5)
    assert fixed.effective_noise_multiplier(fixed.groups[1]) == math.inf


def test_default_noise_of_the_clip_bits():
    assert mechanism_of((200, 3.0, 1.0)).bit_noise_stddev == 6.0  # a cohort of 100
    assert mechanism_of((400, 3.0, 1.0)).bit_noise_stddev == 10.0
    assert mechanism_of((400, 0.0, 1.0)).bit_noise_stddev == 0.0


@pytest.mark.parametrize(("others", "weight"), [(2000, 1e-4), (2000, 1e-6), (65, 1e-5), (100, 0.01)])
def test_noise_covers_the_rounding_of_a_sum_with_far_larger_weights(others, weight):
    """An adversary who knows all others compares the sum with one client and without it."""
    groups = PrivacyGroup("open", others, 0.0, 1.0), PrivacyGroup("private", 1, 1.5, 1.0, weight)
    noise = float(Mechanism(groups, clip=1.0).round_params.update_noise_stddev)
    update_CP = np.abs(np.random.default_rng(0).normal(size=(others + 1, 2000)))  # all in one direction: a large sum
    update_CP = (update_CP / np.linalg.norm(update_CP, axis=1, keepdims=True)).astype(np.float32)
    own_P = np.float32(weight) * update_CP[0]

    def total(first_P: np.ndarray) -> np.ndarray:
        sum_P = first_P.copy()  # the client comes first, so that it may change every rounding
        for row_P in update_CP[1:]:
            sum_P += row_P
        return sum_P.astype(float)

    moved = np.linalg.norm(total(own_P) - total(np.zeros_like(own_P)))
    assert 1.5 * moved <= noise
    if weight <= 1e-6:
        assert moved > 1.2 * weight  # noise for its weight alone would be too little


@given(mechanisms())
def test_single_precision_never_reduces_the_noise(mechanism):
    params = mechanism.round_params
    for group, weight in zip(mechanism.groups, params.weight_G, strict=True):
        if not group.opted_out and mechanism.noise == "shared":
            assert float(params.update_noise_stddev) >= float(weight) * mechanism.update_noise_multiplier(group)
    assert float(params.bit_noise_stddev) >= mechanism.bit_noise_stddev


NAN = float("nan")


@pytest.mark.parametrize("value", [NAN, -1.0, math.inf])
@pytest.mark.parametrize("field", ["noise_multiplier", "weight", "pull"])
def test_nan_and_infinity_pass_no_check(field, value):
    with raises_field(field):
        PrivacyGroup(**{"name": "a", "clients": 3, "noise_multiplier": 1.0, "sampling_rate": 0.5, field: value})


@pytest.mark.parametrize("rate", [NAN, -0.1, 1.1])
def test_sampling_rate_is_a_probability(rate):
    with raises_field("sampling_rate"):
        PrivacyGroup("a", 3, 1.0, rate)


@pytest.mark.parametrize("clip", [NAN, 0.0, -1.0, math.inf, 1e-30, 1e30])
def test_clip_is_a_positive_number(clip):
    with raises_field("clip"):
        mechanism_of((3, 1.0, 1.0), clip=clip)
    with raises_field("initial"):
        AdaptiveClip(initial=clip)


def test_clip_bits_that_alone_cost_more_than_promised_are_refused():
    with raises_field("bit_noise_stddev"):
        mechanism_of((19, 1.5, 1.0), clip=AdaptiveClip(0.5, bit_noise_stddev=0.75))


def test_invalid_groups_and_names_are_refused():
    group = PrivacyGroup("a", 3, 1.0, 0.5)
    with raises_field("groups"):
        Mechanism((), 0.5)
    with raises_field("groups"):
        Mechanism((group, group), 0.5)
    with raises_field("noise_multiplier"):
        replace(group, noise_multiplier=1e-200)
    with raises_field("weight"):
        replace(group, weight=2e-38)  # its noise would be too small for single precision, and vanish
    for name in ("", "server", "two\nlines"):
        with raises_field("name"):
            replace(group, name=name)
    with raises_field("noise"):
        Mechanism((group,), 0.5, noise="none")  # type: ignore[arg-type]


def test_sensitivity_is_the_weight_and_the_rounding_of_the_sum():
    groups = (PrivacyGroup("open", 4000, 0.0, 0.5, weight=1.0), PrivacyGroup("private", 100, 1.0, 0.25, weight=1e-4))
    mechanism = Mechanism(groups, clip=1.0)
    most = [2000 + 4 * math.sqrt(2000), 25 + 4 * math.sqrt(25)]  # as many as hardly ever come
    rounding = math.sqrt(sum(most)) * (1.0 * most[0] + 1e-4 * most[1]) / 2**24
    assert rounding > 30 * 1e-4  # here it is what matters
    assert mechanism.l2_sensitivity(groups[1]) == pytest.approx(1e-4 + rounding, rel=1e-12)
    assert mechanism.l2_sensitivity(groups[0]) == pytest.approx(1.0 + rounding, rel=1e-12)
    assert mechanism.l2_sensitivity(replace(groups[1], weight=0.0)) == 0.0
    assert mechanism.update_noise_stddev >= mechanism.l2_sensitivity(groups[1])


def test_group_that_is_never_sampled_requires_no_noise():
    groups = (PrivacyGroup("strict", 10, 5.0, 0.0), PrivacyGroup("mid", 10, 0.7, 0.5, weight=0.5))
    for clip in (1.0, AdaptiveClip(initial=1.0)):
        for noise in ("shared", "per_group"):
            left, alone = Mechanism(groups, clip, noise), Mechanism(groups[1:], clip, noise)
            assert left.update_noise_stddev == pytest.approx(alone.update_noise_stddev)
            assert left.bit_noise_stddev == alone.bit_noise_stddev
            assert left.effective_noise_multiplier(groups[1]) >= 0.7
            assert left.effective_noise_multiplier(groups[0]) == math.inf
    opted_out = Mechanism(groups[:1], AdaptiveClip(initial=1.0))
    assert (opted_out.update_noise_stddev, opted_out.bit_noise_stddev) == (0.0, 0.0)
