"""How a run shows itself: a live line in a terminal, a plain line now and then elsewhere; always on standard error."""

from __future__ import annotations

import math
import os
import signal
import time
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fedhdp.experiments.runner import Progress
from fedhdp.privacy.accounting import format_epsilon, pluralize

PLAIN_SECONDS = 10.0
NOTE_SECONDS = 0.5  # in a terminal: how old a note may be, since epsilons take time to compute


class ProgressDisplay:
    """Shows progress, and turns the first Ctrl-C into a wish to stop after the round; ``again`` says how to go on."""

    def __init__(self, console: Console, again: str = ""):
        self.console, self.stop, self.again = console, False, again
        self.live = console.is_terminal
        self.bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=self._bar()),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self.tasks: dict[int, TaskID] = {}  # by the number of the first variant
        self.said = self.begun = time.monotonic()
        self.first_round = 0
        self.note, self.noted = "", -math.inf

    def __enter__(self) -> ProgressDisplay:
        self.before = signal.signal(signal.SIGINT, self._interrupted)
        if self.live:
            self.bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.bars.stop()
        signal.signal(signal.SIGINT, self.before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.stop:  # at once: an exception would be raised in the middle of what threads compute
            if self.live:
                self.bars.stop()
            go_on = f"; to go on: {self.again}" if self.again else ""
            os.write(2, f"stopped at once{go_on}\n".encode())  # the console may be in the middle of another line
            os._exit(130)
        self.stop = True
        self.console.print("stopping after this round; once more stops at once", style="yellow")

    def _bar(self) -> int:
        return 24 if self.console.width >= 110 else 8

    def _fitting(self, progress: Progress) -> str:
        """As much of the note as the line has room for: what comes before it matters more."""
        before = len(progress.variant) + self._bar() + 2 * len(str(progress.rounds)) + len(" 999.9 rounds/s 00:00 ") + 3
        room = self.console.width - before
        return self.note if len(self.note) <= room else f"{self.note[: room - 1]}…" if room > 10 else ""

    def watch(self, progress: Progress) -> bool:
        """Show where the run stands; False once it was asked to stop."""
        if progress.number not in self.tasks:
            task = self.bars.add_task(progress.variant, total=progress.rounds, rate="", note="")
            self.tasks[progress.number] = task
            self.first_round, self.noted = 0, -math.inf
        if not self.first_round:  # the first round compiles: it is not counted
            self.begun, self.first_round = time.monotonic(), progress.round
        rate = (progress.round - self.first_round) / max(time.monotonic() - self.begun, 1e-9)
        speed = (
            f"{rate:.1f} rounds/s" if progress.round > self.first_round else "preparing" if not progress.round else ""
        )
        now, ended = time.monotonic(), progress.round == progress.rounds
        if self.live:
            if ended or now - self.noted > NOTE_SECONDS:
                self.note, self.noted = _note(progress), now
            task = self.tasks[progress.number]
            self.bars.update(
                task, description=progress.variant, completed=progress.round, rate=speed, note=self._fitting(progress)
            )
        elif progress.round and (ended or now - self.said > PLAIN_SECONDS):
            self.said = now
            left = f"{(progress.rounds - progress.round) / rate:.0f} s left" if rate > 0 and not ended else ""
            place = (
                f"[{progress.number}/{progress.variants}] {progress.variant}: round {progress.round}/{progress.rounds}"
            )
            words = [place, speed, left, _note(progress)]
            self.console.print(", ".join(word for word in words if word), highlight=False, markup=False, soft_wrap=True)
        return not self.stop


def _note(progress: Progress) -> str:
    seen = sorted({f"{100 * accuracy:.1f}" for accuracy in progress.accuracies}, key=float)
    parts = [f"accuracy {'–'.join(dict.fromkeys((seen[0], seen[-1])))}%"] if seen else []
    for name, ends in progress.epsilon().items():
        told = dict.fromkeys(format_epsilon(epsilon, 2) for epsilon in ends)
        parts.append(f"ε {name} {'–'.join(told)}")
    parts += [f"{name} has {pluralize(int(left))} left" for name, left in progress.left().items() if left < math.inf]
    return ", ".join(parts)
