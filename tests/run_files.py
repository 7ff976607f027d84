"""Run directories written without running anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import tomli_w
from experiment_helpers import tiny
from msgspec.structs import replace

from fedhdp.experiments import Experiment, Variant, to_toml
from fedhdp.results import GroupResult, MetricRow, Summary, VariantDirectory, VariantResult, slug, write_value
from fedhdp.theory.pricing import RoughPricing

WEIGHTS = (0.01, 0.1, 1.0)


def weight_variants(weights: tuple[float, ...] = WEIGHTS) -> tuple[Variant, ...]:
    """DP-FedAvg, and FedHDP with each weight."""
    fedhdp = (Variant(f"FedHDP weight={weight:g}", weights={"private": weight}) for weight in weights)
    return (Variant("DP-FedAvg", "dp_fedavg"), *fedhdp)


def write_run(directory: Path, seed: int = 0, variants: tuple[Variant, ...] | None = None, **changes: Any) -> Path:
    """Write a finished run of the tiny experiment with made-up accuracies.

    The server's accuracy is (number of the variant + 1) / 10 + seed / 100 in the last round, and half of it in round 6.
    """
    experiment: Experiment = replace(tiny(**changes), seed=seed, variants=variants or weight_variants())
    directory.mkdir(parents=True)
    (directory / "experiment.toml").write_text(to_toml(experiment))
    results = []
    for number, variant in enumerate(experiment.variants):
        accuracy = (number + 1) / 10 + seed / 100
        mechanism = variant.mechanism(experiment.mechanism.uncalibrated(), RoughPricing(experiment.rounds))
        groups = []
        for group in mechanism.groups:
            epsilon = math.inf if group.name == "opted out" else 8.0
            result = GroupResult(group.name, group.clients, epsilon == math.inf, 1.0, 0.3, group.weight, group.pull)
            result.epsilon, result.epsilon_target, result.rounds = epsilon, epsilon, 12
            groups.append(result)
        result = VariantResult(variant.name, variant.algorithm, 12, 1.0, False, groups)
        result.values = {"global/accuracy": accuracy}
        path = directory / slug(variant.name)
        path.mkdir()
        owners = {"server": accuracy, "opted out": accuracy + 0.2, "private": accuracy + 0.1}
        rows = [
            MetricRow(round, group, model, "accuracy", value * round / 12)
            for round in (6, 12)
            for group, value in owners.items()
            for model in (("global",) if group == "server" else ("global", "personal"))
        ]
        VariantDirectory(path).rewrite_history(rows)
        write_value(path / "result.json", result)
        results.append(result)
    write_value(directory / "summary.json", Summary(experiment.name, 1.0, results))
    return directory


def write_settings(directory: Path, settings: dict[str, Any]) -> None:
    """Write an experiment's file without results."""
    directory.mkdir(parents=True)
    (directory / "experiment.toml").write_text(tomli_w.dumps(settings))
