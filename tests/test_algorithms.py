"""FedHDP and the baselines: what each changes, and what all of them keep."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from helpers import mechanism_of, mechanisms, tiny_data
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhdp.algorithms import ALGORITHMS, dp_fedavg, hdp_fedavg, local_only
from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.mechanism import SENSITIVITY, Mechanism, PrivacyGroup
from fedhdp.models import mlp
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.costs import PrivacyCost, privacy_cost
from fedhdp.server import ServerOptimizer, Sums, finish_round, initial_state
from fedhdp.simulation import Simulation

DATA, MODEL = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6]), mlp(12, 5, 3)
TRAINING = LocalTraining(epochs=1, batch_size=4, learning_rate=0.3)
NOT_PRIVATE = ("non_private", "local_only")
ROUNDS, DELTA = 20, 1e-4


@st.composite
def small_mechanisms(draw: st.DrawFn) -> Mechanism:
    """A mechanism of three groups for the 19 clients of DATA: one shape, so that it compiles once."""
    groups = []
    for i, clients in enumerate((4, 5, 10)):
        noise = draw(st.sampled_from([0.0, 0.5, 1.5, 4.0]))
        weight, pull = draw(st.sampled_from([0.0, 0.01, 1.0])), draw(st.sampled_from([0.0, 0.5]))
        groups.append(PrivacyGroup(f"group {i}", clients, noise, 0.5, weight, pull))
    clip = draw(st.sampled_from([0.5, AdaptiveClip(0.3), AdaptiveClip(0.3, bit_noise_stddev=15.0)]))
    noise, sampling = draw(st.sampled_from(["shared", "per_group"])), draw(st.sampled_from(["poisson", "fixed"]))
    return Mechanism(tuple(groups), clip, noise, sampling)


def check_promise(chosen: Mechanism, mechanism: Mechanism, private: bool) -> None:
    """No group gets less noise, or a larger epsilon, than it chose; without privacy every group is reported to have none."""
    for chosen_group, group in zip(chosen.groups, mechanism.groups, strict=True):
        if not private:
            assert group.opted_out
            continue
        promised = chosen_group.noise_multiplier
        assert mechanism.effective_noise_multiplier(group) >= promised * (1 - 1e-12)
        if promised > 0:
            sampling_probability = chosen.sampling_probability(chosen_group)
            noise = promised / SENSITIVITY[chosen.sampling]
            limit = compose([PrivacyCost(noise, sampling_probability, chosen.sampling, ROUNDS)], DELTA)
            assert compose([privacy_cost(mechanism, group, ROUNDS)], DELTA) <= limit * (1 + 1e-9)


def check_empty_round(mechanism: Mechanism) -> None:
    """A round without clients adds noise to the model, and without noise changes nothing."""
    params, key, optimizer = mechanism.round_params, jax.random.key(0), ServerOptimizer()
    before = initial_state(mechanism, optimizer, jnp.ones(8))
    refused_G = jnp.zeros(len(mechanism.groups), jnp.int32)
    empty = Sums(jnp.zeros(8), jnp.float32(0), refused_G)
    after = finish_round(optimizer, params, before, empty, key)
    noise = float(params.update_noise_stddev) if params.expected_weight > 0 else 0.0
    assert bool((after.theta_P != before.theta_P).any()) == (noise > 0)
    if params.bit_noise_stddev == 0:
        assert float(after.clip) == pytest.approx(float(before.clip))
    np.testing.assert_array_equal(after.refused_G, refused_G)


def check_resume(mechanism: Mechanism) -> None:
    """A simulation that goes on from a saved state ends in the same state, to the bit."""
    whole, interrupted, resumed = (Simulation(DATA, MODEL, mechanism, TRAINING, noise_seed=5) for _ in range(3))
    whole.run(3)
    interrupted.run(1)
    with tempfile.TemporaryDirectory() as folder:
        interrupted.save(Path(folder) / "state.npz")
        resumed.load(Path(folder) / "state.npz")
    resumed.run(3)
    assert whole.round == resumed.round == 3
    for a, b in zip(jax.tree.leaves(whole.server_state), jax.tree.leaves(resumed.server_state), strict=True):
        np.testing.assert_array_equal(a, b)
    clients = np.arange(DATA.num_clients)
    np.testing.assert_array_equal(whole.personal_models(clients), resumed.personal_models(clients))


def check_configuration(mechanism: Mechanism) -> None:
    """A mechanism survives its encoding."""
    assert msgspec.json.decode(msgspec.json.encode(mechanism), type=Mechanism) == mechanism


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=12, deadline=None)
@given(chosen=small_mechanisms())
def test_every_algorithm_keeps_its_promises(name, chosen):
    mechanism = ALGORITHMS[name](chosen)
    check_promise(chosen, mechanism, private=name not in NOT_PRIVATE)
    check_empty_round(mechanism)
    check_resume(mechanism)
    check_configuration(mechanism)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(chosen=mechanisms())
@settings(max_examples=30, deadline=None)
def test_no_group_gets_less_noise_than_it_chose(name, chosen):
    mechanism = ALGORITHMS[name](chosen)
    check_promise(chosen, mechanism, private=name not in NOT_PRIVATE)
    if name in NOT_PRIVATE:
        assert (mechanism.update_noise_stddev, mechanism.bit_noise_stddev) == (0.0, 0.0)


@given(mechanisms())
def test_local_only_sends_nothing_and_pulls_nothing(chosen):
    mechanism = local_only(chosen)
    assert {(group.weight, group.pull) for group in mechanism.groups} == {(0.0, 0.0)}
    assert all(mechanism.effective_noise_multiplier(group) == math.inf for group in mechanism.groups)


def test_dp_fedavg_adds_the_strictest_noise_once():
    mechanism = mechanism_of((4, 0.0, 1.0), (5, 0.5, 0.7), (10, 1.5, 0.2), clip=1.0, noise="per_group")
    assert dp_fedavg(mechanism).update_noise_stddev == pytest.approx(1.5, rel=1e-4)
    assert hdp_fedavg(mechanism).update_noise_stddev == pytest.approx(math.hypot(0.5, 1.5), rel=1e-4)
