"""Accounting against published numbers, closed forms, and adversaries who know everything else."""

from __future__ import annotations

import math

import msgspec
import pytest
from helpers import mechanism_of, raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy_helpers import LAYERS, mechanisms, one_group
from scipy.stats import norm

from fedhdp.algorithms import local_only
from fedhdp.clips import AdaptiveClip
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import (
    compose,
    epsilon,
    epsilon_reports,
    event,
    format_epsilon,
    gaussian_epsilon,
    rounds_left,
    within_budget,
)
from fedhdp.privacy.costs import PrivacyCost, privacy_cost, privacy_costs
from fedhdp.privacy.ledger import Budget


@pytest.mark.parametrize(
    ("rate", "noise", "rdp", "pld"), [(0.05, 1.5, 3.608, 3.24), (0.03, 4, 0.576, 0.511), (0.03, 1, 4.122, 3.627)]
)
def test_the_papers_settings(rate, noise, rdp, pld):
    assert gaussian_epsilon(noise, rate, 500, 1e-4, "rdp") == pytest.approx(rdp, abs=6e-4)
    assert gaussian_epsilon(noise, rate, 500, 1e-4, "pld") == pytest.approx(pld, abs=3e-3)
    assert epsilon(one_group(noise, rate), 500, 1e-4)["private"] == gaussian_epsilon(noise, rate, 500, 1e-4)


def test_poisson_is_not_assumed_while_sampling_fixed_cohorts():
    """Such cohorts are drawn without replacement, and neighbours differ by the replacement of one client."""
    assert gaussian_epsilon(1.5, 0.05, 500, 1e-4, sampling="fixed") == pytest.approx(8.03, abs=5e-3)
    fixed, poisson = (epsilon(one_group(1.5, sampling=sampling), 500, 1e-4) for sampling in ("fixed", "poisson"))
    assert fixed["private"] > 2 * poisson["private"]


def test_fixed_cohorts_have_the_rate_of_whole_clients():
    mechanism = Mechanism(groups=(PrivacyGroup("private", 55, 1.0, 0.1),), clip=1.0, sampling="fixed")
    assert privacy_costs(mechanism)["private"].sampling_rate == 6 / 55


def test_replacing_a_client_changes_a_sum_by_two_clips():
    """Every other client sends −S; the client sends +S, or −S: fixed cohorts then differ by 2S whenever it is sampled."""
    attack = gaussian_epsilon(1.5 / 2, 0.05, 500, 1e-4, "pld")
    assert attack > 11  # so the 8.03 of noise 1.5 times the sensitivity does not hold for noise of 1.5 clips
    fixed = epsilon(one_group(1.5, sampling="fixed"), 500, 1e-4)["private"]
    assert fixed == gaussian_epsilon(0.75, 0.05, 500, 1e-4, sampling="fixed")
    assert fixed > attack


def hockey_stick(noise: float, rate: float, eps: float) -> float:
    """The delta of one round of the sampled Gaussian in closed form: of removing a client, which is the worse."""
    odds = 1 - (1 - math.exp(eps)) / rate  # exp of where (1 − q) + q·exp(loss) = exp(eps)
    x = noise**2 * math.log(odds) + 0.5
    tail = norm.sf([x - 1, x], scale=noise)
    return float(rate * tail[0] + (1 - rate) * tail[1] - math.exp(eps) * tail[1])


@pytest.mark.parametrize(("noise", "rate", "eps"), [(0.8, 0.05, 1.0), (1.5, 0.3, 0.5), (0.5, 0.01, 2.0)])
def test_one_round_agrees_with_the_closed_form(noise, rate, eps):
    delta = hockey_stick(noise, rate, eps)
    assert gaussian_epsilon(noise, rate, 1, delta, "pld") == pytest.approx(eps, rel=2e-3)
    assert gaussian_epsilon(noise, rate, 1, delta, "rdp") > eps


def test_many_full_rounds_agree_with_the_gaussian_closed_form():
    mu = math.sqrt(100) / 20  # 100 rounds at z = 20 are one Gaussian mechanism (Balle & Wang, 2018)
    delta = norm.cdf(mu / 2 - 1 / mu) - math.e * norm.cdf(-mu / 2 - 1 / mu)
    assert gaussian_epsilon(20, 1, 100, delta, "pld") == pytest.approx(1, rel=1e-3)


def test_opted_out_and_unsampled_groups():
    groups = (
        PrivacyGroup("open", 10, 0.0, 0.1),
        PrivacyGroup("unweighted", 10, 1.0, 0.1, weight=0.0),
        PrivacyGroup("unsampled", 10, 1.0, 0.0),
        PrivacyGroup("private", 10, 1.0, 0.1),
    )
    mechanism = Mechanism(groups=groups, clip=1.0)
    result = epsilon(mechanism, 10, 1e-5)
    assert result["open"] == math.inf
    assert result["unweighted"] == result["unsampled"] == 0
    assert result["private"] > 0
    assert epsilon(mechanism, 0, 1e-5)["private"] == 0


def test_clip_bits_cost_a_group_of_weight_0():
    groups = (PrivacyGroup("silent", 500, 1.0, 0.1, weight=0.0), PrivacyGroup("loud", 500, 1.0, 0.1))
    mechanism = Mechanism(groups=groups, clip=AdaptiveClip(1.0, bit_noise_stddev=5.0))
    result = epsilon(mechanism, 100, 1e-5)
    assert result["silent"] == pytest.approx(gaussian_epsilon(2 * 5.0, 0.1, 100, 1e-5))
    assert result["silent"] > 0
    assert result["loud"] == pytest.approx(gaussian_epsilon(1.0, 0.1, 100, 1e-5))


@settings(max_examples=200, deadline=None)
@given(mechanisms)
def test_the_noise_accounted_is_the_noise_that_the_server_adds(mechanism):
    """An adversary who knows all but one client sees at most its sensitivity and half a bit, each over its noise."""
    params = mechanism.round_params
    for group in mechanism.groups:
        if group.opted_out:
            continue
        update = mechanism.l2_sensitivity(group) / float(params.update_noise_stddev) if group.weight else 0.0
        bit = 0.5 / float(params.bit_noise_stddev) if mechanism.is_adaptive else 0.0
        signal = math.hypot(update, *[bit] * max(len(mechanism.layers), 1))
        accounted = 1 / privacy_costs(mechanism)[group.name].noise_multiplier
        assert signal <= accounted * (1 + 1e-6)
        if mechanism.noise == "shared":
            assert signal == pytest.approx(accounted, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(mechanisms, st.floats(0.3, 20), st.floats(1e-3, 3))
def test_other_groups_never_take_noise_from_a_group(mechanism, noise, weight):
    first, *others = mechanism.groups
    group = msgspec.structs.replace(first, noise_multiplier=noise, weight=weight)
    clip = AdaptiveClip(1.0, bit_noise_stddev=max(g.noise_multiplier for g in (group, *others)))
    changed = Mechanism(groups=(group, *others), clip=clip, noise=mechanism.noise)
    assert changed.effective_noise_multiplier(group) >= noise * (1 - 1e-9)


def test_shared_noise_counts_in_full_for_every_group():
    groups = (PrivacyGroup("lax", 500, 1.0, 0.05), PrivacyGroup("strict", 500, 4.0, 0.05))
    shared, per_group = (
        epsilon(Mechanism(groups=groups, clip=1.0, noise=noise), 500, 1e-5) for noise in ("shared", "per_group")
    )
    assert shared["lax"] == shared["strict"] == per_group["strict"]
    assert per_group["lax"] == gaussian_epsilon(1.0, 0.05, 500, 1e-5)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_composition_is_between_the_largest_and_the_sum(accountant):
    costs = PrivacyCost(1.5, 0.05, "poisson", 300), PrivacyCost(3.0, 0.1, "poisson", 200)
    single = [compose([cost], 1e-5, accountant) for cost in costs]
    assert max(single) < compose(costs, 1e-5, accountant) < sum(single)
    halves = [costs[0]._replace(rounds=150)] * 2
    assert compose(halves, 1e-5, accountant) == pytest.approx(single[0], rel=1e-3)


def test_samplings_of_different_adjacency_do_not_compose():
    with raises_field("sampling"):
        compose([PrivacyCost(1.5, 0.05, "poisson"), PrivacyCost(1.5, 0.05, "fixed")], 1e-5)


def test_fixed_cohorts_have_no_pld():
    mechanism = one_group(1.5, sampling="fixed")
    with raises_field("accountant"):
        epsilon_reports(mechanism, 500, 1e-4, "pld")
    assert epsilon_reports(mechanism, 500, 1e-4)["private"].accountant == "rdp"


def test_rounds_left():
    once, before = PrivacyCost(1.5, 0.05, "poisson"), [PrivacyCost(2.0, 0.1, "poisson", 50)]
    left = rounds_left(before, once, Budget(4.0, 1e-5))
    assert compose([*before, once._replace(rounds=left)], 1e-5) <= 4.0
    assert compose([*before, once._replace(rounds=left + 1)], 1e-5) > 4.0
    assert rounds_left(before, once, Budget(0.1, 1e-5)) == 0
    assert rounds_left(before, once._replace(noise_multiplier=math.inf), Budget(0.1, 1e-5)) == math.inf
    assert rounds_left(before, once, Budget(math.inf, 1e-5)) == math.inf


def test_a_budget_is_kept_to_the_last_digit():
    costs = [PrivacyCost(1.3, 0.1, "poisson", 7)]
    exact = compose(costs, 1e-5)
    assert within_budget(costs, Budget(exact, 1e-5))
    assert not within_budget(costs, Budget(exact * (1 - 1e-9), 1e-5))


def test_a_report_prints_everything_it_rests_on():
    text = str(epsilon_reports(one_group(1.5), 500, 1e-4, "pld")["private"])
    for part in ("3.23", "q 0.05", "z 1.5", "500 rounds", "delta 0.0001", "add or remove one", "Poisson", "PLD"):
        assert part in text
    text = str(epsilon_reports(one_group(1.5, sampling="fixed"), 500, 1e-4)["private"])
    for part in ("22.4", "z 0.75", "without replacement", "replace one", "RDP"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((-1.0, 0.05, 500, 1e-4), "noise_multiplier"),
        ((math.nan, 0.05, 500, 1e-4), "noise_multiplier"),
        ((1.5, 1.5, 500, 1e-4), "sampling_rate"),
        ((1.5, math.nan, 500, 1e-4), "sampling_rate"),
        ((1.5, 0.05, -1, 1e-4), "rounds"),
        ((1.5, 0.05, 0.5, 1e-4), "rounds"),
        ((1.5, 0.05, 500, 0.0), "delta"),
        ((1.5, 0.05, 500, math.nan), "delta"),
        ((1.5, 0.05, 500, 1e-4, "exact"), "accountant"),
        ((1.5, 0.05, 500, 1e-4, "rdp", "shuffled"), "sampling"),
    ],
)
def test_invalid_values(arguments, field):
    with raises_field(field):
        gaussian_epsilon(*arguments)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"sampling_rate": math.nan}, "sampling_rate"),
        ({"sampling_rate": 0.0, "rounds": math.nan}, "rounds"),
        ({"rounds": -400}, "rounds"),
        ({"sampling": "shuffled"}, "sampling"),
    ],
)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_an_invalid_cost_never_lowers_epsilon(fields, field, accountant):
    cost = PrivacyCost(1.5, 0.05, "poisson", 500)
    with raises_field(field):
        compose([cost, cost._replace(**fields)], 1e-5, accountant)


def test_a_group_of_another_mechanism_is_not_free():
    mechanism = one_group(1.0)
    with raises_field("group"):
        privacy_cost(mechanism, msgspec.structs.replace(mechanism.groups[0], pull=1.0))


@pytest.mark.parametrize("answer", [math.nan, -math.inf])
def test_pld_without_a_usable_result_falls_back_to_rdp(answer, monkeypatch):
    monkeypatch.setattr("dp_accounting.pld.PLDAccountant.get_epsilon", lambda *_: answer)
    assert gaussian_epsilon(1.7, 0.031, 77, 1e-5, "pld") == gaussian_epsilon(1.7, 0.031, 77, 1e-5, "rdp")


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_extreme_values(accountant):
    assert gaussian_epsilon(1e-9, 0.05, 1, 1e-5, accountant) == math.inf
    for noise, rate, rounds in [(0.05, 1.0, 1000), (1e6, 0.5, 10**6), (0.5, 1e-5, 1000), (1.0, 1 - 1e-12, 3)]:
        assert gaussian_epsilon(noise, rate, rounds, 1e-5, accountant) >= 0


def test_format_epsilon_rounds_up():
    assert format_epsilon(8.0446, 2) == "8.05"
    assert format_epsilon(3.60807) == "3.609"
    assert format_epsilon(0.000139, 3) == "0.001"
    assert (format_epsilon(3.6), format_epsilon(3.6, 2), format_epsilon(12345.1)) == ("3.6", "3.60", "1.235e+04")
    assert format_epsilon(math.inf) == format_epsilon(math.inf, 2) == "∞"


def test_the_smaller_of_two_bounds_is_returned():
    rdp, pld = (gaussian_epsilon(1.0, 0.01, 1000, 1e-16, accountant) for accountant in ("rdp", "pld"))
    assert 0 < pld <= rdp < math.inf
    sampled, unsampled = (gaussian_epsilon(100.0, rate, 1000, 1e-5, sampling="fixed") for rate in (0.9, 1.0))
    assert sampled <= unsampled * (1 + 1e-9)


def test_a_sampling_rate_is_never_rounded_down():
    for rate in (1 / 3, 2 / 3, 0.1, 1e-11 / 3):
        composed = event(PrivacyCost(1.0, rate, "fixed", 5))
        assert composed.event.sample_size / composed.event.source_dataset_size >= rate


@pytest.mark.parametrize("clip", [1.0, AdaptiveClip(initial=1.0), LAYERS])
def test_local_training_is_free(clip):
    mechanism = local_only(mechanism_of((10, 0.0, 1.0), (20, 1.5, 0.1), clip=clip))
    assert all(cost.free for cost in privacy_costs(mechanism, 500).values())
