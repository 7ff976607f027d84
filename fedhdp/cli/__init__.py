"""The command line: parse, call one function, print. Results go to standard output, everything else to standard error.

One module for each command or family of commands; each is imported when it is asked for, or is quick to import.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import click
import typer

import fedhdp
from fedhdp.cli import account, data, ledger, plan, reproduce, run, theory

app = typer.Typer(
    name="fedhdp",
    help="Federated learning in which every client chooses its own differential privacy.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,  # click does
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(run.run)
app.command(name="list")(run.list_experiments)
app.command()(reproduce.reproduce)
app.command()(account.account)
app.command()(plan.plan)
app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(theory.app, name="theory")


def main() -> None:
    """Run the command line; what a user did wrong is said in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ε still gets its table
    try:
        sys.exit(app(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError:  # the help has been printed
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        said = error.format_message()
    except (ValueError, OSError) as error:
        said = str(error)
    print(f"fedhdp: {said}".replace("\n", " "), file=sys.stderr)
    sys.exit(2)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedhdp {fedhdp.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    data_directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where real data is kept; default what FEDHDP_DATA says, or fedhdp in the user's cache.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    if data_directory is not None:
        from fedhdp.datasets.cache import DIRECTORY_VARIABLE

        os.environ[DIRECTORY_VARIABLE] = str(data_directory)
