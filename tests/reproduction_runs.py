"""Toy parts of tables, and table directories with made-up numbers, for the tests of the reproduction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from fedhdp.experiments.components import HandwritingConfig, MlpConfig
from fedhdp.experiments.toml import to_toml
from fedhdp.mechanism import PrivacyGroup, mechanism_at
from fedhdp.reproduction import extensions, tables
from fedhdp.reproduction.summary import Comparison, Line
from fedhdp.reproduction.tables import TABLES, Options, Part, TableRow
from fedhdp.results import store
from fedhdp.results.schema import GroupResult, Summary, VariantResult
from fedhdp.theory.pricing import RoughPricing

SMALL = HandwritingConfig(40, samples=5, test_samples=2, server_test=50)
HANDWRITING = {name: table.sources["handwriting"].build() for name, table in TABLES.items()}


def small(part: Part) -> Part:
    """The part at toy size."""
    experiment = part.experiment
    first, *others = experiment.mechanism.groups
    clients = 38 // len(others)
    groups = (
        replace(first, clients=40 - clients * len(others), sampling_rate=0.5),
        *(replace(group, clients=clients, sampling_rate=0.5) for group in others),
    )
    data = replace(SMALL, split="skewed" if experiment.name.startswith("skewed") else "one_digit")
    changes = {
        "data": replace(data, validation=getattr(experiment.data, "validation", 0.0)),
        "model": MlpConfig(hidden=8),
        "mechanism": replace(experiment.mechanism, groups=groups),
        "training": replace(experiment.training, epochs=1, batch_size=5),
        "evaluate_every": 2,
    }
    return part._replace(experiment=replace(experiment, **changes))


def make_toy_parts(make_parts: Callable) -> Callable:
    """``make_parts`` with every part at toy size, and three rounds by default."""

    def make(name: str, row_names: str | None, seeds: range, options: Options) -> list[Part]:
        options = options._replace(rounds=3) if options.rounds == tables.ROUNDS else options
        return [small(part) for part in make_parts(name, row_names, seeds, options)]

    return make


def no_shift(row: TableRow, seed: int) -> float:
    """The paper's own numbers."""
    return 0.0


def write_runs(
    out: Path,
    table: str,
    seeds: int | range = 3,
    rows: str | None = None,
    shift: Callable[[TableRow, int], float] = no_shift,
) -> Path:
    """A directory of runs with the paper's numbers, each shifted by so many points for its row and seed."""
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    for part in extensions.make_parts(table, rows, seeds, Options("handwriting")):
        experiment = part.experiment
        promise = experiment.build_mechanism()
        results = [
            _result(table, experiment.rounds, variant, promise, part.seed, shift) for variant in experiment.variants
        ]
        folder = out / part.folder
        folder.mkdir(parents=True)
        (folder / store.EXPERIMENT_FILE).write_text(to_toml(experiment))
        store.write_value(folder / store.SUMMARY_FILE, Summary(experiment.name, 2.0, results))
    return out


def _result(table, rounds, variant, promise, seed, shift) -> VariantResult:
    mechanism = mechanism_at(variant.mechanism(promise, RoughPricing(rounds)), 0)
    row = TableRow(variant.algorithm, mechanism.groups[1].weight if variant.algorithm == "fedhdp" else None)
    numbers = _published_numbers(table, row, mechanism.groups[1].pull)
    points = shift(row, seed)
    groups = [_group_result(group, numbers, points) for group in mechanism.groups]
    if table == "levels":  # as a run with an accountant; pricing all rivals here would take a minute
        for group in groups:
            group.epsilon, group.epsilon_basis = 1.0, "as accounted"
    result = VariantResult(variant.name, variant.algorithm, rounds, 1.0, False, groups)
    accuracy = (numbers.get("acc_g", 90.0) + points) / 100
    result.values = {"global/accuracy": accuracy, "average/accuracy": accuracy + 0.005}
    return result


def _published_numbers(table: str, row: TableRow, pull: float) -> dict[str, float]:
    dataset = TABLES[table].dataset if table in TABLES else "noniid_mnist"
    rows = [line.numbers for line in tables.published_rows(dataset) if (line.row, line.pull) == (row, pull)]
    return rows[0] if rows else {}


def _group_result(group: PrivacyGroup, numbers: dict[str, float], points: float) -> GroupResult:
    code = "np" if group.opted_out else "p"
    result = GroupResult(group.name, group.clients, group.opted_out, *(0.0,) * 4)
    result.pull, result.weight = group.pull, group.weight
    accuracy = (numbers.get(f"acc_g_{code}", 90.0) + points) / 100
    result.values = {
        "global/accuracy": accuracy,
        "global/accuracy_variance": numbers.get(f"var_g_{code}", 0.3) / 100,
        "personal/accuracy": numbers.get(f"acc_l_{code}", 99.0) / 100,
        "personal/accuracy_variance": numbers.get(f"var_l_{code}", 0.01) / 100,
        "average/accuracy": accuracy,
    }
    return result


def line_of(comparison: Comparison, row: str, pull: float | None = None) -> Line:
    """A line by its label and pull."""
    (line,) = [line for line in comparison.lines if (line.key.row, line.key.pull) == (row, pull)]
    return line
