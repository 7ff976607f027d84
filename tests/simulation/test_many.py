"""Several mechanisms in one simulation."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import raises_field
from msgspec.structs import replace
from simulations import CHOSEN, MODEL, TRAINING, trained

from fedhdp.algorithms import dp_fedavg, non_private
from fedhdp.optimizers import OptimizerConfig
from fedhdp.server import ServerOptimizer
from fedhdp.simulation import Simulation, simulate, simulate_many


def test_mechanisms_together_are_those_alone(data):
    stronger = replace(CHOSEN, groups=tuple(replace(group, pull=1.5) for group in CHOSEN.groups))
    per_group = replace(CHOSEN, noise="per_group")
    several = [CHOSEN, non_private(CHOSEN), stronger, dp_fedavg(CHOSEN), per_group]
    together = trained(data, several)
    assert together.run_of == [0, 1, 0, 2, 3]
    everybody = np.arange(data.num_clients)
    rows = together.evaluate()
    for number, mechanism in enumerate(several):
        alone = trained(data, mechanism)
        np.testing.assert_allclose(together.global_model(number), alone.global_model(), atol=1e-5)
        np.testing.assert_allclose(
            together.personal_models(everybody, number), alone.personal_models(everybody), atol=1e-5
        )
        (expected,) = alone.evaluate()
        assert [row[:4] for row in rows[number]] == [row[:4] for row in expected]
        np.testing.assert_allclose([row.value for row in rows[number]], [row.value for row in expected], atol=1e-4)


def test_mechanisms_with_other_cohorts_are_refused(data):
    rarer = replace(CHOSEN, groups=tuple(replace(group, sampling_rate=0.1) for group in CHOSEN.groups))
    with raises_field("mechanisms"):
        Simulation(data, MODEL, [CHOSEN, rarer], TRAINING)


def test_simulate_many_returns_results_in_order(data):
    several = [CHOSEN, non_private(CHOSEN)]
    results = simulate_many(data, MODEL, several, TRAINING, rounds=2, seed=3, noise_seed=7)
    assert [one.mechanism for one in results] == several
    alone = simulate(data, MODEL, several[1], TRAINING, rounds=2, seed=3, noise_seed=7)
    for name, array in alone.parameters.items():
        np.testing.assert_allclose(results[1].parameters[name], array, atol=1e-5)


@pytest.mark.slow
def test_momentum_and_average_are_post_processing(data):
    momentum = ServerOptimizer(OptimizerConfig("sgd", learning_rate=1.0, momentum=0.9), average=0.5)
    plain = trained(data, CHOSEN, rounds=1)
    moved = trained(data, CHOSEN, rounds=1, server_optimizer=momentum)
    np.testing.assert_array_equal(plain.global_model(), moved.global_model())  # the first step has no momentum yet
    result = simulate(data, MODEL, CHOSEN, TRAINING, ServerOptimizer(average=0.5), rounds=2, noise_seed=1)
    assert {row.model for row in result.history} == {"global", "personal", "average"}
