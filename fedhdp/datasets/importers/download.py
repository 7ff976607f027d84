"""Downloads that go on where they broke off, are checked, and are there whole or not at all."""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

from fedhdp.datasets.directory import File, Source, data_directory
from fedhdp.datasets.importers.importing import file_sha256, import_files
from fedhdp.datasets.importers.tff import Progress
from fedhdp.datasets.stored import locked

CHUNK, TIMEOUT = 1 << 16, 30.0
ATTEMPTS, PAUSE = 4, 1.0  # attempts in a row that bring nothing new, and seconds before another one


def download(source: Source, progress: Progress, sha256: str | None = None, directory: Path | None = None) -> None:
    """Fetch the files of a source, check them, and keep what is in them; the files themselves are not kept."""
    directory = directory or data_directory()
    if not source.downloads:
        raise ValueError(f"{source.name} is not offered for download: {source.origin}")
    if sha256 is not None and len(source.files) != 1:
        raise ValueError(f"--sha256 is for a source of one file, but {source.name} has {len(source.files)}")
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"--sha256 must be 64 hexadecimal digits, got {sha256!r}")
    folder = directory / "downloads" / source.name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        for file in source.files:
            fetch(file._replace(sha256=sha256 or file.sha256), folder / file.name, progress)
        import_files([folder / file.name for file in source.files], progress, directory)
        for file in source.files:
            (folder / file.name).unlink()


def fetch(file: File, path: Path, progress: Progress) -> None:
    """Fetch one file from the first of its addresses that has it, going on with what is there of it."""
    if path.exists():
        if file.sha256 in (None, file_sha256(path)):
            return
        path.unlink()
    part, failures = path.with_name(path.name + ".part"), []
    for url in file.urls:
        try:
            _fetch(url, part, progress)
            _check(file, url, part)
        except ValueError as error:
            failures.append(str(error))
            continue
        os.replace(part, path)
        return
    raise ValueError("; ".join(failures))


def _check(file: File, url: str, part: Path) -> None:
    if file.sha256 is not None and (found := file_sha256(part)) != file.sha256:
        part.unlink()
        raise ValueError(f"{url} is not what it should be: its sha256 is {found}, not {file.sha256}")


def _fetch(url: str, part: Path, progress: Progress) -> None:
    """Everything at an address, in as many attempts as it takes while each brings something."""
    vain = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _attempt(url, part, progress):
                return
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and before:
                if error.headers.get("Content-Range") == f"bytes */{before}":
                    return  # there is nothing left to ask for
                part.unlink()
                before, reason = 0, "the rest is not there"
            elif error.code < 500 and error.code != 429:
                raise ValueError(f"{url}: {error.code} {error.reason}") from error
            else:
                reason = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        now = part.stat().st_size if part.exists() else 0
        vain = 0 if now > before else vain + 1
        if vain == ATTEMPTS:
            raise ValueError(f"{url}: {reason} after {now} bytes; the same command goes on from there")
        time.sleep(PAUSE * vain)


def _attempt(url: str, part: Path, progress: Progress) -> bool:
    """Ask for what is missing and take what comes; whether that was all."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        resumed = answer.status == 206
        if resumed and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise http.client.HTTPException("the server answered with another range than was asked for")
        if not resumed:  # the server sends everything, whatever was asked
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else 0
        with open(part, "ab" if resumed else "wb") as out:
            while chunk := answer.read(CHUNK):
                out.write(chunk)
                have += len(chunk)
                progress(f"downloading {part.name.removesuffix('.part')}", have, total)
            out.flush()
            os.fsync(out.fileno())
    return have == total or not length
