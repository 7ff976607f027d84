"""`fedhdp run` and `fedhdp list`: run an experiment, see which there are."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fedhdp.cli._output import in_short, print_json

if TYPE_CHECKING:
    from fedhdp.results.schema import Summary


def list_experiments() -> None:
    """List the built-in experiments.

    Example: `fedhdp list`
    """
    from fedhdp.experiments import EXPERIMENTS

    width = max(map(len, EXPERIMENTS))
    for name, experiment in EXPERIMENTS.items():
        print(f"{name.ljust(width)}  {experiment().about}")


def run(
    experiment: Annotated[
        str | None,
        typer.Argument(metavar="[NAME or FILE.toml]", help="What to run; see `fedhdp list`. Default: quickstart."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/NAME-TIME.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data, initial model and batches.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Several seeds, one after the other: 5 (the first five) or 2-4. Means are shown.")
    ] = None,
    noise_seed: Annotated[
        int | None, typer.Option(help="Seed of noise and cohorts: repeatable, and therefore not private.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to train.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="File in which this population's spending is kept.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder.")] = None,
) -> None:
    """Run an experiment: train every variant, compare them in one table, keep everything in a folder.

    Examples:

    `fedhdp run` (the quickstart)

    `fedhdp run three-levels --rounds 50 --seed 1`

    `fedhdp run my.toml --seeds 5 --out runs/mine` (means over five seeds; the same again goes on after Ctrl-C)

    `fedhdp run my.toml --out runs/mine --json > mine.json`

    `fedhdp run --resume runs/mine`
    """
    import msgspec

    from fedhdp.cli._progress import ProgressDisplay
    from fedhdp.cli.reproduce import seeds_of
    from fedhdp.experiments import EXPERIMENTS
    from fedhdp.experiments import runner as runs
    from fedhdp.experiments.config import find
    from fedhdp.results import store as results

    errors = Console(stderr=True, markup=False)
    changes = {
        "seed": seed,
        "noise_seed": noise_seed,
        "rounds": rounds,
        "ledger": None if ledger is None else str(ledger),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    if resume is not None and (given or out is not None or experiment is not None):
        raise ValueError("--resume goes on with what was begun: it takes no experiment, and no options but --json")
    if seeds is not None and (resume is not None or seed is not None):
        raise ValueError("--seeds says which seeds: it takes no --seed, and goes on with --out instead of --resume")
    if resume is None:
        chosen = msgspec.structs.replace(find(experiment or "quickstart", EXPERIMENTS), **given)
        folder = out or Path("runs") / f"{results.slug(chosen.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    else:
        folder = resume
    each = [] if seeds is None else runs.each_seed(chosen, seeds_of(seeds))
    if resume is None and chosen.ledger is not None and not Path(chosen.ledger).exists():
        errors.print(f"{chosen.ledger}: a new ledger", highlight=False, soft_wrap=True)
    again = f"fedhdp run --resume {shlex.quote(str(folder))}"
    summaries = []
    try:
        if seeds is None:
            with ProgressDisplay(errors, again) as display:
                begin = resume is None
                summaries.append(
                    runs.run(chosen, folder, display.watch) if begin else runs.resume(folder, display.watch)
                )
        else:
            again = shlex.join(["fedhdp", *sys.argv[1:], *([] if out else ["--out", str(folder)])])
            for one in each:
                errors.print(f"seed {one.seed}", highlight=False)
                with ProgressDisplay(errors, again) as display:
                    summaries.append(runs.run_or_resume(one, folder / f"seed-{one.seed}", display.watch))
                if display.stop:
                    raise runs.Interrupted
    except runs.Interrupted:
        errors.print(f"stopped; to go on: {again}", style="yellow", highlight=False, soft_wrap=True)
        sys.exit(130)
    if json:
        print_json(summaries[0] if seeds is None else {str(one.seed): found for one, found in zip(each, summaries)})
        return
    _print_table(summaries[0], summaries[1:])
    if seeds is None:
        _print_ledger(folder)
    errors.print(f"kept in {folder}", style="dim", highlight=False, soft_wrap=True)


def _print_table(summary: Summary, others: Sequence[Summary] = ()) -> None:
    from fedhdp.results.tables import footnotes, table

    console = Console(markup=False) if sys.stdout.isatty() else Console(width=200, markup=False)
    more = [other.variants for other in others]
    header, rows = table(summary.variants, others=more)
    wide = _width(header, rows) <= console.width
    if not wide:
        header, rows = table(summary.variants, variances=False, others=more)
        header = [name.replace(" ", "\n") for name in header]
    means = f", mean of {len(others) + 1} seeds ± half of its 95% interval" if others else ""
    spread = ", variance across clients in parentheses" if wide else ""
    console.print(f"{summary.experiment}: accuracy in %{means}{spread}")
    said = "Acc_g: the server's test set; g and l: clients' own data, with the global and with personal models"
    said += "; c: with the pull that each chose" if any(name.startswith("c:") for name in header) else ""
    console.print(said + ("; Acc_avg: the averaged model" if "Acc_avg" in header else ""))
    for columns in _fitting(header, rows, console.width):
        shown = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), collapse_padding=True, show_edge=False)
        for number in columns:
            shown.add_column(header[number], justify="right" if number else "left", no_wrap=number > 0, overflow="fold")
        for row in rows:
            shown.add_row(*(row[number] for number in columns))
        console.print(shown)
    for line in footnotes([variant for seed in (summary, *others) for variant in seed.variants]):
        console.print(line, style="dim", highlight=False)


def _print_ledger(folder: Path) -> None:
    """What the population has spent by now, where a ledger knows: the table is about this run alone."""
    from fedhdp.experiments.config import from_toml
    from fedhdp.privacy.ledger import Ledger
    from fedhdp.privacy.reports import group_standing
    from fedhdp.results.store import EXPERIMENT

    experiment = from_toml((folder / EXPERIMENT).read_text(encoding="utf-8"), str(folder / EXPERIMENT))
    if experiment.ledger is None or not Path(experiment.ledger).exists():
        return
    with Ledger(experiment.ledger, read_only=True) as ledger:
        names = [group.name for group in experiment.mechanism.groups if group.name in ledger.groups()]
        standing = [group_standing(ledger, name, experiment.delta_of(name)) for name in names]
    told = ", ".join(
        f"ε {group.group} = {in_short(group.epsilon, 'not known')} at δ {group.delta:g}" for group in standing
    )
    said = f"{experiment.ledger}, over all its runs and variants: {told}"
    Console(markup=False).print(said, style="dim", highlight=False, soft_wrap=True)


def _width(header: list[str], rows: list[list[str]]) -> int:
    return sum(max(len(word) for cell in column for word in cell.split("\n")) + 2 for column in zip(header, *rows))


def _fitting(header: list[str], rows: list[list[str]], width: int) -> list[list[int]]:
    """The columns in as many tables as a terminal needs, each with the names, which may be folded to half of it."""
    widths = [_width([name], [[row[number]] for row in rows]) for number, name in enumerate(header)]
    names = min(widths[0], width // 2)
    tables: list[list[int]] = [[0]]
    for number in range(1, len(header)):
        if names + sum(widths[column] for column in tables[-1][1:]) + widths[number] > width and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(number)
    return tables
