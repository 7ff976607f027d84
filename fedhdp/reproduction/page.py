"""The page of results, made from the summaries and findings of its tables.

DOCS/intro.md             the head of the page
DOCS/TABLE/summary.json   a table, of `summary.py` or `causes.py`
DOCS/TABLE/findings.md    a heading, and findings in sentences
DOCS/TABLE/table.md       the whole table, made from the summary; so is table.png
DOCS.md                   the page

Numbers in findings are computed from the summary. ``{{ROW}}`` is the mean of the row's global accuracy, ``{{ROW - ROW}}``
the mean difference seed by seed, ``{{ROW / paper}}`` the difference from the paper; each with half of its interval.
``{{paper ROW}}`` is the paper's number. ``{{rivals}}`` says which rivals win. A column follows
after ``|``, a pull after ``@``: ``{{FedHDP r=0.01 @0.05 | acc_l_p}}``.
"""

from __future__ import annotations

import re
import shlex
from itertools import chain
from pathlib import Path

import msgspec

from fedhdp.errors import RunError
from fedhdp.reproduction import render, tables
from fedhdp.reproduction.causes import BASE_TABLES, Causes, causes_table
from fedhdp.reproduction.figures import draw
from fedhdp.reproduction.summary import SUMMARY, Cell, Comparison, difference_of_rows, read_summary
from fedhdp.results import store

MAX_PERSONAL_ROWS = 12  # a longer table of personal models is in the whole table only
FINDINGS = "findings.md"
NOTICE = "<!-- Made by `fedhdp reproduce --docs docs/results` from the folders of results/. -->"


def write_page(folder: Path) -> list[Path]:
    """Write the page, and each table with its figure.

    Args:
        folder: The folder of tables, such as ``docs/results``; the page is ``docs/results.md``.

    Returns:
        The files.

    Raises:
        RunError: If a summary or a number in findings cannot be read.
    """
    paths = []
    for path, table in read_tables(folder):
        if isinstance(table, Comparison):
            paths += [path / "table.md", path / "table.png"]
            store.atomic_write(paths[-2], render.markdown(table).encode())
            draw(table, paths[-1])
    page = folder.with_suffix(".md")
    store.atomic_write(page, render_page(folder).encode())
    return [page, *sorted(paths)]


def read_tables(folder: Path) -> list[tuple[Path, Comparison | Causes]]:
    """The tables with their folders, in the paper's order; within one table, most seeds first and causes last."""

    def order(item: tuple[Path, Comparison | Causes]) -> tuple:
        path, table = item
        name = BASE_TABLES.get(table.table, table.table)
        seeds = table.seeds if isinstance(table, Causes) else len(table.seeds)
        return [*tables.TABLES, "levels"].index(name), isinstance(table, Causes), -seeds, path.name

    return sorted(((path.parent, read_table(path)) for path in folder.glob(f"*/{SUMMARY}")), key=order)


def read_table(path: Path) -> Comparison | Causes:
    """Read ``summary.json`` of a table or of causes.

    Raises:
        RunError: If the file is something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Causes)
    except msgspec.MsgspecError:
        return read_summary(path)


def render_page(folder: Path) -> str:
    """The page as Markdown."""
    sections = [render_section(path, table) for path, table in read_tables(folder)]
    intro = (folder / "intro.md").read_text(encoding="utf-8").strip()
    return "\n\n".join([NOTICE, intro, *sections]) + "\n"


def render_section(path: Path, table: Comparison | Causes) -> str:
    """The section of one table: heading, commands, tables, figure and findings."""
    heading, _, findings = (path / FINDINGS).read_text(encoding="utf-8").partition("\n")
    title, findings, link = "#" + heading, findings.strip(), f"{path.parent.name}/{path.name}"
    if isinstance(table, Causes):
        return "\n\n".join([title, _shell(table.command), render.markdown_table(causes_table(table)), findings])
    personal = render.personal_table(table)
    several_levels = render.levels_table(table)
    texts = [several_levels if several_levels.rows else render.global_table(table), render.rivals_table(table)]
    texts += [personal] if len(personal.rows) <= MAX_PERSONAL_ROWS else []
    texts.append(render.claims_table(table))
    blocks = [title, _commands(table), f"Data: {table.data}."]
    blocks += [render.markdown_table(text) for text in texts if text.rows]
    if (path / "table.png").exists():
        blocks.append(f"![{heading.lstrip('# ')}]({link}/table.png)")
    return "\n\n".join([*blocks, fill_in(findings, table), f"[Whole table]({link}/table.md)"])


def _commands(comparison: Comparison) -> str:
    """The commands of the table; where rows, seeds and pulls were run one by one, the command that runs all."""
    words = [shlex.split(command) for command in render.commands(comparison)]
    if len(words) > 2:
        runs = [dict(zip(command[3::2], command[4::2], strict=True)) for command in words]
        common = {name: value for name, value in runs[0].items() if name not in ("--rows", "--seeds", "--pulls")}
        if all("--rows" in run and {**run, **common} == run for run in runs):  # in the order in which they were run
            common["--rows"] = ",".join(dict.fromkeys(row for run in runs for row in run["--rows"].split(",")))
        words = [[*words[0][:3], "--seeds", str(len(comparison.seeds)), *chain.from_iterable(common.items())]]
    return _shell(*map(shlex.join, words))


def _shell(*commands: str) -> str:
    return "```sh\n" + "\n".join(commands) + "\n```"


def fill_in(findings: str, comparison: Comparison) -> str:
    """The findings with their numbers.

    Raises:
        RunError: If the table does not have a number.
    """
    return re.sub(r"\{\{(.+?)\}\}", lambda match: _number(match.group(1), comparison), findings)


def _number(text: str, comparison: Comparison) -> str:
    if text == "rivals":
        return render.rivals_sentence(comparison)
    expression, _, column = (word.strip() for word in text.partition("|"))
    column = column or "acc_g"
    signed = column.startswith("delta")
    rows = [word.strip() for word in expression.split(" - ")]
    if len(rows) == 2:
        difference = difference_of_rows(comparison, rows, column)
        return _format(difference.mean, difference.half, sign=True)
    row = expression.removeprefix("paper ").removesuffix("/ paper")
    cell = _cell(comparison, row, column)
    if row == expression:
        return _format(cell.mean, cell.half, signed)
    if cell.paper is None or cell.difference is None:
        raise RunError(f"the paper has no {column} of {expression}", "--docs", text)
    if expression.startswith("paper "):
        return _format(cell.paper, None, signed)
    return _format(cell.difference, cell.half, sign=True)


def _cell(comparison: Comparison, row: str, column: str) -> Cell:
    label, _, pull = (word.strip() for word in row.partition("@"))
    for line in comparison.lines:
        same_pull = line.key.pull is None if not pull else str(line.key.pull) == pull
        if line.key.row == label and same_pull and column in line.cells:
            return line.cells[column]
    raise RunError(f"{comparison.table} has no {column} of {row!r}", "--docs", row)


def _format(value: float, half: float | None, sign: bool) -> str:
    text = (f"{value:+.2f}" if sign else f"{value:.2f}").replace("-", "−")
    return text + ("" if half is None else f" ±{half:.2f}")
