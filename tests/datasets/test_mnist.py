"""MNIST among clients: the splits give every client what their names say."""

from __future__ import annotations

import numpy as np
import pytest
from dataset_files import real_data
from helpers import raises_field

from fedhdp.datasets import load_arrays, load_mnist
from fedhdp.datasets.mnist import apportion
from fedhdp.errors import DataError


@pytest.mark.usefixtures("small_mnist")
def test_one_digit():
    mnist = load_mnist(clients=60, samples=10, test_samples=7)
    digit_KM = mnist.train.x_N[:, 0, 0].reshape(60, 10)
    assert (digit_KM == digit_KM[:, :1]).all()
    assert np.array_equal(mnist.train.y_N, digit_KM.ravel())
    assert len(np.unique(mnist.train.x_N[:, 0, :3], axis=0)) == 600
    assert np.array_equal(mnist.test.y_N.reshape(60, 7), np.repeat(digit_KM[:, :1], 7, axis=1))
    test_id_KM = mnist.test.x_N[:, 0, :3].reshape(60, 7, 3)
    assert all(len(np.unique(test_id_M, axis=0)) == 7 for test_id_M in test_id_KM)
    assert len(mnist.server_y_N) == 300


@pytest.mark.usefixtures("small_mnist")
def test_seed_shuffles_clients():
    first, second, repeated = (load_mnist(clients=60, samples=10, test_samples=1, seed=seed) for seed in (0, 1, 0))
    assert len(set(first.test.y_N[:15].tolist())) > 4
    assert not np.array_equal(first.test.y_N, second.test.y_N)
    assert np.array_equal(first.train.x_N, repeated.train.x_N)


@pytest.mark.usefixtures("small_mnist")
def test_skewed_moves_clients_with_a_seven_to_the_front():
    plain = load_mnist(clients=60, samples=10, test_samples=1)
    skewed = load_mnist("skewed", clients=60, skewed_clients=4, samples=10, test_samples=1)
    assert (skewed.train.y_N[:40] == 7).all()
    assert len(set(skewed.test.y_N[4:15].tolist())) > 4
    plain_clients, skewed_clients = (
        {images.tobytes() for images in mnist.train.x_N.reshape(60, 10, -1)} for mnist in (plain, skewed)
    )
    assert plain_clients == skewed_clients
    with raises_field("skewed_clients"):
        load_mnist("skewed", clients=60, skewed_clients=7, samples=10, test_samples=1)


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("samples", {"samples": 61}),
        ("test_samples", {"test_samples": 31}),
        ("clients", {"clients": 0}),
        ("split", {"split": "sorted"}),
        ("skewed_clients", {"skewed_clients": 3}),
    ],
)
def test_invalid_argument_is_refused(field, changes):
    with raises_field(field):
        load_mnist(**({"clients": 60, "samples": 10, "test_samples": 5} | changes))


@pytest.mark.usefixtures("small_mnist")
def test_by_writer_needs_the_writers():
    with raises_field("dataset", DataError) as error:
        load_mnist("by_writer")
    assert error.value.value == "mnist-writers"


def test_apportion_is_within_one_of_the_proportion():
    counts = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
    for clients in (7, 60, 1999):
        shares = apportion(clients, counts)
        assert shares.sum() == clients
        assert (np.abs(shares - clients * counts / counts.sum()) < 1).all()


def test_real_mnist():
    mnist = load_mnist(directory=real_data("mnist"))
    assert (mnist.num_clients, len(mnist.train.y_N), len(mnist.server_y_N)) == (2000, 60_000, 10_000)
    digit_KM = mnist.train.y_N.reshape(2000, 30)
    assert (digit_KM == digit_KM[:, :1]).all()
    assert np.bincount(digit_KM[:, 0]).tolist() == [197, 225, 199, 204, 195, 181, 197, 209, 195, 198]
    assert len({image.tobytes() for image in mnist.train.x_N}) == 60_000 - 42
    assert np.bincount(mnist.server_y_N)[[1, 5]].tolist() == [1135, 892]
    assert mnist.train.x_N[:, 0].mean() < 1 < mnist.train.x_N[:, 14].mean()  # ink, in the middle, is high


def test_real_mnist_by_writer():
    directory = real_data("mnist", "mnist-writers")
    mnist = load_mnist("by_writer", directory=directory)
    assert mnist.num_clients == 836
    total_K = mnist.train.count_K + mnist.test.count_K
    assert (total_K.sum(), total_K.min(), total_K.max()) == (70_000, 8, 131)
    assert np.array_equal(mnist.test.count_K, -(-total_K // 10))
    assert len(mnist.server_y_N) == mnist.test.count_K.sum()
    arrays = load_arrays("mnist", directory)
    every_N = np.concatenate([arrays["train_x"], arrays["test_x"]])
    clients_N = np.concatenate([mnist.train.x_N, mnist.test.x_N])
    assert np.array_equal(np.sort(clients_N.sum(axis=(1, 2), dtype=int)), np.sort(every_N.sum(axis=(1, 2), dtype=int)))
