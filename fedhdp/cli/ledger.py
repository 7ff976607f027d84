"""`fedhdp ledger`: the epsilon of each group over all runs of a population, and the budgets promised to groups."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhdp.cli._options import Json
from fedhdp.cli._output import console, epsilon_text, new_table, print_json, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from fedhdp.privacy.ledger import Run
    from fedhdp.privacy.reports import GroupStanding

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,
    help="Show each group's epsilon over all runs of a population; promise budgets.",
)
File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger of the population.")]


@app.command()
def show(
    file: File,
    delta: Annotated[float, typer.Option(help="The delta for groups without a budget; a budget has its own.")] = 1e-4,
    json: Json = False,
) -> None:
    """Show each group's budget, its epsilon over all runs, and how many rounds are left.

    Example: `fedhdp ledger show population.ledger`
    """
    from fedhdp.privacy.ledger import Ledger
    from fedhdp.privacy.reports import group_standing

    with Ledger(file, read_only=True) as ledger:
        groups = [group_standing(ledger, name, delta) for name in ledger.groups()]
        runs = ledger.runs()
    if json:
        records = [{"run": run.name, "started": run.started, "rounds_charged": run.charged} for run in runs]
        print_json({"ledger": str(file), "groups": groups, "runs": records})
        return
    out = console()
    out.print(f"{file}: epsilon of each group over all runs")
    _print_groups(out, groups)
    if runs:
        out.print()
        _print_runs(out, runs)


@app.command()
def promise(
    file: File,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group's name in its runs.")],
    epsilon: Annotated[float, typer.Option(help="The epsilon that it may reach over all runs.")],
    delta: Annotated[float, typer.Option(help="The delta of that epsilon.")],
) -> None:
    """Promise a group a budget over all runs, before its first run or later. It can be lowered, never raised.

    Example: `fedhdp ledger promise population.ledger strict --epsilon 2 --delta 1e-4`
    """
    from fedhdp.privacy.ledger import Budget, Ledger
    from fedhdp.privacy.reports import group_standing

    is_new = not file.exists()
    with Ledger(file) as ledger:
        ledger.promise(group, epsilon, delta)
        standing = group_standing(ledger, group, delta)
    note = "" if standing.clients else " The group has not been in a run yet; the budget holds from its first round."
    if (standing.epsilon or 0.0) > epsilon:
        note = " The budget is exceeded already, so no further round can be charged."
    if is_new:
        console().print(f"{file}: a new ledger")
    console().print(
        f"{group}: the budget is {Budget(epsilon, delta)}; epsilon over all runs is {epsilon_text(standing.epsilon)}.{note}"
    )


def _print_groups(out: Console, groups: list[GroupStanding]) -> None:
    rows = new_table(("group",), ("clients", "budget", "delta", "ε", "rounds", "left"))
    for group in groups:
        rows.add_row(
            group.group,
            f"{group.clients:,}" if group.clients else "none yet",
            epsilon_text(group.budget.epsilon if group.budget else None, "none"),
            f"{group.delta:g}",
            epsilon_text(group.epsilon),
            f"{sum(charge['rounds'] for charge in group.charges):,}",
            _format_rounds_left(group.rounds_left),
        )
    print_table(out, rows)
    out.print(
        "Epsilons and budgets are by RDP. left: how many more rounds, like those of its last run, the budget allows.\n"
    )
    for group in groups:
        out.print(f"{group.group}: {_format_charges(group)}")


def _format_rounds_left(rounds: float | None) -> str:
    if rounds is None:
        return "–"
    return "∞" if rounds == math.inf else str(rounds)


def _format_charges(group: GroupStanding) -> str:
    from fedhdp.privacy.accounting import pluralize

    parts = []
    for charge in group.charges:
        basis = f"z {charge['noise_multiplier']:.4g}, q {charge['sampling_rate']:g} ({charge['sampling']})"
        rounds = pluralize(charge["rounds"])
        parts.append(f"{rounds} at {basis}" if charge["sampling_rate"] > 0 else f"{rounds} without the group")
    return "; ".join([*parts, *filter(None, [group.adjacency, group.note])]) or "no rounds yet"


def _print_runs(out: Console, runs: tuple[Run, ...]) -> None:
    rows = new_table(("run", "started (UTC)"), ("rounds charged",))
    for run in runs:
        rows.add_row(run.name, run.started[:16].replace("T", " "), f"{run.charged:,}")
    print_table(out, rows)
