"""Past the diagonal assumption: unequal sample counts and features of any covariance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import raises_field
from theory_problems import assert_agrees

from fedhdp.reproduction.theory import general
from fedhdp.theory import linear_regression as lr
from fedhdp.theory.linear_regression import Problem, TheoryGroup

GROUPS = (TheoryGroup("open", 8, 0.0), TheoryGroup("private", 12, 0.05))


def general_problem(samples: tuple[int, int], condition: float) -> general.GeneralProblem:
    """Gaussian features whose covariance has this condition number."""
    rng = np.random.default_rng(0)
    turn_DD = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    covariance_DD = turn_DD * np.geomspace(1, 1 / condition, 3) @ turn_DD.T
    features = general.random_features(20, samples, covariance_DD, rng)
    return general.from_features(GROUPS, features, beta2=4.0, tau2=0.1)


def test_orthogonal_features_have_the_closed_form():
    rng = np.random.default_rng(0)
    features = [np.sqrt(16) * np.linalg.qr(rng.normal(size=(16, 3)))[0] for _ in range(20)]
    comparison = general.compare(general.from_features(GROUPS, features, beta2=4.0, tau2=0.1))
    problem = Problem(GROUPS, 4.0 / 16, 0.1)
    weights = lr.optimal_weights(problem)
    np.testing.assert_allclose(comparison.weights, weights, rtol=1e-10)
    np.testing.assert_allclose(comparison.pulls, lr.own_noise_pulls(problem), rtol=1e-4)
    np.testing.assert_allclose(
        [comparison.server_optimal, comparison.server_fedhdp], lr.optimal_server_variance(problem)
    )
    np.testing.assert_allclose(comparison.client_optimal, lr.bayes_mse(problem), rtol=1e-10)
    np.testing.assert_allclose(
        comparison.client_fedhdp, lr.client_mse(problem, weights, lr.own_noise_pulls(problem)), rtol=1e-8
    )


def test_loss_grows_with_the_differences_between_clients():
    losses = [
        general.compare(general_problem(*shape)) for shape in [((40, 40), 1.0), ((5, 200), 1.0), ((5, 200), 30.0)]
    ]
    server = [comparison.server_loss for comparison in losses]
    assert 0 < server[0] < server[1] < server[2]
    assert all(loss > 0 for comparison in losses for loss in comparison.client_loss)


def test_weights_and_pulls_are_optimal():
    problem = general_problem((5, 60), 10.0)
    comparison = general.compare(problem)
    for ratio in (0.5, 0.9, 1.1, 2):
        error_DD = general.fedhdp_server_error(problem, np.array(comparison.weights) * [1, ratio])
        assert np.trace(error_DD) / 3 > comparison.server_fedhdp
        for group, pull in enumerate(comparison.pulls):
            error_N = general.fedhdp_client_errors(problem, comparison.weights, pull * ratio)
            assert error_N[problem.group_N == group].mean() > comparison.client_fedhdp[group]


def test_errors_agree_with_drawn_features_and_responses():
    rng = np.random.default_rng(1)
    features = general.random_features(6, (5, 30), np.diag([1.0, 0.3]), rng)
    problem = general.from_features((TheoryGroup("a", 2, 0.0), TheoryGroup("b", 4, 0.2)), features, beta2=1.0, tau2=0.2)
    weights, pull, trials = np.array([1.0, 0.3]), 0.7, 20_000
    truth_TND = np.sqrt(0.2) * rng.normal(size=(trials, 6, 2))
    responses = [truth_TND[:, j] @ F.T + rng.normal(size=(trials, len(F))) for j, F in enumerate(features)]
    local_TND = np.stack(
        [np.linalg.lstsq(F, y.T, rcond=None)[0].T for F, y in zip(features, responses, strict=True)], axis=1
    )
    update_TND = local_TND + np.sqrt(problem.noise_N)[:, None] * rng.normal(size=(trials, 6, 2))
    weight_N = weights[problem.group_N]
    global_TD = np.einsum("n,tnd->td", weight_N, update_TND) / weight_N.sum()
    assert_agrees(np.mean(global_TD**2, axis=1), np.trace(general.fedhdp_server_error(problem, weights)) / 2)
    predicted_N = general.fedhdp_client_errors(problem, weights, pull)
    for j, (F, y) in enumerate(zip(features, responses, strict=True)):
        n = len(F)
        right_TD = y @ F / n + pull * global_TD  # the minimiser of |F x - y|^2 / 2n + pull/2 |x - global|^2
        personal_TD = np.linalg.solve(F.T @ F / n + pull * np.eye(2), right_TD.T).T
        assert_agrees(np.mean((personal_TD - truth_TND[:, j]) ** 2, axis=1), predicted_N[j])


@pytest.mark.parametrize(
    ("field", "features", "beta2", "tau2"),
    [
        ("features", [np.eye(2)], 1.0, 0.1),
        ("tau2", [np.eye(2)] * 20, 1.0, -0.1),
        ("beta2", [np.eye(2)] * 20, math.nan, 0.1),
        ("features", [np.ones((4, 2))] * 20, 1.0, 0.1),
    ],
)
def test_invalid_values(field, features, beta2, tau2):
    with raises_field(field):
        general.from_features(GROUPS, features, beta2, tau2)
