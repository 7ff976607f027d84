"""Datasets in npz files are imported completely or refused."""

from __future__ import annotations

import numpy as np
import pytest
from dataset_files import no_progress, write_femnist_npz
from helpers import raises_field

from fedhdp.datasets import load_femnist
from fedhdp.datasets.importers.files import import_files
from fedhdp.errors import DataError


def test_import_gives_every_client_its_images(tmp_path):
    write_femnist_npz(tmp_path / "some.npz")
    assert import_files([tmp_path / "some.npz"], no_progress).datasets == ["femnist-330"]
    femnist = load_femnist("330", seed=1)
    assert sorted(zip(femnist.train.count_K, femnist.test.count_K, strict=True)) == [(1, 1), (2, 1)]
    assert np.array_equal(femnist.train.x_N[:, 0, 0], femnist.train.y_N)
    assert np.array_equal(femnist.test.x_N[:, 3, 3], femnist.test.y_N)
    assert sorted(femnist.server_y_N) == [5, 7]
    assert load_femnist("330", classes=10).train.count_K.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("field", "array"),
    [
        ("labels", np.zeros(4, np.uint8)),
        ("labels", np.full(5, 62, np.uint8)),
        ("labels", np.full(5, -1, np.int64)),
        ("labels", np.full(5, np.nan)),
        ("labels", np.uint8(5)),
        ("is_test", np.zeros(5, bool)),
        ("is_test", np.zeros(5, np.uint8)),
        ("client_ids", np.array(["a", "b", "c"])),
        ("client_ids", np.array("a")),
        ("images", np.zeros((5, 28, 27), np.uint8)),
        ("client", np.array([0.0, 0.0, 0.5, 1.0, 1.0])),
    ],
)
def test_invalid_array_is_refused(tmp_path, data, field, array):
    path = tmp_path / "some.npz"
    write_femnist_npz(path, **{field: array})
    with raises_field(field, DataError) as error:
        import_files([path], no_progress)
    assert str(path) in str(error.value)
    assert not data.exists()


def test_invalid_writers_are_refused(tmp_path, data):
    np.savez(tmp_path / "writers.npz", train=np.zeros(60_000, int), test=np.zeros(9_999, int))
    with raises_field("test", DataError):
        import_files([tmp_path / "writers.npz"], no_progress)
    assert not data.exists()


def test_missing_array_is_named(tmp_path):
    path = tmp_path / "some.npz"
    np.savez(path, images=np.zeros((5, 28, 28), np.uint8), labels=np.zeros(5, np.uint8))
    with raises_field("file", DataError) as error:
        import_files([path], no_progress)
    assert "'client'" in str(error.value)
    assert "femnist-330" in str(error.value)


def test_truncated_npz_is_refused(tmp_path, data):
    path = tmp_path / "some.npz"
    write_femnist_npz(path)
    path.write_bytes(path.read_bytes()[:-100])
    for imported in (path, tmp_path):
        with raises_field("file", DataError) as error:
            import_files([imported], no_progress)
        assert str(path) in str(error.value)
    assert not data.exists()


@pytest.mark.slow
def test_any_damage_is_a_data_error(tmp_path):
    path = tmp_path / "some.npz"
    write_femnist_npz(path)
    content, rng, errors = path.read_bytes(), np.random.default_rng(1), []
    for start in rng.integers(0, len(content), 150):
        path.write_bytes(content[:start] + bytes(rng.integers(0, 256, 2, np.uint8)) + content[start + 2 :])
        try:
            import_files([path], no_progress)
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert all("some.npz" in message and "\n" not in message for message in errors)
