"""A run with more rounds than it was started with, or with fewer: its noise stays, so its epsilons change.

Noise that was calibrated for 500 rounds keeps a smaller promise over 800. So the experiment of an extended run states noise
multipliers and weights, as they were calibrated, and no epsilons.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from fedhdp.data import FederatedData
from fedhdp.errors import RunError, require
from fedhdp.experiments.batch import Watch
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.runner import run_variants
from fedhdp.experiments.toml import read_experiment, to_toml
from fedhdp.experiments.variant import Variant
from fedhdp.mechanism import Mechanism, ScheduledMechanism, mechanism_at
from fedhdp.privacy.accounting import compose, format_epsilon, is_accounting_installed, pluralize
from fedhdp.privacy.costs import scheduled_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.schema import Summary
from fedhdp.results.store import Extension, RunDirectory

Targets = dict[str, dict[str, float]]  # the epsilons that groups asked for, by variant


def extend(
    out: Path,
    rounds: int,
    watch: Watch,
    allow_more_epsilon: bool = False,
    cohort_entropy: np.ndarray | None = None,
) -> Summary:
    """Run the run in a directory until it has this many rounds, from its last checkpoint and with the same mechanism.

    With a ledger each further round is charged, and budgets end the run as they would have.

    Args:
        out: The directory of a finished or an interrupted run.
        rounds: The number of rounds that it is to have, those completed included.
        watch: Called with the progress after every round; False interrupts the run.
        allow_more_epsilon: Whether a group may have a larger epsilon than the one that it asked for. Without it only
            groups with a budget in the ledger may, which the budget bounds.
        cohort_entropy: As in `fedhdp.experiments.run`.

    Raises:
        RunError: If the run has more rounds already, has kept no checkpoint, or a group would have a larger epsilon than
            it asked for.
    """
    with RunDirectory.open(out) as directory:
        experiment = read_experiment(out)
        data = experiment.load_if_needed()
        extended, extension = _extended(directory, experiment, data, rounds, allow_more_epsilon)
        if rounds != experiment.rounds:
            directory.extend(to_toml(extended).encode(), extension)
        return run_variants(extended, extended.build_mechanism(data), directory, watch, cohort_entropy, data)


def check_extension(out: Path, rounds: int, allow_more_epsilon: bool = False) -> None:
    """Refuse what `extend` would refuse, and change nothing; the arguments are those of `extend`."""
    with RunDirectory.open(out) as directory:
        experiment = read_experiment(out)
        _extended(directory, experiment, experiment.load_if_needed(), rounds, allow_more_epsilon)


def _extended(
    directory: RunDirectory, experiment: Experiment, data: FederatedData | None, rounds: int, allow_more_epsilon: bool
) -> tuple[Experiment, Extension]:
    """The experiment with other rounds, and what its run's directory records of the change."""
    require(rounds >= 1, "rounds", rounds, "at least 1")
    if rounds == experiment.rounds:
        return experiment, Extension(rounds)
    _check_checkpoints(experiment, directory, rounds)
    mechanism, previous = experiment.build_mechanism(data), directory.extensions
    mechanisms = experiment.variant_mechanisms(mechanism, data)
    targets = previous[-1].epsilon_targets if previous else _targets(experiment, mechanisms)
    extended = _state_mechanism(experiment, mechanism, rounds, data)
    if rounds > experiment.rounds and not allow_more_epsilon:
        _check_epsilons(extended, mechanisms, targets, previous[0].rounds if previous else experiment.rounds)
    return extended, Extension(experiment.rounds, targets)


def _check_checkpoints(experiment: Experiment, directory: RunDirectory, rounds: int) -> None:
    """Refuse a run whose finished variants have no checkpoint, or which has more rounds already."""
    parts = {variant.name: directory.variant(variant.name) for variant in experiment.variants}
    checkpoints = [part.checkpoint_variants() for part in parts.values()]
    kept = {name for _, names in checkpoints for name in names}
    for name, part in parts.items():
        if part.result() is not None and name not in kept:
            hint = "set keep_checkpoint = true before the run is started"
            raise RunError(f"{part.path} has no checkpoint to continue from: {hint}", "keep_checkpoint", False)
    completed = max((round for round, _ in checkpoints), default=0)
    if rounds < completed:
        raise RunError(
            f"rounds must be at least the {completed} that {directory.path} has, got {rounds}", "rounds", rounds
        )


def _state_mechanism(
    experiment: Experiment, mechanism: Mechanism, rounds: int, data: FederatedData | None = None
) -> Experiment:
    """The experiment with other rounds, in which every group states its noise and weight as they were run.

    Raises:
        RunError: If its variants would be run with other mechanisms.
    """
    config = experiment.mechanism
    groups = tuple(
        replace(group_config, epsilon=None, noise_multiplier=group.noise_multiplier, weight=group.weight)
        for group_config, group in zip(config.groups, mechanism.groups, strict=True)
    )
    as_fedhdp = replace(
        experiment, variants=tuple(replace(v, algorithm="fedhdp", options={}) for v in experiment.variants)
    )
    variants = tuple(
        _state_variant(variant, mechanism, mechanism_at(changed, 0))
        for variant, changed in zip(experiment.variants, as_fedhdp.variant_mechanisms(mechanism, data), strict=True)
    )
    extended = replace(experiment, rounds=rounds, mechanism=replace(config, groups=groups), variants=variants)
    same = extended.variant_mechanisms(extended.build_mechanism(data), data)
    if same != experiment.variant_mechanisms(mechanism, data):
        raise RunError("rounds cannot be changed: the mechanism depends on them", "rounds", rounds)
    return extended


def _state_variant(variant: Variant, base: Mechanism, changed: Mechanism) -> Variant:
    """The variant that states every noise multiplier and weight in which it differs from the base."""
    changes: dict[str, Any] = {"epsilons": {}}
    for field, name in (("noise_multipliers", "noise_multiplier"), ("weights", "weight")):
        pairs = zip(base.groups, changed.groups, strict=True)
        values = {
            group.name: getattr(group, name) for old, group in pairs if getattr(old, name) != getattr(group, name)
        }
        changes[field] = values | getattr(variant, field)  # what the variant states stays, schedules too
    return replace(variant, **changes)


def _targets(experiment: Experiment, mechanisms: Sequence[ScheduledMechanism]) -> Targets:
    """The epsilons that groups asked for and that the run as it was started keeps."""
    targets: Targets = {}
    for variant, changed in zip(experiment.variants, mechanisms, strict=True):
        epsilons = _epsilons(experiment, changed)
        of_variant = experiment.epsilon_targets(variant)
        targets[variant.name] = {
            name: target for name, target in of_variant.items() if epsilons.get(name, 0.0) <= target
        }
    return targets


def _check_epsilons(
    extended: Experiment, mechanisms: Sequence[ScheduledMechanism], targets: Targets, first: int
) -> None:
    """Refuse rounds after which a group without a budget has a larger epsilon than it asked for."""
    budgets = _budgets(extended)
    if any(targets.values()) and not is_accounting_installed():
        message = f"rounds = {extended.rounds}: epsilons need dp-accounting: pip install dp-accounting"
        raise RunError(f"{message}; --allow-more-epsilon does without", "rounds", extended.rounds)
    for variant, mechanism in zip(extended.variants, mechanisms, strict=True):
        epsilons = _epsilons(extended, mechanism)
        for name, target in targets.get(variant.name, {}).items():
            if epsilons.get(name, 0.0) > target and name not in budgets:
                spent = f"would have {format_epsilon(epsilons[name], 2)} with noise for {pluralize(first)}"
                message = (
                    f"rounds = {extended.rounds}: {name} asked for epsilon {target:g} and {spent} ({variant.name})"
                )
                raise RunError(f"{message}; --allow-more-epsilon accepts that", "rounds", extended.rounds)


def _epsilons(experiment: Experiment, mechanism: ScheduledMechanism) -> dict[str, float]:
    """Each group's epsilon after all rounds; empty where it cannot be computed."""
    if not is_accounting_installed():
        return {}
    costs, accountant = scheduled_costs(mechanism, experiment.rounds), experiment.run_accountant
    return {name: compose(of_group, experiment.delta_of(name), accountant) for name, of_group in costs.items()}


def _budgets(experiment: Experiment) -> set[str]:
    """The groups whose epsilon a budget bounds."""
    if experiment.ledger is None:
        return set()
    with Ledger(experiment.ledger, read_only=True) as ledger:
        names = {group.name for group in experiment.mechanism.groups if ledger.budget(group.name) is not None}
    return names | set(experiment.budgets)
