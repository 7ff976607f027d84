"""`fedhdp ledger`: what a population has spent over all its runs, and what it was promised."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedhdp.cli._output import console, in_short, print_json, print_table, table

if TYPE_CHECKING:
    from fedhdp.mechanism import Mechanism
    from fedhdp.privacy.ledger import Ledger

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,
    help="See what a population has spent over all runs; promise it budgets.",
)
File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger, one for a population.")]


@app.command()
def show(
    file: File,
    delta: Annotated[float, typer.Option(help="The delta for groups without a budget, which has its own.")] = 1e-4,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show each group's budget, what it has spent over all runs, and how many rounds are left.

    Example: `fedhdp ledger show population.ledger`
    """
    from fedhdp.privacy.ledger import Ledger

    with Ledger(file, read_only=True) as ledger:
        answer = {"ledger": str(file), "groups": [standing_of(ledger, name, delta) for name in ledger.groups()]}
        answer["runs"] = [
            {"run": run.name, "started": run.started, "rounds_charged": run.charged} for run in ledger.runs()
        ]
    print_json(answer) if json else _print(answer)


@app.command()
def promise(
    file: File,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group's name in its runs.")],
    epsilon: Annotated[float, typer.Option(help="What it may spend in its life.")],
    delta: Annotated[float, typer.Option(help="And with which delta.")],
) -> None:
    """Promise a group a budget for its life, before its first run or later. It can be lowered, never raised.

    Example: `fedhdp ledger promise population.ledger strict --epsilon 2 --delta 1e-4`
    """
    from fedhdp.privacy.ledger import Ledger

    new = not file.exists()
    with Ledger(file) as ledger:
        ledger.promise(group, epsilon, delta)
        standing = standing_of(ledger, group, delta)
    waits = "" if standing["clients"] else " It has not been in a run yet; the budget waits for it."
    if (standing["epsilon"] or 0.0) > epsilon:
        waits = " That is more than the promise: what is spent cannot be unspent, and no further round will be run."
    if new:
        console().print(f"{file}: a new ledger")
    console().print(
        f"{group}: epsilon {epsilon:g} at delta {delta:g}, of which {in_short(standing['epsilon'])} is spent.{waits}"
    )


def standing_of(ledger: Ledger, name: str, delta: float) -> dict[str, Any]:
    """What a group has spent and has left, with what that rests on."""
    from fedhdp.privacy.accounting import ADJACENCY, compose, privacy_costs, rounds_left

    spent, budget, clients = ledger.costs(name), ledger.budget(name), ledger.clients(name)
    delta = budget.delta if budget else delta
    samplings = sorted({sampling for _, _, sampling, _ in spent})
    composable = len(samplings) <= 1
    last = next((run.mechanism for run in reversed(ledger.runs()) if _has(run.mechanism, name)), None)
    left = None
    if budget and last and samplings in ([], [last.sampling]):
        left = rounds_left(spent, privacy_costs(last)[name], budget)
    epsilon = compose(spent, delta) if composable else None
    return {
        "group": name,
        "clients": len(clients),
        "first_client": clients.start if clients else None,
        "budget": budget and {"epsilon": budget.epsilon, "delta": budget.delta},
        "epsilon": epsilon,
        "epsilon_pld": compose(spent, delta, "pld") if samplings in ([], ["poisson"]) else None,
        "opted_out": epsilon == math.inf,
        "delta": delta,
        "rounds_left": left,
        "adjacency": ADJACENCY[samplings[0]] if len(samplings) == 1 else None,
        "spent": [dict(zip(("noise_multiplier", "sampling_rate", "sampling", "rounds"), one)) for one in spent],
        "note": "" if composable else "Poisson and fixed cohorts were mixed: their prices do not compose",
    }


def _has(mechanism: Mechanism, name: str) -> bool:
    return any(group.name == name for group in mechanism.groups)


def _print(answer: dict[str, Any]) -> None:
    out = console()
    out.print(f"{answer['ledger']}: what each group has spent over all runs")
    groups = table(("group",), ("clients", "budget", "delta", "ε RDP", "ε PLD", "rounds", "left"))
    for group in answer["groups"]:
        groups.add_row(
            group["group"],
            f"{group['clients']:,}" if group["clients"] else "none yet",
            in_short(group["budget"] and group["budget"]["epsilon"], "none"),
            f"{group['delta']:g}",
            in_short(group["epsilon"]),
            in_short(group["epsilon_pld"]),
            f"{sum(one['rounds'] for one in group['spent']):,}",
            "–"
            if group["rounds_left"] is None
            else "∞"
            if group["rounds_left"] == math.inf
            else str(group["rounds_left"]),
        )
    print_table(out, groups)
    out.print("Budgets are kept by RDP; left: rounds of the group's last run that its budget still allows\n")
    for group in answer["groups"]:
        parts = []
        for one in group["spent"]:
            rounds = "1 round" if one["rounds"] == 1 else f"{one['rounds']:,} rounds"
            at = f"z {one['noise_multiplier']:.4g}, q {one['sampling_rate']:g} ({one['sampling']})"
            parts.append(f"{rounds} at {at}" if one["sampling_rate"] > 0 else f"left out of {rounds}")
        rests = "; ".join([*parts, *filter(None, [group["adjacency"], group["note"]])]) or "nothing yet"
        out.print(f"{group['group']}: {rests}")
    runs = table(("run", "started"), ("rounds charged",))
    for run in answer["runs"]:
        runs.add_row(run["run"], run["started"], f"{run['rounds_charged']:,}")
    if answer["runs"]:
        out.print()
        print_table(out, runs)
