"""A folder of several runs: one for each seed and for each experiment of a sweep, with one combined table."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhdp.errors import RunError
from fedhdp.experiments.batch import Watch
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.extension import check_extension, extend
from fedhdp.experiments.runner import resume, run, with_seeds
from fedhdp.experiments.sweep import changes, expand
from fedhdp.experiments.toml import read_experiment, to_toml
from fedhdp.results import comparison
from fedhdp.results.provenance import provenance
from fedhdp.results.schema import Summary
from fedhdp.results.store import (
    EXPERIMENT_FILE,
    LOCK_FILE,
    NUMBERS_FILE,
    RUNS_FILE,
    SUMMARY_FILE,
    TABLE_FILE,
    DamagedRunError,
    LockedDirectory,
    atomic_write,
    read_value,
    write_value,
)
from fedhdp.results.stored import RepeatedRun, RunEntry, RunsInfo, read_runs
from fedhdp.results.tables import format_markdown
from fedhdp.rng import process_entropy


def needs_folder(experiment: Experiment, seeds: Sequence[int] | None) -> bool:
    """Whether an experiment is several runs: with several seeds, or a sweep over what a variant cannot change."""
    return seeds is not None or len(expand(experiment)) > 1


class RunFolder(LockedDirectory):
    """Several runs in one directory, locked while it is open. The runs are paired where they draw the same cohorts.

    Args:
        path: The directory.
        experiment: The experiment, with its sweep.
        entries: The runs.

    Attributes:
        entries: The runs, in their order.
    """

    def __init__(self, path: Path, experiment: Experiment, entries: Sequence[RunEntry]):
        self.experiment, self.entries = experiment, list(entries)
        self._experiments = expand(experiment)
        self._entropy = {entry.seed: process_entropy(4) for entry in entries}
        self._attempted: set[str] = set()
        super().__init__(path)

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        files = {file.relative_to(self.path).as_posix() for file in self.path.rglob("*") if file.is_file()}
        if any(error) and files <= {EXPERIMENT_FILE, RUNS_FILE, LOCK_FILE}:  # no run could be started
            shutil.rmtree(self.path)

    @classmethod
    def start(cls, path: Path, experiment: Experiment, seeds: Sequence[int] | None = None) -> RunFolder:
        """Begin a folder, or add seeds to it.

        Args:
            path: A new or empty directory, or one with runs of the same experiment.
            experiment: The experiment.
            seeds: The seeds; None: the experiment's.

        Raises:
            RunError: If the directory has other files, or the runs of another experiment.
            FedHDPError: If a run's mechanism cannot be built.
        """
        experiment = experiment.pin()
        entries = _entries(experiment, seeds)
        for part in expand(experiment).values():
            part.pin().build_mechanism()  # so that a bad value is found before the first run
        text = to_toml(experiment).encode()
        if (path / RUNS_FILE).exists():
            previous = cls._read(path, text)
            entries = [*previous, *(entry for entry in entries if entry not in previous)]
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"--out {path} is not an empty directory", "out", str(path))
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, experiment, entries)
        atomic_write(path / EXPERIMENT_FILE, text)
        write_value(path / RUNS_FILE, RunsInfo(hashlib.sha256(text).hexdigest(), entries))
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a folder that was begun.

        Raises:
            DamagedRunError: If it is damaged, or its experiment has been edited.
            RunError: If another process has locked it.
        """
        entries = cls._read(path, None)
        return cls(path, read_experiment(path), entries)

    @staticmethod
    def _read(path: Path, text: bytes | None) -> list[RunEntry]:
        """The runs of a folder whose experiment has this text; None: that of its file."""
        info = read_value(path / RUNS_FILE, RunsInfo)
        try:
            stored = (path / EXPERIMENT_FILE).read_bytes()
        except OSError as error:
            raise DamagedRunError(f"{path / EXPERIMENT_FILE} is damaged: {error}") from error
        if hashlib.sha256(stored).hexdigest() != info.experiment_sha256:
            raise DamagedRunError(f"{path / EXPERIMENT_FILE} was edited after the runs were started")
        if text is not None and text != stored:
            raise RunError(f"{path} has the runs of another experiment; name another --out", "out", str(path))
        return info.runs

    def run(self, entry: RunEntry, watch: Watch) -> Summary:
        """Run one of the runs, or resume it; a finished one is read."""
        path = self.path / entry.path
        if (path / EXPERIMENT_FILE).exists():
            return resume(path, watch, self._cohort_entropy(entry))
        name = entry.path.removesuffix(f"seed-{entry.seed}").strip("/")
        experiment = self._experiments[name]
        if path.name == f"seed-{entry.seed}":
            [experiment] = with_seeds(experiment, [entry.seed])
        return run(experiment, path, watch, self._cohort_entropy(entry))

    def check_extension(self, rounds: int, allow_more_epsilon: bool = False) -> None:
        """Refuse to extend the runs, before any of them is changed.

        Raises:
            RunError: If a run was not begun, and what `fedhdp.experiments.extend` raises.
        """
        for entry in self.entries:
            path = self.path / entry.path
            if not (path / EXPERIMENT_FILE).exists():
                rule = (
                    f"{path} was not begun, so its noise would be calibrated for other rounds; resume {self.path} first"
                )
                raise RunError(f"rounds = {rounds}: {rule}", "rounds", rounds)
            check_extension(path, rounds, allow_more_epsilon)

    def extend(self, entry: RunEntry, rounds: int, watch: Watch, allow_more_epsilon: bool = False) -> Summary:
        """Run one of the runs until it has this many rounds (see `fedhdp.experiments.extend`)."""
        return extend(self.path / entry.path, rounds, watch, allow_more_epsilon, self._cohort_entropy(entry))

    def _cohort_entropy(self, entry: RunEntry) -> np.ndarray | None:
        """Words that pair the runs of a seed. A second attempt gets fresh ones: its rounds are charged as independent."""
        is_first = entry.path not in self._attempted
        self._attempted.add(entry.path)
        return self._entropy[entry.seed] if is_first else None

    def write_tables(self) -> list[RepeatedRun]:
        """Write the combined table and the summary of the runs that are finished, and return these."""
        labelled = ((str(Path(run.label).relative_to(self.path)), run.runs) for run in read_runs([self.path]))
        runs = [RepeatedRun(label, seeds) for label, seeds in labelled]
        header, rows = comparison.combined_cells(runs)
        lines = [*comparison.caption(runs, header), *comparison.notes(runs)]
        table = format_markdown(header, rows, lines, texts=min(2, len(runs)))
        atomic_write(self.path / TABLE_FILE, table.encode())
        numbers = comparison.mean_rows(runs)
        atomic_write(self.path / NUMBERS_FILE, comparison.format_csv(numbers).encode())
        finished = [entry for entry in self.entries if (self.path / entry.path / SUMMARY_FILE).exists()]
        results = {"runs": list(map(self._result, finished)), "means": [row._asdict() for row in numbers]}
        write_value(self.path / SUMMARY_FILE, {"experiment": self.experiment.name, **provenance()._asdict(), **results})
        return runs

    def _result(self, entry: RunEntry) -> dict[str, Any]:
        variants = read_value(self.path / entry.path / SUMMARY_FILE, Summary).variants
        return {"path": entry.path, "seed": entry.seed, "changes": entry.changes, "variants": variants}


def _entries(experiment: Experiment, seeds: Sequence[int] | None) -> list[RunEntry]:
    entries = []
    for name, point in changes(experiment).items():
        if seeds is None:
            entries.append(RunEntry(name, experiment.seed, point))
            continue
        for seeded in with_seeds(experiment, seeds):
            entries.append(RunEntry(f"{name}/seed-{seeded.seed}".strip("/"), seeded.seed, point))
    return entries
