"""The epsilon of showing the best of several runs."""

from __future__ import annotations

import math

import pytest
from helpers import raises_field
from privacy_helpers import one_group

from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import compose, epsilon, epsilon_best_of
from fedhdp.privacy.costs import PrivacyCost, privacy_costs
from fedhdp.privacy.tuning import tuning_reports


@pytest.mark.parametrize("shape", [math.inf, 1.0, 0.0, 0.5])
def test_tuning_costs_more_than_one_run_and_less_than_all(shape):
    mechanism = one_group(4.0, 0.03)
    tuned = tuning_reports([mechanism], 500, 1e-5, trials=20, shape=shape)["private"]
    all_runs = compose([privacy_costs(mechanism, 500 * 20)["private"]], 1e-5)
    assert epsilon(mechanism, 500, 1e-5)["private"] < tuned.epsilon < all_runs
    assert "20 trials" in tuned.basis


def test_the_candidate_that_reveals_most_counts():
    def candidate(weight: float) -> Mechanism:
        groups = (PrivacyGroup("lax", 50, 1.0, 0.1), PrivacyGroup("strict", 50, 4.0, 0.1, weight=weight))
        return Mechanism(groups=(*groups, PrivacyGroup("open", 50, 0.0, 0.1)), clip=1.0)

    low, high = candidate(0.1), candidate(1.0)
    both, worst = (tuning_reports(candidates, 100, 1e-5, 10) for candidates in ([low, high], [low]))
    assert both["lax"].epsilon == worst["lax"].epsilon  # noise of 1 in that one, of 4 in the other
    assert both["lax"].epsilon > tuning_reports([high], 100, 1e-5, 10)["lax"].epsilon
    assert both["open"].epsilon == math.inf


def test_the_largest_sampling_rate_counts():
    rare, often = one_group(4.0, 0.1), one_group(4.0, 0.2)
    tuned = tuning_reports([rare, often], 100, 1e-5, 10)["private"]
    assert tuned.epsilon >= tuning_reports([often], 100, 1e-5, 10)["private"].epsilon
    assert tuned.sampling_rate == 0.2


@pytest.mark.parametrize("rounds", [0, 100])
def test_a_candidate_without_noise_costs_infinity(rounds):
    candidates = [one_group(4.0), one_group(0.0)]
    assert epsilon(candidates[1], rounds, 1e-5)["private"] == math.inf
    assert tuning_reports(candidates, rounds, 1e-5, 10)["private"].epsilon == math.inf


@pytest.mark.parametrize("rounds", [1, 10**6])
def test_the_best_of_some_runs_costs_at_least_one(rounds):
    run = PrivacyCost(1e8, 0.5, "poisson", rounds)
    assert epsilon_best_of(run, 1, math.inf, 1e-12) >= compose([run], 1e-12) > 0


@pytest.mark.parametrize(
    ("candidates", "trials", "field"),
    [
        ([], 10, "candidates"),
        ([one_group(1.0), Mechanism((PrivacyGroup("other", 1000, 1.0, 0.05),), clip=1.0)], 10, "candidates"),
        ([one_group(1.0), one_group(1.0, sampling="fixed")], 10, "sampling"),
        ([one_group(1.0)], 0.5, "trials"),
    ],
)
def test_invalid_tuning(candidates, trials, field):
    with raises_field(field):
        tuning_reports(candidates, 100, 1e-5, trials)
