"""The theory's estimates from the real engine: the linear model, full batches, rate 1, personal rate 1 / (1 + pull)."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import group_by_group

from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData
from fedhdp.datasets import regression
from fedhdp.mechanism import Mechanism
from fedhdp.models import linear, squared_error
from fedhdp.reproduction.theory.monte_carlo import estimate
from fedhdp.simulation import Simulation
from fedhdp.theory import linear_regression as lr
from fedhdp.theory import shared_noise
from fedhdp.theory.linear_regression import Problem, TheoryGroup
from fedhdp.theory.optimum import make_mechanism, with_noise

CLIP = 1000.0  # some thirty times the largest update
DIMENSIONS, SAMPLES = 20, 24
SIZES = {1: ((24, 0.1),), 2: ((6, 0.0), (18, 0.2)), 3: ((5, 0.01), (7, 0.1), (12, 0.4))}


DATASETS = {
    "linear regression": (
        regression.make_linear_regression,
        linear(DIMENSIONS, 1, bias=False, loss=squared_error),
    ),
    "point estimation": (
        regression.make_point_estimation,
        linear(1, DIMENSIONS, bias=False, loss=squared_error),
    ),
}

CASES = [("linear regression", groups) for groups in SIZES] + [("point estimation", 2)]  # as the paper has them


def problem_with(groups: int) -> Problem:
    """Groups of unequal sizes."""
    return Problem(tuple(TheoryGroup(f"level {i}", *group) for i, group in enumerate(SIZES[groups])), 1.0, 0.25)


def draw(dataset: str, problem: Problem, seed: int) -> FederatedData:
    """The data of all clients."""
    clients = int(problem.clients_G.sum())
    data = DATASETS[dataset][0](clients, DIMENSIONS, SAMPLES, problem.alpha2, problem.tau2, seed)
    return data.with_levels(group_by_group(problem))


def training_at(personal_rate: float, epochs: int = 1) -> LocalTraining:
    """Full batches at rate 1."""
    return LocalTraining(epochs, SAMPLES, learning_rate=1.0, personal_learning_rate=personal_rate)


# The rate of the largest pull, and enough epochs to converge at the others.
SLOW_PERSONAL = training_at(1 / (1 + 4), epochs=40)


def run_two_rounds(
    dataset: str, data: FederatedData, mechanism: Mechanism, training: LocalTraining
) -> tuple[Simulation, np.ndarray]:
    """The state after two rounds, and the global model between them, which the second round's clients receive."""
    simulation = Simulation(data, DATASETS[dataset][1], mechanism, training, noise_seed=0)
    simulation.run(1)
    received_D = simulation.global_model()
    simulation.run(2)
    return simulation, received_D


def personal_models(simulation: Simulation) -> np.ndarray:
    """Every client's personal model, in the order of the clients."""
    return simulation.personal_models(np.flatnonzero(simulation.participated_K))


def least_squares(data: FederatedData) -> np.ndarray:
    """Each client's local estimate, in double precision and without the engine."""
    train = data.train
    rows = [slice(start, start + count) for start, count in zip(train.start_K, train.count_K, strict=True)]
    return np.stack([np.linalg.lstsq(train.x_N[r].astype(float), train.y_N[r], rcond=None)[0].ravel() for r in rows])


@pytest.mark.parametrize(("dataset", "groups"), CASES)
def test_estimates_without_noise(dataset, groups):
    problem = problem_with(groups)
    weight_G, pull_G = lr.optimal_weights(problem), lr.own_noise_pulls(problem)
    data = draw(dataset, problem, seed=groups)
    local_KD = least_squares(data)
    group_K = np.repeat(np.arange(groups), problem.clients_G.astype(int))
    global_D = lr.global_estimate(local_KD, group_K, weight_G)
    noiseless = make_mechanism(with_noise(problem, np.zeros(groups)), weight_G, pull_G, CLIP)
    for group, pull in enumerate(pull_G):  # all clients of a run have one rate: a run for each group's rate
        simulation, received_D = run_two_rounds(dataset, data, noiseless, training_at(1 / (1 + pull)))
        np.testing.assert_allclose(received_D, global_D, atol=1e-5)
        personal_KD = lr.personal_estimate(local_KD, global_D, pull)
        np.testing.assert_allclose(
            personal_models(simulation)[group_K == group], personal_KD[group_K == group], atol=1e-5
        )


def test_personal_models_at_one_rate():
    problem = problem_with(3)
    weight_G, pull_G = lr.optimal_weights(problem), lr.own_noise_pulls(problem)
    data = draw("linear regression", problem, seed=0)
    group_K = np.repeat(np.arange(3), problem.clients_G.astype(int))
    mechanism = make_mechanism(problem, weight_G, pull_G, CLIP)
    simulation, received_D = run_two_rounds("linear regression", data, mechanism, SLOW_PERSONAL)
    local_KD = least_squares(data)
    expected = [
        lr.personal_estimate(local_D, received_D, pull) for local_D, pull in zip(local_KD, pull_G[group_K], strict=True)
    ]
    np.testing.assert_allclose(personal_models(simulation), expected, atol=1e-5)


@pytest.mark.parametrize("noise", ["per_group", "shared"])
@pytest.mark.parametrize("groups", SIZES)
def test_server_noise_is_the_papers_client_noise(groups, noise):
    problem = problem_with(groups)
    weight_G = np.linspace(1, 0.3, groups)
    params = make_mechanism(problem, weight_G, 1.0, CLIP, noise).round_params
    noise_of_mean = (float(params.update_noise_stddev) * CLIP / float(params.expected_weight)) ** 2
    variance = shared_noise.server_variance if noise == "shared" else lr.server_variance
    without = lr.server_variance(with_noise(problem, np.zeros(groups)), weight_G)
    assert noise_of_mean == pytest.approx(variance(problem, weight_G) - without, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "groups", "noise"), [(*case, "per_group") for case in CASES] + [("linear regression", 3, "shared")]
)
def test_errors_with_noise(dataset, groups, noise):
    problem = problem_with(groups)
    theory = shared_noise if noise == "shared" else lr
    weight_G = theory.optimal_weights(problem)
    pull_G = shared_noise.optimal_pulls(problem, weight_G) if noise == "shared" else lr.own_noise_pulls(problem)
    mechanism = make_mechanism(problem, weight_G, pull_G, CLIP, noise)
    assert pull_G.max() <= 4
    server_T, client_TG = [], []
    for seed in range(150):
        data = draw(dataset, problem, seed)
        simulation = Simulation(data, DATASETS[dataset][1], mechanism, SLOW_PERSONAL, noise_seed=seed)
        simulation.run(1)
        server_T.append(np.mean((simulation.global_model() - data.server_y_N.ravel()) ** 2))
        simulation.run(2)
        (rows,) = simulation.evaluate()
        client_TG.append([row.value for row in rows if (row.model, row.metric) == ("personal", "mean_squared_error")])
    # no client can subtract noise that the server adds: the error is the one with own noise
    predicted = [theory.server_variance(problem, weight_G), *theory.client_mse(problem, weight_G, pull_G)]
    for error_T, closed_form in zip([server_T, *np.transpose(client_TG)], predicted, strict=True):
        mean, standard_error = estimate(np.array(error_T))
        assert abs(mean - closed_form) < 3 * standard_error, (mean, closed_form, standard_error)
        assert standard_error < 0.03 * closed_form  # or agreeing would mean nothing
