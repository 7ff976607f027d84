"""`fedhdp report` and `fedhdp watch`: runs as a page, in a file or while they are under way."""

from __future__ import annotations

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


def write_page(directory: Path, published: list[tuple[str, float]] | None = None, json: bool = False) -> None:
    """Write the page of a finished run into its directory, and print its path as the last line."""
    from fedhdp.report.run_page import write_run_page
    from fedhdp.results.store import REPORT_FILE

    path = write_run_page([directory], directory / REPORT_FILE, published=published or ())
    if json:  # standard output is one document
        error_console().print(f"page: {path}", style="dim", soft_wrap=True)
    else:
        print(path)
