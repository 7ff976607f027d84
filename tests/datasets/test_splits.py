"""How examples are split."""

from __future__ import annotations

import numpy as np

from fedhdp.datasets.splits import draw_test_mask, group_by_client


def test_a_tenth_of_each_client_is_for_testing():
    rng = np.random.default_rng(0)
    client_N = rng.permutation(np.repeat(np.arange(5), [1, 2, 10, 11, 100]))
    is_test_N = draw_test_mask(client_N, rng)
    assert np.bincount(client_N[is_test_N], minlength=5).tolist() == [0, 1, 1, 2, 10]


def test_group_by_client():
    client_N = np.array([2, 0, 2, 0])
    grouped = group_by_client(np.arange(4), np.arange(4) + 10, client_N, num_clients=3)
    assert grouped.x_N.tolist() == [1, 3, 0, 2]
    assert grouped.y_N.tolist() == [11, 13, 10, 12]
    assert grouped.count_K.tolist() == [2, 0, 2]
