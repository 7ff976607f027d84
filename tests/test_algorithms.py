"""FedHDP and the baselines: what each changes, and what all of them keep."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from helpers import mechanism_of, mechanisms, raises_field, tiny_data
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedhdp.algorithms import (
    ALGORITHMS,
    TwoStages,
    algorithm_options,
    apply_algorithm,
    dp_fedavg,
    gdpfed,
    hdp_fedavg,
    idp_sample,
    idp_scale,
    local_only,
    threshold,
    time_adaptive,
    weiavg,
)
from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.mechanism import SENSITIVITY, Mechanism, PrivacyGroup, ScheduledMechanism, mechanism_at
from fedhdp.models import mlp
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.costs import PrivacyCost, scheduled_costs
from fedhdp.server import ServerOptimizer, Sums, finish_round, initial_state
from fedhdp.simulation import Simulation
from fedhdp.theory import RunPricing
from fedhdp.theory.pricing import RoughPricing

DATA, MODEL = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6]), mlp(12, 5, 3)
TRAINING = LocalTraining(epochs=1, batch_size=4, learning_rate=0.3)
NOT_PRIVATE = ("non_private", "local_only")
CHANGES_RATES = ("idp_sample", "time_adaptive")  # and so needs Poisson sampling
ROUNDS, DELTA = 20, 1e-4
PRICING = RunPricing(ROUNDS, DELTA, "rdp")


@st.composite
def small_mechanisms(draw: st.DrawFn) -> Mechanism:
    """A mechanism of three groups for the 19 clients of DATA: one shape, so that it compiles once."""
    groups = []
    for i, clients in enumerate((4, 5, 10)):
        noise = draw(st.sampled_from([0.0, 0.5, 1.5, 4.0]))
        weight, pull = draw(st.sampled_from([0.0, 0.01, 1.0])), draw(st.sampled_from([0.0, 0.5]))
        groups.append(PrivacyGroup(f"group {i}", clients, noise, 0.5, weight, pull))
    clip = draw(st.sampled_from([0.5, AdaptiveClip(0.3), AdaptiveClip(0.3, bit_noise_stddev=15.0)]))
    noise, sampling = draw(st.sampled_from(["shared", "per_group"])), draw(st.sampled_from(["poisson", "fixed"]))
    return Mechanism(tuple(groups), clip, noise, sampling)


def run_algorithm(name: str, chosen: Mechanism) -> ScheduledMechanism:
    """What an algorithm makes of a mechanism; other examples where it does not admit the sampling."""
    assume(chosen.sampling == "poisson" or name not in CHANGES_RATES)
    return apply_algorithm(name, chosen, PRICING)


def check_promise(chosen: Mechanism, mechanism: ScheduledMechanism, name: str) -> None:
    """No group gets less noise than it chose at its sampling rate, nor a larger epsilon at another; without privacy none."""
    costs, changed = scheduled_costs(mechanism, ROUNDS), mechanism_at(mechanism, 0)
    for chosen_group, group in zip(chosen.groups, changed.groups, strict=True):
        if name in NOT_PRIVATE:
            assert group.opted_out
            continue
        promised = chosen_group.noise_multiplier / SENSITIVITY[chosen.sampling]
        promise = PrivacyCost(promised, chosen.sampling_probability(chosen_group), chosen.sampling, ROUNDS)
        if name not in CHANGES_RATES:
            [cost] = costs[group.name]
            assert cost.noise_multiplier >= promise.noise_multiplier * (1 - 1e-12)
            assert cost.sampling_rate <= promise.sampling_rate
        elif promised > 0:
            assert compose(costs[group.name], DELTA) <= compose([promise], DELTA) * (1 + 1e-8)
        assert sum(cost.rounds for cost in costs[group.name]) == ROUNDS


def check_empty_round(mechanism: Mechanism) -> None:
    """A round without clients adds noise to the model, and without noise changes nothing."""
    params, key, optimizer = mechanism.round_params, jax.random.key(0), ServerOptimizer()
    before = initial_state(mechanism, optimizer, jnp.ones(8))
    refused_G = jnp.zeros(len(mechanism.groups), jnp.int32)
    empty = Sums(jnp.zeros(8), jnp.float32(0), refused_G)
    after = finish_round(optimizer, params, before, empty, key)
    noise = float(params.update_noise_stddev) if params.expected_weight > 0 else 0.0
    assert bool((after.theta_P != before.theta_P).any()) == (noise > 0)
    if params.bit_noise_stddev == 0:
        assert float(after.clip) == pytest.approx(float(before.clip))
    np.testing.assert_array_equal(after.refused_G, refused_G)


def check_resume(mechanism: ScheduledMechanism) -> None:
    """A simulation that goes on from a saved state ends in the same state, to the bit."""
    uninterrupted, interrupted, resumed = (Simulation(DATA, MODEL, mechanism, TRAINING, noise_seed=5) for _ in range(3))
    uninterrupted.run(3)
    interrupted.run(1)
    with tempfile.TemporaryDirectory() as folder:
        interrupted.save(Path(folder) / "state.npz")
        resumed.load(Path(folder) / "state.npz")
    resumed.run(3)
    assert uninterrupted.round == resumed.round == 3
    for a, b in zip(jax.tree.leaves(uninterrupted.server_state), jax.tree.leaves(resumed.server_state), strict=True):
        np.testing.assert_array_equal(a, b)
    clients = np.arange(DATA.num_clients)
    np.testing.assert_array_equal(uninterrupted.personal_models(clients), resumed.personal_models(clients))


def check_configuration(mechanism: Mechanism) -> None:
    """A mechanism survives its encoding."""
    assert msgspec.json.decode(msgspec.json.encode(mechanism), type=Mechanism) == mechanism


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=6, deadline=None)
@given(chosen=small_mechanisms())
def test_every_algorithm_keeps_its_promises(name, chosen):
    mechanism = run_algorithm(name, chosen)
    check_promise(chosen, mechanism, name)
    check_empty_round(mechanism_at(mechanism, ROUNDS - 1))
    check_resume(mechanism)
    check_configuration(mechanism_at(mechanism, ROUNDS - 1))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in CHANGES_RATES])
@given(chosen=mechanisms())
@settings(max_examples=30, deadline=None)
def test_no_group_gets_less_noise_than_it_chose(name, chosen):
    mechanism = run_algorithm(name, chosen)
    check_promise(chosen, mechanism, name)
    if name in NOT_PRIVATE:
        assert (mechanism.update_noise_stddev, mechanism.bit_noise_stddev) == (0.0, 0.0)


@given(mechanisms())
def test_local_only_sends_nothing_and_pulls_nothing(chosen):
    mechanism = local_only(chosen)
    assert {(group.weight, group.pull) for group in mechanism.groups} == {(0.0, 0.0)}
    assert all(mechanism.effective_noise_multiplier(group) == math.inf for group in mechanism.groups)


def test_dp_fedavg_adds_the_strictest_noise_once():
    mechanism = mechanism_of((4, 0.0, 1.0), (5, 0.5, 0.7), (10, 1.5, 0.2), clip=1.0, noise="per_group")
    assert dp_fedavg(mechanism).update_noise_stddev == pytest.approx(1.5, rel=1e-4)
    assert hdp_fedavg(mechanism).update_noise_stddev == pytest.approx(math.hypot(0.5, 1.5), rel=1e-4)


LEVELS = mechanism_of((5, 0.0, 1.0), (45, 1.5, 0.2), (50, 3.0, 0.1), clip=1.0, rate=0.1)
OPEN, RELAXED, STRICT = (group.name for group in LEVELS.groups)


def weights_of(mechanism: Mechanism) -> list[float]:
    return [group.weight for group in mechanism.groups]


def test_threshold_leaves_stricter_clients_out_and_gives_the_others_its_noise():
    mechanism = threshold(LEVELS, level=RELAXED)
    assert [(group.noise_multiplier, group.weight) for group in mechanism.groups] == [(1.5, 1), (1.5, 1), (3.0, 0)]
    assert [group.sampling_rate > 0 for group in mechanism.groups] == [True, True, False]
    costs = scheduled_costs(mechanism, ROUNDS)
    assert compose(costs[STRICT], DELTA) == 0
    assert threshold(LEVELS, level=STRICT) == dp_fedavg(LEVELS)


def test_threshold_takes_the_level_of_least_expected_error():
    levels = {name: threshold(LEVELS, level=name) for name in (OPEN, RELAXED, STRICT)}
    for parameters in (1, 100_000):  # noise counts little, or much
        pricing = RunPricing(ROUNDS, DELTA, "rdp", parameters)
        best = min(levels.values(), key=pricing.error)
        assert threshold(LEVELS, pricing) == best
    assert threshold(LEVELS, RunPricing(ROUNDS, DELTA, "rdp", 100_000)) == levels[OPEN]
    with raises_field("level"):
        threshold(LEVELS)
    with raises_field("level"):
        threshold(LEVELS, PRICING, level="nobody")


def test_weiavg_weighs_by_epsilon():
    epsilons = [PRICING.epsilon(LEVELS, group) for group in LEVELS.groups]
    assert epsilons[0] == math.inf
    expected = [1.0, epsilons[1] / 200, epsilons[2] / 200]
    assert weights_of(weiavg(LEVELS, PRICING, opted_out_epsilon=200.0)) == pytest.approx(expected, rel=1e-6)
    below = weiavg(
        LEVELS, PRICING, opted_out_epsilon=epsilons[1] / 2
    )  # those who opted out never count less than others
    assert weights_of(below) == pytest.approx([1.0, 1.0, epsilons[2] / epsilons[1]], rel=1e-6)
    with raises_field("opted_out_epsilon"):
        weiavg(LEVELS, PRICING, opted_out_epsilon=math.inf)


def test_idp_scale_gives_every_group_its_own_noise_from_one():
    adaptive = mechanism_of((5, 0.0, 1.0), (45, 0.75, 0.3), (50, 3.0, 0.1), clip=AdaptiveClip(1.0))
    for chosen in (LEVELS, adaptive):
        mechanism = idp_scale(chosen, PRICING)
        for group in mechanism.groups[1:]:
            assert mechanism.effective_noise_multiplier(group) == pytest.approx(group.noise_multiplier, rel=1e-3)
        assert max(weights_of(mechanism)) == mechanism.groups[0].weight == 1.0


def test_idp_sample_has_one_noise_and_the_same_cohort():
    mechanism = idp_sample(LEVELS, PRICING)
    relaxed, strict = mechanism.groups[1:]
    assert relaxed.noise_multiplier == strict.noise_multiplier
    assert mechanism.expected_cohort_size() == pytest.approx(LEVELS.expected_cohort_size(), rel=0.01)
    assert mechanism.groups[0].sampling_rate >= relaxed.sampling_rate > strict.sampling_rate
    assert weights_of(mechanism) == [1.0, 1.0, 1.0]
    assert mechanism.groups[0].opted_out
    for chosen, group in zip(LEVELS.groups[1:], mechanism.groups[1:], strict=True):
        spent = compose(scheduled_costs(mechanism, ROUNDS)[group.name], DELTA)
        assert 0.99 <= spent / PRICING.epsilon(LEVELS, chosen) <= 1


def test_time_adaptive_saves_first_and_spends_all():
    schedule = time_adaptive(LEVELS, PRICING, saving_rounds=0.25, saving_rate=0.5)
    assert isinstance(schedule, TwoStages)
    rates = [[group.sampling_rate for group in schedule(round).groups] for round in (0, 4, 5, ROUNDS - 1)]
    assert rates[0] == rates[1] == [0.1, 0.05, 0.05]
    assert rates[2] == rates[3]
    assert rates[2][0] == 0.1
    assert min(rates[2][1:]) > 0.1
    assert weights_of(schedule(7)) == weights_of(LEVELS)
    for group in LEVELS.groups[1:]:
        spent = compose(scheduled_costs(schedule, ROUNDS)[group.name], DELTA)
        assert 0.99 <= spent / PRICING.epsilon(LEVELS, group) <= 1
    assert time_adaptive(LEVELS, PRICING, saving_rounds=0.0) == LEVELS


@pytest.mark.parametrize("name", CHANGES_RATES)
def test_fixed_cohorts_are_refused_where_rates_keep_epsilons(name):
    with raises_field("sampling"):
        apply_algorithm(name, mechanism_of((5, 0.0, 1.0), (45, 0.75, 0.3), clip=1.0, sampling="fixed"), PRICING)


def test_gdpfed_adds_every_groups_own_noise():
    assert gdpfed(LEVELS).update_noise_stddev == pytest.approx(math.hypot(1.5, 3.0), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("fedhdp", {"level": "open"}, "options"),
        ("weiavg", {"epsilon": 3.0}, "options"),
        ("weiavg", {"opted_out_epsilon": "many"}, "options.opted_out_epsilon"),
        ("weiavg", {"opted_out_epsilon": -1.0}, "opted_out_epsilon"),
        ("threshold", {"level": 3}, "options.level"),
        ("time_adaptive", {"saving_rounds": 1.0}, "saving_rounds"),
        ("time_adaptive", {"saving_rate": 1.5}, "saving_rate"),
    ],
)
def test_wrong_options_are_refused(name, options, field):
    with raises_field(field):
        apply_algorithm(name, LEVELS, PRICING, options)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(chosen=mechanisms())
@settings(max_examples=20, deadline=None)
def test_rough_pricing_takes_every_mechanism(name, chosen):
    assume(chosen.sampling == "poisson" or name not in CHANGES_RATES)
    mechanism = apply_algorithm(name, chosen, RoughPricing(ROUNDS))
    assert mechanism_at(mechanism, 0).group_sizes == chosen.group_sizes


def test_all_options_have_defaults_of_their_types():
    options = {name: algorithm_options(name) for name in ALGORITHMS}
    assert options["idp_sample"] == {"opted_out_epsilon": float}
    assert options["threshold"] == {"level": str}
    assert options["fedhdp"] == {}
