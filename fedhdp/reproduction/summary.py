"""A compared table as a value, and its file ``summary.json``, from which the table can be rendered without its runs.

The file has the numbers of each seed. Means, intervals and the paper's numbers are computed when it is read. A cell that
was measured before seeds were recorded has its mean, standard deviation and number of seeds instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
from msgspec.structs import replace

from fedhdp.errors import RunError
from fedhdp.experiments.presets import OPTED_OUT, PRIVATE
from fedhdp.reproduction import tables
from fedhdp.reproduction.claims import ClaimResult
from fedhdp.reproduction.extensions import EXTENSIONS
from fedhdp.reproduction.runner import Machine
from fedhdp.reproduction.runs import GroupCost, LineKey, column_means
from fedhdp.reproduction.tables import PaperTable, TableRow
from fedhdp.results.metrics import half_interval

SUMMARY = "summary.json"
PAPER_NAMES = {"fedhdp": "best FedHDP", "dp_fedavg": "DP-FedAvg"}  # of rows that a page compares with
CLOSE = 1.0  # points of accuracy within which a global model is close to the paper's


class Cell(msgspec.Struct, frozen=True):
    """A number over seeds, beside the paper's."""

    mean: float
    sd: float | None  # over seeds; None with one seed
    low: float | None  # of the 95% interval of the mean
    high: float | None
    count: int  # of seeds
    values: tuple[float, ...]  # of these seeds; empty in old tables
    paper: float | None = None
    difference: float | None = None
    covers_paper: bool | None = None  # whether the interval has the paper's number

    @property
    def half(self) -> float | None:
        """Half of the interval."""
        return None if self.high is None else self.high - self.mean


class Line(msgspec.Struct, frozen=True):
    """A line of the table: of personal models if it has a pull, else of the global model."""

    key: LineKey
    cells: dict[str, Cell]
    close: bool | None = None  # whether the global accuracy is within a point of the paper's
    seeds: tuple[int, ...] = ()


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    table: str
    data: str
    rounds: int
    sampling: dict[str, str]  # by part
    seeds: tuple[int, ...]
    unfinished: tuple[str, ...]
    seconds_per_seed: dict[str, float]  # by part
    machines: tuple[Machine, ...]
    version: str
    claims: tuple[ClaimResult, ...]
    costs: tuple[GroupCost, ...]
    notes: tuple[str, ...]


class Comparison(_Head, frozen=True, kw_only=True):
    """A table beside the paper's."""

    lines: tuple[Line, ...]

    @property
    def about(self) -> str:
        """The table in words."""
        table = tables.TABLES.get(self.table)
        return "several privacy levels on non-IID MNIST" if table is None else table.about

    @property
    def extensions(self) -> dict[str, str]:
        """The extensions among the lines, in words."""
        parts = (line.key.part for line in self.lines)
        return {part: EXTENSIONS[part].about for part in parts if part in EXTENSIONS}

    @property
    def global_lines(self) -> list[Line]:
        """The lines of the global model."""
        return [line for line in self.lines if line.key.pull is None]

    @property
    def personal_lines(self) -> list[Line]:
        """The lines of personal models."""
        return [line for line in self.lines if line.key.pull is not None]


def paper_accuracies(comparison: Comparison) -> list[tuple[str, float]]:
    """The paper's best accuracy of the global model by FedHDP and by DP-FedAvg, named, in percent."""
    best: dict[str, float] = {}
    for line in comparison.global_lines:
        cell = line.cells.get("acc_g")
        if cell is not None and cell.paper is not None:
            best[line.key.algorithm] = max(cell.paper, best.get(line.key.algorithm, 0.0))
    return [(f"paper: {name}", best[algorithm]) for algorithm, name in PAPER_NAMES.items() if algorithm in best]


class RowReport(msgspec.Struct, frozen=True):
    """A row of the global model as programs read it."""

    row: str
    part: str
    server_accuracy: float | None  # in percent, as all numbers of a table: the mean over seeds
    seeds: tuple[int, ...]
    epsilon: dict[str, float | None]  # by group; infinite where no noise protects it
    accountant: str | None


def row_reports(comparison: Comparison) -> list[RowReport]:
    """Each row of the global model with its accuracy, seeds, and epsilons."""
    reports = []
    for line in comparison.global_lines:
        of_part = [cost for cost in comparison.costs if cost.part == line.key.part]
        costs = [cost for cost in of_part if line.key.row in cost.rows]
        names = dict.fromkeys([OPTED_OUT, PRIVATE] if not of_part else [OPTED_OUT, *(cost.group for cost in of_part)])
        epsilons: dict[str, float | None] = dict.fromkeys(names, math.inf)
        epsilons.update((cost.group, cost.epsilon) for cost in costs)
        accuracy = line.cells["acc_g"].mean if "acc_g" in line.cells else None
        accountant = next((cost.accountant for cost in costs if cost.accountant), None)
        reports.append(RowReport(line.key.row, line.key.part, accuracy, line.seeds, epsilons, accountant))
    return reports


class Moments(msgspec.Struct, frozen=True):
    """A cell without its seeds' numbers."""

    mean: float
    sd: float | None
    seeds: int


def make_cell(numbers: Sequence[float] | Moments, paper: float | None = None) -> Cell:
    """Summarize numbers over seeds, beside the paper's."""
    values: tuple[float, ...] = ()
    if isinstance(numbers, Moments):
        mean, sd, count = numbers.mean, numbers.sd, numbers.seeds
    else:
        values, mean, count = tuple(numbers), fmean(numbers), len(numbers)
        sd = stdev(numbers) if count > 1 else None
    half = None if sd is None or count < 2 else (half_interval(range(count)) or math.nan) * sd / stdev(range(count))
    low, high = (None, None) if half is None else (mean - half, mean + half)
    cell = Cell(mean, sd, low, high, count, values)
    if paper is None:
        return cell
    covers = None if half is None else abs(mean - paper) <= half + 1e-9
    return replace(cell, paper=paper, difference=mean - paper, covers_paper=covers)


def make_line(key: LineKey, cells: Mapping[str, list[float] | Moments], seeds: Iterable[int], table: str) -> Line:
    """A line of the table, with the paper's numbers where it has them."""
    paper = _paper_numbers(key, tables.TABLES.get(table))
    compared = {column: make_cell(numbers, paper.get(column)) for column, numbers in cells.items()}
    difference = compared["acc_g"].difference if "acc_g" in compared else None
    close = None if difference is None or key.part != "paper" else abs(difference) <= CLOSE
    return Line(key, compared, close, tuple(seeds))


def _paper_numbers(key: LineKey, table: PaperTable | None) -> dict[str, float]:
    if table is None:
        return {}
    if key.part == "paper":
        row = TableRow(key.algorithm, key.weight if key.algorithm == "fedhdp" else None)
        return published_means(table, row, key.pull)
    return {"acc_g": published_best(table)} if key.pull is None else {}


def published_means(table: PaperTable, row: TableRow, pull: float | str | None) -> dict[str, float]:
    """The paper's numbers of a row at one pull; for the global model, the means over its three pulls."""
    rows = [line for line in tables.published_rows(table.dataset) if line.row == row and pull in (None, line.pull)]
    letter = "_g" if pull is None else "_l"
    columns = [name for name in tables.PUBLISHED_COLUMNS if letter in name]
    return column_means({name: row.numbers[name] for name in columns if name in row.numbers} for row in rows)


def published_best(table: PaperTable) -> float:
    """The paper's best accuracy of a global model of FedHDP."""
    rows = tables.published_rows(table.dataset)
    return max(line.numbers["acc_g"] for line in rows if line.row.algorithm == "fedhdp")


class _Row(LineKey, frozen=True, kw_only=True):
    seeds: tuple[int, ...]
    cells: dict[str, list[float] | Moments]


class _File(_Head, frozen=True, kw_only=True):
    rows: tuple[_Row, ...]


def encode_summary(comparison: Comparison) -> bytes:
    """The content of ``summary.json``: indented, with a line for each row."""
    head: dict[str, Any] = {name: getattr(comparison, name) for name in _Head.__struct_fields__}
    head["seconds_per_seed"] = {part: round(value, 1) for part, value in comparison.seconds_per_seed.items()}
    rows = []
    for line in comparison.lines:
        cells = {
            column: [round(value, 3) for value in cell.values] or Moments(cell.mean, cell.sd, cell.count)
            for column, cell in line.cells.items()
        }
        key = msgspec.structs.asdict(line.key)
        rows.append(msgspec.json.encode(_Row(**key, seeds=line.seeds, cells=cells)).decode())
    text = msgspec.json.format(msgspec.json.encode(head), indent=2).decode().rstrip("}\n")
    return (text + ',\n  "rows": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n").encode()


def read_summary(path: Path, table: str | None = None) -> Comparison:
    """Read ``summary.json``.

    Raises:
        RunError: If the file is not the summary of a table, or not of ``table``.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is not the summary of a table: {error}", "--out", path) from None
    if table not in (None, file.table):
        raise RunError(f"{path} has {file.table}, not {table}", "--out", path)
    fields = {name: getattr(file, name) for name in _Head.__struct_fields__}
    lines = []
    for row in file.rows:
        key = LineKey(*(getattr(row, name) for name in LineKey.__struct_fields__))
        lines.append(make_line(key, row.cells, row.seeds, file.table))
    return Comparison(**fields, lines=tuple(lines))


def difference_of_rows(comparison: Comparison, rows: Sequence[str], column: str = "acc_g") -> Cell:
    """The difference of two rows seed by seed, or one row as it is.

    Rows of one seed share its clients and often its cohorts, so the interval of their difference is not that of the rows.

    Args:
        comparison: The table.
        rows: One or two labels of rows of the global model.
        column: A column of the table.

    Raises:
        RunError: If there is no such row or column, or the rows share no seed.
    """
    by_seed = []
    labels = {line.key.row: line for line in comparison.global_lines if column in line.cells}
    for row in rows:
        if row not in labels:
            raise RunError(f"there is no row {row!r} with {column}; there are {', '.join(labels)}", "--compare", row)
        line = labels[row]
        values = line.cells[column].values
        by_seed.append(dict(zip(line.seeds if values else (), values, strict=True)))
    first, second = by_seed[0], by_seed[1] if len(rows) > 1 else dict.fromkeys(by_seed[0], 0.0)
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    if not differences:
        raise RunError(f"the rows {', '.join(rows)} share no seed's {column}", "--compare", rows)
    return make_cell(differences)
