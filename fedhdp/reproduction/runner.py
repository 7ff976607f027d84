"""Run a table's parts in its directory, resume them, and record the machine.

OUT/seed-0/paper/              a run directory (see `results`)
OUT/seed-0/paper/machine.json  the machine and the command
OUT/seed-0/paper.2/            rows or pulls that were added later
OUT/seed-0/momentum/           another part of the same seed
OUT/seed-0/two.pfa/            the rows of PFA of a part of levels: WeiAvg's experiment, run by `pfa.py` alone
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

import fedhdp
from fedhdp.errors import RunError
from fedhdp.experiments import runner
from fedhdp.experiments.components import DataConfig
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.toml import from_toml
from fedhdp.reproduction.extensions import is_trained_otherwise
from fedhdp.reproduction.levels import PFA_FOLDER
from fedhdp.reproduction.tables import Part
from fedhdp.results import store

MACHINE = "machine.json"
SUPPLEMENT = "."  # between a part's name and the number of its supplement


class Machine(msgspec.Struct, frozen=True):
    """The machine, the versions and the command of a run."""

    device: str
    devices: int
    cores: int
    system: str
    python: str
    jax: str
    fedhdp: str
    command: str


def current_machine(command: str) -> Machine:
    """This machine, with the command that is run on it."""
    import jax

    devices = jax.devices()
    system = f"{platform.system()} {platform.machine()}"
    versions = (platform.python_version(), jax.__version__, fedhdp.__version__)
    return Machine(devices[0].device_kind, len(devices), os.cpu_count() or 1, system, *versions, command)


def is_finished(out: Path, part: Part) -> bool:
    """Whether a part has been run to its last round."""
    return (out / part.folder / store.SUMMARY_FILE).exists()


def is_started(out: Path, part: Part) -> bool:
    """Whether a part has a run directory."""
    return (out / part.folder / store.EXPERIMENT_FILE).exists()


def check_output_directory(out: Path) -> None:
    """Refuse a directory with anything but a table in it.

    Raises:
        RunError: If it is a file, or has other content.
    """
    if out.exists() and not out.is_dir():
        raise RunError(f"--out must be a directory, got the file {out}", "--out", out)
    if out.is_dir() and any(out.iterdir()) and not any(out.glob("seed-*")):
        content = "has a run" if (out / store.EXPERIMENT_FILE).exists() else "has other files"
        raise RunError(f"--out must be a new directory or one of a table; {out} {content}", "--out", out)


def incompatible_fields(first: Experiment, second: Experiment) -> list[str]:
    """The fields in which two parts differ that must be equal in one table."""
    if first.name == second.name:
        return _differing_fields(first, second, {"seed", "noise_seed", "variants"})
    same_split = replace(first, data=_with_inputs_of(second, first.data))
    of_part = {"name", "seed", "noise_seed", "variants", "mechanism", "server"}
    if any(is_trained_otherwise(experiment.name.partition("/")[2]) for experiment in (first, second)):
        of_part |= {"model", "training"}
    return _differing_fields(same_split, second, of_part)


def _with_inputs_of(other: Experiment, data: DataConfig) -> DataConfig:
    """The data with another experiment's share to validate on and transform of inputs: the clients are the same."""
    changes = {field: getattr(other.data, field) for field in ("validation", "transform") if hasattr(other.data, field)}
    return replace(data, **{field: value for field, value in changes.items() if hasattr(data, field)})


def plan_parts(out: Path, parts: Iterable[Part]) -> list[Part]:
    """Fit parts to the runs that a directory has: those are resumed, and missing variants become supplements.

    Returns:
        The parts and supplements, in the order in which they are run.

    Raises:
        RunError: If the directory has runs that cannot be in one table with the parts.
    """
    parts = list(parts)
    for path in sorted(out.glob(f"seed-*/*/{store.EXPERIMENT_FILE}")):
        existing = from_toml(path.read_text(encoding="utf-8"), str(path))
        for part in parts:
            table = part.experiment.name.partition("/")[0]
            if existing.name.partition("/")[0] != table:
                message = f"{path.parent} has {existing.name!r}, not a part of {table}; give another --out"
                raise RunError(message, "--out", out)
            _check_same(path.parent, incompatible_fields(existing, part.experiment))
    return [planned for part in parts for planned in _with_supplements(out, part)]


def _with_supplements(out: Path, part: Part) -> list[Part]:
    planned, missing = [], {variant.name: variant for variant in part.experiment.variants}
    current, number = part, 1
    while is_started(out, current):
        path = out / current.folder / store.EXPERIMENT_FILE
        existing = from_toml(path.read_text(encoding="utf-8"), str(path))
        variants = tuple(missing.pop(variant.name, variant) for variant in existing.variants)
        _check_same(path.parent, _differing_fields(existing, replace(part.experiment, variants=variants)))
        planned.append(current._replace(experiment=existing))
        number += 1
        current = part._replace(name=f"{part.name}{SUPPLEMENT}{number}")
    if missing:
        planned.append(current._replace(experiment=replace(part.experiment, variants=tuple(missing.values()))))
    return planned


def _check_same(folder: Path, fields: list[str]) -> None:
    if fields:
        names = ", ".join(fields)
        message = f"{folder} is of another experiment: {names} differ; give another --out, or --render it as it is"
        raise RunError(message, fields[0], folder)


def _differing_fields(first: Experiment, second: Experiment, ignored: Iterable[str] = ()) -> list[str]:
    """The fields in which two experiments differ, without those that do not change the measurements."""
    without_effect = {"about", "checkpoint_seconds", *ignored}
    fields = (name for name in Experiment.__struct_fields__ if name not in without_effect)
    return [name for name in fields if getattr(first, name) != getattr(second, name)]


def run_part(part: Part, out: Path, watch: runner.Watch, command: str) -> None:
    """Run a part, or resume it; a finished part is left as it is.

    Args:
        part: The part.
        out: The directory of the table.
        watch: Called with the progress after each round; False stops the run.
        command: The command, recorded with the machine.

    Raises:
        Interrupted: If ``watch`` stopped the run.
    """
    if is_finished(out, part):
        return
    folder = out / part.folder
    if PFA_FOLDER in part.name:
        from fedhdp.reproduction import pfa

        pfa.run(part.experiment, folder, watch)
    elif is_started(out, part):
        runner.resume(folder, watch)
    else:
        runner.run(part.experiment, folder, watch)
    store.write_value(folder / MACHINE, current_machine(command))
