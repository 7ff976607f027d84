"""MNIST's idx files."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from fedhdp.datasets.cache import write_dataset
from fedhdp.datasets.catalog import DATASETS
from fedhdp.datasets.importers import refuse_damaged
from fedhdp.errors import DataError
from fedhdp.memory import require_memory

MAX_DIMENSIONS = 4
IDX_BYTES, GZIP = b"\0\0\x08", b"\x1f\x8b"  # how idx files of unsigned bytes, and gzip files, begin
FILE_OF_ARRAY = {
    "train_x": "train-images-idx3-ubyte.gz",
    "train_y": "train-labels-idx1-ubyte.gz",
    "test_x": "t10k-images-idx3-ubyte.gz",
    "test_y": "t10k-labels-idx1-ubyte.gz",
}


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file of unsigned bytes, gzipped or not."""
    return _parse_idx(_read_declared(path), path)


def mnist_file_name(path: Path) -> str | None:
    """MNIST's name of a file, by its content; None if it is no idx file of bytes. Other idx files are refused."""
    if _read(path, len(IDX_BYTES)) != IDX_BYTES:
        return None
    raw = _read_declared(path)
    sha256 = hashlib.sha256(raw).hexdigest()
    for file in DATASETS["mnist"].files:
        if sha256 == file.content_sha256:
            return file.name
    shape = "x".join(map(str, _parse_idx(raw, path).shape))
    raise DataError(f"{path} ({shape} bytes) is not a file of MNIST: its sha256 is {sha256}", "sha256", sha256)


def import_mnist(files: dict[str, Path], sha256_of: dict[str, str]) -> None:
    """Store MNIST from its four files and their checksums, by their names in `FILE_OF_ARRAY`."""
    arrays = {array: read_idx(files[name]) for array, name in FILE_OF_ARRAY.items()}
    for part in ("train", "test"):
        x_N, y_N = arrays[f"{part}_x"], arrays[f"{part}_y"]
        path = files[FILE_OF_ARRAY[f"{part}_y"]]
        if x_N.ndim != 3 or y_N.shape != x_N.shape[:1]:
            raise DataError(f"{path} has labels {y_N.shape} for images {x_N.shape}", "labels", y_N.shape)
        if y_N.max(initial=0) > 9:
            raise DataError(f"{path}: labels must be from 0 to 9, got {y_N.max()}", "labels", int(y_N.max()))
    with write_dataset("mnist", sha256_of) as writer:
        writer.write(**arrays)


def _read(path: Path, size: int = -1) -> bytes:
    """A file's first bytes, by default all, decompressed if it is gzipped."""
    with open(path, "rb") as file:
        if file.read(len(GZIP)) != GZIP:
            file.seek(0)
            return file.read(size)
    with refuse_damaged(path, EOFError, OSError, zlib.error), gzip.open(path) as unpacked:
        return unpacked.read(size)


def _read_declared(path: Path) -> bytes:
    """An idx file, unpacked no further than its header says, and one byte that shows whether there is more."""
    header = _read(path, 4 + 4 * MAX_DIMENSIONS)
    if len(header) < 8 or not header.startswith(IDX_BYTES) or header[3] > MAX_DIMENSIONS:
        return header  # no idx file
    end = min(4 + 4 * header[3], len(header) // 4 * 4)
    size = end + math.prod(np.frombuffer(header[4:end], ">u4").tolist())
    require_memory(size, f"{path}", f"{size} bytes")
    return _read(path, size + 1)


def _parse_idx(raw: bytes, path: Path) -> np.ndarray:
    if len(raw) < 4 or not raw.startswith(IDX_BYTES) or not 1 <= raw[3] <= MAX_DIMENSIONS:
        raise DataError(f"{path} is not an idx file of bytes: it begins with 0x{raw[:4].hex()}", "file", path)
    header = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:header], ">u4").tolist()) if len(raw) >= header else ()
    expected = header + int(np.prod(shape, dtype=object))
    if not shape or len(raw) != expected:
        size = "x".join(map(str, shape)) or "unknown shape"
        raise DataError(f"{path} is damaged: {len(raw)} bytes, an idx file of {size} has {expected}", "file", path)
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
