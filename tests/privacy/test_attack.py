"""Attack curves: closed forms, real attacks stay below them, and what they are without noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedhdp.errors import InvalidValueError
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.attack import attack_curve, curve_of_epsilon, format_found
from fedhdp.privacy.costs import PrivacyCost

COST = PrivacyCost(1.5, 0.05, "poisson", 500)


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_one_gaussian_query_has_its_own_trade_off(mu):
    curve = attack_curve([PrivacyCost(1 / mu, 1.0, "poisson", 1)], "pld")
    rates = np.array(curve.false_positive_rates)
    exact = norm.cdf(mu + norm.ppf(rates))
    rates = np.array(curve.true_positive_rates)
    assert (rates >= exact - 1e-9).all()
    np.testing.assert_allclose(rates, exact, atol=2e-3)
    assert curve.mu == pytest.approx(mu, rel=5e-3)
    assert curve.mu >= mu - 1e-9


def test_rounds_of_a_gaussian_query_add_up_in_mu_squared():
    curve = attack_curve([PrivacyCost(4.0, 1.0, "poisson", 16)], "pld")
    assert curve.mu == pytest.approx(1.0, rel=5e-3)


@pytest.mark.parametrize("took_part", [True, False])
def test_the_best_attack_on_sampled_rounds_stays_below_the_curve(took_part):
    """A likelihood-ratio test over all rounds, which knows everything but whether the client took part."""
    z, rate, rounds, trials = 0.8, 0.2, 12, 40_000
    rng = np.random.default_rng(3)

    def log_ratio(joins: bool) -> np.ndarray:
        sampled = rng.random((trials, rounds)) < rate
        y = (sampled if joins else 0) + z * rng.standard_normal((trials, rounds))
        return np.log(1 - rate + rate * np.exp((y - 0.5) / z**2)).sum(1)

    null, alternative = (log_ratio(joins) for joins in ((False, True) if took_part else (True, False)))
    if not took_part:
        null, alternative = -null, -alternative
    curve = attack_curve([PrivacyCost(z, rate, "poisson", rounds)], "pld")
    for alpha in (0.01, 0.05, 0.2, 0.5):
        bound = np.interp(alpha, curve.false_positive_rates, curve.true_positive_rates)
        power = (alternative > np.quantile(null, 1 - alpha)).mean()
        error = 4 * math.sqrt(0.25 / trials) + 0.004
        assert power <= bound + error
        assert power >= bound - 0.12  # the bound is no empty one


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_curve_is_never_above_what_epsilon_alone_allows(accountant):
    epsilon = compose([COST], 1e-4, accountant)
    curve, alone = attack_curve([COST], accountant), curve_of_epsilon(epsilon, 1e-4)
    assert (np.array(curve.true_positive_rates) <= np.array(alone.true_positive_rates) + 1e-3).all()
    assert curve.found_at_one_percent < alone.found_at_one_percent
    assert curve.mu < alone.mu


def test_fixed_cohorts_have_a_curve_by_rdp():
    poisson = attack_curve([COST], "rdp")
    fixed = attack_curve([COST._replace(sampling="fixed", noise_multiplier=0.75)], "rdp")
    assert fixed.found_at_one_percent > poisson.found_at_one_percent


def test_sentence_of_the_quickstart():
    assert format_found(attack_curve([COST], "pld").found_at_one_percent) == "7"


@pytest.mark.parametrize(
    ("costs", "found_at_one_percent", "mu"),
    [([], 0.01, 0.0), ([COST._replace(noise_multiplier=0.0)], 1.0, math.inf), ([COST._replace(rounds=0)], 0.01, 0.0)],
)
def test_no_rounds_reveal_nothing_and_no_noise_reveals_all(costs, found_at_one_percent, mu):
    curve = attack_curve(costs, "pld")
    assert (curve.found_at_one_percent, curve.mu) == (found_at_one_percent, mu)


def test_infinite_epsilon_bounds_nothing():
    assert curve_of_epsilon(math.inf, 1e-4).mu == math.inf
    assert set(curve_of_epsilon(math.inf, 0.0).true_positive_rates) == {1.0}


def test_shares_are_never_rounded_down():
    assert [format_found(x) for x in (0.004, 0.01, 0.0601, 0.9999)] == ["fewer than 1", "1", "7", "100"]


def test_costs_that_do_not_compose_are_refused():
    with pytest.raises(InvalidValueError):
        attack_curve([COST, COST._replace(sampling="fixed")], "rdp")


@pytest.mark.parametrize("cost", [PrivacyCost(0.1, 0.2, "poisson", 1), PrivacyCost(0.12, 1.0, "poisson", 1)])
def test_mu_permits_as_much_as_the_curve_where_the_rate_is_nearly_one(cost):
    """A sampled query with little noise is told from nothing by many false positives, up to the last digit."""
    curve = attack_curve([cost], "pld")
    assert max(curve.true_positive_rates[:-1]) > 1 - 1e-15
    missed = 1 - np.array(curve.true_positive_rates[:-1])
    permitted = norm.sf(curve.mu + norm.ppf(curve.false_positive_rates[:-1]))
    assert (permitted <= missed + 1e-15).all()
    least = -norm.ppf(2e-16) - norm.ppf(curve.false_positive_rates[-2])  # where nothing is missed but the last digit
    assert curve.mu >= least
