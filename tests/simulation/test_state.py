"""What a simulation refuses, and the state that it saves and restores."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers import mechanism_of, raises_field, tiny_data
from msgspec.structs import replace
from simulations import CHOSEN, MODEL, TRAINING, same, trained

from fedhdp.data import examples
from fedhdp.errors import DataError, ModelError, RunError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.optimizers import OptimizerConfig
from fedhdp.server import ServerOptimizer
from fedhdp.simulation import Simulation, simulate


def test_personal_models_of_unknown_clients_are_refused(data):
    simulation = trained(data, CHOSEN)
    for unknown in ([-1], [data.num_clients], []):
        with raises_field("clients"):
            simulation.personal_models(np.array(unknown, int))
    np.testing.assert_array_equal(simulation.personal_models(3), simulation.personal_models(np.array([3])))
    with raises_field("personalize", ModelError):
        trained(data, CHOSEN, 0, training=replace(TRAINING, personalize=False)).personal_models(0)


def test_counts_and_pulls_out_of_range_are_refused(data):
    with raises_field("counts", DataError):
        examples(np.zeros((3, 2)), np.zeros(3), [4, -1])
    strong = replace(CHOSEN, groups=tuple(replace(group, pull=7.0) for group in CHOSEN.groups))
    with raises_field("pull of 'group 0'"):
        Simulation(data, MODEL, strong, TRAINING)


def test_groups_must_have_all_clients(data):
    with raises_field("groups", DataError):
        Simulation(data, MODEL, mechanism_of((18, 1.0, 1.0)))


def test_invalid_arguments_of_simulate_are_refused(data):
    for rounds in (0, True, 1.5, None):
        with raises_field("rounds"):
            simulate(data, MODEL, CHOSEN, TRAINING, rounds=rounds)
    for every in (0, -1, 0.5):
        with raises_field("evaluate_every"):
            simulate(data, MODEL, CHOSEN, TRAINING, rounds=1, evaluate_every=every)
    with raises_field("mechanism"):
        simulate(data, MODEL, [CHOSEN], TRAINING, rounds=1)
    with raises_field("seed"):
        simulate(data, MODEL, CHOSEN, TRAINING, rounds=1, seed=-1)
    assert simulate(data, MODEL, CHOSEN, TRAINING, rounds=np.int64(1)).rounds == 1


def test_state_is_restored_by_a_like_simulation_only(data):
    simulation = trained(data, CHOSEN)
    arrays = simulation.state_arrays()
    for _ in range(2):
        restored = trained(data, CHOSEN, rounds=1)
        restored.restore(dict(arrays))
        same(simulation, restored)
    momentum = Simulation(data, MODEL, CHOSEN, TRAINING, OptimizerConfig("sgd", learning_rate=1.0, momentum=0.9))
    fewer = Simulation(tiny_data([4, 4]), MODEL, Mechanism((PrivacyGroup("all", 2, 1.0, 0.5),), 1.0), TRAINING)
    for other in (momentum, fewer):
        with raises_field("checkpoint", RunError):
            other.restore(dict(arrays))


def test_saved_state_resumes_to_the_bit(data, tmp_path):
    schedule = {"schedule": "cosine_decay_schedule", "init_value": 0.1, "decay_steps": 9}
    adam = ServerOptimizer(OptimizerConfig("adam", learning_rate=schedule), average=0.9)
    uninterrupted = trained(data, CHOSEN, rounds=4, server_optimizer=adam)
    trained(data, CHOSEN, rounds=2, server_optimizer=adam).save(tmp_path / "state.npz")
    resumed = trained(data, CHOSEN, rounds=0, server_optimizer=adam)
    resumed.load(tmp_path / "state.npz")
    resumed.run(4)
    same(uninterrupted, resumed)


class Unfinished:
    """A round that is being computed."""

    waited = False

    def block_until_ready(self) -> None:
        self.waited = True


@pytest.mark.skipif(len(jax.devices()) == 1, reason="one device does not wait")
def test_several_devices_wait_for_the_previous_round(data, monkeypatch):
    simulation = trained(data, CHOSEN, 1)
    run_round, previous, waited = simulation.engine.round, Unfinished(), []
    monkeypatch.setattr(simulation.engine, "round", lambda *a: waited.append(previous.waited) or run_round(*a))
    simulation._done = previous
    simulation.run_round()
    assert waited == [True]
    simulation._done = previous = Unfinished()
    simulation.evaluate()
    assert previous.waited
