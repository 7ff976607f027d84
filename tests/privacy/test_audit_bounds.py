"""Lower bounds of audits: simulated audits of mechanisms whose privacy is known."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from fedhdp.clips import AdaptiveClip
from fedhdp.experiments.audit.system import ServerSystem
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.audit import report
from fedhdp.privacy.audit.bounds import (
    Scores,
    area_under_curve,
    clopper_pearson,
    epsilon_at,
    gaussian_bound,
    gdp_epsilon,
    gdp_mu,
    mu_of,
    one_run_bound,
    one_run_p_value,
    roc_curve,
    threshold_bound,
    true_positive_rate,
)
from fedhdp.privacy.audit.canaries import audit_rounds, make_layout
from fedhdp.privacy.costs import PrivacyCost

ALPHA, AUDITS, DELTA = 0.1, 300, 1e-3
MOST = int(stats.binom(AUDITS, ALPHA).ppf(1 - 1e-4))  # of so many audits whose bound is above the truth


def gaussian_scores(mu: float, samples: int, rng: np.random.Generator) -> Scores:
    return Scores(rng.normal(size=samples), rng.normal(mu, size=samples))


METHODS = {
    "Clopper-Pearson mu": (lambda scores, rng: threshold_bound(scores, ALPHA, mu_of, rng), lambda mu: mu),
    "Clopper-Pearson": (
        lambda scores, rng: threshold_bound(scores, ALPHA, epsilon_at(DELTA), rng),
        lambda mu: gdp_epsilon(mu, DELTA),
    ),
    "Gaussian": (lambda scores, rng: gaussian_bound(scores, ALPHA), lambda mu: mu),
    "one run": (lambda scores, rng: one_run_bound(scores, DELTA, ALPHA, rng), lambda mu: gdp_epsilon(mu, DELTA)),
}
LEAST = {"Clopper-Pearson mu": 0.6, "Clopper-Pearson": 0.2, "Gaussian": 0.85, "one run": 0.15}  # share of the truth


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("method", METHODS)
def test_bound_is_above_the_truth_as_rarely_as_stated(method, mu):
    bound, truth_of = METHODS[method]
    rng, truth = np.random.default_rng(3), truth_of(mu)
    bounds = [bound(gaussian_scores(mu, 500, rng), rng) for _ in range(AUDITS)]
    bounds = [value for value in bounds if value is not None]
    assert len(bounds) > 0.98 * AUDITS
    assert sum(value > truth + 1e-12 for value in bounds) <= MOST
    if mu == 1.5:
        assert np.mean(bounds) > LEAST[method] * truth


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_one_run_bound_holds_for_dependent_scores(share):
    """All canaries of a run have one noise in common: the scores of a run are as dependent as can be."""
    rng, above = np.random.default_rng(5), 0
    epsilon = 1.0
    for _ in range(AUDITS):
        coins = rng.random(200) < 0.5
        lie = rng.random(200) > 1 / (1 + math.exp(-epsilon))  # randomized response: epsilon without delta
        score = (coins ^ lie) + share * rng.normal()
        bound = one_run_bound(Scores(score[~coins], score[coins]), 0.0, ALPHA, rng)
        above += bound > epsilon
    assert above <= MOST


def test_one_run_p_value_counts_delta():
    assert one_run_p_value(100, 50, 50, 0.0, 0.0) == pytest.approx(0.5**50)
    assert one_run_p_value(100, 50, 50, 0.0, 1e-3) > 1e-3
    assert one_run_p_value(100, 50, 25, 3.0, 0.0) == pytest.approx(1.0)


def test_gdp_epsilon_is_the_accountants():
    for mu, delta in ((0.3, 1e-4), (1.0, 1e-5), (4.0, 1e-3)):
        accounted = compose([PrivacyCost(1 / mu, 1.0, "poisson", 1)], delta, "pld")
        assert gdp_epsilon(mu, delta) == pytest.approx(accounted, rel=2e-3)
        assert gdp_epsilon(mu, delta) <= accounted * (1 + 1e-6)
        assert gdp_mu(gdp_epsilon(mu, delta), delta) == pytest.approx(mu, rel=1e-6)


@pytest.mark.parametrize("mu", [1e-3, 20.0, 300.0])
def test_gdp_epsilon_of_small_and_large_mu(mu):
    epsilon = gdp_epsilon(mu, 1e-5)
    assert 0 <= epsilon < math.inf
    if mu > 1:
        assert epsilon == pytest.approx(mu**2 / 2 + mu * 4.26, rel=0.02)
        assert gdp_mu(epsilon, 1e-5) == pytest.approx(mu, rel=1e-6)


def test_infinite_epsilon_and_mu():
    assert gdp_mu(math.inf, 1e-5) == math.inf
    assert gdp_epsilon(math.inf, 1e-5) == math.inf
    assert gdp_epsilon(0.0, 1e-5) == 0


def test_gaussian_bound_needs_gaussian_scores():
    rng = np.random.default_rng(0)
    out_N = rng.normal(size=2000)
    assert gaussian_bound(Scores(out_N, rng.exponential(size=2000)), 0.05) is None
    assert gaussian_bound(Scores(out_N, 1.3 * rng.normal(size=2000)), 0.05) is None
    assert gaussian_bound(Scores(np.zeros(50), np.ones(50)), 0.05) is None
    assert gaussian_bound(Scores(out_N[:10], out_N[10:20]), 0.05) is None


def test_clopper_pearson_is_scipys():
    lower, upper = clopper_pearson(np.array([0.0, 7.0, 20.0]), 20, 0.025)
    for k, low, high in zip((0, 7, 20), lower, upper, strict=True):
        interval = stats.binomtest(k, 20).proportion_ci(0.95, "exact")
        assert (low, high) == pytest.approx((interval.low, interval.high))


def test_curve_area_and_rates():
    rng = np.random.default_rng(1)
    scores = gaussian_scores(1.0, 20_000, rng)
    assert area_under_curve(scores) == pytest.approx(stats.norm.cdf(1 / math.sqrt(2)), abs=0.01)
    assert true_positive_rate(scores, 0.01) == pytest.approx(stats.norm.sf(stats.norm.isf(0.01) - 1), abs=0.02)
    curve = np.array(roc_curve(scores))
    assert curve[0].tolist() == [0, 0]
    assert curve[-1].tolist() == [1, 1]
    assert np.all(np.diff(curve, axis=0) >= 0)
    assert np.trapezoid(curve[:, 1], curve[:, 0]) == pytest.approx(area_under_curve(scores), abs=0.01)


def test_equal_scores_have_half_the_area():
    assert area_under_curve(Scores(np.zeros(10), np.zeros(30))) == 0.5
    assert true_positive_rate(Scores(np.zeros(10), np.zeros(30)), 0.01) == 0


def test_bounds_of_an_audit_share_its_level(monkeypatch):
    """A sound server fails with the stated probability at most: the parts of all bounds add up to no more."""
    mechanism = Mechanism((PrivacyGroup("a", 60, 1.0, 0.5), PrivacyGroup("b", 60, 2.0, 0.5)), AdaptiveClip(1.0))
    layout, rng, level, parts = make_layout(mechanism, 50), np.random.default_rng(0), 1e-3, []

    def record(position, bound, *values):
        parts.append(values[position])
        return bound(*values)

    for name, position in (("threshold_bound", 1), ("gaussian_bound", 1), ("one_run_bound", 2)):
        monkeypatch.setattr(report, name, partial(record, position, getattr(report, name)))
    transcript = audit_rounds(ServerSystem(mechanism, layout.width), mechanism, layout, 3, rng)
    claims = report.make_claims(mechanism, 3, lambda group: 1e-4, "pld")
    report.audit_groups(mechanism, claims, [transcript], layout, level, rng)
    assert len(parts) == 14
    assert sum(parts) <= level * (1 + 1e-12)
