"""Progress on standard error: bars in a terminal, a plain line every ten seconds elsewhere.

``ProgressDisplay`` shows a run's rounds and stops the run after Ctrl-C. ``CountDisplay`` shows bytes or items:

    with CountDisplay() as display:
        display.update("downloading femnist.zip", completed=10_000, total=20_000)
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from fedhdp.cli._output import error_console, visible

if TYPE_CHECKING:
    from fedhdp.experiments.batch import Progress

LINE_SECONDS = 10.0  # between plain lines
NAMED = 6  # variants that run together, up to which each is named with its value
NOTE_SECONDS = 0.5  # between notes in a terminal, at least
NOTE_SHARE = 20  # notes, which state epsilons, take at most one part in this many of the time


class _NotedBars(Bars):
    """Bars, and below them a note of each task."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, and the notes in their order."""
        yield from super().get_renderables()
        for task in self.tasks:
            if task.fields.get("note"):
                yield Text(visible(task.fields["note"]), style="dim")


class _Display:
    """A bar for each task in a terminal; elsewhere lines, of which one is due every ten seconds."""

    def __init__(self, console: Console, *columns: ProgressColumn):
        self.console = console
        self._bars = _NotedBars(TextColumn("{task.description}", markup=False), *columns, console=console)
        self._tasks: dict[object, TaskID] = {}
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._bars.stop()

    def _update_bar(self, key: object, description: str, completed: int, total: int | None, **fields: Any) -> None:
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(description, total=total, **fields)
        self._bars.update(self._tasks[key], description=description, completed=completed, total=total, **fields)

    def _line_due(self) -> bool:
        return time.monotonic() - self._last_line > LINE_SECONDS

    def _print_line(self, line: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(line, soft_wrap=True)


class CountDisplay(_Display):
    """The progress of downloads and conversions."""

    def __init__(self) -> None:
        percent = TextColumn("{task.percentage:>3.0f}%")
        super().__init__(error_console(), BarColumn(bar_width=24), percent, TimeRemainingColumn(compact=True))

    def update(self, description: str, completed: int, total: int) -> None:
        """Show how many bytes or items of a task are completed; a total of 0 is unknown."""
        if self.console.is_terminal:
            self._update_bar(description, description, completed, total or None)
        elif self._line_due():
            self._print_line(f"{description}: {f'{100 * completed / total:.0f}%' if total else f'{completed:,}'}")


class ProgressDisplay(_Display):
    """The progress of a run. The first Ctrl-C makes it stop after the round, the second ends the process.

    Args:
        console: Standard error.
        resume_command: The command that continues the run, for the message after Ctrl-C.
    """

    def __init__(self, console: Console, resume_command: str = ""):
        super().__init__(
            console,
            BarColumn(bar_width=24 if console.width >= 80 else 8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
        )
        self.resume_command = resume_command
        self.stop = False
        self._numbers: tuple[int, ...] = ()  # of the variants that are running
        self._first_round, self._start = 0, time.monotonic()  # the first round compiles, so the rate is from there
        self._note, self._next_note = "", -math.inf

    def __enter__(self) -> Self:
        self._previous_handler = signal.signal(signal.SIGINT, self._interrupt)
        return super().__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        signal.signal(signal.SIGINT, self._previous_handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stop:  # exit without an exception, which could be raised amid the threads of a computation
            if self.console.is_terminal:
                self._bars.stop()
            hint = f"; to resume: {self.resume_command}" if self.resume_command else ""
            os.write(2, f"stopped at once{hint}\n".encode())  # the console may be amid another line
            os._exit(130)
        self.stop = True
        self.console.print("stopping after this round; Ctrl-C again stops at once", style="yellow")

    def watch(self, progress: Progress) -> bool:
        """Show the progress of a run; return whether it goes on, which it does not after Ctrl-C."""
        if progress.numbers != self._numbers:
            if self._numbers in self._tasks and not self._first_round:  # that bar was of the preparation
                self._tasks[progress.numbers] = self._tasks.pop(self._numbers)
            self._numbers, self._first_round, self._next_note = progress.numbers, 0, -math.inf
        if not self._first_round:
            self._start, self._first_round = time.monotonic(), progress.round
        ended = progress.round == progress.rounds
        if self.console.is_terminal:
            self._show_bar(progress, ended)
        elif progress.round and (ended or self._line_due()):
            self._show_line(progress, ended)
        return not self.stop

    def _rate(self, progress: Progress) -> float:
        """Rounds in a second."""
        return (progress.round - self._first_round) / max(time.monotonic() - self._start, 1e-9)

    def _show_bar(self, progress: Progress, ended: bool) -> None:
        start = time.monotonic()
        if ended or start > self._next_note:
            self._note = _note(progress)
            self._next_note = time.monotonic() + max(NOTE_SECONDS, NOTE_SHARE * (time.monotonic() - start))
        rate = _rate_text(self._rate(progress)) if progress.round else "preparing"
        title = f"variant{'s' * (len(progress.numbers) > 1)} {_place(progress)}"
        self._update_bar(progress.numbers, title, progress.round, progress.rounds, rate=rate, note=self._note)

    def _show_line(self, progress: Progress, ended: bool) -> None:
        rate = self._rate(progress)
        time_left = f"{(progress.rounds - progress.round) / rate:.0f} s left" if rate > 0 and not ended else ""
        place = f"[{_place(progress)}] round {progress.round}/{progress.rounds}"
        parts = ", ".join(part for part in (place, _rate_text(rate), time_left) if part)
        self._print_line(f"{parts}: {_note(progress)}")


def _rate_text(rate: float) -> str:
    return f"{rate:.1f} rounds/s" if rate > 0 else ""


def _note(progress: Progress) -> str:
    """The variants that run now with the first metric of each, epsilons, and the rounds that budgets allow."""
    from fedhdp.privacy.accounting import format_epsilon, pluralize

    parts = [_variants(progress)]
    for name, epsilons in progress.epsilon().items():
        if epsilons[1] < math.inf:  # without noise there is nothing to watch
            bounds = dict.fromkeys(format_epsilon(epsilon, 2) for epsilon in epsilons)
            parts.append(f"ε {name} {'–'.join(bounds)}")
    for name, rounds in progress.rounds_left().items():
        if rounds < math.inf:
            parts.append(f"{name} has {pluralize(int(rounds))} left")
    return "; ".join(parts)


def _place(progress: Progress) -> str:
    """Which of all variants run now: 3/9, 1–2/9 or 1, 3/9."""
    first, last = progress.numbers[0], progress.numbers[-1]
    follow_each_other = last - first == len(progress.numbers) - 1
    numbers = f"{first}–{last}" if follow_each_other and last > first else ", ".join(map(str, progress.numbers))
    return f"{numbers}/{progress.variants}"


def _variants(progress: Progress) -> str:
    """Each variant by its name, with its value once there is one; of many how many there are, and the best."""
    names, metric, unit = progress.names, progress.metric, "%" if progress.metric.percent else ""
    values = [f"{metric.format(value, 1)}{unit}" for value in progress.values]
    if len(values) < len(names):  # undefined for one of them
        values = []
    if len(names) <= NAMED:
        shown = [" ".join(pair) for pair in zip(names, values, strict=True)] if values else names
        return ", ".join(shown) + (f" {metric.name}" if values else "")
    count = f"{len(names)} variants, {names[0]} to {names[-1]}"
    if not values:
        return count
    best = (max if metric.higher_is_better else min)(range(len(values)), key=progress.values.__getitem__)
    return f"{count}, the best {names[best]} {values[best]} {metric.name}"
