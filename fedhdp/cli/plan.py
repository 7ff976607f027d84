"""`fedhdp plan`: what a population's privacy levels mean for noise, weights and one another, before anything is run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from fedhdp.cli._output import console, in_short, on_delta, print_json, print_table, table
from fedhdp.privacy.accounting import pluralize

if TYPE_CHECKING:
    from fedhdp.theory.planning import ErrorEstimate, Level, Plan

ALGORITHMS = {
    "fedhdp": "FedHDP, weights above",
    "fedhdp_per_group": "the same, noise per group",
    "hdp_fedavg": "HDP-FedAvg, equal weights",
    "dp_fedavg": "DP-FedAvg, strictest for all",
    "non_private": "no privacy at all",
}


def plan(
    level: Annotated[
        list[str],
        typer.Option(metavar="NAME:EPSILON:SHARE", help="A privacy level and who chooses it; inf opts out. Repeat it."),
    ],
    clients: Annotated[int, typer.Option(help="How many clients there are.")] = 2000,
    cohort: Annotated[float, typer.Option(help="How many come to a round, on average.")] = 100,
    rounds: Annotated[int, typer.Option(help="How many rounds.")] = 500,
    delta: Annotated[float, typer.Option(help="The delta of every promise.")] = 1e-4,
    parameters: Annotated[int, typer.Option(help="How many the model has.")] = 39_760,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    toml: Annotated[bool, typer.Option("--toml", help="Print an experiment for `fedhdp run` to try it on.")] = False,
) -> None:
    """Plan before running: the noise each privacy level needs, its weight, and what it costs the others.

    Examples:

    `fedhdp plan --level none:inf:5% --level relaxed:8:35% --level strict:2:60%`

    `fedhdp plan --clients 500 --cohort 50 --level none:inf:0.1 --level private:4:0.9 --toml > mine.toml`
    """
    from fedhdp.theory.planning import plan as made

    if json and toml:
        raise ValueError("give either --json or --toml, got both")
    answer = made(clients, cohort, rounds, delta, [_level(text) for text in level], parameters)
    if json:
        print_json(answer)
    elif toml:
        from fedhdp.experiments.config import to_toml
        from fedhdp.experiments.presets import plan_experiment

        print(to_toml(plan_experiment(answer)), end="")
    else:
        _print(answer)


def _level(text: str) -> Level:
    """A level from NAME:EPSILON:SHARE, the share as 35% or 0.35."""
    from fedhdp.theory.planning import Level

    try:
        name, epsilon, share = text.rsplit(":", 2)
        part = float(share[:-1]) / 100 if share.endswith("%") else float(share)
        return Level(name, float(epsilon), part)
    except ValueError as error:
        if "must be" in str(error):
            raise
        raise ValueError(f"--level must be NAME:EPSILON:SHARE, such as strict:2:60%, got {text!r}") from None


def _print(plan: Plan) -> None:
    out = console()
    out.print(
        f"{plan.clients:,} clients, {plan.cohort:g} a round, {pluralize(plan.rounds)}, delta {plan.delta:g}, "
        f"a model of {plan.parameters:,} parameters"
    )
    levels = table(("level",), ("clients", "a round", "ε asked", "noise z", "weight r", "say", "ε PLD", "ε RDP"))
    for level in plan.levels:
        levels.add_row(
            level.name,
            f"{level.clients:,}",
            f"{level.clients_a_round:.4g}",
            in_short(level.epsilon_asked),
            f"{level.noise_multiplier:.4g}",
            f"{level.weight:.2g}",
            f"{level.weight_share:.0%}",
            in_short(level.epsilon_pld),
            in_short(level.epsilon_rdp),
        )
    print_table(out, levels)
    out.print(
        "z for each level's epsilon by PLD; say: its part of the weighted mean; Poisson sampling, add or remove one"
    )
    for line in on_delta(plan.delta, plan.clients):
        out.print(line, style="yellow")
    out.print()

    out.print("What reaches the model, in clips (the mean update that is looked for is at most 1)")
    reaching = table(("",), ("noise a round,\na parameter", "on all", "noise in mean\nof all rounds", "error"))
    for name, label in ALGORITHMS.items():
        found = plan.error_estimates[name]
        numbers = (found.noise_per_parameter, found.noise_of_a_round, found.noise, found.error)
        reaching.add_row(label, *(f"{number:.3g}" for number in numbers))
    print_table(out, reaching)
    out.print("error: noise, who happened to come, and who is hardly heard, in the mean of all rounds\n")

    out.print("What one level costs everybody: the error with it, and if it were otherwise")
    costs = table(
        ("level",), ("as planned", "had they\nopted out", "without\nthem", "equal\nweights", "… without\nthem")
    )
    now, equal = plan.error_estimates["fedhdp"], plan.error_estimates["hdp_fedavg"]
    for cost in plan.costs:
        worlds = (now, cost.opted_out, cost.without, equal, cost.unweighed_without)
        costs.add_row(cost.name, *(_error(world) for world in worlds))
    print_table(out, costs)
    out.print(_in_words(plan))


def _error(estimate_error: ErrorEstimate | None) -> str:
    return "–" if estimate_error is None else f"{estimate_error.error:.3g}"


def _in_words(plan: Plan) -> str:
    """What it would mean to give everybody the strictest level."""
    strictest = max(plan.levels, key=lambda level: level.noise_multiplier)
    if strictest.opted_out:
        return "Nobody asked for privacy, so there is no noise."
    times = plan.error_estimates["dp_fedavg"].error / plan.error_estimates["fedhdp"].error
    best = math.isclose(times, 1, rel_tol=0.005)
    verdict = "the error is the same" if best else f"the error is {times:.2g} times the planned one"
    return f"With everybody at the level {strictest.name!r}, which is DP-FedAvg, {verdict}."
