"""A file of rows gives back what was written, past the system's cache or through it, and says when a disk is full."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from fedhdp.engine import row_file as rowfile
from fedhdp.engine.row_file import RowFile

LENGTHS = (7, 1, 2000)


def parts_of(rng: np.random.Generator, rows: int) -> list[np.ndarray]:
    return [rng.normal(size=(rows, length)).astype(np.float32) for length in LENGTHS]


@pytest.fixture(params=["past the cache", "through the cache"])
def opened(request, monkeypatch):
    """How a file is opened; some file systems refuse to be read past the cache."""
    if request.param == "through the cache":
        really = os.open

        def refusing(path, flags, mode=0o777):
            if flags & getattr(os, "O_DIRECT", 0):
                raise OSError(errno.EINVAL, "Invalid argument")
            return really(path, flags, mode)

        monkeypatch.setattr(os, "open", refusing)
    return request.param


def test_rows_are_what_was_written_last(tmp_path, monkeypatch, opened):
    monkeypatch.setattr(rowfile, "AT_ONCE", 3 * 3 * 4096)  # three rows at a time
    rng, file = np.random.default_rng(0), RowFile(tmp_path / "rows", os.O_CREAT, LENGTHS)
    assert file.bytes == 2 * 4096
    expected: dict[int, list[np.ndarray]] = {}
    for _ in range(20):
        behind = file.more(int(rng.integers(1, 12)))
        again = rng.permutation(file.rows)[: rng.integers(1, 9)]
        for rows in (behind, again):
            parts = parts_of(rng, len(rows) + 2)  # more than there are rows: the rest is not written
            file.write(rows, parts)
            expected |= {int(row): [part[i] for part in parts] for i, row in enumerate(rows)}
    file.sync()
    for one in (file, RowFile(tmp_path / "rows", 0, LENGTHS)):
        assert one.rows == file.rows
        for row, wanted in expected.items():
            got = [np.full(length, np.nan, np.float32) for length in LENGTHS]
            one.read(row, got)
            for a, b in zip(got, wanted):
                np.testing.assert_array_equal(a, b)


def test_where_nothing_was_written_nothing_is_read(tmp_path, opened):
    file, got = RowFile(None, 0, LENGTHS), [np.full(length, 5, np.float32) for length in LENGTHS]
    file.read(3, got)
    assert all((part == 5).all() for part in got)


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    file, really = RowFile(None, 0, LENGTHS), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: really(descriptor, data[:4096], at))
    with pytest.raises(OSError, match=r"4096 of 16384 bytes .* the disk is full"):
        file.write(file.more(2), parts_of(np.random.default_rng(0), 2))


def test_only_the_owner_may_read_the_file(tmp_path):
    RowFile(tmp_path / "rows", os.O_CREAT, LENGTHS)
    assert (tmp_path / "rows").stat().st_mode & 0o777 == 0o600
