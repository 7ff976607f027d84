"""A table's parts run into its folder, on from where they were; and what they were run on.

OUT/seed-0/paper/              an ordinary run folder (see `results`)
OUT/seed-0/paper/machine.json  what it was run on, and the command
OUT/seed-0/paper.2/            rows or pulls that were asked for later
OUT/seed-0/momentum/           another part of the same seed
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

import fedhdp
from fedhdp.experiments import runner as runs
from fedhdp.experiments.config import Experiment, from_toml
from fedhdp.reproduction.tables import Part
from fedhdp.results import store as results

MACHINE = "machine.json"
MORE = "."  # between the name of a part and the number of what was added to it


class Machine(msgspec.Struct, frozen=True):
    """What a part was run on."""

    device: str
    devices: int
    cores: int
    system: str
    python: str
    jax: str
    fedhdp: str
    command: str


def this_machine(command: str) -> Machine:
    """What is run on here."""
    import jax

    devices = jax.devices()
    system = f"{platform.system()} {platform.machine()}"
    versions = (platform.python_version(), jax.__version__, fedhdp.__version__)
    return Machine(devices[0].device_kind, len(devices), os.cpu_count() or 1, system, *versions, command)


def done(out: Path, part: Part) -> bool:
    """Whether a part has been run to its end."""
    return (out / part.folder / results.SUMMARY_FILE).exists()


def begun(out: Path, part: Part) -> bool:
    """Whether a part has been begun."""
    return (out / part.folder / results.EXPERIMENT_FILE).exists()


def refuse_what_is_not_ours(out: Path) -> None:
    """A table is drawn up in a folder of its own: what else is in one is not written over."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    if out.is_dir() and any(out.iterdir()) and not any(out.glob("seed-*")):
        what = "holds a run" if (out / results.EXPERIMENT_FILE).exists() else "is not empty, and holds no table"
        raise ValueError(f"--out {out} {what}: name another folder")


def mixed(one: Experiment, other: Experiment) -> list[str]:
    """The fields in which two parts differ that cannot stand in one table: all but what makes a seed, row or part."""
    if one.name == other.name:
        return _differences(one, other, {"seed", "noise_seed", "variants"})
    same_share = replace(one, data=replace(one.data, validation=other.data.validation))
    return _differences(same_share, other, {"name", "seed", "noise_seed", "variants", "mechanism", "server"})


def fitted(out: Path, parts: Iterable[Part]) -> list[Part]:
    """The parts as a folder has them: what was begun there goes on, and what it lacks of a part is one more."""
    asked = list(parts)
    for path in sorted(out.glob(f"seed-*/*/{results.EXPERIMENT_FILE}")):
        there = from_toml(path.read_text(encoding="utf-8"), str(path))
        for part in asked:
            table = part.experiment.name.partition("/")[0]
            if there.name.partition("/")[0] != table:
                raise ValueError(f"{path.parent} holds {there.name!r}, not a part of {table}; give another --out")
            _refuse_other(path.parent, mixed(there, part.experiment))
    return [one for part in asked for one in _fitted(out, part)]


def _fitted(out: Path, part: Part) -> list[Part]:
    found, lacking = [], {variant.name: variant for variant in part.experiment.variants}
    here, number = part, 1
    while begun(out, here):
        path = out / here.folder / results.EXPERIMENT_FILE
        there = from_toml(path.read_text(encoding="utf-8"), str(path))
        same_name = [lacking.pop(variant.name, variant) for variant in there.variants]
        _refuse_other(path.parent, _differences(there, replace(part.experiment, variants=tuple(same_name))))
        found.append(here._replace(experiment=there))
        number += 1
        here = part._replace(name=f"{part.name}{MORE}{number}")
    if lacking:
        found.append(here._replace(experiment=replace(part.experiment, variants=tuple(lacking.values()))))
    return found


def _refuse_other(folder: Path, differing: list[str]) -> None:
    """A folder whose experiment differs in these fields is of another one."""
    if differing:
        raise ValueError(
            f"{folder} was made by another experiment: {', '.join(differing)} differ; give another --out, "
            "ask for what it has, or draw what is there with --render"
        )


def _differences(one: Experiment, other: Experiment, but: Iterable[str] = ()) -> list[str]:
    """The fields in which two experiments differ, but these and those that change nothing in what is measured."""
    idle = {"about", "checkpoint_seconds", *but}
    fields = (name for name in Experiment.__struct_fields__ if name not in idle)
    return [name for name in fields if getattr(one, name) != getattr(other, name)]


def run_part(part: Part, out: Path, watch: runs.Watch, command: str) -> None:
    """Run a part, or go on with it; one that is done is left as it is."""
    if done(out, part):
        return
    folder = out / part.folder
    if begun(out, part):
        runs.resume(folder, watch)
    else:
        runs.run(part.experiment, folder, watch)
    results.write_value(folder / MACHINE, this_machine(command))
