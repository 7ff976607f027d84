"""A table's parts run into its folder, on from where they were; and what they were run on.

OUT/seed-0/paper/              an ordinary run folder (see `results`)
OUT/seed-0/paper/machine.json  what it was run on, and the command
OUT/seed-0/momentum/           another part of the same seed
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import msgspec

import fedhdp
from fedhdp import results
from fedhdp.experiments import run as runs
from fedhdp.experiments.paper import Part
from fedhdp.experiments.spec import Experiment, from_toml

MACHINE = "machine.json"


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
    return (out / part.folder / results.SUMMARY).exists()


def begun(out: Path, part: Part) -> bool:
    """Whether a part has been begun."""
    return (out / part.folder / results.EXPERIMENT).exists()


def check(out: Path, parts: Iterable[Part]) -> None:
    """Refuse a folder in which something else was begun than is asked for now."""
    for part in parts:
        path = out / part.folder / results.EXPERIMENT
        if not path.exists():
            continue
        differing = _differences(from_toml(path.read_text(), str(path)), part.experiment)
        if differing:
            raise ValueError(
                f"{path.parent} was made by another experiment: {', '.join(differing)} differ; give another --out, "
                "ask for what it has, or draw what is there with --render"
            )


def _differences(one: Experiment, other: Experiment) -> list[str]:
    """The fields in which two experiments differ, but those that change nothing in what is measured."""
    idle = {"about", "checkpoint_seconds"}
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
