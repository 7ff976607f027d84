"""`fedhdp plan`: noise, weights and expected error of a population's privacy levels, before anything is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from fedhdp.cli._options import Json, Report
from fedhdp.cli._output import console, delta_warnings, epsilon_text, new_table, print_json, print_table
from fedhdp.errors import ConfigError, InvalidValueError

if TYPE_CHECKING:
    from fedhdp.theory.planning import ErrorEstimate, LevelShare, Plan
    from fedhdp.theory.training import SuggestedTraining

ALGORITHMS = {
    "fedhdp": "FedHDP, weights above",
    "fedhdp_per_group": "FedHDP, noise per group",
    "hdp_fedavg": "HDP-FedAvg, equal weights",
    "dp_fedavg": "DP-FedAvg, strictest for all",
    "non_private": "non-private",
}
ERROR_PARTS = "error = noise + sampling + weighting bias, averaged over rounds"


def plan(
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:EPSILON:SHARE", help="A privacy level and its share of the clients; inf opts out. Repeat it."
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SET=]LEVEL,LEVEL…",
            help="A whole set of levels, to compare with --level and other sets. Repeat it.",
        ),
    ] = None,
    clients: Annotated[int, typer.Option(help="Number of clients in the population.")] = 2000,
    cohort: Annotated[float, typer.Option(help="Expected number of clients in a round.")] = 100,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 500,
    delta: Annotated[float, typer.Option(help="Delta of each level's epsilon.")] = 1e-4,
    parameters: Annotated[int, typer.Option(help="Number of the model's parameters.")] = 39_760,
    accountant: Annotated[
        Literal["pld", "rdp"], typer.Option(help="By which noise keeps epsilon; rdp for runs with a ledger.")
    ] = "pld",
    json: Json = False,
    toml: Annotated[bool, typer.Option("--toml", help="Print an experiment for `fedhdp run`.")] = False,
    training: Annotated[
        bool,
        typer.Option(
            "--training", help="Also suggest a public basis and training for it; with --toml, in the experiment."
        ),
    ] = False,
    report: Report = None,
) -> None:
    """Plan before running: the noise and weight of each privacy level, and what it costs the others.

    Examples:

    `fedhdp plan --level none:inf:5% --level relaxed:8:35% --level strict:2:60%`

    `fedhdp plan --clients 500 --cohort 50 --level none:inf:0.1 --level private:4:0.9 --toml > plan.toml`

    `fedhdp plan --compare today=none:inf:5%,strict:2:95% --compare offer=none:inf:5%,mild:8:50%,strict:2:45%`
    """
    from msgspec.structs import asdict

    from fedhdp.theory import planning
    from fedhdp.theory.training import suggest_training

    if json and toml:
        raise ConfigError("give either --json or --toml, got both", "--json")
    sets = _parse_sets(level or [], compare or [])
    if training and len(sets) > 1:
        raise ConfigError(f"--training takes one set of levels, got {len(sets)}", "--training", len(sets))
    if toml and len(sets) > 1:
        raise ConfigError(f"--toml takes one set of levels, got {len(sets)}", "--toml", len(sets))
    numbers = (clients, cohort, rounds, delta)
    plans = {name: planning.plan(*numbers, levels, parameters, accountant) for name, levels in sets.items()}
    result = next(iter(plans.values()))
    if json:
        value: object = {"plans": plans} if compare else result
        print_json(asdict(result) | {"training": suggest_training(result)} if training else value)
    elif toml:
        from fedhdp.experiments.presets import plan_experiment
        from fedhdp.experiments.toml import to_toml

        print(to_toml(plan_experiment(result, suggest_training(result) if training else None)), end="")
    elif compare:
        _print_comparison(plans)
    else:
        _print(result)
        if training:
            _print_training(suggest_training(result))
    if report is not None:
        from fedhdp.cli.report import write_file
        from fedhdp.report.cost_page import plan_page

        write_file(report, plan_page(plans), json or toml)


def _parse_sets(levels: list[str], compare: list[str]) -> dict[str, list[LevelShare]]:
    """The sets of levels, by name: that of --level first; sets without a name are numbered."""
    if not levels and not compare:
        raise ConfigError("--level or --compare must be given, got neither", "--level")
    if compare and len(compare) + bool(levels) < 2:
        message = f"--compare needs two sets of levels or more, got {compare[0]!r} alone"
        raise ConfigError(message, "--compare", compare[0])
    sets = {"levels": [_parse_level(text) for text in levels]} if levels else {}
    for text in compare:
        name, _, listed = text.rpartition("=")
        name = name or f"set {len(sets) + 1}"
        if name in sets:
            raise ConfigError(f"--compare must be sets of different names, got {name!r} twice", "--compare", name)
        sets[name] = [_parse_level(item, "--compare") for item in listed.split(",")]
    return sets


def _parse_level(text: str, option: str = "--level") -> LevelShare:
    """A level from NAME:EPSILON:SHARE, the share as 35% or 0.35."""
    from fedhdp.theory.planning import LevelShare

    try:
        name, epsilon, share = text.rsplit(":", 2)
        fraction = float(share[:-1]) / 100 if share.endswith("%") else float(share)
        return LevelShare(name, float(epsilon), fraction)
    except InvalidValueError:
        raise
    except ValueError:
        message = f"{option} must be NAME:EPSILON:SHARE, such as strict:2:60%, got {text!r}"
        raise ConfigError(message, option, text) from None


def _print(plan: Plan) -> None:
    from fedhdp.theory.planning import describe_gain

    out = console()
    _print_head(out, plan)
    _print_levels(out, {"": plan})
    _print_errors(out, plan)
    _print_costs(out, plan)
    out.print(describe_gain(plan))


def _print_training(suggested: SuggestedTraining) -> None:
    out = console()
    out.print("\nSuggested training of FedHDP on a public basis of cosines; weights as above")
    table = new_table(("setting", "value", "rests on"), ())
    for name, reason in suggested.rests_on.items():
        value = getattr(suggested, name, None)
        table.add_row(name, "as above" if value is None else f"{value:g}", reason)
    print_table(out, table)
    out.print("--training --toml prints the experiment with it")


def _print_comparison(plans: dict[str, Plan]) -> None:
    """The levels of each set, and their errors side by side."""
    out = console()
    _print_head(out, next(iter(plans.values())))
    _print_levels(out, plans)
    out.print(f"Expected error of the model, in units of the clip ({ERROR_PARTS})")
    errors = new_table(("algorithm",), plans)
    for name, label in ALGORITHMS.items():
        errors.add_row(label, *(f"{plan.error_estimates[name].error:.3g}" for plan in plans.values()))
    print_table(out, errors)


def _print_head(out: Console, plan: Plan) -> None:
    from fedhdp.privacy.accounting import pluralize

    out.print(
        f"{plan.clients:,} clients, expected cohort {plan.cohort:g}, {pluralize(plan.rounds)}, delta {plan.delta:g}, "
        f"{plan.parameters:,} parameters"
    )


def _print_levels(out: Console, plans: dict[str, Plan]) -> None:
    """The levels of a plan, or of several by the name of their set."""
    plan, sets = next(iter(plans.values())), ["set"] * (len(plans) > 1)
    columns = ("clients", "cohort", "ε asked", "ε", "noise z", "weight r", "share")
    levels = new_table((*sets, "level"), columns)
    for name, planned in plans.items():
        for number, level in enumerate(planned.levels):
            levels.add_row(
                *([""] if number else [name])[: len(sets)],
                level.name,
                f"{level.clients:,}",
                f"{level.expected_cohort_size:.4g}",
                epsilon_text(level.target_epsilon),
                epsilon_text(level.epsilon),
                epsilon_text(level.noise_multiplier),
                f"{level.weight:.2g}",
                f"{level.weight_share:.0%}",
                end_section=number == len(planned.levels) - 1 and len(plans) > 1,
            )
    print_table(out, levels)
    out.print(
        f"noise z keeps ε by {plan.accountant.upper()}; share is of the weighted mean (Poisson sampling, add or remove one "
        "client)"
    )
    for line in delta_warnings(plan.delta, plan.clients):
        out.print(line, style="yellow")
    out.print()


def _print_errors(out: Console, plan: Plan) -> None:
    out.print("Expected error of the model, in units of the clip (the mean update has norm at most 1)")
    columns = ("noise per\nparameter", "noise\nnorm", "noise, mean\nover rounds", "error")
    errors = new_table(("algorithm",), columns)
    for name, label in ALGORITHMS.items():
        estimate = plan.error_estimates[name]
        numbers = (estimate.noise_per_parameter, estimate.noise_per_round, estimate.noise, estimate.error)
        errors.add_row(label, *(f"{number:.3g}" for number in numbers))
    print_table(out, errors)
    out.print(f"{ERROR_PARTS}\n")


def _print_costs(out: Console, plan: Plan) -> None:
    out.print("Error if a level's clients chose otherwise")
    columns = ("as planned", "opted out", "without\nthem", "equal\nweights", "equal weights,\nwithout them")
    costs = new_table(("level",), columns)
    planned, equal = plan.error_estimates["fedhdp"], plan.error_estimates["hdp_fedavg"]
    for cost in plan.costs:
        estimates = (planned, cost.opted_out, cost.without, equal, cost.equal_weights_without)
        costs.add_row(cost.name, *map(_format_error, estimates))
    print_table(out, costs)


def _format_error(estimate: ErrorEstimate | None) -> str:
    return "–" if estimate is None else f"{estimate.error:.3g}"
