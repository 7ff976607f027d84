"""The data directory holds complete, undamaged datasets only."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
from dataset_files import no_progress, write_femnist_npz
from helpers import raises_field

import fedhdp.datasets
from fedhdp.datasets import data_directory, is_available, load_arrays, load_femnist, load_mnist
from fedhdp.datasets.cache import dataset_status, lock_directory, read_contents, write_dataset
from fedhdp.datasets.catalog import DATASETS, dataset_info
from fedhdp.datasets.importers.files import import_files
from fedhdp.errors import DataError


@pytest.fixture
def femnist_folder(tmp_path, data):
    """The folder of a small dataset in the data directory."""
    write_femnist_npz(tmp_path / "some.npz")
    import_files([tmp_path / "some.npz"], no_progress)
    return data / "femnist-330"


def test_public_names_exist():
    assert all(getattr(fedhdp.datasets, name) is not None for name in fedhdp.datasets.__all__)
    with pytest.raises(AttributeError):
        fedhdp.datasets.load_cifar  # noqa: B018


def test_data_directory(monkeypatch, tmp_path):
    assert data_directory() == tmp_path / "data"
    monkeypatch.delenv("FEDHDP_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_directory() == tmp_path / "cache" / "fedhdp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_directory() == tmp_path / "home" / ".cache" / "fedhdp"


def test_missing_dataset_comes_with_its_command():
    assert not is_available("mnist")
    with raises_field("dataset", DataError) as error:
        load_mnist()
    assert error.value.value == "mnist"
    assert "fedhdp data download mnist" in str(error.value)


def test_unknown_dataset_is_refused():
    with raises_field("dataset"):
        dataset_info("cifar")


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b""], ids=["truncated", "empty"])
def test_truncated_array_is_refused(femnist_folder, damage):
    path = femnist_folder / "train_x.npy"
    path.write_bytes(damage(path.read_bytes()))
    with raises_field("file", DataError) as error:
        load_femnist("330")
    assert error.value.value == path


def test_array_of_another_shape_is_refused(femnist_folder):
    path = femnist_folder / "train_x.npy"
    np.save(path, np.zeros((3, 28, 29), np.uint8))
    with raises_field("file", DataError) as error:
        load_femnist("330")
    assert error.value.value == path


def test_status_of_a_damaged_dataset(femnist_folder):
    path = femnist_folder / "train_x.npy"
    content = path.read_bytes()
    path.unlink()
    assert str(path) in dataset_status("femnist-330").damaged
    path.write_bytes(content)
    status = dataset_status("femnist-330")
    assert status.present
    assert status.damaged is None
    assert load_femnist("330").num_clients == 2


def test_contents_of_another_version_are_refused(femnist_folder):
    path = femnist_folder / "contents.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    with raises_field("version", DataError):
        read_contents("femnist-330")
    path.write_text("{}")
    with raises_field("file", DataError):
        read_contents("femnist-330")


def test_failed_import_leaves_nothing_behind(data):
    with raises_field("empty", DataError), write_dataset("mnist", {}) as writer:
        writer.write(x=np.ones(3), empty=np.ones(0))
    assert [path.name for path in data.iterdir()] == [".lock"]


def test_killed_import_is_cleaned_up(data):
    (data / ".mnist.part").mkdir(parents=True)
    (data / ".mnist.part" / "half.npy").write_bytes(b"half")
    with write_dataset("mnist", {}) as writer:
        writer.write(x=np.ones(3))
    assert sorted(path.name for path in (data / "mnist").iterdir()) == ["contents.json", "x.npy"]
    assert sorted(path.name for path in data.iterdir()) == [".lock", "mnist"]
    assert np.array_equal(load_arrays("mnist")["x"], np.ones(3))


def test_import_killed_between_its_renames_is_undone(femnist_folder, data):
    femnist_folder.rename(data / ".femnist-330.old")
    with raises_field("empty", DataError), write_dataset("femnist-330", {}) as writer:
        writer.write(empty=np.ones(0))
    assert load_femnist("330").num_clients == 2
    assert sorted(path.name for path in data.iterdir()) == [".lock", "femnist-330"]


def test_foreign_folders_are_not_replaced(data):
    (data / "mnist").mkdir(parents=True)
    (data / "mnist" / "notes").write_text("notes")
    with raises_field("directory", DataError), write_dataset("mnist", {}):
        pass
    assert (data / "mnist" / "notes").read_text() == "notes"


def test_concurrent_imports_are_refused():
    with write_dataset("mnist", {}) as writer, raises_field("directory", DataError), write_dataset("femnist-330", {}):
        pass
    assert writer.specs == {}


def test_datasets_are_written_without_fcntl(monkeypatch, data):
    import_module = builtins.__import__

    def without_fcntl(name, *args, **kwargs):
        if name == "fcntl":
            raise ImportError(name)
        return import_module(name, *args, **kwargs)

    data.mkdir()
    monkeypatch.setattr(builtins, "__import__", without_fcntl)
    with lock_directory(data), write_dataset("mnist", {}) as writer:
        writer.write(x=np.ones(3))
    assert is_available("mnist")


def test_downloads_have_checksums():
    for dataset in DATASETS.values():
        assert dataset.files
        assert all(file.sha256 is not None and len(file.sha256) == 64 for file in dataset.files if file.urls)
