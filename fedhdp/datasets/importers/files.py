"""Imports of files that the user has: each is identified by its content."""

from __future__ import annotations

import lzma
import re
from pathlib import Path
from typing import NamedTuple

from fedhdp.datasets.cache import file_sha256
from fedhdp.datasets.catalog import DATASETS
from fedhdp.datasets.importers import ProgressCallback, leaf, tff
from fedhdp.datasets.importers.idx import import_mnist, mnist_file_name
from fedhdp.datasets.importers.npz import describe_mismatch, import_npz, npz_dataset
from fedhdp.errors import DataError


class ImportReport(NamedTuple):
    """The datasets that were imported, and why files that look like data were skipped."""

    datasets: list[str]
    skipped: list[str]


def import_files(paths: list[Path], progress: ProgressCallback) -> ImportReport:
    """Import every dataset among files and folders.

    Args:
        paths: Files, which must be of a dataset, and folders, in which other files are skipped.
        progress: Called with the step, how much of it is done, and its total.

    Returns:
        The names of the datasets, and the skipped files that look like data.

    Raises:
        DataError: If there is no dataset, or one is damaged or incomplete. Datasets before it stay imported.
    """
    files_of: dict[str, list[Path]] = {}
    report = ImportReport([], [])
    for path in paths:
        _search(path, files_of, report.skipped, progress)
    if not files_of:
        reason = report.skipped[0] if report.skipped else f"no dataset in {', '.join(map(str, paths))}"
        raise DataError(f"{reason}; datasets are {', '.join(DATASETS)}", "file", paths[0])
    for name, files in files_of.items():
        try:
            _import(name, files, report.skipped, progress)
        except DataError as error:
            imported = f" (already imported: {', '.join(report.datasets)})" if report.datasets else ""
            raise DataError(f"{error}{imported}", error.field, error.value) from error
        report.datasets.append(name)
    return report


def _search(root: Path, files_of: dict[str, list[Path]], skipped: list[str], progress: ProgressCallback) -> None:
    """Add the files of each dataset under a folder, or a single file."""
    if not root.exists():
        raise DataError(f"{root} does not exist", "file", root)
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    for number, path in enumerate(files, start=1):
        try:
            dataset = identify(path)
            if dataset == "femnist-leaf" and path != root and not leaf.has_shard_name(path):
                raise DataError(f"{path} begins like a LEAF shard, but its name and folder do not match", "file", path)
        except DataError as error:
            if path == root:
                raise
            skipped.append(str(error))
            continue
        if dataset is not None:
            files_of.setdefault(dataset, []).append(path)
        elif path == root:
            mismatch = f"{path} is not a file of a dataset{describe_mismatch(path)}"
            raise DataError(f"{mismatch}; datasets are {', '.join(DATASETS)}", "file", path)
        progress(f"searching {root}", number, len(files))
    leaf.check_neighbours(files_of.get("femnist-leaf", []), files)


def identify(path: Path) -> str | None:
    """The dataset that a file belongs to, or None; a damaged file of a dataset is refused."""
    with open(path, "rb") as file:
        start = file.read(512)
    if start.startswith(tff.SQLITE):
        return "emnist-tff" if tff.has_tff_tables(path) else None
    if start.startswith((tff.XZ, tff.LZMA_ALONE)) and _contains_sqlite(path):
        return "emnist-tff"
    if start.startswith(b"PK\x03\x04") and path.suffix == ".npz":
        return npz_dataset(path)
    if re.match(rb'\s*\{\s*"(users|num_samples|user_data|hierarchies)"', start):
        return "femnist-leaf"
    return "mnist" if mnist_file_name(path) else None


def _contains_sqlite(path: Path) -> bool:
    try:
        with lzma.open(path) as file:
            return file.read(len(tff.SQLITE)) == tff.SQLITE
    except (lzma.LZMAError, EOFError):
        return False


def _import(name: str, files: list[Path], skipped: list[str], progress: ProgressCallback) -> None:
    """Import one dataset from its files."""
    sha256_of = {}
    for number, path in enumerate(files, start=1):
        sha256_of[path] = file_sha256(path)
        progress(f"checking {name}", number, len(files))
    if name == "mnist":
        path_of = {file: path for path in reversed(files) if (file := mnist_file_name(path))}
        missing = [file.name for file in DATASETS["mnist"].files if file.name not in path_of]
        if missing:
            reasons = "; ".join([f"mnist lacks {', '.join(missing)}: import all of its files at once", *skipped])
            raise DataError(reasons, "file", missing)
        import_mnist(path_of, {file: sha256_of[path] for file, path in path_of.items()})
        return
    if name == "femnist-leaf":
        leaf.import_leaf(sha256_of, progress)
        return
    if len(files) > 1:
        raise DataError(f"{files[0]} and {files[1]} are both {name}: import one of them", "file", files[1])
    (path,) = files
    if name == "emnist-tff":
        tff.import_tff(path, sha256_of[path], progress)
    else:
        import_npz(name, path, sha256_of[path])
