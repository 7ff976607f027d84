"""The round loop and its hooks."""

from __future__ import annotations

import numpy as np
import pytest
from simulations import CHOSEN, MODEL, TRAINING, same, trained

from fedhdp.results.tables import footnotes
from fedhdp.simulation import simulate


@pytest.mark.slow
def test_hooks_run_around_each_round_and_its_evaluation(data):
    calls = []
    simulation = trained(data, CHOSEN, rounds=0)
    simulation.run(
        3,
        before_round=lambda simulation: calls.append(("before", simulation.round)),
        on_round=lambda simulation: calls.append(("round", simulation.round, bool(simulation.histories[0]))),
        evaluate_every=2,
        on_evaluate=lambda simulation, rows: calls.append(("evaluate", rows == [simulation.histories[0]])),
    )
    first, second = [("before", 0), ("round", 1, False)], [("before", 1), ("evaluate", True), ("round", 2, True)]
    assert calls[:5] == first + second
    assert sorted({row.round for row in simulation.histories[0]}) == [2, 3]
    same(simulation, trained(data, CHOSEN, rounds=3))


def test_hook_ends_the_loop(data):
    simulation = trained(data, CHOSEN, rounds=0)
    simulation.run(5, before_round=lambda simulation: simulation.round < 2)
    assert simulation.round == 2
    simulation.run(5, on_round=lambda simulation: False)
    assert simulation.round == 3
    simulation.run(5, evaluate_every=1, on_evaluate=lambda simulation, rows: False)
    assert simulation.round == 4


def test_result_names_the_preparation(data):
    result = simulate(data._replace(preparation="standardized"), MODEL, CHOSEN, TRAINING, rounds=1).result("FedHDP")
    assert "inputs: standardized" in footnotes([result])


def test_on_round_ends_simulate(data):
    result = simulate(data, MODEL, CHOSEN, TRAINING, rounds=5, noise_seed=1, on_round=lambda _: False)
    assert result.rounds == 1
    assert {row.round for row in result.history} == {1}
    assert np.isfinite(result.scores["global/accuracy"]).all()


def test_callbacks_of_simulate_see_what_was_measured(data):
    clips, evaluations = [], []

    def on_round(simulation):
        (rows,) = simulation.round_rows()
        clips.append({(row.group, row.metric): row.value for row in rows}["server", "clip"])

    def on_evaluate(simulation, rows):
        evaluations.append(rows)
        return len(evaluations) < 2

    options = {"rounds": 6, "evaluate_every": 2, "noise_seed": 1, "on_round": on_round, "on_evaluate": on_evaluate}
    result = simulate(data, MODEL, CHOSEN, TRAINING, **options)
    assert (result.rounds, len(clips), len(set(clips))) == (4, 4, 4)
    assert [row for rows in evaluations for row in rows] == result.history
