"""What an experiment costs, before it is run: the epsilons of its variants, and the rounds that budgets allow."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fedhdp.experiments.config import Experiment
from fedhdp.mechanism import ScheduledMechanism
from fedhdp.privacy.ledger import Ledger
from fedhdp.privacy.reports import MechanismReport, account_mechanisms, rounds_allowed
from fedhdp.privacy.tuning import Tuning

REPEATABLE = "Noise or cohorts come from a given seed, so nothing is private."


class ExperimentCost(msgspec.Struct, frozen=True):
    """The epsilons of an experiment's variants.

    Attributes:
        tuning: The number of runs of which only the best is shown, in words; None: all are shown.
        theory_weights: The weights that the experiment leaves to the theory, by group.
        drops_groups: Whether a group whose budget is exhausted is dropped, so that the others may have a larger epsilon.
        repeatable: Whether noise comes from a seed, so that nothing is private.
        rounds_allowed: The rounds that budgets allow each training, by the name of its first variant and by group.
        mechanisms: The epsilons, once for all variants that cost every group the same.
        notes: What else a reader of these epsilons must know.
    """

    experiment: str
    accountant: str
    tuning: str | None
    theory_weights: dict[str, float]
    drops_groups: bool
    repeatable: bool
    rounds_allowed: dict[str, dict[str, int]]
    mechanisms: list[MechanismReport]
    notes: list[str]


def account_experiment(experiment: Experiment, tuning: Tuning | None = None) -> ExperimentCost:
    """Compute what an experiment costs each group; nothing is run.

    Args:
        experiment: The experiment, without a sweep.
        tuning: The number of runs, if only the best of its variants is shown.

    Raises:
        FedHDPError: If no noise keeps an epsilon, or data that is needed to count clients cannot be loaded.
    """
    data = experiment.load_if_needed()
    mechanism = experiment.build_mechanism(data)
    mechanisms = experiment.variant_mechanisms(mechanism, data)
    unstated = {config.name for config in experiment.mechanism.groups if config.weight is None}
    weights = {group.name: group.weight for group in mechanism.sampled_groups if group.name in unstated}
    variants = [(variant.name, mechanism) for variant, mechanism in zip(experiment.variants, mechanisms, strict=True)]
    targets = [experiment.epsilon_targets(variant) for variant in experiment.variants]
    accountant = experiment.run_accountant
    reports = account_mechanisms(variants, experiment.rounds, experiment.delta_of, accountant, targets, tuning)
    allowed = _rounds_allowed(experiment, mechanisms)
    return ExperimentCost(
        experiment=experiment.name,
        accountant=accountant,
        tuning=None if tuning is None else str(tuning),
        theory_weights=weights,
        drops_groups=experiment.on_budget_exhausted == "drop_group" and bool(experiment.budgets),
        repeatable=experiment.repeatable,
        rounds_allowed=allowed,
        mechanisms=reports,
        notes=_notes(experiment, weights, allowed),
    )


def _rounds_allowed(experiment: Experiment, mechanisms: Sequence[ScheduledMechanism]) -> dict[str, dict[str, int]]:
    if experiment.ledger is None or experiment.repeatable:
        return {}
    first_of_training = [numbers[0] for numbers in experiment.by_training(mechanisms)]
    trainings = [mechanisms[number] for number in first_of_training]
    with contextlib.ExitStack() as stack:
        exists = Path(experiment.ledger).exists()
        ledger = stack.enter_context(Ledger(experiment.ledger, read_only=True)) if exists else None
        allowed = rounds_allowed(ledger, trainings, experiment.budgets, experiment.rounds)
    return {experiment.variants[number].name: rounds for number, rounds in zip(first_of_training, allowed, strict=True)}


def _notes(experiment: Experiment, weights: Mapping[str, float], allowed: Mapping[str, Mapping[str, int]]) -> list[str]:
    notes = []
    if set(weights.values()) - {1.0}:
        parts = ", ".join(f"{name} {weight:.3g}" for name, weight in weights.items())
        notes.append(f"Weights that no group or variant states are the theory's: {parts}.")
    for variant, rounds in allowed.items():
        for group, number in rounds.items():
            if number < experiment.rounds:
                text = f"{variant}: the budget of {group} allows {number} of {experiment.rounds} rounds"
                notes.append(f"{text}, after what the ledger and earlier variants charge.")
    return [*notes, REPEATABLE] if experiment.repeatable else notes
