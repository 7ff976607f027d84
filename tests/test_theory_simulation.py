"""The theory against simulation: every closed form within three standard errors, and nothing nearby that beats it."""

import csv
import math
import time

import numpy as np
import pytest

from fedhdp.reproduction.theory import general, monte_carlo
from fedhdp.reproduction.theory.figures import theory_figures
from fedhdp.theory import linear_regression as lr
from fedhdp.theory import shared_noise
from fedhdp.theory.linear_regression import Level, Problem

SIZES = {
    1: ((60, 0.2),),
    2: ((30, 0.0), (90, 0.1)),
    3: ((20, 0.01), (50, 0.1), (30, 0.5)),
    5: ((10, 0.0), (40, 0.01), (25, 0.05), (5, 0.4), (60, 0.3)),
}


def problem_with(levels: int) -> Problem:
    """Levels of unequal sizes."""
    return Problem(tuple(Level(f"level {i}", *level) for i, level in enumerate(SIZES[levels])), 1.0, 0.25)


@pytest.fixture(scope="module")
def drawn() -> dict[int, monte_carlo.Trials]:
    """The trials of each problem, drawn once."""
    return {levels: monte_carlo.simulate(problem_with(levels), 10_000, 3, seed=levels) for levels in SIZES}


def assert_agrees(error_T: np.ndarray, closed_form: float) -> None:
    """Within three standard errors of the closed form."""
    mean, standard_error = monte_carlo.estimate(error_T)
    assert abs(mean - closed_form) < 3 * standard_error, (mean, closed_form, standard_error)
    assert standard_error < 0.02 * closed_form  # or agreeing would mean nothing


@pytest.mark.parametrize("levels", SIZES)
def test_the_server_errs_as_predicted_at_the_optimal_and_at_equal_weights(drawn, levels):
    problem = problem_with(levels)
    for weights in (lr.optimal_weights(problem), np.ones(levels)):
        assert_agrees(monte_carlo.server_errors(drawn[levels], weights), lr.server_variance(problem, weights))


@pytest.mark.parametrize("own_noise", [True, False])
@pytest.mark.parametrize("levels", SIZES)
def test_clients_err_as_predicted_at_the_optimal_and_at_other_pulls(drawn, levels, own_noise):
    problem = problem_with(levels)
    for weights in (lr.optimal_weights(problem), np.ones(levels)):
        for pulls in (lr.optimal_pulls(problem), lr.own_noise_pulls(problem), 0.3, math.inf):
            error_TG = monte_carlo.client_errors(drawn[levels], weights, pulls, own_noise)
            for error_T, closed_form in zip(error_TG.T, lr.client_mse(problem, weights, pulls, own_noise)):
                assert_agrees(error_T, closed_form)


@pytest.mark.parametrize("levels", SIZES)
def test_server_and_clients_err_as_predicted_under_one_shared_noise(drawn, levels):
    problem = problem_with(levels)
    weights = shared_noise.optimal_weights(problem)
    assert_agrees(
        monte_carlo.server_errors(drawn[levels], weights, shared=True), shared_noise.server_variance(problem, weights)
    )
    pulls = shared_noise.optimal_pulls(problem, weights)
    error_TG = monte_carlo.client_errors(drawn[levels], weights, pulls, shared=True)
    for error_T, closed_form in zip(error_TG.T, shared_noise.client_mse(problem, weights, pulls)):
        assert_agrees(error_T, closed_form)


@pytest.mark.parametrize("levels", [2, 3, 5])
def test_no_weights_in_a_grid_around_the_optimal_ones_err_less(drawn, levels):
    best_G = lr.optimal_weights(problem_with(levels))
    best_T = monte_carlo.server_errors(drawn[levels], best_G)
    for level in range(1, levels):
        for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
            weights = best_G * np.where(np.arange(levels) == level, factor, 1)
            mean, standard_error = monte_carlo.estimate(monte_carlo.server_errors(drawn[levels], weights) - best_T)
            assert mean > -3 * standard_error


@pytest.mark.parametrize("levels", SIZES)
def test_no_weights_and_pulls_in_a_grid_around_the_optimal_ones_err_less_than_the_bayes_optimum(drawn, levels):
    problem = problem_with(levels)
    weight_G, pull_G = lr.optimal_weights(problem), lr.optimal_pulls(problem)
    best_TG = monte_carlo.client_errors(drawn[levels], weight_G, pull_G, own_noise=False)
    for ratio in (0.25, 0.5, 1, 2, 4):
        weights = weight_G * np.where(np.arange(levels) == levels - 1, ratio, 1)
        for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
            excess_TG = monte_carlo.client_errors(drawn[levels], weights, pull_G * factor) - best_TG
            for excess_T in excess_TG.T:
                mean, standard_error = monte_carlo.estimate(excess_T)
                assert mean > -3 * standard_error


def test_far_from_the_optimum_the_simulation_sees_a_larger_error(drawn):
    problem = problem_with(3)
    best = lr.optimal_weights(problem)
    worse_T = monte_carlo.server_errors(drawn[3], np.ones(3)) - monte_carlo.server_errors(drawn[3], best)
    mean, standard_error = monte_carlo.estimate(worse_T)
    assert mean > 10 * standard_error


def test_errors_read_off_sums_and_products_are_those_of_every_client_computed_one_by_one():
    problem = Problem((Level("a", 2, 0.0), Level("b", 3, 0.5)), 1.0, 0.25)
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


def test_a_seed_gives_the_same_trials_for_any_number_of_workers():
    one, two = (monte_carlo.simulate(problem_with(3), 700, 10, seed=1, workers=workers) for workers in (1, 2))
    np.testing.assert_array_equal(one.sum_TGKD, two.sum_TGKD)
    np.testing.assert_array_equal(one.product_TGKK, two.product_TGKK)
    other = monte_carlo.simulate(problem_with(3), 700, 10, seed=2)
    assert not np.any(other.product_TGKK == one.product_TGKK)


def test_ten_thousand_trials_of_a_thousand_clients_in_ten_dimensions_agree_and_take_little_time():
    problem = Problem((Level("a", 200, 0.0), Level("b", 300, 0.01), Level("c", 500, 0.1)), 1.0, 0.25)
    start = time.perf_counter()
    trials = monte_carlo.simulate(problem, 10_000, 10, seed=0)
    weights, pulls = lr.optimal_weights(problem), lr.optimal_pulls(problem)
    error_TG = monte_carlo.client_errors(trials, weights, pulls)
    assert time.perf_counter() - start < 20  # 3 s on two free cores; the promise is 10
    assert_agrees(monte_carlo.server_errors(trials, weights), lr.optimal_server_variance(problem))
    for error_T, closed_form in zip(error_TG.T, lr.client_mse(problem, weights, pulls)):
        assert_agrees(error_T, closed_form)


def test_infinite_noise_cannot_be_drawn_and_is_refused():
    problem = Problem((Level("a", 2, math.inf),), 1.0, 0.25)
    with pytest.raises(ValueError, match="gamma2 must be finite to be drawn, got inf"):
        monte_carlo.simulate(problem, 10, 2, seed=0)


def test_every_figure_is_written_three_ways_and_its_points_lie_on_its_lines(tmp_path):
    paths = theory_figures(tmp_path, trials=400)
    assert sorted(path.suffix for path in paths) == [".csv"] * 4 + [".png"] * 4 + [".svg"] * 4
    assert all(path.stat().st_size > 1000 for path in paths)
    far = checked = 0
    for path in paths[2::3]:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        for curve in {(row["panel"], row["curve"]) for row in rows}:
            of = [row for row in rows if (row["panel"], row["curve"]) == curve]
            line = [(float(row["x"]), float(row["y"])) for row in of if row["kind"] == "closed form"]
            for row in of:
                if row["kind"] == "simulated":
                    distance = float(row["y"]) - np.interp(float(row["x"]), *zip(*line))
                    far += abs(distance) > 3 * float(row["standard_error"])
                    checked += 1
                elif row["kind"] == "optimum":
                    assert float(row["y"]) <= min(y for _, y in line) * (1 + 1e-12)
    assert checked == 2 * 4 * 11 + 3 * 13 + 2 * 4 * 13
    assert far <= 0.03 * checked


# past the diagonal assumption

LEVELS = (Level("open", 8, 0.0), Level("private", 12, 0.05))


def general_problem(samples: tuple[int, int], condition: float) -> general.GeneralProblem:
    """Gaussian features whose covariance has this condition number."""
    rng = np.random.default_rng(0)
    turn_DD = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    covariance_DD = turn_DD * np.geomspace(1, 1 / condition, 3) @ turn_DD.T
    features = general.random_features(20, samples, covariance_DD, rng)
    return general.from_features(LEVELS, features, beta2=4.0, tau2=0.1)


def test_with_orthogonal_features_the_general_optimum_is_the_closed_form():
    rng = np.random.default_rng(0)
    features = [np.sqrt(16) * np.linalg.qr(rng.normal(size=(16, 3)))[0] for _ in range(20)]
    found = general.compare(general.from_features(LEVELS, features, beta2=4.0, tau2=0.1))
    problem = Problem(LEVELS, 4.0 / 16, 0.1)
    weights = lr.optimal_weights(problem)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-10)
    np.testing.assert_allclose(found.pulls, lr.own_noise_pulls(problem), rtol=1e-4)
    np.testing.assert_allclose([found.server_optimal, found.server_fedhdp], lr.optimal_server_variance(problem))
    np.testing.assert_allclose(found.client_optimal, lr.bayes_mse(problem), rtol=1e-10)
    np.testing.assert_allclose(
        found.client_fedhdp, lr.client_mse(problem, weights, lr.own_noise_pulls(problem)), rtol=1e-8
    )


def test_fedhdp_never_beats_the_general_optimum_and_loses_more_the_more_clients_differ():
    losses = [
        general.compare(general_problem(*shape)) for shape in [((40, 40), 1.0), ((5, 200), 1.0), ((5, 200), 30.0)]
    ]
    server = [found.server_loss for found in losses]
    assert 0 < server[0] < server[1] < server[2]
    assert all(loss > 0 for found in losses for loss in found.client_loss)


def test_no_other_weights_or_pulls_beat_those_found_for_the_general_problem():
    problem = general_problem((5, 60), 10.0)
    found = general.compare(problem)
    for ratio in (0.5, 0.9, 1.1, 2):
        error_DD = general.fedhdp_server_error(problem, np.array(found.weights) * [1, ratio])
        assert np.trace(error_DD) / 3 > found.server_fedhdp
        for level, pull in enumerate(found.pulls):
            error_N = general.fedhdp_client_errors(problem, found.weights, pull * ratio)
            assert error_N[problem.level_N == level].mean() > found.client_fedhdp[level]


def test_with_real_features_and_responses_server_and_clients_err_as_computed():
    rng = np.random.default_rng(1)
    features = general.random_features(6, (5, 30), np.diag([1.0, 0.3]), rng)
    problem = general.from_features((Level("a", 2, 0.0), Level("b", 4, 0.2)), features, beta2=1.0, tau2=0.2)
    weights, pull, trials = np.array([1.0, 0.3]), 0.7, 20_000
    truth_TND = np.sqrt(0.2) * rng.normal(size=(trials, 6, 2))
    responses = [truth_TND[:, j] @ F.T + rng.normal(size=(trials, len(F))) for j, F in enumerate(features)]
    local_TND = np.stack([np.linalg.lstsq(F, y.T, rcond=None)[0].T for F, y in zip(features, responses)], axis=1)
    update_TND = local_TND + np.sqrt(problem.noise_N)[:, None] * rng.normal(size=(trials, 6, 2))
    weight_N = weights[problem.level_N]
    global_TD = np.einsum("n,tnd->td", weight_N, update_TND) / weight_N.sum()
    assert_agrees(np.mean(global_TD**2, axis=1), np.trace(general.fedhdp_server_error(problem, weights)) / 2)
    predicted_N = general.fedhdp_client_errors(problem, weights, pull)
    for j, (F, y) in enumerate(zip(features, responses)):
        n = len(F)
        right_TD = y @ F / n + pull * global_TD  # the minimiser of |F x - y|^2 / 2n + pull/2 |x - global|^2
        personal_TD = np.linalg.solve(F.T @ F / n + pull * np.eye(2), right_TD.T).T
        assert_agrees(np.mean((personal_TD - truth_TND[:, j]) ** 2, axis=1), predicted_N[j])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: general.from_features(LEVELS, [np.eye(2)], 1.0, 0.1), "features must be one for each of 20 clients"),
        (lambda: general.from_features(LEVELS, [np.eye(2)] * 20, 1.0, -0.1), "tau2 must be finite and at least 0"),
        (lambda: general.from_features(LEVELS, [np.eye(2)] * 20, math.nan, 0.1), "beta2 must be finite and above 0"),
        (lambda: general.from_features(LEVELS, [np.ones((4, 2))] * 20, 1.0, 0.1), "features must be of full rank"),
    ],
)
def test_bad_features_are_refused_in_one_line_that_names_the_argument(make, said):
    with pytest.raises(ValueError, match=said):
        make()
