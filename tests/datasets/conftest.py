"""Fixtures of the tests of datasets."""

from __future__ import annotations

from pathlib import Path

import pytest
from dataset_files import no_progress, write_small_mnist

from fedhdp.datasets.importers.files import import_files


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch) -> Path:
    """An empty data directory, which does not exist yet."""
    monkeypatch.setenv("FEDHDP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def small_mnist(tmp_path, monkeypatch) -> None:
    """A small MNIST in the data directory."""
    write_small_mnist(tmp_path / "raw", monkeypatch)
    import_files([tmp_path / "raw"], no_progress)
