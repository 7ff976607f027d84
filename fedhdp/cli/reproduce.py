"""`fedhdp reproduce`: the paper's tables, run again and set beside it cell by cell."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
import typer
from rich.console import Console
from rich.table import Table

from fedhdp.cli._output import print_json, table

if TYPE_CHECKING:
    from fedhdp.reproduction.comparison import Comparison
    from fedhdp.reproduction.render import Shown
    from fedhdp.reproduction.tables import Part


def reproduce(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="TABLE", help="noniid-mnist, skewed-mnist, fmnist, femnist, or levels (ours).")
    ],
    seeds: Annotated[str, typer.Option(metavar="K or A-B", help="How many seeds, from 0 on; or which.")] = "1",
    rows: Annotated[
        str | None,
        typer.Option(help="Which rows, such as non-private,dp-fedavg,fedhdp:0.01,ours; default all of the table."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="auto (the paper's or the nearest there is), mnist, tff, leaf, writers or handwriting.")
    ] = "auto",
    sampling: Annotated[
        Literal["fixed", "poisson"] | None,
        typer.Option(
            help="fixed: cohorts of fixed size, as the paper's algorithm has them, the default of its rows; poisson: what "
            "its epsilons hold for, which rows of ours always have."
        ),
    ] = None,
    batches: Annotated[
        Literal["whole", "all"],
        typer.Option(help="whole: clients leave out an epoch's last, partial batch, which comes nearest to the paper."),
    ] = "whole",
    personal_epochs: Annotated[
        int | None,
        typer.Option(
            help="Epochs of a round for personal models; default as many as for the global one, as the algorithm has it.",
            min=1,
        ),
    ] = None,
    pulls: Annotated[
        str,
        typer.Option(
            help="Which pulls λ of the paper's rows, comma-separated; none: no personal models, which is faster."
        ),
    ] = "0.005,0.05,0.25",
    rounds: Annotated[int | None, typer.Option(help="Rounds to train; default the paper's 500.", min=1)] = None,
    noise_seed: Annotated[
        int | None, typer.Option(help="Seed of noise and cohorts: repeatable, so not private; seed K adds K to it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the table; default runs/paper/TABLE.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Run nothing: draw the table of what is there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Reproduce a table of the paper: run it, seed by seed, and say cell by cell how it compares.

    Tables: noniid-mnist, skewed-mnist, fmnist, femnist, and levels, which is ours. The same command goes on where it was
    stopped; with more seeds, rows or pulls it adds them to what is there.

    Examples:

    `fedhdp reproduce noniid-mnist --seeds 3`

    `fedhdp reproduce fmnist --rows dp-fedavg,fedhdp:0.01 --sampling poisson --out runs/fmnist`

    `fedhdp reproduce skewed-mnist --noise-seed 1` (comes out the same again)

    `fedhdp reproduce noniid-mnist --render --json`
    """
    from fedhdp.reproduction.comparison import compare
    from fedhdp.reproduction.extensions import parts, rows_of
    from fedhdp.reproduction.files import write
    from fedhdp.reproduction.runner import refuse_what_is_not_ours
    from fedhdp.reproduction.tables import ROUNDS, TABLES, Options, stands_for

    rows_of(name, rows)  # an unknown table or row is refused first
    folder = out or Path("runs") / "paper" / name
    refuse_what_is_not_ours(folder)
    if render and (extra := _given(context, but=("name", "out", "render", "json"))):
        raise ValueError(f"--render draws all that is there: it takes no {extra[0].opts[0]}")
    errors = Console(stderr=True, highlight=False, markup=False)
    if not render:
        options = Options(data, sampling, batches, personal_epochs, _pulls(pulls), rounds or ROUNDS, noise_seed)
        if personal_epochs and not options.pulls:
            raise ValueError("--personal-epochs is for personal models, and with --pulls none there are none")
        made = parts(name, rows, seeds_of(seeds, "; to draw what is there: --render"), options)
        about = stands_for(TABLES.get(name, TABLES["noniid-mnist"]), made[0].experiment.data)
        _run(made, folder, about, _command(context), out, errors)
    found = compare(folder, name)
    write(folder, found)
    print_json(found) if json else _print(found)
    errors.print(
        f"kept in {folder}: table.md, table.csv, table.json, table.png, summary.json", style="dim", soft_wrap=True
    )


def seeds_of(text: str, hint: str = "") -> range:
    """Seeds from 3 (the first three) or 2-4 (these)."""
    given = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if given is None:
        raise ValueError(f"--seeds must be a number of seeds, or a range such as 2-4, got {text!r}")
    first, last = given.groups()
    found = range(int(first)) if last is None else range(int(first), int(last) + 1)
    if not found:
        raise ValueError(f"--seeds must be at least one seed, got {text!r}{hint}")
    return found


def _pulls(text: str) -> tuple[float, ...]:
    """Pulls from 0.05,0.25; none from none."""
    if text.strip() == "none":
        return ()
    try:
        found = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 <= pull < float("inf") for pull in found):
        raise ValueError(f"--pulls must be numbers of at least 0 such as 0.05,0.25, or none, got {text!r}")
    return found


def _command(context: typer.Context) -> str:
    """The command that was given, as it can be typed again; where its results went is said beside it."""
    table = context.command.params[0]
    words = [str(context.params[table.name or ""])]
    for option in _given(context, but=(table.name or "", "out", "json")):
        words += [option.opts[0], str(context.params[option.name or ""])]
    return shlex.join(["fedhdp", "reproduce", *words])


def _given(context: typer.Context, but: Container[str]) -> list[click.Parameter]:
    """The options that were typed."""
    found = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE" and option.name not in but:
            found.append(option)
    return found


def _run(parts: list[Part], folder: Path, about: str, command: str, out: Path | None, errors: Console) -> None:
    """Run what is not done yet; Ctrl-C stops after the round and says how to go on."""
    from fedhdp.cli._progress import ProgressDisplay
    from fedhdp.experiments.runner import Interrupted
    from fedhdp.reproduction import runner as reproducing

    parts = reproducing.fitted(folder, parts)
    errors.print(f"data: {about}", soft_wrap=True)
    for number, part in enumerate(parts, 1):
        if reproducing.done(folder, part):
            continue
        going = "goes on" if reproducing.begun(folder, part) else "begins"
        place = f"part {number} of {len(parts)}: seed {part.seed}, {part.name}"
        count = len(part.experiment.variants)
        errors.print(f"{place} {going}, {count} variant{'s' * (count > 1)}", soft_wrap=True)
        again = command if out is None else f"{command} --out {shlex.quote(str(out))}"
        try:
            with ProgressDisplay(errors, again) as display:
                reproducing.run_part(part, folder, display.watch, command)
            stopped = display.stop and number < len(parts)
        except Interrupted:
            stopped = True
        if stopped:
            errors.print(f"stopped; to go on: {again}", style="yellow", soft_wrap=True)
            sys.exit(130)


def _print(found: Comparison) -> None:
    from fedhdp.reproduction import render as writing

    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    for line in writing.title(found):
        out.print(line)
    unsaid: tuple[str, ...] = ()
    for make in (writing.global_table, writing.personal_table):
        shown = make(found)
        if not shown.rows:
            continue
        if _width(shown) > out.width:
            shown, unsaid = make(found, wide=False), ("average: ",)
            shown = shown._replace(header=[word.replace(": ", ":\n") for word in shown.header])
        for piece in _pieces(shown, out.width):
            out.print()
            out.print(_table(piece))
    out.print()
    for line in writing.footnotes(found):
        if not line.startswith(unsaid):
            out.print(line, style="dim")
    out.print()
    _print_orderings(out, writing.orderings_table(found))


def _width(shown: Shown) -> int:
    return sum(_widths(shown))


def _widths(shown: Shown) -> list[int]:
    cells = zip(*([*word.split("\n"), ""][:2] for word in shown.header), strict=True)
    return [max(map(len, column)) + 2 for column in zip(*cells, *shown.rows)]


def _pieces(shown: Shown, width: int) -> list[Shown]:
    """The table, or where it is too wide as many as it takes beneath each other, each with what names its rows."""
    names = 2 if shown.header[1] == "λ" else 1
    widths, pieces = _widths(shown), [list(range(names))]
    for column in range(names, len(widths)):
        if len(pieces[-1]) > names and sum(widths[one] for one in pieces[-1]) + widths[column] > width:
            pieces.append(list(range(names)))
        pieces[-1].append(column)
    return [
        shown._replace(header=[shown.header[c] for c in those], rows=[[row[c] for c in those] for row in shown.rows])
        for those in pieces
    ]


def _table(shown: Shown) -> Table:
    made = table(shown.header[:1], shown.header[1:])
    for row, block, following in zip(shown.rows, shown.blocks, [*shown.blocks[1:], None]):
        made.add_row(*row, end_section=block != following)
    return made


def _print_orderings(out: Console, shown: Shown) -> None:
    colours = {"held": "green", "not held": "red"}
    made = table(shown.header, ())
    for row in shown.rows:
        made.add_row(*row, style=colours.get(row[1].partition(",")[0], "dim"))
    out.print(made)
