"""All kinds of trials, and one trial from its seed."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import files
import runs
from runs import KILLS as KILLS


class Trial(NamedTuple):
    """A kind of trial, and its share of the time."""

    run: Callable[[Path, random.Random], Counter[str]]
    share: float


TRIALS = {
    "killed run": Trial(runs.killed_run, 0.38),
    "mutated experiment": Trial(files.mutated_experiment, 0.22),
    "damaged run": Trial(runs.damaged_run, 0.12),
    "full disk": Trial(runs.full_disk, 0.07),
    "contended ledger": Trial(runs.contended_ledger, 0.06),
    "read-only folder": Trial(runs.read_only_folder, 0.05),
    "damaged ledger": Trial(files.damaged_ledger, 0.05),
    "mutated archive": Trial(files.mutated_archive, 0.03),
    "mutated reply": Trial(files.mutated_reply, 0.02),
}
QUICK = ("mutated experiment", "damaged ledger", "mutated archive", "mutated reply")


class Result(NamedTuple):
    """The result of a trial."""

    name: str
    seed: int
    counts: Counter[str]
    failure: str
    seconds: float


def attempt(name: str, seed: int) -> Result:
    """Run one trial, in a folder that is removed afterwards."""
    begun, counts, failure = time.monotonic(), Counter[str](), ""
    folder = Path(tempfile.mkdtemp(prefix="fedhdp-torture-", dir=os.environ.get("TORTURE_FOLDER")))
    os.environ.pop("TORTURE_FILE", None)
    try:
        counts = TRIALS[name].run(folder, random.Random(f"{name} {seed}"))
    except Exception as error:
        failure = f"{type(error).__name__}: {error} {os.environ.get('TORTURE_FILE', '')}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(name, seed, counts, failure, time.monotonic() - begun)
