"""`fedhdp show` and `fedhdp plot`: stored runs as tables and as pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedhdp.cli._options import require_matplotlib
from fedhdp.cli._output import console, error_console, new_table, print_json, print_table, table_width
from fedhdp.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from fedhdp.results.stored import RepeatedRun

TABLE_WIDTH = 200  # where standard output is no terminal
PICTURES = (".png", ".svg", ".pdf")

Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Directories of runs, of several seeds, sweeps or deployments.")
]


def show(
    directories: Directories,
    format: Annotated[
        Literal["text", "markdown", "latex", "csv", "json"],
        typer.Option(help="How to print: csv and json have every number, with half of its 95% interval."),
    ] = "text",
    metric: Annotated[
        str | None, typer.Option(help="The metric of the table. Default: the first that the runs have.")
    ] = None,
) -> None:
    """Print the results of runs, beside each other where there are several, and what differs in their settings.

    Runs that differ in their seeds alone are one row: means with half of the 95% interval.

    Examples:

    `fedhdp show runs/mine`

    `fedhdp show runs/mine runs/other --format latex`
    """
    from fedhdp.results import comparison
    from fedhdp.results.stored import read_runs
    from fedhdp.results.tables import format_latex, format_markdown

    runs = read_runs(directories)
    if format == "text":
        print_runs(runs, metric)
    elif format == "csv":
        sys.stdout.write(comparison.format_csv(comparison.mean_rows(runs)))
    elif format == "json":
        print_json(comparison.document(runs))
    else:
        write = format_markdown if format == "markdown" else format_latex
        header, rows = comparison.combined_cells(runs, metric=metric)
        lines = [*comparison.caption(runs, header, metric), *comparison.notes(runs, metric)]
        sys.stdout.write(write(header, rows, lines, texts=min(2, len(runs))))


def print_runs(runs: list[RepeatedRun], metric: str | None = None) -> None:
    """Print one table of runs, with a legend, footnotes, and what differs between several."""
    from fedhdp.results import comparison

    out = console(TABLE_WIDTH)
    texts = min(2, len(runs))
    header, rows = comparison.combined_cells(runs, metric=metric)
    table = _table(header, rows, texts)
    wide = table_width(table) <= out.width
    if not wide:
        header, rows = comparison.combined_cells(runs, variances=False, metric=metric)
        table = _table([name.replace(" ", "\n") for name in header], rows, texts)
    for line in comparison.caption(runs, header, metric, wide):
        out.print(line)
    print_table(out, table)
    for line in comparison.notes(runs, metric):
        out.print(line, style="dim")
    header, rows = comparison.settings_cells(runs)
    if rows:
        out.print("what differs in their settings:")
        print_table(out, _table(header, rows, 1))


def print_story(runs: list[RepeatedRun]) -> None:
    """Print what came out of runs in one look: a sentence, a table of few columns, the basis of each epsilon."""
    from fedhdp.results import comparison
    from fedhdp.results.headline import headline

    out, texts = console(TABLE_WIDTH), min(2, len(runs))
    for sentence in headline([[variant.result for variant in seeds] for run in runs for seeds in run.variants()]):
        out.print(sentence)
    header, rows, legend_text = comparison.short_cells(runs)
    out.print()
    out.print(legend_text)
    table = _table(header, rows, texts)
    if table_width(table) > out.width:
        table = _table([name.replace(" ", "\n") for name in header], rows, texts)
    print_table(out, table)
    for line in comparison.notes(runs):
        out.print(line, style="dim")


def _table(header: list[str], rows: list[list[str]], texts: int) -> Table:
    return new_table(header[:texts], header[texts:], rows)


def plot(
    directories: Directories,
    x: Annotated[str, typer.Option(help="Key of the settings, such as weight or training.learning_rate; or round.")],
    y: Annotated[str | None, typer.Option(help="The metric. Default: the runs' first.")] = None,
    model: Annotated[str, typer.Option(help="Which model: global, personal, average or chosen.")] = "global",
    group: Annotated[
        list[str] | None, typer.Option(help="Whose data: a group, or server. Repeat it for a panel each.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture: a png, svg or pdf file.")] = Path("plot.png"),
) -> None:
    """Plot a metric of stored runs against a key of their settings, or against rounds.

    A line is an algorithm; baselines that do not have the key are horizontal lines. Error bars are the 95% interval of the
    mean over seeds, and the picture says so.

    Examples:

    `fedhdp plot runs/sweep --x weight --y accuracy`

    `fedhdp plot runs/five --x round --model personal --group strict --group open --out strict.svg`
    """
    from fedhdp.results import figures
    from fedhdp.results.series import make_lines
    from fedhdp.results.stored import read_runs

    if out.suffix not in PICTURES:
        raise ConfigError(f"--out must end in {', '.join(PICTURES)}, got {str(out)!r}", "--out", str(out))
    require_matplotlib()
    runs = read_runs(directories)
    y = runs[0].variants()[0][0].result.metrics[0].name if y is None else y
    lines = make_lines(runs, x, y, model, group or ())
    rounds = sorted({variant.result.rounds for run in runs for seeds in run.variants() for variant in seeds})
    names = ", ".join(dict.fromkeys(run.runs[0].experiment for run in runs))
    spread = f"{rounds[0]:,}" if len(rounds) == 1 else f"{rounds[0]:,} to {rounds[-1]:,}"
    out.parent.mkdir(parents=True, exist_ok=True)
    figures.draw(lines, y, model, f"{names}, {spread} rounds", out)
    error_console().print(f"picture in {out}", style="dim", soft_wrap=True)
