"""The closed forms of the theory: the paper's formulas, special cases and limits, and bad input."""

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhdp.theory import linear_regression as lr
from fedhdp.theory import point_estimation as pe
from fedhdp.theory import shared_noise
from fedhdp.theory.linear_regression import Level, Problem, levels_from_shares
from fedhdp.theory.optimum import baselines, optimum

EXACT = 1e-12
steady = settings(derandomize=True, deadline=None)


def problem_of(*levels: tuple[int, float], alpha2: float = 1.0, tau2: float = 0.25) -> Problem:
    """A problem from (clients, gamma2) pairs."""
    return Problem(tuple(Level(f"level {i}", *level) for i, level in enumerate(levels)), alpha2, tau2)


FIVE = problem_of((30, 0.0), (50, 0.01), (20, 0.2), (70, 0.3), (40, 2.0))

problems = st.builds(
    lambda levels, alpha2, tau2: problem_of(*levels, alpha2=alpha2, tau2=tau2),
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 10)), min_size=1, max_size=5),
    st.floats(0.01, 10),
    st.floats(0, 10),
)


def paper_pulls(N1: int, N2: int, gamma1: float, gamma2: float, alpha2: float, tau2: float) -> tuple[float, float]:
    """lambda_1* and lambda_2* as the lemma prints them."""
    N, U = N1 + N2, tau2 / alpha2
    G1, G2 = N1 * gamma1 / alpha2, N2 * gamma2 / alpha2
    top = N * (1 + U) + N1 * G2 + N2 * G1
    first = N * U * (1 + U) + U * ((N2 + 1) * G1 + N1 * G2) + G1 * (1 + G2)
    second = N * U * (1 + U) + U * (N2 * G1 + (N1 + 1) * G2) + G2 * (1 + G1)
    return top / first, top / second


def issue_pulls(problem: Problem) -> np.ndarray:
    """c_j / (P_j / (P_j + s_j) - c_j), the one-line formula before it is simplified."""
    s_G, N_G = 1 / problem.sigma2_G, problem.clients_G
    P_G = s_G @ N_G - s_G
    c_G = problem.alpha2 / (problem.sigma_c2 + 1 / P_G)
    return c_G / (P_G / (P_G + s_G) - c_G)


# the paper's formulas


@steady
@given(
    st.integers(1, 500), st.integers(1, 500), st.floats(0, 5), st.floats(1e-6, 5), st.floats(0.01, 9), st.floats(0, 9)
)
def test_the_pull_equals_the_papers_two_level_formula(N1, N2, gamma1, gamma2, alpha2, tau2):
    gamma1 += 1e-6
    problem = problem_of((N1, gamma1), (N2, gamma2), alpha2=alpha2, tau2=tau2)
    np.testing.assert_allclose(lr.optimal_pulls(problem), paper_pulls(N1, N2, gamma1, gamma2, alpha2, tau2), rtol=EXACT)


def test_the_pull_equals_the_unsimplified_formula_for_five_levels():
    np.testing.assert_allclose(lr.optimal_pulls(FIVE), issue_pulls(FIVE), rtol=EXACT)


def test_the_server_variance_and_ratio_equal_the_papers_two_level_formulas():
    N1, N2, g1, g2, c2 = 30, 70, 0.1, 0.7, 1.25
    problem = problem_of((N1, g1), (N2, g2))
    p1, p2, rho1 = c2 + N1 * g1, c2 + N2 * g2, 0.3
    printed = p1 * p2 / (c2 + (1 - rho1) * N1 * g1 + rho1 * N2 * g2) / 100
    assert lr.optimal_server_variance(problem) == pytest.approx(printed, rel=EXACT)
    np.testing.assert_allclose(lr.optimal_weights(problem), [1, p1 / p2], rtol=EXACT)


def test_the_server_variance_equals_the_papers_product_formula_for_five_levels():
    s2, N = FIVE.sigma2_G, FIVE.clients_G
    below = sum(N[i] * np.prod(np.delete(s2, i)) for i in range(5))
    assert lr.optimal_server_variance(FIVE) == pytest.approx(np.prod(s2) / below, rel=EXACT)
    np.testing.assert_allclose(lr.optimal_weights(FIVE), s2[0] / s2, rtol=EXACT)


@steady
@given(problems)
def test_the_server_variance_at_the_optimal_weights_is_the_optimal_one(problem):
    at_optimum = lr.server_variance(problem, lr.optimal_weights(problem))
    assert at_optimum == pytest.approx(lr.optimal_server_variance(problem), rel=1e-10)


@steady
@given(problems)
def test_a_client_that_takes_its_own_noise_out_reaches_the_bayes_error(problem):
    reached = lr.client_mse(problem, lr.optimal_weights(problem), lr.optimal_pulls(problem), own_noise=False)
    np.testing.assert_allclose(reached, lr.bayes_mse(problem), rtol=1e-9)


def test_the_fedhdp_estimate_without_own_noise_is_the_bayes_estimate_of_every_client():
    problem = problem_of((3, 0.0), (4, 0.1), (5, 0.3))
    level_N = np.repeat([0, 1, 2], [3, 4, 5])
    rng = np.random.default_rng(0)
    local_ND, noise_ND = rng.normal(size=(12, 2)), rng.normal(size=(12, 2))
    weights, pulls = lr.optimal_weights(problem), lr.optimal_pulls(problem)
    global_D = lr.global_estimate(local_ND + noise_ND, level_N, weights)
    w_N = lr.client_weights(problem, weights)[level_N]
    for j in range(12):
        ours = lr.personal_estimate(local_ND[j], global_D - w_N[j] * noise_ND[j], pulls[level_N[j]])
        best = lr.bayes_estimate(problem, local_ND + noise_ND, j, local_ND[j])
        np.testing.assert_allclose(ours, best, rtol=EXACT)


def test_point_estimation_is_the_opt_out_case_of_linear_regression():
    case = pe.OptOut(clients=50, rho=0.2, gamma2=0.3, alpha2=2.0, tau2=0.5)
    assert pe.optimal_server_variance(case) == pytest.approx(lr.optimal_server_variance(case.problem), rel=EXACT)
    assert pe.optimal_ratio(case) == pytest.approx(lr.optimal_weights(case.problem)[1], rel=EXACT)
    np.testing.assert_allclose(pe.optimal_pulls(case), lr.optimal_pulls(case.problem), rtol=EXACT)
    for ratio in (0.0, 0.3, 1.0, 2.0):
        ours = lr.server_variance(case.problem, [1, ratio])
        assert pe.server_variance(case, ratio) == pytest.approx(ours, rel=EXACT)


# the pull that counts the client's own noise


@steady
@given(problems)
def test_the_own_noise_pull_is_the_least_error_for_the_optimal_weights(problem):
    weights = lr.optimal_weights(problem)
    best = lr.client_mse(problem, weights, lr.own_noise_pulls(problem))
    np.testing.assert_allclose(best, lr.client_mse(problem, weights, lr.best_pulls(problem, weights)), rtol=1e-9)
    assert np.all(best <= lr.client_mse(problem, weights, lr.optimal_pulls(problem)) * (1 + 1e-12))


def test_the_two_pulls_differ_exactly_where_the_client_adds_noise():
    pull_G, own_G = lr.optimal_pulls(FIVE), lr.own_noise_pulls(FIVE)
    assert pull_G[0] == own_G[0]
    assert np.all(own_G[1:] < pull_G[1:])


def test_the_two_pulls_grow_together_as_clients_grow_many():
    def difference(clients: int) -> float:
        problem = problem_of((clients, 1.0))
        return 1 - lr.own_noise_pulls(problem)[0] / lr.optimal_pulls(problem)[0]

    assert difference(1000) == pytest.approx(difference(100) / 10, rel=0.05)


@steady
@given(problems, st.lists(st.floats(0, 1), min_size=5, max_size=5), st.booleans())
def test_no_pull_on_a_fine_grid_beats_the_best_pull_for_any_weights(problem, weights, own_noise):
    weights = np.array(weights[: len(problem.levels)]) + 0.01
    best = lr.client_mse(problem, weights, lr.best_pulls(problem, weights, own_noise), own_noise)
    for pull in [0, *np.geomspace(1e-4, 1e4, 60), math.inf]:
        assert np.all(lr.client_mse(problem, weights, pull, own_noise) >= best * (1 - 1e-12))


@steady
@given(problems)
def test_of_the_clients_of_one_run_those_with_more_noise_never_err_more(problem):
    error_G = lr.client_mse(problem, lr.optimal_weights(problem), lr.own_noise_pulls(problem))
    in_order_G = error_G[np.argsort(problem.noise_G, kind="stable")]
    assert np.all(np.diff(in_order_G) <= 1e-12 * in_order_G[1:])


def test_opting_out_gains_nothing_but_the_clients_own_noise_while_the_others_noise_stays():
    noise = 8.0
    stays = problem_of((5, 0.0), (10, noise / 10))
    leaves = problem_of((6, 0.0), (9, noise / 9))
    assert lr.bayes_mse(stays)[1] == pytest.approx(lr.bayes_mse(leaves)[0], rel=EXACT)
    staying = lr.client_mse(stays, lr.optimal_weights(stays), lr.own_noise_pulls(stays))[1]
    leaving = lr.client_mse(leaves, lr.optimal_weights(leaves), lr.own_noise_pulls(leaves))[0]
    assert leaving < staying


# special cases and limits


def test_no_privacy_is_fedavg_with_dittos_pull():
    problem = problem_of((30, 0.0), (70, 0.0))
    assert lr.optimal_server_variance(problem) == pytest.approx(1.25 / 100, rel=EXACT)
    np.testing.assert_allclose(lr.optimal_weights(problem), 1)
    np.testing.assert_allclose(lr.optimal_pulls(problem), 1 / 0.25, rtol=EXACT)
    np.testing.assert_allclose(lr.own_noise_pulls(problem), 1 / 0.25, rtol=EXACT)


def test_no_privacy_and_equal_clients_pull_to_the_global_model_without_bound():
    problem = problem_of((30, 0.0), (70, 0.0), tau2=0.0)
    assert np.all(np.isinf(lr.optimal_pulls(problem)))
    assert np.all(np.isinf(lr.best_pulls(problem, [1, 1])))
    np.testing.assert_allclose(lr.client_mse(problem, [1, 1], math.inf), 1 / 100, rtol=EXACT)
    np.testing.assert_allclose(lr.bayes_mse(problem), 1 / 100, rtol=EXACT)


def test_homogeneous_privacy_pulls_by_alpha2_over_tau2_plus_gamma2():
    problem = problem_of((40, 0.3), alpha2=2.0)
    assert lr.optimal_pulls(problem)[0] == pytest.approx(2.0 / (0.25 + 0.3), rel=EXACT)


def test_homogeneous_privacy_of_equal_clients_pulls_by_alpha2_over_gamma2_not_by_the_printed_1_over_gamma2():
    problem = problem_of((40, 0.3), alpha2=2.0, tau2=0.0)
    assert lr.optimal_pulls(problem)[0] == pytest.approx(2.0 / 0.3, rel=EXACT)
    assert pe.optimal_pulls(pe.OptOut(40, 0.0, 0.3, 2.0, 0.0))[1] == pytest.approx(2.0 / 0.3, rel=EXACT)


def test_equal_noise_on_all_updates_gives_the_papers_limit_for_r_to_one():
    N1, N2, noise, U = 30, 70, 5.0, 0.25
    pulls = lr.optimal_pulls(problem_of((N1, noise / N1), (N2, noise / N2)))
    N = N1 + N2
    printed = (N * (1 + U) + N * noise) / (N * U * (1 + U) + (N + 1) * U * noise + (1 + noise) * noise)
    np.testing.assert_allclose(pulls, printed, rtol=EXACT)
    np.testing.assert_allclose(pulls, N / (N * U + noise), rtol=EXACT)


def test_all_clients_at_one_level_give_the_papers_limit_for_n2_to_n():
    noise = 100 * 0.3
    assert lr.optimal_pulls(problem_of((100, 0.3)))[0] == pytest.approx(100 / (0.25 * 100 + noise), rel=EXACT)


def test_equal_clients_give_the_papers_limit_for_tau_to_zero():
    G1, G2 = 30 * 0.1, 70 * 0.4
    pulls = lr.optimal_pulls(problem_of((30, 0.1), (70, 0.4), tau2=0.0))
    top = 100 + 70 * G1 + 30 * G2
    np.testing.assert_allclose(pulls, [top / (G1 * (1 + G2)), top / (G2 * (1 + G1))], rtol=EXACT)


def test_a_perfect_local_estimate_is_not_pulled_at_all():
    problem = problem_of((30, 0.0), (70, 0.4), alpha2=0.0)
    assert np.all(lr.optimal_pulls(problem) == 0)
    assert np.all(lr.own_noise_pulls(problem) == 0)
    assert np.all(lr.bayes_mse(problem) == 0)
    near = lr.optimal_pulls(problem_of((30, 0.0), (70, 0.4), alpha2=1e-9))
    assert np.all((near > 0) & (near < 1e-8))


def test_infinite_noise_drops_the_level_from_the_server_and_leaves_it_the_others_estimate():
    problem = problem_of((30, 0.0), (70, math.inf))
    assert lr.optimal_server_variance(problem) == pytest.approx(1.25 / 30, rel=EXACT)
    np.testing.assert_array_equal(lr.optimal_weights(problem), [1, 0])
    huge = problem_of((30, 0.0), (70, 1e12))
    np.testing.assert_allclose(lr.optimal_pulls(problem), lr.optimal_pulls(huge), rtol=1e-9)
    np.testing.assert_allclose(lr.own_noise_pulls(problem), lr.own_noise_pulls(huge), rtol=1e-9)
    at_optimum = lr.client_mse(problem, lr.optimal_weights(problem), lr.optimal_pulls(problem))
    np.testing.assert_allclose(at_optimum, lr.bayes_mse(huge), rtol=1e-9)


def test_infinite_noise_everywhere_leaves_every_client_alone():
    problem = problem_of((30, math.inf), (70, math.inf))
    assert lr.optimal_server_variance(problem) == math.inf
    assert np.all(lr.optimal_pulls(problem) == 0)
    assert np.all(lr.own_noise_pulls(problem) == 0)
    np.testing.assert_array_equal(lr.client_mse(problem, lr.optimal_weights(problem), 0.0), 1.0)
    np.testing.assert_array_equal(lr.bayes_mse(problem), 1.0)
    assert shared_noise.server_variance(problem, shared_noise.optimal_weights(problem)) == math.inf


@pytest.mark.parametrize("gamma2", [0.0, 0.5])
def test_one_client_alone_keeps_its_own_estimate(gamma2):
    problem = problem_of((1, gamma2))
    assert lr.optimal_server_variance(problem) == 1.25 + gamma2
    np.testing.assert_array_equal(lr.bayes_mse(problem), 1.0)
    assert lr.client_mse(problem, [1.0], lr.own_noise_pulls(problem))[0] == pytest.approx(1.0, rel=EXACT)
    np.testing.assert_array_equal(lr.bayes_estimate(problem, np.array([[3.0]]), 0, np.array([2.0])), [2.0])
    if gamma2:
        assert lr.own_noise_pulls(problem)[0] == 0
        assert lr.optimal_pulls(problem)[0] == pytest.approx(1 / (0.25 + gamma2), rel=EXACT)


def test_updates_without_any_error_decide_alone():
    problem = problem_of((2, 0.0), (70, 0.4), alpha2=0.0, tau2=0.0)
    assert lr.optimal_server_variance(problem) == 0
    np.testing.assert_array_equal(lr.optimal_weights(problem), [1, 0])
    assert np.all(lr.optimal_pulls(problem) == 0)


@pytest.mark.parametrize(
    "levels", [((1, 0.0),), ((1, math.inf),), ((5, 0.0), (5, math.inf)), ((5, math.inf), (1, 0.0))]
)
@pytest.mark.parametrize("alpha2", [0.0, 1.0])
@pytest.mark.parametrize("tau2", [0.0, 1.0])
def test_no_corner_yields_nan_or_a_negative_number(levels, alpha2, tau2):
    result = msgspec.to_builtins(optimum(problem_of(*levels, alpha2=alpha2, tau2=tau2)))
    numbers = json.loads(json.dumps(result), parse_constant=lambda text: {"Infinity": math.inf}[text])

    def check(value):
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                check(each)
        elif isinstance(value, float):
            assert value >= 0

    check(numbers)


# the gap lemma


def test_the_gaps_are_the_differences_of_the_server_variances():
    case = pe.OptOut(clients=50, rho=0.2, gamma2=0.3, alpha2=2.0, tau2=0.5)
    others = baselines(case.problem)
    best = lr.optimal_server_variance(case.problem)
    hdp, dp = others["hdp_fedavg"].server_variance, others["dp_fedavg"].server_variance
    np.testing.assert_allclose(pe.performance_gaps(case), [hdp - best, dp - best, dp - hdp], rtol=1e-11)


def test_the_third_gap_is_the_papers_fraction():
    rho, N, gamma2, c2 = 0.2, 50, 0.3, 2.5
    above = rho * (1 - rho) * c2 * gamma2 + rho**2 * (1 - rho) ** 2 * gamma2**2 * N
    printed = above / (c2 + rho * (1 - rho) * gamma2 * N)
    ours = pe.performance_gaps(pe.OptOut(N, rho, gamma2, 2.0, 0.5)).dp_fedavg_over_hdp_fedavg
    assert ours == pytest.approx(printed, rel=EXACT)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_the_gaps_vanish_where_all_clients_chose_alike(rho):
    assert pe.performance_gaps(pe.OptOut(50, rho, 0.3, 2.0, 0.5)) == (0, 0, 0)


def test_the_gaps_stay_as_clients_grow_many_while_the_optimal_error_vanishes():
    case = pe.OptOut(10**9, 0.2, 0.3, 2.0, 0.5)
    np.testing.assert_allclose(pe.performance_gaps(case)[:2], [0.8**2 * 0.3, 0.8 * 0.3], rtol=1e-6)
    assert pe.optimal_server_variance(case) < 1e-7


def test_the_gaps_grow_without_bound_with_the_noise_while_the_optimal_error_stays():
    case = pe.OptOut(50, 0.2, 1e12, 2.0, 0.5)
    assert min(pe.performance_gaps(case)) > 1e11
    assert pe.optimal_server_variance(case) == pytest.approx(2.5 / 10, rel=1e-9)


# shared noise


def test_with_one_private_level_shared_noise_is_the_papers_rule():
    problem = problem_of((30, 0.0), (70, 0.4))
    np.testing.assert_allclose(shared_noise.optimal_weights(problem), lr.optimal_weights(problem), rtol=EXACT)
    assert shared_noise.gain(problem) == pytest.approx(1, rel=EXACT)


@pytest.mark.parametrize("levels", [2, 3, 5])
def test_where_noise_is_all_there_is_shared_noise_gains_as_many_times_as_there_are_equal_levels(levels):
    problem = problem_of(*[(100, 1.0)] * levels, alpha2=0.0, tau2=0.0)
    assert shared_noise.gain(problem) == pytest.approx(levels, rel=EXACT)


@steady
@given(problems, st.integers(0, 2**32 - 1))
def test_no_weights_near_or_far_beat_the_shared_noise_optimum(problem, seed):
    rng = np.random.default_rng(seed)
    best_G = shared_noise.optimal_weights(problem)
    best = shared_noise.server_variance(problem, best_G)
    near = best_G * np.exp(0.02 * rng.normal(size=(50, len(best_G))))
    far = rng.uniform(1e-3, 1, size=(50, len(best_G)))
    for weights in [*near, *far, lr.optimal_weights(problem)]:
        assert shared_noise.server_variance(problem, weights) >= best * (1 - 1e-12)


def test_shared_noise_never_breaks_a_promise():
    weights = shared_noise.optimal_weights(FIVE)
    released = shared_noise.shared_noise(FIVE, weights) ** 0.5
    owed_G = lr.client_weights(FIVE, weights) * shared_noise.multipliers(FIVE)
    assert np.all(released >= owed_G)


# the optimum as a user reads it


def test_the_optimum_reads_as_json_with_weights_relative_to_the_first_group():
    result = json.loads(json.dumps(msgspec.to_builtins(optimum(FIVE))))
    assert set(result) == {"server_variance", "groups", "baselines"}
    assert [group["name"] for group in result["groups"]] == [level.name for level in FIVE.levels]
    np.testing.assert_allclose([group["weight"] for group in result["groups"]], FIVE.sigma2_G[0] / FIVE.sigma2_G)
    assert {"pull", "pull_own_noise", "client_mse", "bayes_mse"} <= set(result["groups"][0])


def test_fedhdp_is_at_least_as_good_as_every_private_baseline():
    best, others = optimum(FIVE), baselines(FIVE)
    for name in ("dp_fedavg", "hdp_fedavg", "local_only"):
        variance = others[name].server_variance
        assert variance is None or best.server_variance < variance
        for ours, theirs in zip(best.groups, others[name].groups):
            assert ours.client_mse_own_noise < theirs.client_mse
    assert others["non_private"].server_variance < best.server_variance


def test_shares_become_levels_that_hold_all_clients():
    levels = levels_from_shares(10, [1 / 3, 1 / 3, 1 / 3], [0.0, 0.1, 0.2])
    assert [level.clients for level in levels] == [4, 3, 3]
    assert [level.gamma2 for level in levels] == [0.0, 0.1, 0.2]


# bad input


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Level("a", 0, 0.1), "clients must be a whole number of at least 1, got 0"),
        (lambda: Level("a", 2.5, 0.1), "clients must be a whole number of at least 1, got 2.5"),
        (lambda: Level("a", math.nan, 0.1), "clients must be a whole number of at least 1, got nan"),
        (lambda: Level("a", 3, -0.1), "gamma2 must be at least 0, got -0.1"),
        (lambda: Level("a", 3, math.nan), "gamma2 must be at least 0, got nan"),
        (lambda: Problem((), 1.0, 1.0), "levels must be at least one level, got ()"),
        (lambda: problem_of((3, 0.1), alpha2=-1.0), "alpha2 must be finite and at least 0, got -1.0"),
        (lambda: problem_of((3, 0.1), alpha2=math.nan), "alpha2 must be finite and at least 0, got nan"),
        (lambda: problem_of((3, 0.1), tau2=-1.0), "tau2 must be finite and at least 0, got -1.0"),
        (lambda: problem_of((3, 0.1), tau2=math.inf), "tau2 must be finite and at least 0, got inf"),
        (
            lambda: Problem((Level("a", 1, 0.0), Level("a", 2, 0.0)), 1.0, 1.0),
            "levels must be levels of different names, got 'a'",
        ),
        (lambda: levels_from_shares(10, [0.5, 0.4], [0, 1]), "shares must be shares that add to one, got [0.5, 0.4]"),
        (lambda: levels_from_shares(10, [1.5, -0.5], [0, 1]), "shares must be between 0 and 1, got [1.5, -0.5]"),
        (lambda: levels_from_shares(10, [math.nan, 1], [0, 1]), "shares must be between 0 and 1, got [nan, 1]"),
        (lambda: levels_from_shares(10, [1.0, 0.0], [0, 1]), "clients must be a whole number of at least 1, got 0"),
        (lambda: lr.server_variance(FIVE, [1, 1]), "weights must be 5 numbers, got [1, 1]"),
        (
            lambda: lr.server_variance(problem_of((3, 0.1)), [0.0]),
            "weights must be finite, at least 0 and not all 0, got [0.0]",
        ),
        (
            lambda: lr.server_variance(problem_of((3, 0.1)), [math.nan]),
            "weights must be finite, at least 0 and not all 0, got [nan]",
        ),
        (lambda: lr.client_mse(problem_of((3, 0.1)), [1.0], [-1.0]), "pulls must be at least 0, got [-1.0]"),
        (lambda: lr.client_mse(problem_of((3, 0.1)), [1.0], math.nan), "pulls must be at least 0, got nan"),
        (lambda: pe.OptOut(10, 1.5, 0.1, 1.0, 1.0), "rho must be between 0 and 1, got 1.5"),
        (lambda: pe.OptOut(10, 0.5, math.nan, 1.0, 1.0), "gamma2 must be finite and at least 0, got nan"),
    ],
)
def test_bad_input_is_refused_in_one_line_that_names_it(make, said):
    with pytest.raises(ValueError, match="must be") as error:
        make()
    assert str(error.value) == said
