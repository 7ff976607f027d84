"""`fedhdp theory`: the closed forms for given numbers, the paper's figures, and the tables of docs/theory.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhdp.cli._options import Json, require_matplotlib
from fedhdp.cli._output import console, new_table, number_text, print_json, print_table
from fedhdp.errors import ConfigError, InvalidValueError

if TYPE_CHECKING:
    from fedhdp.theory.linear_regression import Problem, TheoryGroup
    from fedhdp.theory.optimum import Optimum

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,
    help="The cost of heterogeneous privacy in closed form; see docs/theory.md.",
)
BASELINES = {
    "fedhdp_shared_noise": "shared noise",
    "hdp_fedavg": "HDP-FedAvg",
    "dp_fedavg": "DP-FedAvg",
    "non_private": "non-private",
    "local_only": "local only",
}


@app.command()
def optimum(
    group: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:CLIENTS:GAMMA2",
            help="A privacy level, its number of clients, and the variance of the noise on the mean of their updates: "
            "0 opts out, inf sends noise only. Repeat it, least private first.",
        ),
    ],
    alpha2: Annotated[float, typer.Option(help="The variance of a client's local estimate.")],
    tau2: Annotated[float, typer.Option(help="The variance between clients of what they estimate (heterogeneity).")],
    json: Json = False,
) -> None:
    """Find the best weight and pull of each privacy level, and the errors of FedHDP and the baselines.

    The setting is federated linear regression or point estimation; variances and errors are per coordinate.

    In JSON, an infinite number is the string "inf". Weights are relative to the first group. `pull` is for clients who
    subtract their own noise from the global model, `pull_own_noise` for those who cannot. `client_mse` and
    `client_mse_own_noise` are the errors at these pulls with the noise, `bayes_mse` is the error at `pull` without it. An
    infinite pull takes the global model itself. The server's variance for `local_only` is null.

    Examples:

    `fedhdp theory optimum --group open:200:0 --group private:800:0.01 --alpha2 1 --tau2 0.25`

    `fedhdp theory optimum --group a:50:0 --group b:150:0.1 --group c:20:inf --alpha2 1 --tau2 0.1 --json`
    """
    from fedhdp.theory.linear_regression import Problem
    from fedhdp.theory.optimum import find_optimum

    problem = Problem(tuple(_parse_group(text) for text in group), alpha2, tau2)
    result = find_optimum(problem)
    print_json(result) if json else _print(problem, result)


@app.command()
def figures(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figures.")],
    trials: Annotated[int, typer.Option(help="Number of trials of each simulated point.")] = 4000,
) -> None:
    """Draw the figures of the paper's theory: closed forms as lines, simulated points with error bars.

    Each figure is written as SVG, PNG and CSV; the names of the files are printed.

    Example: `fedhdp theory figures --out figures`
    """
    require_matplotlib()
    from fedhdp.reproduction.theory.figures import theory_figures

    for path in theory_figures(out, trials):
        print(path)


@app.command()
def tables() -> None:
    """Print the tables of docs/theory.md as Markdown: the two pulls, opting out, shared noise, unequal clients.

    Example: `fedhdp theory tables`
    """
    from fedhdp.reproduction.theory import tables

    print("\n\n".join(f"{table.title}\n\n{table.markdown}" for table in tables.tables()))


def _parse_group(text: str) -> TheoryGroup:
    """A group from NAME:CLIENTS:GAMMA2."""
    from fedhdp.theory.linear_regression import TheoryGroup

    try:
        name, clients, gamma2 = text.rsplit(":", 2)
        return TheoryGroup(name, int(clients), float(gamma2))
    except InvalidValueError as error:
        raise ConfigError(f"--group {text!r}: {error}", "--group", text) from None
    except ValueError:
        message = f"--group must be NAME:CLIENTS:GAMMA2, such as private:800:0.01, got {text!r}"
        raise ConfigError(message, "--group", text) from None


def _print(problem: Problem, result: Optimum) -> None:
    out = console()
    best = new_table(("group",), ("clients", "γ²", "weight r", "pull λ,\nwithout own noise", "pull λ,\nwith own noise"))
    for group, row in zip(problem.groups, result.groups, strict=True):
        numbers = (group.gamma2, row.weight, row.pull, row.pull_own_noise)
        best.add_row(group.name, f"{group.clients:,}", *map(number_text, numbers))
    print_table(out, best)
    out.print()

    errors = new_table(("error of",), ("FedHDP", *BASELINES.values()))
    baselines = [result.baselines[name] for name in BASELINES]
    variances = (result.server_variance, *(baseline.server_variance for baseline in baselines))
    errors.add_row("server", *map(number_text, variances))
    for number, row in enumerate(result.groups):
        client_mses = (row.client_mse_own_noise, *(baseline.groups[number].client_mse for baseline in baselines))
        errors.add_row(f"client, {row.name}", *map(number_text, client_mses))
    print_table(out, errors)
    out.print()
    out.print(
        "Use the pull with own noise where the server adds the noise, as `fedhdp run` does, and the pull without own noise "
        "where clients add noise and subtract their own from the global model. Client errors are at the pull with own "
        "noise. A strong pull λ needs a personal learning rate near 1/(1+λ); at 2/λ training diverges."
    )
