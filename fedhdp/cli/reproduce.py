"""`fedhdp reproduce`: the paper's tables, run again and compared with it cell by cell."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
import typer
from rich.console import Console
from rich.table import Table

from fedhdp.cli._compilation_cache import use_compilation_cache
from fedhdp.cli._options import Json, parse_seeds, require_matplotlib
from fedhdp.cli._output import console, error_console, new_table, print_json, print_table, table_width
from fedhdp.errors import ConfigError

if TYPE_CHECKING:
    from fedhdp.reproduction.render import TextTable
    from fedhdp.reproduction.summary import Comparison
    from fedhdp.reproduction.tables import Part


TableName = Annotated[
    str | None,
    typer.Argument(
        metavar="TABLE", help="noniid-mnist, skewed-mnist, fmnist, femnist, levels, causes or skewed-causes."
    ),
]
Seeds = Annotated[str, typer.Option(metavar="K or A-B", help="The first K seeds, or seeds A to B.")]
Rows = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated rows, such as dp-fedavg, fedhdp:0.01, extensions or ours (the same). Default: all rows."
    ),
]
DataSource = Annotated[
    str, typer.Option(help="auto (the paper's, or the nearest available), mnist, tff, leaf, writers or handwriting.")
]
CohortSampling = Annotated[
    Literal["fixed", "poisson"] | None,
    typer.Option(
        help="fixed: cohorts of fixed size, as in the paper's algorithm; the default of the paper's rows. poisson: the "
        "sampling that the paper's epsilons hold for; extensions always use it."
    ),
]
Batches = Annotated[
    Literal["whole", "all"],
    typer.Option(help="whole: skip the last, partial batch of an epoch, as the paper seems to do. all: train on it."),
]
PersonalEpochs = Annotated[
    int | None,
    typer.Option(help="Epochs of a personal model per round. Default: as many as the global model's.", min=1),
]
Pulls = Annotated[
    str, typer.Option(help="Pulls λ of the paper's rows, comma-separated. none: no personal models (faster).")
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds. Default: 500, as in the paper.", min=1)]
NoiseSeed = Annotated[
    int | None,
    typer.Option(help="Seed of noise and cohorts, to which each seed is added: repeatable, and therefore not private."),
]
Out = Annotated[Path | None, typer.Option(help="Directory of the table. Default: TABLE in runs/paper.")]
Render = Annotated[bool, typer.Option("--render", help="Run nothing: render the table from the runs in the directory.")]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROW",
        help="Run nothing: print the difference of two rows over the seeds (give it twice), or the mean of one row.",
    ),
]
ComparedColumn = Annotated[str, typer.Option(help="The column that --compare compares, as in summary.json.")]
Docs = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Run nothing: write DIR.md, and the tables in DIR from their summaries."),
]


def reproduce(
    context: typer.Context,
    name: TableName = None,
    seeds: Seeds = "1",
    rows: Rows = None,
    data: DataSource = "auto",
    sampling: CohortSampling = None,
    batches: Batches = "whole",
    personal_epochs: PersonalEpochs = None,
    pulls: Pulls = "0.005,0.05,0.25",
    rounds: Rounds = None,
    noise_seed: NoiseSeed = None,
    out: Out = None,
    render: Render = False,
    compare: Compare = None,
    column: ComparedColumn = "acc_g",
    docs: Docs = None,
    json: Json = False,
) -> None:
    """Reproduce a table of the paper: run it seed by seed, and compare each cell with the paper.

    noniid-mnist, skewed-mnist, fmnist and femnist are tables of the paper. levels has two, three and five privacy levels,
    and rivals of FedHDP. causes and skewed-causes vary one at a time what the paper leaves open. The same command resumes an
    interrupted table; with more seeds, rows or pulls it adds them.

    Examples:

    `fedhdp reproduce noniid-mnist --seeds 3`

    `fedhdp reproduce fmnist --rows dp-fedavg,fedhdp:0.01 --sampling poisson --out runs/fmnist`

    `fedhdp reproduce skewed-mnist --noise-seed 1` (repeatable)

    `fedhdp reproduce noniid-mnist --render --json`

    `fedhdp reproduce noniid-mnist --compare "momentum r=0.01" --compare "poisson r=0.01"`

    `fedhdp reproduce --docs docs/results`
    """
    from msgspec.structs import asdict

    use_compilation_cache()
    if docs is not None:
        _refuse_other_options(context, "--docs", {"docs"})
        require_matplotlib()
        return _write_docs(docs)
    if name is None:
        raise ConfigError("TABLE must be given, or --docs", "TABLE")
    folder = out or Path("runs") / "paper" / name
    errors = error_console()
    if name in ("causes", "skewed-causes"):
        _refuse_other_options(context, name, {"name", "seeds", "rows", "rounds", "out"})
        return _run_causes(name, rows, parse_seeds(seeds), rounds, folder)
    from fedhdp.reproduction.comparison import load
    from fedhdp.reproduction.extensions import parse_rows
    from fedhdp.reproduction.render import write
    from fedhdp.reproduction.summary import row_reports
    from fedhdp.reproduction.tables import ROUNDS, Options

    parse_rows(name, rows)  # an unknown table or row is the first error
    if compare:
        _refuse_other_options(context, "--compare", {"name", "out", "compare", "column"})
        return _print_difference(load(folder, name), compare, column)
    require_matplotlib()
    if render:
        _refuse_other_options(context, "--render", {"name", "out", "render", "json"})
    else:
        options = Options(data, sampling, batches, personal_epochs, _parse_pulls(pulls), rounds or ROUNDS, noise_seed)
        if personal_epochs and not options.pulls:
            raise ConfigError("--personal-epochs needs personal models, got --pulls none", "--personal-epochs")
        from fedhdp.reproduction.extensions import make_parts
        from fedhdp.reproduction.runner import check_output_directory

        check_output_directory(folder)
        parts = make_parts(name, rows, parse_seeds(seeds, "; to render what has been run: --render"), options)
        _run(parts, folder, _command(context), out, errors)
    comparison = load(folder, name)
    paths = write(folder, comparison)
    print_json(asdict(comparison) | {"rows": row_reports(comparison)}) if json else _print(comparison)
    errors.print(f"written to {folder}: {', '.join(path.name for path in paths)}", style="dim", soft_wrap=True)
    _write_page(folder, comparison, json)


def _parse_pulls(text: str) -> tuple[float, ...]:
    """Pulls from 0.05,0.25; none from none."""
    if text.strip() == "none":
        return ()
    try:
        pulls = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        pulls = ()
    if not pulls or not all(0 <= pull < float("inf") for pull in pulls):
        message = f"--pulls must be numbers of at least 0 such as 0.05,0.25, or none, got {text!r}"
        raise ConfigError(message, "--pulls", text)
    return pulls


def _command(context: typer.Context) -> str:
    """The command as it can be typed again, without --out and --json."""
    words = [str(context.params["name"])]
    for option in _typed_options(context, {"name", "out", "json"}):
        words += [option.opts[0], str(context.params[option.name or ""])]
    return shlex.join(["fedhdp", "reproduce", *words])


def _typed_options(context: typer.Context, ignored: Container[str]) -> list[click.Parameter]:
    options = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE" and option.name not in ignored:
            options.append(option)
    return options


def _refuse_other_options(context: typer.Context, mode: str, allowed: Container[str]) -> None:
    if options := _typed_options(context, allowed):
        option = options[0].opts[0]
        raise ConfigError(f"{mode} must be given without {option}", option)


def _run(parts: list[Part], folder: Path, command: str, out: Path | None, errors: Console) -> None:
    """Run what is not finished; Ctrl-C stops after the round and prints the command that resumes."""
    from fedhdp.cli._progress import ProgressDisplay
    from fedhdp.experiments.runner import Interrupted
    from fedhdp.reproduction import runner, tables

    parts = runner.plan_parts(folder, parts)
    experiment = parts[0].experiment
    paper_table = tables.TABLES.get(experiment.name.partition("/")[0], tables.TABLES["noniid-mnist"])
    errors.print(f"data: {tables.describe_data(paper_table, experiment.data)}", soft_wrap=True)
    resume = command if out is None else f"{command} --out {shlex.quote(str(out))}"
    for number, part in enumerate(parts, 1):
        if runner.is_finished(folder, part):
            continue
        action = "resumes" if runner.is_started(folder, part) else "starts"
        count = len(part.experiment.variants)
        place = f"part {number} of {len(parts)}: seed {part.seed}, {part.name} {action}"
        errors.print(f"{place}, {count} variant{'s' * (count > 1)}", soft_wrap=True)
        try:
            with ProgressDisplay(errors, resume) as display:
                runner.run_part(part, folder, display.watch, command)
            stopped = display.stop and number < len(parts)
        except Interrupted:
            stopped = True
        if stopped:
            errors.print(f"stopped; to resume: {resume}", style="yellow", soft_wrap=True)
            sys.exit(130)


def _write_page(folder: Path, comparison: Comparison, json: bool) -> None:
    """Write the page of the table's runs, where they are there, with the paper's numbers of the global model."""
    from fedhdp.cli.report import write_page
    from fedhdp.reproduction.runs import commands_of, run_directories
    from fedhdp.reproduction.summary import paper_accuracies

    if directories := run_directories(folder):
        write_page(folder, directories, paper_accuracies(comparison), json, commands_of(directories))


def _print_difference(comparison: Comparison, rows: list[str], column: str) -> None:
    from fedhdp.reproduction.summary import difference_of_rows

    if len(rows) > 2:
        raise ConfigError(f"--compare must be given once or twice, got {len(rows)} rows", "--compare", rows)
    cell = difference_of_rows(comparison, rows, column)
    spread = "" if cell.half is None else f" ±{cell.half:.2f}, standard deviation {cell.sd:.2f}"
    print(f"{cell.mean:+.2f}{spread}; above 0 in {sum(value > 0 for value in cell.values)} of {cell.count} seeds")


def _write_docs(folder: Path) -> None:
    from fedhdp.reproduction.page import write_page

    for path in write_page(folder):
        print(path)


def _run_causes(name: str, rows: str | None, seeds: range, rounds: int | None, folder: Path) -> None:
    from fedhdp.reproduction import causes
    from fedhdp.reproduction.render import markdown_table
    from fedhdp.reproduction.tables import ROUNDS

    def print_progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = causes.run_causes(name, rows, seeds, rounds or ROUNDS, print_progress)
    causes.write_causes(folder, result)
    print(markdown_table(causes.causes_table(result)))


def _print(comparison: Comparison) -> None:
    from fedhdp.reproduction import render

    out = console(160)
    for line in render.title(comparison):
        out.print(line)
    hidden: tuple[str, ...] = ()
    for make in (render.global_table, render.personal_table):
        text = make(comparison)
        if not text.rows:
            continue
        if table_width(_rich_table(text)) > out.width:
            text, hidden = make(comparison, wide=False), ("average: ",)
            text = text._replace(header=[word.replace(": ", ":\n") for word in text.header])
        out.print()
        print_table(out, _rich_table(text))
    out.print()
    for note in render.footnotes(comparison):
        if not note.startswith(hidden):
            out.print(note, style="dim")
    out.print()
    _print_claims(out, render.claims_table(comparison))


def _rich_table(text: TextTable) -> Table:
    names = 2 if text.header[1] == "λ" else 1
    shown = new_table(text.header[:names], text.header[names:])
    for row, block, following in zip(text.rows, text.blocks, [*text.blocks[1:], None], strict=True):
        shown.add_row(*row, end_section=block != following)
    return shown


def _print_claims(out: Console, text: TextTable) -> None:
    colours = {"held": "green", "not held": "red"}
    shown = new_table(text.header, ())
    for row in text.rows:
        shown.add_row(*row, style=colours.get(row[1].partition(",")[0], "dim"))
    out.print(shown)
