"""The paper's two-group formulas and its gap lemma."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import raises_field
from theory_problems import EXACT

from fedhdp.theory import linear_regression as lr
from fedhdp.theory import point_estimation as pe
from fedhdp.theory.optimum import baselines


def test_is_the_opt_out_case_of_linear_regression():
    case = pe.OptOut(clients=50, rho=0.2, gamma2=0.3, alpha2=2.0, tau2=0.5)
    assert pe.optimal_server_variance(case) == pytest.approx(lr.optimal_server_variance(case.problem), rel=EXACT)
    assert pe.optimal_ratio(case) == pytest.approx(lr.optimal_weights(case.problem)[1], rel=EXACT)
    np.testing.assert_allclose(pe.optimal_pulls(case), lr.optimal_pulls(case.problem), rtol=EXACT)
    for ratio in (0.0, 0.3, 1.0, 2.0):
        ours = lr.server_variance(case.problem, [1, ratio])
        assert pe.server_variance(case, ratio) == pytest.approx(ours, rel=EXACT)


def test_gaps_are_differences_of_server_variances():
    case = pe.OptOut(clients=50, rho=0.2, gamma2=0.3, alpha2=2.0, tau2=0.5)
    others = baselines(case.problem)
    best = lr.optimal_server_variance(case.problem)
    hdp, dp = others["hdp_fedavg"].server_variance, others["dp_fedavg"].server_variance
    np.testing.assert_allclose(pe.performance_gaps(case), [hdp - best, dp - best, dp - hdp], rtol=1e-11)


def test_third_gap_is_the_papers_fraction():
    rho, N, gamma2, c2 = 0.2, 50, 0.3, 2.5
    above = rho * (1 - rho) * c2 * gamma2 + rho**2 * (1 - rho) ** 2 * gamma2**2 * N
    printed = above / (c2 + rho * (1 - rho) * gamma2 * N)
    ours = pe.performance_gaps(pe.OptOut(N, rho, gamma2, 2.0, 0.5)).dp_fedavg_over_hdp_fedavg
    assert ours == pytest.approx(printed, rel=EXACT)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_gaps_vanish_with_a_single_group(rho):
    assert pe.performance_gaps(pe.OptOut(50, rho, 0.3, 2.0, 0.5)) == (0, 0, 0)


def test_gaps_remain_with_many_clients():
    case = pe.OptOut(10**9, 0.2, 0.3, 2.0, 0.5)
    np.testing.assert_allclose(pe.performance_gaps(case)[:2], [0.8**2 * 0.3, 0.8 * 0.3], rtol=1e-6)
    assert pe.optimal_server_variance(case) < 1e-7


def test_gaps_grow_with_the_noise():
    case = pe.OptOut(50, 0.2, 1e12, 2.0, 0.5)
    assert min(pe.performance_gaps(case)) > 1e11
    assert pe.optimal_server_variance(case) == pytest.approx(2.5 / 10, rel=1e-9)


@pytest.mark.parametrize(("field", "changes"), [("rho", {"rho": 1.5}), ("gamma2", {"gamma2": math.nan})])
def test_invalid_values(field, changes):
    with raises_field(field):
        pe.OptOut(**{"clients": 10, "rho": 0.5, "gamma2": 0.1, "alpha2": 1.0, "tau2": 1.0} | changes)
