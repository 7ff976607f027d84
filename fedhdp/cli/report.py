"""`fedhdp report` and `fedhdp watch`: runs as a page, in a file or while they are under way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedhdp.cli._output import error_console
from fedhdp.cli.show import Directories

PUBLIC_FILE = "report-public.html"


def report(
    directories: Directories,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page. Default: report.html in the directory, or here for several."),
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="Leave out what may not be published. The default file is report-public.html."),
    ] = False,
) -> None:
    """Write the results of runs as a page: one file that opens in a browser, and loads nothing from anywhere.

    Runs may be under way. The last line printed is the page's path.

    Examples:

    `fedhdp report runs/mine`

    `fedhdp report runs/mine runs/other --out both.html`

    `fedhdp report runs/mine --public` (a page that may be published)
    """
    from fedhdp.report.run_page import write_run_page
    from fedhdp.results.store import REPORT_FILE

    file = PUBLIC_FILE if public else REPORT_FILE
    path = out or (directories[0] / file if len(directories) == 1 else Path(file))
    print(write_run_page(directories, path, public))


def watch(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of a run, of several, or a deployment.")
    ],
    port: Annotated[int, typer.Option(help="The port. 0: any that is free.", min=0, max=65535)] = 8765,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Others than the loopback let other machines read the page.")
    ] = "127.0.0.1",
) -> None:
    """Show a run that is under way in the browser: the page refreshes itself while measurements come in.

    Nothing but the page is served, to this machine alone unless --host says otherwise. Ctrl-C ends it.

    Examples:

    `fedhdp watch runs/mine`

    `fedhdp watch deployment --port 9000`
    """
    from fedhdp.report.watch import make_server

    with make_server(directory, host, port) as server:
        print(server.url, flush=True)
        error_console().print("refreshes while the run goes on; Ctrl-C ends it", style="dim")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def write_file(path: Path, page: str, json: bool = False) -> None:
    """Write a page to a file, and print its path as the last line: on standard error beside a JSON document."""
    from fedhdp.results.store import atomic_write

    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, page.encode())
    _print_path(path, json)


def _print_path(path: Path, json: bool) -> None:
    if json:  # standard output is one document
        error_console().print(f"page: {path}", style="dim", soft_wrap=True)
    else:
        print(path)


def write_page(
    directory: Path,
    runs: Sequence[Path] = (),
    published: Sequence[tuple[str, float]] = (),
    json: bool = False,
    commands: Sequence[str] = (),
) -> None:
    """Write the page of finished runs into a directory, and print its path as the last line.

    Args:
        directory: The directory.
        runs: The runs' directories, if they are others.
        published: Names and values of published numbers.
        json: Whether standard output has a JSON document, so that the path goes to standard error.
        commands: The commands that made the runs, if these are no experiments of their own.
    """
    from fedhdp.report.run_page import write_run_page
    from fedhdp.results.store import REPORT_FILE

    path = write_run_page(runs or [directory], directory / REPORT_FILE, published=published, commands=commands)
    _print_path(path, json)
