"""The data directory: which datasets are stored, and how their arrays are read and written.

    DIRECTORY/DATASET/contents.json    the dataset, the sha256 of its raw files, the dtype and shape of each array
    DIRECTORY/DATASET/ARRAY.npy        uncompressed, to be memory-mapped

``FEDHDP_DATA`` names the directory; the default is ``fedhdp`` in the user's cache. A dataset is written under a
temporary name and renamed, so that it is complete or absent. Arrays that differ from ``contents.json`` are refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from fedhdp.datasets.catalog import RawFile, dataset_info, how_to_get
from fedhdp.errors import DataError

DIRECTORY_VARIABLE = "FEDHDP_DATA"
CONTENTS_FILE, VERSION = "contents.json", 1


class ArraySpec(msgspec.Struct, frozen=True):
    """The dtype and shape of a stored array."""

    dtype: str
    shape: tuple[int, ...]


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``contents.json`` says of a stored dataset."""

    dataset: str = msgspec.field(name="source")
    version: int
    files: dict[str, str]  # sha256 by name of the raw file
    arrays: dict[str, ArraySpec]

    def summary(self) -> str:
        """The number of clients and images, or the length of each array."""
        parts = []
        for prefix in (name.removesuffix("train_x") for name in self.arrays if name.endswith("train_x")):
            train, test = (self.arrays[f"{prefix}{part}_x"].shape[0] for part in ("train", "test"))
            counts = self.arrays.get(f"{prefix}train_count")
            label = f"{prefix.removesuffix('_')}: " if prefix else ""
            clients = f"{counts.shape[0]:,} clients, " if counts else ""
            parts.append(f"{label}{clients}{train:,} train images, {test:,} test images")
        return "; ".join(parts) or ", ".join(f"{name}: {array.shape[0]:,}" for name, array in self.arrays.items())


def data_directory() -> Path:
    """The directory of stored datasets."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory:
        return Path(directory).expanduser()
    return cache_home() / "fedhdp"


def cache_home() -> Path:
    """The user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification ignores a relative path.
    return Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"


def read_contents(name: str, directory: Path | None = None) -> Contents | None:
    """What is stored of a dataset; None if it is not stored. A damaged one, or one of another version, is refused."""
    path = (directory or data_directory()) / name / CONTENTS_FILE
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        contents = msgspec.json.decode(raw, type=Contents)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {error}; import {name} again", "file", path) from error
    if contents.version != VERSION or contents.dataset != name:
        stored = f"{contents.dataset} in format {contents.version}"
        raise DataError(f"{path} holds {stored}, not {name} in format {VERSION}; import it again", "version", stored)
    for array, spec in contents.arrays.items():
        _map_array(path.with_name(f"{array}.npy"), spec)
    return contents


class DatasetStatus(msgspec.Struct, frozen=True):
    """A dataset, and what is stored of it."""

    name: str
    description: str
    origin: str
    present: bool
    damaged: str | None  # why it cannot be read
    summary: str | None  # the number of clients and images
    bytes: int
    sha256: dict[str, str]  # of the raw files, by name
    files: tuple[RawFile, ...]
    downloadable: bool


def dataset_status(name: str) -> DatasetStatus:
    """What the user's data directory holds of a dataset."""
    info, contents, damaged = dataset_info(name), None, None
    try:
        contents = read_contents(name)
    except DataError as error:
        damaged = str(error)
    return DatasetStatus(
        name=name,
        description=info.description,
        origin=info.origin,
        present=contents is not None,
        damaged=damaged,
        summary=contents.summary() if contents else None,
        bytes=sum(file.stat().st_size for file in (data_directory() / name).glob("*")) if contents else 0,
        sha256=contents.files if contents else {},
        files=info.files,
        downloadable=info.downloadable,
    )


def is_available(name: str) -> bool:
    """Whether the data directory holds a dataset; raises `DataError` if it is damaged."""
    return read_contents(name) is not None


def load_arrays(name: str, directory: Path | None = None) -> dict[str, np.ndarray]:
    """The arrays of a stored dataset, memory-mapped.

    Args:
        name: The dataset's name.
        directory: The data directory; by default the user's.

    Returns:
        The arrays by name.

    Raises:
        DataError: If the dataset is not stored, or damaged.
    """
    directory = directory or data_directory()
    contents = read_contents(name, directory)
    if contents is None:
        raise DataError(f"{name} is not in the data directory {directory}; run {how_to_get(name)}", "dataset", name)
    return {array: _map_array(directory / name / f"{array}.npy", spec) for array, spec in contents.arrays.items()}


def _map_array(path: Path, spec: ArraySpec) -> np.ndarray:
    try:
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}; import it again", "file", path) from error
    if array.shape != spec.shape or array.dtype.str != spec.dtype:
        shapes = f"it holds {array.dtype.str} {array.shape}, not {spec.dtype} {spec.shape}"
        raise DataError(f"{path} is damaged: {shapes}; import it again", "file", path)
    return array


class ArrayWriter:
    """Writes the arrays of a dataset, at once or piece by piece."""

    def __init__(self, folder: Path):
        self.folder, self.specs = folder, dict[str, ArraySpec]()

    def create(self, name: str, shape: tuple[int, ...], dtype: type | np.dtype | str) -> np.ndarray:
        """A memory-mapped array to be filled; an empty array cannot be mapped and is refused."""
        if 0 in shape:
            raise DataError(f"{name} has no entries", name, shape)
        dtype = np.dtype(dtype)
        self.specs[name] = ArraySpec(dtype.str, shape)
        return np.lib.format.open_memmap(self.folder / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)

    def write(self, **arrays: np.ndarray) -> None:
        """Write complete arrays."""
        for name, array in arrays.items():
            self.create(name, array.shape, array.dtype)[...] = array


@contextmanager
def write_dataset(name: str, files: Mapping[str, str]) -> Iterator[ArrayWriter]:
    """A context that replaces a stored dataset, made from raw files with these sha256; if it raises, the old one stays."""
    directory = data_directory()
    directory.mkdir(parents=True, exist_ok=True)
    final, partial, replaced = directory / name, directory / f".{name}.part", directory / f".{name}.old"
    if final.exists() and not (final / CONTENTS_FILE).exists():
        raise DataError(f"{final} was not written by fedhdp: move it, or set {DIRECTORY_VARIABLE}", "directory", final)
    with lock_directory(directory):
        _clean_up(final, partial, replaced)  # after an import that was killed
        partial.mkdir()
        try:
            writer = ArrayWriter(partial)
            yield writer
            contents = Contents(name, VERSION, dict(files), writer.specs)
            (partial / CONTENTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(contents), indent=2) + b"\n")
            for path in partial.iterdir():
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
            if final.exists():
                os.rename(final, replaced)
            os.rename(partial, final)
        finally:
            _clean_up(final, partial, replaced)


def _clean_up(final: Path, partial: Path, replaced: Path) -> None:
    """Remove what an import leaves behind; without a new dataset the old one is put back."""
    if replaced.exists() and not final.exists():
        os.rename(replaced, final)
    for folder in (partial, replaced):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Keep other processes from writing to a directory; raises `DataError` if one does."""
    with open(directory / ".lock", "w") as lock:
        try:
            import fcntl
        except ImportError:  # Windows has no such lock
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{directory} is being written by another process", "directory", directory) from error
        yield


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
