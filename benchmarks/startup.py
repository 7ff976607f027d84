"""Seconds from `fedhdp run` to the end of the first round: the first time on a machine, and after that.

    python benchmarks/startup.py                         the quickstart
    python benchmarks/startup.py --experiment letters --runs 5

The first run has an empty folder for compiled programs and images, which the others use. Beside it, the imports alone.
Seconds of all cores are in brackets: other load on the machine moves them less.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TO_FIRST_ROUND = """
import os, runpy
from fedhdp.simulation import Simulation
run_round = Simulation.run_round
def first_round(self):
    run_round(self)
    self.wait()
    os._exit(0)
Simulation.run_round = first_round
runpy.run_module("fedhdp", run_name="__main__")
"""
IMPORTS = "import fedhdp.cli, fedhdp.cli._progress, fedhdp.experiments"


class Seconds(NamedTuple):
    """How long a program takes."""

    wall: float
    cores: float

    def __str__(self) -> str:
        return f"{self.wall:.1f} s ({self.cores:.1f})"


def seconds(code: str, folder: Path, *arguments: str) -> Seconds:
    """Seconds of a Python program, with its interpreter's start."""
    environment = os.environ | {"FEDHDP_COMPILATION_CACHE": str(folder / "compiled"), "PYTHONPATH": str(ROOT)}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], env=environment, check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Seconds(time.perf_counter() - start, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description="From `fedhdp run` to the end of the first round.")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--runs", type=int, default=5, help="runs after the first")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(number: int) -> Seconds:
            return seconds(TO_FIRST_ROUND, folder, "run", arguments.experiment, "--out", str(folder / f"run-{number}"))

        print(f"first time: {run(0)}", flush=True)
        print(
            f"after that: {statistics.median_low(run(number) for number in range(1, arguments.runs + 1))}", flush=True
        )
        print(f"imports: {statistics.median_low(seconds(IMPORTS, folder) for _ in range(arguments.runs))}")


if __name__ == "__main__":
    main()
