"""Where things are kept changes no result: examples on demand, personal models on disk, many runs at once, two processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from helpers import mechanism_of, raises_field, tiny_data
from msgspec.structs import replace
from test_simulate import CHOSEN, MODEL, TRAINING, trained

from fedhdp.algorithms import dp_fedavg, non_private
from fedhdp.client import LocalTraining
from fedhdp.data import Examples, examples, hold_out
from fedhdp.datasets.handwriting import StreamedHandwriting, make_handwriting
from fedhdp.engine import examples as example_stores
from fedhdp.engine import personal_store as personal
from fedhdp.engine.placement import assign_slots, partition_by_owner, size_classes
from fedhdp.errors import DataError, RunError
from fedhdp.mechanism import Mechanism
from fedhdp.models import mlp
from fedhdp.simulation import Simulation, simulate, simulate_many


def assert_close(a: Simulation, b: Simulation) -> None:
    """The states are the same within float tolerance."""
    np.testing.assert_allclose(a.global_model(), b.global_model(), atol=1e-5)
    participated = np.flatnonzero(a.participated_K)
    np.testing.assert_allclose(a.personal_models(participated), b.personal_models(participated), atol=1e-5)
    for rows_a, rows_b in zip(a.evaluate(), b.evaluate(), strict=True):
        assert [row[:4] for row in rows_a] == [row[:4] for row in rows_b]
        np.testing.assert_allclose([row.value for row in rows_a], [row.value for row in rows_b], atol=1e-4)


def test_personal_models_on_disk_are_those_in_memory(population, monkeypatch):
    in_memory = trained(population, CHOSEN)
    monkeypatch.setattr(personal, "personal_bytes_limit", lambda: 0)
    on_disk = trained(population, CHOSEN)
    assert isinstance(on_disk.store, personal.MemoryMappedPersonalModels)
    assert_close(in_memory, on_disk)


def test_a_run_with_models_on_disk_goes_on_from_its_checkpoint_whatever_was_written_since(
    population, monkeypatch, tmp_path
):
    uninterrupted = trained(population, CHOSEN, rounds=6)
    monkeypatch.setattr(personal, "personal_bytes_limit", lambda: 0)
    crashed = trained(population, CHOSEN, rounds=2, directory=tmp_path)
    crashed.save(tmp_path / "state.npz")
    crashed.run(3)
    crashed.save(tmp_path / "state.npz")
    crashed.run(5)  # two rounds after the last checkpoint
    resumed = trained(population, CHOSEN, rounds=0, directory=tmp_path)
    resumed.load(tmp_path / "state.npz")
    assert resumed.round == 3
    resumed.run(6)
    assert_close(uninterrupted, resumed)
    (tmp_path / "personal.bin").unlink()
    with pytest.raises(RunError, match=r"personal\.bin"):
        resumed.load(tmp_path / "state.npz")


def test_the_file_of_personal_models_stays_small_however_long_the_run(population, monkeypatch):
    in_memory = trained(population, CHOSEN, rounds=40)
    monkeypatch.setattr(personal, "personal_bytes_limit", lambda: 0)
    simulation = trained(population, CHOSEN, rounds=21)
    simulation.state_arrays()  # from here on a client needs two rows
    simulation.run(40)
    cohorts = [len(simulation.draw_cohort(number)) for number in range(40)]
    personalized = np.count_nonzero(simulation.participated_K)
    assert simulation.store.file_rows <= 2 * personalized + max(cohorts) < sum(cohorts)
    assert_close(in_memory, simulation)


KILLED = """
import os, signal, sys
from pathlib import Path
from helpers import tiny_data
from test_simulate import CHOSEN, trained
from fedhdp.engine import personal_store
personal_store.personal_bytes_limit = lambda: 0
population = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
simulation = trained(population, CHOSEN, rounds=3, directory=Path(sys.argv[1]))
simulation.save(Path(sys.argv[1]) / "state.npz")
simulation.run(6)
simulation.personal_models(0)  # written to the file after the checkpoint
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_a_killed_run_resumes_to_the_bit_from_its_file(population, monkeypatch, tmp_path):
    monkeypatch.setattr(personal, "personal_bytes_limit", lambda: 0)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment)
    assert killed.returncode == -9
    uninterrupted = trained(population, CHOSEN, rounds=6)
    resumed = trained(population, CHOSEN, rounds=0, directory=tmp_path)
    resumed.load(tmp_path / "state.npz")
    resumed.run(6)
    participated = np.flatnonzero(uninterrupted.participated_K)
    np.testing.assert_array_equal(uninterrupted.global_model(), resumed.global_model())
    np.testing.assert_array_equal(uninterrupted.personal_models(participated), resumed.personal_models(participated))


def test_examples_that_clients_share_are_kept_once_and_change_nothing(population, monkeypatch):
    train = population.train
    shared = population._replace(train=examples_twice(train), test=examples_twice(population.test))
    many = replace(CHOSEN, groups=tuple(replace(group, clients=2 * group.clients) for group in CHOSEN.groups))
    copied = trained(shared, many)
    assert isinstance(copied.examples, example_stores.ShardedExamples)
    monkeypatch.setattr(example_stores, "example_bytes_limit", lambda: train.x_N.nbytes)
    replicated = trained(shared, many)
    assert isinstance(replicated.examples, example_stores.ReplicatedExamples)
    assert_close(copied, replicated)


@pytest.mark.parametrize("personalize", [True, False])
def test_products_of_examples_are_kept_from_round_to_round_and_change_nothing(personalize):
    population = tiny_data([3] * 19)
    training = replace(TRAINING, personalize=personalize)
    cached = trained(population, CHOSEN, training=training)
    assert cached.gram_K is not None
    computed = trained(population, CHOSEN, rounds=0, training=training)
    computed.gram_K = None
    computed.run(3)
    np.testing.assert_allclose(cached.global_model(), computed.global_model(), atol=1e-6)


def test_products_of_examples_are_those_of_the_client_wherever_it_lies():
    train = tiny_data([3] * 19).train
    size = int(train.count_K[0])
    backwards = train._replace(start_K=train.start_K[::-1].copy())  # client 0 holds the last ones
    whole = tiny_data([3] * 19)._replace(train=backwards)
    for personalize in (True, False):  # on the devices where clients live, and on all of them
        simulation = Simulation(whole, MODEL, CHOSEN, replace(TRAINING, personalize=personalize))
        shares = partition_by_owner(simulation.engine, np.arange(8))
        seats = assign_slots(shares, 8 * simulation.engine.devices)
        start_C = simulation.examples.fetch(seats)[2]
        gram_K = simulation.engine.fetch(simulation.gram_K)
        each = 0 if simulation.engine.config.replicated else len(gram_K) // simulation.engine.devices
        for slot in np.flatnonzero(seats.is_participating_C):
            first = backwards.start_K[seats.client_C[slot]]
            x_MF = backwards.x_N[first : first + size].reshape(size, -1) / 255.0
            mine = slot // (len(seats.client_C) // simulation.engine.devices) * each + start_C[slot] // size
            np.testing.assert_allclose(gram_K[mine], x_MF @ x_MF.T + 1, rtol=1e-5)


def test_products_of_examples_are_not_kept_where_clients_overlap_or_differ(population):
    assert Simulation(population, MODEL, CHOSEN, TRAINING).gram_K is None  # clients of all sizes
    alike = tiny_data([3] * 19)
    overlapping = alike._replace(train=alike.train._replace(start_K=np.maximum(alike.train.start_K - 1, 0)))
    plain = replace(TRAINING, personalize=False)
    assert Simulation(overlapping, MODEL, CHOSEN, plain).gram_K is None
    assert Simulation(alike, MODEL, CHOSEN, plain).gram_K is not None


def examples_twice(given: Examples) -> Examples:
    """The same examples for twice as many clients."""
    twice = {name: np.concatenate([getattr(given, name)] * 2) for name in ("start_K", "count_K")}
    return given._replace(**twice)


@pytest.mark.parametrize("personalize", [True, False])
def test_examples_fetched_for_a_cohort_are_those_on_the_devices(population, monkeypatch, personalize):
    training = replace(TRAINING, personalize=personalize)
    resident = trained(population, CHOSEN, training=training)
    monkeypatch.setattr(example_stores, "example_bytes_limit", lambda: 0)
    streamed = trained(population, CHOSEN, training=training)
    assert isinstance(streamed.examples, example_stores.StreamedExamples)
    np.testing.assert_allclose(resident.global_model(), streamed.global_model(), atol=1e-6)


def test_handwriting_beyond_memory_is_written_when_it_is_asked_for(monkeypatch):
    whole = make_handwriting(30, 4, 2, 20, "by_writer", seed=3)
    monkeypatch.setattr("fedhdp.datasets.handwriting.MAX_IMAGES_IN_MEMORY", 100)
    monkeypatch.setattr("fedhdp.datasets.handwriting.TESTED_CLIENTS", 10)
    large = make_handwriting(30, 4, 2, 20, "by_writer", seed=3)
    assert isinstance(large.train, StreamedHandwriting)
    assert large.num_clients == 30
    clients = np.array([7, 29, 0])
    for made, expected in zip(large.train.take(clients, 5), whole.train.take(clients, 5), strict=True):
        np.testing.assert_array_equal(made, expected)
    assert np.flatnonzero(large.test.count_K).tolist() == list(range(0, 30, 3))
    with raises_field("validation", DataError):
        hold_out(large, 0.5, 0)
    mechanism = mechanism_of((10, 0.0, 1.0), (20, 1.0, 0.1))
    simulation = Simulation(large, mlp(784, 5, 10), mechanism, LocalTraining(1, 4, 0.1), seed=1, noise_seed=1)
    simulation.run(1)
    resident = Simulation(whole, mlp(784, 5, 10), mechanism, LocalTraining(1, 4, 0.1), seed=1, noise_seed=1)
    resident.run(1)
    np.testing.assert_allclose(simulation.global_model(), resident.global_model(), atol=1e-6)
    assert {row.group for row in simulation.evaluate()[0]} == {"server", "group 0", "group 1"}


def test_runs_played_together_are_those_played_alone(population):
    stronger = replace(CHOSEN, groups=tuple(replace(group, pull=1.5) for group in CHOSEN.groups))
    per_group = replace(CHOSEN, noise="per_group")
    several = [CHOSEN, non_private(CHOSEN), stronger, dp_fedavg(CHOSEN), per_group]
    together = trained(population, several)
    assert together.run_of == [0, 1, 0, 2, 3]
    everybody = np.arange(population.num_clients)
    rows = together.evaluate()
    for number, mechanism in enumerate(several):
        alone = trained(population, mechanism)
        np.testing.assert_allclose(together.global_model(number), alone.global_model(), atol=1e-5)
        np.testing.assert_allclose(
            together.personal_models(everybody, number), alone.personal_models(everybody), atol=1e-5
        )
        (expected,) = alone.evaluate()
        assert [row[:4] for row in rows[number]] == [row[:4] for row in expected]
        np.testing.assert_allclose([row.value for row in rows[number]], [row.value for row in expected], atol=1e-4)


def test_runs_together_have_noise_of_their_own_where_no_seed_is_given(population):
    several = [CHOSEN, replace(CHOSEN, noise="per_group")]  # other numbers, so two runs
    noisy = [
        replace(one, groups=tuple(replace(g, weight=1e-3 + i) for g in one.groups)) for i, one in enumerate(several)
    ]
    simulation = Simulation(population, MODEL, noisy, TRAINING, seed=3)
    keys = simulation._noise_keys(0)
    assert len(keys) == 2
    assert not np.array_equal(keys[0], keys[1])
    assert not np.array_equal(keys[0], simulation._noise_keys(0)[0])


def test_runs_that_draw_other_cohorts_cannot_be_played_together(population):
    rarer = replace(CHOSEN, groups=tuple(replace(group, sampling_rate=0.1) for group in CHOSEN.groups))
    with raises_field("mechanisms"):
        Simulation(population, MODEL, [CHOSEN, rarer], TRAINING)


def test_a_mechanism_changed_on_the_way_changes_cohorts_and_noise_together(population):
    louder = replace(CHOSEN, groups=tuple(replace(group, noise_multiplier=50.0) for group in CHOSEN.groups))

    def moved(mechanism: Mechanism) -> float:
        """How far the second round moves the global model if it has this mechanism."""
        simulation = trained(population, CHOSEN, rounds=1)
        with pytest.raises(AttributeError):
            simulation.mechanism = mechanism
        before = simulation.global_model()
        simulation.run(2, before_round=lambda simulation: simulation.set_mechanisms([mechanism]))
        return np.abs(simulation.global_model() - before).mean()

    assert moved(louder) > 10 * moved(CHOSEN)


def test_each_client_chooses_the_pull_that_is_best_on_what_it_held_out(population):
    chosen = hold_out(population, 0.3, seed=5)
    pulls = [replace(CHOSEN, groups=tuple(replace(g, pull=pull) for g in CHOSEN.groups)) for pull in (0.0, 0.5, 4.0)]
    simulation = trained(chosen, pulls, rounds=4)
    rows = simulation.evaluate()
    held, test = chosen.validation, chosen.test

    def score(own_P: np.ndarray, examples: Examples, k: int) -> float:
        here = slice(examples.start_K[k], examples.start_K[k] + examples.count_K[k])
        if not examples.count_K[k]:
            return 0.0
        theta = simulation.engine.unravel(own_P)
        guess = np.argmax(MODEL.apply(theta, examples.x_N[here] / np.float32(255), None), axis=1)
        return float((guess == examples.y_N[here]).mean())

    everybody = np.arange(chosen.num_clients)
    own = [simulation.personal_models(everybody, number) for number in range(3)]
    best = [max(range(3), key=lambda v, k=k: (score(own[v][k], held, k), -v)) for k in everybody]
    expected = np.array([score(own[best[k]][k], test, k) for k in everybody])
    assert len(set(best)) > 1
    for number, group in enumerate(CHOSEN.groups):
        told = [row.value for one in rows for row in one if row[1:4] == (group.name, "chosen", "accuracy")]
        assert told == pytest.approx([expected[simulation.group_K == number].mean()] * 3, abs=1e-6)


def test_what_is_held_out_is_never_trained_on(population):
    chosen = hold_out(population, 0.3, seed=5)
    for k in range(population.num_clients):
        parts = []
        for part in (chosen.train, chosen.validation, population.train):
            here = slice(part.start_K[k], part.start_K[k] + part.count_K[k])
            parts.append(sorted(map(bytes, part.x_N[here])))
        assert sorted(parts[0] + parts[1]) == parts[2]
        assert bool(parts[1]) == (population.train.count_K[k] > 1)
        assert parts[0]


def test_a_client_of_any_size_trains_at_the_smallest_class_that_holds_it():
    population = tiny_data([1, 2, 3, 9, 10, 11, 25, 26, 40, 80])
    assert size_classes(population.train, 4) == (4, 8, 12, 16, 24, 32, 48, 64, 96)
    assert size_classes(population.train, 4, several=False) == (80,)
    assert size_classes(tiny_data([7] * 5).train, 4) == (7,)


def test_simulate_together_returns_each_mechanism_in_its_place(population):
    several = [CHOSEN, non_private(CHOSEN)]
    made = simulate_many(population, MODEL, several, TRAINING, rounds=2, seed=3, noise_seed=7)
    assert [one.mechanism for one in made] == several
    alone = simulate(population, MODEL, several[1], TRAINING, rounds=2, seed=3, noise_seed=7)
    for name, array in alone.parameters.items():
        np.testing.assert_allclose(made[1].parameters[name], array, atol=1e-5)


TWO = """
import sys, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from helpers import tiny_data
from test_simulate import CHOSEN, trained
population = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
simulation = trained(population, CHOSEN)
assert simulation.engine.devices == 4
personal = simulation.personal_models(np.flatnonzero(simulation.participated_K))
values = [row.value for row in simulation.evaluate()[0]]
simulation.save(sys.argv[3] + ".state")
restored = trained(population, CHOSEN, rounds=0)
restored.load(sys.argv[3] + ".state")
fresh = trained(population, CHOSEN, noise_seed=None)  # from the entropy of one of the two, and not of the other
np.savez(sys.argv[3], theta=simulation.global_model(), personal=personal, values=values,
         restored=restored.global_model(), fresh=fresh.global_model())
"""


def test_two_processes_play_one_run_with_one_noise(population, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    outs = [tmp_path / f"{number}.npz" for number in range(2)]
    both = [
        subprocess.Popen([sys.executable, "-c", TWO, str(port), str(number), str(out)], env=environment)
        for number, out in enumerate(outs)
    ]
    assert [process.wait(timeout=240) for process in both] == [0, 0]
    one, other = (dict(np.load(out)) for out in outs)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    simulation = trained(population, CHOSEN)
    np.testing.assert_allclose(one["theta"], simulation.global_model(), atol=1e-5)
    np.testing.assert_array_equal(one["theta"], one["restored"])
    personal_models = simulation.personal_models(np.flatnonzero(simulation.participated_K))
    np.testing.assert_allclose(one["personal"], personal_models, atol=1e-5)
    np.testing.assert_allclose(one["values"], [row.value for row in simulation.evaluate()[0]], atol=1e-4)
    assert np.abs(one["fresh"] - one["theta"]).max() > 1e-4


def test_what_a_client_holds_out_does_not_depend_on_what_another_has(population):
    def held_out(first: int) -> list[list[int]]:
        sizes = [first, 12, 20, 30]
        y_N = np.concatenate([np.arange(size) for size in sizes])  # each example by its number among its client's
        train = examples(np.zeros((len(y_N), 12), np.uint8), y_N, sizes)
        kept = hold_out(population._replace(train=train), 0.25, seed=3).validation
        return [
            kept.y_N[start : start + count].tolist() for start, count in zip(kept.start_K, kept.count_K, strict=True)
        ][1:]

    assert held_out(12) == held_out(7)
    assert held_out(12)[1] != list(range(5))  # they are drawn
