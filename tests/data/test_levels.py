"""Clients have ids and levels, which belong to them and not to their positions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from helpers import raises_field, tiny_data
from hypothesis import given
from hypothesis import strategies as st

from fedhdp.data import level_counts
from fedhdp.errors import DataError

DATA = tiny_data([3, 4, 5, 3, 4])
NAMED = DATA._replace(client_ids=np.array(["ann", "bob", "cy", "dee", "eve"]))


def test_ids_are_numbers_unless_given():
    assert DATA.ids.tolist() == ["0", "1", "2", "3", "4"]
    assert NAMED.ids.tolist() == ["ann", "bob", "cy", "dee", "eve"]


def test_levels_by_id():
    data = NAMED.with_levels({"open": ["dee", "bob"], "strict": ["ann", "cy", "eve"]})
    assert data.levels.tolist() == ["strict", "open", "strict", "open", "strict"]
    assert NAMED.with_levels(data.levels.tolist()).levels.tolist() == data.levels.tolist()
    assert DATA.with_levels({"open": ["4"], "strict": [0, 1, 2, 3]}).levels.tolist() == ["strict"] * 4 + ["open"]


@pytest.mark.parametrize(
    ("levels", "word"),
    [
        (["open"] * 4, "4"),
        ({"open": ["ann", "zoe"], "strict": ["bob", "cy", "dee"]}, "zoe"),
        ({"open": ["ann", "bob"], "strict": ["bob", "cy", "dee"]}, "bob"),
        ({"open": ["ann", "bob"], "strict": ["cy", "dee"]}, "5"),
        ({"ann": "open", "bob": "open"}, "ann"),  # the mapping of `from_arrays`, from clients to levels
    ],
)
def test_wrong_levels_are_refused(levels, word):
    with raises_field("levels", DataError) as error:
        NAMED.with_levels(levels)
    assert word in str(error.value)


@given(st.permutations(range(5)), st.integers(0, 100))
def test_level_moves_with_its_client(order, seed):
    levels = dict(
        zip(NAMED.ids, NAMED.draw_levels({"open": ["cy"], "mild": 2, "strict": 0.4}, seed).levels, strict=True)
    )
    by_level = {level: [client for client in levels if levels[client] == level] for level in ("open", "mild", "strict")}
    permuted = NAMED._replace(client_ids=NAMED.ids[list(order)]).with_levels(by_level)
    assert dict(zip(permuted.ids, permuted.levels, strict=True)) == levels


def test_drawn_levels_are_a_function_of_the_seed():
    drawn = [DATA.draw_levels({"open": 2, "strict": 3}, seed).levels.tolist() for seed in (0, 0, *range(1, 20))]
    assert drawn[0] == drawn[1]
    assert len({tuple(levels) for levels in drawn}) > 5
    assert all(Counter(levels) == {"open": 2, "strict": 3} for levels in drawn)


@pytest.mark.parametrize(
    ("sizes", "clients", "counts"),
    [
        ({"open": 0.05, "strict": 0.95}, 2000, (100, 1900)),
        ({"open": 0.04, "strict": 0.96}, 30, (1, 29)),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 10, (4, 3, 3)),
        ({"open": 22, "strict": 0.9}, 220, (22, 198)),
        ({"open": ["x"], "strict": 1}, 2, (1, 1)),
        ({"all": 1.0}, 7, (7,)),
    ],
)
def test_counts_of_shares(sizes, clients, counts):
    assert tuple(level_counts(sizes, clients).values()) == counts


@pytest.mark.parametrize(
    "sizes",
    [
        {"a": 20, "b": 60},
        {"a": 0.5, "b": 0.4},
        {"a": -1, "b": 81},
        {"a": 1.5},
        {"a": float("nan")},
        {"a": 0.5, "b": 42},
    ],
)
def test_counts_that_do_not_add_up_are_refused(sizes):
    with raises_field("levels", DataError):
        level_counts(sizes, 82)
