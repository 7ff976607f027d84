"""A compared table as text and files: cells, footnotes and claims, for terminals, Markdown and programs.

OUT/table.md      for readers
OUT/table.csv     a line for each number
OUT/table.png     accuracy against the weight
OUT/summary.json  everything; the other files are made from it
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedhdp.privacy.accounting import format_epsilon, pluralize
from fedhdp.reproduction import tables
from fedhdp.reproduction.levels import LEVEL_TABLES, OURS, rival_labels
from fedhdp.reproduction.runs import GROUP_CODES
from fedhdp.reproduction.summary import SUMMARY, Cell, Comparison, Line, difference_of_rows, encode_summary
from fedhdp.results import store

LEGEND = (
    "±: half of the 95% interval of the mean over seeds; = after the paper's number: the interval has it; "
    "✓ after a difference: within 1 point"
)
AVERAGE_NOTE = "average: the exponential average of the global models on the server's test set, at no privacy cost"
CSV_COLUMNS = (
    *("part", "row", "weight", "pull", "column", "mean", "sd"),
    *("seeds", "low", "high", "paper", "difference", "covers_paper"),
)


class TextTable(NamedTuple):
    """A table of text; rows of different blocks are separated by a line."""

    header: list[str]
    rows: list[list[str]]
    blocks: Sequence[object]


def title(comparison: Comparison) -> list[str]:
    """The table, its data, rounds and seeds."""
    seeds = comparison.seeds
    numbers = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"
    lines = [
        f"{comparison.table}: {comparison.about}",
        f"data: {comparison.data}; {pluralize(comparison.rounds)}, {numbers}",
    ]
    return lines + ([f"not finished: {', '.join(comparison.unfinished)}"] if comparison.unfinished else [])


def global_table(comparison: Comparison, wide: bool = True) -> TextTable:
    """The table of the global model; narrow ones have no variances and no average."""
    lines = comparison.global_lines
    groups = _groups(lines, "g")
    has_paper = _has_paper(lines, "acc_g")
    header = ["global model", "Acc_g", *(["paper", "diff"] if has_paper else [])]
    header += _group_headers("g", groups, lines, wide) + (["average"] if wide else [])
    rows = []
    for line in lines:
        server = line.cells.get("acc_g")
        cells = [line.key.row, _format_cell(server)]
        cells += [_format_paper(server), _format_difference(line)] if has_paper else []
        cells += _group_cells(line, "g", groups, lines, wide)
        rows.append(cells + ([_format_cell(line.cells.get("average"))] if wide else []))
    return TextTable(header, rows, [_block(line) for line in lines])


def personal_table(comparison: Comparison, wide: bool = True) -> TextTable:
    """The table of personal models; narrow ones have no variances."""
    lines = comparison.personal_lines
    groups = _groups(lines, "l")
    header = ["personal models", "λ", *_group_headers("l", groups, lines, wide)]
    rows = [[line.key.row, str(line.key.pull), *_group_cells(line, "l", groups, lines, wide)] for line in lines]
    return TextTable(header, rows, [(_block(line), line.key.part == "paper" and line.key.pull) for line in lines])


def claims_table(comparison: Comparison) -> TextTable:
    """The claims that the rows measure, and whether they held."""
    rows = []
    for result in comparison.claims:
        if result.verdict == "not measured":
            continue
        seeds = f", {result.seeds_held} of {result.seeds} seeds" if result.seeds > 1 else ""
        paper = f"{result.paper_verdict}: {result.paper_numbers}" if result.paper_numbers else "–"
        rows.append([result.claim, result.verdict + seeds, result.numbers or "–", paper])
    return TextTable(["claim", "measured", "numbers", "in the paper's numbers"], rows, [None] * len(rows))


def levels_table(comparison: Comparison) -> TextTable:
    """The global accuracy of each method in each part of several levels."""
    parts, methods = _parts_and_methods(comparison)
    cells = {line.key.row: line.cells.get("acc_g") for line in comparison.global_lines}
    rows = [[method, *(_format_cell(cells.get(f"{part}: {method}")) for part in parts)] for method in methods]
    return TextTable(["accuracy of the global model, %", *parts], rows, [None] * len(rows))


def rivals_table(comparison: Comparison) -> TextTable:
    """How far each method is above FedHDP in each part, seed by seed; bold where a rival wins."""
    parts, methods = _parts_and_methods(comparison)
    rows = []
    for method in methods:
        cells = [_above_ours(comparison, part, method) for part in parts]
        if method != OURS and any(cells):
            texts = ["–" if cell is None else _format_gain(cell) for cell in cells]
            won = [cell is not None and _wins(cell) for cell in cells]
            is_rival = bool(rival_labels("", [f": {method}"]))
            bold = [f"**{text}**" if is_rival and wins else text for text, wins in zip(texts, won, strict=True)]
            rows.append([method, *bold])
    return TextTable([f"points above {OURS}", *parts], rows, [None] * len(rows))


def rivals_sentence(comparison: Comparison) -> str:
    """Which rivals win against FedHDP: those that are above it by more than the ± of the difference."""
    parts, methods = _parts_and_methods(comparison)
    rows = [(part, method) for part in parts for method in methods if rival_labels("", [f": {method}"])]
    cells = {row: cell for row in rows if (cell := _above_ours(comparison, *row)) is not None}
    if not cells:
        return "This table has no rows of rivals."
    if len(comparison.seeds) == 1:
        return "One seed decides no winner."
    winners = [f"{part}: {method} ({_format_gain(cell)})" for (part, method), cell in cells.items() if _wins(cell)]
    if not winners:
        return f"None of {len(cells)} rows of rivals is above FedHDP by more than the ± of the difference."
    return f"Rivals win in {len(winners)} of {len(cells)} rows: {'; '.join(winners)}."


def _parts_and_methods(comparison: Comparison) -> tuple[list[str], list[str]]:
    """The parts of several levels that the table has, and the methods in any of them."""
    lines = [line for line in comparison.global_lines if line.key.part in LEVEL_TABLES]
    parts = [part for part in LEVEL_TABLES if any(line.key.part == part for line in lines)]
    return parts, list(dict.fromkeys(line.key.row.partition(": ")[2] for line in lines))


def _above_ours(comparison: Comparison, part: str, method: str) -> Cell | None:
    """How far a method is above FedHDP, seed by seed; None where a row is missing."""
    labels, rows = {line.key.row for line in comparison.global_lines}, [f"{part}: {method}", f"{part}: {OURS}"]
    return difference_of_rows(comparison, rows) if labels.issuperset(rows) else None


def _wins(cell: Cell) -> bool:
    return cell.half is not None and cell.mean > cell.half


def _format_gain(cell: Cell) -> str:
    return f"{cell.mean:+.2f}" + ("" if cell.half is None else f" ±{cell.half:.2f}")


def _block(line: Line) -> str:
    return line.key.part if line.key.part in ("paper", *LEVEL_TABLES) else "extensions"


def _groups(lines: list[Line], letter: str) -> list[str]:
    """The codes of the groups that have a column; the paper's in the paper's order."""
    prefix = f"acc_{letter}_"
    widest = sorted(lines, key=lambda line: -len(line.cells))
    codes = dict.fromkeys(c.removeprefix(prefix) for line in widest for c in line.cells if c.startswith(prefix))
    return ["p", "np"] if set(codes) == {"p", "np"} else list(codes)


def _group_headers(letter: str, groups: list[str], lines: list[Line], wide: bool) -> list[str]:
    names, header = {code: name for name, code in GROUP_CODES.items()}, []
    for group in groups:
        header.append(f"{letter}: {names.get(group, group)}")
        header += ["worst tenth"] if wide and _has_worst(lines, letter, group) else []
        header += ["paper"] if _has_paper(lines, f"acc_{letter}_{group}") else []
    return header + ([f"Δ_{letter}"] if wide and groups == ["p", "np"] else [])


def _group_cells(line: Line, letter: str, groups: list[str], lines: list[Line], wide: bool) -> list[str]:
    cells = []
    for group in groups:
        accuracy, variance = (line.cells.get(f"{kind}_{letter}_{group}") for kind in ("acc", "var"))
        cells.append(_format_cell(accuracy, variance if wide else None))
        if wide and _has_worst(lines, letter, group):
            cells.append(_format_cell(line.cells.get(f"worst_{letter}_{group}")))
        if _has_paper(lines, f"acc_{letter}_{group}"):
            cells.append(_format_paper(accuracy, variance if wide else None))
    delta = line.cells.get(f"delta_{letter}")
    return cells + (["–" if delta is None else f"{delta.mean:+.2f}"] if wide and groups == ["p", "np"] else [])


def _has_worst(lines: list[Line], letter: str, group: str) -> bool:
    """Whether the table shows the worst decile of the group's clients: of personal models, where it was measured."""
    return letter == "l" and any(f"worst_{letter}_{group}" in line.cells for line in lines)


def _has_paper(lines: list[Line], column: str) -> bool:
    return any(column in line.cells and line.cells[column].paper is not None for line in lines)


def _format_cell(cell: Cell | None, variance: Cell | None = None) -> str:
    if cell is None:
        return "–"
    half = "" if cell.half is None else f" ±{cell.half:.2f}"
    return f"{cell.mean:.2f}{half}" + ("" if variance is None else f" ({_format_variance(variance.mean)})")


def _format_paper(cell: Cell | None, variance: Cell | None = None) -> str:
    if cell is None or cell.paper is None:
        return "–"
    spread = "" if variance is None or variance.paper is None else f" ({_format_variance(variance.paper)})"
    return f"{cell.paper:.2f}{'=' if cell.covers_paper else ''}{spread}"


def _format_variance(variance: float) -> str:
    return f"{variance:.2f}" if variance >= 0.1 else f"{variance:.3f}"


def _format_difference(line: Line) -> str:
    difference = line.cells["acc_g"].difference if "acc_g" in line.cells else None
    return "–" if difference is None else f"{difference:+.2f}{' ✓' if line.close else '  '}"


def footnotes(comparison: Comparison) -> list[str]:
    """The meaning of the columns, the epsilons with their basis, and notes."""
    notes = [LEGEND if len(comparison.seeds) > 1 else "one seed: no intervals; ✓ after a difference: within 1 point"]
    notes.append(AVERAGE_NOTE)
    table = tables.TABLES.get(comparison.table)
    if table is not None:
        notes.append("paper: for the global model the mean of its three runs (the pull does not change it)")
    if comparison.extensions and table is not None:
        notes.append("extensions sample by Poisson; beside them stands the paper's best global model of FedHDP")
        notes += [f"  {name}: {about}" for name, about in comparison.extensions.items()]
    return notes + _cost_notes(comparison, table.epsilon if table else None) + list(comparison.notes)


def _cost_notes(comparison: Comparison, stated: float | None) -> list[str]:
    """Each epsilon once, with its rows."""
    rows: dict[str, list[str]] = {}
    for cost in comparison.costs:
        amount = "" if cost.epsilon is None else f" = {format_epsilon(cost.epsilon, 2)}"
        text = f"ε {cost.group}{amount}: {cost.basis}"
        if cost.poisson_epsilon is not None:
            text += f"; with Poisson sampling at the same noise {format_epsilon(cost.poisson_epsilon, 2)}"
        rows.setdefault(text, []).extend(cost.rows)
    notes = [f"{text} [{', '.join(dict.fromkeys(labels))}]" for text, labels in rows.items()]
    if stated is not None and "fixed" in comparison.sampling.values():
        notes.append(
            f"the paper states ε = {stated:g} at delta 1e-4, which holds for Poisson sampling; its algorithm has cohorts "
            "of fixed size, which these runs have too, a share of each group (--sampling poisson has the other)"
        )
    return notes


def commands(comparison: Comparison) -> list[str]:
    """The commands that ran the table."""
    return list(dict.fromkeys(machine.command for machine in comparison.machines))


def markdown(comparison: Comparison) -> str:
    """The table as a page."""
    machines = dict.fromkeys(f"{m.devices} × {m.device}, {m.system}, jax {m.jax}" for m in comparison.machines)
    head, *lines = title(comparison)
    blocks = [f"# {head}", *lines, *(f"`{command}`" for command in commands(comparison))]
    texts = (global_table(comparison), rivals_table(comparison), personal_table(comparison), claims_table(comparison))
    blocks += [markdown_table(table) for table in texts if table.rows]
    seconds = ", ".join(f"{part} {value:.0f}" for part, value in comparison.seconds_per_seed.items())
    duration = [f"seconds per seed: {seconds}"] if seconds else []  # a machine that did other work has none to report
    duration += [f"on {'; '.join(machines)}"] if machines else []
    blocks.append("\n".join(f"- {note.strip()}" for note in [*footnotes(comparison), ", ".join(duration)] if note))
    return "\n\n".join(blocks) + "\n"


def markdown_table(table: TextTable) -> str:
    """The table in Markdown; columns of numbers are aligned to the right."""
    names = 1 if table.header[0] != "claim" else len(table.header)
    lines = [table.header, ["---"] * names + ["---:"] * (len(table.header) - names), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def numbers_csv(comparison: Comparison) -> str:
    """A line for each number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for line in comparison.lines:
        key = (line.key.part, line.key.row, line.key.weight, line.key.pull)
        for column, cell in line.cells.items():
            statistics = (cell.mean, cell.sd, cell.count, cell.low, cell.high)
            writer.writerow([*key, column, *statistics, cell.paper, cell.difference, cell.covers_paper])
    return text.getvalue()


def write(out: Path, comparison: Comparison) -> list[Path]:
    """Write all files of a table into its directory, and return their paths."""
    from fedhdp.reproduction.figures import draw

    contents = {
        SUMMARY: encode_summary(comparison),
        "table.md": markdown(comparison).encode(),
        "table.csv": numbers_csv(comparison).encode(),
    }
    for name, content in contents.items():
        store.atomic_write(out / name, content)
    draw(comparison, out / "table.png")
    return [out / name for name in (*contents, "table.png")]
