"""What the runs of a table came to, read from their folders: every row's numbers, seed by seed, and their prices.

Numbers are percentages under the paper's names of its columns: ``acc_g`` on the server's test set, ``acc_g_p`` and
``acc_l_np`` of private clients with the global and of opted-out ones with their personal models, ``var_…`` the variance
across clients (of fractions, times 100), ``delta_…`` what opting out gains. A group that the paper has not is under its
own name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from fedhdp.experiments.config import Experiment, from_toml
from fedhdp.experiments.presets import OPTED_OUT, PRIVATE
from fedhdp.mechanism import Mechanism
from fedhdp.privacy.accounting import compose, is_accounting_installed, privacy_costs
from fedhdp.reproduction.extensions import LEVELS, OURS, Own
from fedhdp.reproduction.runner import MACHINE, MORE, Machine, mixed
from fedhdp.results import store as results
from fedhdp.results.schema import GroupResult, Summary, VariantResult, account_groups

SHORT = {PRIVATE: "p", OPTED_OUT: "np"}
EVERYBODY = {"non_private": "np", "dp_fedavg": "p"}  # the paper has one column for all clients of these
CHOSEN = "chosen"  # in place of a pull: each client chose its own


class Run(NamedTuple):
    """A part of a table, run to its end."""

    seed: int
    part: str
    experiment: Experiment
    summary: Summary
    machine: Machine | None


class Key(msgspec.Struct, frozen=True, order=True):
    """Which line of a table a number is in; without a pull it is of the global model."""

    part: str
    row: str  # as it is shown
    algorithm: str
    weight: float | None
    pull: float | str | None


class Priced(msgspec.Struct, frozen=True):
    """What a group paid in some rows."""

    part: str
    rows: tuple[str, ...]
    group: str
    epsilon: float | None  # by Renyi accounting, for the sampling that was run; None: not known
    epsilon_pld: float | None
    basis: str
    poisson: float | None  # what Poisson sampling would have cost at the same noise, where it is not what was run
    poisson_pld: float | None


def read_runs(out: Path, table: str) -> tuple[list[Run], list[str]]:
    """The parts of a table that are done, and the names of those that are not."""
    found, unfinished, first_of = [], [], dict[str, Experiment]()
    for path in sorted(out.glob(f"seed-*/*/{results.EXPERIMENT_FILE}"), key=lambda path: _order(*_place(path))):
        folder = path.parent
        experiment = from_toml(path.read_text(encoding="utf-8"), str(path))
        part = folder.name.partition(MORE)[0]
        if experiment.name != f"{table}/{part}":
            raise ValueError(f"{folder} holds {experiment.name!r}, not a part of {table}")
        first_of.setdefault(part, experiment)
        for other in (first_of[part], *list(first_of.values())[:1]):
            if differing := mixed(experiment, other):
                said = f"{', '.join(differing)} differ from what {other.name} of seed {other.seed} has"
                raise ValueError(f"{folder} cannot stand in one table with the rest of {out}: {said}")
        if not (folder / results.SUMMARY_FILE).exists():
            unfinished.append(f"{folder.parent.name}/{folder.name}")
            continue
        machine = results.read_value(folder / MACHINE, Machine) if (folder / MACHINE).exists() else None
        summary = results.read_value(folder / results.SUMMARY_FILE, Summary)
        found.append(Run(_place(path)[0], part, experiment, summary, machine))
    return found, unfinished


def _place(path: Path) -> tuple[int, str]:
    number = path.parent.parent.name.removeprefix("seed-")
    if not number.isdigit():
        raise ValueError(f"{path.parent.parent} is no folder of a seed")
    return int(number), path.parent.name


def part_order(part: str) -> tuple[int, str]:
    """The paper's rows first, then ours as they are written down."""
    known = ["paper", *OURS, *LEVELS]
    name = part.partition(MORE)[0]
    return (known.index(name) if name in known else len(known)), part


def _order(seed: int, part: str) -> tuple:
    return seed, part_order(part)


def numbers(run: Run) -> dict[Key, dict[str, float]]:
    """Every line that a run has; where variants differ in the pull alone, the global model's numbers are their mean."""
    models = {name: own for name, own in OURS.items() if (own.read_from or name) == run.part}
    if run.part == "paper" or not models or run.experiment.name.startswith("levels/"):
        models = {run.part: Own("")}
    found: dict[Key, list[dict[str, float]]] = {}
    for name, own in models.items():
        for variant in run.summary.variants:
            for key, values in _lines(name, variant, own.averaged).items():
                if values and (key.pull is None or own.read_from is None):
                    found.setdefault(key, []).append(values)
    return {key: mean_of(values) for key, values in found.items()}


def _lines(part: str, variant: VariantResult, averaged: bool) -> dict[Key, dict[str, float]]:
    """The lines of one variant: the global model's, its pull's, and that of the pulls that clients chose."""
    key, pulls = _key(part, variant), {group.pull for group in variant.groups}
    pull = pulls.pop() if len(pulls) == 1 else None
    server = variant.server_average_accuracy if averaged else variant.server_accuracy
    shared = _percent("acc_g", server) | _percent("average", variant.server_average_accuracy)
    lines = {key: shared | _columns(variant, "g", "average" if averaged else "global")}
    if pull is not None:
        lines[replace(key, pull=pull)] = _columns(variant, "l", "personal")
    lines[replace(key, pull=CHOSEN)] = _columns(variant, "l", "chosen")
    return lines


def _key(part: str, variant: VariantResult) -> Key:
    name = variant.name.rpartition(", λ=")[0] or variant.name
    weight = variant.groups[1].weight if variant.algorithm == "fedhdp" and len(variant.groups) == 2 else None
    own = part in OURS and weight is not None
    shown = f"{part} r={weight:g}" if own else f"{part}: {name}" if part in LEVELS else name
    return Key(part, shown, variant.algorithm, weight, None)


def _columns(variant: VariantResult, letter: str, model: str) -> dict[str, float]:
    """Accuracies, variances and what opting out gains, with one of the models."""
    groups = [group for group in variant.groups if getattr(group, f"{model}_accuracy") is not None]
    found: dict[str, float] = {}
    if len(variant.groups) == 2 and variant.algorithm in EVERYBODY and len(groups) == 2:
        return _pooled(groups, f"{letter}_{EVERYBODY[variant.algorithm]}", model)
    for group in groups:
        name = f"{letter}_{SHORT.get(group.name, group.name)}"
        found |= _percent(f"acc_{name}", getattr(group, f"{model}_accuracy"))
        found |= _percent(f"var_{name}", getattr(group, f"{model}_variance", None))
    if {f"acc_{letter}_np", f"acc_{letter}_p"} <= found.keys() and len(groups) == 2:
        found[f"delta_{letter}"] = found[f"acc_{letter}_np"] - found[f"acc_{letter}_p"]
    return found


def _pooled(groups: list[GroupResult], name: str, model: str) -> dict[str, float]:
    """All clients as one group: the mean over them, and the variance within groups and between."""
    total = sum(group.clients for group in groups)
    mean = sum(group.clients * getattr(group, f"{model}_accuracy") for group in groups) / total
    found = _percent(f"acc_{name}", mean)
    spread = [getattr(group, f"{model}_variance", None) for group in groups]
    if all(variance is not None for variance in spread):
        within = sum(group.clients * float(variance or 0.0) for group, variance in zip(groups, spread)) / total
        between = sum(g.clients * (getattr(g, f"{model}_accuracy") - mean) ** 2 for g in groups) / total
        found |= _percent(f"var_{name}", within + between)
    return found


def _percent(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: 100 * value}


def mean_of(lines: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each column over the lines that have it."""
    columns = dict.fromkeys(column for line in lines for column in line)
    values = {column: [line[column] for line in lines if column in line] for column in columns}
    return {column: sum(found) / len(found) for column, found in values.items()}


def priced(runs: Iterable[Run]) -> list[Priced]:
    """What each group of each part paid, told once for all rows and seeds that paid the same."""
    rows: dict[Priced, list[str]] = {}
    for run in runs:
        promised = run.experiment.mechanism.build(run.experiment.rounds, run.experiment.delta)
        for variant, result in zip(run.experiment.variants, run.summary.variants):
            for one in _prices(run, variant.mechanism(promised), result):
                rows.setdefault(one, []).append(_key(run.part, result).row)
    return [replace(one, rows=tuple(dict.fromkeys(names))) for one, names in rows.items()]


def _prices(run: Run, mechanism: Mechanism, result: VariantResult) -> list[Priced]:
    """What the groups of a variant paid; a run made without an accountant is priced here, where there is one."""
    groups, spent, found = result.groups, privacy_costs(mechanism, result.rounds), []
    poisson = privacy_costs(replace(mechanism, sampling="poisson"), result.rounds)
    if is_accounting_installed() and any(group.epsilon is None and not group.unprotected for group in groups):
        groups = account_groups(mechanism, lambda name: [spent[name]], run.experiment.delta_of)
    for group in groups:
        if group.unprotected:
            continue
        paid = (group.epsilon, group.epsilon_pld, group.epsilon_basis or "not known without dp-accounting")
        other: tuple[float | None, float | None] = (None, None)
        if is_accounting_installed() and mechanism.sampling == "fixed":
            delta = run.experiment.delta_of(group.name)
            other = (compose([poisson[group.name]], delta), compose([poisson[group.name]], delta, "pld"))
        found.append(Priced(run.part, (), group.name, *paid, *other))
    return found
