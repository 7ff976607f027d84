"""Files of several datasets, and of none."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
from dataset_files import no_progress, write_femnist_npz, write_small_tff
from helpers import raises_field

from fedhdp.datasets import load_femnist
from fedhdp.datasets.importers.files import import_files
from fedhdp.errors import DataError
from fedhdp.privacy.ledger import Ledger


def test_ledger_is_not_a_dataset(tmp_path):
    path = tmp_path / "population.ledger"
    with Ledger(path):
        pass
    with raises_field("file", DataError) as error:
        import_files([path], no_progress)
    assert error.value.value == path


def test_unrelated_files_in_a_folder_are_skipped(tmp_path, data):
    folder = tmp_path / "downloads"
    folder.mkdir()
    write_femnist_npz(folder / "some.npz")
    with sqlite3.connect(folder / "aa.db") as connection:
        connection.execute("CREATE TABLE bookmarks(url TEXT)")
    connection.close()
    (folder / "users.json").write_text('{"users": ["me"], "theme": "dark"}')
    (folder / "broken.gz").write_bytes(b"\x1f\x8b\x08nothing")
    (folder / "broken.npz").write_bytes((folder / "some.npz").read_bytes()[:500])
    report = import_files([folder], no_progress)
    assert report.datasets == ["femnist-330"]
    assert [Path(reason.split()[0]).name for reason in report.skipped] == ["broken.gz", "broken.npz", "users.json"]
    with raises_field("file", DataError):
        import_files([folder / "aa.db"], no_progress)


def test_error_names_what_was_imported_before(tmp_path, monkeypatch):
    write_femnist_npz(tmp_path / "some.npz")
    write_small_tff(tmp_path / "tff.sqlite", monkeypatch, wrong_count=1)
    with raises_field("num_examples", DataError) as error:
        import_files([tmp_path], no_progress)
    assert "femnist-330" in str(error.value)
    assert load_femnist("330").num_clients == 2


def test_two_files_of_a_dataset_are_refused(tmp_path):
    write_femnist_npz(tmp_path / "first.npz")
    write_femnist_npz(tmp_path / "second.npz", labels=np.zeros(5, np.uint8))
    with raises_field("file", DataError) as error:
        import_files([tmp_path], no_progress)
    assert error.value.value == tmp_path / "second.npz"
