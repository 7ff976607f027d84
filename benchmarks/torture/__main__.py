"""Test fedhdp under faults of the machine: nothing may be lost, no charge missing, no traceback shown.

    make torture ARGS="--minutes 20"

Each trial has a seed of its own; ``--only NAME --seed N --trials 1`` repeats one. A trial that fails prints its seed,
and the program ends with 1. At the end it prints a table: for each kind of trial how many were tried, how many held, and
what was counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from trials import KILLS, QUICK, TRIALS, Result, attempt


class Tally:
    """The trials that were begun and those that ended, by their kinds.

    Args:
        names: The kinds of trials.
        minutes: After these only kinds that were not tried yet begin a trial.
        limit: The most trials of each kind.
    """

    def __init__(self, names: tuple[str, ...], minutes: float, limit: int | None):
        self.names, self.limit, self.ends_at = names, limit, time.monotonic() + 60 * minutes
        self.begun, self.tried, self.held = Counter[str](), Counter[str](), Counter[str]()
        self.spent = dict.fromkeys(names, 0.0)
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in names}

    def next_name(self) -> str | None:
        """The kind whose turn it is: each once, then by their shares of the time."""
        is_late = time.monotonic() > self.ends_at
        names = [name for name in self.names if self.limit is None or self.begun[name] < self.limit]
        names = [name for name in names if not (is_late and self.begun[name])]
        return min(names, key=lambda name: (self.begun[name] > 0, self.spent[name] / TRIALS[name].share), default=None)

    def begin(self, name: str) -> int:
        """Count a trial that begins; its number."""
        self.begun[name] += 1
        self.spent[name] += 1.0  # until it is known
        return self.begun[name] - 1

    def end(self, result: Result) -> None:
        """Count a trial that ended."""
        self.tried[result.name] += 1
        self.held[result.name] += not result.failure
        self.spent[result.name] += result.seconds - 1.0
        self.counts[result.name] += result.counts

    def table(self) -> list[str]:
        """What was tried, what held and what was counted, as Markdown."""
        lines = ["| trial | tried | held | counted |", "| --- | ---: | ---: | --- |"]
        for name in self.names:
            counted = [
                f"{count:,} {what.replace('_', ' ')}" for what, count in self.counts[name].most_common() if count
            ]
            lines.append(f"| {name} | {self.tried[name]:,} | {self.held[name]:,} | {', '.join(counted)} |")
        return lines


def main() -> int:
    """Try until the time is up; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial of each kind")
    parser.add_argument("--trials", type=int, help="of each kind, at most")
    parser.add_argument("--only", choices=TRIALS, action="append")
    parser.add_argument("--quick", action="store_true", help="without trials that start processes")
    parser.add_argument("--kills", type=int, default=KILLS, help="of a run, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at a time")
    arguments = parser.parse_args()
    names = tuple(arguments.only or (QUICK if arguments.quick else TRIALS))
    begun, tally = time.monotonic(), Tally(names, arguments.minutes, arguments.trials)
    with (
        tempfile.TemporaryDirectory(prefix="fedhdp-torture-") as folder,
        ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool,
    ):
        os.environ |= {"TORTURE_FOLDER": folder, "TORTURE_KILLS": str(arguments.kills)}
        running: set[Future[Result]] = set()
        while True:
            while len(running) < arguments.jobs and (name := tally.next_name()):
                running.add(pool.submit(attempt, name, arguments.seed + tally.begin(name)))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for result in (future.result() for future in done):
                tally.end(result)
                if result.failure:
                    print(f"FAILED {result.name!r} with --seed {result.seed}: {result.failure}", flush=True)
    print("\n".join(tally.table()))
    print(
        f"{tally.held.total():,} of {tally.tried.total():,} trials held, in {(time.monotonic() - begun) / 60:.1f} minutes"
    )
    return int(tally.held != tally.tried)


if __name__ == "__main__":
    sys.exit(main())
