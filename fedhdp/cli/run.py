"""`fedhdp run` and `fedhdp list`: run an experiment, list the built-in ones."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedhdp.cli._compilation_cache import use_compilation_cache
from fedhdp.cli._options import Json, parse_seeds
from fedhdp.cli._output import console, epsilon_text, error_console, print_json
from fedhdp.cli._processes import note_resume, run_in_processes
from fedhdp.cli.show import TABLE_WIDTH
from fedhdp.errors import ConfigError

if TYPE_CHECKING:
    from fedhdp.experiments.batch import Watch
    from fedhdp.experiments.config import Experiment
    from fedhdp.experiments.folder import RunFolder
    from fedhdp.results import Summary


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
        typer.Option(
            help="Several seeds, one after the other: 5 (the first five) or 2-4. One folder, a table of means."
        ),
    ] = None,
    noise_seed: Annotated[
        int | None, typer.Option(help="Seed of noise and cohorts: repeatable, and therefore not private.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="File that records the rounds of all runs of this population.")
    ] = None,
    json: Json = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print which path the network takes through the engine, and why.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Resume the run in this directory; with --rounds, change its number of rounds."
        ),
    ] = None,
    keep_checkpoint: Annotated[
        bool, typer.Option("--keep-checkpoint", help="Keep the final state however large, to extend the run later.")
    ] = False,
    allow_more_epsilon: Annotated[
        bool,
        typer.Option(
            "--allow-more-epsilon", help="With --resume and --rounds: groups may have more epsilon than they asked for."
        ),
    ] = False,
    processes: Annotated[
        int | None, typer.Option(help="Run in this many processes; on this machine, unless --coordinator is given.")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of process 0, where each machine has a process.")
    ] = None,
    process_id: Annotated[int | None, typer.Option(help="The number of this machine's process, from 0.")] = None,
) -> None:
    """Run an experiment: train every variant, compare them in one table, write the results to a directory.

    Examples:

    `fedhdp run` (the quickstart)

    `fedhdp run three-levels --rounds 50 --seed 1`

    `fedhdp run my.toml --seeds 5 --out runs/mine` (means over five seeds; more seeds can be added later)

    `fedhdp run my.toml --out runs/mine --json > mine.json`

    `fedhdp run --resume runs/mine`

    `fedhdp run --resume runs/mine --rounds 800` (the same run with more rounds)

    `fedhdp run letters --processes 2` (under Slurm, `srun fedhdp run letters` takes one process for each task)
    """
    options = {"seed": seed, "noise_seed": noise_seed, "rounds": rounds, "ledger": ledger and str(ledger)}
    options["keep_checkpoint"] = keep_checkpoint or None
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if seeds is not None and (resume is not None or seed is not None):
        raise ConfigError("--seeds takes neither --seed nor --resume; to resume, name --out again", "seeds", seeds)
    if resume is not None:
        if changes.keys() - {"rounds"} or out is not None or experiment is not None:
            rule = "--resume continues a run as it was started: no experiment, no option but --rounds and --json"
            raise ConfigError(rule, "resume", str(resume))
    elif allow_more_epsilon:
        raise ConfigError("--allow-more-epsilon needs --resume and --rounds", "--allow-more-epsilon", True)

    def start() -> None:
        if explain:
            _print_network()
        if resume is not None:
            _resume(resume, rounds, allow_more_epsilon, json)
            return
        several = None if seeds is None else parse_seeds(seeds)
        value, directory = _experiment(experiment or "quickstart", changes, out)
        _run(value, directory, several, json)

    use_compilation_cache()
    run_in_processes(processes, coordinator, process_id, start)


def _print_network() -> None:
    """Print what simulations log of their networks."""
    logger, handler = logging.getLogger("fedhdp.network"), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _experiment(name: str, changes: dict[str, Any], out: Path | None) -> tuple[Experiment, Path]:
    """The experiment with the options of the command line, and the directory for its results."""
    from fedhdp.experiments import EXPERIMENTS, find, with_options
    from fedhdp.results import slug

    experiment = with_options(find(name, EXPERIMENTS), changes)
    if experiment.ledger is not None and not Path(experiment.ledger).exists():
        error_console().print(f"{experiment.ledger}: a new ledger", soft_wrap=True)
    return experiment, out or Path("runs") / f"{slug(experiment.name)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _run(experiment: Experiment, directory: Path, seeds: range | None, json: bool) -> None:
    from fedhdp.experiments import run as run_experiment
    from fedhdp.experiments.folder import RunFolder, needs_folder

    if needs_folder(experiment, seeds):
        with RunFolder.start(directory, experiment, seeds) as folder:
            _run_folder(folder, directory, json)
        return
    summary = _watched(partial(run_experiment, experiment, directory), _resume_command(directory))
    _print_run(summary, directory, json)


def _resume(directory: Path, rounds: int | None, allow_more_epsilon: bool, json: bool) -> None:
    from fedhdp.experiments import extend
    from fedhdp.experiments import resume as resume_experiment
    from fedhdp.experiments.folder import RunFolder
    from fedhdp.results.store import RUNS_FILE

    if (directory / RUNS_FILE).exists():
        with RunFolder.open(directory) as folder:
            _run_folder(folder, directory, json, rounds, allow_more_epsilon)
        return
    if rounds is None:
        start = partial(resume_experiment, directory)
    else:
        start = partial(extend, directory, rounds, allow_more_epsilon=allow_more_epsilon)
    _print_run(_watched(start, _resume_command(directory)), directory, json)


def _run_folder(
    folder: RunFolder, directory: Path, json: bool, rounds: int | None = None, allow_more_epsilon: bool = False
) -> None:
    """Run all runs of a folder, and print their combined table."""
    from fedhdp.cli.report import write_page
    from fedhdp.cli.show import print_story
    from fedhdp.results.store import SUMMARY_FILE

    if rounds is not None:
        folder.check_extension(rounds, allow_more_epsilon)
    for entry in folder.entries:
        error_console().print(f"run {entry.path}", soft_wrap=True)
        if rounds is None:
            start = partial(folder.run, entry)
        else:
            start = partial(folder.extend, entry, rounds, allow_more_epsilon=allow_more_epsilon)
        _watched(start, _resume_command(directory), entry is folder.entries[-1])
    runs = folder.write_tables()
    if json:
        sys.stdout.buffer.write((directory / SUMMARY_FILE).read_bytes())
        sys.stdout.buffer.flush()
    else:
        print_story(runs)
        _print_directory(directory)
    write_page(directory, json=json)


def _resume_command(directory: Path) -> str:
    return f"fedhdp run --resume {shlex.quote(str(directory))}"


def _watched(start: Callable[[Watch], Summary], resume_command: str, last: bool = True) -> Summary:
    """Run an experiment with a display of its progress; after Ctrl-C, print how to resume it and exit."""
    from fedhdp.cli._progress import ProgressDisplay
    from fedhdp.experiments import Interrupted

    errors = error_console()
    note_resume(resume_command)
    try:
        with ProgressDisplay(errors, resume_command) as display:
            summary = start(display.watch)
        if display.stop and not last:  # Ctrl-C after the last round of an experiment
            raise Interrupted
        return summary
    except Interrupted:
        errors.print(f"stopped; to resume: {resume_command}", style="yellow", soft_wrap=True)
        sys.exit(130)


def _print_run(summary: Summary, directory: Path, json: bool) -> None:
    from fedhdp.cli.report import write_page
    from fedhdp.cli.show import print_story
    from fedhdp.experiments import read_experiment
    from fedhdp.results.stored import read_runs

    if json:
        print_json(summary)
    else:
        print_story(read_runs([directory]))
        _print_ledger(read_experiment(directory))
        _print_directory(directory)
    write_page(directory, json=json)


def _print_directory(directory: Path) -> None:
    from fedhdp.results.store import checkpoint_bytes

    size = checkpoint_bytes(directory)
    kept = f"; checkpoints, which have personal models without noise, take {size / 2**20:,.1f} MiB" if size else ""
    error_console().print(
        f"results in {directory}{kept}; all columns: fedhdp show {directory}", style="dim", soft_wrap=True
    )


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
