"""The theory's estimates from the real engine: the linear model, full batches, rate 1, personal rate 1 / (1 + pull)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData
from fedhdp.datasets import regression
from fedhdp.mechanism import Mechanism
from fedhdp.models import linear, squared_error
from fedhdp.reproduction.theory.monte_carlo import estimate
from fedhdp.simulation import Simulation
from fedhdp.theory import linear_regression as lr
from fedhdp.theory import shared_noise
from fedhdp.theory.linear_regression import Level, Problem
from fedhdp.theory.optimum import mechanism, with_noise

CLIP = 1000.0  # some thirty times the largest update
DIMENSIONS, SAMPLES = 20, 24
SIZES = {
    1: ((24, 0.1),),
    2: ((6, 0.0), (18, 0.2)),
    3: ((5, 0.01), (7, 0.1), (12, 0.4)),
}


def error_per_coordinate(output_ND, target_ND):
    """On the test examples, which are the truth, the estimate's own error."""
    return jnp.mean((output_ND - target_ND) ** 2, axis=-1)


DATASETS = {
    "linear regression": (
        regression.make_linear_regression,
        linear(DIMENSIONS, 1, bias=False, loss=squared_error, score=error_per_coordinate),
    ),
    "point estimation": (
        regression.make_point_estimation,
        linear(1, DIMENSIONS, bias=False, loss=squared_error, score=error_per_coordinate),
    ),
}

CASES = [("linear regression", levels) for levels in SIZES] + [("point estimation", 2)]  # as the paper has them


def problem_with(levels: int) -> Problem:
    """Levels of unequal sizes."""
    return Problem(tuple(Level(f"level {i}", *level) for i, level in enumerate(SIZES[levels])), 1.0, 0.25)


def draw(dataset: str, problem: Problem, seed: int) -> FederatedData:
    """Everybody's data."""
    clients = int(problem.clients_G.sum())
    return DATASETS[dataset][0](clients, DIMENSIONS, SAMPLES, problem.alpha2, problem.tau2, seed)


def training_at(personal_rate: float, epochs: int = 1) -> LocalTraining:
    """Full batches at rate 1."""
    return LocalTraining(epochs, SAMPLES, learning_rate=1.0, personal_learning_rate=personal_rate)


FOR_ALL = training_at(1 / (1 + 4), epochs=40)  # one rate for all levels: that of the largest pull, and time to arrive


def played(
    dataset: str, population: FederatedData, promise: Mechanism, training: LocalTraining
) -> tuple[Simulation, np.ndarray]:
    """The state after two rounds, and the global model between them, which the second round's clients receive."""
    simulation = Simulation(population, DATASETS[dataset][1], promise, training, noise_seed=0)
    simulation.run(1)
    received_D = simulation.global_model()
    simulation.run(2)
    return simulation, received_D


def personal_models(simulation: Simulation) -> np.ndarray:
    """Every client's personal model, in the order of the clients."""
    return simulation.personal_models(np.flatnonzero(simulation.participated_K))


def least_squares(population: FederatedData) -> np.ndarray:
    """Each client's own estimate, in double precision and without the engine."""
    train = population.train
    rows = [slice(start, start + count) for start, count in zip(train.start_K, train.count_K)]
    return np.stack([np.linalg.lstsq(train.x_N[r].astype(float), train.y_N[r], rcond=None)[0].ravel() for r in rows])


@pytest.mark.parametrize(("dataset", "levels"), CASES)
def test_without_noise_the_engines_estimates_are_the_papers_after_one_step(dataset, levels):
    problem = problem_with(levels)
    weight_G, pull_G = lr.optimal_weights(problem), lr.own_noise_pulls(problem)
    population = draw(dataset, problem, seed=levels)
    local_KD = least_squares(population)
    level_K = np.repeat(np.arange(levels), problem.clients_G.astype(int))
    global_D = lr.global_estimate(local_KD, level_K, weight_G)
    silent = mechanism(with_noise(problem, np.zeros(levels)), weight_G, pull_G, CLIP)
    for level, pull in enumerate(pull_G):  # one rate for all clients of a run, so one run for each level's own
        simulation, received_D = played(dataset, population, silent, training_at(1 / (1 + pull)))
        np.testing.assert_allclose(received_D, global_D, atol=1e-5)
        personal_KD = lr.personal_estimate(local_KD, global_D, pull)
        np.testing.assert_allclose(
            personal_models(simulation)[level_K == level], personal_KD[level_K == level], atol=1e-5
        )


def test_at_one_rate_for_all_levels_every_personal_model_walks_to_its_own_estimate():
    problem = problem_with(3)
    weight_G, pull_G = lr.optimal_weights(problem), lr.own_noise_pulls(problem)
    population = draw("linear regression", problem, seed=0)
    level_K = np.repeat(np.arange(3), problem.clients_G.astype(int))
    promise = mechanism(problem, weight_G, pull_G, CLIP)
    simulation, received_D = played("linear regression", population, promise, FOR_ALL)
    local_KD = least_squares(population)
    expected = [lr.personal_estimate(local_D, received_D, pull) for local_D, pull in zip(local_KD, pull_G[level_K])]
    np.testing.assert_allclose(personal_models(simulation), expected, atol=1e-5)


@pytest.mark.parametrize("noise", ["per_group", "shared"])
@pytest.mark.parametrize("levels", SIZES)
def test_noise_on_the_servers_sum_is_the_noise_that_the_clients_of_the_paper_add(levels, noise):
    problem = problem_with(levels)
    weight_G = np.linspace(1, 0.3, levels)
    terms = mechanism(problem, weight_G, 1.0, CLIP, noise).round_params
    on_the_mean = (float(terms.update_noise_stddev) * CLIP / float(terms.expected_weight)) ** 2
    owed = shared_noise.server_variance if noise == "shared" else lr.server_variance
    without = lr.server_variance(with_noise(problem, np.zeros(levels)), weight_G)
    assert on_the_mean == pytest.approx(owed(problem, weight_G) - without, rel=1e-3)


@pytest.mark.parametrize(
    ("dataset", "levels", "noise"), [(*case, "per_group") for case in CASES] + [("linear regression", 3, "shared")]
)
def test_with_noise_the_engines_server_and_clients_err_as_predicted(dataset, levels, noise):
    problem = problem_with(levels)
    theory = shared_noise if noise == "shared" else lr
    weight_G = theory.optimal_weights(problem)
    pull_G = shared_noise.optimal_pulls(problem, weight_G) if noise == "shared" else lr.own_noise_pulls(problem)
    promise = mechanism(problem, weight_G, pull_G, CLIP, noise)
    assert pull_G.max() <= 4
    server_T, client_TG = [], []
    for seed in range(150):
        population = draw(dataset, problem, seed)
        simulation = Simulation(population, DATASETS[dataset][1], promise, FOR_ALL, noise_seed=seed)
        simulation.run(1)
        server_T.append(np.mean((simulation.global_model() - population.server_y_N.ravel()) ** 2))
        simulation.run(2)
        (rows,) = simulation.evaluate()
        client_TG.append([row.value for row in rows if (row.model, row.metric) == ("personal", "accuracy")])
    # with the noise on the server nobody can take their own out: the error is the one with own noise inside
    predicted = [theory.server_variance(problem, weight_G), *theory.client_mse(problem, weight_G, pull_G)]
    for error_T, closed_form in zip([server_T, *np.transpose(client_TG)], predicted, strict=True):
        mean, standard_error = estimate(np.array(error_T))
        assert abs(mean - closed_form) < 3 * standard_error, (mean, closed_form, standard_error)
        assert standard_error < 0.03 * closed_form  # or agreeing would mean nothing
