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
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fedhdp.cli._output import error_console

if TYPE_CHECKING:
    from fedhdp.experiments.batch import Progress

LINE_SECONDS = 10.0  # between plain lines
NAMED = 3  # variants that run together, up to which each is named
NOTE_SECONDS = 0.5  # between notes in a terminal, at least
NOTE_SHARE = 20  # notes, which state epsilons, take at most one part in this many of the time


class _Display:
    """A bar for each task in a terminal; elsewhere lines, of which one is due every ten seconds."""

    def __init__(self, console: Console, *columns: ProgressColumn):
        self.console = console
        self._bars = Bars(TextColumn("{task.description}", markup=False), *columns, console=console)
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
        self._bar_width = 24 if console.width >= 110 else 8
        super().__init__(
            console,
            BarColumn(bar_width=self._bar_width),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False),
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
        note = self._cut_note(progress)
        self._update_bar(progress.numbers, _title(progress), progress.round, progress.rounds, rate=rate, note=note)

    def _show_line(self, progress: Progress, ended: bool) -> None:
        rate = self._rate(progress)
        left = f"{(progress.rounds - progress.round) / rate:.0f} s left" if rate > 0 and not ended else ""
        variants = f"[{_numbers(progress.numbers)}/{progress.variants}] {_title(progress)}"
        place = f"{variants}: round {progress.round}/{progress.rounds}"
        parts = [place, _rate_text(rate), left, _note(progress)]
        self._print_line(", ".join(part for part in parts if part))

    def _cut_note(self, progress: Progress) -> str:
        """As much of the note as fits behind the other columns."""
        columns = len(_title(progress)) + self._bar_width + 2 * len(str(progress.rounds))
        room = self.console.width - columns - len(" 999.9 rounds/s 00:00 ") - 3
        if len(self._note) <= room:
            return self._note
        return f"{self._note[: room - 1]}…" if room > 10 else ""


def _rate_text(rate: float) -> str:
    return f"{rate:.1f} rounds/s" if rate > 0 else ""


def _note(progress: Progress) -> str:
    """The first metric of each variant, epsilons and the rounds that budgets allow; ranges where these are many."""
    from fedhdp.privacy.accounting import format_epsilon, pluralize

    metric, unit = progress.metric, "%" if progress.metric.percent else ""
    parts = []
    if progress.values and len(progress.names) <= NAMED:
        parts.append(f"{metric.name} {', '.join(f'{metric.format(value, 1)}{unit}' for value in progress.values)}")
    elif progress.values:
        parts.append(f"{metric.name} {_range([metric.format(end(progress.values), 1) for end in (min, max)])}{unit}")
    for name, epsilons in progress.epsilon().items():
        if epsilons != (math.inf, math.inf):  # of who opted out there is nothing to watch
            parts.append(f"ε {name} {_range([format_epsilon(epsilon, 2) for epsilon in epsilons])}")
    for name, rounds in progress.rounds_left().items():
        if rounds < math.inf:
            parts.append(f"{name} has {pluralize(int(rounds))} left")
    return ", ".join(parts)


def _numbers(numbers: tuple[int, ...]) -> str:
    """The numbers of the variants that run now: 3, 1–2 or 1, 3."""
    first, last = numbers[0], numbers[-1]
    follow_each_other = last - first == len(numbers) - 1
    return f"{first}–{last}" if follow_each_other and last > first else ", ".join(map(str, numbers))


def _title(progress: Progress) -> str:
    """The variants that run now: each by its name, or the first and the last of many."""
    names = progress.names
    return ", ".join(names) if len(names) <= NAMED else f"{len(names)} variants, {names[0]} to {names[-1]}"


def _range(ends: list[str]) -> str:
    return "–".join(dict.fromkeys(ends))
