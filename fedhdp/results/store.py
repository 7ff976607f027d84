"""A run on disk: write it, read it. The only file format.

    DIR/experiment.toml           exactly what was run; `fedhdp run DIR/experiment.toml` runs it again
    DIR/run.json                  the run's own name, under which a ledger knows it, and the sha256 of the experiment
    DIR/summary.json              what it came to; written last, so a folder with one is whole
    DIR/VARIANT/history.csv       round, group, model, metric, value; appended as the run goes
    DIR/VARIANT/checkpoint.npz    where to go on; gone when the variant is done
    DIR/VARIANT/personal.bin      personal models that memory does not hold; gone when the variant is done
    DIR/VARIANT/model.npz         the final global model (and its average), by parameter
    DIR/VARIANT/scores.npz        each client's score at the end, by the kind of model
    DIR/VARIANT/result.json       the variant's part of the summary

Every file but the history is written whole under another name and moved into place. A history may end in a torn line or
in rounds that the checkpoint does not know: both are dropped when the run goes on.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from fedhdp.errors import RunError
from fedhdp.results.metrics import MetricRow
from fedhdp.results.schema import VariantResult

EXPERIMENT, SUMMARY, LOCK = "experiment.toml", "summary.json", ".lock"
RUN = "run.json"
HISTORY, CHECKPOINT, MODEL, RESULT = "history.csv", "checkpoint.npz", "model.npz", "result.json"
PERSONAL, SCORES = "personal.bin", "scores.npz"


class RunName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name under which a ledger knows the run, and the experiment that it is of."""

    id: str
    experiment_sha256: str


class DamagedRunError(RunError):
    """A run folder that cannot be read."""


def slug(name: str) -> str:
    """A name as a folder's name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "run"


def can_be_folder(name: str) -> bool:
    """Whether a variant's folder may have this name."""
    return len(slug(name)) <= 100 and slug(name) not in (EXPERIMENT, SUMMARY, RUN)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that is never seen half-written, even after a crash."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def atomic_write(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that it is never seen half-written, even after a crash."""
    with atomic_file(path) as file:
        file.write(content)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray | Callable[[], np.ndarray]]) -> None:
    """Write named arrays as one whole file; those given as functions are made one after the other."""
    with atomic_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array() if callable(array) else array), allow_pickle=False)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read named arrays back; a damaged file is refused."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedRunError(f"{path} is damaged: {error}") from error


def write_value(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    atomic_write(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_value(path: Path, kind: type) -> Any:
    """Read a value back from JSON; a damaged file is refused."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedRunError(f"{path} is damaged: {error}") from error


class RunDirectory:
    """A folder that holds one run, locked while somebody writes to it."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = open(path / LOCK, "w")  # noqa: SIM115 (kept open: closing it gives the lock up)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named = read_value(path / RUN, RunName)
            if hashlib.sha256((path / EXPERIMENT).read_bytes()).hexdigest() != named.experiment_sha256:
                hint = f"to run it as it is now: fedhdp run {path / EXPERIMENT}"
                raise DamagedRunError(
                    f"{path / EXPERIMENT} is not what the run was begun with, so it cannot go on; {hint}"
                )
            self.id = named.id
        except BlockingIOError as error:
            self._lock.close()
            raise ValueError(f"{path} is being written by another process") from error
        except DamagedRunError:
            self._lock.close()
            raise

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @classmethod
    def create(cls, path: Path, experiment_toml: bytes) -> RunDirectory:
        """A new run in an empty or a new folder."""
        begun = {LOCK, RUN, f"{RUN}.part", f"{EXPERIMENT}.part"}  # all that a crash in here leaves
        if path.exists() and (not path.is_dir() or {file.name for file in path.iterdir()} - begun):
            hint = f"; to go on with it: fedhdp run --resume {path}" if (path / EXPERIMENT).exists() else ""
            raise ValueError(f"--out {path} is not an empty folder{hint}")
        path.mkdir(parents=True, exist_ok=True)
        name, digest = f"{path.name}-{secrets.token_hex(4)}", hashlib.sha256(experiment_toml).hexdigest()
        write_value(path / RUN, RunName(name, digest))
        atomic_write(path / EXPERIMENT, experiment_toml)
        return cls(path)

    def discard_if_empty(self) -> None:
        """Remove a folder in which nothing of a run is kept yet."""
        kept = {file.name for file in self.path.rglob("*") if file.is_file()}
        if kept <= {LOCK, RUN, EXPERIMENT}:
            shutil.rmtree(self.path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """A run that was begun before."""
        if not (path / EXPERIMENT).is_file():
            raise DamagedRunError(f"{path} holds no run: there is no {EXPERIMENT} in it")
        return cls(path)

    def variant(self, name: str) -> VariantDirectory:
        """The part of one variant."""
        path = self.path / slug(name)
        path.mkdir(exist_ok=True)
        return VariantDirectory(path)


class VariantDirectory:
    """One variant's history, checkpoint, model and result."""

    def __init__(self, path: Path):
        self.path = path

    def result(self) -> VariantResult | None:
        """What the variant came to, if it is done."""
        path = self.path / RESULT
        return read_value(path, VariantResult) if path.exists() else None

    def checkpoint(self) -> dict[str, np.ndarray] | None:
        """Where to go on, if there is such a place."""
        path = self.path / CHECKPOINT
        return read_arrays(path) if path.exists() else None

    def keep_checkpoint(self, arrays: Mapping[str, np.ndarray | Callable[[], np.ndarray]]) -> None:
        """Remember where to go on."""
        write_arrays(self.path / CHECKPOINT, arrays)

    def history(self, until: int | None = None) -> list[MetricRow]:
        """The measurements up to a round; a torn last line is no line."""
        path = self.path / HISTORY
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        rows = []
        for number, line in enumerate(csv.reader(lines[1:]), start=2):
            try:
                round, group, model, metric, value = line
                row = MetricRow(int(round), group, model, metric, float(value))
            except ValueError as error:
                raise DamagedRunError(f"{path}, line {number} is damaged: {line}") from error
            if until is None or row.round <= until:
                rows.append(row)
        return rows

    def restart_history(self, rows: Iterable[MetricRow]) -> None:
        """Begin the history anew with these measurements."""
        atomic_write(self.path / HISTORY, (",".join(MetricRow._fields) + "\n" + _lines(rows)).encode())

    def append_history(self, rows: Iterable[MetricRow]) -> None:
        """Add measurements, all or none."""
        with open(self.path / HISTORY, "a") as file:
            file.write(_lines(rows))
            file.flush()
            os.fsync(file.fileno())

    def finish(
        self, model: Mapping[str, np.ndarray], result: VariantResult, scores: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Keep the model, every client's scores and the result; what a run goes on from is not needed any more."""
        write_arrays(self.path / MODEL, model)
        if scores is not None:
            write_arrays(self.path / SCORES, scores)
        write_value(self.path / RESULT, result)
        for name in (CHECKPOINT, PERSONAL):
            (self.path / name).unlink(missing_ok=True)


def _lines(rows: Iterable[MetricRow]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((*row[:4], repr(row.value)) for row in rows)
    return text.getvalue()
