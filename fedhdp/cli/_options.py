"""Options that several commands have."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedhdp.errors import ConfigError, FedHDPError

if TYPE_CHECKING:
    from fedhdp.experiments.config import Experiment

MAX_SEEDS = 10_000
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Also write a page to this file, and print its path last."),
]


def find_experiments(name: str, changes: dict[str, Any]) -> dict[str, Experiment]:
    """The experiments of a built-in one, of a file or of a run's directory, with other values of some fields."""
    from fedhdp.experiments import EXPERIMENTS, expand, find, with_options
    from fedhdp.results.store import EXPERIMENT_FILE

    name = str(Path(name) / EXPERIMENT_FILE) if Path(name).is_dir() else name
    return expand(with_options(find(name, EXPERIMENTS), changes))


def parse_seeds(text: str, hint: str = "") -> range:
    """Seeds from 3 (the first three) or 2-4 (these)."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if match is None:
        message = f"--seeds must be a number of seeds, or a range such as 2-4, got {text!r}"
        raise ConfigError(message, "--seeds", text)
    first, last = match.groups()
    longest = max(len(first), len(last or ""))
    if longest > 10 or int(last or 0) >= 2**31 or int(last or first) - (int(first) if last else 0) > MAX_SEEDS:
        message = f"--seeds must be at most {MAX_SEEDS:,} seeds below 2**31, got {text!r}{hint}"
        raise ConfigError(message, "--seeds", text)
    seeds = range(int(first)) if last is None else range(int(first), int(last) + 1)
    if not seeds:
        raise ConfigError(f"--seeds must be at least one seed, got {text!r}{hint}", "--seeds", text)
    return seeds


def require_matplotlib() -> None:
    """Refuse a command that draws figures where matplotlib is missing, before it runs anything."""
    if importlib.util.find_spec("matplotlib") is None:
        raise FedHDPError("figures need matplotlib: pip install 'fedhdp[figures]'", "matplotlib")
