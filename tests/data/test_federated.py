"""Examples from arrays and lists, and examples that are held out."""

from __future__ import annotations

import numpy as np
from helpers import raises_field

from fedhdp.data import FederatedData, examples, from_lists, hold_out
from fedhdp.errors import DataError


def test_examples_from_lists():
    x = [np.arange(2 * n, dtype=np.float32).reshape(n, 2) + 100 * n for n in (3, 1, 2)]
    built = from_lists(x, [np.arange(len(one)) for one in x])
    assert built.count_K.tolist() == [3, 1, 2]
    np.testing.assert_array_equal(built.x_N[built.start_K[2] :], x[2])
    with raises_field("y_K", DataError):
        from_lists(x, [np.arange(3), np.arange(3), np.arange(2)])
    with raises_field("counts", DataError):
        examples(np.zeros((2, 1)), np.zeros(2), [1.5, 0.5])


def test_printed_data_has_no_arrays():
    x_N, ids = np.zeros((6, 1), np.float32), [*"aabbcc"]
    built = FederatedData.from_arrays(x_N, [0, 1] * 3, ids, {"a": "open", "b": "strict", "c": "strict"}, test=0.5)
    assert repr(built).startswith("FederatedData('arrays': 3 clients (1 open, 2 strict), 3 training and 3 test")


def test_held_out_examples_are_never_trained_on(data):
    chosen = hold_out(data, 0.3, seed=5)
    for k in range(data.num_clients):
        parts = []
        for part in (chosen.train, chosen.validation, data.train):
            rows = slice(part.start_K[k], part.start_K[k] + part.count_K[k])
            parts.append(sorted(map(bytes, part.x_N[rows])))
        assert sorted(parts[0] + parts[1]) == parts[2]
        assert bool(parts[1]) == (data.train.count_K[k] > 1)
        assert parts[0]


def test_held_out_examples_belong_to_the_id():
    """A client's validation examples are the same where other clients with ids come before it."""
    sizes, ids = [12, 20, 30], np.array(["ann", "bob", "cy"])
    y_N = np.concatenate([np.arange(size) for size in sizes])

    def held_out(first: int) -> list[list[int]]:
        rows = slice(sum(sizes[:first]), None)
        part = examples(np.zeros((len(y_N[rows]), 2)), y_N[rows], sizes[first:])
        data = FederatedData("ids", part, part, part.x_N[:0], part.y_N[:0], 30, client_ids=ids[first:])
        validation = hold_out(data, 0.25, seed=3).validation
        return [rows.tolist() for rows in np.split(validation.y_N, validation.start_K[1:])]

    assert held_out(1) == held_out(0)[1:]
    assert held_out(2) == held_out(0)[2:]


def test_held_out_examples_of_a_client_do_not_depend_on_others(data):
    def held_out(first: int) -> list[list[int]]:
        sizes = [first, 12, 20, 30]
        y_N = np.concatenate([np.arange(size) for size in sizes])  # each example by its number among its client's
        train = examples(np.zeros((len(y_N), 12), np.uint8), y_N, sizes)
        held_out = hold_out(data._replace(train=train), 0.25, seed=3).validation
        return [
            held_out.y_N[start : start + count].tolist()
            for start, count in zip(held_out.start_K, held_out.count_K, strict=True)
        ][1:]

    assert held_out(12) == held_out(7)
    assert held_out(12)[1] != list(range(5))  # they are drawn
