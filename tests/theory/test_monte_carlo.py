"""The closed forms against simulation: each within three standard errors, and nothing nearby is better."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import raises_field
from theory_problems import assert_agrees

from fedhdp.reproduction.theory import monte_carlo
from fedhdp.theory import linear_regression as lr
from fedhdp.theory import shared_noise
from fedhdp.theory.linear_regression import Problem, TheoryGroup

SIZES = {
    1: ((60, 0.2),),
    2: ((30, 0.0), (90, 0.1)),
    3: ((20, 0.01), (50, 0.1), (30, 0.5)),
    5: ((10, 0.0), (40, 0.01), (25, 0.05), (5, 0.4), (60, 0.3)),
}


def problem_with(groups: int) -> Problem:
    """Levels of unequal sizes."""
    return Problem(tuple(TheoryGroup(f"level {i}", *group) for i, group in enumerate(SIZES[groups])), 1.0, 0.25)


@pytest.fixture(scope="module")
def drawn() -> dict[int, monte_carlo.Trials]:
    """The trials of each problem, drawn once."""
    return {groups: monte_carlo.simulate(problem_with(groups), 10_000, 3, seed=groups) for groups in SIZES}


@pytest.mark.parametrize("groups", SIZES)
def test_server_error_agrees(drawn, groups):
    problem = problem_with(groups)
    for weights in (lr.optimal_weights(problem), np.ones(groups)):
        assert_agrees(monte_carlo.server_errors(drawn[groups], weights), lr.server_variance(problem, weights))


@pytest.mark.parametrize("own_noise", [True, False])
@pytest.mark.parametrize("groups", SIZES)
def test_client_errors_agree(drawn, groups, own_noise):
    problem = problem_with(groups)
    for weights in (lr.optimal_weights(problem), np.ones(groups)):
        for pulls in (lr.optimal_pulls(problem), lr.own_noise_pulls(problem), 0.3, math.inf):
            error_TG = monte_carlo.client_errors(drawn[groups], weights, pulls, own_noise)
            for error_T, closed_form in zip(error_TG.T, lr.client_mse(problem, weights, pulls, own_noise), strict=True):
                assert_agrees(error_T, closed_form)


@pytest.mark.parametrize("groups", SIZES)
def test_shared_noise_agrees(drawn, groups):
    problem = problem_with(groups)
    weights = shared_noise.optimal_weights(problem)
    assert_agrees(
        monte_carlo.server_errors(drawn[groups], weights, shared=True), shared_noise.server_variance(problem, weights)
    )
    pulls = shared_noise.optimal_pulls(problem, weights)
    error_TG = monte_carlo.client_errors(drawn[groups], weights, pulls, shared=True)
    for error_T, closed_form in zip(error_TG.T, shared_noise.client_mse(problem, weights, pulls), strict=True):
        assert_agrees(error_T, closed_form)


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_no_weights_on_a_grid_are_better(drawn, groups):
    best_G = lr.optimal_weights(problem_with(groups))
    best_T = monte_carlo.server_errors(drawn[groups], best_G)
    for group in range(1, groups):
        for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
            weights = best_G * np.where(np.arange(groups) == group, factor, 1)
            mean, standard_error = monte_carlo.estimate(monte_carlo.server_errors(drawn[groups], weights) - best_T)
            assert mean > -3 * standard_error


@pytest.mark.parametrize("groups", SIZES)
def test_no_weights_and_pulls_on_a_grid_beat_the_bayes_error(drawn, groups):
    problem = problem_with(groups)
    weight_G, pull_G = lr.optimal_weights(problem), lr.optimal_pulls(problem)
    best_TG = monte_carlo.client_errors(drawn[groups], weight_G, pull_G, own_noise=False)
    for ratio in (0.25, 0.5, 1, 2, 4):
        weights = weight_G * np.where(np.arange(groups) == groups - 1, ratio, 1)
        for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
            excess_TG = monte_carlo.client_errors(drawn[groups], weights, pull_G * factor) - best_TG
            for excess_T in excess_TG.T:
                mean, standard_error = monte_carlo.estimate(excess_T)
                assert mean > -3 * standard_error


def test_error_is_larger_far_from_the_optimum(drawn):
    problem = problem_with(3)
    best = lr.optimal_weights(problem)
    worse_T = monte_carlo.server_errors(drawn[3], np.ones(3)) - monte_carlo.server_errors(drawn[3], best)
    mean, standard_error = monte_carlo.estimate(worse_T)
    assert mean > 10 * standard_error


def test_errors_are_those_of_each_client_by_itself():
    problem = Problem((TheoryGroup("a", 2, 0.0), TheoryGroup("b", 3, 0.5)), 1.0, 0.25)
    trials = monte_carlo.simulate(problem, 4, 2, seed=3)
    weights, pulls, phi_D = np.array([1.0, 0.4]), np.array([2.0, 0.7]), np.array([5.0, -3.0])
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(3).spawn(1)[0]))
    open_TKDN = np.concatenate([rng.standard_normal((4, 2, 2, 2), dtype=np.float32), np.zeros((4, 1, 2, 2))], axis=1)
    private_TKDN = rng.standard_normal((4, 3, 2, 3), dtype=np.float32)
    for t in range(4):
        draw_KND = np.concatenate([open_TKDN[t], private_TKDN[t]], axis=-1).transpose(0, 2, 1)
        truth_ND = phi_D + np.sqrt(0.25) * draw_KND[1]
        local_ND = truth_ND + draw_KND[0]
        update_ND = local_ND + np.sqrt(3 * 0.5) * draw_KND[2]
        global_D = (update_ND[:2].sum(0) + 0.4 * update_ND[2:].sum(0)) / (2 + 0.4 * 3)
        server = np.mean((global_D - phi_D) ** 2)
        assert monte_carlo.server_errors(trials, weights)[t] == pytest.approx(server, rel=1e-5)
        for g, members in enumerate((slice(0, 2), slice(2, 5))):
            personal_ND = (local_ND[members] + pulls[g] * global_D) / (1 + pulls[g])
            client = np.mean((personal_ND - truth_ND[members]) ** 2)
            assert monte_carlo.client_errors(trials, weights, pulls)[t, g] == pytest.approx(client, rel=1e-5)


def test_trials_do_not_depend_on_workers():
    one, two = (monte_carlo.simulate(problem_with(3), 700, 10, seed=1, workers=workers) for workers in (1, 2))
    np.testing.assert_array_equal(one.sum_TGKD, two.sum_TGKD)
    np.testing.assert_array_equal(one.product_TGKK, two.product_TGKK)
    other = monte_carlo.simulate(problem_with(3), 700, 10, seed=2)
    assert not np.any(other.product_TGKK == one.product_TGKK)


@pytest.mark.slow
def test_many_trials_agree():
    problem = Problem((TheoryGroup("a", 200, 0.0), TheoryGroup("b", 300, 0.01), TheoryGroup("c", 500, 0.1)), 1.0, 0.25)
    trials = monte_carlo.simulate(problem, 10_000, 10, seed=0)
    weights, pulls = lr.optimal_weights(problem), lr.optimal_pulls(problem)
    error_TG = monte_carlo.client_errors(trials, weights, pulls)
    assert_agrees(monte_carlo.server_errors(trials, weights), lr.optimal_server_variance(problem))
    for error_T, closed_form in zip(error_TG.T, lr.client_mse(problem, weights, pulls), strict=True):
        assert_agrees(error_T, closed_form)


def test_infinite_noise_cannot_be_drawn():
    problem = Problem((TheoryGroup("a", 2, math.inf),), 1.0, 0.25)
    with raises_field("gamma2"):
        monte_carlo.simulate(problem, 10, 2, seed=0)
