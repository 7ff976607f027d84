"""Files that a user has, recognised by what is in them and kept in the data directory."""

from __future__ import annotations

import hashlib
import lzma
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedhdp.datasets import mnist
from fedhdp.datasets.directory import SOURCES, data_directory
from fedhdp.datasets.femnist import store_npz
from fedhdp.datasets.importers import leaf, tff
from fedhdp.datasets.importers.tff import Progress

_NPZ = {
    "mnist-writers": {"train", "test"},
    "femnist-330": {"images", "labels", "client", "is_test", "client_ids"},
}


def import_files(
    paths: Iterable[Path], progress: Progress, directory: Path | None = None, left: list[str] | None = None
) -> list[str]:
    """Keep all that is recognised among these files and folders; the names of the sources that are there now.

    What looks like data in a folder and cannot be used is left alone, and why is added to ``left``.
    """
    directory, paths = directory or data_directory(), list(paths)
    found: dict[str, list[Path]] = {}
    strangers = [] if left is None else left
    for given in paths:
        _search(given, found, strangers, progress)
    if not found:
        said = strangers[0] if strangers else f"nothing in {', '.join(map(str, paths))} is known here"
        raise ValueError(f"{said}; known are {', '.join(SOURCES)}")
    kept: list[str] = []
    for name, files in found.items():
        try:
            _store(name, files, strangers, progress, directory)
        except ValueError as error:
            raise ValueError(f"{error} (kept before that: {', '.join(kept)})" if kept else str(error)) from error
        kept.append(name)
    return kept


def _search(given: Path, found: dict[str, list[Path]], strangers: list[str], progress: Progress) -> None:
    """Add the files of each source in a folder, or one file; whatever else is in a folder is left alone."""
    if not given.exists():
        raise ValueError(f"{given} does not exist")
    files = sorted(path for path in given.rglob("*") if path.is_file()) if given.is_dir() else [given]
    for number, path in enumerate(files, start=1):
        try:
            name = recognise(path)
            if name == "femnist-leaf" and path != given and not leaf.is_where_shards_are(path):
                raise ValueError(f"{path} begins like a shard of LEAF, but is neither named nor placed like one")
        except ValueError as error:
            if path == given:
                raise
            strangers.append(str(error))
            continue
        if name is not None:
            found.setdefault(name, []).append(path)
        elif path == given:
            raise ValueError(f"{path} is no file of a known source{_nearly(path)}; known are {', '.join(SOURCES)}")
        progress(f"looking at {given}", number, len(files))
    shards = found.get("femnist-leaf", [])
    folders = {path.parent for path in shards}
    for path in files if shards else ():
        if path.suffix == ".json" and path not in shards and (path.parent in folders or leaf.part_of(path) != "all"):
            raise ValueError(f"{path} is damaged, or is no shard of LEAF, but is where they are")


def recognise(path: Path) -> str | None:
    """The source that a file belongs to, by its content; None if none. A damaged file is refused."""
    with open(path, "rb") as file:
        head = file.read(512)
    if head.startswith(tff.SQLITE):
        return "emnist-tff" if tff.is_tff(path) else None
    if head.startswith((tff.XZ, tff.LZMA_ALONE)) and _unpacks_to_sqlite(path):
        return "emnist-tff"
    if head.startswith(b"PK\x03\x04") and path.suffix == ".npz":
        return _npz_source(path)
    if re.match(rb'\s*\{\s*"(users|num_samples|user_data|hierarchies)"', head):
        return "femnist-leaf"
    if head.startswith((b"\0\0\x08", b"\x1f\x8b")):
        return "mnist" if _mnist_name(path) else None
    return None


def _unpacks_to_sqlite(path: Path) -> bool:
    try:
        with lzma.open(path) as file:
            return file.read(len(tff.SQLITE)) == tff.SQLITE
    except (lzma.LZMAError, EOFError):
        return False


def _npz_source(path: Path) -> str | None:
    names = _names(path)
    return next((source for source, wanted in _NPZ.items() if names == wanted), None)


def _names(path: Path) -> set[str]:
    """The arrays of an npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except Exception as error:  # a damaged archive can be anything to who reads it
        raise ValueError(f"{path} is damaged or ends too early: {error}") from error


def _nearly(path: Path) -> str:
    """What an npz lacks, or has too much, to be one that is known."""
    names = _names(path) if path.suffix == ".npz" else set()
    near = [(source, wanted) for source, wanted in _NPZ.items() if names & wanted]
    return "".join(
        f" (its arrays are {sorted(names)}; those of {source} are {sorted(wanted)})" for source, wanted in near
    )


def _mnist_name(path: Path) -> str | None:
    """The name under which MNIST has this file; None if it is no idx file at all."""
    if not mnist.is_idx(path):
        return None
    raw = mnist.content(path)
    sha256 = hashlib.sha256(raw).hexdigest()
    for file in SOURCES["mnist"].files:
        if sha256 == file.content_sha256:
            return file.name
    shape = "x".join(map(str, mnist.parse_idx(raw, path).shape))
    raise ValueError(f"{path} is an idx file of {shape} bytes, but none of MNIST's: its sha256 is {sha256}")


def _store(name: str, files: list[Path], strangers: list[str], progress: Progress, directory: Path) -> None:
    sums = {}
    for number, path in enumerate(files, start=1):
        sums[path] = file_sha256(path)
        progress(f"checking {name}", number, len(files))
    if name == "mnist":
        named = {file: path for path in reversed(files) if (file := _mnist_name(path))}
        missing = [file.name for file in SOURCES["mnist"].files if file.name not in named]
        if missing:
            said = "".join(f"; {stranger}" for stranger in strangers)
            raise ValueError(f"mnist needs {', '.join(missing)}, too: give all of its files at once{said}")
        mnist.store_mnist(named, {file: sums[path] for file, path in named.items()}, directory)
    elif name == "femnist-leaf":
        leaf.store_leaf(sums, progress, directory)
    else:
        if len(files) > 1:
            raise ValueError(f"{files[0]} and {files[1]} are both {name}: give one of them")
        if name == "emnist-tff":
            tff.store_tff(files[0], sums[files[0]], progress, directory)
        else:
            store = mnist.store_writers if name == "mnist-writers" else store_npz
            store(files[0], _arrays(files[0]), sums[files[0]], directory)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # of zlib, zipfile or numpy, down to its reader of headers
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def file_sha256(path: Path) -> str:
    """The sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
