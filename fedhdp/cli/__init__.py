"""The command line: parse, call one function, print. Results go to standard output, everything else to standard error.

Each command, or family of commands, has a module, which imports the rest of fedhdp inside functions: the help starts fast.
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
from fedhdp.cli import account, audit, data, ledger, plan, report, reproduce, run, show, theory
from fedhdp.errors import FedHDPError

MAX_VALUE_LENGTH = 200  # of a value in an error's line
MAX_LINE_LENGTH = 2000

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
app.command()(show.show)
app.command()(show.plot)
app.command()(report.report)
app.command()(report.watch)
app.command()(reproduce.reproduce)
app.command()(account.account)
app.command()(plan.plan)
app.command()(audit.audit)
app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(theory.app, name="theory")


def main() -> None:
    """Run the command line; an error that a user can mend is one line, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ε still shows the table
    try:
        for argument in sys.argv[1:]:
            argument.encode()  # files and ledgers have names as UTF-8
        sys.exit(app(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError:  # the help has been printed
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        message = error.format_message()
    except UnicodeEncodeError as error:
        message = f"names and paths must be UTF-8, got {error.object[:MAX_VALUE_LENGTH]!r}"
    except (FedHDPError, OSError) as error:
        message = _cut_value(error)
    line = f"fedhdp: {message}".replace("\n", " ")
    print(line if len(line) <= MAX_LINE_LENGTH else f"{line[:MAX_LINE_LENGTH]}…", file=sys.stderr)
    sys.exit(2)


def _cut_value(error: Exception) -> str:
    """An error's message, in which a long value is cut."""
    value = repr(getattr(error, "value", None))
    short = value if len(value) <= MAX_VALUE_LENGTH else f"{value[:MAX_VALUE_LENGTH]}…"
    return str(error).replace(value, short)


def _print_version(value: bool) -> None:
    if value:
        print(f"fedhdp {fedhdp.__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    data_directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the datasets. Default: the variable FEDHDP_DATA, or fedhdp in the user's cache.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    if data_directory is not None:
        from fedhdp.datasets.cache import DIRECTORY_VARIABLE

        os.environ[DIRECTORY_VARIABLE] = str(data_directory)
