"""A file of rows of numbers, for what memory does not hold: what many clients keep, of whom few are asked at a time.

It is read and written past the system's cache where the file system can do that. A cohort's models are hundreds of
megabytes a round: the cache would fill with what is not read again soon, and then everything would wait for it.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BLOCK = 4096  # bytes; past the cache, rows, files and memory come in whole blocks
AT_ONCE = 2 * 2**20  # bytes that are put together before they are written: few enough to stay in a core's reach


class RowFile:
    """Rows of single-precision numbers, in parts of given lengths; without a path, in a file that goes when it is closed."""

    def __init__(self, path: Path | None, how: int, lengths: Sequence[int]):
        self.lengths = tuple(lengths)
        self.bytes = -(-4 * sum(lengths) // BLOCK) * BLOCK
        self.descriptor = _open(path, how)
        weakref.finalize(self, os.close, self.descriptor)
        self.rows = os.fstat(self.descriptor).st_size // self.bytes
        self._mine = threading.local()

    def _desk(self) -> np.ndarray:
        """Rows in memory that begin with a block, of each thread its own."""
        if not hasattr(self._mine, "desk"):
            rows = max(1, AT_ONCE // self.bytes)
            self._mine.desk = np.frombuffer(mmap.mmap(-1, rows * self.bytes), np.float32).reshape(rows, -1)
        return self._mine.desk

    def more(self, rows: int) -> np.ndarray:
        """New rows at the end of the file."""
        self.rows += rows
        return np.arange(self.rows - rows, self.rows)

    def read(self, row: int, into: Sequence[np.ndarray]) -> None:
        """A row's parts; nothing changes where the file does not reach yet."""
        desk = self._desk()[:1]
        if os.preadv(self.descriptor, [desk.data], row * self.bytes) < self.bytes:
            return
        for part, numbers in zip(into, self._split(desk)):
            part[...] = numbers.reshape(part.shape)

    def write(self, rows: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Write the first entry of each part to the first of these rows, the second to the second, and so on."""
        desk = self._desk()
        apart = np.flatnonzero(np.diff(rows) != 1) + 1  # rows that lie behind each other are written in one go
        for begin, end in itertools.pairwise([0, *apart, len(rows)]):
            for first in range(begin, end, len(desk)):
                count = min(len(desk), end - first)
                for numbers, part in zip(self._split(desk), parts):
                    numbers[:count] = part[first : first + count].reshape(count, -1)
                self._put(desk[:count].data.cast("B"), int(rows[first]) * self.bytes)

    def _put(self, data: memoryview, at: int) -> None:
        done = os.pwrite(self.descriptor, data, at)
        if done < len(data):  # a disk that is full says so only when nothing at all could be written
            raise OSError(
                errno.ENOSPC, f"{done} of {len(data)} bytes of personal models could be written: the disk is full"
            )

    def _split(self, whole: np.ndarray) -> list[np.ndarray]:
        return np.split(whole, np.cumsum(self.lengths), axis=1)[:-1]

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self.descriptor)


def _open(path: Path | None, how: int) -> int:
    """The file, past the cache if that can be."""
    if path is None:
        descriptor, name = tempfile.mkstemp(prefix="fedhdp-")
        try:
            return _open(Path(name), 0)
        finally:
            os.close(descriptor)
            os.unlink(name)  # it is gone when nobody has it open any more
    past_the_cache = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_RDWR | how | past_the_cache, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL or not past_the_cache:
            raise
        return os.open(path, os.O_RDWR | how, 0o600)
