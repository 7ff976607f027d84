"""`fedhdp ledger`: the epsilon of each group over all runs of a population, and the budgets promised to groups."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhdp.cli._options import Json
from fedhdp.cli._output import console, epsilon_text, new_table, print_json, print_table
from fedhdp.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedhdp.privacy.ledger import Budget, Ledger, Run
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
    from fedhdp.privacy.reports import group_standing, restored_note

    with Ledger(file, read_only=True) as ledger:
        groups = [group_standing(ledger, name, delta) for name in ledger.groups()]
        runs, restored, note = ledger.runs(), ledger.restorations(), restored_note(ledger)
    if json:
        records = [{"run": run.name, "started": run.started, "rounds_charged": run.charged} for run in runs]
        print_json({"ledger": str(file), "groups": groups, "runs": records, "restored": restored})
        return
    out = console()
    out.print(f"{file}: epsilon of each group over all runs")
    if note:
        out.print(note)
    _print_groups(out, groups)
    if runs:
        out.print()
        _print_runs(out, runs)


@app.command()
def report(
    file: File,
    delta: Annotated[float, typer.Option(help="The delta for groups without a budget; a budget has its own.")] = 1e-4,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: the ledger's name with .html.")
    ] = None,
) -> None:
    """Write a page of what was spent over time by each group, what is left, and for how many weeks.

    Example: `fedhdp ledger report population.ledger`
    """
    from fedhdp.cli.report import write_file
    from fedhdp.privacy.ledger import Ledger
    from fedhdp.report.ledger_page import ledger_page

    with Ledger(file, read_only=True) as ledger:
        page = ledger_page(ledger, delta)
    write_file(out or file.with_name(f"{file.name}.html"), page)


@app.command()
def promise(
    file: File,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group's name in its runs.")],
    epsilon: Annotated[float, typer.Option(help="The epsilon that it may reach over all runs.")],
    delta: Annotated[float, typer.Option(help="The delta of that epsilon.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    new: Annotated[bool, typer.Option("--new", help="The ledger does not know this group yet.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, even if the group can run no further round.")] = False,
) -> None:
    """Promise a group a budget over all runs, before its first run or later. It can be lowered, never raised.

    Examples:

    `fedhdp ledger promise population.ledger strict --epsilon 2 --delta 1e-4`

    `fedhdp ledger promise population.ledger strict --epsilon 1 --delta 1e-4 --dry-run` (how many rounds would be left)
    """
    from fedhdp.mechanism import check_group_name
    from fedhdp.privacy.ledger import Budget, Ledger

    check_group_name("GROUP", group)
    budget, standing = Budget(epsilon, delta), None
    out, is_new_file = console(), not file.exists()
    if is_new_file and dry_run:
        out.print(f"{file} would be a new ledger, and the budget of {group} {budget}. Nothing was changed.")
        return
    if not is_new_file:
        with Ledger(file, read_only=True) as ledger:
            previous, standing = _check_promise(ledger, group, budget, new)
        if dry_run:
            before = "" if previous is None else f" instead of {previous}"
            out.print(f"{group}: the budget would be {budget}{before}; {_consequence(standing)} Nothing was changed.")
            return
    if epsilon == 0 or (standing is not None and standing.is_exhausted):
        _confirm_end(group, budget, "" if epsilon == 0 else " like the costliest of its last run", yes)
    with Ledger(file) as ledger:
        ledger.promise(group, epsilon, delta)
        standing = _standing(ledger, group, budget)
    if is_new_file:
        out.print(f"{file}: a new ledger")
    out.print(f"{group}: the budget is {budget}; {_consequence(standing)}")


@app.command()
def backup(
    file: File, copy: Annotated[Path, typer.Argument(metavar="COPY", help="A file that does not exist.")]
) -> None:
    """Copy a ledger, also while runs charge it. A copy is checked before it has its name.

    Example: `fedhdp ledger backup population.ledger monday.ledger`
    """
    from fedhdp.privacy.backup import backup

    backup(file, copy)
    console().print(f"{copy}: a copy of {file}")


@app.command()
def restore(copy: Annotated[Path, typer.Argument(metavar="COPY", help="A backup of the ledger.")], file: File) -> None:
    """Put a backup in place of a ledger that is damaged or missing. What was charged since then is not in it.

    A ledger that is not damaged stays, and a damaged one is kept under another name.

    Example: `fedhdp ledger restore monday.ledger population.ledger`
    """
    from fedhdp.privacy.backup import restore
    from fedhdp.privacy.ledger import Ledger

    damaged = restore(copy, file)
    with Ledger(file, read_only=True) as ledger:
        charged = sum(run.charged for run in ledger.runs())
    out = console()
    if damaged is not None:
        out.print(f"{damaged}: the damaged ledger")
    out.print(f"{file}: the backup, with {charged:,} rounds charged. Rounds charged since then are not in it.")


def _check_promise(ledger: Ledger, group: str, budget: Budget, new: bool) -> tuple[Budget | None, GroupStanding | None]:
    """Refuse a promise to an unknown group, or a larger budget; else the budget so far, and the standing with this one."""
    names = ledger.groups()
    if names and group not in names and not new:
        message = f"{ledger.path} has no group {group!r}, only {', '.join(names)}; --new promises a budget to a new one"
        raise ConfigError(message, "GROUP", group)
    ledger.check_budget(group, budget)
    return (ledger.budget(group) if group in names else None), _standing(ledger, group, budget)


def _standing(ledger: Ledger, group: str, budget: Budget) -> GroupStanding | None:
    """The group as if it had this budget; None where the ledger does not know the group."""
    from fedhdp.privacy.reports import group_standing

    return group_standing(ledger, group, budget.delta, budget) if group in ledger.groups() else None


def _confirm_end(group: str, budget: Budget, rounds: str, yes: bool) -> None:
    """Ask whether to promise a budget that allows no further round of this kind."""
    if yes:
        return
    consequence = f"{budget} allows {group} no further round{rounds}, and a budget is never raised"
    if not _can_ask():
        raise ConfigError(f"{consequence}; to promise it, give --yes", "--epsilon", budget.epsilon)
    if not typer.confirm(f"{consequence}. Promise it?"):
        console().print("Nothing was changed.")
        raise typer.Exit(1)


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _consequence(standing: GroupStanding | None) -> str:
    """What a budget means for a group: its epsilon so far, and how many rounds are left."""
    from fedhdp.privacy.accounting import pluralize

    if standing is None or not standing.clients:
        return "the group has not been in a run yet, and the budget holds from its first round."
    epsilon = f"epsilon over all runs is {epsilon_text(standing.epsilon)}"
    rounds_left = standing.rounds_left
    if standing.is_exhausted:
        return f"{epsilon}. No further round like the costliest of its last run is left."
    if rounds_left is None:
        return f"{epsilon}."
    rounds = "any number of rounds" if rounds_left == math.inf else pluralize(int(rounds_left))
    return f"{epsilon}, with {rounds} left like the costliest of its last run."


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
        "Epsilons and budgets are by RDP. left: how many more rounds, like the costliest of its last run, the budget "
        "allows.\n"
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
