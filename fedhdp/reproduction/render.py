"""A compared table as text: cells, footnotes and orderings, for a terminal and for Markdown."""

from __future__ import annotations

from typing import NamedTuple

from fedhdp.privacy.accounting import format_epsilon, pluralize
from fedhdp.reproduction import tables as paper
from fedhdp.reproduction.comparison import Cell, Comparison, Line
from fedhdp.reproduction.extensions import LEVELS
from fedhdp.reproduction.runs import SHORT

LEGEND = (
    "±: half of the 95% interval of the mean over seeds; = after the paper's number: the interval holds it; "
    "✓ after a difference: within 1 point"
)


def title(found: Comparison) -> list[str]:
    """What the table is of."""
    seeds = f"{len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''} ({', '.join(map(str, found.seeds))})"
    lines = [f"{found.table}: {found.about}", f"data: {found.data}; {pluralize(found.rounds)}, {seeds}"]
    return lines + ([f"not finished, and left out: {', '.join(found.unfinished)}"] if found.unfinished else [])


class Shown(NamedTuple):
    """A table as it is shown; wherever a block changes, a line is drawn."""

    header: list[str]
    rows: list[list[str]]
    blocks: list[object]


def global_table(found: Comparison, wide: bool = True) -> Shown:
    """The global model's table."""
    lines, groups = found.global_lines, _groups(found.global_lines, "g")
    compared = any(line.cells["acc_g"].paper is not None for line in lines if "acc_g" in line.cells)
    header = ["global model", "Acc_g", *(["paper", "diff"] if compared else [])]
    header += _group_headers("g", groups, lines, wide) + (["average"] if wide else [])
    rows = []
    for line in lines:
        server = line.cells.get("acc_g")
        cells = [line.key.row, _ours(server), *([_papers(server), _difference(line)] if compared else [])]
        average = [_ours(line.cells.get("average"))] if wide else []
        rows.append([*cells, *_group_cells(line, "g", groups, lines, wide), *average])
    return Shown(header, rows, [_block(line) for line in lines])


def personal_table(found: Comparison, wide: bool = True) -> Shown:
    """The personal models' table."""
    lines, groups = found.personal_lines, _groups(found.personal_lines, "l")
    header = ["personal models", "λ", *_group_headers("l", groups, lines, wide)]
    rows = [[line.key.row, str(line.key.pull), *_group_cells(line, "l", groups, lines, wide)] for line in lines]
    return Shown(header, rows, [(_block(line), line.key.part == "paper" and line.key.pull) for line in lines])


def _block(line: Line) -> str:
    return line.key.part if line.key.part in ("paper", *LEVELS) else "ours"


def _groups(lines: list[Line], letter: str) -> list[str]:
    """The groups that have a column, under their short names; the paper's in the paper's order."""
    prefix = f"acc_{letter}_"
    widest = sorted(lines, key=lambda line: -len(line.cells))
    found = dict.fromkeys(c.removeprefix(prefix) for line in widest for c in line.cells if c.startswith(prefix))
    return ["p", "np"] if set(found) == {"p", "np"} else list(found)


def _group_headers(letter: str, groups: list[str], lines: list[Line], wide: bool) -> list[str]:
    names, header = {short: name for name, short in SHORT.items()}, []
    for group in groups:
        header.append(f"{letter}: {names.get(group, group)}")
        header += ["paper"] if _compared(lines, f"acc_{letter}_{group}") else []
    return header + ([f"Δ_{letter}"] if wide and groups == ["p", "np"] else [])


def _group_cells(line: Line, letter: str, groups: list[str], lines: list[Line], wide: bool) -> list[str]:
    cells = []
    for group in groups:
        accuracy, variance = (line.cells.get(f"{kind}_{letter}_{group}") for kind in ("acc", "var"))
        cells.append(_ours(accuracy, variance if wide else None))
        if _compared(lines, f"acc_{letter}_{group}"):
            cells.append(_papers(accuracy, variance if wide else None))
    delta = line.cells.get(f"delta_{letter}")
    return cells + (["–" if delta is None else f"{delta.mean:+.2f}"] if wide and groups == ["p", "np"] else [])


def _compared(lines: list[Line], column: str) -> bool:
    return any(column in line.cells and line.cells[column].paper is not None for line in lines)


def _ours(cell: Cell | None, variance: Cell | None = None) -> str:
    if cell is None:
        return "–"
    half = "" if cell.high is None else f" ±{cell.high - cell.mean:.2f}"
    return f"{cell.mean:.2f}{half}" + ("" if variance is None else f" ({_fine(variance.mean)})")


def _papers(cell: Cell | None, variance: Cell | None = None) -> str:
    if cell is None or cell.paper is None:
        return "–"
    spread = "" if variance is None or variance.paper is None else f" ({_fine(variance.paper)})"
    return f"{cell.paper:.2f}{'=' if cell.holds else ''}{spread}"


def _fine(variance: float) -> str:
    return f"{variance:.2f}" if variance >= 0.1 else f"{variance:.3f}"


def _difference(line: Line) -> str:
    difference = line.cells["acc_g"].difference if "acc_g" in line.cells else None
    mark = {True: " ✓", False: "  ", None: "  "}[line.close]
    return "–" if difference is None else f"{difference:+.2f}{mark}"


def footnotes(found: Comparison) -> list[str]:
    """What the columns are, what the epsilons rest on, and what else a reader must know."""
    said = [LEGEND] if len(found.seeds) > 1 else ["one seed: no intervals; ✓ after a difference: within 1 point"]
    said.append(
        "average: the exponential average of the global models on the server's test set, which costs no privacy"
    )
    theirs = paper.TABLES.get(found.table)
    if theirs is not None:
        said.append("paper: for the global model the mean of its three runs (the pull does not change it)")
    if found.own and theirs is not None:
        said.append("rows of ours, with Poisson sampling, stand beside the best that the paper prints for FedHDP")
        said += [f"  {name}: {about}" for name, about in found.own.items()]
    return said + _prices(found, theirs.epsilon if theirs else None) + list(found.notes)


def _prices(found: Comparison, stated: float | None) -> list[str]:
    """Each epsilon once, with the rows that paid it."""
    said: dict[str, list[str]] = {}
    for one in found.prices:
        amount = "" if one.epsilon is None else f" = {_both(one.epsilon, one.epsilon_pld)}"
        text = f"ε {one.group}{amount}: {one.basis}"
        if one.poisson is not None:
            text += f"; Poisson sampling at the same noise would cost {_both(one.poisson, one.poisson_pld)}"
        said.setdefault(text, []).extend(one.rows)
    notes = [f"{text} [{', '.join(dict.fromkeys(rows))}]" for text, rows in said.items()]
    if stated is not None and "fixed" in found.sampling.values():
        notes.append(
            f"the paper states ε = {stated:g} at delta 1e-4, which holds for Poisson sampling; its algorithm draws "
            "cohorts of fixed size: such, each group its share, were run and priced here (--sampling poisson runs the other)"
        )
    return notes


def _both(rdp: float, pld: float | None) -> str:
    return format_epsilon(rdp, 2) + ("" if pld is None else f" (by PLD {format_epsilon(pld, 2)})")


def orderings_table(found: Comparison) -> Shown:
    """What the paper claims, and whether it held."""
    rows = []
    for one in found.orderings:
        seeds = f", {one.seeds_held} of {one.seeds} seeds" if one.seeds > 1 else ""
        theirs = f"{one.papers_verdict}: {one.papers_numbers}" if one.papers_numbers else "–"
        rows.append([one.claim, one.verdict + seeds, one.numbers or "–", theirs])
    return Shown(["the paper's orderings", "here", "numbers", "in the paper's own numbers"], rows, [None] * len(rows))


def markdown(found: Comparison) -> str:
    """The whole as a page."""
    commands = dict.fromkeys(machine.command for machine in found.machines)
    machines = dict.fromkeys(f"{m.devices} × {m.device}, {m.system}, jax {m.jax}" for m in found.machines)
    head, *rest = title(found)
    blocks = [f"# {head}", *rest, *(f"`{command}`" for command in commands)]
    for table in (global_table(found), personal_table(found), orderings_table(found)):
        if table.rows:
            blocks.append(_markdown_table(table.header, table.rows))
    seconds = ", ".join(f"{part} {value:.0f}" for part, value in found.seconds.items())
    ran = [f"Seconds a seed: {seconds}" + (f", on {'; '.join(machines)}" if machines else "")]
    blocks += ["\n".join(f"- {note.strip()}" for note in [*footnotes(found), *ran])]
    return "\n\n".join(blocks) + "\n"


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
