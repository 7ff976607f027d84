"""`fedhdp account`: the epsilon of rounds, the noise for an epsilon, the epsilons of an experiment or of a Flower app."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from fedhdp.cli._options import Json, Report, find_experiments
from fedhdp.cli._output import (
    console,
    delta_warnings,
    epsilon_text,
    new_table,
    number_text,
    print_json,
    print_table,
)
from fedhdp.cli.report import write_file
from fedhdp.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedhdp.experiments.config import Experiment
    from fedhdp.experiments.costs import ExperimentCost
    from fedhdp.flower.config import Deployment
    from fedhdp.mechanism import Sampling
    from fedhdp.privacy.reports import GroupReport, LevelReport, MechanismReport
    from fedhdp.privacy.rounds import RoundsReport
    from fedhdp.privacy.tuning import Tuning

Number = TypeVar("Number", int, float)
BAR_WIDTH = 40  # of the longest bar of the curve, in characters


def account(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME, FILE.toml or APP]", help="An experiment, a run's directory, or the folder of a Flower app."
        ),
    ] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise as a multiple of the L2 sensitivity.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Instead of noise: find the noise for this epsilon.")] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="The probability that a client takes part in a round.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds, of each training.")] = None,
    trainings: Annotated[
        int | None, typer.Option(help="Repeated trainings of the same clients: how many follow one another.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta; default 1e-4, or the experiment's.")] = None,
    accountant: Annotated[
        Literal["rdp", "pld"] | None,
        typer.Option(help="How epsilon is computed; default pld where it applies, else rdp."),
    ] = None,
    sampling: Annotated[
        Literal["poisson", "fixed"] | None, typer.Option(help="How cohorts are sampled; default poisson.")
    ] = None,
    tuning_trials: Annotated[
        float | None,
        typer.Option(help="Price a tuning: only the best of several runs is shown. How many runs, on average."),
    ] = None,
    tuning_shape: Annotated[
        float, typer.Option(help="Distribution of the number of runs: inf Poisson, 1 geometric, 0 logarithmic.")
    ] = math.inf,
    json: Json = False,
    report: Report = None,
) -> None:
    """Compute the epsilon of noise, the noise for an epsilon, or the epsilons of an experiment or a Flower app.

    Examples:

    `fedhdp account --noise-multiplier 1.5 --sampling-rate 0.05 --rounds 500 --delta 1e-4`

    `fedhdp account --epsilon 3.6 --sampling-rate 0.05 --rounds 500 --accountant pld`

    `fedhdp account --noise-multiplier 2 --sampling-rate 0.1 --trainings 104 --rounds 10` (a training a week for two years)

    `fedhdp account three-levels --json`

    `fedhdp account examples/flower_app --rounds 50`
    """
    from fedhdp.privacy.rounds import account_rounds
    from fedhdp.privacy.tuning import Tuning

    if tuning_trials is None and tuning_shape != math.inf:
        raise ConfigError(f"--tuning-shape {tuning_shape:g} needs --tuning-trials", "--tuning-shape", tuning_shape)
    tuning = None if tuning_trials is None else Tuning(tuning_trials, tuning_shape)
    numbers = {
        "--noise-multiplier": noise_multiplier,
        "--epsilon": epsilon,
        "--sampling-rate": sampling_rate,
        "--trainings": trainings,
        "--sampling": sampling,
        "--accountant": accountant,
    }
    if experiment is not None:
        for name, value in numbers.items():
            if value is not None:
                message = f"{name} must not be given with {experiment}, which has its own, got {value}"
                raise ConfigError(message, name, value)
        _account_named(experiment, rounds, delta, tuning, json, report)
        return
    if (noise_multiplier is None) == (epsilon is None):
        values = "neither" if epsilon is None else f"{noise_multiplier:g} and --epsilon {epsilon:g}"
        message = f"--noise-multiplier or --epsilon must be given, or an experiment, got {values}"
        raise ConfigError(message, "--noise-multiplier", noise_multiplier)
    result = account_rounds(
        _required("--sampling-rate", sampling_rate),
        _required("--rounds", rounds),
        1e-4 if delta is None else delta,
        noise_multiplier=noise_multiplier,
        target_epsilon=epsilon,
        trainings=trainings,
        accountant=accountant,
        sampling=sampling or "poisson",
        tuning=tuning,
    )
    print_json(result) if json else _print_rounds(result)
    if report is not None:
        from fedhdp.report.cost_page import rounds_page

        write_file(report, rounds_page(result), json)


def _required(name: str, value: Number | None) -> Number:
    """The value of an option that must be given."""
    if value is None:
        raise ConfigError(f"{name} must be given where there is no experiment, got none", name)
    return value


def _account_named(
    name: str, rounds: int | None, delta: float | None, tuning: Tuning | None, json: bool, page: Path | None
) -> None:
    import msgspec

    from fedhdp.results.store import EXPERIMENT_FILE

    changes: dict[str, Any] = {key: value for key, value in (("rounds", rounds), ("delta", delta)) if value is not None}
    path = Path(name)
    if (path.is_dir() and not (path / EXPERIMENT_FILE).is_file()) or path.name == "pyproject.toml":
        from fedhdp.flower.config import Deployment

        if tuning is not None:
            message = f"--tuning-trials must not be given with {name}, a Flower app, got {tuning.trials:g}"
            raise ConfigError(message, "--tuning-trials", tuning.trials)
        _account_app(Deployment.from_app(path, **changes), json, page)
    else:
        experiments = find_experiments(name, changes)
        if (json or page is not None) and len(experiments) > 1:
            option = "--json" if json else "--report"
            message = f"{option} is of one experiment, and the sweep of {name} makes {len(experiments)}"
            raise ConfigError(message, option, len(experiments))
        for part, experiment in experiments.items():
            full_name = f"{experiment.name} {part}".strip()
            _account_experiment(msgspec.structs.replace(experiment, name=full_name), tuning, json, page)


def _account_experiment(experiment: Experiment, tuning: Tuning | None, json: bool, page: Path | None) -> None:
    from fedhdp.experiments.costs import account_experiment

    cost = account_experiment(experiment, tuning)
    if json:
        print_json(cost)
    else:
        _print_mechanisms(cost, tuning)
        for note in cost.notes:
            console().print(note, style="yellow")
    if page is not None:
        from fedhdp.report.cost_page import mechanisms_page

        algorithms = {variant.name: variant.algorithm for variant in experiment.variants}
        write_file(page, mechanisms_page(cost.experiment, cost.mechanisms, algorithms, cost.notes), json)


def _account_app(deployment: Deployment, json: bool, page: Path | None) -> None:
    from fedhdp.privacy.costs import ADJACENCY
    from fedhdp.privacy.reports import account_levels

    mechanism = deployment.mechanism(dict.fromkeys(deployment.levels, 1))
    stated = (deployment.budgets, deployment.epsilon_targets, deployment.stated_weights)
    reports = account_levels(mechanism, deployment.rounds, deployment.delta_of, *stated)
    levels = sorted(reports, key=lambda report: deployment.levels_by_strictness.index(report.level))
    if json:
        header = {
            "deployment": deployment.name,
            "rounds": deployment.rounds,
            "sampling": mechanism.sampling,
            "adjacency": ADJACENCY[mechanism.sampling],
            "repeatable": deployment.repeatable,
        }
        print_json(header | {"levels": levels})
    else:
        _print_levels(deployment, mechanism.sampling, levels)
    if page is not None:
        from fedhdp.report.cost_page import levels_page

        write_file(page, levels_page(deployment.name, levels, deployment.rounds, mechanism.sampling), json)


def _print_levels(deployment: Deployment, sampling: Sampling, levels: list[LevelReport]) -> None:
    from fedhdp.privacy.accounting import pluralize
    from fedhdp.privacy.costs import ADJACENCY, SAMPLER

    out = console()
    basis = f"{SAMPLER[sampling]}, {ADJACENCY[sampling]}, {levels[0].accountant.upper()} accountant"
    out.print(f"{deployment.name}: epsilon of each level after {pluralize(deployment.rounds)} ({basis})")
    rows = new_table(("level",), ("q", "z", "weight", "delta", "ε asked", "ε", "budget"))
    for number, level in enumerate(levels):
        rows.add_row(
            level.level + ("" if number else " (default)"),
            f"{level.sampling_rate:g}",
            f"{level.noise_multiplier:.4g}",
            "theory's" if level.weight is None else f"{level.weight:g}",
            f"{level.delta:g}",
            epsilon_text(level.epsilon_target),
            epsilon_text(level.epsilon),
            epsilon_text(level.budget),
        )
    print_table(out, rows)
    out.print(
        "Each level guarantees this whatever levels others choose: their choices can add noise, never remove it. The "
        "server's ledger adds up all runs, by the same accountant; rounds that a crash interrupts are charged again."
    )
    if any(level.weight is None for level in levels):
        out.print("Weights that are not stated are the theory's, for the clients who have enrolled (fedhdp plan).")
    if deployment.repeatable:
        out.print("Noise or cohorts come from a given seed, so nothing is private.", style="yellow")


def _print_rounds(report: RoundsReport) -> None:
    from fedhdp.privacy.accounting import pluralize
    from fedhdp.privacy.costs import SAMPLER

    out = console()
    basis = (
        f"q {report.sampling_rate:g}, {SAMPLER[report.sampling]}, {report.adjacency}, "
        f"{report.accountant.upper()} accountant" + (f", {report.tuning}" if report.tuning else "")
    )
    rounds = pluralize(report.rounds)
    if report.trainings is not None:
        rounds = f"{pluralize(report.trainings, 'training')} of {rounds}"
    if report.target_epsilon is None:
        noise = f"{report.noise_multiplier:.4g}"
        out.print(
            f"Epsilon {epsilon_text(report.epsilon)} at delta {report.delta:g} after {rounds} with noise of {noise} times "
            f"the L2 sensitivity ({basis})."
        )
    else:
        noise = epsilon_text(report.noise_multiplier)
        out.print(
            f"Noise multiplier {noise}, for epsilon at most {epsilon_text(report.target_epsilon)}: epsilon "
            f"{epsilon_text(report.epsilon)} at delta {report.delta:g} after {rounds} with noise of {noise} times the L2 "
            f"sensitivity ({basis})."
        )
    if report.unprotected:
        out.print("Without noise nothing is protected: this is opting out.")
        return
    if report.sampling == "fixed":
        out.print(
            f"Replacing one client changes a sum by two clips, so this noise is {report.noise_in_clips:.4g} clips. "
            f"A mechanism with noise of {noise} clips has half the noise multiplier, and epsilon "
            f"{epsilon_text(report.epsilon_if_noise_in_clips)}."
        )
    _print_curve(out, report)


def _print_curve(out: Console, report: RoundsReport) -> None:
    out.print()
    largest = max(point.epsilon for point in report.curve) or 1.0
    unit = "rounds" if report.trainings is None else "trainings"
    digits = max(len(unit), len(str(report.trainings or report.rounds)))
    out.print(f"{unit:>{digits}}  epsilon", style="dim")
    for point in report.curve:
        bar = "█" * max(1, round(BAR_WIDTH * point.epsilon / largest)) if point.epsilon else ""
        out.print(f"{point.trainings or point.rounds:>{digits}}  {epsilon_text(point.epsilon):>7}  ", end="")
        out.print(bar, style="cyan")


def _print_mechanisms(cost: ExperimentCost, tuning: Tuning | None) -> None:
    from fedhdp.privacy.accounting import pluralize
    from fedhdp.privacy.costs import SAMPLER

    out, reports = console(), cost.mechanisms
    groups = reports[0].groups
    basis = f"{SAMPLER[groups[0].sampling]}, {groups[0].adjacency}, {groups[0].accountant.upper()} accountant"
    out.print(f"{cost.experiment}: epsilon of each group after {pluralize(groups[0].rounds)} ({basis})")
    has_targets = any(group.epsilon_target is not None for report in reports for group in report.groups)
    columns = ["ε asked"] * has_targets + ["ε"] + ["ε tuned"] * (tuning is not None)
    rows = new_table(("variant", "group"), ("clients", "q", "z", "delta", *columns))
    for report in reports:
        for number, group in enumerate(report.groups):
            rows.add_row(
                "" if number else ",\n".join(report.variants),
                group.group,
                f"{group.clients:,}",
                f"{group.sampling_rate:g}",
                _noise_text(group),
                f"{group.delta:g}",
                *([epsilon_text(group.epsilon_target)] if has_targets else []),
                epsilon_text(group.epsilon),
                *([] if tuning is None else [epsilon_text(group.epsilon_tuned)]),
                end_section=number == len(report.groups) - 1,
            )
    print_table(out, rows)
    for line in _surplus_lines(reports):
        out.print(line)
    for line in delta_warnings(max(group.delta for group in groups), sum(group.clients for group in groups)):
        out.print(line, style="yellow")
    if cost.drops_groups:
        out.print(
            "A group whose budget is exhausted is dropped, and with it the noise that it required. From then on the "
            "other groups get the noise of their level alone, and may reach a larger epsilon than this."
        )
    if tuning is not None:
        out.print(
            f"ε tuned: {tuning}, by RDP. Each trial is one of the variants that give the group noise, and nothing of the "
            "other trials may be shown."
        )


def _noise_text(group: GroupReport) -> str:
    """The noise multiplier; where it changes from round to round, the smallest."""
    noise = number_text(group.noise_multiplier)
    return noise if group.mechanisms == 1 else f"≥ {noise}"


def _surplus_lines(reports: list[MechanismReport]) -> list[str]:
    """Which groups have more noise than they asked for, and why."""
    names: dict[str, list[str]] = {}
    for report in reports:
        for group in report.groups:
            if group.surplus is not None:
                names.setdefault(f"{group.group} has {group.surplus}", []).extend(report.variants)
    return [f"{line} [{'; '.join(variants)}]" for line, variants in names.items()]
