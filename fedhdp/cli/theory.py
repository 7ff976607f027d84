"""`fedhdp theory`: the closed forms for a user's own numbers, the paper's figures, and the tables of docs/theory.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhdp.cli._output import console, print_json, print_table, table

if TYPE_CHECKING:
    from fedhdp.theory.linear_regression import Level, Problem
    from fedhdp.theory.optimum import Optimum

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,
    help="What heterogeneous privacy costs, in closed form; see docs/theory.md.",
)
BESIDE = {
    "fedhdp_shared_noise": "shared noise",
    "hdp_fedavg": "HDP-FedAvg",
    "dp_fedavg": "DP-FedAvg",
    "non_private": "no privacy",
    "local_only": "alone",
}


@app.command()
def optimum(
    group: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:CLIENTS:GAMMA2",
            help="A privacy level, how many clients chose it, and the variance of the noise on the mean of their "
            "updates: 0 opts out, inf tells the server nothing. Repeat it, least private first.",
        ),
    ],
    alpha2: Annotated[float, typer.Option(help="The variance of a client's own estimate: how little data it has.")],
    tau2: Annotated[float, typer.Option(help="The variance of the truth between clients: how much they differ.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document; what is infinite is null.")] = False,
) -> None:
    """Find the best weight and pull for each privacy level, and what everyone's error is, with the baselines beside.

    The setting is federated linear regression or point estimation; variances and errors are those of one coordinate.

    In JSON, weights are relative to the first group. `pull` is for clients who take their own noise out of the global
    model they receive, `pull_own_noise` for those who cannot; `client_mse` and `client_mse_own_noise` are the errors at
    either with the noise inside, `bayes_mse` at the first with the noise out. What is infinite is null: a pull (take the
    global model itself), an error; so is the server's variance for `local_only`, which has no server.

    Examples:

    `fedhdp theory optimum --group open:200:0 --group private:800:0.01 --alpha2 1 --tau2 0.25`

    `fedhdp theory optimum --group a:50:0 --group b:150:0.1 --group c:20:inf --alpha2 1 --tau2 0.1 --json`
    """
    from fedhdp.theory.linear_regression import Problem
    from fedhdp.theory.optimum import optimum as found

    problem = Problem(tuple(_level(text) for text in group), alpha2, tau2)
    answer = found(problem)
    print_json(answer) if json else _print(problem, answer)


@app.command()
def figures(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figures.")],
    trials: Annotated[int, typer.Option(help="How many trials each simulated point is the mean of.")] = 4000,
) -> None:
    """Draw every figure of the paper's theory: closed forms as lines, simulated points with error bars on them.

    Each figure is written as SVG, as PNG, and as CSV with its numbers; the names of the files are printed.

    Example: `fedhdp theory figures --out figures`
    """
    from fedhdp.reproduction.theory.figures import theory_figures

    for path in theory_figures(out, trials):
        print(path)


@app.command()
def tables() -> None:
    """Print the tables of docs/theory.md as Markdown: the two pulls, opting out, shared noise, unequal clients.

    Example: `fedhdp theory tables`
    """
    from fedhdp.reproduction.theory.tables import tables as computed

    print("\n\n".join(f"{each.title}\n\n{each.markdown}" for each in computed()))


def _level(text: str) -> Level:
    """A level from NAME:CLIENTS:GAMMA2."""
    from fedhdp.theory.linear_regression import Level

    try:
        name, clients, gamma2 = text.rsplit(":", 2)
        return Level(name, int(clients), float(gamma2))
    except ValueError as error:
        if "must be" in str(error):
            raise ValueError(f"--group {text!r}: {error}") from None
        raise ValueError(f"--group must be NAME:CLIENTS:GAMMA2, such as private:800:0.01, got {text!r}") from None


def _print(problem: Problem, answer: Optimum) -> None:
    out = console()
    best = table(("group",), ("clients", "γ²", "weight r", "pull λ, noise out", "pull λ, noise inside"))
    for level, group in zip(problem.levels, answer.groups):
        numbers = (level.gamma2, group.weight, group.pull, group.pull_own_noise)
        best.add_row(level.name, f"{level.clients:,}", *map(_short, numbers))
    print_table(out, best)
    out.print()

    errors = table(("error of",), ("FedHDP", *BESIDE.values()))
    others = [answer.baselines[name] for name in BESIDE]
    errors.add_row("the server", _short(answer.server_variance), *(_short(other.server_variance) for other in others))
    for number, group in enumerate(answer.groups):
        beside = (_short(other.groups[number].client_mse) for other in others)
        errors.add_row(f"{group.name}, a client", _short(group.client_mse_own_noise), *beside)
    print_table(out, errors)
    out.print()
    out.print(
        "What to do: set these as the groups' weight and pull, the last column's pull where the server adds the noise (as "
        "`fedhdp run` does), the other where clients add their own and take it out again; clients' errors above are at the "
        "last column's. A strong pull λ wants a personal learning rate near 1/(1+λ), and does not train at 2/λ or more."
    )


def _short(number: float | None) -> str:
    return "–" if number is None else "∞" if number == math.inf else f"{number:.4g}"
