"""Exact arithmetic in the simulator: the same training, integer sums, and the same results whatever runs beside it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers import mechanism_of, raises_field
from msgspec.structs import replace
from simulations import CHOSEN, run_python, same, trained

from fedhdp.algorithms import dp_fedavg, fedhdp, hdp_fedavg, non_private
from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.models import Model, linear, mlp
from fedhdp.optimizers import OptimizerConfig
from fedhdp.server import ServerOptimizer

EXACT = replace(CHOSEN, arithmetic="exact")
LINEAR = linear(12, 3)
FULL_RANK = Model(LINEAR.init, LINEAR.apply)  # without the head that trains in the span of the examples


@pytest.mark.parametrize(
    "clip", [0.05, AdaptiveClip(0.1), LayerClip({"first": 0.1})], ids=["fixed", "adaptive", "layer"]
)
@pytest.mark.parametrize("model", [LINEAR, FULL_RANK], ids=["low rank", "full rank"])
def test_exact_equals_single_precision_without_noise(data, model, clip):
    """Some slots are empty, some updates are clipped, and cohorts change: all is as without exact arithmetic."""
    mechanism = replace(non_private(CHOSEN), clip=clip)
    single, integers = (
        trained(data, replace(mechanism, arithmetic=arithmetic), model=model) for arithmetic in ("float32", "exact")
    )
    assert np.abs(single.global_model()).max() > 0.01
    np.testing.assert_allclose(integers.global_model(), single.global_model(), atol=2e-6)
    np.testing.assert_allclose(integers.server_state.clip, single.server_state.clip, rtol=1e-6)
    everyone = np.arange(data.num_clients)
    np.testing.assert_allclose(integers.personal_models(everyone), single.personal_models(everyone), atol=2e-6)


def test_noise_is_that_of_the_mechanism(data):
    """Without any updates, what moves the global model is the noise."""
    mechanism = mechanism_of((19, 2.0, 0.5), rate=1e-9, clip=0.3, arithmetic="exact")
    simulation = trained(data, mechanism, rounds=1, model=mlp(12, 300, 3))
    start = trained(data, mechanism, rounds=0, model=mlp(12, 300, 3)).global_model()
    noise_P = (simulation.global_model() - start) * mechanism.expected_weight
    assert noise_P.std() == pytest.approx(0.3 * mechanism.update_noise_stddev, rel=0.05)


def test_runs_of_one_program_are_those_of_their_own(data):
    weak = replace(EXACT, groups=tuple(replace(group, weight=0.05, pull=0.3) for group in EXACT.groups))
    other_pull = replace(EXACT, groups=tuple(replace(group, pull=0.2) for group in EXACT.groups))
    together = trained(data, [EXACT, weak, other_pull])
    for number, mechanism in enumerate((EXACT, weak, other_pull)):
        np.testing.assert_allclose(together.global_model(number), trained(data, mechanism).global_model(), atol=1e-6)
    np.testing.assert_array_equal(together.global_model(0), together.global_model(2))  # these share a run


def test_reductions_hold_to_the_bit(data):
    ones = replace(EXACT, groups=tuple(replace(group, weight=1.0) for group in EXACT.groups))
    same(trained(data, fedhdp(ones)), trained(data, hdp_fedavg(EXACT)))
    open_ = replace(EXACT, groups=tuple(replace(group, noise_multiplier=0.0) for group in EXACT.groups))
    same(trained(data, dp_fedavg(open_)), trained(data, non_private(EXACT)))


def test_a_run_resumes_to_the_bit(data, tmp_path):
    optimizer = ServerOptimizer(OptimizerConfig("adam", learning_rate=0.1), average=0.9)
    complete = trained(data, EXACT, rounds=4, server_optimizer=optimizer)
    trained(data, EXACT, rounds=2, server_optimizer=optimizer).save(tmp_path / "state")
    resumed = trained(data, EXACT, rounds=0, server_optimizer=optimizer)
    resumed.load(tmp_path / "state")
    resumed.run(4)
    same(resumed, complete)


def test_without_a_seed_noise_is_fresh(data):
    first, second = (trained(data, EXACT, 1, noise_seed=None).global_model() for _ in range(2))
    assert (first != second).all()


def test_updates_that_are_not_finite_are_refused(data):
    inputs = data.train.x_N.astype(np.float32)
    rows = slice(data.train.start_K[5], data.train.start_K[5] + data.train.count_K[5])
    inputs[rows] = 3e38  # products of these are infinite
    always = mechanism_of((4, 0.0, 1.0), (5, 0.5, 0.7), (10, 1.5, 0.2), rate=1.0, arithmetic="exact")
    simulation = trained(data._replace(train=data.train._replace(x_N=inputs)), always, 1, model=LINEAR)
    expected_G = np.bincount(simulation.group_K[[5]], minlength=3)
    np.testing.assert_array_equal(simulation.server_state.refused_G, [expected_G])
    assert np.isfinite(simulation.global_model()).all()


def test_arithmetics_are_not_mixed(data, monkeypatch):
    with raises_field("arithmetic"):
        trained(data, [EXACT, CHOSEN], 0)
    simulation = trained(data, EXACT, 0)
    with raises_field("arithmetic"):
        simulation.set_mechanisms([CHOSEN])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with raises_field("arithmetic"):
        trained(data, EXACT, 0)


SCRIPT = """
import sys, jax, numpy as np
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from helpers import tiny_data
from simulations import CHOSEN, trained
from msgspec.structs import replace
data = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
simulation = trained(data, replace(CHOSEN, arithmetic="exact"), rounds=6)
assert simulation.engine.devices == int(sys.argv[1])
np.savez(sys.argv[2], theta=simulation.global_model(), clip=simulation.server_state.clip)
"""


@pytest.mark.process
def test_results_do_not_depend_on_the_number_of_devices(tmp_path):
    runs = []
    for devices in (1, 2, 4):
        run_python(SCRIPT, str(devices), str(tmp_path / f"{devices}.npz"))
        runs.append(np.load(tmp_path / f"{devices}.npz"))
    for other in runs[1:]:
        np.testing.assert_array_equal(other["clip"], runs[0]["clip"])
        np.testing.assert_array_equal(other["theta"], runs[0]["theta"])
