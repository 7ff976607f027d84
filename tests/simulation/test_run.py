"""The round loop and its hooks."""

from __future__ import annotations

import numpy as np
import pytest
from simulations import CHOSEN, MODEL, TRAINING, same, trained

from fedhdp.simulation import simulate


@pytest.mark.slow
def test_hooks_run_around_each_round_and_its_evaluation(data):
    calls = []
    simulation = trained(data, CHOSEN, rounds=0)
    simulation.run(
        3,
        before_round=lambda simulation: calls.append(("before", simulation.round)),
        after_round=lambda simulation: calls.append(("after", simulation.round, bool(simulation.histories[0]))),
        evaluate_every=2,
    )
    assert calls[:4] == [("before", 0), ("after", 1, False), ("before", 1), ("after", 2, True)]
    assert sorted({row.round for row in simulation.histories[0]}) == [2, 3]
    same(simulation, trained(data, CHOSEN, rounds=3))


def test_hook_ends_the_loop(data):
    simulation = trained(data, CHOSEN, rounds=0)
    simulation.run(5, before_round=lambda simulation: simulation.round < 2)
    assert simulation.round == 2
    simulation.run(5, after_round=lambda simulation: False)
    assert simulation.round == 3


def test_simulate_ends_and_evaluates_where_on_round_returns_false(data):
    result = simulate(data, MODEL, CHOSEN, TRAINING, rounds=5, noise_seed=1, on_round=lambda _: False)
    assert result.rounds == 1
    assert {row.round for row in result.history} == {1}
    assert np.isfinite(result.scores["global/accuracy"]).all()
