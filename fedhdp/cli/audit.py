"""`fedhdp audit`: canaries attack the server under an experiment's mechanism, its noise is measured, mutants are caught."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedhdp.cli._options import Json, Report, find_experiments
from fedhdp.cli._output import (
    console,
    epsilon_text,
    error_console,
    new_table,
    number_text,
    print_json,
    print_table,
)
from fedhdp.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedhdp.experiments.config import Experiment
    from fedhdp.privacy.audit.results import Attack, AuditReport, GroupAudit

METHODS = {"Clopper-Pearson": "Clopper-\nPearson", "Gaussian": "Gaussian", "one run": "one\nrun"}  # and their columns


def audit(
    experiment: Annotated[
        str | None, typer.Argument(metavar="[NAME or FILE.toml]", help="An experiment, or a run's directory.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Which variant. Default: the first by the algorithm fedhdp, or the last.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of a run. Default: the experiment's.")] = None,
    runs: Annotated[int, typer.Option(help="How many runs: more give tighter bounds.")] = 4,
    canaries: Annotated[int, typer.Option(help="Canaries of each group, or all of a smaller group.")] = 1000,
    training: Annotated[
        bool, typer.Option("--training", help="Also train with canaries, and attack the released models alone.")
    ] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Also audit ten faulty servers, each of which must be caught.")
    ] = False,
    confidence: Annotated[
        float, typer.Option(help="The probability that a system that keeps its promise passes, at least.")
    ] = 0.999,
    seed: Annotated[int, typer.Option(help="Seed of the canaries' coins; the noise has none.")] = 0,
    json: Json = False,
    page: Report = None,
) -> None:
    """Try to refute the epsilons of an experiment: lower bounds by attack, and measurements of the noise.

    Canaries of every group go through the server's own sampling, clipping, summing and noise. Exit code 1: a lower bound is
    above its claim, a measurement is off the promise, or a mutant is not caught.

    Examples:

    `fedhdp audit quickstart`

    `fedhdp audit three-levels --variant "FedHDP, noise per group" --json`

    `fedhdp audit --mutants`
    """
    from msgspec.structs import replace

    if experiment is None and not mutants:
        raise ConfigError("an experiment or --mutants must be given, got neither", "experiment")
    if experiment is None and training:
        raise ConfigError("--training needs an experiment, got none", "--training")
    report = _audit_mutants(seed, confidence) if mutants else None
    if experiment is not None:
        of_experiment = _audit_experiment(
            _find(experiment, rounds), variant, runs, canaries, confidence, seed, training
        )
        caught = report is None or report.holds
        results = [] if report is None else report.mutants
        report = replace(of_experiment, mutants=results, holds=of_experiment.holds and caught)
    assert report is not None
    print_json(report) if json else _print(report)
    if page is not None:
        from fedhdp.cli.report import write_file
        from fedhdp.report.audit_page import audit_page

        write_file(page, audit_page(report), json)
    if not report.holds:
        raise typer.Exit(1)


def _find(name: str, rounds: int | None) -> Experiment:
    experiments = find_experiments(name, {} if rounds is None else {"rounds": rounds})
    if len(experiments) > 1:
        message = f"an audit is of one experiment, and the sweep of {name} makes {len(experiments)}"
        raise ConfigError(message, "sweep", len(experiments))
    [experiment] = experiments.values()
    return experiment


def _audit_experiment(
    experiment: Experiment, variant: str | None, runs: int, canaries: int, confidence: float, seed: int, training: bool
) -> AuditReport:
    from fedhdp.cli._progress import CountDisplay
    from fedhdp.experiments.audit import audit_experiment

    with CountDisplay() as display:
        return audit_experiment(
            experiment,
            variant,
            canaries=canaries,
            runs=runs,
            confidence=confidence,
            seed=seed,
            training=training,
            progress=display.update,
        )


def _audit_mutants(seed: int, confidence: float) -> AuditReport:
    """The audit of the mutants' mechanism, with what became of each mutant."""
    from msgspec.structs import replace

    from fedhdp.cli._progress import CountDisplay
    from fedhdp.experiments.audit import audit_mutants

    with CountDisplay() as display:

        def show(name: str, done: int, total: int) -> None:
            display.update(f"mutant: {name}", done, total)

        report, results = audit_mutants(seed=seed, confidence=confidence, progress=show)
    return replace(report, mutants=results, holds=report.holds and all(result.caught for result in results))


def _print(report: AuditReport) -> None:
    out = console()
    from fedhdp.privacy.accounting import pluralize
    from fedhdp.privacy.costs import SAMPLER

    name = f"{report.experiment}, {report.variant}" if report.variant else report.experiment
    basis = f"{SAMPLER[report.sampling]}, {report.adjacency}, {report.accountant.upper()} accountant"
    size = f"{pluralize(report.runs, 'run')} of {pluralize(report.rounds)}"
    out.print(f"{name}: audit of {size} ({basis}; {report.arithmetic} arithmetic)")
    out.print("lower bounds on epsilon, beside the claim")
    table = new_table(("group", "attack"), ("μ\nclaimed", "ε\nclaimed", *METHODS.values(), "AUC", "TPR", "result"))
    for group in report.groups:
        for number, (attack, result) in enumerate(_attacks(group)):
            bounds = [number_text(result.lower_bounds.get(method), 3) for method in METHODS]
            claims = (number_text(result.claimed_mu, 3), epsilon_text(result.claimed_epsilon))
            rates = (f"{result.auc:.3f}", f"{result.tpr_at_1_percent_fpr:.3f}")
            table.add_row(group.name if number == 0 else "", attack, *claims, *bounds, *rates, group.verdict(result))
    print_table(out, table)
    _print_checks(out, report)
    _print_mutants(out, report)
    out.print(
        "unknown coins: all rounds, who was sampled is secret. known coins: one round, the attacker knows who was sampled; "
        "clip bits: those of one round. TPR: true positives at 1% false positives. –: the method does not apply."
    )
    out.print(
        f"A system that keeps its promise passes with probability {report.confidence:g} or more. Coins of seed "
        f"{report.seed}, noise and cohorts from the operating system."
    )
    error_console().print(f"{report.seconds:.0f} s", style="dim")


def _attacks(group: GroupAudit) -> list[tuple[str, Attack]]:
    attacks = [
        ("unknown coins", group.unknown_coins),
        ("known coins", group.known_coins),
        ("clip bits", group.clip_bits),
        ("training", group.training),
    ]
    return [(name, attack) for name, attack in attacks if attack is not None]


def _print_checks(out: Console, report: AuditReport) -> None:
    table = new_table(("measured", "of what"), ("value", "promised", "p", "result"))
    for check in report.checks:
        numbers = (number_text(check.measured), number_text(check.promised), f"{check.p_value:.2g}")
        table.add_row(check.name, check.about, *numbers, "holds" if check.holds else "OFF")
    out.print()
    print_table(out, table)


def _print_mutants(out: Console, report: AuditReport) -> None:
    if not report.mutants:
        return
    rows = [(m.name, ", ".join(m.caught_by), "caught" if m.caught else "MISSED") for m in report.mutants]
    out.print()
    print_table(out, new_table(("mutant", "caught by"), ("result",), rows))
