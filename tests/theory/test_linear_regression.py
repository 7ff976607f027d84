"""Weights, pulls and errors of any number of groups: the paper's formulas, special cases, limits, invalid values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import raises_field
from hypothesis import given
from hypothesis import strategies as st
from theory_problems import EXACT, FIVE, problem_of, problems, steady

from fedhdp.theory import linear_regression as lr
from fedhdp.theory import point_estimation as pe
from fedhdp.theory import shared_noise
from fedhdp.theory.linear_regression import Problem, TheoryGroup, groups_from_shares


def paper_pulls(N1: int, N2: int, gamma1: float, gamma2: float, alpha2: float, tau2: float) -> tuple[float, float]:
    """lambda_1* and lambda_2* as the lemma prints them."""
    N, U = N1 + N2, tau2 / alpha2
    G1, G2 = N1 * gamma1 / alpha2, N2 * gamma2 / alpha2
    top = N * (1 + U) + N1 * G2 + N2 * G1
    first = N * U * (1 + U) + U * ((N2 + 1) * G1 + N1 * G2) + G1 * (1 + G2)
    second = N * U * (1 + U) + U * (N2 * G1 + (N1 + 1) * G2) + G2 * (1 + G1)
    return top / first, top / second


def unsimplified_pulls(problem: Problem) -> np.ndarray:
    """c_j / (P_j / (P_j + s_j) - c_j), the one-line formula before it is simplified."""
    s_G, N_G = 1 / problem.sigma2_G, problem.clients_G
    P_G = s_G @ N_G - s_G
    c_G = problem.alpha2 / (problem.sigma_c2 + 1 / P_G)
    return c_G / (P_G / (P_G + s_G) - c_G)


@steady
@given(
    st.integers(1, 500), st.integers(1, 500), st.floats(0, 5), st.floats(1e-6, 5), st.floats(0.01, 9), st.floats(0, 9)
)
def test_pull_is_the_papers_two_group_formula(N1, N2, gamma1, gamma2, alpha2, tau2):
    gamma1 += 1e-6
    problem = problem_of((N1, gamma1), (N2, gamma2), alpha2=alpha2, tau2=tau2)
    np.testing.assert_allclose(lr.optimal_pulls(problem), paper_pulls(N1, N2, gamma1, gamma2, alpha2, tau2), rtol=EXACT)


def test_pull_is_the_unsimplified_formula_for_five_groups():
    np.testing.assert_allclose(lr.optimal_pulls(FIVE), unsimplified_pulls(FIVE), rtol=EXACT)


def test_server_variance_is_the_papers_two_group_formula():
    N1, N2, g1, g2, c2 = 30, 70, 0.1, 0.7, 1.25
    problem = problem_of((N1, g1), (N2, g2))
    p1, p2, rho1 = c2 + N1 * g1, c2 + N2 * g2, 0.3
    printed = p1 * p2 / (c2 + (1 - rho1) * N1 * g1 + rho1 * N2 * g2) / 100
    assert lr.optimal_server_variance(problem) == pytest.approx(printed, rel=EXACT)
    np.testing.assert_allclose(lr.optimal_weights(problem), [1, p1 / p2], rtol=EXACT)


def test_server_variance_is_the_papers_product_formula():
    s2, N = FIVE.sigma2_G, FIVE.clients_G
    below = sum(N[i] * np.prod(np.delete(s2, i)) for i in range(5))
    assert lr.optimal_server_variance(FIVE) == pytest.approx(np.prod(s2) / below, rel=EXACT)
    np.testing.assert_allclose(lr.optimal_weights(FIVE), s2[0] / s2, rtol=EXACT)


@steady
@given(problems)
def test_server_variance_at_optimal_weights(problem):
    at_optimum = lr.server_variance(problem, lr.optimal_weights(problem))
    assert at_optimum == pytest.approx(lr.optimal_server_variance(problem), rel=1e-10)


@steady
@given(problems)
def test_bayes_error_without_own_noise(problem):
    reached = lr.client_mse(problem, lr.optimal_weights(problem), lr.optimal_pulls(problem), own_noise=False)
    np.testing.assert_allclose(reached, lr.bayes_mse(problem), rtol=1e-9)


def test_bayes_estimate_without_own_noise():
    problem = problem_of((3, 0.0), (4, 0.1), (5, 0.3))
    group_N = np.repeat([0, 1, 2], [3, 4, 5])
    rng = np.random.default_rng(0)
    local_ND, noise_ND = rng.normal(size=(12, 2)), rng.normal(size=(12, 2))
    weights, pulls = lr.optimal_weights(problem), lr.optimal_pulls(problem)
    global_D = lr.global_estimate(local_ND + noise_ND, group_N, weights)
    w_N = lr.client_weights(problem, weights)[group_N]
    for j in range(12):
        ours = lr.personal_estimate(local_ND[j], global_D - w_N[j] * noise_ND[j], pulls[group_N[j]])
        best = lr.bayes_estimate(problem, local_ND + noise_ND, j, local_ND[j])
        np.testing.assert_allclose(ours, best, rtol=EXACT)


@steady
@given(problems)
def test_own_noise_pull_minimizes_the_error(problem):
    weights = lr.optimal_weights(problem)
    best = lr.client_mse(problem, weights, lr.own_noise_pulls(problem))
    np.testing.assert_allclose(best, lr.client_mse(problem, weights, lr.best_pulls(problem, weights)), rtol=1e-9)
    assert np.all(best <= lr.client_mse(problem, weights, lr.optimal_pulls(problem)) * (1 + 1e-12))


def test_pulls_differ_where_the_client_adds_noise():
    pull_G, own_G = lr.optimal_pulls(FIVE), lr.own_noise_pulls(FIVE)
    assert pull_G[0] == own_G[0]
    assert np.all(own_G[1:] < pull_G[1:])


def test_pulls_converge_with_the_number_of_clients():
    def difference(clients: int) -> float:
        problem = problem_of((clients, 1.0))
        return 1 - lr.own_noise_pulls(problem)[0] / lr.optimal_pulls(problem)[0]

    assert difference(1000) == pytest.approx(difference(100) / 10, rel=0.05)


@steady
@given(problems, st.lists(st.floats(0, 1), min_size=5, max_size=5), st.booleans())
def test_best_pull_on_a_grid(problem, weights, own_noise):
    weights = np.array(weights[: len(problem.groups)]) + 0.01
    best = lr.client_mse(problem, weights, lr.best_pulls(problem, weights, own_noise), own_noise)
    for pull in [0, *np.geomspace(1e-4, 1e4, 60), math.inf]:
        assert np.all(lr.client_mse(problem, weights, pull, own_noise) >= best * (1 - 1e-12))


@steady
@given(problems)
def test_error_does_not_grow_with_own_noise(problem):
    error_G = lr.client_mse(problem, lr.optimal_weights(problem), lr.own_noise_pulls(problem))
    in_order_G = error_G[np.argsort(problem.noise_G, kind="stable")]
    assert np.all(np.diff(in_order_G) <= 1e-12 * in_order_G[1:])


def test_opting_out_gains_the_clients_own_noise():
    noise = 8.0
    stays = problem_of((5, 0.0), (10, noise / 10))
    leaves = problem_of((6, 0.0), (9, noise / 9))
    assert lr.bayes_mse(stays)[1] == pytest.approx(lr.bayes_mse(leaves)[0], rel=EXACT)
    staying = lr.client_mse(stays, lr.optimal_weights(stays), lr.own_noise_pulls(stays))[1]
    leaving = lr.client_mse(leaves, lr.optimal_weights(leaves), lr.own_noise_pulls(leaves))[0]
    assert leaving < staying


def test_no_privacy_is_fedavg_with_ditto():
    problem = problem_of((30, 0.0), (70, 0.0))
    assert lr.optimal_server_variance(problem) == pytest.approx(1.25 / 100, rel=EXACT)
    np.testing.assert_allclose(lr.optimal_weights(problem), 1)
    np.testing.assert_allclose(lr.optimal_pulls(problem), 1 / 0.25, rtol=EXACT)
    np.testing.assert_allclose(lr.own_noise_pulls(problem), 1 / 0.25, rtol=EXACT)


def test_no_privacy_and_equal_clients_have_infinite_pull():
    problem = problem_of((30, 0.0), (70, 0.0), tau2=0.0)
    assert np.all(np.isinf(lr.optimal_pulls(problem)))
    assert np.all(np.isinf(lr.best_pulls(problem, [1, 1])))
    np.testing.assert_allclose(lr.client_mse(problem, [1, 1], math.inf), 1 / 100, rtol=EXACT)
    np.testing.assert_allclose(lr.bayes_mse(problem), 1 / 100, rtol=EXACT)


def test_homogeneous_privacy():
    problem = problem_of((40, 0.3), alpha2=2.0)
    assert lr.optimal_pulls(problem)[0] == pytest.approx(2.0 / (0.25 + 0.3), rel=EXACT)


def test_homogeneous_privacy_of_equal_clients_corrects_the_paper():
    problem = problem_of((40, 0.3), alpha2=2.0, tau2=0.0)
    assert lr.optimal_pulls(problem)[0] == pytest.approx(2.0 / 0.3, rel=EXACT)
    assert pe.optimal_pulls(pe.OptOut(40, 0.0, 0.3, 2.0, 0.0))[1] == pytest.approx(2.0 / 0.3, rel=EXACT)


def test_equal_noise_is_the_papers_limit():
    N1, N2, noise, U = 30, 70, 5.0, 0.25
    pulls = lr.optimal_pulls(problem_of((N1, noise / N1), (N2, noise / N2)))
    N = N1 + N2
    printed = (N * (1 + U) + N * noise) / (N * U * (1 + U) + (N + 1) * U * noise + (1 + noise) * noise)
    np.testing.assert_allclose(pulls, printed, rtol=EXACT)
    np.testing.assert_allclose(pulls, N / (N * U + noise), rtol=EXACT)


def test_one_group_is_the_papers_limit():
    noise = 100 * 0.3
    assert lr.optimal_pulls(problem_of((100, 0.3)))[0] == pytest.approx(100 / (0.25 * 100 + noise), rel=EXACT)


def test_equal_clients_are_the_papers_limit():
    G1, G2 = 30 * 0.1, 70 * 0.4
    pulls = lr.optimal_pulls(problem_of((30, 0.1), (70, 0.4), tau2=0.0))
    top = 100 + 70 * G1 + 30 * G2
    np.testing.assert_allclose(pulls, [top / (G1 * (1 + G2)), top / (G2 * (1 + G1))], rtol=EXACT)


def test_perfect_local_estimate_has_pull_zero():
    problem = problem_of((30, 0.0), (70, 0.4), alpha2=0.0)
    assert np.all(lr.optimal_pulls(problem) == 0)
    assert np.all(lr.own_noise_pulls(problem) == 0)
    assert np.all(lr.bayes_mse(problem) == 0)
    near = lr.optimal_pulls(problem_of((30, 0.0), (70, 0.4), alpha2=1e-9))
    assert np.all((near > 0) & (near < 1e-8))


def test_infinite_noise_of_one_group():
    problem = problem_of((30, 0.0), (70, math.inf))
    assert lr.optimal_server_variance(problem) == pytest.approx(1.25 / 30, rel=EXACT)
    np.testing.assert_array_equal(lr.optimal_weights(problem), [1, 0])
    huge = problem_of((30, 0.0), (70, 1e12))
    np.testing.assert_allclose(lr.optimal_pulls(problem), lr.optimal_pulls(huge), rtol=1e-9)
    np.testing.assert_allclose(lr.own_noise_pulls(problem), lr.own_noise_pulls(huge), rtol=1e-9)
    at_optimum = lr.client_mse(problem, lr.optimal_weights(problem), lr.optimal_pulls(problem))
    np.testing.assert_allclose(at_optimum, lr.bayes_mse(huge), rtol=1e-9)


def test_infinite_noise_of_all_groups():
    problem = problem_of((30, math.inf), (70, math.inf))
    assert lr.optimal_server_variance(problem) == math.inf
    assert np.all(lr.optimal_pulls(problem) == 0)
    assert np.all(lr.own_noise_pulls(problem) == 0)
    np.testing.assert_array_equal(lr.client_mse(problem, lr.optimal_weights(problem), 0.0), 1.0)
    np.testing.assert_array_equal(lr.bayes_mse(problem), 1.0)
    assert shared_noise.server_variance(problem, shared_noise.optimal_weights(problem)) == math.inf


@pytest.mark.parametrize("gamma2", [0.0, 0.5])
def test_single_client(gamma2):
    problem = problem_of((1, gamma2))
    assert lr.optimal_server_variance(problem) == 1.25 + gamma2
    np.testing.assert_array_equal(lr.bayes_mse(problem), 1.0)
    assert lr.client_mse(problem, [1.0], lr.own_noise_pulls(problem))[0] == pytest.approx(1.0, rel=EXACT)
    np.testing.assert_array_equal(lr.bayes_estimate(problem, np.array([[3.0]]), 0, np.array([2.0])), [2.0])
    if gamma2:
        assert lr.own_noise_pulls(problem)[0] == 0
        assert lr.optimal_pulls(problem)[0] == pytest.approx(1 / (0.25 + gamma2), rel=EXACT)


def test_updates_without_error_get_all_weight():
    problem = problem_of((2, 0.0), (70, 0.4), alpha2=0.0, tau2=0.0)
    assert lr.optimal_server_variance(problem) == 0
    np.testing.assert_array_equal(lr.optimal_weights(problem), [1, 0])
    assert np.all(lr.optimal_pulls(problem) == 0)


def test_groups_from_shares_have_all_clients():
    groups = groups_from_shares(10, [1 / 3, 1 / 3, 1 / 3], [0.0, 0.1, 0.2])
    assert [group.clients for group in groups] == [4, 3, 3]
    assert [group.gamma2 for group in groups] == [0.0, 0.1, 0.2]


INVALID = {
    "clients": [
        lambda: TheoryGroup("a", 0, 0.1),
        lambda: TheoryGroup("a", 2.5, 0.1),
        lambda: TheoryGroup("a", math.nan, 0.1),
        lambda: groups_from_shares(10, [1.0, 0.0], [0, 1]),
    ],
    "gamma2": [lambda: TheoryGroup("a", 3, -0.1), lambda: TheoryGroup("a", 3, math.nan)],
    "groups": [
        lambda: Problem((), 1.0, 1.0),
        lambda: Problem((TheoryGroup("a", 1, 0.0), TheoryGroup("a", 2, 0.0)), 1.0, 1.0),
    ],
    "alpha2": [lambda: problem_of((3, 0.1), alpha2=-1.0), lambda: problem_of((3, 0.1), alpha2=math.nan)],
    "tau2": [lambda: problem_of((3, 0.1), tau2=-1.0), lambda: problem_of((3, 0.1), tau2=math.inf)],
    "shares": [
        lambda: groups_from_shares(10, [0.5, 0.4], [0, 1]),
        lambda: groups_from_shares(10, [1.5, -0.5], [0, 1]),
        lambda: groups_from_shares(10, [math.nan, 1], [0, 1]),
    ],
    "weights": [
        lambda: lr.server_variance(FIVE, [1, 1]),
        lambda: lr.server_variance(problem_of((3, 0.1)), [0.0]),
        lambda: lr.server_variance(problem_of((3, 0.1)), [math.nan]),
    ],
    "pulls": [
        lambda: lr.client_mse(problem_of((3, 0.1)), [1.0], [-1.0]),
        lambda: lr.client_mse(problem_of((3, 0.1)), [1.0], math.nan),
    ],
}


@pytest.mark.parametrize(("field", "make"), [(field, make) for field, makes in INVALID.items() for make in makes])
def test_invalid_values(field, make):
    with raises_field(field):
        make()
