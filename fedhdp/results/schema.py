"""What a run came to: each variant and each group as a value, with its epsilons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import msgspec

from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.privacy.accounting import PrivacyCost, compose, make_report, privacy_cost
from fedhdp.results.metrics import MetricRow

ACCOUNTING = find_spec("dp_accounting") is not None  # without it all trains as well, and epsilons are not known


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
    chosen_accuracy: float | None = None  # personal models, each client's pull chosen on what it held out
    chosen_variance: float | None = None
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


def account_groups(
    mechanism: Mechanism, spent: Callable[[str], Iterable[tuple]], delta: Callable[[str], float]
) -> list[GroupResult]:
    """Every group with what was spent on it, priced by both accountants; the mechanism is the last that was run."""
    made = []
    for group in mechanism.groups:
        paid = [
            one
            for one in (PrivacyCost(*fields) for fields in spent(group.name))
            if one.sampling_rate > 0 and one.rounds
        ]
        fields = (group.noise_multiplier, group.sampling_rate, group.weight, group.pull)
        rounds = sum(one.rounds for one in paid)
        unprotected = mechanism.effective_noise_multiplier(group) == 0
        result = GroupResult(group.name, group.clients, unprotected, *fields, rounds=rounds)
        if ACCOUNTING and not unprotected:
            result.delta = delta(group.name)
            result.epsilon = compose(paid, result.delta)
            result.opted_out = result.epsilon == math.inf  # too little noise to promise anything is none
            last = privacy_cost(mechanism, group)._replace(rounds=rounds)
            result.epsilon_basis = make_report(group.name, result.epsilon, result.delta, last, "rdp").basis
            if len(paid) > 1:
                result.epsilon_basis += f", {len(paid)} mechanisms composed, of which this is one"
            if mechanism.sampling == "poisson":
                result.epsilon_pld = compose(paid, result.delta, "pld")
        made.append(result)
    return made


def attach_metrics(result: VariantResult, history: Iterable[MetricRow]) -> VariantResult:
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
        for metric in ("accuracy", "variance"):
            setattr(group, f"chosen_{metric}", found.get((group.name, "chosen", metric)))
        group.average_accuracy = found.get((group.name, "average", "accuracy"))
        group.refused = int(found.get((group.name, "global", "refused"), 0))
    return result
