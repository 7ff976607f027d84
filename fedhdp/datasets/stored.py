"""Parsed data on disk: a folder of plain arrays that are mapped, not read, so that any of them is there at once.

    DIRECTORY/SOURCE/contents.json    the source, the sha256 of the files it was made from, every array's type and shape
    DIRECTORY/SOURCE/ARRAY.npy        uncompressed

A folder is written under another name and moved into place whole; one whose arrays are not what its contents say is
refused, never read short.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from fedhdp.datasets.directory import SOURCES, VARIABLE, data_directory

CONTENTS, VERSION = "contents.json", 1


class Array(msgspec.Struct, frozen=True):
    """What an array must be."""

    dtype: str
    shape: tuple[int, ...]


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a folder holds."""

    source: str
    version: int
    files: dict[str, str]  # the sha256 of each file that it was made from
    arrays: dict[str, Array]


def contents(name: str, directory: Path | None = None) -> Contents | None:
    """What is stored of a source; None: nothing. What is damaged, or of another version of this package, is refused."""
    path = (directory or data_directory()) / name / CONTENTS
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = msgspec.json.decode(raw, type=Contents)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is damaged: {error}; import {name} again") from error
    if found.version != VERSION or found.source != name:
        held = f"{found.source} of version {found.version}"
        raise ValueError(f"{path} holds {held}, but {name} of version {VERSION} is wanted; import it again")
    for array, expected in found.arrays.items():
        _mapped(path.with_name(f"{array}.npy"), expected)
    return found


def holds(found: Contents) -> str:
    """How much is there, in words."""
    said = []
    for name, array in found.arrays.items():
        if name.endswith("train_x"):
            prefix = name.removesuffix("train_x")
            train, test = array.shape[0], found.arrays[f"{prefix}test_x"].shape[0]
            clients = found.arrays.get(f"{prefix}train_count")
            of = f"{clients.shape[0]:,} clients, " if clients else ""
            said.append(
                f"{prefix.removesuffix('_')}{': ' if prefix else ''}{of}{train:,} images to train, {test:,} to test"
            )
    return "; ".join(said) or ", ".join(f"{name}: {array.shape[0]:,}" for name, array in found.arrays.items())


def read(name: str, directory: Path | None = None) -> dict[str, np.ndarray]:
    """The arrays of a source, mapped into memory."""
    directory = directory or data_directory()
    found = contents(name, directory)
    if found is None:
        ways = [f"fedhdp data download {name}"] if SOURCES[name].downloads else []
        said = " or ".join([*ways, "fedhdp data import FILES"])
        raise ValueError(f"{name} is not in the data directory {directory}; to get it there: {said}")
    return {array: _mapped(directory / name / f"{array}.npy", expected) for array, expected in found.arrays.items()}


def _mapped(path: Path, expected: Array) -> np.ndarray:
    try:
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}; import it again") from error
    if array.shape != expected.shape or array.dtype.str != expected.dtype:
        held = f"{array.dtype.str} {array.shape}"
        raise ValueError(f"{path} is damaged: it holds {held}, not {expected.dtype} {expected.shape}; import it again")
    return array


class Writer:
    """Takes the arrays of a source, whole or to be filled by and by."""

    def __init__(self, folder: Path):
        self.folder, self.arrays = folder, dict[str, Array]()

    def empty(self, name: str, shape: tuple[int, ...], dtype: type | np.dtype | str) -> np.ndarray:
        """An array on disk, to be filled."""
        dtype = np.dtype(dtype)
        self.arrays[name] = Array(dtype.str, shape)
        if 0 in shape:  # what is empty cannot be mapped
            raise ValueError(f"{name} would be empty")
        return np.lib.format.open_memmap(self.folder / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)

    def add(self, **arrays: np.ndarray) -> None:
        """Whole arrays."""
        for name, array in arrays.items():
            self.empty(name, array.shape, array.dtype)[...] = array


@contextmanager
def writing(name: str, files: Mapping[str, str], directory: Path | None = None) -> Iterator[Writer]:
    """Write a source made from these files (name to sha256): all of it is there afterwards, or what was there before."""
    directory = directory or data_directory()
    directory.mkdir(parents=True, exist_ok=True)
    part, old = directory / f".{name}.part", directory / f".{name}.old"
    if (directory / name).exists() and not (directory / name / CONTENTS).exists():
        raise ValueError(f"{directory / name} was not made by fedhdp and is in the way: move it, or set {VARIABLE}")
    with locked(directory):
        for left in (part, old):  # by an import that was killed
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir()
        try:
            writer = Writer(part)
            yield writer
            found = Contents(name, VERSION, dict(files), writer.arrays)
            (part / CONTENTS).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
            for file in part.iterdir():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            if (directory / name).exists():
                os.rename(directory / name, old)
            os.rename(part, directory / name)
        finally:
            for left in (part, old):
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Nobody else writes to the directory meanwhile."""
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{directory} is being written by another process") from error
        yield
