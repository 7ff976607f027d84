"""Compare a table's runs with the paper: means over seeds, claims, epsilons and notes.

The pull does not change the global model, so the paper's three blocks of pulls are three runs of it: its numbers for the
global model are their means. Intervals are Student's, of 95%, for the mean over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import fedhdp
from fedhdp.errors import RunError
from fedhdp.reproduction import tables
from fedhdp.reproduction.claims import ClaimResult, View, check_claims, check_skewed_claim
from fedhdp.reproduction.levels import LEVEL_TABLES
from fedhdp.reproduction.runs import (
    FinishedRun,
    LineKey,
    column_means,
    group_costs,
    part_order,
    read_lines,
    read_runs,
    values_by_column,
)
from fedhdp.reproduction.summary import (
    SUMMARY,
    Comparison,
    Line,
    make_line,
    published_best,
    published_means,
    read_summary,
)
from fedhdp.reproduction.tables import PaperTable

COUNTERPARTS = {"noniid-mnist": "skewed-mnist", "skewed-mnist": "noniid-mnist"}

BySeed = dict[LineKey, dict[int, dict[str, float]]]  # a line's numbers by column, for each seed


def load(out: Path, table: str) -> Comparison:
    """The table in a directory: compared anew if it has runs, else as its summary has it.

    Raises:
        RunError: If the directory has neither, or another table.
    """
    if not any(out.glob("seed-*")) and (out / SUMMARY).exists():
        return read_summary(out / SUMMARY, table)
    return compare(out, table)


def compare(out: Path, table: str) -> Comparison:
    """Read the runs of a table, and compare them with the paper.

    Raises:
        RunError: If no run is finished, or the runs cannot be in one table.
    """
    runs, unfinished = read_runs(out, table)
    if not runs:
        started = f" ({unfinished[0]} is not finished)" if unfinished else ""
        raise RunError(f"{out} has no finished run of {table}{started}", "--out", out)
    by_run: dict[LineKey, dict[int, list[dict[str, float]]]] = {}
    for run in runs:
        for key, values in read_lines(run).items():
            by_run.setdefault(key, {}).setdefault(run.seed, []).append(values)
    by_seed = {
        key: {seed: column_means(values) for seed, values in seeds.items()}
        for key, seeds in sorted(by_run.items(), key=lambda item: _line_order(item[0]))
    }
    paper_table, first = tables.TABLES.get(table), runs[0].experiment
    lines = tuple(make_line(key, values_by_column(seeds.values()), seeds, table) for key, seeds in by_seed.items())
    return Comparison(
        table=table,
        data=tables.describe_data(paper_table or tables.TABLES["noniid-mnist"], first.data),
        rounds=first.rounds,
        sampling={run.part: run.experiment.mechanism.sampling for run in runs},
        seeds=tuple(sorted({run.seed for run in runs})),
        unfinished=tuple(unfinished),
        seconds_per_seed=_seconds_per_seed(runs),
        machines=tuple(dict.fromkeys(run.machine for run in runs if run.machine is not None)),
        version=fedhdp.__version__,
        claims=tuple(_claims(out, table, by_seed)),
        costs=tuple(group_costs(runs)),
        notes=tuple(_notes(runs, lines, paper_table) + _note_repetitions(by_run) + _note_unequal_seeds(by_seed)),
        lines=lines,
    )


def _line_order(key: LineKey) -> tuple:
    """The paper's rows in its order, pull by pull; extensions in the order of their definition, row by row."""
    algorithms = ["non_private", "dp_fedavg", "hdp_fedavg", "fedhdp"]
    pull = (0, 0.0) if key.pull is None else (1, key.pull) if isinstance(key.pull, float) else (2, 0.0)
    place = algorithms.index(key.algorithm) if key.algorithm in algorithms else len(algorithms)
    row = (place, -1.0 if key.weight is None else key.weight, key.row)
    return part_order(key.part), *((pull, row) if key.part == "paper" else (row, pull))


def _seconds_per_seed(runs: list[FinishedRun]) -> dict[str, float]:
    seconds: dict[str, dict[int, float]] = {}
    for run in runs:
        of_part = seconds.setdefault(run.part, {})
        of_part[run.seed] = of_part.get(run.seed, 0.0) + run.summary.seconds
    return {part: fmean(of_part.values()) for part, of_part in seconds.items()}


# Claims


def _claims(out: Path, table: str, by_seed: BySeed) -> list[ClaimResult]:
    """The claims, checked on the seeds that all rows of a part have."""
    shared = {part: _shared_seeds(by_seed, part) for part in {key.part for key in by_seed}}
    compared = {
        key: {seed: seeds[seed] for seed in shared[key.part] or seeds if seed in seeds}
        for key, seeds in by_seed.items()
    }
    measured = _view((key, column_means(list(seeds.values()))) for key, seeds in compared.items())
    paper_best = published_best(tables.TABLES[table]) if table in tables.TABLES else math.inf
    results = check_claims(table, measured, _views(compared), _published_view(table), paper_best)
    if table not in COUNTERPARTS:
        return results
    pair = (measured, _counterpart_view(out, table)), (_published_view(table), _published_view(COUNTERPARTS[table]))
    return [*results, check_skewed_claim(*(views if table == "skewed-mnist" else views[::-1] for views in pair))]


def _shared_seeds(by_seed: BySeed, part: str) -> list[int]:
    return sorted(set.intersection(*(set(seeds) for key, seeds in by_seed.items() if key.part == part)))


def _views(by_seed: BySeed) -> list[View]:
    """A view of each seed."""
    numbers = sorted({seed for seeds in by_seed.values() for seed in seeds})
    return [_view((key, seeds[seed]) for key, seeds in by_seed.items() if seed in seeds) for seed in numbers]


def _published_view(name: str) -> View:
    table = tables.TABLES.get(name)
    if table is None:
        return {}
    return _view(
        (LineKey("paper", row.label, *row, pull), published_means(table, row, pull))
        for row in tables.paper_rows(table)
        for pull in (None, *tables.PULLS)
    )


def _view(lines: Iterable[tuple[LineKey, dict[str, float]]]) -> View:
    """The numbers of each row as claims are checked on them: personal models at their best pull."""
    view: View = {}
    for key, values in lines:
        row = view.setdefault((key.part, key.row if key.part in LEVEL_TABLES else key.algorithm, key.weight), {})
        for name, value in values.items():
            row[name] = max(value, row.get(name, -math.inf))
    return view


def _counterpart_view(out: Path, table: str) -> View:
    """The other table of a pair, if a neighbouring directory has it."""
    for path in sorted(out.resolve().parent.glob(f"*/{SUMMARY}")):
        try:
            other = read_summary(path, COUNTERPARTS[table])
        except (OSError, RunError):
            continue
        return _view((line.key, {name: cell.mean for name, cell in line.cells.items()}) for line in other.lines)
    return {}


# Notes


def _notes(runs: list[FinishedRun], lines: Iterable[Line], table: PaperTable | None) -> list[str]:
    """Differences from the paper, and what changes the meaning of the numbers."""
    notes = []
    rate, trainings = runs[0].experiment.mechanism.groups[-1].sampling_rate, [run.experiment.training for run in runs]
    if table is not None and rate != table.sampling_rate:
        notes.append(
            f"sampling rate {100 * rate:.3g}% instead of the paper's {100 * table.sampling_rate:g}%, for cohorts of the "
            f"same size from fewer clients: the epsilons are those above, not the paper's {table.epsilon:g}"
        )
    if any(training.drop_remainder for training in trainings):
        notes.append("an epoch's last batch is skipped if it is partial; the paper does not say (--batches all)")
    pairs = {(training.personal_epochs, training.epochs) for training in trainings if training.personal_epochs}
    for personal, epochs in sorted(pairs):
        notes.append(f"personal models train for {personal} epochs of a round, the global model's for {epochs}")
    if not any(training.personalize for training in trainings):
        notes.append("no personal models were trained (--pulls none)")
    elif any(line.key.weight == 0 for line in lines):
        notes.append("r=0: the paper's private clients have no personal models there; these have")
    variants = [variant for run in runs for variant in run.summary.variants]
    if any(variant.repeatable for variant in variants):
        notes.append("noise and cohorts came from a given seed: repeatable, and therefore not private")
    refused = sum(group.refused for variant in variants for group in variant.groups)
    return notes + ([f"{refused} updates were not finite and were refused"] if refused else [])


def _note_repetitions(by_run: dict[LineKey, dict[int, list[dict[str, float]]]]) -> list[str]:
    """A note if pulls were added to a seed later, which trains the global model again."""
    if all(len(values) == 1 for seeds in by_run.values() for values in seeds.values()):
        return []
    return ["pulls of a seed were run separately, each with its own global model: its numbers are their mean"]


def _note_unequal_seeds(by_seed: BySeed) -> list[str]:
    """A note if some rows have more seeds than others."""
    notes = []
    for part in dict.fromkeys(key.part for key in by_seed):
        shared = _shared_seeds(by_seed, part)
        if any(len(seeds) > len(shared) for key, seeds in by_seed.items() if key.part == part):
            common = f"the common seeds {', '.join(map(str, shared))}" if shared else "all seeds, as none is common"
            notes.append(f"rows of {part} have different seeds: claims compare them on {common}")
    return notes
