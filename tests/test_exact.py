"""Exact arithmetic: no client exceeds its bound, sums do not depend on their order, and the noise is a rounded Gaussian."""

from __future__ import annotations

import math
import random

import mpmath
import numpy as np
import pytest
from helpers import mechanism_of, mechanisms, raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import special, stats

from fedhdp import exact
from fedhdp.clips import MAX_CLIP, MIN_CLIP, AdaptiveClip, LayerClip
from fedhdp.exact import ExactRound, round_within, rounded_gaussian
from fedhdp.mechanism import GRID_BITS, Mechanism
from fedhdp.server import make_layers

MECHANISM = mechanism_of((50, 0.0, 1.0), (50, 1.5, 0.1), rate=0.2, arithmetic="exact")
SIZES = {"a/b": 5, "c": 1, "a/w": 60, "d": 34}  # the layer a has two segments
LAYERED = replace(MECHANISM, clip=LayerClip({"a": 0.3, "c": 1e-3, "d": 20.0}))
LAYERS = make_layers(LAYERED, SIZES)
assert LAYERS is not None
LAYER_P = np.repeat(LAYERS.layer_of, LAYERS.sizes)


def seeded(seed: int = 0) -> exact.RandomBytes:
    """Random bytes of a seed."""
    return np.random.default_rng(seed).bytes


def round_of(
    mechanism: Mechanism = MECHANISM, clip=0.3, parameters: int = 100, segments=None, seed: int = 0
) -> ExactRound:
    """A round of this mechanism with a seed's noise."""
    return ExactRound(mechanism.grid_params, np.float32(clip), parameters, segments, seeded(seed))


def without_noise(mechanism: Mechanism, *arguments, **options) -> ExactRound:
    """A round whose sums can be read."""
    exact_round = round_of(mechanism, *arguments, **options)
    exact_round._noise_P[:], exact_round._bit_noise_L[:] = 0, 0
    return exact_round


def integer_norm(values) -> int:
    """The squared norm in Python's integers."""
    return sum(value * value for value in map(int, values))


def adversarial_update(kind: str, parameters: int, rng: np.random.Generator, cell: float) -> np.ndarray:
    """An update that makes rounding as harmful as it can be; ``cell``: the size of a step of the grid."""
    sign_P = rng.choice([-1.0, 1.0], parameters)
    update_P = {
        "one sign": np.ones(parameters),
        "all signs": sign_P,
        "half cells": sign_P * (rng.integers(0, 3, parameters) + 0.5 + 1e-6) * cell,
        "just beyond half a cell": np.full(parameters, 0.5001 * cell),
        "denormals": sign_P * 1.4e-45,
        "largest": sign_P * 3.4e38,
        "one large": np.where(np.arange(parameters) == 0, 1e30, 1e-30),
        "normal": rng.normal(size=parameters),
        "at the clip": sign_P * (0.3 / math.sqrt(parameters)),
        "zeros": np.zeros(parameters),
    }[kind]
    return update_P.astype(np.float32)


KINDS = ["one sign", "all signs", "half cells", "just beyond half a cell", "denormals", "largest", "one large"]
KINDS += ["normal", "at the clip", "zeros"]


@pytest.mark.parametrize("parameters", [1, 100, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_no_update_exceeds_its_bound(kind, parameters):
    for noise_multiplier, weights, clip in ((1.5, (1.0, 0.1), 0.3), (1.5, (1.0, 1e-6), 1e-9), (1e4, (0.7, 1e-9), 1e9)):
        groups = ((50, 0.0, weights[0]), (50, noise_multiplier, weights[1]))
        params = mechanism_of(*groups, clip=clip, arithmetic="exact").grid_params
        for group, bound in enumerate(params.bound_G):
            cell = clip * params.step / weights[group]
            update_P = adversarial_update(kind, parameters, np.random.default_rng(parameters), cell)
            exact_round = ExactRound(params, np.float32(clip), parameters, None, seeded())
            exact_round.add(update_P, group)
            assert integer_norm(exact_round._sum_P) <= bound**2
            assert exact_round._bits_L.tolist() == [
                1 if np.linalg.norm(np.float64(update_P)) <= np.float32(clip) else -1
            ]
            assert not exact_round.refused_G.any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_update_of_a_million_parameters_exceeds_its_bound(kind):
    params = MECHANISM.grid_params
    exact_round = without_noise(MECHANISM, parameters=10**6)
    exact_round.add(adversarial_update(kind, 10**6, np.random.default_rng(1), 0.3 * params.step / 0.1), 1)
    assert integer_norm(exact_round._sum_P) <= params.bound_G[1] ** 2
    if kind in ("all signs", "normal", "largest"):  # and rounding takes nothing of an update that counts
        assert integer_norm(exact_round._sum_P) >= (1 - 1e-3) * params.bound_G[1] ** 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-(2.0**26), 2.0**26, width=32), min_size=1, max_size=50), st.integers(0, 2**26))
def test_rounded_values_are_within_the_bound(values, bound):
    values = np.array(values)
    values /= max(np.linalg.norm(values) / 2**26, 1.0)
    rounded = round_within(values, 1.0, bound)
    assert integer_norm(rounded) <= bound**2
    if np.linalg.norm(values) <= bound - math.sqrt(len(values)):
        np.testing.assert_array_equal(rounded, np.rint(values))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    scale_L=st.lists(st.sampled_from([0.0, 1e-45, 1e-3, 1.0, 1e25, math.inf, math.nan]), min_size=3, max_size=3),
    clip_L=st.lists(st.sampled_from([MIN_CLIP, 1e-3, 0.7, 1e3, MAX_CLIP]), min_size=3, max_size=3),
    group=st.integers(0, 1),
    others=st.sampled_from([1.0, 1e8]),
)
def test_one_client_moves_the_sums_by_at_most_their_sensitivity(seed, scale_L, clip_L, group, others):
    """A theorem about integers: no tolerance, whatever the client and the others send."""
    rng, params = np.random.default_rng(seed), LAYERED.grid_params
    update_CP = rng.normal(size=(8, 100)).astype(np.float32) * np.float32(others)
    with np.errstate(over="ignore", invalid="ignore"):
        update_CP[3] *= np.float32(scale_L)[LAYER_P] / np.float32(others)
    group_C = rng.integers(0, 2, 8)
    group_C[3] = group
    sums, without = (without_noise(LAYERED, clip_L, segments=LAYERS.segments) for _ in range(2))
    for client in range(8):
        sums.add(update_CP[client], group_C[client])
        if client != 3:
            without.add(update_CP[client], group_C[client])
    change_P = sums._sum_P - without._sum_P
    for layer in range(3):
        assert integer_norm(change_P[layer == LAYER_P]) <= params.bound_G[group] ** 2
    sensitivity = LAYERED.l2_sensitivity(LAYERED.groups[group])
    assert math.sqrt(integer_norm(change_P)) * params.step <= sensitivity * (1 + 1e-15)  # the float of √3
    assert abs(sums._bits_L - without._bits_L).max() <= 1
    is_finite = np.isfinite(update_CP[3]).all()
    assert is_finite or not change_P.any()
    assert sums.refused_G.sum() == (not is_finite)


def test_a_sum_is_the_same_in_any_order_and_in_any_parts():
    """A sum in single precision is not: the same updates in another order differ."""
    rng = np.random.default_rng(0)
    update_CP = (rng.normal(size=(60, 100)) * rng.lognormal(sigma=3, size=(60, 1))).astype(np.float32)
    group_C = rng.integers(0, 2, 60)
    released = []
    for seed in range(3):
        exact_round = round_of(clip=0.5)
        for client in random.Random(seed).sample(range(60), 60):
            exact_round.add(update_CP[client], group_C[client])
        released.append(exact_round.finish())
    for update_P, clip in released[1:]:
        np.testing.assert_array_equal(update_P, released[0][0])
        np.testing.assert_array_equal(clip, released[0][1])
    sums_P = [update_CP[order].cumsum(axis=0)[-1] for order in (np.arange(60), np.arange(60)[::-1])]
    assert (sums_P[0] != sums_P[1]).any()


def test_released_update_is_the_weighted_mean():
    """Unclipped updates come back to a part in 2**19 of the clip; one clipped far is scaled to the clip."""
    rng = np.random.default_rng(0)
    update_CP = np.float32(rng.normal(size=(3, 100)) * 0.01)
    update_CP[2] *= 1e20
    exact_round = without_noise(MECHANISM, 0.5)
    for update_P, group in zip(update_CP, (0, 1, 1), strict=True):
        exact_round.add(update_P, group)
    update_P, _ = exact_round.finish()
    clipped_CP = np.float64(update_CP)
    clipped_CP[2] *= 0.5 / np.linalg.norm(clipped_CP[2])
    expected_P = np.array([1.0, 0.1, 0.1]) @ clipped_CP / MECHANISM.expected_weight
    np.testing.assert_allclose(update_P, expected_P, atol=0.5 * 2.0**-19 / MECHANISM.expected_weight)
    assert exact_round._bits_L.tolist() == [1]  # two within the clip, one beyond


def test_updates_that_are_not_finite_are_absent_and_counted():
    exact_round = without_noise(MECHANISM, parameters=4)
    for value, group in ((math.nan, 0), (math.inf, 1), (-math.inf, 1)):
        exact_round.add(np.array([1.0, value, 0.0, 0.0], np.float32), group)
    assert exact_round.refused_G.tolist() == [1, 2]
    assert not exact_round._sum_P.any()
    assert not exact_round._bits_L.any()
    np.testing.assert_array_equal(exact_round.finish()[0], np.zeros(4))


@pytest.mark.parametrize("clip", [0.0, 1e-45, -1.0, math.nan, math.inf, 1e10])
def test_clips_without_noise_or_without_end_are_refused(clip):
    with raises_field("clip"):
        round_of(clip=clip)


def test_nothing_is_divided_by_zero_without_clients():
    mechanism = mechanism_of((5, 0.0, 1.0), (4, 1.5, 0.1), rate=0.01, sampling="fixed", arithmetic="exact")
    update_P, clip = round_of(mechanism, 0.3).finish()
    np.testing.assert_array_equal(update_P, np.zeros(100))
    assert clip == np.float32(0.3)


def test_clip_moves_as_in_single_precision():
    """The bit is not inverted, fixed clips stay, and clips stay in their range."""
    for count, direction in ((20, -1), (-20, 1)):
        exact_round = without_noise(MECHANISM)
        exact_round._bits_L[:] = count
        assert np.sign(exact_round.finish()[1] - np.float32(0.3)) == direction
    fixed = round_of(replace(MECHANISM, clip=0.3))
    fixed.add(np.ones(100), 0)
    assert fixed.finish()[1] == np.float32(0.3)
    fast = replace(MECHANISM, clip=AdaptiveClip(0.3, learning_rate=1e6))
    clips = []
    for count in (50, -50):
        exact_round = without_noise(fast)
        exact_round._bits_L[:] = count
        clips.append(float(exact_round.finish()[1]))
    assert clips == [np.float32(MIN_CLIP), np.float32(MAX_CLIP)]


def test_noise_is_of_the_clip_of_the_round_and_of_each_layer():
    mechanism = replace(MECHANISM, clip=LayerClip({"a": 0.3, "b": 5.0}))
    segments = [(0, slice(0, 20_000)), (1, slice(20_000, 50_000)), (0, slice(50_000, 60_000))]
    exact_round = round_of(mechanism, [0.3, 5.0], 60_000, segments)
    exact_round._bits_L[:] = -1000  # the next clips are others altogether
    noise_P = exact_round.finish()[0] * mechanism.expected_weight
    for layer, part in segments:
        assert noise_P[part].std() == pytest.approx([0.3, 5.0][layer] * mechanism.update_noise_stddev, rel=0.03)


@pytest.mark.parametrize("stddev", [0.3, 1.0, 7.7])
def test_noise_has_the_distribution_of_a_rounded_gaussian(stddev):
    sample_N = rounded_gaussian(stddev, 200_000, seeded(3))
    values = np.arange(-math.ceil(4 * stddev), math.ceil(4 * stddev) + 1)
    expected = len(sample_N) * np.diff(stats.norm.cdf(np.append(values - 0.5, values[-1] + 0.5) / stddev))
    observed = np.array([(sample_N == value).sum() for value in values])
    expected, observed = (np.append(counts, len(sample_N) - counts.sum()) for counts in (expected, observed))
    keep = expected > 5
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    assert stats.chi2.sf(statistic, keep.sum() - 1) > 1e-3


def test_noise_has_the_variance_that_accounting_assumes():
    stddev = MECHANISM.grid_params.update_noise_stddev
    sample_N = rounded_gaussian(stddev, 400_000, seeded(4)) / stddev
    variance = float(np.mean(sample_N**2)) * len(sample_N)
    assert 1e-3 < stats.chi2.cdf(variance, len(sample_N)) < 1 - 1e-3
    assert stats.kstest(sample_N, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(sample_N[:-1], sample_N[1:])[0, 1]) < 0.01
    assert stddev * MECHANISM.grid_params.step == pytest.approx(MECHANISM.update_noise_stddev, rel=1e-6)


def words(*values: int) -> exact.RandomBytes:
    """These words of 64 bits, then zeros and ones in turn."""
    data = b"".join(value.to_bytes(8, "little") for value in values)

    def random_bytes(count: int) -> bytes:
        nonlocal data
        part, data = data[:count], data[count:]
        return part.ljust(count, b"\x55")

    return random_bytes


def test_tails_have_no_gaps():
    """From 64 bits a sample reaches 9 standard deviations; where all are zero, further bits decide."""
    stddev = 2.0**20
    tails = [rounded_gaussian(stddev, 1, words(tail << 1))[0] / stddev for tail in range(8)]
    assert tails[1] == pytest.approx(-special.ndtri(4 / 3 * 2.0**-64), rel=1e-6)
    assert tails == sorted(tails, reverse=True)
    assert tails[0] > 9.1
    zeros = rounded_gaussian(stddev, 1, lambda count: b"\x01" + bytes(count - 1) if count == 16 else bytes(count))[0]
    assert 15 < zeros / stddev < 17  # P(Z > z) is about 2**-192
    assert rounded_gaussian(stddev, 1, words(3))[0] == -rounded_gaussian(stddev, 1, words(2))[0]


def test_the_fast_way_and_the_exact_way_agree(monkeypatch):
    """With a bound on the error that is too large, every sample is decided by more bits and digits."""
    stddev, size = 12345.678, 300
    fast_N = rounded_gaussian(stddev, size, seeded(5))
    first = seeded(5)(8 * size)
    monkeypatch.setattr(exact, "NDTRI_ERROR", 1.0)
    further = seeded(6)
    slow_N = rounded_gaussian(stddev, size, lambda count: first if count == 8 * size else further(count))
    np.testing.assert_array_equal(fast_N, slow_N)


def test_a_sample_next_to_a_border_is_decided_by_further_bits():
    """The uniform number whose first 64 bits are those of a border is on either side of it."""
    stddev, k = 2.0**20, 777_777
    with mpmath.workprec(200):
        border = mpmath.erfc((k + mpmath.mpf(0.5)) / (stddev * mpmath.sqrt(2))) / 2
        tail = int(mpmath.floor(mpmath.ldexp(border, 64)))
    for further, expected in ((b"\x00", k + 1), (b"\xff", k)):
        fill = lambda count, further=further: (tail << 1).to_bytes(8, "little") if count == 8 else further * count  # noqa: E731
        assert rounded_gaussian(stddev, 1, fill)[0] == expected


def test_errors_of_the_inverse_are_far_below_their_bound():
    """The inverse of the distribution function in double precision, against many digits."""
    rng = np.random.default_rng(0)
    tails = [int(2.0 ** rng.uniform(0, 63)) for _ in range(150)] + [1, 2**63 - 1]
    borders = [int(math.exp(-power) * 2**64) for power in (2, 32)]  # of the ranges of its approximations
    tails += [border + offset for border in borders for offset in (-1000, -1, 0, 1, 2, 1000)]
    worst = 0.0
    with mpmath.workprec(160):
        for tail in tails:
            z = -float(special.ndtri((tail + 0.5) * 2.0**-64))
            exactly = mpmath.mpf(z)
            for _ in range(3):  # Newton's method from a close start
                density = mpmath.exp(-(exactly**2) / 2) / mpmath.sqrt(2 * mpmath.pi)
                exactly += (mpmath.erfc(exactly / mpmath.sqrt(2)) / 2 - (tail + mpmath.mpf(0.5)) / 2**64) / density
            worst = max(worst, abs(float(exactly - z)) / (1 + abs(z)))
    assert worst < exact.NDTRI_ERROR / 8


def test_noise_is_drawn_before_any_update_and_once():
    drawn: list[int] = []

    def counted(count: int) -> bytes:
        drawn.append(count)
        return np.random.default_rng(len(drawn)).bytes(count)

    exact_round = ExactRound(MECHANISM.grid_params, np.float32(0.3), 100, None, counted)
    before = list(drawn)
    assert before[0] == 800
    exact_round.add(np.ones(100), 1)
    exact_round.finish()
    assert drawn == before
    assert len(drawn) >= 2  # the noise of the update and that of the bits are different bytes


@settings(max_examples=100, deadline=None)
@given(mechanisms())
def test_the_sensitivity_is_the_weight_and_the_noise_is_not_more(mechanism):
    """Exact arithmetic has no rounding to pay for: at most 0.1% more noise, in truth never more."""
    as_exact = replace(mechanism, arithmetic="exact")
    params = as_exact.grid_params
    for group, bound, weight in zip(as_exact.groups, params.bound_G, params.weight_G, strict=True):
        assert as_exact.l2_sensitivity(group) == group.weight * as_exact.clip_l2_norm
        assert bound <= weight < 2**GRID_BITS
        assert weight * params.step == group.weight
    assert as_exact.update_noise_stddev <= mechanism.update_noise_stddev
    noise = params.update_noise_stddev * params.step
    assert as_exact.update_noise_stddev <= noise <= as_exact.update_noise_stddev * 1.001
    rounding_variance = 1 / 12  # of round(X), in steps
    if params.update_noise_stddev > 10:
        assert math.sqrt(params.update_noise_stddev**2 + rounding_variance) <= 1.001 * params.update_noise_stddev
    assert params.update_noise_stddev < 2**GRID_BITS * 1.001
    for group in as_exact.sampled_groups:
        assert group.opted_out or as_exact.effective_noise_multiplier(group) >= group.noise_multiplier * (1 - 1e-12)


def test_costs_are_those_of_the_gaussian_mechanism():
    """What accounting prices is the noise over the integers' bound, rounded up in the client's favour."""
    group = MECHANISM.groups[1]
    params = MECHANISM.grid_params
    update = params.update_noise_stddev / params.bound_G[1]
    bits = params.bit_noise_stddev / 1
    assert 1 / math.hypot(1 / update, 1 / bits) >= MECHANISM.effective_noise_multiplier(group) >= group.noise_multiplier


def test_invalid_arithmetic_is_refused():
    with raises_field("arithmetic"):
        replace(MECHANISM, arithmetic="float16")
    with raises_field("bit_noise_stddev"):
        replace(MECHANISM, clip=AdaptiveClip(0.3, bit_noise_stddev=1e14))
