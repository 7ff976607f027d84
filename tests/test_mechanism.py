"""The promise as a value: what is owed, what is got, and what cannot be promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import mechanism_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedhdp.algorithms import ALGORITHMS, dp_fedavg, hdp_fedavg
from fedhdp.mechanism import AdaptiveClip, Mechanism, PrivacyGroup


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
    clip = draw(st.sampled_from([0.5, AdaptiveClip(0.5), AdaptiveClip(0.5, bit_noise_stddev=15.0)]))
    return Mechanism(groups, clip, draw(st.sampled_from(["shared", "per_group"])))


@given(mechanisms())
def test_every_group_gets_the_noise_it_was_promised_or_more(mechanism):
    for group in mechanism.groups:
        assert mechanism.effective_noise_multiplier(group) >= group.noise_multiplier * (1 - 1e-12)


@given(mechanisms())
def test_the_clip_bits_are_accounted_update_and_bits_together_cost_the_multiplier(mechanism):
    for group in mechanism.groups:
        if group.opted_out or not isinstance(mechanism.clip, AdaptiveClip):
            assert mechanism.update_noise_multiplier(group) == group.noise_multiplier
            continue
        update, bits = (
            mechanism.update_noise_multiplier(group),
            2 * mechanism.bit_noise_stddev,
        )  # a centred bit moves the sum by ½
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
    for one, other in zip(mechanism.groups, scaled.groups):
        assert scaled.effective_noise_multiplier(other) == pytest.approx(mechanism.effective_noise_multiplier(one))


def test_a_group_of_weight_0_still_pays_for_its_clip_bits():
    mechanism = mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.0), rate=1.0)
    assert mechanism.effective_noise_multiplier(mechanism.groups[1]) == pytest.approx(2 * mechanism.bit_noise_stddev)
    fixed = replace(mechanism, clip=0.5)
    assert fixed.effective_noise_multiplier(fixed.groups[1]) == math.inf


def test_the_bits_get_a_twentieth_of_the_cohort_as_noise_and_twice_the_multiplier_at_least():
    assert mechanism_of((200, 3.0, 1.0)).bit_noise_stddev == 6.0  # a cohort of 100
    assert mechanism_of((400, 3.0, 1.0)).bit_noise_stddev == 10.0
    assert mechanism_of((400, 0.0, 1.0)).bit_noise_stddev == 0.0


NOT_PRIVATE = ("non_private", "local_only")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in NOT_PRIVATE])
@given(mechanism=mechanisms())
@settings(max_examples=30)
def test_no_private_algorithm_gives_anyone_less_noise_than_they_chose(name, mechanism):
    run = ALGORITHMS[name](mechanism)
    for chosen, got in zip(mechanism.groups, run.groups):
        assert run.effective_noise_multiplier(got) >= chosen.noise_multiplier * (1 - 1e-12)


@pytest.mark.parametrize("name", NOT_PRIVATE)
@given(mechanism=mechanisms())
@settings(max_examples=30)
def test_an_algorithm_without_privacy_adds_no_noise_to_updates_or_bits(name, mechanism):
    run = ALGORITHMS[name](mechanism)
    assert all(group.opted_out for group in run.groups)
    assert (run.update_noise_stddev, run.bit_noise_stddev) == (0.0, 0.0)


@given(mechanisms())
def test_local_only_neither_sends_anything_nor_is_pulled(mechanism):
    assert {(group.weight, group.pull) for group in ALGORITHMS["local_only"](mechanism).groups} == {(0.0, 0.0)}


@pytest.mark.parametrize(("others", "weight"), [(2000, 1e-4), (2000, 1e-6), (65, 1e-5), (100, 0.01)])
def test_noise_covers_how_a_sum_is_rounded_beside_clients_who_weigh_far_more(others, weight):
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


def test_dp_fedavg_adds_the_strictest_noise_once_whatever_the_number_of_groups():
    mechanism = mechanism_of((4, 0.0, 1.0), (5, 0.5, 0.7), (10, 1.5, 0.2), clip=1.0, noise="per_group")
    assert dp_fedavg(mechanism).update_noise_stddev == pytest.approx(1.5, rel=1e-4)
    assert hdp_fedavg(mechanism).update_noise_stddev == pytest.approx(math.hypot(0.5, 1.5), rel=1e-4)


@given(mechanisms())
def test_single_precision_never_leaves_less_noise_than_is_owed(mechanism):
    terms = mechanism.round_params
    for group, weight in zip(mechanism.groups, terms.weight_G):
        if not group.opted_out and mechanism.noise == "shared":
            assert float(terms.update_noise_stddev) >= float(weight) * mechanism.update_noise_multiplier(group)
    assert float(terms.bit_noise_stddev) >= mechanism.bit_noise_stddev


def test_groups_take_the_clients_in_order():
    np.testing.assert_array_equal(mechanism_of((2, 0.0, 1.0), (3, 1.0, 1.0)).client_group_indices, [0, 0, 1, 1, 1])


NAN = float("nan")


@pytest.mark.parametrize("value", [NAN, -1.0, math.inf])
@pytest.mark.parametrize("field", ["noise_multiplier", "weight", "pull"])
def test_nan_passes_no_check_and_names_its_field(field, value):
    given = {"name": "a", "clients": 3, "noise_multiplier": 1.0, "sampling_rate": 0.5} | {field: value}
    with pytest.raises(ValueError, match=rf"{field} must be .*finite and from .*, got"):
        PrivacyGroup(**given)


@pytest.mark.parametrize("rate", [NAN, -0.1, 1.1])
def test_a_sampling_rate_is_a_probability(rate):
    with pytest.raises(ValueError, match="sampling_rate must be between 0 and 1"):
        PrivacyGroup("a", 3, 1.0, rate)


@pytest.mark.parametrize("clip", [NAN, 0.0, -1.0, math.inf, 1e-30, 1e30])
def test_a_clip_is_a_positive_number(clip):
    with pytest.raises(ValueError, match="clip must be finite and from 1e-09 to 1e"):
        mechanism_of((3, 1.0, 1.0), clip=clip)
    with pytest.raises(ValueError, match="initial must be finite and from 1e-09 to 1e"):
        AdaptiveClip(initial=clip)


def test_bits_that_alone_cost_more_than_was_promised_are_refused():
    with pytest.raises(ValueError, match=r"bit_noise must be above half the largest noise multiplier \(0.75\)"):
        mechanism_of((19, 1.5, 1.0), clip=AdaptiveClip(0.5, bit_noise_stddev=0.75))


def test_what_cannot_be_meant_is_refused():
    group = PrivacyGroup("a", 3, 1.0, 0.5)
    with pytest.raises(ValueError, match="groups must be at least one group"):
        Mechanism((), 0.5)
    with pytest.raises(ValueError, match="groups must be groups of different names, got 'a'"):
        Mechanism((group, group), 0.5)
    with pytest.raises(ValueError, match=r"noise_multiplier must be 0, or finite and from 1e-6 to .*, got 1e-200"):
        replace(group, noise_multiplier=1e-200)
    with pytest.raises(ValueError, match=r"weight must be 0, or finite and from 1e-15 to .*, got 2e-38"):
        replace(group, weight=2e-38)  # its noise would be too small for single precision, and vanish
    for name in ("", "server", "two\nlines"):
        with pytest.raises(ValueError, match="name must be a name that can be printed, and not 'server'"):
            replace(group, name=name)
    with pytest.raises(ValueError, match="noise must be 'shared' or 'per_group', got 'none'"):
        Mechanism((group,), 0.5, noise="none")  # type: ignore[arg-type]


def test_a_clients_reach_is_its_weight_and_how_the_sum_beside_it_is_rounded():
    groups = (PrivacyGroup("open", 4000, 0.0, 0.5, weight=1.0), PrivacyGroup("private", 100, 1.0, 0.25, weight=1e-4))
    mechanism = Mechanism(groups, clip=1.0)
    most = [2000 + 4 * math.sqrt(2000), 25 + 4 * math.sqrt(25)]  # as many as hardly ever come
    rounding = math.sqrt(sum(most)) * (1.0 * most[0] + 1e-4 * most[1]) / 2**24
    assert rounding > 30 * 1e-4  # here it is what matters
    assert mechanism.l2_sensitivity(groups[1]) == pytest.approx(1e-4 + rounding, rel=1e-12)
    assert mechanism.l2_sensitivity(groups[0]) == pytest.approx(1.0 + rounding, rel=1e-12)
    assert mechanism.l2_sensitivity(replace(groups[1], weight=0.0)) == 0.0
    assert mechanism.update_noise_stddev >= mechanism.l2_sensitivity(groups[1])


def test_a_group_of_which_nobody_is_drawn_is_owed_nothing_and_the_others_get_what_they_were_promised():
    groups = (PrivacyGroup("strict", 10, 5.0, 0.0), PrivacyGroup("mid", 10, 0.7, 0.5, weight=0.5))
    for clip in (1.0, AdaptiveClip(initial=1.0)):
        for noise in ("shared", "per_group"):
            left, alone = Mechanism(groups, clip, noise), Mechanism(groups[1:], clip, noise)
            assert left.update_noise_stddev == pytest.approx(alone.update_noise_stddev)
            assert left.bit_noise_stddev == alone.bit_noise_stddev
            assert left.effective_noise_multiplier(groups[1]) >= 0.7
            assert left.effective_noise_multiplier(groups[0]) == math.inf
    nobody = Mechanism(groups[:1], AdaptiveClip(initial=1.0))
    assert (nobody.update_noise_stddev, nobody.bit_noise_stddev) == (0.0, 0.0)
