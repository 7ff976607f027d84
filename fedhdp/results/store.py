"""The files of a run.

    DIR/experiment.toml           the experiment; `fedhdp run DIR/experiment.toml` runs it again
    DIR/run.json                  the run's id in the ledger, the sha256 of experiment.toml, fedhdp's version and commit
    DIR/clients.csv               each client's group
    DIR/summary.json              the results; written when all variants are finished
    DIR/VARIANT/history.csv       round, group, model, metric, value; appended to after each evaluation
    DIR/VARIANT/checkpoint.npz    the state from which the run resumes or is extended (see Experiment.keep_checkpoint)
    DIR/VARIANT/personal.bin      personal models that do not fit into memory; kept with the checkpoint
    DIR/VARIANT/model.npz         the final global model (and its average), by parameter
    DIR/VARIANT/scores.npz        each client's final values, by MODEL/METRIC
    DIR/VARIANT/personal_models.npy   every client's personal model, a row each (see Experiment.keep_personal)
    DIR/VARIANT/personal_checksums.npz   the CRC-32 of each of these rows, which are read one by one
    DIR/VARIANT/result.json       the variant's part of the summary
    DIR/report.html               the page of the run, or of the folder of several (`fedhdp report`)
    DIR/checksums.sha256          of the files that do not change any more and have no checksums of their own
    DIR/start.npz, start.json     the global model that the run began with, and what it had cost (Experiment.start_from)

A folder of several runs, of seeds or of a sweep, has:

    DIR/experiment.toml           the experiment with its sweep
    DIR/runs.json                 the runs below: path, seed, what the sweep changed
    DIR/summary.json              all their results, and means over seeds
    DIR/table.md, DIR/table.csv   the combined table, and every number of it
    DIR/…/seed-N/                 each run's own directory

Every file but the history is written under another name and then renamed, so that a crash leaves the old file or the new
one. A history may end in a torn line, or in rounds after the checkpoint: both are dropped when the run resumes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from fedhdp.errors import RunError
from fedhdp.results.files import CHECKSUMS_FILE
from fedhdp.results.files import DamagedRunError as DamagedRunError
from fedhdp.results.files import atomic_write as atomic_write
from fedhdp.results.files import check_files as check_files
from fedhdp.results.files import encode_json as encode_json
from fedhdp.results.files import lock_file as lock_file
from fedhdp.results.files import read_arrays as read_arrays
from fedhdp.results.files import read_value as read_value
from fedhdp.results.files import write_arrays as write_arrays
from fedhdp.results.files import write_checksums as write_checksums
from fedhdp.results.files import write_value as write_value
from fedhdp.results.provenance import describe_machine, provenance, utc_now
from fedhdp.results.schema import MetricRow, VariantResult

EXPERIMENT_FILE, RUN_FILE, SUMMARY_FILE, LOCK_FILE = "experiment.toml", "run.json", "summary.json", ".lock"
CLIENTS_FILE = "clients.csv"  # each client's group
RUNS_FILE, TABLE_FILE, NUMBERS_FILE = "runs.json", "table.md", "table.csv"  # of a folder of several runs
REPORT_FILE = "report.html"
HISTORY_FILE, CHECKPOINT_FILE = "history.csv", "checkpoint.npz"
PERSONAL_STORE_FILE = "personal.bin"  # beside a checkpoint: personal models that do not fit into memory
MODEL_FILE, SCORES_FILE, RESULT_FILE = "model.npz", "scores.npz", "result.json"
PERSONAL_FILE, PERSONAL_CHECKSUMS_FILE = "personal_models.npy", "personal_checksums.npz"
BASIS_FILE = "basis.npy"  # the public basis of the model's inputs
START_MODEL_FILE, START_FILE = "start.npz", "start.json"
FIRST_FILES = (EXPERIMENT_FILE, RUN_FILE, CLIENTS_FILE, BASIS_FILE, START_FILE)  # written before the first round


class Extension(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of a run's rounds: how many it had, and the epsilons that groups asked for in these, by variant."""

    rounds: int
    epsilon_targets: dict[str, dict[str, float]] = {}


class RunInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The id under which a ledger charges the run, its experiment, and the code that started it."""

    id: str
    experiment_sha256: str
    version: str = ""
    commit: str | None = None
    modified: bool | None = None
    extensions: list[Extension] = []
    previous_sha256: str | None = None  # of the experiment before the last extension
    started: str = ""  # in UTC
    machine: str = ""  # system, cores and versions


def slug(name: str) -> str:
    """A name as a directory's name: lower-case letters, digits, dots and hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "run"


def is_directory_name(name: str) -> bool:
    """Whether a variant of this name can have a directory in the run's."""
    files = (EXPERIMENT_FILE, SUMMARY_FILE, RUN_FILE, RUNS_FILE, TABLE_FILE, NUMBERS_FILE)
    return len(slug(name)) <= 100 and slug(name) not in files


def checkpoint_bytes(directory: Path) -> int:
    """The size of all checkpoints in a directory of one run or several, with the personal models beside them."""
    files = (file for name in (CHECKPOINT_FILE, PERSONAL_STORE_FILE) for file in directory.rglob(name))
    return sum(file.stat().st_size for file in files)


class LockedDirectory:
    """A directory that one process at a time has open for writing.

    Raises:
        RunError: If another process has locked it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = open(path / LOCK_FILE, "w")  # noqa: SIM115 (closing it unlocks the directory)
        try:
            lock_file(self._lock)
        except BlockingIOError as error:
            self._lock.close()
            raise RunError(f"{path} is being written by another process", "out", str(path)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()


class RunDirectory(LockedDirectory):
    """The directory of one run, locked while a process writes to it.

    Raises:
        DamagedRunError: If its files are damaged, or its experiment has been edited.
        RunError: If another process has locked it.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            info = read_value(path / RUN_FILE, RunInfo)
            digest = hashlib.sha256(self._experiment_text()).hexdigest()
            if digest not in (info.experiment_sha256, info.previous_sha256):  # the latter after a crash in `extend`
                hint = f"to run it as it is: fedhdp run {path / EXPERIMENT_FILE}"
                raise DamagedRunError(f"{path / EXPERIMENT_FILE} was edited after the run was started; {hint}")
            check_files(path)
            self.info, self.id = info, info.id
            self.extensions = info.extensions if digest == info.experiment_sha256 else info.extensions[:-1]
        except DamagedRunError:
            self._lock.close()
            raise

    @classmethod
    def create(cls, path: Path, experiment_toml: bytes) -> RunDirectory:
        """Create a run in a new or an empty directory.

        Raises:
            RunError: If the directory has other files in it.
        """
        leftovers = {LOCK_FILE, RUN_FILE, f"{RUN_FILE}.part", f"{EXPERIMENT_FILE}.part"}  # of a crash in this function
        if path.exists() and (not path.is_dir() or {file.name for file in path.iterdir()} - leftovers):
            hint = f"; to resume the run in it: fedhdp run --resume {path}" if (path / EXPERIMENT_FILE).exists() else ""
            raise RunError(f"--out {path} is not an empty directory{hint}", "out", str(path))
        path.mkdir(parents=True, exist_ok=True)
        run_id, digest = f"{path.name}-{secrets.token_hex(4)}", hashlib.sha256(experiment_toml).hexdigest()
        info = RunInfo(run_id, digest, *provenance(), started=utc_now(), machine=describe_machine())
        write_value(path / RUN_FILE, info)
        atomic_write(path / EXPERIMENT_FILE, experiment_toml)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of a run that was started.

        Raises:
            DamagedRunError: If there is no run in it, or a damaged one.
        """
        if not (path / EXPERIMENT_FILE).is_file():
            raise DamagedRunError(f"{path} contains no run: it has no {EXPERIMENT_FILE}")
        return cls(path)

    def extend(self, experiment_toml: bytes, extension: Extension) -> None:
        """Replace the experiment by one with other rounds, and remove the results; checkpoints stay.

        A crash leaves the run as it was, without results, which are made again from the checkpoints, or as it will be.
        """
        (self.path / CHECKSUMS_FILE).unlink(missing_ok=True)
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)
        for result in self.path.glob(f"*/{RESULT_FILE}"):
            result.unlink()
        digest, previous = (hashlib.sha256(text).hexdigest() for text in (experiment_toml, self._experiment_text()))
        extensions = [*self.extensions, extension]
        self.info = msgspec.structs.replace(
            self.info, experiment_sha256=digest, previous_sha256=previous, extensions=extensions
        )
        write_value(self.path / RUN_FILE, self.info)
        atomic_write(self.path / EXPERIMENT_FILE, experiment_toml)
        self.extensions = extensions

    def _experiment_text(self) -> bytes:
        return (self.path / EXPERIMENT_FILE).read_bytes()

    def discard_if_empty(self) -> None:
        """Remove the directory unless it has results."""
        files = {file.name for file in self.path.rglob("*") if file.is_file()}
        if files <= {*FIRST_FILES, START_MODEL_FILE, CHECKSUMS_FILE, LOCK_FILE}:
            shutil.rmtree(self.path)

    def record_clients(self, group_of_client: Mapping[str, str]) -> None:
        """Write the name of each client's group, by the client's id and in the clients' order.

        Raises:
            RunError: If the directory has other clients or groups: those of an earlier process of the run.
        """
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([("client", "group"), *group_of_client.items()])
        path, content = self.path / CLIENTS_FILE, text.getvalue().encode()
        if path.exists() and path.read_bytes() != content:
            raise RunError(
                f"{path} has other clients or levels than the data: the data has changed", "clients", str(path)
            )
        atomic_write(path, content)

    def write_checksums(self, running: Collection[str] = ()) -> None:
        """Write the checksums of the run's files so far.

        Args:
            running: The names of variants whose files will change.
        """
        names = sorted(path.parent.name for path in self.path.glob(f"*/{RESULT_FILE}"))
        finished = [name for name in names if name not in map(slug, running)]
        of_variants = [f"{name}/{file}" for name in finished for file in (HISTORY_FILE, RESULT_FILE)]
        write_checksums(self.path, [*FIRST_FILES, SUMMARY_FILE, *of_variants])

    def variant(self, name: str) -> VariantDirectory:
        """The directory of one variant."""
        path = self.path / slug(name)
        path.mkdir(exist_ok=True)
        return VariantDirectory(path)


class VariantDirectory:
    """The history, checkpoint, model and result of one variant."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def started(self) -> bool:
        """Whether a round may have been run, and charged."""
        return any((self.path / file).exists() for file in (HISTORY_FILE, CHECKPOINT_FILE, RESULT_FILE))

    def result(self) -> VariantResult | None:
        """The result, if the variant is finished."""
        path = self.path / RESULT_FILE
        return read_value(path, VariantResult) if path.exists() else None

    def checkpoint_variants(self) -> tuple[int, list[str]]:
        """The round of the checkpoint and the variants that it has; 0 and none without one.

        Raises:
            DamagedRunError: If the file is damaged.
        """
        path = self.path / CHECKPOINT_FILE
        if not path.exists():
            return 0, []
        arrays = read_arrays(path, ("round", "variants"))
        return int(arrays["round"]), arrays["variants"].tolist()

    def checkpoint(self) -> dict[str, np.ndarray] | None:
        """The state to resume from, if one was saved."""
        path = self.path / CHECKPOINT_FILE
        return read_arrays(path) if path.exists() else None

    def save_checkpoint(self, arrays: Mapping[str, np.ndarray | Callable[[], np.ndarray]]) -> None:
        """Save the state to resume from."""
        write_arrays(self.path / CHECKPOINT_FILE, arrays)

    def history(self, until: int | None = None) -> list[MetricRow]:
        """The measurements up to a round; a torn last line is dropped.

        Raises:
            DamagedRunError: If another line is damaged.
        """
        path = self.path / HISTORY_FILE
        if not path.exists():
            return []
        rows = []
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            for round, group, model, metric, value in csv.reader(lines[1:]):
                rows.append(MetricRow(int(round), group, model, metric, float(value)))
        except (ValueError, csv.Error) as error:
            raise DamagedRunError(f"{path} is damaged after line {len(rows) + 1}: {error}") from error
        return rows if until is None else [row for row in rows if row.round <= until]

    def rewrite_history(self, rows: Iterable[MetricRow]) -> None:
        """Replace the history by these measurements."""
        atomic_write(self.path / HISTORY_FILE, (",".join(MetricRow._fields) + "\n" + _csv_lines(rows)).encode())

    def append_history(self, rows: Iterable[MetricRow]) -> None:
        """Append measurements durably."""
        with open(self.path / HISTORY_FILE, "a", encoding="utf-8", newline="") as file:
            file.write(_csv_lines(rows))
            file.flush()
            os.fsync(file.fileno())

    def write_personal(self, shape: tuple[int, int], rows: Iterable[np.ndarray]) -> None:
        """Write personal models: a row of parameters for each client, of whom ``rows`` has some at a time."""
        part = self.path / f"{PERSONAL_FILE}.part"
        models = np.lib.format.open_memmap(part, "w+", np.float32, shape)
        checksums: list[int] = []
        for row_CP in rows:
            models[len(checksums) : len(checksums) + len(row_CP)] = row_CP
            checksums += (zlib.crc32(np.asarray(row_P, np.float32).tobytes()) for row_P in row_CP)
        models.flush()
        del models
        write_arrays(self.path / PERSONAL_CHECKSUMS_FILE, {"crc32": np.array(checksums, np.uint32)})
        os.replace(part, self.path / PERSONAL_FILE)

    def finish(
        self,
        model: Mapping[str, np.ndarray],
        result: VariantResult,
        scores: Mapping[str, np.ndarray] | None = None,
        keep_checkpoint: bool = False,
    ) -> None:
        """Write the model, the clients' scores and the result, and delete the checkpoint unless it is kept."""
        write_arrays(self.path / MODEL_FILE, model)
        if scores is not None:
            write_arrays(self.path / SCORES_FILE, scores)
        write_value(self.path / RESULT_FILE, result)
        if not keep_checkpoint:
            for name in (CHECKPOINT_FILE, PERSONAL_STORE_FILE):
                (self.path / name).unlink(missing_ok=True)


def history_checksum(rows: Iterable[MetricRow]) -> str:
    """The sha256 of measurements, the same before they are written and after they are read."""
    as_read = (row._replace(round=int(row.round), value=float(row.value)) for row in rows)
    return hashlib.sha256(_csv_lines(as_read).encode()).hexdigest()


def _csv_lines(rows: Iterable[MetricRow]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((*row[:4], repr(row.value)) for row in rows)
    return text.getvalue()
