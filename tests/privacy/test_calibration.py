"""Noise for an epsilon, and the levels and mechanisms that users configure by one or the other."""

from __future__ import annotations

import math

import msgspec
import pytest
from helpers import raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy_helpers import mechanisms, one_group

from fedhdp.clips import AdaptiveClip
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import epsilon, gaussian_epsilon
from fedhdp.privacy.calibration import (
    GroupConfig,
    MechanismConfig,
    PrivacyLevel,
    calibrate,
    min_noise_multiplier,
    noise_multiplier_for,
)

targets = st.one_of(st.just(math.inf), st.floats(0.3, 10))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    mechanisms, st.lists(targets, min_size=4, max_size=4), st.sampled_from([1, 50, 1000]), st.sampled_from([1e-6, 1e-4])
)
def test_calibration_is_within_one_percent_and_never_above(mechanism, epsilons, rounds, delta):
    mechanism = msgspec.structs.replace(mechanism, clip=1.0 if mechanism.clip == 1.0 else AdaptiveClip(0.5))
    target = {group.name: value for group, value in zip(mechanism.groups, epsilons, strict=False)}  # fewer groups
    for accountant in ("rdp", "pld"):
        calibrated = calibrate(mechanism, target, rounds, delta, accountant)
        result = epsilon(calibrated, rounds, delta, accountant)
        for group in calibrated.groups:
            assert result[group.name] <= target[group.name]
            if target[group.name] < math.inf:
                alone = gaussian_epsilon(group.noise_multiplier, group.sampling_rate, rounds, delta, accountant)
                assert 0.99 * target[group.name] <= alone <= target[group.name]
            else:
                assert group.opted_out


def test_calibrating_fixed_cohorts():
    calibrated = calibrate(one_group(1.0, sampling="fixed"), {"private": 5.0}, 100, 1e-5)
    assert 4.95 <= epsilon(calibrated, 100, 1e-5)["private"] <= 5.0


def test_calibration_changes_named_groups_alone():
    groups = (PrivacyGroup("a", 10, 1.0, 0.1), PrivacyGroup("b", 10, 2.0, 0.1))
    mechanism = Mechanism(groups=groups, clip=1.0)
    assert calibrate(mechanism, {"a": 3.0}, 10, 1e-5).groups[1] == groups[1]
    with raises_field("targets") as error:
        calibrate(mechanism, {"c": 3.0}, 10, 1e-5)
    assert error.value.value == ["c"]


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_noise_for_epsilon_inverts_epsilon_for_noise(accountant):
    noise = noise_multiplier_for(3.6, 0.05, 500, 1e-4, accountant)
    assert 3.6 * 0.99 <= gaussian_epsilon(noise, 0.05, 500, 1e-4, accountant) <= 3.6
    assert noise_multiplier_for(math.inf, 0.05, 500, 1e-4) == 0


def test_an_unknown_epsilon_is_never_enough_noise():
    with raises_field("epsilon"):
        min_noise_multiplier(lambda noise_multiplier: math.nan, 1.0)


def test_a_search_without_result_ends():
    with raises_field("epsilon"):
        noise_multiplier_for(0.001, 0.01, 100, 1e-9, "rdp")
    with raises_field("rounds"):
        noise_multiplier_for(1.0, 0.01, 10**9, 1e-5, "pld")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "noise_multiplier"),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, "noise_multiplier"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"epsilon": 1.0, "sampling_rate": 2.0}, "sampling_rate"),
        ({"epsilon": 1.0, "weight": -1.0}, "weight"),
        ({"epsilon": 1.0, "pull": math.nan}, "pull"),
    ],
)
def test_invalid_level(fields, field):
    fields = {"sampling_rate": 0.1} | fields
    with raises_field(field):
        PrivacyLevel(**fields)
    with raises_field(field):
        GroupConfig("group", 3, **fields)


def test_a_group_is_a_level_with_a_name_and_clients():
    level = PrivacyLevel(sampling_rate=0.1, epsilon=math.inf, weight=0.5)
    group = GroupConfig("open", 3, **msgspec.structs.asdict(level))
    assert isinstance(group, PrivacyLevel)
    assert group.uncalibrated() == PrivacyGroup("open", 3, 0.0, 0.1, weight=0.5)
    with raises_field("clients"):
        GroupConfig("open", 0, sampling_rate=0.1, noise_multiplier=1.0)


def test_build_calibrates_each_group_at_its_own_delta():
    groups = (
        GroupConfig("open", 10, sampling_rate=0.1, epsilon=math.inf),
        GroupConfig("lax", 10, sampling_rate=0.1, epsilon=4.0),
        GroupConfig("strict", 10, sampling_rate=0.1, epsilon=2.0, delta=1e-7),
        GroupConfig("fixed", 10, sampling_rate=0.1, noise_multiplier=1.5),
    )
    config = MechanismConfig(groups, clip=1.0, noise="per_group")
    mechanism = config.build(rounds=50, delta=1e-4, accountant="pld")
    assert [group.noise_multiplier for group in config.uncalibrated().groups] == [0, 0, 0, 1.5]
    assert mechanism.groups[0].opted_out
    assert mechanism.groups[3] == groups[3].uncalibrated()
    for name, target, delta in (("lax", 4.0, 1e-4), ("strict", 2.0, 1e-7)):
        assert 0.99 * target <= epsilon(mechanism, 50, delta, "pld")[name] <= target
