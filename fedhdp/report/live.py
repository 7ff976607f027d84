"""The results so far of a run under way: an experiment's, from its file and its histories, or a deployment's."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhdp.mechanism import SERVER, Mechanism, ScheduledMechanism, mechanism_at
from fedhdp.privacy.accounting import LEDGER_ACCOUNTANT
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.privacy.costs import PrivacyCost, composed_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.schema import GroupResult, MetricInfo, MetricRow, VariantResult, account_groups, attach_metrics
from fedhdp.results.store import (
    CHECKPOINT_FILE,
    EXPERIMENT_FILE,
    HISTORY_FILE,
    RUN_FILE,
    START_FILE,
    RunInfo,
    VariantDirectory,
    read_arrays,
    read_value,
    slug,
)

if TYPE_CHECKING:
    from fedhdp.experiments.config import Experiment


def results_so_far(path: Path) -> list[VariantResult]:
    """The results of the variants in a run's directory that are finished, or have been evaluated.

    Raises:
        DamagedRunError: If a file is damaged.
    """
    file = path / EXPERIMENT_FILE
    raw = tomllib.loads(file.read_text(encoding="utf-8"))
    if "levels" in raw:
        parts = [VariantDirectory(history.parent) for history in sorted(path.glob(f"*/{HISTORY_FILE}"))]
        return [part.result() or _deployment_result(raw, part) for part in parts if part.history()]
    from fedhdp.experiments.start import read_start

    experiment, mechanisms = _read_mechanisms(path, file.stat().st_mtime_ns)
    results = []
    for number, mechanism in enumerate(mechanisms):
        part = VariantDirectory(path / slug(experiment.variants[number].name))
        if (result := part.result()) is not None:
            results.append(result)
        elif history := part.history():
            results.append(
                _result(experiment, number, mechanism, history, _costs(path, experiment, number, mechanisms))
            )
            if (path / START_FILE).exists():
                results[-1].start_covered = read_start(path)[1].covers(experiment, path)
    return results


@functools.lru_cache(maxsize=16)
def _read_mechanisms(path: Path, changed: int) -> tuple[Experiment, list[ScheduledMechanism]]:
    """An experiment and the mechanism of each variant; once for each content of the file, since calibration takes time."""
    from fedhdp.experiments.toml import read_experiment

    experiment = read_experiment(path)
    data = experiment.load_if_needed()
    return experiment, experiment.variant_mechanisms(experiment.build_mechanism(data), data)


def _costs(
    path: Path, experiment: Experiment, number: int, mechanisms: Sequence[ScheduledMechanism]
) -> Callable[[int], Mapping[str, Sequence[PrivacyCost]]]:
    """What so many rounds of a variant have cost each group: by the ledger, or with the rounds that a crash replayed."""
    if experiment.ledger is not None and not experiment.repeatable and Path(experiment.ledger).exists():
        first = next(
            i
            for i in range(number + 1)
            if _training(experiment, mechanisms, i) == _training(experiment, mechanisms, number)
        )
        run = f"{read_value(path / RUN_FILE, RunInfo).id}/{experiment.variants[first].name}"
        with Ledger(Path(experiment.ledger), read_only=True) as ledger:
            charged = {g.name: ledger.costs(g.name, run) for g in mechanism_at(mechanisms[number], 0).groups}
        return lambda rounds: charged
    schedule = mechanisms[number]
    replayed = [] if experiment.repeatable else _replayed_rounds(path, experiment, experiment.variants[number].name)
    if isinstance(schedule, Mechanism):
        return lambda rounds: composed_costs({schedule: rounds + len(replayed)})
    return lambda rounds: composed_costs(mechanism_at(schedule, round) for round in (*range(rounds), *replayed))


def _training(experiment: Experiment, mechanisms: Sequence[ScheduledMechanism], number: int) -> tuple:
    """Equal in variants that share a global training, which is charged in the name of the first."""
    mechanism = mechanisms[number]
    return (getattr(mechanism, "without_pulls", mechanism), *experiment.overrides(number))


def _replayed_rounds(path: Path, experiment: Experiment, name: str) -> list[int]:
    """The rounds that were shown before a crash and ran again; the first variant of a simulation has them."""
    for file in (path / slug(variant.name) / CHECKPOINT_FILE for variant in experiment.variants):
        if file.exists():
            arrays = read_arrays(file, ("variants", "replayed_rounds"))
            if name in arrays["variants"].tolist():
                return arrays["replayed_rounds"].tolist()
    return []


def _result(
    experiment: Experiment,
    number: int,
    schedule: ScheduledMechanism,
    history: Sequence[MetricRow],
    costs_of: Callable[[int], Mapping[str, Sequence[PrivacyCost]]],
) -> VariantResult:
    """What a run would record for a variant if it ended now."""
    from fedhdp.experiments.bases import takes_statistics
    from fedhdp.experiments.groups import opted_out

    variant, rounds = experiment.variants[number], history[-1].round
    costs = costs_of(rounds)
    mechanism, targets = mechanism_at(schedule, max(rounds - 1, 0)), experiment.epsilon_targets(variant)
    is_public = takes_statistics(getattr(experiment.model, "basis", None))
    is_public |= getattr(experiment.data, "standardize", None) == "public"
    public = opted_out(experiment.mechanism) if is_public else ()
    groups = account_groups(
        mechanism, costs.__getitem__, experiment.delta_of, experiment.run_accountant, targets, public
    )
    result = VariantResult(variant.name, variant.algorithm, rounds, 0.0, experiment.repeatable, groups)
    result.metrics = _metrics(history, experiment.metrics)
    return attach_metrics(result, history)


def _deployment_result(raw: dict[str, Any], part: VariantDirectory) -> VariantResult:
    """The same of a deployment: its epsilons are those that the server recorded, over all runs of the ledger."""
    history = part.history()
    groups = tuple(GroupConfig(name=name, clients=1, **level) for name, level in raw["levels"].items())
    config = MechanismConfig(groups, raw["clip"], raw.get("noise", "shared"))
    mechanism = config.build(raw["rounds"], raw.get("delta", 1e-4), LEDGER_ACCOUNTANT)
    present = {row.group for row in history}
    epsilons = {row.group: row.value for row in history if row.metric == "epsilon"}
    results = []
    for group, level in zip(mechanism.groups, config.groups, strict=True):
        if group.name in present:
            epsilon = math.inf if group.opted_out else epsilons.get(group.name)
            numbers = (
                group.noise_multiplier,
                group.sampling_rate,
                group.weight,
                group.pull,
                history[-1].round,
                epsilon,
            )
            of_group = GroupResult(group.name, 0, group.opted_out, *numbers, level.epsilon, LEDGER_ACCOUNTANT)
            of_group.delta = level.delta or raw.get("delta", 1e-4)
            results.append(of_group)
    seeds = {"noise_seed", "cohort_seed"} & raw.keys()
    result = VariantResult(part.path.name, "fedhdp", history[-1].round, 0.0, bool(seeds), results)
    result.metrics = _metrics(history, raw.get("metrics", ()))
    return attach_metrics(result, history)


def _metrics(history: Sequence[MetricRow], names: Sequence[str]) -> tuple[MetricInfo, ...]:
    """The metrics that a history has, those that the file names first."""
    from fedhdp.metrics import BUILT_IN

    suffix = "_worst_decile"
    measured = [row.metric.removesuffix(suffix) for row in history if row.metric.endswith(suffix)]
    measured += [row.metric for row in history if row.group == SERVER and not row.metric.startswith("clip")]
    infos = []
    for name in dict.fromkeys([*(name for name in names if name in measured), *measured]):
        known = BUILT_IN.get(name)
        rate = (name != "loss", False) if known is None else (known.higher_is_better, known.percent)
        infos.append(MetricInfo(name, *rate))
    return tuple(infos) or (MetricInfo("accuracy", percent=True),)
