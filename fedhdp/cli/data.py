"""`fedhdp data`: list, import and download datasets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhdp.cli._options import Json
from fedhdp.cli._output import console, print_json

if TYPE_CHECKING:
    from fedhdp.datasets.cache import DatasetStatus

app = typer.Typer(suggest_commands=False, help="List datasets and where they come from; import or download them.")


@app.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_data()


@app.command(name="list")
def list_data(json: Json = False) -> None:
    """List the datasets: which are in the data directory, which are missing, and where each comes from.

    `fedhdp --data-directory DIR` or the environment variable `FEDHDP_DATA` names the directory; the default is `fedhdp`
    in the user's cache.

    Examples: `fedhdp data list --json`, `fedhdp --data-directory /big/disk data import ~/Downloads/mnist`
    """
    from fedhdp.datasets.cache import data_directory, dataset_status
    from fedhdp.datasets.catalog import DATASETS

    datasets = [dataset_status(name) for name in DATASETS]
    if json:
        print_json({"directory": str(data_directory()), "datasets": datasets})
        return
    console().print(f"data directory: {data_directory()}", soft_wrap=True)
    for dataset in datasets:
        _print_dataset(dataset)


@app.command(name="import")
def import_data(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files, or folders to search.")],
) -> None:
    """Import datasets from files, which are identified by their content.

    Example: `fedhdp data import ~/Downloads/mnist`
    """
    from fedhdp.cli._progress import CountDisplay
    from fedhdp.datasets.importers.files import import_files

    with CountDisplay() as progress:
        report = import_files(paths, progress.update)
    for reason in report.skipped:
        progress.console.print(f"skipped: {reason}", style="yellow", soft_wrap=True)
    _print_imported(report.datasets)


@app.command()
def download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset; see `fedhdp data list`.")],
    sha256: Annotated[
        str | None, typer.Option(help="Checksum that the file must have. Default: the one that fedhdp knows.")
    ] = None,
) -> None:
    """Download a dataset, verify it and import it. An interrupted download resumes.

    Example: `fedhdp data download mnist`
    """
    from fedhdp.cli._progress import CountDisplay
    from fedhdp.datasets.catalog import dataset_info
    from fedhdp.datasets.importers.download import download

    with CountDisplay() as progress:
        download(dataset_info(name), progress.update, sha256 and sha256.lower())
    _print_imported([name])


def _print_dataset(dataset: DatasetStatus) -> None:
    from fedhdp.datasets.catalog import how_to_get

    size = f"{dataset.bytes / 1e6:,.0f} MB" if dataset.bytes >= 5e5 else f"{dataset.bytes / 1e3:,.0f} kB"
    state = "damaged" if dataset.damaged else f"present, {size}" if dataset.present else "missing"
    lines = [dataset.description, f"from: {dataset.origin}"]
    if dataset.present:
        lines.append(f"contents: {dataset.summary}")
    elif dataset.damaged:
        lines.append(dataset.damaged)
    else:
        lines.append(f"files: {', '.join(file.name for file in dataset.files)}")
        lines.append(f"to get it: {how_to_get(dataset.name)}")
    out = console()
    out.print(f"\n{dataset.name}: {state}", style="bold" if dataset.present else "")
    for line in lines:
        out.print(f"  {line}", soft_wrap=True)


def _print_imported(names: list[str]) -> None:
    from fedhdp.datasets.cache import data_directory, dataset_status

    console().print(f"imported {', '.join(names)} into {data_directory()}", soft_wrap=True)
    for name in names:
        console().print(f"{name}: {dataset_status(name).summary}", soft_wrap=True)
