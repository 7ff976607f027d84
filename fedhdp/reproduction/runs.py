"""Read a table's runs: the numbers of every row and seed, and the epsilons of every group.

Numbers are percentages under the paper's column names: ``acc_g`` is the global model on the server's test set; ``acc_g_p``
and ``acc_l_np`` are private clients with the global and opted-out clients with their personal models; ``var_…`` is the
variance across clients (of fractions, times 100); ``delta_…`` is opted-out minus private. Groups that the paper does not
have keep their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from fedhdp.errors import RunError
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.presets import OPTED_OUT, PRIVATE
from fedhdp.experiments.toml import from_toml
from fedhdp.mechanism import ScheduledMechanism, mechanism_at
from fedhdp.privacy.accounting import compose, is_accounting_installed
from fedhdp.privacy.costs import privacy_costs, scheduled_costs
from fedhdp.reproduction.extensions import EXTENSIONS, Extension
from fedhdp.reproduction.levels import LEVEL_TABLES
from fedhdp.reproduction.runner import MACHINE, SUPPLEMENT, Machine, incompatible_fields
from fedhdp.reproduction.tables import pull_label
from fedhdp.results import store
from fedhdp.results.schema import GroupResult, Summary, VariantResult, account_groups

GROUP_CODES = {PRIVATE: "p", OPTED_OUT: "np"}
POOLED_CODES = {"non_private": "np", "dp_fedavg": "p"}  # the paper has one column for all clients of these
CHOSEN = "chosen"  # in place of a pull: each client chose its own


class FinishedRun(NamedTuple):
    """A part of a table, run to its last round."""

    seed: int
    part: str
    experiment: Experiment
    summary: Summary
    machine: Machine | None


class LineKey(msgspec.Struct, frozen=True, order=True):
    """What identifies a line of a table; without a pull it is of the global model."""

    part: str
    row: str  # its label
    algorithm: str
    weight: float | None
    pull: float | str | None


class GroupCost(msgspec.Struct, frozen=True):
    """The epsilon of a group in some rows."""

    part: str
    rows: tuple[str, ...]
    group: str
    epsilon: float | None  # by the run's accountant; None: not known
    basis: str
    poisson_epsilon: float | None  # by RDP, with Poisson sampling and the same noise, if the run had other sampling
    accountant: str | None = None  # of the epsilon


def read_runs(out: Path, table: str) -> tuple[list[FinishedRun], list[str]]:
    """Read the runs of a table.

    Returns:
        The finished runs, and the names of the unfinished ones.

    Raises:
        RunError: If a run is not of this table, or cannot be in one table with the others.
    """
    finished, unfinished, first_of_part = [], [], dict[str, Experiment]()
    for path in sorted(out.glob(f"seed-*/*/{store.EXPERIMENT_FILE}"), key=_run_order):
        folder = path.parent
        experiment = from_toml(path.read_text(encoding="utf-8"), str(path))
        part = folder.name.partition(SUPPLEMENT)[0]
        if experiment.name != f"{table}/{part}":
            raise RunError(f"{folder} has {experiment.name!r}, not a part of {table}", "--out", out)
        first_of_part.setdefault(part, experiment)
        for other in (first_of_part[part], *list(first_of_part.values())[:1]):
            if fields := incompatible_fields(experiment, other):
                difference = f"{', '.join(fields)} differ from {other.name} of seed {other.seed}"
                raise RunError(f"{folder} and the rest of {out} cannot be one table: {difference}", fields[0], folder)
        if not (folder / store.SUMMARY_FILE).exists():
            unfinished.append(f"{folder.parent.name}/{folder.name}")
            continue
        machine = store.read_value(folder / MACHINE, Machine) if (folder / MACHINE).exists() else None
        summary = store.read_value(folder / store.SUMMARY_FILE, Summary)
        finished.append(FinishedRun(_seed_of(path), part, experiment, summary, machine))
    return finished, unfinished


def run_directories(out: Path) -> list[Path]:
    """The directories of a table's finished runs, in the table's order."""
    paths = sorted(out.glob(f"seed-*/*/{store.EXPERIMENT_FILE}"), key=_run_order)
    return [path.parent for path in paths if (path.parent / store.SUMMARY_FILE).exists()]


def commands_of(directories: Iterable[Path]) -> list[str]:
    """The commands that made runs of a table."""
    files = [path / MACHINE for path in directories if (path / MACHINE).exists()]
    return list(dict.fromkeys(store.read_value(file, Machine).command for file in files))


def _seed_of(path: Path) -> int:
    number = path.parent.parent.name.removeprefix("seed-")
    if not number.isdigit():
        raise RunError(f"seed directories must be named seed-N, got {path.parent.parent}", "--out", path)
    return int(number)


def _run_order(path: Path) -> tuple:
    return _seed_of(path), part_order(path.parent.name)


def part_order(part: str) -> tuple[int, str]:
    """A sort key: the paper's rows first, then extensions in the order of their definition."""
    names = ["paper", *EXTENSIONS, *LEVEL_TABLES]
    name = part.partition(SUPPLEMENT)[0]
    return (names.index(name) if name in names else len(names)), part


def read_lines(run: FinishedRun) -> dict[LineKey, dict[str, float]]:
    """The numbers of a run by line and column; the global model of several pulls has the mean of their numbers."""
    measured = {name: ext for name, ext in EXTENSIONS.items() if (ext.measured_in or name) == run.part}
    if run.experiment.name.startswith("levels/"):
        measured = {run.part: Extension("", averaged=LEVEL_TABLES[run.part].on_basis)}
    elif run.part == "paper" or not measured:
        measured = {run.part: Extension("")}
    lines: dict[LineKey, list[dict[str, float]]] = {}
    for name, extension in measured.items():
        for variant in run.summary.variants:
            for key, values in _lines_of_variant(name, variant, extension.averaged).items():
                if values and (key.pull is None or extension.measured_in is None):
                    lines.setdefault(key, []).append(values)
    return {key: column_means(values) for key, values in lines.items()}


def _lines_of_variant(part: str, variant: VariantResult, averaged: bool) -> dict[LineKey, dict[str, float]]:
    """The lines of the global model, of the variant's pull, and of the pulls that clients chose."""
    key, pulls = _line_key(part, variant), [group.pull for group in variant.groups]
    average = variant.value("accuracy", "average")
    server_columns = _percent("acc_g", average if averaged else variant.server_accuracy) | _percent("average", average)
    lines = {key: server_columns | _columns(variant, "g", "average" if averaged else "global")}
    if len(set(pulls)) == 1:
        lines[replace(key, pull=pulls[0])] = _columns(variant, "l", "personal")
    elif len(pulls) == 2:
        lines[replace(key, pull=pull_label((pulls[0], pulls[1])))] = _columns(variant, "l", "personal")
    lines[replace(key, pull=CHOSEN)] = _columns(variant, "l", "chosen")
    return lines


def _line_key(part: str, variant: VariantResult) -> LineKey:
    label = variant.name.rpartition(", λ=")[0] or variant.name
    weight = variant.groups[1].weight if variant.algorithm == "fedhdp" and len(variant.groups) == 2 else None
    if part in EXTENSIONS:
        label = part if weight is None else f"{part} r={weight:g}"
    elif part in LEVEL_TABLES:
        label = f"{part}: {label}"
    return LineKey(part, label, variant.algorithm, weight, None)


def _columns(variant: VariantResult, letter: str, model: str) -> dict[str, float]:
    """Accuracies, variances and the gain of opting out, with one of the models."""
    groups = [group for group in variant.groups if group.value("accuracy", model) is not None]
    if len(variant.groups) == 2 and variant.algorithm in POOLED_CODES and len(groups) == 2:
        return _pooled(groups, f"{letter}_{POOLED_CODES[variant.algorithm]}", model)
    columns: dict[str, float] = {}
    for group in groups:
        name = f"{letter}_{GROUP_CODES.get(group.name, group.name)}"
        columns |= _percent(f"acc_{name}", group.value("accuracy", model))
        columns |= _percent(f"var_{name}", group.value("accuracy_variance", model))
        columns |= _percent(f"worst_{name}", group.value("accuracy_worst_decile", model))
    if {f"acc_{letter}_np", f"acc_{letter}_p"} <= columns.keys() and len(groups) == 2:
        columns[f"delta_{letter}"] = columns[f"acc_{letter}_np"] - columns[f"acc_{letter}_p"]
    return columns


def _pooled(groups: list[GroupResult], name: str, model: str) -> dict[str, float]:
    """All clients as one group: the mean, and the variance within and between groups."""
    accuracies = [group.values[f"{model}/accuracy"] for group in groups]
    variances = [group.value("accuracy_variance", model) for group in groups]
    shares = [group.clients / sum(group.clients for group in groups) for group in groups]
    mean = sum(share * accuracy for share, accuracy in zip(shares, accuracies, strict=True))
    columns = _percent(f"acc_{name}", mean)
    if None not in variances:
        within = sum(share * float(variance or 0.0) for share, variance in zip(shares, variances, strict=True))
        between = sum(share * (accuracy - mean) ** 2 for share, accuracy in zip(shares, accuracies, strict=True))
        columns |= _percent(f"var_{name}", within + between)
    return columns


def _percent(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: 100 * value}


def values_by_column(lines: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    """The numbers of each column over the lines that have it."""
    values: dict[str, list[float]] = {}
    for line in lines:
        for column, value in line.items():
            values.setdefault(column, []).append(value)
    return values


def column_means(lines: Iterable[dict[str, float]]) -> dict[str, float]:
    """The mean of each column over the lines that have it."""
    return {column: sum(values) / len(values) for column, values in values_by_column(lines).items()}


def group_costs(runs: Iterable[FinishedRun]) -> list[GroupCost]:
    """The epsilons of each group of each part, once for all rows and seeds with the same ones."""
    rows: dict[GroupCost, list[str]] = {}
    for run in runs:
        known = all(group.epsilon is not None or group.unprotected for v in run.summary.variants for group in v.groups)
        mechanisms: list[ScheduledMechanism | None] = [None] * len(run.summary.variants)
        if is_accounting_installed() and not (known and run.experiment.mechanism.sampling == "poisson"):
            mechanisms = [*run.experiment.variant_mechanisms(run.experiment.build_mechanism())]
        for mechanism, result in zip(mechanisms, run.summary.variants, strict=True):
            for cost in _variant_costs(run, mechanism, result):
                rows.setdefault(cost, []).append(_line_key(run.part, result).row)
    return [replace(cost, rows=tuple(dict.fromkeys(labels))) for cost, labels in rows.items()]


def _variant_costs(run: FinishedRun, schedule: ScheduledMechanism | None, result: VariantResult) -> list[GroupCost]:
    """The epsilons of a variant, computed here if the run had no accountant; without a schedule those that it had."""
    groups, costs, poisson = result.groups, [], {}
    if schedule is not None:
        spent, mechanism = scheduled_costs(schedule, result.rounds), mechanism_at(schedule, 0)
        if mechanism.sampling == "fixed":
            poisson = privacy_costs(replace(mechanism, sampling="poisson"), result.rounds)
        if any(group.epsilon is None and not group.unprotected for group in groups):
            delta_of, accountant = run.experiment.delta_of, run.experiment.run_accountant
            groups = account_groups(mechanism, lambda name: spent[name], delta_of, accountant)
    for group in groups:
        if group.unprotected:
            continue
        basis, poisson_epsilon = group.epsilon_basis or "not known without dp-accounting", None
        if group.name in poisson:
            poisson_epsilon = compose([poisson[group.name]], run.experiment.delta_of(group.name), "rdp")
        costs.append(GroupCost(run.part, (), group.name, group.epsilon, basis, poisson_epsilon, group.accountant))
    return costs
