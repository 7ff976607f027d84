"""Generated handwriting: the same bytes for the same seed, writers with styles, splits as named."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import raises_field

from fedhdp.datasets.glyphs import GLYPHS
from fedhdp.datasets.handwriting import client_examples, handwriting_sheet, make_handwriting, server_examples


def small(**changes):
    """Data that is generated quickly."""
    return make_handwriting(**{"clients": 20, "samples": 6, "test_samples": 2, "server_test": 20, **changes})


@pytest.mark.slow
def test_seed_determines_every_byte():
    first, second = small(split="by_writer", seed=3), small(split="by_writer", seed=3)
    for a, b in ((first.train, second.train), (first.test, second.test)):
        assert np.array_equal(a.x_N, b.x_N)
        assert np.array_equal(a.y_N, b.y_N)
    assert np.array_equal(first.server_x_N, second.server_x_N)


def test_seeds_differ():
    first, second = small(seed=0), small(seed=1)
    assert not np.array_equal(first.train.y_N, second.train.y_N)
    assert (first.server_x_N != second.server_x_N).any(axis=(1, 2)).all()


@pytest.mark.parametrize("split", ["by_writer", "one_digit"])
def test_clients_are_independent(split):
    all_x, all_y = client_examples(np.arange(60), np.full(60, 7), split=split)
    clients = np.array([41, 3, 58])
    x, y = client_examples(clients, np.array([7, 2, 5]), split=split)
    rows = np.concatenate([41 * 7 + np.arange(7), 3 * 7 + np.arange(2), 58 * 7 + np.arange(5)])
    assert np.array_equal(x, all_x[rows])
    assert np.array_equal(y, all_y[rows])


def test_more_clients_do_not_change_the_first():
    few, many = small(clients=10), small(clients=30)
    assert np.array_equal(few.train.x_N, many.train.x_N[:60])
    assert np.array_equal(few.test.y_N, many.test.y_N[:20])
    assert np.array_equal(few.server_x_N, many.server_x_N)


def test_train_and_test_images_differ():
    data = small(clients=10, samples=2)
    assert (data.train.x_N != data.test.x_N).any(axis=(1, 2)).all()


def test_one_digit():
    data = small(clients=200)
    digit_K6 = data.train.y_N.reshape(200, 6)
    assert (digit_K6 == digit_K6[:, :1]).all()
    assert (data.test.y_N.reshape(200, 2) == digit_K6[:, :1]).all()
    assert (np.bincount(digit_K6[:, 0], minlength=10) == 20).all()
    assert not np.array_equal(digit_K6[:10, 0], digit_K6[10:20, 0])


def test_skewed_gives_the_first_clients_a_seven():
    skewed, plain = small(clients=40, split="skewed", skewed_clients=15), small(clients=40)
    assert (skewed.train.y_N[: 15 * 6] == 7).all()
    assert (skewed.test.y_N[: 15 * 2] == 7).all()
    assert np.array_equal(skewed.train.y_N[15 * 6 :], plain.train.y_N[15 * 6 :])
    assert np.array_equal(skewed.train.x_N[15 * 6 :], plain.train.x_N[15 * 6 :])


def test_by_writer_sizes():
    sizes = [5, 300, 40]
    data = small(clients=3, split="by_writer", sizes=sizes)
    assert data.train.count_K.tolist() == sizes
    counts = np.bincount(data.train.y_N[5:305], minlength=10)
    assert counts.min() > 5
    assert counts.max() > counts.min()


def test_writers_have_styles():
    x_N, y_N = client_examples(np.arange(12), np.full(12, 60), split="by_writer")
    x_N, writer_N = x_N.reshape(len(x_N), -1) / 255, np.repeat(np.arange(12), 60)
    square_N = (x_N**2).sum(1)
    distance_NN = np.sqrt(np.maximum(square_N[:, None] + square_N - 2 * x_N @ x_N.T, 0))
    alike_NN = (y_N[:, None] == y_N) & ~np.eye(len(y_N), dtype=bool)
    same_NN = writer_N[:, None] == writer_N
    assert distance_NN[alike_NN & same_NN].mean() < 0.85 * distance_NN[alike_NN & ~same_NN].mean()


def test_ink_is_high():
    data = small(server_test=1000)
    images = data.server_x_N
    assert images.dtype == np.uint8
    assert data.input_shape == (28, 28)
    assert data.train.x_N.shape == (120, 28, 28)
    assert (images.max(axis=(1, 2)) > 200).all()
    assert 0.08 < images.mean() / 255 < 0.18
    border = np.concatenate([images[:, [0, -1]].ravel(), images[:, :, [0, -1]].ravel()])
    assert (border == 0).mean() > 0.98


def test_ink_is_centred():
    images, _ = server_examples(500)
    position_H = np.arange(28)
    for axis in (1, 2):
        ink = images.astype(float).sum(axis=axis)
        assert abs((ink @ position_H / ink.sum(1)).mean() - 13.5) < 0.1


def test_server_has_every_class_equally_often():
    assert (np.bincount(small(server_test=200).server_y_N, minlength=10) == 20).all()
    assert (np.bincount(small(classes=62, server_test=124).server_y_N, minlength=62) == 2).all()


def test_all_62_glyphs_are_distinguishable():
    assert "".join(GLYPHS) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    x_N, y_N = client_examples(np.arange(200), np.full(200, 40), split="by_writer", classes=62)
    test_x_N, test_y_N = server_examples(62 * 40, classes=62)
    mean_62 = np.stack([x_N[y_N == label].mean(0).ravel() for label in range(62)])
    flat_N = test_x_N.reshape(len(test_x_N), -1).astype(float)
    nearest_N = (2 * flat_N @ mean_62.T - (mean_62**2).sum(1)).argmax(1)
    recall_62 = (nearest_N == test_y_N).reshape(-1, 62).mean(0)
    assert recall_62.mean() > 0.5
    assert recall_62.min() > 0.05  # an l is also an I and a 1


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("split", {"split": "iid"}),
        ("classes", {"classes": 26}),
        ("clients", {"clients": 0}),
        ("samples", {"samples": 0}),
        ("test_samples", {"test_samples": -1}),
        ("server_test", {"server_test": -5}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**31}),
        ("skewed_clients", {"split": "skewed", "skewed_clients": 21}),
        ("skewed_clients", {"skewed_clients": 3}),
        ("sizes", {"sizes": [1] * 20}),
        ("sizes", {"split": "by_writer", "sizes": [1, 2]}),
        ("sizes", {"split": "by_writer", "sizes": [0] * 20}),
        ("test_sizes", {"split": "by_writer", "test_sizes": [1, 2]}),
        ("test_sizes", {"split": "by_writer", "test_sizes": [-1] * 20}),
    ],
)
def test_invalid_argument_is_refused(field, changes):
    with raises_field(field):
        small(**changes)


def test_test_sizes():
    arguments = {"clients": 3, "split": "by_writer", "server_test": 10, "sizes": [2, 3, 4]}
    data = make_handwriting(**arguments, test_sizes=[1, 0, 2])
    assert data.test.count_K.tolist() == [1, 0, 2]
    same = make_handwriting(**arguments, test_samples=2)
    assert np.array_equal(data.test.x_N[0], same.test.x_N[0])


def test_sheet_has_writers_as_rows_and_glyphs_as_columns():
    image = handwriting_sheet(writers=3, glyphs="Hello", seed=1)
    assert image.shape == (3 * 28, 5 * 28)
    assert image.dtype == np.uint8
    assert (image.reshape(3, 28, 5, 28).max(axis=(1, 3)) > 200).all()


@pytest.mark.parametrize(("field", "changes"), [("glyphs", {"glyphs": "Hi!"}), ("writers", {"writers": 0})])
def test_invalid_sheet_is_refused(field, changes):
    with raises_field(field):
        handwriting_sheet(**changes)
