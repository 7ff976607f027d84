"""Downloads that resume, are verified, and are complete or absent."""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

from msgspec.structs import replace

from fedhdp.datasets.cache import data_directory, file_sha256, lock_directory
from fedhdp.datasets.catalog import DatasetInfo, RawFile
from fedhdp.datasets.importers import ProgressCallback
from fedhdp.datasets.importers.files import import_files
from fedhdp.errors import DataError, require

CHUNK_BYTES, TIMEOUT_SECONDS = 1 << 16, 30.0
MAX_FAILURES, PAUSE_SECONDS = 4, 1.0  # attempts in a row without any new byte, and the pause after the first of them


def download(dataset: DatasetInfo, progress: ProgressCallback, sha256: str | None = None) -> None:
    """Download the files of a dataset, verify them and import them; the files themselves are deleted.

    Args:
        dataset: A dataset that can be downloaded.
        progress: Called with the step, how much of it is done, and its total.
        sha256: The checksum of the dataset's only file, instead of the one in the catalog.

    Raises:
        DataError: If a file cannot be downloaded, has another checksum, or cannot be imported.
        InvalidValueError: If the checksum is none, or the dataset has several files.
    """
    if not dataset.downloadable:
        raise DataError(f"{dataset.name} cannot be downloaded: {dataset.origin}", "dataset", dataset.name)
    if sha256 is not None:
        count = len(dataset.files)
        require(count == 1, "sha256", sha256, f"absent for {dataset.name}, which has {count} files")
        require(re.fullmatch("[0-9a-f]{64}", sha256) is not None, "sha256", sha256, "64 hexadecimal digits")
    folder = data_directory() / "downloads" / dataset.name
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / file.name for file in dataset.files]
    with lock_directory(folder):
        for file, path in zip(dataset.files, paths, strict=True):
            fetch(replace(file, sha256=sha256 or file.sha256), path, progress)
        import_files(paths, progress)
        for path in paths:
            path.unlink()


def fetch(file: RawFile, path: Path, progress: ProgressCallback) -> None:
    """Download one file from the first mirror that has it; a partial file beside it is resumed."""
    if path.exists():
        if file.sha256 in (None, file_sha256(path)):
            return
        path.unlink()
    partial, failures = path.with_name(path.name + ".part"), []
    for url in file.urls:
        try:
            _fetch_url(url, partial, progress)
            _verify(file, url, partial)
        except DataError as error:
            failures.append(error)
            continue
        os.replace(partial, path)
        return
    raise DataError("; ".join(map(str, failures)), failures[-1].field, failures[-1].value)


def _verify(file: RawFile, url: str, partial: Path) -> None:
    if file.sha256 is not None and (actual := file_sha256(partial)) != file.sha256:
        partial.unlink()
        raise DataError(f"{url}: sha256 must be {file.sha256}, got {actual}", "sha256", actual)


def _fetch_url(url: str, partial: Path, progress: ProgressCallback) -> None:
    """Download until the file is complete, in as many attempts as it takes while each makes progress."""
    failures = 0
    while True:
        before = _size(partial)
        try:
            if _attempt(url, partial, progress):
                return
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and before:  # range not satisfiable: the partial file is complete or too long
                if error.headers.get("Content-Range") == f"bytes */{before}":
                    return
                partial.unlink()
                before, reason = 0, "the partial file was longer"
            elif error.code < 500 and error.code != 429:
                raise DataError(f"{url}: {error.code} {error.reason}", "url", url) from error
            else:
                reason = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        size = _size(partial)
        failures = 0 if size > before else failures + 1
        if failures == MAX_FAILURES:
            raise DataError(f"{url}: {reason} after {size} bytes; the same command resumes the download", "url", url)
        time.sleep(PAUSE_SECONDS * failures)


def _attempt(url: str, partial: Path, progress: ProgressCallback) -> bool:
    """Request the missing bytes and append them; whether the file is complete."""
    size = _size(partial)
    request = urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        resumed = response.status == 206
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {size}-"):
            raise http.client.HTTPException("the server sent another range than the requested one")
        if not resumed:  # the server ignored the range
            size = 0
        length = response.headers.get("Content-Length")
        total = size + int(length) if length else 0
        with open(partial, "ab" if resumed else "wb") as out:
            while chunk := response.read(CHUNK_BYTES):
                out.write(chunk)
                size += len(chunk)
                progress(f"downloading {partial.name.removesuffix('.part')}", size, total)
            out.flush()
            os.fsync(out.fileno())
    return size == total or not length


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
