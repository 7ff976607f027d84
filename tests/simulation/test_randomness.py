"""Cohorts, noise and seeds."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import group_by_group
from msgspec.structs import replace
from simulations import CHOSEN, MODEL, TRAINING, same, trained

from fedhdp.algorithms import dp_fedavg, non_private
from fedhdp.mechanism import Mechanism
from fedhdp.rng import BATCHES, COHORT, NOISE, os_entropy, secret_generator, stream
from fedhdp.rng import MODEL as MODEL_STREAM
from fedhdp.simulation import Simulation


@pytest.mark.slow
def test_large_cohort_is_never_truncated(data):
    simulation = Simulation(data, MODEL, CHOSEN, TRAINING, seed=3, noise_seed=7)
    expected = trained(data, CHOSEN, rounds=2)
    simulation.placement.slots = simulation.engine.padded_cohort_size(1)
    simulation.run(2)
    np.testing.assert_allclose(simulation.global_model(), expected.global_model(), atol=1e-6)
    np.testing.assert_array_equal(simulation.participated_K, expected.participated_K)


def test_seed_does_not_reveal_the_cohorts(data):
    def draws(mechanism: Mechanism | list[Mechanism], noise_seed: int | None = None) -> bool:
        """Whether two simulations with one seed, or one twice, have the same cohort in a round."""
        first, second = (Simulation(data, MODEL, mechanism, TRAINING, noise_seed=noise_seed) for _ in range(2))
        cohorts = [first.draw_cohort(5), first.draw_cohort(5), second.draw_cohort(5)]
        return all(np.array_equal(cohort, cohorts[0]) for cohort in cohorts[1:])

    assert not draws(CHOSEN)
    assert not draws([non_private(CHOSEN), CHOSEN])
    assert draws(CHOSEN, noise_seed=0)  # repeatable, and says that it is not private
    assert draws(non_private(CHOSEN))  # nothing is promised


@pytest.mark.parametrize("personalize", [True, False])
def test_cohorts_of_changing_size_compile_once(data, personalize):
    training = replace(TRAINING, personalize=personalize)
    simulation = Simulation(data, MODEL, CHOSEN, training, seed=11, noise_seed=11)
    assert CHOSEN.sampling == "poisson"
    assert len({len(simulation.draw_cohort(number)) for number in range(8)}) > 3
    simulation.run(1)
    compiled = simulation.engine.round._cache_size()
    simulation.run(8)
    assert simulation.engine.round._cache_size() == compiled


def test_each_seed_changes_its_streams_alone(data):
    data = data.with_levels(group_by_group(CHOSEN))
    simulation = trained(data, CHOSEN)
    same(simulation, trained(data, CHOSEN))
    other_noise = trained(data, CHOSEN, noise_seed=8)
    assert not np.array_equal(simulation.global_model(), other_noise.global_model())
    assert not np.array_equal(simulation.participated_K, other_noise.participated_K)
    other_seed = trained(data, CHOSEN, seed=4)
    assert not np.array_equal(simulation.global_model(), other_seed.global_model())
    np.testing.assert_array_equal(simulation.participated_K, other_seed.participated_K)


def test_shared_cohort_entropy_gives_the_same_cohorts(data):
    first, second = (Simulation(data, MODEL, CHOSEN, TRAINING, cohort_entropy=words) for words in [os_entropy(4)] * 2)
    cohorts = [first.draw_cohort(number).tolist() for number in range(6)]
    assert cohorts == [second.draw_cohort(number).tolist() for number in range(6)]
    assert len(set(map(tuple, cohorts))) == 6
    assert cohorts != [first.draw_cohort(number + 6).tolist() for number in range(6)]


@pytest.mark.parametrize("words", [None, os_entropy(4)])
def test_coins_that_are_seen_give_no_others_away(data, monkeypatch, words):
    """Secret cohorts are not drawn by NumPy's default generator, whose state follows from what it has put out."""
    generators = []
    monkeypatch.setattr("fedhdp.server.sample_cohort", lambda mechanism, members_G, rng: generators.append(rng))
    secret = Simulation(data, MODEL, CHOSEN, TRAINING, cohort_entropy=words)
    for simulation in (secret, secret, Simulation(data, MODEL, CHOSEN, TRAINING, noise_seed=7)):
        simulation.draw_cohort(3)
    kinds = [type(rng.bit_generator).__name__ for rng in generators]
    assert kinds == ["Philox", "Philox", "PCG64"]
    keys = [generators[number].bit_generator.state["state"]["key"].tolist() for number in (0, 1)]
    assert (keys[0] == keys[1]) == (words is not None)


def test_secret_generators_differ_by_every_word():
    outputs = {tuple(secret_generator(words).integers(0, 2**32, 4)) for words in ([1, 2, 3], [1, 2, 4], [2, 1, 3])}
    assert len(outputs) == 3


def test_no_two_purposes_share_a_stream():
    data = 0
    streams = {tuple(stream(3, purpose, 1)) for purpose in (data, MODEL_STREAM, COHORT, BATCHES, NOISE)}
    assert len(streams) == 5


def test_noise_without_a_seed_never_repeats(data):
    first, second = (trained(data, CHOSEN, noise_seed=None) for _ in range(2))
    assert not np.array_equal(first.global_model(), second.global_model())


def test_every_run_and_round_has_its_own_noise_key(data):
    simulation = Simulation(data, MODEL, [CHOSEN, dp_fedavg(CHOSEN)], TRAINING)
    keys = [tuple(key.tolist()) for round in (0, 0, 1) for key in simulation._noise_keys(round)]
    assert len(set(keys)) == 6
    seeded = Simulation(data, MODEL, [CHOSEN, dp_fedavg(CHOSEN)], TRAINING, noise_seed=7)
    once, again, later = ([tuple(key.tolist()) for key in seeded._noise_keys(round)] for round in (0, 0, 1))
    assert once == again
    assert not set(once) & set(later)


def test_runs_together_have_their_own_noise(data):
    several = [CHOSEN, replace(CHOSEN, noise="per_group")]  # other numbers, so two runs
    noisy = [
        replace(mechanism, groups=tuple(replace(g, weight=1e-3 + i) for g in mechanism.groups))
        for i, mechanism in enumerate(several)
    ]
    simulation = Simulation(data, MODEL, noisy, TRAINING, seed=3)
    keys = simulation._noise_keys(0)
    assert len(keys) == 2
    assert not np.array_equal(keys[0], keys[1])
    assert not np.array_equal(keys[0], simulation._noise_keys(0)[0])


def test_set_mechanisms_changes_the_noise(data):
    louder = replace(CHOSEN, groups=tuple(replace(group, noise_multiplier=50.0) for group in CHOSEN.groups))

    def moved(mechanism: Mechanism) -> float:
        """How far the second round moves the global model if it has this mechanism."""
        simulation = trained(data, CHOSEN, rounds=1)
        with pytest.raises(AttributeError):
            simulation.mechanism = mechanism
        before = simulation.global_model()
        simulation.run(2, before_round=lambda simulation: simulation.set_mechanisms([mechanism]))
        return np.abs(simulation.global_model() - before).mean()

    assert moved(louder) > 10 * moved(CHOSEN)
