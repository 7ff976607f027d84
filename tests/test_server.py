"""The server's page, held to the letter: what an adversary who knows everything else could see, and the field's traps."""

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

from fedhdp.mechanism import MAX_VALUE, MIN_CLIP, AdaptiveClip
from fedhdp.server import (
    ServerOptimizer,
    Sums,
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


def nothing(parameters: int, groups: int = 2) -> Sums:
    """A round to which nobody came."""
    nobody = jnp.zeros(groups, jnp.int32)
    return Sums(jnp.zeros(parameters), jnp.float32(0), nobody)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6, 1e25, math.inf, math.nan]),
    group=st.integers(0, 1),
    clip=st.floats(1e-3, 1e3),
)
def test_one_client_more_or_less_moves_the_sums_by_at_most_its_sensitivity(seed, scale, group, clip):
    rng = np.random.default_rng(seed)
    update_CP, group_C = rng.normal(size=(8, 40)).astype(np.float32), rng.integers(0, 2, 8)
    with np.errstate(over="ignore", invalid="ignore"):
        update_CP[3] *= scale
    group_C[3] = group
    without = np.arange(8) != 3
    with_it, without_it = summed(update_CP, group_C, clip), summed(update_CP, group_C, clip, is_participating_C=without)
    moved = np.linalg.norm(np.asarray(with_it.update_P, np.float64) - np.asarray(without_it.update_P, np.float64))
    assert moved <= MECHANISM.groups[group].weight * clip * (1 + 1e-5) + 1e-5 * clip
    assert abs(float(with_it.bits) - float(without_it.bits)) <= 0.5


def test_noise_is_gaussian_and_has_no_gaps_that_a_client_would_show_through():
    noise_N = np.asarray(gaussian(jax.random.key(0), (4_000_000,)))
    assert stats.kstest(noise_N, "norm").pvalue > 1e-3
    far_N = np.abs(noise_N)[np.abs(noise_N) > 4.5]
    assert 10 < len(far_N) < 50  # 27 are expected
    assert len(np.unique(far_N)) == len(far_N)  # with 23 bits there are 57 values out there, of both signs


def test_noise_far_out_is_made_of_64_bits_of_two_keys(monkeypatch):
    high = np.array([0, 1, 2, 3, 8], np.uint32)
    low = np.array([0, 2**31, 5, 2**32 - 1, 2**20], np.uint32)
    words, keys = iter((high, low)), []

    def bits(key, shape):
        keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return jnp.asarray(next(words))

    monkeypatch.setattr(jax.random, "bits", bits)
    found = gaussian(jax.random.key(0), (5,))
    below = ((high >> 1) + (low + 0.5) / 2.0**32) / 2.0**32
    np.testing.assert_allclose(found, np.where(high & 1, 1, -1) * special.ndtri(below), rtol=1e-5)
    assert len(set(keys)) == 2


def test_the_bit_is_not_inverted_the_clip_grows_when_updates_are_cut_and_shrinks_when_they_are_not():
    quiet = replace(MECHANISM, clip=AdaptiveClip(0.5, bit_noise_stddev=1.0))
    terms = quiet.round_params._replace(bit_noise_stddev=np.float32(0))
    group_C = np.ones(20, int)
    for norm, direction in ((10.0, 1), (0.01, -1)):
        sums = summed(np.full((20, 1), norm), group_C)
        _, clip = private_mean(terms, jnp.float32(0.5), sums, jax.random.key(0))
        assert np.sign(float(clip) - 0.5) == direction


def test_an_update_exactly_as_long_as_the_clip_is_left_whole_and_its_bit_says_so():
    sums = summed([[0.5]], [0], clip=0.5)
    assert (float(sums.update_P[0]), float(sums.bits)) == (0.5, 0.5)


def test_the_clip_comes_to_rest_at_the_quantile_of_the_norms():
    rng = np.random.default_rng(0)
    terms = replace(MECHANISM, clip=AdaptiveClip(0.5, quantile=0.8)).round_params._replace(
        bit_noise_stddev=np.float32(0)
    )
    clip = jnp.float32(0.01)
    norms = rng.uniform(1, 2, 20)  # as many as are expected
    for round in range(200):
        sums = summed(norms[:, None], np.ones(20, int), clip)
        _, clip = private_mean(terms, clip, sums, jax.random.key(round))
    assert float(clip) == pytest.approx(np.quantile(norms, 0.8), rel=0.05)


def test_noise_is_calibrated_to_the_clip_of_the_round_never_the_next():
    terms = MECHANISM.round_params._replace(clip_learning_rate=np.float32(5.0), bit_noise_stddev=np.float32(0))
    all_cut = nothing(20_000)._replace(bits=jnp.float32(-MECHANISM.expected_cohort_size() / 2))
    update_P, clip = private_mean(terms, jnp.float32(0.5), all_cut, jax.random.key(1))
    spread = float(jnp.std(update_P)) * float(terms.expected_weight)
    assert spread == pytest.approx(MECHANISM.update_noise_stddev * 0.5, rel=0.03)
    assert float(clip) > 5.0  # the next clip is another number altogether


def test_noise_is_the_same_on_every_parameter_whatever_the_tensor():
    update_P, _ = private_mean(MECHANISM.round_params, jnp.float32(0.5), nothing(60_000), jax.random.key(2))
    spreads = np.asarray(update_P).reshape(6, -1).std(axis=1) * float(MECHANISM.round_params.expected_weight)
    np.testing.assert_allclose(spreads, MECHANISM.update_noise_stddev * 0.5, rtol=0.04)
    assert abs(np.corrcoef(np.asarray(update_P).reshape(2, -1))[0, 1]) < 0.03


def test_the_bits_get_the_noise_that_was_accounted():
    terms = MECHANISM.round_params._replace(clip_learning_rate=np.float32(1.0))
    keys = jax.random.split(jax.random.key(3), 4000)
    _, clip_R = jax.vmap(lambda key: private_mean(terms, jnp.float32(1.0), nothing(1), key))(keys)
    share_R = -np.log(np.asarray(clip_R)) + float(terms.quantile) - 0.5
    assert share_R.std() * MECHANISM.expected_cohort_size() == pytest.approx(MECHANISM.bit_noise_stddev, rel=0.05)


def test_a_zero_update_is_not_divided_by_its_norm():
    sums = summed(np.zeros((3, 5)), [0, 1, 1])
    np.testing.assert_array_equal(sums.update_P, np.zeros(5))
    assert float(sums.bits) == 1.5
    assert int(sums.refused_G.sum()) == 0


def test_an_update_that_is_not_finite_counts_as_absent():
    update_CP = np.ones((4, 5), np.float32)
    update_CP[1, 2], update_CP[2, 0], update_CP[3] = np.nan, np.inf, 3e38  # the last has an infinite norm
    sums = summed(update_CP, [0, 0, 1, 1])
    alone = summed(update_CP[:1], [0])
    np.testing.assert_array_equal(sums.update_P, alone.update_P)
    assert float(sums.bits) == float(alone.bits)
    np.testing.assert_array_equal(sums.refused_G, [1, 2])


def test_nothing_divides_by_how_many_clients_happened_to_come():
    quiet = MECHANISM.round_params._replace(update_noise_stddev=np.float32(0))
    one, _ = private_mean(quiet, jnp.float32(0.5), summed(np.ones((1, 4)), [0]), jax.random.key(0))
    three, _ = private_mean(quiet, jnp.float32(0.5), summed(np.ones((3, 4)), [0, 0, 0]), jax.random.key(0))
    np.testing.assert_allclose(three, 3 * np.asarray(one), rtol=1e-6)


def test_the_paper_read_literally_divides_by_who_came():
    literal = mechanism_of((50, 0.0, 1.0), (55, 1.5, 0.1), rate=0.1, sampling="fixed")
    group_C = literal.client_group_indices[sample_cohort(literal, np.random.default_rng(0))]
    came_0, came_1 = (group_C == 0).sum(), (group_C == 1).sum()
    assert (came_0, came_1) == (5, 6)
    quiet = literal.round_params._replace(update_noise_stddev=np.float32(0))
    update_P, _ = private_mean(
        quiet, jnp.float32(9.0), summed(np.ones((11, 1)), group_C, 9.0, literal), jax.random.key(0)
    )
    assert float(update_P[0]) == pytest.approx(1.0)  # the mean of ones, whatever the weights


def test_a_group_that_never_comes_divides_nothing_by_zero():
    never = mechanism_of((5, 0.0, 1.0), (4, 1.5, 0.1), rate=0.01, sampling="fixed")
    for quantile in (0.5, 0.3):
        of_clip = replace(never, clip=AdaptiveClip(initial=9.0, quantile=quantile))
        update_P, clip = private_mean(of_clip.round_params, jnp.float32(9.0), nothing(3), jax.random.key(0))
        np.testing.assert_array_equal(update_P, np.zeros(3))
        assert float(clip) == pytest.approx(9.0)


def test_poisson_cohorts_are_independent_coins():
    mechanism = replace(MECHANISM, groups=(MECHANISM.groups[0], replace(MECHANISM.groups[1], sampling_rate=0.6)))
    rng = np.random.default_rng(0)
    here_RK = np.zeros((4000, 100))
    for row in here_RK:
        row[sample_cohort(mechanism, rng)] = 1
    rate_K = np.repeat([0.2, 0.6], 50)
    assert np.abs(here_RK.mean(0) - rate_K).max() < 5 * 0.5 / math.sqrt(4000)
    for group in (slice(0, 50), slice(50, 100)):
        rate = rate_K[group][0]
        assert here_RK[:, group].sum(1).var() == pytest.approx(50 * rate * (1 - rate), rel=0.1)  # binomial, not fixed
    assert abs(np.corrcoef(here_RK[:, 0], here_RK[:, 1])[0, 1]) < 0.06


def test_fixed_cohorts_have_one_size_and_nobody_twice():
    mechanism = replace(MECHANISM, sampling="fixed")
    for seed in range(20):
        cohort = sample_cohort(mechanism, np.random.default_rng(seed))
        assert len(cohort) == len(set(cohort)) == 20
        assert (cohort < 50).sum() == 10  # nor do the groups' counts tell anything about anyone


def test_sampling_a_million_clients_takes_no_more_than_a_cohort():
    huge = mechanism_of((500_000, 0.0, 1.0), (500_000, 1.0, 1.0), rate=0.001)
    cohort = sample_cohort(huge, np.random.default_rng(0))
    assert 800 < len(cohort) < 1200
    assert len(set(cohort)) == len(cohort)
    assert cohort.max() > 500_000


def after(server: ServerOptimizer, *updates: float) -> list:
    """The server's states after rounds that each release this update, without noise."""
    alone = mechanism_of((1, 0.0, 1.0), rate=1.0, clip=9.0)
    states = [initial_state(alone, server, jnp.zeros(1))]
    for update in updates:
        sums = summed([[update]], [0], 9.0, alone)
        states.append(finish_round(server, alone.round_params, states[-1], sums, jax.random.key(0)))
    return states[1:]


def test_the_average_weighs_the_models_after_each_round_and_makes_up_for_its_start():
    server = ServerOptimizer(average=0.5)
    weight_R = np.array([0.125, 0.25, 0.5])
    state = after(server, 1, 1, 1)[-1]
    assert float(averaged_model(server, state)[0]) == pytest.approx(weight_R @ [1, 2, 3] / weight_R.sum())


def test_momentum_goes_on_with_the_share_of_the_last_step_that_was_asked_for():
    states = after(ServerOptimizer(learning_rate=0.5, momentum=0.8), 1, 1)
    assert [float(state.theta_P[0]) for state in states] == pytest.approx([0.5, 1.4])


@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
def test_adam_and_yogi_without_momentum_stay_where_they_are_when_nothing_comes(optimizer):
    for momentum, moves in ((0.0, False), (0.5, True)):
        first, second = after(ServerOptimizer(optimizer, learning_rate=0.1, momentum=momentum), 1, 0)
        assert (float(second.theta_P[0]) > float(first.theta_P[0]) + 1e-3) == moves


@pytest.mark.parametrize(("pushed", "stays"), [(1e6, MIN_CLIP), (-1e6, MAX_VALUE)])
def test_a_clip_never_gets_where_noise_vanishes_or_is_infinite(pushed, stays):
    """At clip 0 there is no noise, and 0 / 0 shows who sent a zero: the clip has bounds, whatever the bits say."""
    terms = mechanism_of((19, 1.5, 1.0), clip=AdaptiveClip(initial=stays)).round_params
    sums = Sums(jnp.zeros(4), jnp.float32(pushed), jnp.zeros(1, jnp.int32))
    update, clip = private_mean(terms, jnp.float32(stays), sums, jax.random.key(0))
    assert clip == jnp.float32(stays)
    assert jnp.isfinite(update).all()
    assert (update != 0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "add"), ("learning_rate", 0.0), ("learning_rate", math.inf), ("momentum", 1.0), ("average", 1.0)],
)
def test_unknown_optimizers_and_rates_are_refused(field, value):
    with raises_field(field):
        ServerOptimizer(**{field: value})


def test_an_optax_transformation_is_an_optimizer():
    ours, optax_own = after(ServerOptimizer(learning_rate=0.5, momentum=0.8), 1, 1), after(optax.sgd(0.5, 0.8), 1, 1)
    assert [state.theta_P for state in ours] == [state.theta_P for state in optax_own]
