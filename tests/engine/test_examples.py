"""Where examples are changes no result."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import mechanism_of, raises_field, tiny_data
from msgspec.structs import replace
from simulations import CHOSEN, MODEL, TRAINING, assert_close, trained

from fedhdp.basis import cosine_basis, with_basis
from fedhdp.client import LocalTraining
from fedhdp.data import Examples, hold_out
from fedhdp.datasets.handwriting import StreamedHandwriting, make_handwriting
from fedhdp.engine import examples as example_stores
from fedhdp.engine.low_rank import uses_low_rank
from fedhdp.engine.placement import assign_slots, partition_by_owner
from fedhdp.errors import DataError
from fedhdp.models import mlp
from fedhdp.simulation import Simulation


@pytest.mark.slow
def test_replicated_examples_change_nothing(data, monkeypatch):
    train = data.train
    shared = data._replace(train=examples_twice(train), test=examples_twice(data.test))
    many = replace(CHOSEN, groups=tuple(replace(group, clients=2 * group.clients) for group in CHOSEN.groups))
    copied = trained(shared, many)
    assert isinstance(copied.examples, example_stores.ShardedExamples)
    monkeypatch.setattr(example_stores, "example_bytes_limit", lambda: train.x_N.nbytes)
    replicated = trained(shared, many)
    assert isinstance(replicated.examples, example_stores.ReplicatedExamples)
    assert_close(copied, replicated)


@pytest.mark.slow
@pytest.mark.parametrize("personalize", [True, False])
def test_kept_gram_matrices_change_nothing(personalize):
    data = tiny_data([3] * 19)
    training = replace(TRAINING, personalize=personalize)
    cached = trained(data, CHOSEN, training=training)
    assert cached.gram_K is not None
    computed = trained(data, CHOSEN, rounds=0, training=training)
    computed.gram_K = None
    computed.run(3)
    np.testing.assert_allclose(cached.global_model(), computed.global_model(), atol=1e-6)


def test_gram_matrices():
    train = tiny_data([3] * 19).train
    size = int(train.count_K[0])
    backwards = train._replace(start_K=train.start_K[::-1].copy())  # client 0 holds the last ones
    reversed_data = tiny_data([3] * 19)._replace(train=backwards)
    for personalize in (True, False):  # on the devices where clients live, and on all of them
        simulation = Simulation(reversed_data, MODEL, CHOSEN, replace(TRAINING, personalize=personalize))
        shares = partition_by_owner(simulation.engine, np.arange(8))
        layout = assign_slots(shares, 8 * simulation.engine.devices)
        start_C = simulation.examples.fetch(layout)[2]
        gram_K = simulation.engine.fetch(simulation.gram_K)
        per_device = 0 if simulation.engine.config.replicated else len(gram_K) // simulation.engine.devices
        for slot in np.flatnonzero(layout.is_participating_C):
            first = backwards.start_K[layout.client_C[slot]]
            x_MF = backwards.x_N[first : first + size].reshape(size, -1) / 255.0
            index = slot // (len(layout.client_C) // simulation.engine.devices) * per_device + start_C[slot] // size
            np.testing.assert_allclose(gram_K[index], x_MF @ x_MF.T + 1, rtol=1e-5)


def test_no_gram_matrices_where_clients_overlap_or_differ(data):
    assert Simulation(data, MODEL, CHOSEN, TRAINING).gram_K is None  # clients of all sizes
    alike = tiny_data([3] * 19)
    overlapping = alike._replace(train=alike.train._replace(start_K=np.maximum(alike.train.start_K - 1, 0)))
    plain = replace(TRAINING, personalize=False)
    assert Simulation(overlapping, MODEL, CHOSEN, plain).gram_K is None
    assert Simulation(alike, MODEL, CHOSEN, plain).gram_K is not None


def test_no_gram_matrices_of_rows_that_a_network_computes():
    """They would be rounded by another program than the rows of the round, and norms must be of the same numbers."""
    data, plain = tiny_data([3] * 19), replace(TRAINING, personalize=False)
    model = with_basis(mlp(8, 4), cosine_basis(data.input_shape, 8))
    simulation = Simulation(data, model, CHOSEN, plain)
    assert uses_low_rank(simulation.engine.network, simulation.engine.config.sizes[-1])
    assert simulation.gram_K is None


def examples_twice(examples: Examples) -> Examples:
    """The same examples for twice as many clients."""
    twice = {name: np.concatenate([getattr(examples, name)] * 2) for name in ("start_K", "count_K")}
    return examples._replace(**twice)


@pytest.mark.slow
@pytest.mark.parametrize("personalize", [True, False])
def test_streamed_examples_change_nothing(data, monkeypatch, personalize):
    training = replace(TRAINING, personalize=personalize)
    resident = trained(data, CHOSEN, training=training)
    monkeypatch.setattr(example_stores, "example_bytes_limit", lambda: 0)
    streamed = trained(data, CHOSEN, training=training)
    assert isinstance(streamed.examples, example_stores.StreamedExamples)
    np.testing.assert_allclose(resident.global_model(), streamed.global_model(), atol=1e-6)


@pytest.mark.slow
def test_handwriting_beyond_memory_is_generated_on_demand(monkeypatch):
    in_memory = make_handwriting(30, 4, 2, 20, "by_writer", seed=3)
    monkeypatch.setattr("fedhdp.datasets.handwriting.MAX_IMAGES_IN_MEMORY", 100)
    monkeypatch.setattr("fedhdp.datasets.handwriting.TESTED_CLIENTS", 10)
    large = make_handwriting(30, 4, 2, 20, "by_writer", seed=3)
    assert isinstance(large.train, StreamedHandwriting)
    assert large.num_clients == 30
    clients = np.array([7, 29, 0])
    for actual, expected in zip(large.train.take(clients, 5), in_memory.train.take(clients, 5), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert np.flatnonzero(large.test.count_K).tolist() == list(range(0, 30, 3))
    with raises_field("validation", DataError):
        hold_out(large, 0.5, 0)
    mechanism = mechanism_of((10, 0.0, 1.0), (20, 1.0, 0.1))
    simulation = Simulation(large, mlp(784, 5, 10), mechanism, LocalTraining(1, 4, 0.1), seed=1, noise_seed=1)
    simulation.run(1)
    resident = Simulation(in_memory, mlp(784, 5, 10), mechanism, LocalTraining(1, 4, 0.1), seed=1, noise_seed=1)
    resident.run(1)
    np.testing.assert_allclose(simulation.global_model(), resident.global_model(), atol=1e-6)
    assert {row.group for row in simulation.evaluate()[0]} == {"server", "group 0", "group 1"}
