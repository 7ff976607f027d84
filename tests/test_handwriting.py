"""The embedded handwriting: the same bytes for the same seed, writers with a hand of their own, splits as named."""

from __future__ import annotations

import numpy as np
import pytest

from fedhdp.datasets.glyphs import GLYPHS
from fedhdp.datasets.handwriting import client_examples, handwriting, server_examples, sheet


def small(**changes):
    """A population that is quick to make."""
    return handwriting(**{"clients": 20, "samples": 6, "test_samples": 2, "server_test": 20, **changes})


def test_the_same_seed_gives_the_same_bytes():
    one, two = small(split="by_writer", seed=3), small(split="by_writer", seed=3)
    for a, b in ((one.train, two.train), (one.test, two.test)):
        assert np.array_equal(a.x_N, b.x_N)
        assert np.array_equal(a.y_N, b.y_N)
    assert np.array_equal(one.server_x_N, two.server_x_N)


def test_another_seed_gives_other_images_and_other_classes():
    one, two = small(seed=0), small(seed=1)
    assert not np.array_equal(one.train.y_N, two.train.y_N)
    assert (one.server_x_N != two.server_x_N).any(axis=(1, 2)).all()


@pytest.mark.parametrize("split", ["by_writer", "one_digit"])
def test_what_a_client_holds_does_not_depend_on_who_else_there_is(split):
    all_x, all_y = client_examples(np.arange(60), np.full(60, 7), split=split)
    some = np.array([41, 3, 58])
    x, y = client_examples(some, np.array([7, 2, 5]), split=split)
    rows = np.concatenate([41 * 7 + np.arange(7), 3 * 7 + np.arange(2), 58 * 7 + np.arange(5)])
    assert np.array_equal(x, all_x[rows])
    assert np.array_equal(y, all_y[rows])


def test_more_clients_leave_the_first_clients_as_they_were():
    few, many = small(clients=10), small(clients=30)
    assert np.array_equal(few.train.x_N, many.train.x_N[:60])
    assert np.array_equal(few.test.y_N, many.test.y_N[:20])
    assert np.array_equal(few.server_x_N, many.server_x_N)


def test_train_and_test_examples_of_a_client_are_different_images():
    population = small(clients=10, samples=2)
    assert (population.train.x_N != population.test.x_N).any(axis=(1, 2)).all()


def test_one_digit_gives_each_client_one_digit_and_each_digit_as_many_clients():
    population = small(clients=200)
    digit_K6 = population.train.y_N.reshape(200, 6)
    assert (digit_K6 == digit_K6[:, :1]).all()
    assert (population.test.y_N.reshape(200, 2) == digit_K6[:, :1]).all()
    assert (np.bincount(digit_K6[:, 0], minlength=10) == 20).all()
    assert not np.array_equal(digit_K6[:10, 0], digit_K6[10:20, 0])


def test_skewed_gives_the_first_clients_a_seven_and_leaves_the_rest_alone():
    skewed, plain = small(clients=40, split="skewed", skewed_clients=15), small(clients=40)
    assert (skewed.train.y_N[: 15 * 6] == 7).all()
    assert (skewed.test.y_N[: 15 * 2] == 7).all()
    assert np.array_equal(skewed.train.y_N[15 * 6 :], plain.train.y_N[15 * 6 :])
    assert np.array_equal(skewed.train.x_N[15 * 6 :], plain.train.x_N[15 * 6 :])


def test_by_writer_gives_each_client_as_many_examples_as_asked_of_all_classes():
    sizes = [5, 300, 40]
    population = small(clients=3, split="by_writer", sizes=sizes)
    assert population.train.count_K.tolist() == sizes
    counts = np.bincount(population.train.y_N[5:305], minlength=10)
    assert counts.min() > 5
    assert counts.max() > counts.min()


def test_a_writer_writes_a_glyph_more_like_itself_than_like_another_writer():
    x_N, y_N = client_examples(np.arange(12), np.full(12, 60), split="by_writer")
    x_N, writer_N = x_N.reshape(len(x_N), -1) / 255, np.repeat(np.arange(12), 60)
    square_N = (x_N**2).sum(1)
    distance_NN = np.sqrt(np.maximum(square_N[:, None] + square_N - 2 * x_N @ x_N.T, 0))
    alike_NN = (y_N[:, None] == y_N) & ~np.eye(len(y_N), dtype=bool)
    same_NN = writer_N[:, None] == writer_N
    assert distance_NN[alike_NN & same_NN].mean() < 0.85 * distance_NN[alike_NN & ~same_NN].mean()


def test_images_are_bright_ink_on_a_black_ground():
    population = small(server_test=1000)
    images = population.server_x_N
    assert images.dtype == np.uint8
    assert population.input_shape == (28, 28)
    assert population.train.x_N.shape == (120, 28, 28)
    assert (images.max(axis=(1, 2)) > 200).all()
    assert 0.08 < images.mean() / 255 < 0.18
    border = np.concatenate([images[:, [0, -1]].ravel(), images[:, :, [0, -1]].ravel()])
    assert (border == 0).mean() > 0.98


def test_the_ink_is_centred():
    images, _ = server_examples(500)
    at = np.arange(28)
    for axis in (1, 2):
        ink = images.astype(float).sum(axis=axis)
        assert abs((ink @ at / ink.sum(1)).mean() - 13.5) < 0.1


def test_the_server_tests_every_class_equally_often():
    assert (np.bincount(small(server_test=200).server_y_N, minlength=10) == 20).all()
    assert (np.bincount(small(classes=62, server_test=124).server_y_N, minlength=62) == 2).all()


def test_all_62_glyphs_can_be_told_apart():
    assert "".join(GLYPHS) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    x_N, y_N = client_examples(np.arange(200), np.full(200, 40), split="by_writer", classes=62)
    test_x_N, test_y_N = server_examples(62 * 40, classes=62)
    mean_62 = np.stack([x_N[y_N == label].mean(0).ravel() for label in range(62)])
    flat_N = test_x_N.reshape(len(test_x_N), -1).astype(float)
    nearest_N = (2 * flat_N @ mean_62.T - (mean_62**2).sum(1)).argmax(1)
    recall_62 = (nearest_N == test_y_N).reshape(-1, 62).mean(0)
    assert recall_62.mean() > 0.5
    assert recall_62.min() > 0.05  # an l is also an I and a 1


def test_a_sheet_has_a_row_for_each_writer_and_a_column_for_each_glyph():
    picture = sheet(writers=3, glyphs="Hello", seed=1)
    assert picture.shape == (3 * 28, 5 * 28)
    assert picture.dtype == np.uint8
    assert (picture.reshape(3, 28, 5, 28).max(axis=(1, 3)) > 200).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "iid"}, "split must be one of by_writer, one_digit, skewed, not 'iid'"),
        ({"classes": 26}, "classes must be 10 or 62, not 26"),
        ({"clients": 0}, "clients must be at least 1, not 0"),
        ({"samples": 0}, "samples must be at least 1, not 0"),
        ({"test_samples": -1}, "test_samples must be at least 0, not -1"),
        ({"server_test": -5}, "server_test must be at least 1, not -5"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"seed": 2**31}, "seed must be below 2**31, not 2147483648"),
        ({"split": "skewed", "skewed_clients": 21}, "skewed_clients must be at most clients (20), not 21"),
        ({"skewed_clients": 3}, "skewed_clients is for the split 'skewed' only, but is 3 with split 'one_digit'"),
        ({"sizes": [1] * 20}, "sizes is for the split 'by_writer' only, not 'one_digit'"),
        ({"split": "by_writer", "sizes": [1, 2]}, "sizes must have one entry for each of the 20 clients, not 2"),
        ({"split": "by_writer", "sizes": [0] * 20}, "sizes must be at least 1, not 0"),
    ],
)
def test_a_bad_value_is_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=r"must|only") as error:
        small(**arguments)
    assert str(error.value) == message


def test_a_sheet_of_unknown_glyphs_is_refused():
    with pytest.raises(ValueError, match="nobody knows how to write '!'"):
        sheet(glyphs="Hi!")
