"""`fedhdp run` and `fedhdp list`: run an experiment, list the built-in ones."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedhdp.cli._options import Json, parse_seeds
from fedhdp.cli._output import console, epsilon_text, error_console, new_table, print_json, print_table, table_width
from fedhdp.errors import ConfigError

if TYPE_CHECKING:
    from fedhdp.experiments.batch import Watch
    from fedhdp.experiments.config import Experiment
    from fedhdp.results import Summary

TABLE_WIDTH = 200  # where standard output is no terminal


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
        typer.Argument(metavar="[NAME or FILE.toml]", help="The experiment; see `fedhdp list`. Default: quickstart."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the results. Default: runs/NAME-TIME.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data, initial model and batches.")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Several seeds, one after the other: 5 (the first five) or 2-4. The table has means."),
    ] = None,
    noise_seed: Annotated[
        int | None, typer.Option(help="Seed of noise and cohorts: repeatable, and therefore not private.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="File that records the rounds of all runs of this population.")
    ] = None,
    json: Json = False,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Resume the run in this directory.")] = None,
) -> None:
    """Run an experiment: train every variant, compare them in one table, write the results to a directory.

    Examples:

    `fedhdp run` (the quickstart)

    `fedhdp run three-levels --rounds 50 --seed 1`

    `fedhdp run my.toml --seeds 5 --out runs/mine` (means over five seeds; the same command resumes after Ctrl-C)

    `fedhdp run my.toml --out runs/mine --json > mine.json`

    `fedhdp run --resume runs/mine`
    """
    options = {"seed": seed, "noise_seed": noise_seed, "rounds": rounds, "ledger": ledger and str(ledger)}
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if seeds is not None and (resume is not None or seed is not None):
        raise ConfigError("--seeds takes neither --seed nor --resume; to resume, name --out again", "seeds", seeds)
    if resume is not None:
        if changes or out is not None or experiment is not None:
            rule = "--resume continues a run as it was started: it takes no experiment and no option but --json"
            raise ConfigError(rule, "resume", str(resume))
        _resume(resume, json)
        return
    value, directory = _experiment(experiment or "quickstart", changes, out)
    if seeds is not None:
        _run_seeds(value, seeds, directory, out is not None, json)
        return
    _run(value, directory, json)


def _experiment(name: str, changes: dict[str, Any], out: Path | None) -> tuple[Experiment, Path]:
    """The experiment with the options of the command line, and the directory for its results."""
    import msgspec

    from fedhdp.experiments import EXPERIMENTS, find
    from fedhdp.results import slug

    experiment = msgspec.structs.replace(find(name, EXPERIMENTS), **changes)
    if experiment.ledger is not None and not Path(experiment.ledger).exists():
        error_console().print(f"{experiment.ledger}: a new ledger", soft_wrap=True)
    return experiment, out or Path("runs") / f"{slug(experiment.name)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _run(experiment: Experiment, directory: Path, json: bool) -> None:
    from fedhdp.experiments import run as run_experiment

    summary = _watched(partial(run_experiment, experiment, directory), _resume_command(directory))
    _print_run(summary, experiment, directory, json)


def _resume(directory: Path, json: bool) -> None:
    from fedhdp.experiments import read_experiment
    from fedhdp.experiments import resume as resume_experiment

    summary = _watched(partial(resume_experiment, directory), _resume_command(directory))
    _print_run(summary, read_experiment(directory), directory, json)


def _run_seeds(experiment: Experiment, seeds: str, directory: Path, named: bool, json: bool) -> None:
    from fedhdp.experiments import run_or_resume, with_seeds

    resume_command = shlex.join(["fedhdp", *sys.argv[1:], *([] if named else ["--out", str(directory)])])
    summaries = {}
    experiments = with_seeds(experiment, parse_seeds(seeds))
    for value in experiments:
        error_console().print(f"seed {value.seed}")
        start = partial(run_or_resume, value, directory / f"seed-{value.seed}")
        summaries[str(value.seed)] = _watched(start, resume_command, last=value is experiments[-1])
    if json:
        print_json(summaries)
        return
    _print_table(list(summaries.values()))
    _print_directory(directory)


def _resume_command(directory: Path) -> str:
    return f"fedhdp run --resume {shlex.quote(str(directory))}"


def _watched(start: Callable[[Watch], Summary], resume_command: str, last: bool = True) -> Summary:
    """Run an experiment with a display of its progress; after Ctrl-C, print how to resume it and exit."""
    from fedhdp.cli._progress import ProgressDisplay
    from fedhdp.experiments import Interrupted

    errors = error_console()
    try:
        with ProgressDisplay(errors, resume_command) as display:
            summary = start(display.watch)
        if display.stop and not last:  # Ctrl-C after the last round of an experiment
            raise Interrupted
        return summary
    except Interrupted:
        errors.print(f"stopped; to resume: {resume_command}", style="yellow", soft_wrap=True)
        sys.exit(130)


def _print_run(summary: Summary, experiment: Experiment, directory: Path, json: bool) -> None:
    if json:
        print_json(summary)
        return
    _print_table([summary])
    _print_ledger(experiment)
    _print_directory(directory)


def _print_directory(directory: Path) -> None:
    error_console().print(f"results in {directory}", style="dim", soft_wrap=True)


def _print_table(summaries: Sequence[Summary]) -> None:
    """Print a table of one or several seeds; in a narrow terminal without variances and with short headers."""
    from fedhdp.results import footnotes, table_cells

    out = console(TABLE_WIDTH)
    variants, *other_seeds = [summary.variants for summary in summaries]
    header, rows = table_cells(variants, other_seeds=other_seeds)
    table = _rich_table(header, rows)
    wide = table_width(table) <= out.width
    if not wide:
        header, rows = table_cells(variants, variances=False, other_seeds=other_seeds)
        table = _rich_table([name.replace(" ", "\n") for name in header], rows)
    means = f", mean of {len(summaries)} seeds ± half of its 95% interval" if other_seeds else ""
    variances = ", variance across clients in parentheses" if wide else ""
    metric = variants[0].metrics[0]
    out.print(f"{summaries[0].experiment}: {metric.name}{' in %' if metric.percent else ''}{means}{variances}")
    out.print(_legend(header))
    print_table(out, table)
    for line in footnotes([variant for summary in summaries for variant in summary.variants]):
        out.print(line, style="dim")


def _rich_table(header: list[str], rows: list[list[str]]) -> Table:
    table = new_table(header[:1], header[1:])
    for row in rows:
        table.add_row(*row)
    return table


def _legend(header: list[str]) -> str:
    parts = [
        f"{header[1]}: the server's test set",
        "g and l: clients' own data, with the global and with personal models",
    ]
    if any(name.startswith("c:") for name in header):
        parts.append("c: with the pull that each client chose")
    if header[2].endswith("_avg"):
        parts.append(f"{header[2]}: the averaged model")
    return "; ".join(parts)


def _print_ledger(experiment: Experiment) -> None:
    """Print what the population has spent over all runs in the ledger; the table is about this run alone."""
    from fedhdp.privacy.ledger import Ledger
    from fedhdp.privacy.reports import group_standing

    if experiment.ledger is None or not Path(experiment.ledger).exists():
        return
    with Ledger(experiment.ledger, read_only=True) as ledger:
        names = [group.name for group in experiment.mechanism.groups if group.name in ledger.groups()]
        standings = [group_standing(ledger, name, experiment.delta_of(name)) for name in names]
    epsilons = [f"ε {s.group} = {epsilon_text(s.epsilon, 'not known')} at delta {s.delta:g}" for s in standings]
    line = f"{experiment.ledger}, over all its runs and variants: {', '.join(epsilons)}"
    console(TABLE_WIDTH).print(line, style="dim", soft_wrap=True)
