"""Experiments as TOML: read from files and written to them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from msgspec.structs import replace

from fedhdp.errors import ConfigError
from fedhdp.experiments.components import COMPONENT_NAMES
from fedhdp.experiments.config import FIELDS, Experiment
from fedhdp.experiments.errors import config_error, refuse_nul
from fedhdp.results.store import EXPERIMENT_FILE, DamagedRunError


def from_toml(text: str, source: str) -> Experiment:
    """Read an experiment; messages name the source, which by default names the experiment too.

    Raises:
        ConfigError: If it is not TOML, or a field is unknown, missing, of the wrong type or out of range.
    """
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(f"{source}: not TOML: {error}") from error
    refuse_nul(raw, source)
    raw.setdefault("name", Path(source).stem)
    for table, names in COMPONENT_NAMES.items():
        if isinstance(raw.get(table), dict):
            raw[table] = {"name": names[0]} | raw[table]
            name = raw[table]["name"]
            if name not in names:
                rule = f"{table}.name must be one of {', '.join(names)}, got {name!r}"
                raise ConfigError(f"{source}: {rule}", f"{table}.name", name)
    try:
        return msgspec.convert(raw, Experiment)
    except msgspec.ValidationError as error:
        raise config_error(error, raw, Experiment, FIELDS, source) from error


def read_experiment(out: Path) -> Experiment:
    """Read the experiment of a run's directory.

    Raises:
        DamagedRunError: If it is missing, damaged or that of a deployment.
    """
    path = out / EXPERIMENT_FILE
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError) as error:
        hint = "a deployment resumes when its ServerApp is submitted again with this directory"
        message = f"{path} is no experiment that can be simulated, or damaged; {hint} ({error})"
        raise DamagedRunError(message) from error


def to_toml(experiment: Experiment) -> str:
    """Write an experiment, so that reading it gives the same value."""
    return tomli_w.dumps(without_none(msgspec.to_builtins(experiment)))


def without_none(value: Any) -> Any:
    """Builtin values without the fields that are None, which TOML cannot express."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def find(name: str, presets: Mapping[str, Callable[[], Experiment]]) -> Experiment:
    """Find an experiment by the name of a built-in one or of a TOML file, to which its paths are relative.

    Raises:
        ConfigError: If there is no such experiment, or the file cannot be read.
    """
    if name in presets:
        return presets[name]()
    path = Path(name)
    if (path / EXPERIMENT_FILE).is_file():
        hint = f"to resume it: fedhdp run --resume {name}; to run it again: fedhdp run {path / EXPERIMENT_FILE}"
        raise ConfigError(f"{name} is the directory of a run; {hint}", "experiment", name)
    if path.suffix != ".toml":
        message = f"there is no experiment {name!r}; there are {', '.join(presets)}, or name a TOML file"
        raise ConfigError(message, "experiment", name)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}", "experiment", name) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}", "experiment", name) from error
    experiment, directory = from_toml(text, name), path.absolute().parent
    if not experiment.sweep:
        return experiment.resolve(directory)
    from fedhdp.experiments.sweep import resolve_sweep

    try:
        return replace(experiment.resolve(directory), sweep=resolve_sweep(experiment, directory))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", error.field, error.value) from error
