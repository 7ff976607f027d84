"""A run on disk: write it, read it, tabulate it. The only file format.

    DIR/experiment.toml           exactly what was run; `fedhdp run DIR/experiment.toml` runs it again
    DIR/run.json                  the run's own name, under which a ledger knows it
    DIR/summary.json              what it came to; written last, so a folder with one is whole
    DIR/VARIANT/history.csv       round, group, model, metric, value; appended as the run goes
    DIR/VARIANT/checkpoint.npz    where to go on; gone when the variant is done
    DIR/VARIANT/model.npz         the final global model (and its average), by parameter
    DIR/VARIANT/result.json       the variant's part of the summary

Every file but the history is written whole under another name and moved into place. A history may end in a torn line or
in rounds that the checkpoint does not know: both are dropped when the run goes on.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import re
import secrets
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedhdp.metrics import SERVER, Row

EXPERIMENT, SUMMARY, LOCK = "experiment.toml", "summary.json", ".lock"
RUN = "run.json"
HISTORY, CHECKPOINT, MODEL, RESULT = "history.csv", "checkpoint.npz", "model.npz", "result.json"


class RunName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name under which a ledger knows the run."""

    id: str


class GroupResult(msgspec.Struct, forbid_unknown_fields=True):
    """What one group got, and what it paid."""

    name: str
    clients: int
    opted_out: bool
    noise_multiplier: float
    sampling_rate: float
    weight: float
    pull: float
    global_accuracy: float | None = None
    global_variance: float | None = None
    global_worst_decile: float | None = None
    personal_accuracy: float | None = None
    personal_variance: float | None = None
    personal_worst_decile: float | None = None
    average_accuracy: float | None = None
    rounds: int = 0  # in which its clients could be drawn
    epsilon: float | None = None  # None: opted out, which is infinity, or not known
    epsilon_pld: float | None = None
    delta: float | None = None
    epsilon_basis: str | None = None  # what the epsilons rest on
    refused: int = 0


class VariantResult(msgspec.Struct, forbid_unknown_fields=True):
    """What one variant of an experiment came to."""

    name: str
    algorithm: str
    rounds: int
    seconds: float
    repeatable: bool  # noise from a given seed: can be run again to the bit, and is therefore not private
    groups: list[GroupResult]
    server_accuracy: float | None = None
    server_average_accuracy: float | None = None
    clip: float | None = None
    stopped: str | None = None  # why it ended before its last round


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    """What an experiment came to."""

    experiment: str
    seconds: float
    variants: list[VariantResult]
    version: str = ""


class DamagedRun(ValueError):
    """A run folder that cannot be read."""


def slug(name: str) -> str:
    """A name as a folder's name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "run"


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that it is never seen half-written, even after a crash."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as one whole file."""
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    write_whole(path, content.getbuffer())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read named arrays back; a damaged file is refused."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedRun(f"{path} is damaged: {error}") from error


def write_value(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_value(path: Path, kind: type) -> Any:
    """Read a value back from JSON; a damaged file is refused."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedRun(f"{path} is damaged: {error}") from error


class RunFolder:
    """A folder that holds one run, locked while somebody writes to it."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = open(path / LOCK, "w")  # noqa: SIM115 (kept open: closing it gives the lock up)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{path} is being written by another process") from error
        self.id = read_value(path / RUN, RunName).id

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @classmethod
    def create(cls, path: Path, experiment_toml: bytes) -> RunFolder:
        """A new run in an empty or a new folder."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            hint = f"; to go on with it: fedhdp run --resume {path}" if (path / EXPERIMENT).exists() else ""
            raise ValueError(f"--out {path} is not an empty folder{hint}")
        path.mkdir(parents=True, exist_ok=True)
        write_value(path / RUN, RunName(f"{path.name}-{secrets.token_hex(4)}"))
        write_whole(path / EXPERIMENT, experiment_toml)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run that was begun before."""
        if not (path / EXPERIMENT).is_file():
            raise DamagedRun(f"{path} holds no run: there is no {EXPERIMENT} in it")
        return cls(path)

    def variant(self, name: str) -> VariantFolder:
        """The part of one variant."""
        path = self.path / slug(name)
        path.mkdir(exist_ok=True)
        return VariantFolder(path)


class VariantFolder:
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

    def keep_checkpoint(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Remember where to go on."""
        write_arrays(self.path / CHECKPOINT, arrays)

    def history(self, until: int | None = None) -> list[Row]:
        """The measurements up to a round; a torn last line is no line."""
        path = self.path / HISTORY
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        rows = []
        for number, line in enumerate(csv.reader(lines[1:]), start=2):
            try:
                round, group, model, metric, value = line
                row = Row(int(round), group, model, metric, float(value))
            except ValueError as error:
                raise DamagedRun(f"{path}, line {number} is damaged: {line}") from error
            if until is None or row.round <= until:
                rows.append(row)
        return rows

    def restart_history(self, rows: Iterable[Row]) -> None:
        """Begin the history anew with these measurements."""
        write_whole(self.path / HISTORY, (",".join(Row._fields) + "\n" + _lines(rows)).encode())

    def append_history(self, rows: Iterable[Row]) -> None:
        """Add measurements, all or none."""
        with open(self.path / HISTORY, "a") as file:
            file.write(_lines(rows))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, model: Mapping[str, np.ndarray], result: VariantResult) -> None:
        """Keep the model and the result; the checkpoint is not needed any more."""
        write_arrays(self.path / MODEL, model)
        write_value(self.path / RESULT, result)
        (self.path / CHECKPOINT).unlink(missing_ok=True)


def _lines(rows: Iterable[Row]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((*row[:4], repr(row.value)) for row in rows)
    return text.getvalue()


def fill_in(result: VariantResult, history: Iterable[Row]) -> VariantResult:
    """The result with the measurements of the last evaluated round."""
    rows = list(history)
    last = max((row.round for row in rows), default=0)
    found = {(row.group, row.model, row.metric): row.value for row in rows if row.round == last}
    result.server_accuracy = found.get((SERVER, "global", "accuracy"))
    result.server_average_accuracy = found.get((SERVER, "average", "accuracy"))
    result.clip = found.get((SERVER, "global", "clip"))
    for group in result.groups:
        for model in ("global", "personal"):
            for metric in ("accuracy", "variance", "worst_decile"):
                setattr(group, f"{model}_{metric}", found.get((group.name, model, metric)))
        group.average_accuracy = found.get((group.name, "average", "accuracy"))
        group.refused = int(found.get((group.name, "global", "refused"), 0))
    return result


def table(variants: list[VariantResult], variances: bool = True) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of a table in the paper's columns: percentages, with the variance in parentheses.

    Acc_g is on the server's test set; then each group's clients on their own, with the global model (g) and with their
    personal models (l). With two groups, Δ is what the less private gain over the more private. As in the paper, a
    variance is that of accuracies as fractions, times 100.
    """
    names = [group.name for group in variants[0].groups]
    personal = any(group.personal_accuracy is not None for variant in variants for group in variant.groups)
    models = [("g", "global")] + ([("l", "personal")] if personal else [])
    header = ["algorithm", "Acc_g"]
    for short, _ in models:
        header += [f"{short}: {name}" for name in reversed(names)] + ([f"Δ_{short}"] if len(names) == 2 else [])
    header += [f"ε {name}" for name in reversed(names)]
    rows = []
    for variant in variants:
        cells = [variant.name, _percent(variant.server_accuracy)]
        for _, model in models:
            accuracy = [getattr(group, f"{model}_accuracy") for group in variant.groups]
            variance = [getattr(group, f"{model}_variance") if variances else None for group in variant.groups]
            cells += [_percent(a, v) for a, v in zip(reversed(accuracy), reversed(variance))]
            if len(names) == 2:
                known = None not in accuracy
                cells.append(_percent(accuracy[0] - accuracy[1]) if known else "–")
        rows.append(cells + [_epsilon(group) for group in reversed(variant.groups)])
    return header, rows


def footnotes(variants: list[VariantResult]) -> list[str]:
    """What the epsilons rest on, and what else a reader of the table must know."""
    lines: dict[str, list[str]] = {}
    for variant in variants:
        for group in variant.groups:
            if group.epsilon is not None:
                pld = "" if group.epsilon_pld is None else f", by PLD {group.epsilon_pld:.3f}"
                said = f"ε {group.name} = {group.epsilon:.3f}{pld}: {group.epsilon_basis}"
                lines.setdefault(said, []).append(variant.name)
    notes = [f"{said} [{', '.join(names)}]" for said, names in lines.items()]
    for variant in variants:
        refused = sum(group.refused for group in variant.groups)
        notes += [f"{variant.name}: stopped after {variant.rounds} rounds: {variant.stopped}"] if variant.stopped else []
        notes += [f"{variant.name}: {refused} updates were not finite and were refused"] if refused else []
    if any(variant.repeatable for variant in variants):
        notes.append("the noise came from a given seed: repeatable, and therefore not private")
    return notes


def text_table(variants: list[VariantResult]) -> str:
    """The table as plain text."""
    header, rows = table(variants)
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = [header, ["─" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def _percent(value: float | None, variance: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.2f}" + ("" if variance is None else f" ({100 * variance:.2f})")


def _epsilon(group: GroupResult) -> str:
    if group.opted_out:
        return "∞"
    return "–" if group.epsilon is None else f"{group.epsilon:.2f}"
