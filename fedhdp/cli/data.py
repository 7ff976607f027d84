"""`fedhdp data`: what data is there, and how to get it there."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fedhdp.cli._output import console, print_json

app = typer.Typer(
    suggest_commands=False, help="See which data is there and where it comes from; import files, or download them."
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
PLAIN_SECONDS = 5.0


@app.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_data()


@app.command(name="list")
def list_data(json: Json = False) -> None:
    """List what is in the data directory, what is missing, and where each comes from.

    The directory is what `fedhdp --data-directory DIR` or the environment variable `FEDHDP_DATA` says, or `fedhdp` in the
    user's cache.

    Examples: `fedhdp data list --json`, `fedhdp --data-directory /big/disk data import ~/Downloads/mnist`
    """
    from fedhdp.datasets.directory import SOURCES, data_directory

    answer = {"directory": str(data_directory()), "sources": [_standing(name) for name in SOURCES]}
    print_json(answer) if json else _print(answer)


@app.command(name="import")
def import_data(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files, or folders to search.")],
) -> None:
    """Keep data from files that you have; what they are is seen from what is in them.

    Example: `fedhdp data import ~/Downloads/mnist`
    """
    from fedhdp.datasets.importers.importing import import_files

    left: list[str] = []
    with Shown() as shown:
        names = import_files(paths, shown.progress, left=left)
    for line in left:
        shown.console.print(f"left alone: {line}", style="yellow", soft_wrap=True)
    _print_kept(names)


@app.command()
def download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A source; see `fedhdp data list`.")],
    sha256: Annotated[
        str | None, typer.Option(help="The checksum that the file must have, instead of the one known here.")
    ] = None,
) -> None:
    """Download data, check it and keep it. What was broken off goes on where it stopped.

    Example: `fedhdp data download mnist`
    """
    from fedhdp.datasets.directory import source
    from fedhdp.datasets.importers.download import download

    with Shown() as shown:
        download(source(name), shown.progress, sha256 and sha256.lower())
    _print_kept([name])


def _standing(name: str) -> dict[str, Any]:
    """What is known of a source, and what is there of it."""
    from fedhdp.datasets.directory import SOURCES, data_directory
    from fedhdp.datasets.stored import contents, holds

    source, damage, found = SOURCES[name], None, None
    try:
        found = contents(name)
    except ValueError as error:
        damage = str(error)
    kept = [file for file in (data_directory() / name).glob("*") if found] if found else []
    return {
        "name": name,
        "about": source.about,
        "origin": source.origin,
        "present": found is not None,
        "holds": holds(found) if found else None,
        "damaged": damage,
        "bytes": sum(file.stat().st_size for file in kept),
        "made_from": found.files if found else {},
        "files": [file._asdict() for file in source.files],
        "downloads": source.downloads,
    }


def _print(answer: dict[str, Any]) -> None:
    out = console()
    out.print(f"data directory: {answer['directory']}", soft_wrap=True)
    for one in answer["sources"]:
        size = f"{one['bytes'] / 1e6:,.0f} MB" if one["bytes"] >= 5e5 else f"{one['bytes'] / 1e3:,.0f} kB"
        state = "damaged" if one["damaged"] else f"present, {size}" if one["present"] else "missing"
        out.print(f"\n{one['name']}: {state}", style="bold" if one["present"] else "")
        out.print(f"  {one['about']}", soft_wrap=True)
        out.print(f"  from: {one['origin']}", soft_wrap=True)
        if one["holds"]:
            out.print(f"  here: {one['holds']}", soft_wrap=True)
        if one["damaged"]:
            out.print(f"  {one['damaged']}", soft_wrap=True)
        elif not one["present"]:
            files = ", ".join(file["name"] for file in one["files"])
            ways = [f"fedhdp data download {one['name']}"] if one["downloads"] else []
            out.print(f"  files: {files}", soft_wrap=True)
            out.print(f"  to get it: {' or '.join([*ways, 'fedhdp data import PATH...'])}", soft_wrap=True)


def _print_kept(names: list[str]) -> None:
    from fedhdp.datasets.directory import data_directory

    console().print(f"{', '.join(names)}: now in {data_directory()}", soft_wrap=True)
    for name in names:
        console().print(f"{name}: {_standing(name)['holds']}", soft_wrap=True)


class Shown:
    """Shows on standard error how far things are: bars in a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        percent = TextColumn("{task.percentage:>3.0f}%")
        self.bars = Bars(*columns, percent, TimeRemainingColumn(compact=True), console=self.console)
        self.tasks: dict[str, Any] = {}
        self.said = time.monotonic()

    def __enter__(self) -> Shown:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """So far it is; a total of 0 is unknown."""
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(what, total=total or None)
        self.bars.update(self.tasks[what], completed=done, total=total or None)
        if not self.console.is_terminal and (time.monotonic() - self.said > PLAIN_SECONDS):
            self.said = time.monotonic()
            far = f"{100 * done / total:.0f}%" if total else f"{done:,}"
            self.console.print(f"{what}: {far}", soft_wrap=True)
