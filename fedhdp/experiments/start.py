"""A run that begins with another run's global model, and what that model had cost.

The model's privacy is that of the run that made it: its groups' epsilons do not go away. Where both runs have the same
groups of the same population, the two are composed.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from fedhdp.errors import ConfigError, FedHDPError, RunError
from fedhdp.experiments.bases import is_same_basis
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.files import StartFrom, as_start, read_result
from fedhdp.experiments.groups import opted_out
from fedhdp.experiments.toml import read_experiment
from fedhdp.privacy.accounting import LEDGER_ACCOUNTANT, compose, format_epsilon, is_accounting_installed
from fedhdp.privacy.costs import PrivacyCost, merge_costs, scheduled_costs
from fedhdp.results.disclosure import groups_with_noise, is_covered
from fedhdp.results.models import find_variant, load_model
from fedhdp.results.schema import VariantResult
from fedhdp.results.store import (
    BASIS_FILE,
    CLIENTS_FILE,
    EXPERIMENT_FILE,
    START_FILE,
    START_MODEL_FILE,
    atomic_write,
    read_arrays,
    read_value,
    write_arrays,
    write_value,
)

Costs = dict[str, list[PrivacyCost]]


class StartCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model that a run began with had cost.

    Attributes:
        run: The run's directory.
        variant: Its variant.
        sha256: The checksum of its model.
        epsilons: Each group's epsilon in it alone; None where it is not known.
        bases: What each finite epsilon rests on.
        earlier: The directory of the run that it began with itself.
        costs: The rounds of it and of the runs before it by group, to compose; None where they cannot be composed.
        obstacle: Why they cannot be composed.
        clients_sha256: The checksum of its clients and their groups.
        repeatable: Whether its noise came from a seed, so that it was not private.
        covered: Whether its epsilons cover its model, and those of the runs before it (`results.disclosure`).
        unprotected: The groups whose clients took part in it, or in a run before it, without protection.
        same_population: Whether its clients are those of the run that began with it.
    """

    run: str
    variant: str
    sha256: str
    epsilons: dict[str, float | None]
    bases: dict[str, str]
    costs: dict[str, list[PrivacyCost]] | None = None
    obstacle: str = ""
    clients_sha256: str | None = None
    repeatable: bool = False
    earlier: str | None = None
    covered: bool = False
    unprotected: list[str] = []
    same_population: bool = True

    def covers(self, experiment: Experiment, directory: Path) -> bool:
        """Whether epsilons cover the model, also those of the clients of an experiment that is run in this directory."""
        if not self.covered or not self.same_population:
            return self.covered
        if self.obstacle or self.clients_sha256 != clients_checksum(directory):
            return not self.unprotected  # any of these clients may be in a group with noise now
        return set(self.unprotected) <= set(opted_out(experiment.mechanism))

    def notes(self, costs: Costs, experiment: Experiment, directory: Path) -> list[str]:
        """What a table says of a run in this directory with these costs."""
        spent = ", ".join(f"ε {name} = {_text(epsilon)}" for name, epsilon in self.epsilons.items())
        bases = f" ({'; '.join(f'{name}: {basis}' for name, basis in self.bases.items())})" if self.bases else ""
        scope = f" in its own rounds, after those of {self.earlier}" if self.earlier else ""
        notes = [f"began with the global model of {self.run} ({self.variant}), which had cost {spent}{scope}{bases}"]
        if self.repeatable:
            notes.append(f"{self.run} was repeatable, and therefore not private: these epsilons are as if it were not")
        obstacle = self.obstacle
        if not obstacle and self.clients_sha256 != clients_checksum(directory):
            obstacle = "the clients or their groups differ"
        if self.costs is None or obstacle:
            return [*notes, f"the epsilons of this table are of this run alone, not composed with those: {obstacle}"]
        if not is_accounting_installed():
            return notes
        totals = []
        for name, before in self.costs.items():
            delta = experiment.delta_of(name)
            total = compose([*before, *costs[name]], delta, LEDGER_ACCOUNTANT)  # chosen after the other's end
            totals.append(f"ε {name} = {_text(total)} at delta {delta:g}")
        runs = f"{'all' if self.earlier else 'both'} together, by {LEDGER_ACCOUNTANT.upper()}"
        return [*notes, f"{runs}: {', '.join(totals)}; the table's epsilons are of this run alone"]


def clients_checksum(directory: Path) -> str | None:
    """The checksum of a run's clients and their groups; None where they were not recorded."""
    path = directory / CLIENTS_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _text(epsilon: float | None) -> str:
    return "not known" if epsilon is None else format_epsilon(epsilon, 3)


def copy_start(experiment: Experiment, directory: Path) -> None:
    """Copy the model that a pinned experiment begins with into its run's directory, and record what it had cost."""
    start = as_start(experiment.start_from)
    if start is not None:
        _copy_basis(experiment, Path(start.run), directory)
        write_value(directory / START_FILE, _start_cost(experiment, start))
        write_arrays(directory / START_MODEL_FILE, load_model(start.run, start.variant))


def _copy_basis(experiment: Experiment, run: Path, directory: Path) -> None:
    """Copy the public basis that a model was trained on: on another one its parameters mean something else."""
    basis, path = getattr(experiment.model, "basis", None), run / BASIS_FILE
    trained = getattr(read_experiment(run).model, "basis", None) if path.exists() else None
    if not is_same_basis(basis, trained):
        rule = "none" if trained is None else trained.about()
        message = f"model.basis must be that of {run} ({rule}), got {'none' if basis is None else basis.about()}"
        raise ConfigError(message, "model.basis", basis)
    if trained is not None:
        atomic_write(directory / BASIS_FILE, path.read_bytes())


def read_start(directory: Path) -> tuple[dict[str, np.ndarray], StartCost]:
    """The model that a run begins with, and what it had cost."""
    return read_arrays(directory / START_MODEL_FILE), read_value(directory / START_FILE, StartCost)


def _start_cost(experiment: Experiment, start: StartFrom) -> StartCost:
    assert start.variant is not None
    assert start.sha256 is not None
    run, result = Path(start.run), read_result(find_variant(start.run, start.variant))
    epsilons = {group.name: group.epsilon for group in result.groups}
    bases = {group.name: group.epsilon_basis for group in result.groups if group.epsilon_basis is not None}
    unprotected = {group.name for group in result.groups if group.unprotected and group.rounds}
    earlier = read_value(run / START_FILE, StartCost) if (run / START_FILE).exists() else None
    raw = tomllib.loads((run / EXPERIMENT_FILE).read_text(encoding="utf-8"))
    cost = StartCost(
        start.run,
        start.variant,
        start.sha256,
        epsilons,
        bases,
        repeatable=result.repeatable,
        earlier=None if earlier is None else earlier.run,
        covered=is_covered(result, groups_with_noise(raw)),
        unprotected=sorted(unprotected | set(earlier.unprotected if earlier else ())),
    )
    try:
        previous = read_experiment(run)
        cost = replace(cost, same_population=previous.population == experiment.population)
        costs = _costs(experiment, previous, result, earlier)
        return replace(cost, costs=costs, clients_sha256=clients_checksum(run))
    except FedHDPError as error:
        return replace(cost, obstacle=str(error))


def _with_extra(costs: Sequence[PrivacyCost], rounds: int) -> list[PrivacyCost]:
    """Costs with further rounds, which of them is not known: at the least noise and the largest sampling rate."""
    noise, rate = min(cost.noise_multiplier for cost in costs), max(cost.sampling_rate for cost in costs)
    extra = costs[0]._replace(noise_multiplier=noise, sampling_rate=rate, rounds=max(rounds, 0))
    return list(merge_costs([*costs, extra]))


def _costs(experiment: Experiment, previous: Experiment, result: VariantResult, earlier: StartCost | None) -> Costs:
    """The rounds of the run that made a model, and of those before it; an error says why they cannot be composed."""
    if result.repeatable and not experiment.repeatable:
        raise RunError("the earlier run's noise came from a seed, so that it is not private")
    if previous.population != experiment.population:
        raise RunError(f"the populations differ ({previous.population}; {experiment.population})")
    groups, others = ([group.name for group in value.mechanism.groups] for value in (experiment, previous))
    if groups != others:
        raise RunError(f"the groups differ ({', '.join(others)}; {', '.join(groups)})")
    if result.stopped is not None or any(0 < group.rounds < result.rounds for group in result.groups):
        raise RunError("a budget changed the mechanism of the earlier run")
    [variant] = [value for value in previous.variants if value.name == result.name]
    previous = replace(previous, variants=(variant,))
    data = previous.load_if_needed()
    [mechanism] = previous.variant_mechanisms(previous.build_mechanism(data), data)
    extra = max(group.rounds for group in result.groups) - result.rounds  # that were run again after a crash
    scheduled = scheduled_costs(mechanism, result.rounds)
    costs = {name: _with_extra(group_costs, extra) for name, group_costs in scheduled.items()}
    for group in result.groups:
        if group.unprotected:  # also where statistics of its clients prepared the inputs, whatever its rounds cost
            costs[group.name] = [cost._replace(noise_multiplier=0.0) for cost in costs[group.name]]
    samplings = {experiment.mechanism.sampling, *(cost.sampling for of_group in costs.values() for cost in of_group)}
    if len(samplings) > 1:
        raise RunError(f"the runs sample in several ways ({', '.join(sorted(samplings))})")
    if earlier is None:
        return costs
    if earlier.costs is None:
        raise RunError(f"the earlier run is not composed with the run that it began with: {earlier.obstacle}")
    return {name: [*earlier.costs[name], *group_costs] for name, group_costs in costs.items()}
