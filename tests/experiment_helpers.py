"""The tiny experiment, the command line in this process or another, and the comparison of two runs."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from fedhdp.experiments import Experiment, Progress, from_toml
from fedhdp.results import read_arrays

TINY = Path(__file__).parent / "tiny.toml"
FEDHDP = [sys.executable, "-m", "fedhdp"]


def tiny(**changes: object) -> Experiment:
    """The tiny experiment, changed."""
    return replace(from_toml(TINY.read_text(), "tiny.toml"), **changes)


def keep_going(progress: Progress) -> bool:
    """Watch a run without stopping it."""
    return True


def files_of(directory: Path) -> dict[Path, bytes]:
    """The content of every file."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_same_run(first: Path, second: Path) -> None:
    """Histories and models of two runs of the tiny experiment are equal to the bit."""
    for variant in ("dp-fedavg", "fedhdp"):
        assert (first / variant / "history.csv").read_bytes() == (second / variant / "history.csv").read_bytes()
        first_model, second_model = (read_arrays(run / variant / "model.npz") for run in (first, second))
        assert first_model.keys() == second_model.keys()
        for name in first_model:
            np.testing.assert_array_equal(first_model[name], second_model[name])


class Finished(NamedTuple):
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


def command(*arguments: object) -> Finished:
    """Run the command line in this process."""
    from fedhdp.cli import main

    class Stream(io.TextIOWrapper):
        """A text stream in memory, with the buffer that JSON is written to."""

        def __init__(self) -> None:
            super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    stdout, stderr = Stream(), Stream()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sys, "argv", ["fedhdp", *map(str, arguments)])
        stack.enter_context(contextlib.redirect_stdout(stdout))
        stack.enter_context(contextlib.redirect_stderr(stderr))
        with pytest.raises(SystemExit) as ended:
            main()
    texts = (stream.buffer.getvalue().decode() for stream in (stdout, stderr))  # type: ignore[attr-defined]
    return Finished(int(ended.value.code or 0), *texts)


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start the command line in another process, which is killed at the end of the block."""
    with subprocess.Popen([*FEDHDP, *map(str, arguments)], stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()
