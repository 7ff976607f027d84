"""Files that are complete or absent: arrays, JSON and locks.

Every file is written under another name and then renamed, so that a crash leaves the old file or the new one.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import numpy as np

from fedhdp.archives import read_npz
from fedhdp.errors import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


CHECKSUMS_FILE = "checksums.sha256"  # of a directory's other files


class DamagedRunError(RunError):
    """A run directory that cannot be read."""


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which replaces the one at the path when it is complete and durable."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    if os.name == "posix":  # Windows cannot open a directory, and needs no sync of it
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def atomic_write(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that a crash leaves the old content or the new."""
    with atomic_file(path) as file:
        file.write(content)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray | Callable[[], np.ndarray]]) -> None:
    """Write named arrays to an npz file; an array given as a function is computed when its turn comes."""
    with atomic_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array() if callable(array) else array), allow_pickle=False)


def read_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read named arrays from an npz file: those of these names, or all.

    Raises:
        DamagedRunError: If the file is missing or damaged.
    """
    try:
        return read_npz(path, names)
    except (OSError, ValueError, KeyError) as error:
        raise DamagedRunError(f"{path} is damaged: {error}") from error


def encode_json(value: Any) -> bytes:
    """Encode a value as indented JSON; an infinite number becomes the string "inf"."""
    return msgspec.json.format(msgspec.json.encode(_inf_as_text(msgspec.to_builtins(value))), indent=2) + b"\n"


def _inf_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _inf_as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_inf_as_text(item) for item in value]
    return "inf" if isinstance(value, float) and value == math.inf else value


def write_value(path: Path, value: Any) -> None:
    """Write a value as JSON (see `encode_json`)."""
    atomic_write(path, encode_json(value))


def read_value(path: Path, kind: type) -> Any:
    """Read a value of a type from JSON; where a number is expected, the string "inf" is infinity.

    Raises:
        DamagedRunError: If the file is missing, damaged or of another type.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, strict=False)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedRunError(f"{path} is damaged: {error}") from error


def write_checksums(directory: Path, names: Iterable[str]) -> None:
    """Write the checksums of files of a directory, as ``sha256sum --check`` reads them.

    Args:
        directory: The directory.
        names: The files, relative to it; those that do not exist are left out.
    """
    lines = [f"{_checksum(directory / name)}  {name}\n" for name in names if (directory / name).exists()]
    atomic_write(directory / CHECKSUMS_FILE, "".join(lines).encode())


def check_files(directory: Path) -> None:
    """Compare files with their checksums, where a directory has any. A file that was removed is no damage.

    Raises:
        DamagedRunError: If a file is not as it was written.
    """
    path = directory / CHECKSUMS_FILE
    changed = None
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for checksum, name in (line.split("  ", 1) for line in lines):
            if (directory / name).exists() and _checksum(directory / name) != checksum:
                changed = directory / name
    except (OSError, ValueError) as error:
        raise DamagedRunError(f"{path} is damaged: {error}") from error
    if changed is not None:
        raise DamagedRunError(f"{changed} is damaged, or was changed after it was written")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock_file(file: IO, wait: bool = False) -> None:
    """Lock an open file against other processes until it is closed.

    Args:
        file: The file, open for writing.
        wait: Whether to wait until another process unlocks it.

    Raises:
        BlockingIOError: If another process has locked it.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    elif sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(str(error)) from error
