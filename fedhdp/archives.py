"""NumPy's npy files and npz archives, checked before they are read: what a file declares is all that it can cost."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from fedhdp.memory import require_memory

MAX_MEMBERS = 100_000
MAX_HEADER_BYTES = 10_000  # of an array, as NumPy has it, which reads a header before it looks
HEADERS = {  # by version: how many bytes say how long the header is, and what reads them
    (1, 0): (2, npy.read_array_header_1_0),
    (2, 0): (4, npy.read_array_header_2_0),
}


def array_names(path: Path) -> list[str]:
    """The names of the arrays of an npz.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            return [info.filename.removesuffix(".npy") for info in archive.infolist()]
    except Exception as error:  # zipfile raises anything on damaged files
        raise ValueError(_reason(error)) from error


def read_npz(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an npz.

    Args:
        path: The file.
        names: The arrays to read. None: all, where every member must be an array.

    Returns:
        The arrays by name. Beside them next to no memory is needed.

    Raises:
        ValueError: If the file is damaged, a member is no array, or they are larger than this machine's memory. Nothing has
            been unpacked then but headers.
        KeyError: If an array of these names is missing.
    """
    with open(path, "rb") as file:
        try:
            return _read(file, names)
        except _MissingArrayError:
            raise
        except Exception as error:  # zlib, zipfile and NumPy's reader of headers raise anything on damaged files
            raise ValueError(_reason(error)) from error


def read_npy(path: Path) -> np.ndarray:
    """Read the array of an npy file.

    Raises:
        ValueError: If the file is damaged or no array of numbers or text, or larger than this machine's memory.
    """
    with open(path, "rb") as file:
        try:
            shape, dtype = _read_header(file)
            size = _array_size(shape, dtype, path.name)
            if size != os.fstat(file.fileno()).st_size - file.tell():
                raise ValueError(f"it declares an array of {size} bytes and has another size")
            require_memory(size, "its array", "an array")
            file.seek(0)
            array: np.ndarray = npy.read_array(file, allow_pickle=False)
        except Exception as error:  # NumPy's reader of headers raises anything on damaged files
            raise ValueError(_reason(error)) from error
        return array


class _MissingArrayError(KeyError):
    """An array that was asked for is not there."""


def _read(file: IO[bytes], names: Iterable[str] | None) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if len(members) < len(archive.infolist()) or len(members) > MAX_MEMBERS:
            raise ValueError(f"it has {len(archive.infolist())} members, some of the same name")
        requested = [name.removesuffix(".npy") for name in members] if names is None else list(names)
        missing = [name for name in requested if f"{name}.npy" not in members]
        if missing and names is not None:
            raise _MissingArrayError(missing[0])
        if missing:
            raise ValueError(f"{missing[0][:80]!r} is no array")
        sizes = [_declared_size(archive, members[f"{name}.npy"]) for name in requested]
        require_memory(sum(sizes), "its arrays", f"{len(sizes)} arrays")
        arrays = {}
        for name in requested:
            with archive.open(f"{name}.npy") as member:
                arrays[name] = npy.read_array(member, allow_pickle=False)
                member.read(1)  # the end, where the checksum is compared
        return arrays


def _declared_size(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """The bytes of a member's array by its header, which must be what the archive says that it unpacks to."""
    with archive.open(info) as member:
        shape, dtype = _read_header(member)
        header = member.tell()
    size = _array_size(shape, dtype, info.filename)
    if size != info.file_size - header:
        raise ValueError(f"{info.filename!r} declares an array of {size} bytes and has {info.file_size - header}")
    return size


def _array_size(shape: tuple[int, ...], dtype: np.dtype, name: str) -> int:
    if dtype.hasobject:
        raise ValueError(f"{name!r} is an array of objects, not of numbers or text")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name!r} declares an array of the shape {shape}")
    return math.prod(map(int, shape)) * dtype.itemsize


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the type that an array declares; its header is read once it is known to be short."""
    version = npy.read_magic(member)
    if version not in HEADERS:
        raise ValueError(f"arrays of the version {version} of npy are not read")
    size, read = HEADERS[version]
    length = member.read(size)
    if int.from_bytes(length, "little") > MAX_HEADER_BYTES:
        raise ValueError(f"it declares a header of {int.from_bytes(length, 'little'):,} bytes")
    shape, _, dtype = read(io.BytesIO(length + member.read(int.from_bytes(length, "little"))))
    return shape, dtype


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
