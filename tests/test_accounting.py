"""Accounting against published numbers, closed forms, and adversaries who know everything else."""

import math
import subprocess
import sys

import msgspec
import pytest
from helpers import mechanism_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedhdp.algorithms import local_only
from fedhdp.mechanism import AdaptiveClip, Mechanism, PrivacyGroup
from fedhdp.privacy import accounting
from fedhdp.privacy.accounting import (
    PrivacyCost,
    compose,
    epsilon,
    epsilon_best_of,
    epsilon_reports,
    format_epsilon,
    gaussian_cost,
    gaussian_epsilon,
    privacy_costs,
)
from fedhdp.privacy.calibration import calibrate, noise_multiplier_for
from fedhdp.privacy.ledger import Budget
from fedhdp.privacy.tuning import tuning_reports


def one_group(multiplier: float, rate: float = 0.05, **fields) -> Mechanism:
    return Mechanism(groups=(PrivacyGroup("private", 1000, multiplier, rate),), clip=1.0, **fields)


@pytest.mark.parametrize(
    ("rate", "multiplier", "rdp", "pld"), [(0.05, 1.5, 3.608, 3.24), (0.03, 4, 0.576, 0.511), (0.03, 1, 4.122, 3.627)]
)
def test_the_papers_three_settings_cost_what_they_should(rate, multiplier, rdp, pld):
    assert gaussian_epsilon(multiplier, rate, 500, 1e-4, "rdp") == pytest.approx(rdp, abs=6e-4)
    assert gaussian_epsilon(multiplier, rate, 500, 1e-4, "pld") == pytest.approx(pld, abs=3e-3)
    assert epsilon(one_group(multiplier, rate), 500, 1e-4)["private"] == gaussian_epsilon(multiplier, rate, 500, 1e-4)


def test_fixed_cohorts_are_priced_without_replacement_and_replacing_one():
    assert gaussian_epsilon(1.5, 0.05, 500, 1e-4, sampling="fixed") == pytest.approx(8.03, abs=5e-3)


def test_fixed_cohorts_are_priced_at_the_rate_of_the_whole_clients_that_are_drawn():
    mechanism = Mechanism(groups=(PrivacyGroup("private", 55, 1.0, 0.1),), clip=1.0, sampling="fixed")
    assert privacy_costs(mechanism)["private"].sampling_rate == 6 / 55


def test_replacing_a_client_moves_a_clipped_sum_by_two_clips_and_a_mechanism_pays_for_both():
    """Everyone else sends −S; the client sends +S, or −S: fixed cohorts then differ by 2S whenever it comes."""
    attack = gaussian_epsilon(1.5 / 2, 0.05, 500, 1e-4, "pld")
    assert attack > 11  # so the 8.03 of noise 1.5 times the sensitivity is no price for noise of 1.5 clips
    priced = epsilon(one_group(1.5, sampling="fixed"), 500, 1e-4)["private"]
    assert priced == gaussian_epsilon(0.75, 0.05, 500, 1e-4, sampling="fixed")
    assert priced > attack


def hockey_stick(multiplier: float, rate: float, eps: float) -> float:
    """The delta of one round of the sampled Gaussian in closed form: of removing a client, which is the worse."""
    odds = 1 - (1 - math.exp(eps)) / rate  # exp of where (1 − q) + q·exp(loss) = exp(eps)
    x = multiplier**2 * math.log(odds) + 0.5
    tail = norm.sf([x - 1, x], scale=multiplier)
    return float(rate * tail[0] + (1 - rate) * tail[1] - math.exp(eps) * tail[1])


@pytest.mark.parametrize(("multiplier", "rate", "eps"), [(0.8, 0.05, 1.0), (1.5, 0.3, 0.5), (0.5, 0.01, 2.0)])
def test_one_round_agrees_with_the_closed_form_and_renyi_is_above_it(multiplier, rate, eps):
    delta = hockey_stick(multiplier, rate, eps)
    assert gaussian_epsilon(multiplier, rate, 1, delta, "pld") == pytest.approx(eps, rel=2e-3)
    assert gaussian_epsilon(multiplier, rate, 1, delta, "rdp") > eps


def test_many_rounds_of_everyone_agree_with_the_gaussian_closed_form():
    mu = math.sqrt(100) / 20  # 100 rounds at z = 20 are one Gaussian mechanism (Balle & Wang, 2018)
    delta = norm.cdf(mu / 2 - 1 / mu) - math.e * norm.cdf(-mu / 2 - 1 / mu)
    assert gaussian_epsilon(20, 1, 100, delta, "pld") == pytest.approx(1, rel=1e-3)


def test_those_who_opted_out_cost_infinity_and_those_never_seen_nothing():
    groups = (
        PrivacyGroup("open", 10, 0.0, 0.1),
        PrivacyGroup("unweighed", 10, 1.0, 0.1, weight=0.0),
        PrivacyGroup("absent", 10, 1.0, 0.0),
        PrivacyGroup("seen", 10, 1.0, 0.1),
    )
    cost = epsilon(Mechanism(groups=groups, clip=1.0), 10, 1e-5)
    assert cost["open"] == math.inf
    assert cost["unweighed"] == cost["absent"] == 0
    assert cost["seen"] > 0
    assert epsilon(Mechanism(groups=groups, clip=1.0), 0, 1e-5)["seen"] == 0


def test_the_clip_bits_are_charged_even_to_a_group_whose_updates_weigh_nothing():
    groups = (PrivacyGroup("silent", 500, 1.0, 0.1, weight=0.0), PrivacyGroup("loud", 500, 1.0, 0.1))
    mechanism = Mechanism(groups=groups, clip=AdaptiveClip(1.0, bit_noise_stddev=5.0))
    cost = epsilon(mechanism, 100, 1e-5)
    assert cost["silent"] == pytest.approx(gaussian_epsilon(2 * 5.0, 0.1, 100, 1e-5))
    assert cost["silent"] > 0
    assert cost["loud"] == pytest.approx(gaussian_epsilon(1.0, 0.1, 100, 1e-5))


names = st.sampled_from("abcd")
group = st.builds(
    PrivacyGroup,
    name=names,
    clients=st.integers(1, 2000),
    noise_multiplier=st.one_of(st.just(0.0), st.floats(0.3, 20)),
    sampling_rate=st.sampled_from([0.01, 0.05, 0.3, 1.0]),
    weight=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 3)),
)
mechanisms = st.builds(
    Mechanism,
    groups=st.lists(group, min_size=1, max_size=4, unique_by=lambda g: g.name).map(tuple),
    clip=st.sampled_from([1.0, AdaptiveClip(0.5), AdaptiveClip(0.5, bit_noise_stddev=15.0)]),
    noise=st.sampled_from(["shared", "per_group"]),
)


@settings(max_examples=200, deadline=None)
@given(mechanisms)
def test_what_is_priced_is_the_noise_that_the_server_adds(mechanism):
    """An adversary who knows all but one client sees at most its reach and half a bit, each over its noise."""
    terms = mechanism.round_params
    for g in mechanism.groups:
        if g.opted_out:
            continue
        update = mechanism.l2_sensitivity(g) / float(terms.update_noise_stddev) if g.weight else 0.0
        bit = 0.5 / float(terms.bit_noise_stddev) if isinstance(mechanism.clip, AdaptiveClip) else 0.0
        seen = math.hypot(update, bit)
        priced = 1 / privacy_costs(mechanism)[g.name].noise_multiplier
        assert seen <= priced * (1 + 1e-6)
        if mechanism.noise == "shared":
            assert seen == pytest.approx(priced, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(mechanisms, st.floats(0.3, 20), st.floats(1e-3, 3))
def test_nobody_elses_choice_takes_a_group_above_its_promise(mechanism, multiplier, weight):
    """Other groups' parameters may make a group's price smaller, never larger than its own multiplier costs."""
    first, *others = mechanism.groups
    mine = msgspec.structs.replace(first, noise_multiplier=multiplier, weight=weight)
    strictest = max(g.noise_multiplier for g in (mine, *others))
    clip = AdaptiveClip(1.0, bit_noise_stddev=strictest)
    got = Mechanism(groups=(mine, *others), clip=clip, noise=mechanism.noise).effective_noise_multiplier(mine)
    assert got >= multiplier * (1 - 1e-9)


def test_shared_noise_is_priced_at_the_multiplier_a_group_really_gets():
    groups = (PrivacyGroup("lax", 500, 1.0, 0.05), PrivacyGroup("strict", 500, 4.0, 0.05))
    shared, own = (
        epsilon(Mechanism(groups=groups, clip=1.0, noise=kind), 500, 1e-5) for kind in ("shared", "per_group")
    )
    assert shared["lax"] == shared["strict"] == own["strict"]
    assert own["lax"] == gaussian_epsilon(1.0, 0.05, 500, 1e-5)


targets = st.one_of(st.just(math.inf), st.floats(0.3, 10))


@settings(max_examples=8, deadline=None)
@given(
    mechanisms, st.lists(targets, min_size=4, max_size=4), st.sampled_from([1, 50, 1000]), st.sampled_from([1e-6, 1e-4])
)
def test_calibration_never_costs_more_than_asked_and_promises_within_one_percent(mechanism, wanted, rounds, delta):
    mechanism = msgspec.structs.replace(mechanism, clip=1.0 if mechanism.clip == 1.0 else AdaptiveClip(0.5))
    asked = {g.name: target for g, target in zip(mechanism.groups, wanted)}
    for accountant in ("rdp", "pld"):
        result = calibrate(mechanism, asked, rounds, delta, accountant)
        cost = epsilon(result, rounds, delta, accountant)
        for g in result.groups:
            assert cost[g.name] <= asked[g.name]
            if asked[g.name] < math.inf:
                promised = gaussian_epsilon(g.noise_multiplier, g.sampling_rate, rounds, delta, accountant)
                assert 0.99 * asked[g.name] <= promised <= asked[g.name]
            else:
                assert g.opted_out


def test_calibrating_fixed_cohorts_meets_the_target_by_their_own_price():
    result = calibrate(one_group(1.0, sampling="fixed"), {"private": 5.0}, 100, 1e-5)
    assert 4.95 <= epsilon(result, 100, 1e-5)["private"] <= 5.0


def test_calibration_leaves_groups_alone_that_are_not_named_and_refuses_those_it_does_not_know():
    groups = (PrivacyGroup("a", 10, 1.0, 0.1), PrivacyGroup("b", 10, 2.0, 0.1))
    mechanism = Mechanism(groups=groups, clip=1.0)
    assert calibrate(mechanism, {"a": 3.0}, 10, 1e-5).groups[1] == groups[1]
    with pytest.raises(ValueError, match=r"targets must be .*'c'"):
        calibrate(mechanism, {"c": 3.0}, 10, 1e-5)


def test_the_noise_for_an_epsilon_is_the_inverse_of_the_epsilon_for_a_noise():
    for accountant in ("rdp", "pld"):
        needed = noise_multiplier_for(3.6, 0.05, 500, 1e-4, accountant)
        assert 3.6 * 0.99 <= gaussian_epsilon(needed, 0.05, 500, 1e-4, accountant) <= 3.6
    assert noise_multiplier_for(math.inf, 0.05, 500, 1e-4) == 0


def test_runs_compose_to_more_than_each_and_less_than_their_sum():
    first, second = PrivacyCost(1.5, 0.05, "poisson", 300), PrivacyCost(3.0, 0.1, "poisson", 200)
    for accountant in ("rdp", "pld"):
        each = [compose([spent], 1e-5, accountant) for spent in (first, second)]
        assert max(each) < compose([first, second], 1e-5, accountant) < sum(each)
        halves = [first._replace(rounds=150)] * 2
        assert compose(halves, 1e-5, accountant) == pytest.approx(compose([first], 1e-5, accountant), rel=1e-3)


def test_samplers_of_different_adjacency_do_not_compose():
    with pytest.raises(ValueError, match=r"sampling must be the same .*\['fixed', 'poisson'\]"):
        compose([PrivacyCost(1.5, 0.05, "poisson"), PrivacyCost(1.5, 0.05, "fixed")], 1e-5)


def test_fixed_cohorts_have_no_pld_price_and_a_table_says_none():
    mechanism = one_group(1.5, sampling="fixed")
    with pytest.raises(ValueError, match="accountant must be 'rdp' where sampling is 'fixed', got 'pld'"):
        epsilon_reports(mechanism, 500, 1e-4, "pld")
    [(rdp, pld)] = accounting.reports_by_accountant(mechanism, 500, 1e-4)
    assert (rdp.accountant, pld) == ("rdp", None)


def test_rounds_left_are_those_that_fit_and_not_one_more():
    once, before = PrivacyCost(1.5, 0.05, "poisson"), [PrivacyCost(2.0, 0.1, "poisson", 50)]
    left = accounting.rounds_left(before, once, Budget(4.0, 1e-5))
    assert compose([*before, once._replace(rounds=left)], 1e-5) <= 4.0
    assert compose([*before, once._replace(rounds=left + 1)], 1e-5) > 4.0
    assert accounting.rounds_left(before, once, Budget(0.1, 1e-5)) == 0
    assert accounting.rounds_left(before, PrivacyCost(math.inf, 0.05, "poisson"), Budget(0.1, 1e-5)) == math.inf


def test_every_price_is_printed_with_all_that_it_rests_on():
    words = str(epsilon_reports(one_group(1.5), 500, 1e-4, "pld")["private"])
    for part in ("3.23", "q 0.05", "z 1.5", "500 rounds", "delta 0.0001", "add or remove one", "Poisson", "PLD"):
        assert part in words
    words = str(epsilon_reports(one_group(1.5, sampling="fixed"), 500, 1e-4)["private"])
    for part in ("22.4", "z 0.75", "without replacement", "replace one", "RDP"):
        assert part in words


@pytest.mark.parametrize("shape", [math.inf, 1.0, 0.0, 0.5])
def test_tuning_costs_more_than_a_run_and_far_less_than_all_its_runs(shape):
    mechanism = one_group(4.0, 0.03)
    once = epsilon(mechanism, 500, 1e-5)["private"]
    tuned = tuning_reports([mechanism], 500, 1e-5, trials=20, shape=shape)["private"]
    assert once < tuned.epsilon < compose([privacy_costs(mechanism, 500 * 20)["private"]], 1e-5)
    assert "20 trials" in tuned.basis


def test_tuning_pays_for_the_candidate_that_shows_most_of_a_group():
    def candidate(weight):
        groups = (PrivacyGroup("lax", 50, 1.0, 0.1), PrivacyGroup("strict", 50, 4.0, 0.1, weight=weight))
        return Mechanism(groups=(*groups, PrivacyGroup("open", 50, 0.0, 0.1)), clip=1.0)

    low, high = candidate(0.1), candidate(1.0)
    both, worst = (tuning_reports(c, 100, 1e-5, 10) for c in ([low, high], [low]))
    assert both["lax"].epsilon == worst["lax"].epsilon  # noise of 1 there, of 4 in the other
    assert both["lax"].epsilon > tuning_reports([high], 100, 1e-5, 10)["lax"].epsilon
    assert both["open"].epsilon == math.inf


def test_tuning_pays_for_the_candidate_that_draws_a_group_most_often():
    rare, often = one_group(4.0, 0.1), one_group(4.0, 0.2)
    tuned = tuning_reports([rare, often], 100, 1e-5, 10)["private"]
    assert tuned.epsilon >= tuning_reports([often], 100, 1e-5, 10)["private"].epsilon
    assert tuned.sampling_rate == 0.2


def test_tuning_in_which_one_candidate_takes_a_groups_noise_away_costs_infinity():
    candidates = [one_group(4.0), one_group(0.0)]
    for rounds in (0, 100):  # also before the first, as for everyone who opted out
        assert epsilon(candidates[1], rounds, 1e-5)["private"] == math.inf
        assert tuning_reports(candidates, rounds, 1e-5, 10)["private"].epsilon == math.inf


@pytest.mark.parametrize(
    ("arguments", "named"),
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
def test_a_bad_argument_is_named_with_its_value(arguments, named):
    with pytest.raises(ValueError, match=f"^{named} must be .*, got "):
        gaussian_epsilon(*arguments)


def test_next_to_no_noise_is_priced_as_none_and_extremes_are_numbers():
    for accountant in ("rdp", "pld"):
        assert gaussian_epsilon(1e-9, 0.05, 1, 1e-5, accountant) == math.inf
        for multiplier, rate, rounds in [(0.05, 1.0, 1000), (1e6, 0.5, 10**6), (0.5, 1e-5, 1000), (1.0, 1 - 1e-12, 3)]:
            assert gaussian_epsilon(multiplier, rate, rounds, 1e-5, accountant) >= 0


def test_importing_accounting_imports_neither_jax_nor_the_slow_library():
    code = (
        "import sys, fedhdp.privacy.budget, fedhdp.privacy.tuning, fedhdp.theory.planning\n"
        "print([m for m in ('jax', 'dp_accounting') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_epsilon_is_never_printed_below_what_it_is():
    assert format_epsilon(8.0446, 2) == "8.05"
    assert format_epsilon(3.60807) == "3.609"
    assert format_epsilon(0.000139, 3) == "0.001"
    assert (format_epsilon(3.6), format_epsilon(3.6, 2), format_epsilon(12345.1)) == ("3.6", "3.60", "1.235e+04")
    assert format_epsilon(math.inf) == format_epsilon(math.inf, 2) == "∞"


def test_of_two_bounds_the_smaller_is_told():
    rdp, pld = (gaussian_epsilon(1.0, 0.01, 1000, 1e-16, accountant) for accountant in ("rdp", "pld"))
    assert 0 < pld <= rdp < math.inf
    assert gaussian_epsilon(100.0, 0.9, 1000, 1e-5, sampling="fixed") <= gaussian_epsilon(100.0, 1.0, 1000, 1e-5) * (
        1 + 1e-9
    )


@pytest.mark.parametrize("rounds", [1, 10**6])
def test_the_best_of_some_runs_never_costs_less_than_one(rounds):
    run = gaussian_cost(1e8, 0.5, rounds, "poisson")
    assert epsilon_best_of(run, 1, math.inf, 1e-12) >= compose([run], 1e-12) > 0


def test_noise_that_nothing_can_be_shown_to_keep_is_not_looked_for_for_ever():
    with pytest.raises(ValueError, match="epsilon must be larger: no noise can be shown to keep this one"):
        noise_multiplier_for(0.001, 0.01, 100, 1e-9)
    with pytest.raises(ValueError, match="rounds must be at most 100,000 where noise is calibrated by PLD"):
        noise_multiplier_for(1.0, 0.01, 10**9, 1e-5, "pld")


def test_a_sampling_rate_is_never_priced_as_less():
    for rate in (1 / 3, 2 / 3, 0.1, 1e-11 / 3):
        composed = accounting.event(accounting.PrivacyCost(1.0, rate, "fixed", 5))
        assert composed.event.sample_size / composed.event.source_dataset_size >= rate


def test_a_budget_is_kept_to_the_last_digit():
    spent = [accounting.PrivacyCost(1.3, 0.1, "poisson", 7)]
    cost = compose(spent, 1e-5)
    assert accounting.within_budget(spent, Budget(cost, 1e-5))
    assert not accounting.within_budget(spent, Budget(cost * (1 - 1e-9), 1e-5))


def test_what_sends_nothing_costs_nothing_whatever_the_clip():
    for clip in (1.0, AdaptiveClip(initial=1.0)):
        alone = local_only(mechanism_of((10, 0.0, 1.0), (20, 1.5, 0.1), clip=clip))
        assert all(spent.free for spent in accounting.privacy_costs(alone, 500).values())
