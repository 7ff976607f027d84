"""Groups bind to clients by the names of their levels."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from helpers import mechanism_of, raises_field, tiny_data
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from simulations import MODEL, TRAINING

from fedhdp.engine.groups import client_groups
from fedhdp.errors import DataError, RunError
from fedhdp.mechanism import Mechanism
from fedhdp.simulation import Simulation

CLIENTS = 80
DATA = tiny_data([2] * CLIENTS)
LEVELS = np.repeat(["group 1", "group 0"], [58, 22])
OPEN, STRICT = mechanism_of((22, 0.0, 1.0), (58, 1.0, 1.0)).groups


def test_levels_and_not_positions_make_groups():
    mechanism = Mechanism((OPEN, STRICT), clip=1.0)
    assert client_groups(DATA.with_levels(LEVELS), mechanism, seed=0).tolist() == [1] * 58 + [0] * 22
    swapped = Mechanism((STRICT, OPEN), clip=1.0)
    assert client_groups(DATA.with_levels(LEVELS), swapped, seed=0).tolist() == [0] * 58 + [1] * 22


@given(st.permutations(range(CLIENTS)))
def test_level_given_to_a_client_by_its_position_in_an_array(order):
    """In any order of the clients, each keeps its level."""
    ids = np.array([f"client {k}" for k in range(CLIENTS)])
    mechanism = Mechanism((OPEN, STRICT), clip=1.0)
    data = DATA._replace(client_ids=ids[order]).with_levels(LEVELS[order])
    group_K = client_groups(data, mechanism, seed=0)
    assert {data.ids[k]: group_K[k] for k in range(CLIENTS)} == {ids[k]: int(k < 58) for k in range(CLIENTS)}


@pytest.mark.parametrize(("open_count", "strict_count"), [(20, 60), (24, 56), (22, 60), (20, 58)])
def test_count_typed_wrongly_gives_no_client_another_level(open_count, strict_count):
    """A level given to a client by its position in an array: 20/60 or 24/56 typed where the data has 22/58."""
    mechanism = Mechanism((replace(OPEN, clients=open_count), replace(STRICT, clients=strict_count)), clip=1.0)
    name = "group 0" if open_count != 22 else "group 1"
    with raises_field(f"clients of {name!r}", DataError) as error:
        Simulation(DATA.with_levels(LEVELS), MODEL, mechanism, TRAINING)
    expected, typed = ("22", str(open_count)) if open_count != 22 else ("58", str(strict_count))
    assert expected in str(error.value)
    assert typed in str(error.value)


@pytest.mark.parametrize(
    ("levels", "field", "value"),
    [
        (np.repeat(["group 0", "group 1", "lax"], [22, 57, 1]), "levels", "lax"),
        (np.repeat(["group 0"], 80), "groups", "group 1"),
        (LEVELS[1:], "levels", 79),
    ],
)
def test_level_without_group_and_group_without_client(levels, field, value):
    with raises_field(field, DataError) as error:
        client_groups(DATA._replace(levels=levels), Mechanism((OPEN, STRICT), clip=1.0), seed=0)
    assert error.value.value == value


def test_groups_of_other_size_than_the_data():
    with raises_field("groups", DataError):
        client_groups(DATA, mechanism_of((22, 0.0, 1.0), (60, 1.0, 1.0)), seed=0)


def test_without_levels_the_seed_draws_them():
    mechanism = Mechanism((OPEN, STRICT), clip=1.0)
    drawn = [client_groups(DATA, mechanism, seed) for seed in (0, 0, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert len({tuple(group_K) for group_K in drawn}) == 3
    assert all(Counter(group_K.tolist()) == {0: 22, 1: 58} for group_K in drawn)
    levels = DATA.draw_levels({"group 0": 22, "group 1": 58}, seed=2)
    np.testing.assert_array_equal(client_groups(levels, mechanism, seed=5), drawn[3])


def test_cohorts_and_pulls_follow_the_levels():
    """Everything that a round does with a group is done with the clients of its level."""
    groups = (replace(OPEN, sampling_rate=1.0), replace(STRICT, sampling_rate=0.0))
    simulation = Simulation(DATA.with_levels(LEVELS), MODEL, Mechanism(groups, clip=1.0), TRAINING, noise_seed=0)
    assert simulation.draw_cohort(0).tolist() == list(range(58, 80))
    np.testing.assert_array_equal(simulation.group_K, np.repeat([1, 0], [58, 22]))


def test_checkpoint_of_other_groups_is_refused(tmp_path):
    mechanism = Mechanism((OPEN, STRICT), clip=1.0)
    Simulation(DATA.with_levels(LEVELS), MODEL, mechanism, TRAINING).save(tmp_path / "checkpoint.npz")
    Simulation(DATA.with_levels(LEVELS), MODEL, mechanism, TRAINING).load(tmp_path / "checkpoint.npz")
    with raises_field("checkpoint", RunError):
        Simulation(DATA.with_levels(LEVELS[::-1]), MODEL, mechanism, TRAINING).load(tmp_path / "checkpoint.npz")


def test_mechanisms_of_later_rounds_have_the_same_groups():
    mechanism = Mechanism((OPEN, STRICT), clip=1.0)
    simulation = Simulation(DATA.with_levels(LEVELS), MODEL, mechanism, TRAINING)
    renamed = Mechanism((replace(OPEN, name="group 1"), replace(STRICT, name="group 0")), clip=1.0)
    for other in (renamed, Mechanism((replace(OPEN, clients=24), replace(STRICT, clients=56)), clip=1.0)):
        with raises_field("mechanisms"):
            simulation.set_mechanisms([other])
    simulation.set_mechanisms([Mechanism((OPEN, replace(STRICT, sampling_rate=0.0)), clip=1.0)])
