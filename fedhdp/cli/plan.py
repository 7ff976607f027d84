"""`fedhdp plan`: noise, weights and expected error of a population's privacy levels, before anything is run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedhdp.cli._options import Json
from fedhdp.cli._output import console, delta_warnings, epsilon_text, new_table, print_json, print_table
from fedhdp.errors import ConfigError, InvalidValueError

if TYPE_CHECKING:
    from fedhdp.theory.planning import ErrorEstimate, LevelShare, Plan

ALGORITHMS = {
    "fedhdp": "FedHDP, weights above",
    "fedhdp_per_group": "FedHDP, noise per group",
    "hdp_fedavg": "HDP-FedAvg, equal weights",
    "dp_fedavg": "DP-FedAvg, strictest for all",
    "non_private": "non-private",
}


def plan(
    level: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:EPSILON:SHARE", help="A privacy level and its share of the clients; inf opts out. Repeat it."
        ),
    ],
    clients: Annotated[int, typer.Option(help="Number of clients in the population.")] = 2000,
    cohort: Annotated[float, typer.Option(help="Expected number of clients in a round.")] = 100,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 500,
    delta: Annotated[float, typer.Option(help="Delta of each level's epsilon.")] = 1e-4,
    parameters: Annotated[int, typer.Option(help="Number of the model's parameters.")] = 39_760,
    json: Json = False,
    toml: Annotated[bool, typer.Option("--toml", help="Print an experiment for `fedhdp run`.")] = False,
) -> None:
    """Plan before running: the noise and weight of each privacy level, and what it costs the others.

    Examples:

    `fedhdp plan --level none:inf:5% --level relaxed:8:35% --level strict:2:60%`

    `fedhdp plan --clients 500 --cohort 50 --level none:inf:0.1 --level private:4:0.9 --toml > plan.toml`
    """
    from fedhdp.theory import planning

    if json and toml:
        raise ConfigError("give either --json or --toml, got both", "--json")
    result = planning.plan(clients, cohort, rounds, delta, [_parse_level(text) for text in level], parameters)
    if json:
        print_json(result)
    elif toml:
        from fedhdp.experiments.config import to_toml
        from fedhdp.experiments.presets import plan_experiment

        print(to_toml(plan_experiment(result)), end="")
    else:
        _print(result)


def _parse_level(text: str) -> LevelShare:
    """A level from NAME:EPSILON:SHARE, the share as 35% or 0.35."""
    from fedhdp.theory.planning import LevelShare

    try:
        name, epsilon, share = text.rsplit(":", 2)
        fraction = float(share[:-1]) / 100 if share.endswith("%") else float(share)
        return LevelShare(name, float(epsilon), fraction)
    except InvalidValueError:
        raise
    except ValueError:
        message = f"--level must be NAME:EPSILON:SHARE, such as strict:2:60%, got {text!r}"
        raise ConfigError(message, "--level", text) from None


def _print(plan: Plan) -> None:
    from fedhdp.privacy.accounting import pluralize

    out = console()
    out.print(
        f"{plan.clients:,} clients, expected cohort {plan.cohort:g}, {pluralize(plan.rounds)}, delta {plan.delta:g}, "
        f"{plan.parameters:,} parameters"
    )
    _print_levels(out, plan)
    _print_errors(out, plan)
    _print_costs(out, plan)
    out.print(_compare_with_strictest(plan))


def _print_levels(out: Console, plan: Plan) -> None:
    columns = ("clients", "cohort", "ε asked", "noise z", "weight r", "share", "ε")
    levels = new_table(("level",), columns)
    for level in plan.levels:
        levels.add_row(
            level.name,
            f"{level.clients:,}",
            f"{level.expected_cohort_size:.4g}",
            epsilon_text(level.target_epsilon),
            epsilon_text(level.noise_multiplier),
            f"{level.weight:.2g}",
            f"{level.weight_share:.0%}",
            epsilon_text(level.epsilon),
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
    out.print("error = noise + sampling + weighting bias, averaged over rounds\n")


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


def _compare_with_strictest(plan: Plan) -> str:
    """One sentence: the error of DP-FedAvg, which gives all clients the strictest level."""
    strictest = max(plan.levels, key=lambda level: level.noise_multiplier)
    if strictest.opted_out:
        return "All clients opted out, so there is no noise."
    ratio = plan.error_estimates["dp_fedavg"].error / plan.error_estimates["fedhdp"].error
    comparison = "the same" if math.isclose(ratio, 1, rel_tol=0.005) else f"{ratio:.2g} times the planned one"
    return f"With all clients at the level {strictest.name!r}, which is DP-FedAvg, the error is {comparison}."
