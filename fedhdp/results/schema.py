"""What a run records: a row for each measurement, and a value for each group, variant and experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from fedhdp.mechanism import SERVER, Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import (
    PrivacyCost,
    compose,
    is_accounting_installed,
    make_report,
    privacy_cost,
    privacy_costs,
)


class MetricRow(NamedTuple):
    """One measurement: a line of a run's history."""

    round: int
    group: str
    model: str  # global, personal, average or chosen
    metric: str
    value: float


class GroupResult(msgspec.Struct, forbid_unknown_fields=True):
    """The accuracy and the privacy cost of one group.

    ``epsilon`` is infinite where the group is unprotected and None where it is not known, because dp-accounting is
    missing. JSON has no infinity: in files it is the string "inf" (see `results.store.encode_json`).
    """

    name: str
    clients: int
    unprotected: bool  # the noise that the group gets promises nothing
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
    chosen_accuracy: float | None = None  # with the pull that scored best on each client's held-out data
    chosen_variance: float | None = None
    rounds: int = 0  # in which its clients could be sampled
    epsilon: float | None = None  # by Renyi accounting
    epsilon_pld: float | None = None  # by privacy loss distributions; None where these do not apply
    delta: float | None = None
    epsilon_basis: str | None = None  # delta, sampling rate, noise, rounds, sampling and adjacency of the epsilon
    refused: int = 0  # updates that were not finite or out of range


class VariantResult(msgspec.Struct, forbid_unknown_fields=True):
    """The result of one variant of an experiment."""

    name: str
    algorithm: str
    rounds: int
    seconds: float
    repeatable: bool  # its noise came from a seed, so it is not private
    groups: list[GroupResult]
    server_accuracy: float | None = None
    server_average_accuracy: float | None = None
    clip: float | dict[str, float] | None = None  # of the next round; by layer, where layers are clipped one by one
    stopped: str | None = None  # why it ended before its last round


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    """The results of an experiment, and the code that produced them."""

    experiment: str
    seconds: float
    variants: list[VariantResult]
    version: str = ""  # of fedhdp
    commit: str | None = None  # of fedhdp's checkout; None where it was installed without one
    modified: bool | None = None  # whether the checkout differed from the commit


def account_groups(
    mechanism: Mechanism, costs_of: Callable[[str], Iterable[tuple]], delta_of: Callable[[str], float]
) -> list[GroupResult]:
    """Compute what a run has cost each group.

    Args:
        mechanism: The mechanism of the run, with all of its groups.
        costs_of: The rounds charged to a group, by its name: ``PrivacyCost`` values.
        delta_of: The delta at which a group's epsilon is stated, by its name.

    Returns:
        A result for each group, in the order of the mechanism, without accuracies.
    """
    return [_account_group(mechanism, group, costs_of(group.name), delta_of(group.name)) for group in mechanism.groups]


def _account_group(mechanism: Mechanism, group: PrivacyGroup, costs: Iterable[tuple], delta: float) -> GroupResult:
    paid = [cost for cost in (PrivacyCost(*fields) for fields in costs) if cost.sampling_rate > 0 and cost.rounds]
    rounds = sum(cost.rounds for cost in paid)
    result = GroupResult(
        name=group.name,
        clients=group.clients,
        unprotected=mechanism.effective_noise_multiplier(group) == 0,
        noise_multiplier=group.noise_multiplier,
        sampling_rate=group.sampling_rate,
        weight=group.weight,
        pull=group.pull,
        rounds=rounds,
    )
    if result.unprotected:
        result.epsilon = math.inf
    elif is_accounting_installed():
        result.delta = delta
        result.epsilon = compose(paid, delta)
        result.unprotected = result.epsilon == math.inf  # accounting takes very little noise as none
        last = privacy_cost(mechanism, group)._replace(rounds=rounds)
        result.epsilon_basis = make_report(group.name, result.epsilon, delta, last, "rdp").basis
        if len(paid) > 1:
            result.epsilon_basis += f", {len(paid)} mechanisms composed, of which this is one"
        if mechanism.sampling == "poisson":
            result.epsilon_pld = compose(paid, delta, "pld")
    return result


def attach_metrics(result: VariantResult, history: Iterable[MetricRow]) -> VariantResult:
    """Set a result's accuracies, clip and refused updates to those of the last evaluated round.

    Args:
        result: The result; it is changed.
        history: The rows of the run.

    Returns:
        The same result.
    """
    rows = list(history)
    last = max((row.round for row in rows), default=0)
    values = {(row.group, row.model, row.metric): row.value for row in rows if row.round == last}
    result.server_accuracy = values.get((SERVER, "global", "accuracy"))
    result.server_average_accuracy = values.get((SERVER, "average", "accuracy"))
    prefix = "clip/"
    layer_clips = {metric.removeprefix(prefix): value for (_, _, metric), value in values.items() if prefix in metric}
    result.clip = layer_clips or values.get((SERVER, "global", "clip"))
    for group in result.groups:
        for model in ("global", "personal"):
            for metric in ("accuracy", "variance", "worst_decile"):
                setattr(group, f"{model}_{metric}", values.get((group.name, model, metric)))
        for metric in ("accuracy", "variance"):
            setattr(group, f"chosen_{metric}", values.get((group.name, "chosen", metric)))
        group.average_accuracy = values.get((group.name, "average", "accuracy"))
        group.refused = int(values.get((group.name, "global", "refused"), 0))
    return result


class SimulationResult(NamedTuple):
    """The outcome of a simulation under one mechanism.

    Attributes:
        mechanism: The mechanism.
        rounds: The number of completed rounds.
        parameters: The global model, as arrays named by their path in the model.
        scores: Each client's score at the end, by the kind of model (see `fedhdp.Simulation.client_scores`).
        history: The metrics of every evaluation.
        repeatable: Whether there was a noise seed, so that nothing is private.
    """

    mechanism: Mechanism
    rounds: int
    parameters: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    history: list[MetricRow]
    repeatable: bool

    def result(self, name: str, delta: float = 1e-4) -> VariantResult:
        """A row of a table, with each group's epsilon at this delta."""
        costs = privacy_costs(self.mechanism, self.rounds)
        groups = account_groups(self.mechanism, lambda name: [costs[name]], lambda name: delta)
        return attach_metrics(VariantResult(name, "", self.rounds, 0.0, self.repeatable, groups), self.history)
