"""MNIST's idx files are read completely or refused, and identified by their content."""

from __future__ import annotations

import gzip
import tracemalloc

import numpy as np
import pytest
from dataset_files import idx_bytes, no_progress, write_small_mnist
from helpers import raises_field

from fedhdp.datasets import load_arrays
from fedhdp.datasets.importers.files import import_files
from fedhdp.datasets.importers.idx import read_idx
from fedhdp.errors import DataError, InvalidValueError

IDX = idx_bytes(np.arange(100, dtype=np.uint8).reshape(4, 5, 5))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_read_idx(tmp_path, compress):
    array = np.random.default_rng(0).integers(0, 256, (5, 28, 28)).astype(np.uint8)
    (tmp_path / "x").write_bytes(compress(idx_bytes(array)))
    assert np.array_equal(read_idx(tmp_path / "x"), array)


@pytest.mark.parametrize(
    "content",
    [
        IDX[:-1],
        IDX + b"\0",
        IDX[:10],
        b"",
        b"\0\0\x0d\x01" + IDX[4:],
        b"\x89PNG",
        gzip.compress(IDX)[:-9],
        gzip.compress(IDX)[:20] + b"\0" + gzip.compress(IDX)[21:],
    ],
    ids=["short", "long", "no shape", "empty", "floats", "another format", "short gzip", "damaged gzip"],
)
def test_damaged_idx_is_refused(tmp_path, content):
    path = tmp_path / "some-idx"
    path.write_bytes(content)
    with raises_field("file", DataError) as error:
        read_idx(path)
    assert error.value.value == path


def test_a_file_is_unpacked_no_further_than_it_declares(tmp_path):
    """A gzip file of a kilobyte may unpack to a megabyte, or to a terabyte."""
    path = tmp_path / "some-idx"
    path.write_bytes(gzip.compress(IDX + bytes(100 * 2**20)))
    tracemalloc.start()
    with raises_field("file", DataError):
        read_idx(path)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()
    path.write_bytes(gzip.compress(IDX[:4] + b"\xff" * 12))
    with raises_field(str(path), InvalidValueError):
        read_idx(path)


def test_mnist_is_identified_by_content(tmp_path, monkeypatch):
    files = write_small_mnist(tmp_path / "raw", monkeypatch)
    for number, name in enumerate(sorted(files)):
        (tmp_path / "raw" / name).rename(tmp_path / "raw" / f"file{number}")
    assert import_files([tmp_path / "raw"], no_progress).datasets == ["mnist"]
    arrays = load_arrays("mnist")
    assert arrays["train_x"].shape == (600, 28, 28)
    assert np.array_equal(arrays["test_x"][:, 0, 0], arrays["test_y"])


def test_other_idx_files_are_not_mnist(tmp_path, monkeypatch, data):
    files = write_small_mnist(tmp_path / "raw", monkeypatch)
    wrong = tmp_path / "raw" / "train-images-idx3-ubyte.gz"
    wrong.write_bytes(gzip.compress(idx_bytes(np.ones((600, 28, 28), np.uint8))))
    with raises_field("file", DataError) as error:
        import_files([tmp_path / "raw"], no_progress)
    assert error.value.value == [wrong.name]
    with raises_field("sha256", DataError):
        import_files([wrong], no_progress)
    wrong.write_bytes(files[wrong.name][:-100])
    with raises_field("file", DataError) as error:
        import_files([wrong], no_progress)
    assert error.value.value == wrong
    with raises_field("file", DataError):
        import_files([tmp_path / "raw"], no_progress)
    assert not (data / "mnist").exists()


def test_large_gzip_of_another_format_is_not_decompressed(tmp_path, monkeypatch, data):
    (tmp_path / "other.gz").write_bytes(gzip.compress(b"text" * 1000))
    monkeypatch.setattr(gzip, "decompress", None)
    with raises_field("file", DataError):
        import_files([tmp_path / "other.gz"], no_progress)
