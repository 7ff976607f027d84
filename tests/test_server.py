"""Sampling, clipping, noise, the next clip and the server's optimizer."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mechanism_of, raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import special, stats

from fedhdp.clips import MAX_CLIP, MIN_CLIP, AdaptiveClip
from fedhdp.optimizers import OptimizerConfig
from fedhdp.server import (
    Layers,
    ServerOptimizer,
    Sums,
    Updates,
    as_server_optimizer,
    averaged_model,
    clip_and_sum,
    dense_updates,
    finish_round,
    gaussian,
    initial_state,
    private_mean,
    sample_cohort,
)

MECHANISM = mechanism_of((50, 0.0, 1.0), (50, 1.5, 0.1), rate=0.2)


def summed(update_CP, group_C, clip=0.5, mechanism=MECHANISM, is_participating_C=None) -> Sums:
    """The sums of these updates."""
    is_participating_C = np.ones(len(update_CP), bool) if is_participating_C is None else np.asarray(is_participating_C)
    updates = dense_updates(jnp.asarray(update_CP, jnp.float32))
    return clip_and_sum(mechanism.round_params, jnp.float32(clip), updates, np.asarray(group_C), is_participating_C)


def empty_sums(parameters: int, groups: int = 2) -> Sums:
    """The sums of an empty round."""
    return Sums(jnp.zeros(parameters), jnp.float32(0), jnp.zeros(groups, jnp.int32))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6, 1e25, math.inf, math.nan]),
    group=st.integers(0, 1),
    clip=st.floats(1e-3, 1e3),
)
def test_one_client_changes_the_sums_by_at_most_its_sensitivity(seed, scale, group, clip):
    rng = np.random.default_rng(seed)
    update_CP, group_C = rng.normal(size=(8, 40)).astype(np.float32), rng.integers(0, 2, 8)
    with np.errstate(over="ignore", invalid="ignore"):
        update_CP[3] *= scale
    group_C[3] = group
    with_client = summed(update_CP, group_C, clip)
    without_client = summed(update_CP, group_C, clip, is_participating_C=np.arange(8) != 3)
    change = np.linalg.norm(np.float64(with_client.update_P) - np.float64(without_client.update_P))
    assert change <= MECHANISM.groups[group].weight * clip * (1 + 1e-5) + 1e-5 * clip
    assert abs(float(with_client.bits) - float(without_client.bits)) <= 0.5


@pytest.mark.slow
def test_noise_is_gaussian_without_gaps_in_its_tails():
    noise_N = np.asarray(gaussian(jax.random.key(0), (4_000_000,)))
    assert stats.kstest(noise_N, "norm").pvalue > 1e-3
    tail_N = np.abs(noise_N)[np.abs(noise_N) > 4.5]
    assert 10 < len(tail_N) < 50  # 27 are expected
    assert len(np.unique(tail_N)) == len(tail_N)  # with 23 bits there are 57 values out there, of both signs


def test_noise_uses_64_bits_of_two_keys(monkeypatch):
    high = np.array([0, 1, 2, 3, 8], np.uint32)
    low = np.array([0, 2**31, 5, 2**32 - 1, 2**20], np.uint32)
    words, keys = iter((high, low)), []

    def bits(key, shape):
        keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return jnp.asarray(next(words))

    monkeypatch.setattr(jax.random, "bits", bits)
    noise = gaussian(jax.random.key(0), (5,))
    below = ((high >> 1) + (low + 0.5) / 2.0**32) / 2.0**32
    np.testing.assert_allclose(noise, np.where(high & 1, 1, -1) * special.ndtri(below), rtol=1e-5)
    assert len(set(keys)) == 2


def test_clip_bit_is_not_inverted():
    noiseless = replace(MECHANISM, clip=AdaptiveClip(0.5, bit_noise_stddev=1.0))
    params = noiseless.round_params._replace(bit_noise_stddev=np.float32(0))
    group_C = np.ones(20, int)
    for norm, direction in ((10.0, 1), (0.01, -1)):
        sums = summed(np.full((20, 1), norm), group_C)
        _, clip = private_mean(params, jnp.float32(0.5), sums, jax.random.key(0))
        assert np.sign(float(clip) - 0.5) == direction


def test_update_with_the_norm_of_the_clip_is_not_clipped():
    updates = Updates(jnp.array([0.5]), dense_updates(jnp.array([[0.5]])).weighted_sum)
    sums = clip_and_sum(MECHANISM.round_params, jnp.float32(0.5), updates, np.array([0]), np.array([True]))
    assert (float(sums.update_P[0]), float(sums.bits)) == (0.5, 0.5)


@pytest.mark.parametrize("parameters", [2, 31, 62, 1000, 39_760, 300_000])
def test_norms_of_many_equal_parameters_are_never_too_small(parameters):
    """Where roundings agree, as they do in a sum of equal squares."""
    value_C = np.random.default_rng(0).uniform(1, 2, (64 if parameters < 1e4 else 8, 1)).astype(np.float32)
    update_CP = value_C * np.ones((1, parameters), np.float32)
    expected_C = np.linalg.norm(np.float64(update_CP), axis=1)
    half = Layers((0, 1), (parameters // 2, parameters - parameters // 2))
    for norm_C in (
        dense_updates(update_CP).norm_C,
        np.linalg.norm(np.float64(dense_updates(update_CP, half).norm_C), axis=1),
    ):
        assert (np.float64(norm_C) >= expected_C).all()
        np.testing.assert_allclose(norm_C, expected_C, rtol=5e-5)
    for update_P in update_CP[:4]:
        sums = summed(update_P[None], [0], clip=0.5)
        assert np.linalg.norm(np.float64(sums.update_P)) <= 0.5


def test_clip_converges_to_the_quantile_of_the_norms():
    rng = np.random.default_rng(0)
    params = replace(MECHANISM, clip=AdaptiveClip(0.5, quantile=0.8)).round_params._replace(
        bit_noise_stddev=np.float32(0)
    )
    clip = jnp.float32(0.01)
    norms = rng.uniform(1, 2, 20)  # as many as are expected
    for round in range(200):
        sums = summed(norms[:, None], np.ones(20, int), clip)
        _, clip = private_mean(params, clip, sums, jax.random.key(round))
    assert float(clip) == pytest.approx(np.quantile(norms, 0.8), rel=0.05)


def test_noise_is_calibrated_to_the_clip_of_the_round_not_the_next():
    params = MECHANISM.round_params._replace(clip_learning_rate=np.float32(5.0), bit_noise_stddev=np.float32(0))
    all_clipped = empty_sums(20_000)._replace(bits=jnp.float32(-MECHANISM.expected_cohort_size() / 2))
    update_P, clip = private_mean(params, jnp.float32(0.5), all_clipped, jax.random.key(1))
    stddev = float(jnp.std(update_P)) * float(params.expected_weight)
    assert stddev == pytest.approx(MECHANISM.update_noise_stddev * 0.5, rel=0.03)
    assert float(clip) > 5.0  # the next clip is another number altogether


def test_noise_scale_is_not_divided_once_per_tensor():
    update_P, _ = private_mean(MECHANISM.round_params, jnp.float32(0.5), empty_sums(60_000), jax.random.key(2))
    stddevs = np.asarray(update_P).reshape(6, -1).std(axis=1) * float(MECHANISM.round_params.expected_weight)
    np.testing.assert_allclose(stddevs, MECHANISM.update_noise_stddev * 0.5, rtol=0.04)
    assert abs(np.corrcoef(np.asarray(update_P).reshape(2, -1))[0, 1]) < 0.03


def test_bit_noise_is_the_accounted_noise():
    params = MECHANISM.round_params._replace(clip_learning_rate=np.float32(1.0))
    keys = jax.random.split(jax.random.key(3), 4000)
    _, clip_R = jax.vmap(lambda key: private_mean(params, jnp.float32(1.0), empty_sums(1), key))(keys)
    share_R = -np.log(np.asarray(clip_R)) + float(params.quantile) - 0.5
    assert share_R.std() * MECHANISM.expected_cohort_size() == pytest.approx(MECHANISM.bit_noise_stddev, rel=0.05)


def test_zero_update_is_not_divided_by_its_norm():
    sums = summed(np.zeros((3, 5)), [0, 1, 1])
    np.testing.assert_array_equal(sums.update_P, np.zeros(5))
    assert float(sums.bits) == 1.5
    assert int(sums.refused_G.sum()) == 0


def test_update_that_is_not_finite_is_absent():
    update_CP = np.ones((4, 5), np.float32)
    update_CP[1, 2], update_CP[2, 0], update_CP[3] = np.nan, np.inf, 3e38  # the last has an infinite norm
    sums = summed(update_CP, [0, 0, 1, 1])
    single = summed(update_CP[:1], [0])
    np.testing.assert_array_equal(sums.update_P, single.update_P)
    assert float(sums.bits) == float(single.bits)
    np.testing.assert_array_equal(sums.refused_G, [1, 2])


def test_denominator_is_public():
    noiseless = MECHANISM.round_params._replace(update_noise_stddev=np.float32(0))
    first, _ = private_mean(noiseless, jnp.float32(0.5), summed(np.ones((1, 4)), [0]), jax.random.key(0))
    three, _ = private_mean(noiseless, jnp.float32(0.5), summed(np.ones((3, 4)), [0, 0, 0]), jax.random.key(0))
    np.testing.assert_allclose(three, 3 * np.asarray(first), rtol=1e-6)


def test_denominator_of_fixed_cohorts_is_the_cohort():
    fixed = mechanism_of((50, 0.0, 1.0), (55, 1.5, 0.1), rate=0.1, sampling="fixed")
    group_C = np.repeat([0, 1], [50, 55])[sample_cohort(fixed, halves(50, 105), np.random.default_rng(0))]
    size_0, size_1 = (group_C == 0).sum(), (group_C == 1).sum()
    assert (size_0, size_1) == (5, 6)
    noiseless = fixed.round_params._replace(update_noise_stddev=np.float32(0))
    update_P, _ = private_mean(
        noiseless, jnp.float32(9.0), summed(np.ones((11, 1)), group_C, 9.0, fixed), jax.random.key(0)
    )
    assert float(update_P[0]) == pytest.approx(1.0)  # the mean of ones, whatever the weights


def test_group_that_is_never_sampled_has_no_division_by_zero():
    unsampled = mechanism_of((5, 0.0, 1.0), (4, 1.5, 0.1), rate=0.01, sampling="fixed")
    for quantile in (0.5, 0.3):
        mechanism = replace(unsampled, clip=AdaptiveClip(initial=9.0, quantile=quantile))
        update_P, clip = private_mean(mechanism.round_params, jnp.float32(9.0), empty_sums(3), jax.random.key(0))
        np.testing.assert_array_equal(update_P, np.zeros(3))
        assert float(clip) == pytest.approx(9.0)


def halves(middle: int, end: int) -> list[np.ndarray]:
    """The numbers of the clients of two groups."""
    return [np.arange(middle), np.arange(middle, end)]


def test_cohorts_are_of_the_members():
    """A group's sampling rate is its members', wherever these stand; a wrong number of them is refused."""
    mechanism = mechanism_of((3, 0.0, 1.0), (2, 1.0, 1.0))
    only_first = replace(mechanism, groups=(mechanism.groups[0], replace(mechanism.groups[1], sampling_rate=0.0)))
    only_first = replace(only_first, groups=(replace(only_first.groups[0], sampling_rate=1.0), only_first.groups[1]))
    members_G = [np.array([4, 0, 2]), np.array([3, 1])]
    assert sample_cohort(only_first, members_G, np.random.default_rng(0)).tolist() == [0, 2, 4]
    with raises_field("clients of 'group 0'"):
        sample_cohort(mechanism, members_G[::-1], np.random.default_rng(0))


def test_poisson_sampling_is_independent():
    mechanism = replace(MECHANISM, groups=(MECHANISM.groups[0], replace(MECHANISM.groups[1], sampling_rate=0.6)))
    rng = np.random.default_rng(0)
    sampled_RK = np.zeros((4000, 100))
    for row in sampled_RK:
        row[sample_cohort(mechanism, halves(50, 100), rng)] = 1
    rate_K = np.repeat([0.2, 0.6], 50)
    assert np.abs(sampled_RK.mean(0) - rate_K).max() < 5 * 0.5 / math.sqrt(4000)
    for group in (slice(0, 50), slice(50, 100)):
        rate = rate_K[group][0]
        variance = 50 * rate * (1 - rate)  # binomial, not fixed
        assert sampled_RK[:, group].sum(1).var() == pytest.approx(variance, rel=0.1)
    assert abs(np.corrcoef(sampled_RK[:, 0], sampled_RK[:, 1])[0, 1]) < 0.06


def test_fixed_cohorts_have_one_size_and_no_duplicates():
    mechanism = replace(MECHANISM, sampling="fixed")
    for seed in range(20):
        cohort = sample_cohort(mechanism, halves(50, 100), np.random.default_rng(seed))
        assert len(cohort) == len(set(cohort)) == 20
        assert (cohort < 50).sum() == 10  # of each group as many in every round


def test_sampling_from_a_million_clients():
    large = mechanism_of((500_000, 0.0, 1.0), (500_000, 1.0, 1.0), rate=0.001)
    cohort = sample_cohort(large, halves(500_000, 1_000_000), np.random.default_rng(0))
    assert 800 < len(cohort) < 1200
    assert len(set(cohort)) == len(cohort)
    assert cohort.max() > 500_000


def states_after(server: ServerOptimizer, *updates: float) -> list:
    """The server's states after rounds that each release this update, without noise."""
    single = mechanism_of((1, 0.0, 1.0), rate=1.0, clip=9.0)
    states = [initial_state(single, server, jnp.zeros(1))]
    for update in updates:
        sums = summed([[update]], [0], 9.0, single)
        states.append(finish_round(server, single.round_params, states[-1], sums, jax.random.key(0)))
    return states[1:]


def test_model_average_is_corrected_for_its_start():
    server = ServerOptimizer(average=0.5)
    weight_R = np.array([0.125, 0.25, 0.5])
    state = states_after(server, 1, 1, 1)[-1]
    assert float(averaged_model(server, state)[0]) == pytest.approx(weight_R @ [1, 2, 3] / weight_R.sum())


def test_momentum_adds_its_share_of_the_last_step():
    states = states_after(ServerOptimizer(OptimizerConfig("sgd", learning_rate=0.5, momentum=0.8)), 1, 1)
    assert [float(state.theta_P[0]) for state in states] == pytest.approx([0.5, 1.4])


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_adam_and_yogi_without_momentum_ignore_zero_updates(name):
    for momentum, moves in ((0.0, False), (0.5, True)):
        config = OptimizerConfig(name, learning_rate=0.1, b1=momentum, b2=0.99, eps=1e-3)
        first, second = states_after(ServerOptimizer(config), 1, 0)
        assert (float(second.theta_P[0]) > float(first.theta_P[0]) + 1e-3) == moves


@pytest.mark.parametrize(("bits", "bound"), [(1e6, MIN_CLIP), (-1e6, MAX_CLIP)])
def test_clip_has_bounds(bits, bound):
    """At clip 0 there would be no noise, and 0 / 0 would show who sent a zero."""
    params = mechanism_of((19, 1.5, 1.0), clip=AdaptiveClip(initial=bound)).round_params
    sums = Sums(jnp.zeros(4), jnp.float32(bits), jnp.zeros(1, jnp.int32))
    update, clip = private_mean(params, jnp.float32(bound), sums, jax.random.key(0))
    assert clip == jnp.float32(bound)
    assert jnp.isfinite(update).all()
    assert (update != 0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("optimizer", "add"), ("optimizer", 0.5), ("average", 1.0), ("average", math.nan)],
)
def test_invalid_optimizer_is_refused(field, value):
    with raises_field(field):
        ServerOptimizer(**{field: value})


def test_optax_transformation_is_an_optimizer():
    by_name = states_after(ServerOptimizer({"name": "sgd", "learning_rate": 0.5, "momentum": 0.8}), 1, 1)
    transformation = states_after(as_server_optimizer(optax.sgd(0.5, 0.8)), 1, 1)
    assert [state.theta_P for state in by_name] == [state.theta_P for state in transformation]


def test_server_schedule_counts_rounds():
    schedule = {"schedule": "linear_schedule", "init_value": 1.0, "end_value": 0.0, "transition_steps": 2}
    server = ServerOptimizer(OptimizerConfig("sgd", learning_rate=schedule), average=0.5)
    assert [float(state.theta_P[0]) for state in states_after(server, 1, 1, 1)] == [1.0, 1.5, 1.5]


def test_default_adds_the_update():
    assert [float(state.theta_P[0]) for state in states_after(ServerOptimizer(), 0.3, 0.3)] == pytest.approx([0.3, 0.6])
