"""A table beside the paper's: means and spreads over seeds, and cell by cell how they compare.

The training of the global model does not depend on the pull, so the paper's three blocks of pulls are three runs of it:
its numbers for the global model are their means. A cell's interval is Student's, of 95%, for the mean over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev

import msgspec

import fedhdp
from fedhdp.reproduction import tables as paper
from fedhdp.reproduction.claims import Ordering, View, orderings
from fedhdp.reproduction.extensions import LEVELS, OURS
from fedhdp.reproduction.runner import Machine
from fedhdp.reproduction.runs import Key, Priced, Run, mean_of, numbers, part_order, priced, read_runs
from fedhdp.reproduction.tables import PaperTable, Row
from fedhdp.results.metrics import half_interval

CLOSE = 1.0  # points of accuracy within which a global model is called close
SIBLINGS = {"noniid-mnist": "skewed-mnist", "skewed-mnist": "noniid-mnist"}


BySeed = dict[Key, dict[int, dict[str, float]]]  # a row's numbers by column, for each seed


class Cell(msgspec.Struct, frozen=True):
    """A number of ours, over seeds, beside the paper's."""

    mean: float
    sd: float | None  # over seeds; None: there is one
    low: float | None  # the interval of the mean
    high: float | None
    values: tuple[float, ...]  # one for each of its line's seeds that has it
    paper: float | None = None
    difference: float | None = None
    holds: bool | None = None  # whether the interval holds the paper's number


class Line(msgspec.Struct, frozen=True):
    """A row of the table; with a pull it is of personal models, without one of the global model."""

    key: Key
    cells: dict[str, Cell]
    close: bool | None = None  # whether the global accuracy is within a point of the paper's
    seeds: tuple[int, ...] = ()


class Comparison(msgspec.Struct, frozen=True):
    """All that is to be said about a table."""

    table: str
    about: str
    data: str
    rounds: int
    sampling: dict[str, str]  # by part
    seeds: tuple[int, ...]
    unfinished: tuple[str, ...]
    lines: tuple[Line, ...]
    prices: tuple[Priced, ...]
    orderings: tuple[Ordering, ...]
    notes: tuple[str, ...]
    own: dict[str, str]  # what the rows of our own are
    seconds: dict[str, float]  # by part, the mean over seeds
    machines: tuple[Machine, ...]
    version: str = fedhdp.__version__

    @property
    def global_lines(self) -> list[Line]:
        """The rows of the global model."""
        return [line for line in self.lines if line.key.pull is None]

    @property
    def personal_lines(self) -> list[Line]:
        """The rows of personal models."""
        return [line for line in self.lines if line.key.pull is not None]


def cell(values: Iterable[float], papers: float | None = None) -> Cell:
    """Numbers over seeds beside the paper's."""
    found = tuple(values)
    mean, sd, low, high, holds = fmean(found), None, None, None, None
    half = half_interval(found)
    if half is not None:
        sd, low, high = stdev(found), mean - half, mean + half
        holds = None if papers is None else low - 1e-9 <= papers <= high + 1e-9
    return Cell(mean, sd, low, high, found, papers, None if papers is None else mean - papers, holds)


def _seconds(runs: list[Run]) -> dict[str, float]:
    """How long each part took, the mean over seeds."""
    taken: dict[str, dict[int, float]] = {}
    for run in runs:
        by_seed = taken.setdefault(run.part, {})
        by_seed[run.seed] = by_seed.get(run.seed, 0.0) + run.summary.seconds
    return {part: fmean(by_seed.values()) for part, by_seed in taken.items()}


def papers_numbers(table: PaperTable, row: Row, pull: float | str | None) -> dict[str, float]:
    """The paper's numbers for a row: of one pull, or of the global model, the mean over its three runs."""
    lines = [line for line in paper.printed(table.dataset) if line.row == row and pull in (None, line.pull)]
    letter = "_g" if pull is None else "_l"
    names = [name for name in paper.NUMBERS if letter in name]
    found = {name: [line.numbers[name] for line in lines if name in line.numbers] for name in names}
    return {name: fmean(values) for name, values in found.items() if values}


def papers_best(table: PaperTable) -> float:
    """The best accuracy that the paper prints for a global model of FedHDP."""
    return max(line.numbers["acc_g"] for line in paper.printed(table.dataset) if line.row.algorithm == "fedhdp")


def compare(out: Path, table: str) -> Comparison:
    """Read a table's folder, and set it beside the paper."""
    runs, unfinished = read_runs(out, table)
    if not runs:
        raise ValueError(
            f"{out} holds no finished part of {table}" + (f" ({unfinished[0]} is begun)" if unfinished else "")
        )
    theirs = paper.TABLES.get(table)
    by_run: dict[Key, dict[int, list[dict[str, float]]]] = {}
    for run in runs:
        for key, values in numbers(run).items():
            by_run.setdefault(key, {}).setdefault(run.seed, []).append(values)
    by_key = {key: {seed: mean_of(found) for seed, found in seeds.items()} for key, seeds in by_run.items()}
    lines = tuple(_line(key, found, theirs) for key, found in sorted(by_key.items(), key=lambda item: _order(item[0])))
    first = runs[0].experiment
    return Comparison(
        table,
        "several privacy levels on non-IID MNIST" if theirs is None else theirs.about,
        paper.stands_for(theirs or paper.TABLES["noniid-mnist"], first.data),
        first.rounds,
        {run.part: run.experiment.mechanism.sampling for run in runs},
        tuple(sorted({run.seed for run in runs})),
        tuple(unfinished),
        lines,
        tuple(priced(runs)),
        tuple(_orderings(out, table, by_key)),
        tuple(_notes(runs, lines, theirs) + _trained_again(by_run) + _unequal(by_key)),
        {line.key.part: OURS[line.key.part].about for line in lines if line.key.part in OURS},
        _seconds(runs),
        tuple(dict.fromkeys(run.machine for run in runs if run.machine is not None)),
    )


def _line(key: Key, found: dict[int, dict[str, float]], table: PaperTable | None) -> Line:
    papers: dict[str, float] = {}
    if table is not None and key.part == "paper":
        papers = papers_numbers(table, Row(key.algorithm, key.weight if key.algorithm == "fedhdp" else None), key.pull)
    elif table is not None and key.pull is None:
        papers = {"acc_g": papers_best(table)}
    columns = dict.fromkeys(column for values in found.values() for column in values)
    cells = {c: cell([values[c] for values in found.values() if c in values], papers.get(c)) for c in columns}
    difference = cells["acc_g"].difference if "acc_g" in cells else None
    close = None if difference is None or key.part != "paper" else abs(difference) <= CLOSE
    return Line(key, cells, close, tuple(found))


def _order(key: Key) -> tuple:
    """The paper's rows as the paper has them, pull by pull; ours as they are written down, row by row."""
    algorithms = ["non_private", "dp_fedavg", "hdp_fedavg", "fedhdp"]
    pull = (0, 0.0) if key.pull is None else (1, key.pull) if isinstance(key.pull, float) else (2, 0.0)
    place = algorithms.index(key.algorithm) if key.algorithm in algorithms else len(algorithms)
    row = (place, -1.0 if key.weight is None else key.weight, key.row)
    return part_order(key.part), *((pull, row) if key.part == "paper" else (row, pull))


def _orderings(out: Path, table: str, by_key: BySeed) -> list[Ordering]:
    shared = {part: _shared_seeds(by_key, part) for part in {key.part for key in by_key}}
    same = {
        key: {seed: found[seed] for seed in shared[key.part] or found if seed in found} for key, found in by_key.items()
    }
    ours = _view((key, mean_of(list(found.values()))) for key, found in same.items())
    theirs, pair = (_papers_view(paper.TABLES.get(name)) for name in (table, SIBLINGS.get(table, "")))
    bar = papers_best(paper.TABLES[table]) if table in paper.TABLES else math.inf
    return orderings(table, ours, views(same), theirs, _sibling(out, table), pair, bar)


def _shared_seeds(by_key: BySeed, part: str) -> list[int]:
    """The seeds that all rows of a part have: who is above whom is a question about the same seeds."""
    have = [set(found) for key, found in by_key.items() if key.part == part]
    return sorted(set.intersection(*have))


def views(by_key: BySeed) -> list[View]:
    """What orderings are checked on, for each seed by itself."""
    seeds = sorted({seed for found in by_key.values() for seed in found})
    return [_view((key, found[seed]) for key, found in by_key.items() if seed in found) for seed in seeds]


def _papers_view(table: PaperTable | None) -> View:
    if table is None:
        return {}
    rows = paper.paper_rows(table)
    found = [(row, pull, papers_numbers(table, row, pull)) for row in rows for pull in (None, *paper.PULLS)]
    return _view((Key("paper", row.label, *row, pull), values) for row, pull, values in found)


def _view(lines: Iterable[tuple[Key, dict[str, float]]]) -> View:
    """The table as orderings are checked on it: each row's numbers, personal ones at the pull that is best for them."""
    found: View = {}
    for key, values in lines:
        row = found.setdefault((key.part, key.row if key.part in LEVELS else key.algorithm, key.weight), {})
        for name, value in values.items():
            row[name] = max(value, row.get(name, -math.inf))
    return found


def _sibling(out: Path, table: str) -> View:
    """The other table of a pair, where it lies in a folder beside this one."""
    for path in sorted(out.resolve().parent.glob("*/table.json")) if table in SIBLINGS else ():
        try:
            other = msgspec.json.decode(path.read_bytes(), type=Comparison)
        except (OSError, msgspec.MsgspecError):
            continue
        if other.table == SIBLINGS[table]:
            return _view((line.key, {name: cell.mean for name, cell in line.cells.items()}) for line in other.lines)
    return {}


def _trained_again(by_run: dict[Key, dict[int, list[dict[str, float]]]]) -> list[str]:
    """That pulls were added later to a seed: each portion trained the global model anew."""
    if all(len(found) == 1 for seeds in by_run.values() for found in seeds.values()):
        return []
    return [
        "pulls of a seed were run in several portions, each with a global model of its own: its numbers are their mean"
    ]


def _unequal(by_key: BySeed) -> list[str]:
    """That some rows have more seeds than others."""
    said = []
    for part in dict.fromkeys(key.part for key in by_key):
        have, shared = {key: found for key, found in by_key.items() if key.part == part}, _shared_seeds(by_key, part)
        if any(len(found) > len(shared) for found in have.values()):
            on = f"on seeds {', '.join(map(str, shared))}, which all have" if shared else "although no seed is in all"
            said.append(f"rows of {part} have unequal seeds (those without ± have one): orderings compare them {on}")
    return said


def _notes(runs: list[Run], lines: Iterable[Line], table: PaperTable | None) -> list[str]:
    """What else a reader of the table must know."""
    found = []
    rate = runs[0].experiment.mechanism.groups[-1].sampling_rate
    if table is not None and rate != table.sampling_rate:
        found.append(
            f"a client comes to a round with chance {100 * rate:.3g}%, not the paper's {100 * table.sampling_rate:g}%, so "
            f"that cohorts are as large with other clients: epsilons are those above, not the paper's {table.epsilon:g}"
        )
    if all(run.experiment.training.whole_batches for run in runs):
        found.append(
            "an epoch's last batch is left out where it is not whole; the paper does not say (--batches all trains on it)"
        )
    for epochs in sorted({run.experiment.training.personal_epochs or 0 for run in runs} - {0}):
        found.append(
            f"personal models train for {epochs} of a round's epochs, where the algorithm has them train for all"
        )
    if not any(run.experiment.training.personalize for run in runs):
        found.append("no personal models were trained (--pulls none)")
    elif any(line.key.weight == 0 for line in lines):
        found.append(
            "r=0: the paper gives private clients no personal models there, so theirs are its global ones; ours have"
        )
    if any(variant.repeatable for run in runs for variant in run.summary.variants):
        found.append("noise and cohorts came from a given seed: repeatable, and therefore not private")
    refused = sum(group.refused for run in runs for variant in run.summary.variants for group in variant.groups)
    return found + ([f"{refused} updates were not finite and were refused"] if refused else [])
