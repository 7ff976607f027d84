"""What a run records: a row for each measurement, and a value for each group, variant and experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from fedhdp.mechanism import SERVER, Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import Accountant, compose, default_accountant, is_accounting_installed, make_report
from fedhdp.privacy.calibration import explain_surplus
from fedhdp.privacy.costs import PrivacyCost, composed_costs, privacy_cost


class MetricRow(NamedTuple):
    """One measurement: a line of a run's history."""

    round: int
    group: str
    model: str  # global, personal, average or chosen
    metric: str
    value: float


class MetricInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a table needs to know of a metric.

    Args:
        name: The metric's name, in files and tables.
        higher_is_better: Whether a higher value is the better one.
        percent: Whether tables show it in percent: a rate from 0 to 1.
    """

    name: str
    higher_is_better: bool = True
    percent: bool = False

    def format(self, value: float, digits: int = 2) -> str:
        """A value as text: in percent with so many decimals, or with two significant digits more than that."""
        return f"{100 * value:.{digits}f}" if self.percent else f"{value:.{digits + 2}g}"


ACCURACY = MetricInfo("accuracy", percent=True)
STATISTICS = ("", "_variance", "_worst_decile", "_clients")  # of a metric over a group's clients: the first is the mean


class _Measured(msgspec.Struct, kw_only=True):
    """Values of models by ``MODEL/METRIC``: "personal/accuracy", "global/auc_variance"."""

    values: dict[str, float] = {}

    def value(self, metric: str = "accuracy", model: str = "global") -> float | None:
        """A metric of a model (global, personal, average or chosen), or None where it was not measured."""
        return self.values.get(f"{model}/{metric}")


class GroupResult(_Measured, forbid_unknown_fields=True):
    """What models measure on the clients of one group, and its privacy cost.

    ``values`` has for each metric the mean over the group's clients, and with ``_variance``, ``_worst_decile`` and
    ``_clients`` appended to its name the variance, the mean of the worst tenth, and how many clients it counts.
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
    rounds: int = 0  # in which its clients could be sampled
    epsilon: float | None = None  # that the group has, by the run's accountant
    epsilon_target: float | None = None  # that it asked for; None where it asked for a noise multiplier
    accountant: str | None = None  # of the run: it calibrates the noise, computes the epsilon and keeps the budget
    delta: float | None = None
    epsilon_basis: str | None = None  # delta, sampling rate, noise, rounds, sampling and adjacency of the epsilon
    surplus: str | None = None  # why the group has more noise than it asked for, and which weight would use it
    refused: int = 0  # updates that were not finite or out of range


class VariantResult(_Measured, forbid_unknown_fields=True):
    """The result of one variant of an experiment.

    ``values`` are those on the server's test set. Tables show the first of the ``metrics``.
    """

    name: str
    algorithm: str
    rounds: int
    seconds: float
    repeatable: bool  # its noise came from a seed, so it is not private
    groups: list[GroupResult]
    metrics: tuple[MetricInfo, ...] = (ACCURACY,)
    clip: float | dict[str, float] | None = None  # of the next round; by layer, where layers are clipped one by one
    stopped: str | None = None  # why it ended before its last round
    preparation: str = ""  # whose statistics the inputs were made with
    notes: list[str] = []  # what else a reader must know: an extension, the run that it started from
    server_has_client_data: bool = True  # whether the server's test set has clients' examples, or may have
    start_covered: bool | None = None  # whether epsilons cover the model that it began with; None: it is new

    @property
    def server_accuracy(self) -> float | None:
        """The global model's accuracy on the server's test set, if it was measured."""
        return self.value("accuracy")


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    """The results of an experiment, and the code that produced them."""

    experiment: str
    seconds: float
    variants: list[VariantResult]
    version: str = ""  # of fedhdp
    commit: str | None = None  # of fedhdp's checkout; None where it was installed without one
    modified: bool | None = None  # whether the checkout differed from the commit


def account_groups(
    mechanism: Mechanism,
    costs_of: Callable[[str], Iterable[tuple]],
    delta_of: Callable[[str], float],
    accountant: Accountant,
    targets: Mapping[str, float] | None = None,
    public: Collection[str] = (),
) -> list[GroupResult]:
    """Compute what a run has cost each group.

    Args:
        mechanism: The mechanism of the run, with all of its groups.
        costs_of: The rounds charged to a group, by its name: ``PrivacyCost`` values.
        delta_of: The delta at which a group's epsilon is stated, by its name.
        accountant: The run's accountant.
        targets: The epsilons that groups asked for, by name.
        public: The groups whose statistics prepared the inputs: no noise of a round protects them.

    Returns:
        A result for each group, in the order of the mechanism, without values.
    """
    results = []
    for group in mechanism.groups:
        result = _account_group(mechanism, group, costs_of(group.name), delta_of(group.name), accountant)
        result.epsilon_target = (targets or {}).get(group.name)
        if group.name in public:
            result.unprotected, result.epsilon, result.epsilon_basis = True, math.inf, None
        results.append(result)
    return results


def _account_group(
    mechanism: Mechanism, group: PrivacyGroup, costs: Iterable[tuple], delta: float, accountant: Accountant
) -> GroupResult:
    paid_costs = [cost for cost in (PrivacyCost(*fields) for fields in costs) if cost.sampling_rate > 0 and cost.rounds]
    rounds = sum(cost.rounds for cost in paid_costs)
    result = GroupResult(
        name=group.name,
        clients=group.clients,
        unprotected=mechanism.effective_noise_multiplier(group) == 0,
        noise_multiplier=group.noise_multiplier,
        sampling_rate=group.sampling_rate,
        weight=group.weight,
        pull=group.pull,
        rounds=rounds,
        accountant=accountant,
        surplus=explain_surplus(mechanism, group),
    )
    if result.unprotected:
        result.epsilon = math.inf
    elif is_accounting_installed():
        result.delta = delta
        result.epsilon = compose(paid_costs, delta, accountant)
        result.unprotected = result.epsilon == math.inf  # accounting takes very little noise as none
        last = privacy_cost(mechanism, group)._replace(rounds=rounds)
        result.epsilon_basis = make_report(group.name, result.epsilon, delta, last, accountant).basis
        if len(paid_costs) > 1:
            result.epsilon_basis += f", {len(paid_costs)} mechanisms composed, of which this is one"
            result.surplus = None  # it is of one mechanism
    return result


def attach_metrics(result: VariantResult, history: Iterable[MetricRow]) -> VariantResult:
    """Set a result's values, clip and refused updates to those of the last evaluated round.

    Args:
        result: The result; it is changed.
        history: The rows of the run.

    Returns:
        The same result.
    """
    rows = list(history)
    last = max((row.round for row in rows), default=0)
    values = {(row.group, row.model, row.metric): row.value for row in rows if row.round == last}
    prefix = "clip/"
    clips = {metric.removeprefix(prefix): v for (_, _, metric), v in values.items() if metric.startswith(prefix)}
    result.clip = clips or values.get((SERVER, "global", "clip"))
    measured = {metric.name + statistic for metric in result.metrics for statistic in STATISTICS}

    def values_of(group: str) -> dict[str, float]:
        return {f"{key[1]}/{key[2]}": v for key, v in values.items() if key[0] == group and key[2] in measured}

    result.values = values_of(SERVER)
    for group in result.groups:
        group.values = values_of(group.name)
        group.refused = int(values.get((group.name, "global", "refused"), 0))
    return result


class SimulationResult(NamedTuple):
    """The outcome of a simulation under one mechanism.

    Attributes:
        mechanism: The mechanism of the last round.
        rounds: The number of completed rounds.
        parameters: The global model, as arrays named by their path in the model.
        scores: Each client's values at the end, by ``MODEL/METRIC`` (see `fedhdp.Simulation.client_scores`).
        history: What every evaluation measured.
        repeatable: Whether there was a noise seed, so that nothing is private.
        metrics: The metrics.
        rounds_of: How many rounds each mechanism ran; None: all rounds had the same.
        preparation: How the data's columns became inputs, and whose statistics that took.
        public_levels: The groups whose statistics that took.
    """

    mechanism: Mechanism
    rounds: int
    parameters: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    history: list[MetricRow]
    repeatable: bool
    metrics: tuple[MetricInfo, ...] = (ACCURACY,)
    rounds_of: Mapping[Mechanism, int] | None = None
    preparation: str = ""
    public_levels: tuple[str, ...] = ()

    def result(self, name: str, delta: float = 1e-4, accountant: Accountant | None = None) -> VariantResult:
        """A row of a table, with each group's epsilon at this delta; ``accountant`` as in `fedhdp.privacy.epsilon`."""
        costs = composed_costs(self.rounds_of or {self.mechanism: self.rounds})
        accountant, public = accountant or default_accountant(self.mechanism.sampling), self.public_levels
        groups = account_groups(self.mechanism, lambda name: costs[name], lambda name: delta, accountant, public=public)
        result = VariantResult(name, "", self.rounds, 0.0, self.repeatable, groups, self.metrics)
        result.preparation = self.preparation
        return attach_metrics(result, self.history)
