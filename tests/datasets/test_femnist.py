"""FEMNIST by writer, and the sizes of TFF's clients."""

from __future__ import annotations

import numpy as np
import pytest
from dataset_files import real_data
from helpers import raises_field

from fedhdp.datasets import load_arrays, load_femnist, tff_client_sizes
from fedhdp.errors import DataError


@pytest.mark.parametrize(("field", "changes"), [("origin", {"origin": "nist"}), ("classes", {"classes": 26})])
def test_invalid_argument_is_refused(field, changes):
    with raises_field(field):
        load_femnist(**changes)


def test_missing_dataset_is_named():
    with raises_field("dataset", DataError) as error:
        load_femnist("tff")
    assert error.value.value == "emnist-tff"
    assert "fedhdp data download emnist-tff" in str(error.value)


def test_tff_client_sizes_add_up():
    train_K, test_K = tff_client_sizes(62)
    assert (len(train_K), train_K.sum(), test_K.sum()) == (3400, 671_585, 77_483)


def test_tff_client_sizes_of_digits_are_near():
    train_K, test_K = tff_client_sizes(10)
    assert len(train_K) == 3383
    assert abs(train_K.sum() / 341_873 - 1) < 0.001
    assert abs(test_K.sum() / 40_832 - 1) < 0.025
    assert min(train_K.min(), test_K.min()) >= 1
    assert not np.array_equal(train_K, tff_client_sizes(10, seed=1)[0])


def test_tff_client_sizes_are_those_of_real_tff():
    arrays = load_arrays("emnist-tff", real_data("emnist-tff"))
    sizes = zip(arrays["all_train_count"].tolist(), arrays["all_test_count"].tolist(), strict=True)
    assert sorted(sizes) == sorted(zip(*(count_K.tolist() for count_K in tff_client_sizes(62)), strict=True))


def test_real_330_writers():
    directory = real_data("femnist-330")
    femnist = load_femnist("330", directory=directory)
    assert femnist.num_clients == 330
    assert (len(femnist.train.y_N), len(femnist.test.y_N)) == (49_023, 5_610)
    assert sorted(femnist.train.count_K) == sorted(load_arrays("femnist-330", directory)["train_count"])
    assert np.array_equal(femnist.server_y_N, femnist.test.y_N)
    assert femnist.train.x_N[:, 0].mean() < 1 < femnist.train.x_N[:, 14].mean()  # ink, in the middle, is high


def test_real_330_writers_can_be_drawn():
    directory = real_data("femnist-330")
    femnist = load_femnist("330", clients=20, seed=1, directory=directory)
    assert femnist.num_clients == 20
    assert len(femnist.server_y_N) == femnist.test.count_K.sum()
    with raises_field("clients"):
        load_femnist("330", clients=331, directory=directory)
