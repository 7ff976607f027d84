"""Runs read back from their directories: single runs, folders of several runs, and deployments.

A folder of several runs has a ``runs.json`` that lists them: one for each seed, or for each value of a swept key.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedhdp.errors import RunError
from fedhdp.results.schema import MetricRow, Summary, VariantResult
from fedhdp.results.store import (
    CLIENTS_FILE,
    EXPERIMENT_FILE,
    HISTORY_FILE,
    RESULT_FILE,
    RUN_FILE,
    RUNS_FILE,
    SCORES_FILE,
    SUMMARY_FILE,
    DamagedRunError,
    RunInfo,
    VariantDirectory,
    check_files,
    read_arrays,
    read_value,
    slug,
)

SEEDS = ("seed", "noise_seed")  # the settings in which repetitions of a run differ
NAMES = ("name", "about")
GROUP_SETTINGS = ("clients", "sampling_rate", "noise_multiplier", "weight", "pull")


class RunEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of a folder of several: its directory below the folder, its seed, and what a sweep changed."""

    path: str
    seed: int
    changes: dict[str, Any] = {}


class RunsInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``runs.json``."""

    experiment_sha256: str
    runs: list[RunEntry]


class StoredVariant:
    """A variant of a stored run.

    Attributes:
        result: Its result.
        settings: What it was run with, by dotted key: the experiment's settings with the variant's changes, and each
            group's numbers in the mechanism that was run, such as ``mechanism.groups.private.weight``.
        stated: The keys that were stated; the others follow from them, such as the noise from an epsilon.
    """

    def __init__(self, result: VariantResult, settings: dict[str, Any], stated: set[str], path: Path):
        self.result, self.settings, self.stated, self._path = result, settings, stated, path

    def replace(self, result: VariantResult, history: list[MetricRow]) -> StoredVariant:
        """The same variant with another result and history, without the clients' scores."""
        other = StoredVariant(result, self.settings, self.stated, self._path)
        other.__dict__["history"] = history
        other.__dict__["_scores"] = {}
        return other

    @cached_property
    def history(self) -> list[MetricRow]:
        """The measurements of all rounds."""
        return VariantDirectory(self._path).history()

    def client_scores(self, group: str, model: str, metric: str) -> np.ndarray:
        """The final values of a group's clients that have one; none where the run did not record them."""
        value_K = self._scores.get(f"{model}/{metric}")
        if value_K is None or len(value_K) != len(self._group_of_client):
            return np.array([])
        of_group_K = np.array([name == group for name in self._group_of_client])
        return value_K[of_group_K & ~np.isnan(value_K)]

    @cached_property
    def _scores(self) -> dict[str, np.ndarray]:
        path = self._path / SCORES_FILE
        return read_arrays(path) if path.exists() else {}

    @cached_property
    def _group_of_client(self) -> list[str]:
        path = self._path.parent / CLIENTS_FILE
        if not path.exists():
            return []
        with path.open(encoding="utf-8", newline="") as file:
            return [group for _, group in list(csv.reader(file))[1:]]

    @property
    def last(self) -> list[MetricRow]:
        """The measurements of the last evaluation."""
        last = max((row.round for row in self.history), default=0)
        return [row for row in self.history if row.round == last]


class StoredRun:
    """The results in a run's directory.

    Attributes:
        path: The directory.
        experiment: The name of the experiment.
        seeds: Its seeds, by key.
        settings: Its other settings, by dotted key.
        variants: Its variants that have results.
        unfinished: The names of the others.
        raw: The content of its experiment's file.
        missing: The runs of its folder that have no results, if it is the folder's first.
        identity: Equal in runs that differ in their seeds alone.

    Args:
        path: The directory.
        under_way: Reads the results so far of a run that is not finished, of finished and started variants; None: only
            finished variants count.

    Raises:
        RunError: If there are no results yet.
        DamagedRunError: If a file is damaged.
    """

    def __init__(self, path: Path, under_way: Callable[[Path], list[VariantResult]] | None = None):
        self.path, self.missing = path, list[Path]()
        check_files(path)
        self.raw = raw = _read_toml(path / EXPERIMENT_FILE)
        self.experiment = str(raw.get("name", path.name))
        self.seeds = {key: raw[key] for key in SEEDS if key in raw}
        self.identity = repr({key: raw[key] for key in sorted(raw) if key not in SEEDS})
        settings = flatten({key: raw[key] for key in raw if key not in (*SEEDS, *NAMES, "variants")})
        self.settings = {key: value for key, value in settings.items() if not key.endswith(".sha256")}
        self._changes = {row["name"]: row for row in raw.get("variants", ())}
        self._is_extended = (path / RUN_FILE).exists() and bool(read_value(path / RUN_FILE, RunInfo).extensions)
        results = self._results()
        self.unfinished = [name for name in self._changes if name not in {result.name for result in results}]
        if under_way is not None and not (path / SUMMARY_FILE).exists():
            results = under_way(path)
        if not results:
            raise _without_results(path)
        self.variants = [StoredVariant(r, *self._settings(r), path / slug(r.name)) for r in results]

    def _results(self) -> list[VariantResult]:
        if (self.path / SUMMARY_FILE).exists():
            return read_value(self.path / SUMMARY_FILE, Summary).variants
        files = [self.path / slug(name) / RESULT_FILE for name in self._changes]
        return [read_value(file, VariantResult) for file in files if file.exists()]

    def _settings(self, result: VariantResult) -> tuple[dict[str, Any], set[str]]:
        settings = self.settings | {"algorithm": result.algorithm}
        for key, value in self._changes.get(result.name, {}).items():
            prefix = {"noise": "mechanism.noise", "sampling": "mechanism.sampling"}.get(key, key)
            if key in ("training", "server", "noise", "sampling"):
                settings |= flatten(value, prefix)
            elif key == "epsilons":
                settings |= {f"mechanism.groups.{name}.epsilon": epsilon for name, epsilon in value.items()}
        stated = set(settings)
        for group in result.groups:
            prefix = f"mechanism.groups.{group.name}"
            if group.epsilon_target is not None:  # noise follows from it, in an extended run's file too
                settings[f"{prefix}.epsilon"] = group.epsilon_target
                stated = stated - {f"{prefix}.noise_multiplier"} | {f"{prefix}.epsilon"}
            if self._is_extended:
                stated -= {f"{prefix}.weight"}
            settings |= {f"{prefix}.{key}": getattr(group, key) for key in GROUP_SETTINGS}
            settings.setdefault(f"{prefix}.epsilon", group.epsilon)
        return settings, stated


class RepeatedRun:
    """Runs that differ in their seeds alone.

    Attributes:
        label: Their name in tables.
        runs: One for each seed.
    """

    def __init__(self, label: str, runs: Sequence[StoredRun]):
        self.label, self.runs = label, list(runs)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, without seeds."""
        return self.runs[0].settings

    def variants(self) -> list[list[StoredVariant]]:
        """For each variant, its results with all seeds that have one."""
        by_name: dict[str, list[StoredVariant]] = {}
        for run in self.runs:
            for variant in run.variants:
                by_name.setdefault(variant.result.name, []).append(variant)
        return list(by_name.values())


def read_runs(
    directories: Iterable[Path], under_way: Callable[[Path], list[VariantResult]] | None = None
) -> list[RepeatedRun]:
    """Read the runs in these directories; those that differ in their seeds alone are one.

    Args:
        directories: Directories of runs, of several runs, or of deployments.
        under_way: As in `StoredRun`: also reads runs that are not finished.

    Raises:
        RunError: If a directory has no run, or no results.
        DamagedRunError: If its files are damaged.
    """
    by_identity: dict[str, dict[str, list[StoredRun]]] = {}
    for directory in dict.fromkeys(directories):
        for label, run in _read_directory(directory, under_way):
            by_identity.setdefault(run.identity, {}).setdefault(label, []).append(run)
    repeated = []
    for by_label in by_identity.values():
        runs = [run for labelled in by_label.values() for run in labelled]
        if len({tuple(run.seeds.items()) for run in runs}) == len(runs):
            repeated.append(RepeatedRun(next(iter(by_label)), runs))
        else:  # the same seed twice: other noise, or the same run again
            repeated += [RepeatedRun(label, labelled) for label, labelled in by_label.items()]
    return repeated


def _read_directory(
    directory: Path, under_way: Callable[[Path], list[VariantResult]] | None
) -> list[tuple[str, StoredRun]]:
    """The runs of a directory, each with its label: the directory without the seed's part."""
    if (directory / EXPERIMENT_FILE).is_file() and not (directory / RUNS_FILE).exists():
        return [(str(directory), StoredRun(directory, under_way))]
    if not (directory / RUNS_FILE).exists():
        message = f"{directory} has no run: it has neither {EXPERIMENT_FILE} nor {RUNS_FILE}"
        raise RunError(message, "DIR", str(directory))
    paths = [directory / entry.path for entry in read_value(directory / RUNS_FILE, RunsInfo).runs]
    readable = [path for path in paths if (path / (SUMMARY_FILE if under_way is None else EXPERIMENT_FILE)).exists()]
    if under_way is not None:  # a run that has not been evaluated yet has nothing to show
        readable = [path for path in readable if any(path.glob(f"*/{HISTORY_FILE}"))]
    if not readable:
        raise _without_results(directory)
    runs = [(str(p.parent if p.name.startswith("seed-") else p), StoredRun(p, under_way)) for p in readable]
    runs[0][1].missing = [path for path in paths if path not in readable]
    return runs


def _without_results(directory: Path) -> RunError:
    hint = f"to resume it: fedhdp run --resume {directory}"
    return RunError(f"{directory} has no results yet; {hint}", "DIR", str(directory))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedRunError(f"{path} is damaged: {error}") from error


def differing_settings(runs: Sequence[RepeatedRun]) -> dict[str, list[Any]]:
    """The settings in which runs differ, each with its value in every run; None where a run does not state it."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: of_runs for key, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; a list of tables that have names is a table by name."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        value = {item["name"]: {key: part for key, part in item.items() if key != "name"} for item in value}
    if not isinstance(value, dict):
        return {prefix: value}
    parts = (flatten(item, f"{prefix}.{name}" if prefix else name) for name, item in value.items())
    return {key: leaf for part in parts for key, leaf in part.items()}
