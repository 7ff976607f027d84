"""TFF's federated EMNIST is read completely or refused."""

from __future__ import annotations

import functools
import lzma
import sqlite3

import numpy as np
import pytest
from dataset_files import no_progress, tf_example, write_small_tff
from helpers import raises_field

from fedhdp.datasets import load_femnist
from fedhdp.datasets.importers.files import import_files
from fedhdp.datasets.importers.tff import parse_example
from fedhdp.errors import DataError


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_parse_example(packed, reverse):
    pixels = np.random.default_rng(0).random(784).astype(np.float32)
    parsed, label = parse_example(tf_example(pixels, 61, packed, reverse))
    assert np.array_equal(np.frombuffer(parsed, "<f4"), pixels)
    assert label == 61


def test_truncated_example_is_refused():
    message = tf_example(np.zeros(784), 5)
    for end in [*range(60), *range(60, len(message), 97), len(message) - 1]:
        with pytest.raises(DataError) as error:
            parse_example(message[:end])
        assert error.value.field in {"message", "pixels", "label", "wire_type"}


@pytest.mark.parametrize(("field", "pixels", "label"), [("pixels", 783, 5), ("label", 784, 62)])
def test_example_of_another_size_or_label_is_refused(field, pixels, label):
    with raises_field(field, DataError):
        parse_example(tf_example(np.zeros(pixels), label))


@pytest.mark.parametrize("compress", [bytes, lzma.compress, functools.partial(lzma.compress, format=lzma.FORMAT_ALONE)])
def test_import_gives_every_client_its_images(tmp_path, monkeypatch, compress):
    write_small_tff(tmp_path / "plain", monkeypatch)
    (tmp_path / "file").write_bytes(compress((tmp_path / "plain").read_bytes()))
    assert import_files([tmp_path / "file"], no_progress).datasets == ["emnist-tff"]
    for classes, clients in ((62, 6), (10, 4)):
        femnist = load_femnist("tff", classes, seed=3)
        assert femnist.num_clients == clients
        label_K = femnist.train.y_N[femnist.train.start_K]
        assert sorted(label_K) == list(range(clients))
        assert label_K.tolist() == femnist.test.y_N.tolist()
        assert np.array_equal(femnist.train.count_K, label_K + 2)
        x_KM, y_KM = femnist.train.take(np.arange(clients), 7)
        for label, x_M, y_M, count in zip(label_K, x_KM, y_KM, femnist.train.count_K, strict=True):
            assert (y_M[:count] == label).all()
            ink_M = x_M[:count].reshape(count, 784)
            assert np.array_equal(np.sort(ink_M.argmax(1)), np.arange(count))
            assert (ink_M.sum(1) == label + 1).all()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-4096],
        lambda content: lzma.compress(content)[:-50],
        lambda content: content[:4096] + bytes(len(content) - 4096),
    ],
    ids=["truncated", "truncated lzma", "overwritten"],
)
def test_damaged_file_is_refused_and_the_stored_dataset_stays(tmp_path, monkeypatch, data, damage):
    good, bad = tmp_path / "good.sqlite", tmp_path / "bad.sqlite"
    write_small_tff(good, monkeypatch)
    import_files([good], no_progress)
    bad.write_bytes(damage(good.read_bytes()))
    with raises_field("file", DataError) as error:
        import_files([bad], no_progress)
    assert error.value.value == bad
    assert sorted(path.name for path in data.iterdir()) == [".lock", "emnist-tff"]
    assert load_femnist("tff").num_clients == 6


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_examples", {"wrong_count": 1}),
        ("num_examples", {"wrong_count": -1}),
        ("pixels", {"bad_pixel": 0.5}),
        ("pixels", {"bad_pixel": float("nan")}),
    ],
)
def test_wrong_content_is_refused(tmp_path, monkeypatch, data, field, changes):
    write_small_tff(tmp_path / "bad.sqlite", monkeypatch, **changes)
    with raises_field(field, DataError) as error:
        import_files([tmp_path / "bad.sqlite"], no_progress)
    assert "bad.sqlite" in str(error.value)
    assert [path.name for path in data.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("field", "statement"),
    [
        ("serialized_example_proto", "UPDATE examples SET serialized_example_proto = NULL"),
        ("serialized_example_proto", "UPDATE examples SET serialized_example_proto = 'hello'"),
        ("num_examples", "UPDATE client_metadata SET num_examples = NULL"),
        ("num_examples", "UPDATE client_metadata SET num_examples = 'abc'"),
        ("num_examples", "UPDATE client_metadata SET num_examples = 3000000000"),
        ("num_examples", "UPDATE client_metadata SET num_examples = 2000000000"),
        ("client_metadata", "DELETE FROM client_metadata WHERE client_id = 'c3'"),
        ("split_name", "DELETE FROM client_metadata WHERE split_name = 'all_test'"),
        ("client_id", "DELETE FROM client_metadata WHERE client_id = 'c3' AND split_name = 'all_train'"),
    ],
)
def test_impossible_values_are_refused(tmp_path, monkeypatch, data, field, statement):
    path = tmp_path / "bad.sqlite"
    write_small_tff(path, monkeypatch)
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    with raises_field(field, DataError) as error:
        import_files([path], no_progress)
    assert str(path) in str(error.value)
    assert not (data / "emnist-tff").exists()
