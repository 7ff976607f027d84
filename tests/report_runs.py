"""Runs for pages, written without training: a real mechanism with its costs, and made-up measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from experiment_helpers import tiny
from msgspec.structs import replace

from fedhdp.experiments import Experiment, Variant, to_toml
from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.privacy.costs import privacy_costs
from fedhdp.results import MetricRow, Summary, VariantDirectory, VariantResult, slug, write_value
from fedhdp.results.schema import account_groups, attach_metrics
from fedhdp.results.store import SCORES_FILE, RunDirectory, write_arrays

VARIANTS = (
    Variant("Non-Private", "non_private"),
    Variant("DP-FedAvg", "dp_fedavg"),
    Variant("FedHDP", "fedhdp"),
)
SCORES = {"server": 0.4321, "opted out": 0.5432, "private": 0.6543}  # after the last round, by owner
HOSTILE = (
    "<script>alert(1)</script>",
    "\" onload='x' </script><b>&amp;",
    "long " + "w" * 85,
    "\u202eשלום عربى reversed",
)


def write_page_run(
    path: Path,
    *,
    seed: int = 0,
    rounds: int = 12,
    every: int = 4,
    variants: Sequence[Variant] = VARIANTS,
    repeatable: bool = False,
    server_has_client_data: bool = False,
    finished: bool = True,
    groups: dict[str, str] | None = None,
) -> Path:
    """Write a run of the tiny experiment, and return its directory.

    Args:
        path: The directory.
        seed: The seed, by which accuracies differ.
        rounds: The number of rounds.
        every: Rounds between evaluations.
        variants: The variants.
        repeatable: Whether the noise comes from a seed.
        server_has_client_data: Whether the server's test set has clients' examples.
        finished: Whether there are results, or histories alone.
        groups: Other names of groups.
    """
    renamed = tuple(replace(g, name=(groups or {}).get(g.name, g.name)) for g in tiny().mechanism.groups)
    mechanism_config = replace(tiny().mechanism, groups=renamed)
    noise_seed = 2 if repeatable else None
    changes = {"seed": seed, "rounds": rounds, "noise_seed": noise_seed, "evaluate_every": every}
    experiment: Experiment = replace(tiny(), variants=tuple(variants), mechanism=mechanism_config, **changes)
    group_of_client = {f"{g.name} {number}": g.name for g in renamed for number in range(g.clients)}
    with RunDirectory.create(path, to_toml(experiment).encode()) as directory:
        directory.record_clients(group_of_client)
    base = experiment.build_mechanism()
    results = []
    for number, variant in enumerate(experiment.variants):
        mechanism = experiment.variant_mechanisms(base)[number]
        assert isinstance(mechanism, Mechanism)
        rows = measurements(mechanism, rounds, every, number + seed / 10, groups or {})
        part = VariantDirectory(path / slug(variant.name))
        part.path.mkdir()
        part.rewrite_history(rows)
        costs = privacy_costs(mechanism, rounds)
        of_groups = account_groups(
            mechanism,
            lambda name, costs=costs: [costs[name]],
            experiment.delta_of,
            "pld",
            experiment.epsilon_targets(variant),
        )
        result = VariantResult(variant.name, variant.algorithm, rounds, 1.0, repeatable, of_groups)
        result.server_has_client_data = server_has_client_data
        results.append(attach_metrics(result, rows))
        if finished:
            write_value(part.path / "result.json", results[-1])
            own = [number * (1 - seed / 10) / len(group_of_client) for number in range(len(group_of_client))]
            write_arrays(part.path / SCORES_FILE, {"personal/accuracy": np.array(own, np.float32)})
    if finished:
        write_value(path / "summary.json", Summary(experiment.name, 3.0, results))
    return path


def measurements(
    mechanism: Mechanism, rounds: int, every: int, offset: float, names: dict[str, str]
) -> list[MetricRow]:
    """Accuracies that rise to those of ``SCORES``, each variant a little higher, a clip that falls, and counts."""
    rows = []
    for round in sorted({*range(every, rounds + 1, every), rounds}):
        growth = (1 - math.exp(-4 * round / rounds)) / (1 - math.exp(-4)) + offset / 100
        for owner, score in SCORES.items():
            name = names.get(owner, owner)
            for model in ("global",) if owner == SERVER else ("global", "personal"):
                value = score * growth + (0.1 if model == "personal" else 0.0)
                statistics = (
                    {"": value} if owner == SERVER else {"": value, "_variance": 0.0123, "_worst_decile": value / 2}
                )
                rows += [MetricRow(round, name, model, f"accuracy{part}", v) for part, v in statistics.items()]
        rows.append(MetricRow(round, SERVER, "global", "clip", 0.5 * math.exp(-round / rounds)))
        rows += [MetricRow(round, group.name, "global", "refused", 77.0) for group in mechanism.groups]
    return rows
